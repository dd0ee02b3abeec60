"""Every launcher with every set of arguments that decides what is compiled, for aot.py."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

import fusedcomp.kernels
from fusedcomp.kernels.accumulate import ACCUMULATE
from fusedcomp.kernels.digits import BINS
from fusedcomp.kernels.headers import HEADER_WORDS, TRAILER_WORDS
from fusedcomp.kernels.sample import SAMPLES
from fusedcomp.kernels.segments import WORDS, Operands, Segments
from fusedcomp.kernels.tune import COUNTERS, MAGNITUDES

MODULES = [
    importlib.import_module(f"fusedcomp.kernels.{module.name}")
    for module in pkgutil.iter_modules(fusedcomp.kernels.__path__)
    if not module.ispkg
]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a bucket and of what is sent for it. Triton compiles an integer differently if it is 1, a multiple of
    16, or needs 64 bits, and a pointer if it is not a multiple of 16."""

    numels: tuple[int, ...]
    world: int
    k: int
    capacity: int
    shift: int = 0  # of what lies inside another buffer, in elements past a 16-byte boundary
    device: str = "cpu"  # of what is as large as k or the capacity


_ODD = (70001, 2048, *[5] * 33)  # two pages, and two words of presence bits

SIZES = {
    "odd": Sizes(_ODD, world=3, k=37, capacity=99, shift=1),
    "one": Sizes((1,), world=1, k=1, capacity=1),
    "round": Sizes((2048,) * 512, world=16, k=64, capacity=256),
    "huge": Sizes(_ODD, world=3, k=2**31 + 1, capacity=2**31 + 1, device="meta"),
}

Overrides = dict[str, Any]


def without(*names: str) -> list[Overrides]:
    """With these arguments, and with None in their place."""
    return [{}, dict.fromkeys(names)]


VELOCITIES = ("velocity", "velocity_in", "velocity_out")
MEMORY = [
    {"accumulate": name} | ({} if name in ("momentum", "nesterov") else dict.fromkeys(VELOCITIES))
    for name in reversed(ACCUMULATE)
]
DECAY = [{}, {"weight_decay": 0.0}]
# Trust ratios come from norms: never without them. For want of choices of their own, the scope and the scale that is a
# number go with everything.
ALL = {"grad_scale": -1.0, "per_tensor": True}
NO_TRUST = {"trust": None, "partials": None}
LEAST = NO_TRUST | {"scales": None, "parity": None}
GUARDS = [ALL, {"scales": None, "parity": None}, NO_TRUST | {"scales": None}, NO_TRUST | {"parity": None}, LEAST]
UNWEIGHTED = {"weights": None}
DRAWN = {"weights": torch.zeros(1, dtype=torch.int32)}
COUNTED = [ALL, ALL | DRAWN, LEAST | DRAWN, LEAST, *(guard | UNWEIGHTED | {"counters": None} for guard in GUARDS[1:])]
HALF = [{"half_states": True}, {}]
ELEMENTS = [{"dtype": dtype} for dtype in (torch.float16, torch.bfloat16, torch.float32)]
SIGNED = {"signed": True}
WIRE = [{"wire": dtype} for dtype in (torch.float16, torch.bfloat16, torch.float32)]
# Types are a matter of loads and stores, whatever is done in between: each with all choices, and with the least.
TYPES = [half | element for element in ELEMENTS for half in HALF]
NARROW = [{"wire": torch.bfloat16}]
SCOPE = [{"per_tensor": True}, {"per_tensor": False, "parity": None}]
FAILED = [{"failed": True}, {"failed": False}]
FALLBACK = [{"fallback": True}, {"fallback": True, "scales": None}, {"fallback": False, "scales": None}]
VERDICT = [{"headers": None}, {"found_inf": None}, {"headers": None, "found_inf": None}]  # not both
CLIPPED = [{"per_tensor": True}, {}, {"squares": None}]
DENSE_MOMENTUM = [{"nesterov": True}, {"nesterov": False}, {"nesterov": False, "momentum_buffer": None}]

# Bisection and a choice for every type on the wire; maxima; a single one.
BLOCKS = [
    {"per_block": 99, "masking": True, "wire": torch.float16},
    {"per_block": 8, "masking": True, "wire": torch.bfloat16},
    {"per_block": 2, "masking": True},
    {"per_block": 99, "masking": False},
    {"per_block": 1, "masking": False},
]

# Launcher -> independent choices, the last of which may be types. All combinations are compiled for the odd sizes, but
# of types with the first (all there is) and the last (the least) of the others; for the other sizes, to which the
# choices are indifferent, the first and the last of all.
CASES: dict[str, tuple[list[Overrides], ...]] = {
    "sample_threshold": (MEMORY, DECAY, [ALL, LEAST | DRAWN, LEAST, LEAST | UNWEIGHTED], TYPES),
    "compress": (MEMORY, DECAY, COUNTED, TYPES),
    "compress_all": (MEMORY, DECAY, [*GUARDS[:3], LEAST], TYPES),
    "compress_blocks": (MEMORY, BLOCKS, [ALL, LEAST | {"weight_decay": 0.0}], TYPES),
    "settle": (MEMORY, DECAY, [ALL, LEAST], TYPES),
    "choose_entries": (without("scale"),),
    "choose_draws": (),
    "list_candidates": (),
    "select_candidates": ([{}, DRAWN, UNWEIGHTED], without("parity"), HALF),
    "pack_payload": (SCOPE, without("velocity"), [HALF[0], {"drawn": True}, SIGNED, HALF[1]], WIRE),
    "apply_payloads": (VERDICT, [SIGNED, *WIRE], ELEMENTS),
    "pack_dense": (without("scales"), ELEMENTS),
    "decay_params": ([{"nesterov": True}, {"nesterov": False}, {"nesterov": False, "buffer": None}],),
    "take_drawn": (without("velocity"), without("parity"), [{"unbiased": True}, {"unbiased": False}], HALF),
    "put_drawn": (ELEMENTS,),
    "sum_payloads": (WIRE,),
    "keep_rest": (without("parity"),),
    "mask_winners": (without("parity"),),
    "pack_narrow": (NARROW, without("scales"), without("parity"), ELEMENTS),
    "end_narrow": (NARROW,),
    "sum_narrow": (NARROW,),
    "count_reaching": (),
    "estimate_threshold": (HALF,),
    "meet_thresholds": ([{"per_tensor": True}, {"per_tensor": False}], without("found_inf")),
    "cut_payload": (without("parity"), WIRE),
    "join_pieces": (WIRE,),
    "update_dense": (DENSE_MOMENTUM, DECAY, without("trust"), ELEMENTS),
    "block_norms": (ELEMENTS,),
    "reduce_norms": (),
    "trust_ratios": (FALLBACK, ELEMENTS),
    "commit_norms": (),
    "write_header": ([{"wire_dtype": dtype} for dtype in (torch.float16, torch.float32)],),
    "write_failure": (),
    "read_headers": (without("nonfinite"),),
    "write_trailer": (FAILED,),
    "read_trailer": (without("nonfinite"),),
    "conclude": (),
    "annul": (),
    "gradient_squares": (without("factors"), ELEMENTS),
    "gradient_scales": (CLIPPED, without("loss_scale"), without("factors")),
}


def arguments(
    launcher: str,
    sizes: Sizes,
    *,
    per_tensor: bool = False,
    half_states: bool = False,
    dtype: torch.dtype = torch.float32,
    wire: torch.dtype = torch.float32,
) -> Overrides:
    """A value for every parameter name that a launcher has."""
    device = torch.device("cpu")
    segments = Segments.build(sizes.numels, device, per_tensor=per_tensor)
    params = [torch.empty(n, dtype=dtype) for n in sizes.numels]
    operands = Operands(params)
    operands.update(params)
    count, blocks, pages = len(sizes.numels), segments.num_blocks, segments.num_pages

    def inside(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """A part of a larger buffer."""
        whole = torch.empty(torch.Size(shape).numel() + sizes.shift, dtype=dtype, device=device)
        return whole[sizes.shift :].view(shape)

    def i32(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def i64(*shape: int, device: str = "cpu") -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    state = torch.empty(segments.padded_numel, dtype=torch.bfloat16 if half_states else torch.float32)
    scopes = len(segments.scope_numels)
    of_all = launcher in ("apply_payloads", "sum_payloads", "join_pieces")
    rows = (sizes.world,) if of_all else ()  # the payloads of all ranks, or one's own
    out_rows = (sizes.world,) if launcher == "cut_payload" else ()
    words = HEADER_WORDS + -(-count // 32)
    payload_indices = inside(*rows, sizes.k, dtype=torch.int16, device=sizes.device)
    return {
        "segments": segments,
        "operands": operands,
        # states and tables
        **dict.fromkeys((*VELOCITIES, "residual", "residual_in", "residual_out"), state),
        "momentum_buffer": torch.empty(segments.padded_numel),
        "weights": torch.empty(segments.padded_numel),
        "buffer": torch.empty(segments.padded_numel),
        "sums": None if dtype == torch.float32 else torch.empty(segments.padded_numel),
        "trust": torch.empty(count),
        "seed": i32(1),
        "flag": i32(1),
        "status": i32(3),
        "parity": i32(1),
        "nonfinite": i32(1),
        "found_inf": torch.empty(1),
        "lr": torch.empty(1),
        "present": i32(count),
        "fallback": False,
        "partials": torch.empty(blocks, 2),  # of gradients alone half as large
        "scales": torch.empty(count),
        "squares": torch.empty(count),
        "factors": torch.empty(count),
        "loss_scale": torch.empty(1),
        # selection
        "strata": i64(sizes.k, 2, device=sizes.device),
        "samples": i64(SAMPLES * scopes, 2),
        "groups": i32(scopes, 3),
        "thresholds": i64(scopes),
        "widths": i32(scopes),
        "ranks": i64(scopes),
        "aims": i64(scopes),
        "counts": i32(blocks),
        "marks": i32(blocks, WORDS),
        "offsets": i64(blocks + 1),
        "block_starts": i64(blocks + 1),
        "keys": i64(SAMPLES * scopes if launcher == "estimate_threshold" else sizes.capacity, device=sizes.device),
        "bounds": i64(scopes, 4),
        "near": i64(sizes.capacity, device=sizes.device),
        "near_counts": i32(scopes),
        "model_key": i64(1),
        "asked": i64(scopes),
        "logs": i64(scopes),
        "histograms": i32(scopes, BINS),
        "tickets": i32(scopes),
        "counters": i32(COUNTERS, MAGNITUDES),
        "costs": torch.empty(2, dtype=torch.float64),
        "shape": i64(2),
        "wanted": i32(1),
        "scale": torch.empty(1),
        "room": sizes.k,
        "numel": segments.numel,
        "shared": i64(1 + 2 * blocks),
        # what travels
        "starts": inside(*rows, pages + 1, dtype=torch.int32),
        "values": inside(*rows, sizes.k, dtype=wire, device=sizes.device),
        "indices": payload_indices if rows or out_rows else i64(sizes.capacity, device=sizes.device),
        "out_indices": inside(*out_rows, sizes.k, dtype=torch.int16, device=sizes.device),
        "out_starts": inside(*out_rows, pages + 1, dtype=torch.int32),
        "out_values": inside(*out_rows, sizes.k, dtype=wire, device=sizes.device),
        **dict.fromkeys(("winner_starts", "sent_starts"), inside(pages + 1, dtype=torch.int32)),
        **dict.fromkeys(("winner_indices", "sent_indices"), payload_indices),
        "vector": torch.empty(segments.padded_numel),
        "residuals": torch.empty(2, segments.padded_numel),
        "place": 1,
        "places": 4,
        "header": inside(words, dtype=torch.int32),
        "headers": inside(sizes.world, words, dtype=torch.int32),
        "sent": torch.empty(segments.numel),
        "mean": torch.empty(segments.numel),
        "rows": inside(sizes.world, segments.numel, dtype=wire),
        "flat": torch.empty(segments.numel),
        "trailer": inside(count + TRAILER_WORDS),
        "norms": inside(2, count),
        "received": inside(sizes.world, 2 * count),
        # numbers
        "grad_scale": 1.0,
        "inverse_world": 1.0 / sizes.world,
        "world": sizes.world,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "coefficient": 0.001,
        "eps": 1e-8,
        "max_norm": 1.0,
        "per_tensor": per_tensor,
        "entries": sizes.k,
        "signed": False,
        "drawn": False,
        "coarse": True,
    }


BUILT = {"per_tensor", "half_states", "dtype", "wire"}  # what tensors are built with, not arguments


def calls() -> Iterator[tuple[Callable[..., None], Overrides]]:
    """Every launcher with every set of arguments."""
    for name, choices in CASES.items():
        launcher = next(function for module in MODULES if (function := vars(module).get(name)))
        types = choices[-1] if choices and choices[-1] in (TYPES, ELEMENTS, WIRE) else [{}]
        others = list(product(*(choices[:-1] if types != [{}] else choices)))
        ends = [(*others[0], types[0]), (*others[-1], types[-1])]
        of_types = [(*other, kind) for other in (others[0], others[-1]) for kind in types]
        for sizes in SIZES.values():
            every = [(*other, types[-1]) for other in others] + of_types
            for combination in every if sizes is SIZES["odd"] else ends:
                overrides = {key: value for choice in combination for key, value in choice.items()}
                built = {key: overrides.pop(key) for key in BUILT & overrides.keys()}
                values = arguments(name, sizes, **built) | overrides
                yield launcher, {parameter: values[parameter] for parameter in inspect.signature(launcher).parameters}

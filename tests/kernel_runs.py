"""Running kernels and twins on the same bucket, and comparing all that they wrote."""

import importlib
from types import ModuleType

import torch
from torch import Tensor

from fusedcomp.kernels.sample import SAMPLES
from fusedcomp.kernels.segments import SIGNED_PAGE
from kernel_cases import POISON, Case, scratch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUM = {"rtol": 1e-5, "atol": 1e-6}  # sums of squares: another order of additions

NAMES = (
    "sample", "compress", "tune", "refine", "pack", "apply", "norms", "dense", "headers", "clip", "verdict", "decay",
    "draws", "merge", "shares", "pieces", "sidco", "narrow",
)  # fmt: skip
KERNELS = {name: importlib.import_module(f"fusedcomp.kernels.{name}") for name in NAMES}
TWINS = {name: importlib.import_module(f"fusedcomp.kernels.reference.{name}") for name in NAMES}
Modules = dict[str, ModuleType]

TYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {"accumulate": "momentum", "grad_scale": 1.0, "weight_decay": 1e-2, "momentum": 0.9}


def i64(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sample_table(case: Case, most: int = 300) -> tuple[Tensor, Tensor, list[int]]:
    """Samples, program groups, and how many samples every scope has."""
    rows, groups, in_scope = [], [], []
    for scope in range(len(case.segments.scope_numels)):
        mine = [
            (s, i)
            for s, n in enumerate(case.segments.numels)
            if case.segments.scope_of(s) == scope
            for i in range(0, n, -(-n // most))
        ]
        in_scope.append(len(mine))
        mine += [(-1, 0)] * (-len(mine) % SAMPLES)
        first, last = len(rows) // SAMPLES, (len(rows) + len(mine)) // SAMPLES
        groups += [(scope, first, last)] * (last - first)
        rows += mine
    return i64(*rows), torch.tensor(groups, dtype=torch.int32, device=DEVICE), in_scope


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        if name == "partials":
            torch.testing.assert_close(a[name], b[name], equal_nan=True, **SUM, msg=lambda m, n=name: f"{n}: {m}")
        else:
            left, right = a[name], b[name]
            if left.is_floating_point():  # NaNs are equal where the bits are of a NaN on both sides
                left, right = left.nan_to_num(nan=POISON), right.nan_to_num(nan=POISON)
            assert torch.equal(left, right), f"{name} differs at {(left != right).nonzero()[:5].tolist()}"


def halved(state: Tensor, parity: int | None) -> Tensor:
    """A state as half ``parity`` of two, the other poisoned; itself where there are no halves."""
    if parity is None:
        return state
    return torch.stack([state if half == parity else torch.full_like(state, POISON) for half in (0, 1)]).view(-1)


def written(state: Tensor, parity: int | None) -> Tensor:
    """The half that a step leaves its results in."""
    return state if parity is None else state.view(2, -1)[1 - parity]


def unread(before: Tensor, state: Tensor, parity: int | None) -> None:
    """The half that a step reads is as it was, bit for bit."""
    if parity is not None:
        bits = torch.int16 if state.itemsize == 2 else torch.int32
        assert torch.equal(state.view(2, -1)[parity].view(bits), before.view(bits))


def whole_pass(modules: Modules, case: Case, fraction: float, **step: object) -> dict[str, Tensor]:
    """sample -> compress -> list -> select -> pack, everything written comes back.

    ``parity``: states have two halves, of which the written one comes back.
    """
    options = STEP | step
    segments, operands = case.segments, case.operands()
    half = options.pop("parity", None)
    parity = None if half is None else i32(half)
    residual = halved(case.residual, half)
    velocity = halved(case.velocity, half) if options["accumulate"] in ("momentum", "nesterov") else None
    trust = case.trust if options.pop("with_trust", True) else None
    scales = case.scales if options.pop("with_scales", False) else None
    weights = sample_weights = case.weights if options.pop("with_weights", False) else None
    drawn = options.pop("drawn", False)
    if drawn:
        weights, sample_weights = i32(5), i32(6)
    masking, wire = options.pop("masking", True), options.pop("wire", torch.float32)
    scale = options.pop("scale", None)  # of signs
    ks = [max(1, round(n * fraction)) for n in segments.scope_numels]
    capacity, ranks = options.pop("capacity", segments.numel), i64(*ks)
    out = scratch(case, capacity, sum(ks), wire)
    if scale is not None:
        out["values"] = torch.tensor([scale], device=DEVICE)
        out["starts"] = out["starts"].new_full((segments.pages_of(SIGNED_PAGE) + 1,), -7)
    shared = out["histograms"], out["tickets"]
    samples, groups, in_scope = sample_table(case)
    sample_ranks = i64(*[min(n, max(1, round(2 * fraction * n) + 3)) for n in in_scope])
    out["sample_keys"] = torch.full((len(samples),), -7, dtype=torch.int64, device=DEVICE)
    thresholds, widths = i64(*[-7] * len(ks)), torch.zeros(len(ks), dtype=torch.int32, device=DEVICE)
    modules["sample"].sample_threshold(
        segments, operands, samples, groups, sample_ranks, (sample_ranks // 3).clamp(min=1), velocity, residual,
        sample_weights, trust, scales, case.seed, parity, out["sample_keys"], *shared, thresholds, widths, **options,
    )  # fmt: skip
    out["sampled_thresholds"] = thresholds.clone()
    modules["compress"].compress(
        segments, operands, velocity, residual, weights, thresholds, trust, scales, case.seed, parity, velocity,
        residual, out["counts"], out["marks"], out["partials"], out["flag"], **options,
    )  # fmt: skip
    out["residual_before_pack"] = written(residual, half).clone()
    modules["refine"].list_candidates(
        segments, out["counts"], out["marks"], out["scanned"], out["offsets"], out["indices"]
    )
    bounds, near = i64(*[(-7, -7, -7, -7)] * len(ks)), torch.full_like(out["keys"], -7)
    near_counts = torch.zeros(len(ks), dtype=torch.int32, device=DEVICE)
    modules["refine"].select_candidates(
        segments, out["offsets"], out["indices"], residual, weights, case.seed, parity, ranks, widths,
        out["histograms"], bounds, near, near_counts, out["tickets"], thresholds, out["keys"], out["flag"],
    )  # fmt: skip
    out["flag_before_pack"] = out["flag"].clone()
    assert not near_counts.any()
    modules["pack"].pack_payload(
        segments, operands, out["keys"], out["indices"], out["offsets"], thresholds, velocity if masking else None,
        residual, out["flag"], case.seed, parity, out["packed"],
        out["starts"], out["out_indices"], out["values"], out["header"], signed=scale is not None,
        drawn=drawn,
    )  # fmt: skip
    for name in ("scanned", "packed"):  # left behind by the kernels alone
        del out[name]
    unread(case.residual, residual, half)
    out |= {"thresholds": thresholds, "residual": written(residual, half), "seed": case.seed, "velocity": case.velocity}
    if velocity is not None:
        unread(case.velocity, velocity, half)
        out["velocity"] = written(velocity, half)
    return out


def both(case: Case, fraction: float, **step: object) -> dict[str, Tensor]:
    twin = whole_pass(TWINS, case.copy(), fraction, **step)
    fast = whole_pass(KERNELS, case.copy(), fraction, **step)
    same(fast, twin)
    return fast

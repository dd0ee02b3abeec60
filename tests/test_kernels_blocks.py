"""BlockTopK's pass: kernels against twins, and the set that is sent against selection keys."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusedcomp.buffers import places_of
from fusedcomp.kernels.accumulate import ACCUMULATE
from fusedcomp.kernels.headers import HEADER_WORDS
from fusedcomp.kernels.reference.keys import selection_key
from fusedcomp.kernels.segments import BLOCK, PAGE
from fusedcomp.sizing import count_of_blocks
from kernel_cases import POISON, SIZES, Case, build
from kernel_runs import (
    DEVICE,
    KERNELS,
    STEP,
    TWINS,
    TYPES,
    Modules,
    halved,
    i32,
    same,
    unread,
    written,
)

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
seeds = st.integers(0, 2**31 - 1)

# ---- kernels and twins ---------------------------------------------------------------------------------------------


def block_pass(modules: Modules, case: Case, per_block: int, **step: Any) -> dict[str, Tensor]:
    """The pass and the header; everything written comes back. ``parity``: of two halves the written one."""
    options = STEP | step
    segments, operands = case.segments, case.operands()
    half = options.pop("parity", None)
    parity = None if half is None else i32(half)
    residual = halved(case.residual, half)
    velocity = halved(case.velocity, half) if options["accumulate"] in ("momentum", "nesterov") else None
    trust = case.trust if options.pop("with_trust", True) else None
    scales = case.scales if options.pop("with_scales", False) else None
    masking, wire = options.pop("masking", True), options.pop("wire", torch.float32)
    places, k = places_of(per_block, segments), count_of_blocks(per_block, segments.numels)
    assert int(places[-1]) == k
    out = {
        "partials": torch.full((segments.num_blocks, 2), POISON, device=DEVICE),
        "flag": i32(0),
        "out_indices": torch.full((k,), -7, dtype=torch.int16, device=DEVICE),
        "values": torch.full((k,), POISON, dtype=wire, device=DEVICE),
        "header": torch.full((HEADER_WORDS + -(-len(segments.numels) // 32),), -7, dtype=torch.int32, device=DEVICE),
    }
    modules["compress"].compress_blocks(
        segments, operands, velocity, residual, places, trust, scales, case.seed, parity, velocity, residual,
        out["out_indices"], out["values"], out["partials"], out["flag"],
        **options, per_block=per_block, masking=masking,
    )  # fmt: skip
    out["flag_before_header"] = out["flag"].clone()
    modules["headers"].write_header(operands, out["flag"], case.seed, out["header"], entries=k, wire_dtype=wire)
    unread(case.residual, residual, half)
    out |= {"residual": written(residual, half), "velocity": case.velocity, "seed": case.seed, "places": places}
    if velocity is not None:
        unread(case.velocity, velocity, half)
        out["velocity"] = written(velocity, half)
    return out


def both(case: Case, per_block: int, **step: Any) -> dict[str, Tensor]:
    twin = block_pass(TWINS, case.copy(), per_block, **step)
    fast = block_pass(KERNELS, case.copy(), per_block, **step)
    same(fast, twin)
    return fast


@pytest.mark.parametrize("per_block", [1, 2, 8, 9, 205])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: str, per_block: int) -> None:
    both(build(SIZES[size], device=DEVICE, shift=1), per_block)


@pytest.mark.parametrize("per_block", [2, 33])
@pytest.mark.parametrize("accumulate", ACCUMULATE)
@pytest.mark.parametrize("options", [
    {},
    {"masking": False, "parity": 0, "with_trust": False},
    {"parity": 1, "with_scales": True, "weight_decay": 0.0},
    {"grad_scale": -1.0, "with_trust": False, "weight_decay": 0.0},
], ids=["trust", "unmasked", "scaled", "plain"])  # fmt: skip
def test_options(accumulate: str, options: dict[str, Any], per_block: int) -> None:
    both(build(SIZES["mixed"], device=DEVICE, missing=(3,)), per_block, accumulate=accumulate, **options)


@pytest.mark.parametrize("per_block", [2, 33])
@pytest.mark.parametrize("wire", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_types(state_dtype: torch.dtype, dtype: torch.dtype, wire: torch.dtype, per_block: int) -> None:
    case = build(SIZES["mixed"], device=DEVICE, dtype=dtype, state_dtype=state_dtype, missing=(1,))
    both(case, per_block, wire=wire, parity=1)


@pytest.mark.parametrize("per_block", [1, 2, 8, 9, 2000, 2048])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", ["ties", "zeros"])
def test_of_equal_magnitudes_the_hash_decides(values: str, state_dtype: torch.dtype, per_block: int) -> None:
    """Down to blocks that are zero all over: still so many entries, all distinct."""
    case = build((2048, 2049, 5), device=DEVICE, values="ties", state_dtype=state_dtype)
    if values == "zeros":
        case.residual.zero_()
        case.grads = [torch.zeros_like(g) for g in case.grads if g is not None]
    out = both(case, per_block, accumulate="residual", with_trust=False, weight_decay=0.0)
    for first, last in zip(out["places"][:-1], out["places"][1:], strict=True):
        index = out["out_indices"][first:last].int() & 0xFFFF
        assert (index.diff() > 0).all()


@pytest.mark.parametrize("values", ["nan", "inf"])
@pytest.mark.parametrize("wire", TYPES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_block", [2, 9])
def test_what_is_not_finite_is_told_and_sent(
    per_block: int, state_dtype: torch.dtype, wire: torch.dtype, values: str
) -> None:
    case = build((2049, 5000), device=DEVICE, values=values, state_dtype=state_dtype)
    out = both(case, per_block, wire=wire)
    assert int(out["flag_before_header"]) == 1
    assert int(out["header"][2]) == 1
    assert int((~out["values"].float().isfinite()).sum()) == 1
    assert out["residual"].isfinite().all()  # what was not finite has gone whole


def test_a_residual_that_rounding_makes_infinite_is_told() -> None:
    """The largest fp32 is beyond bf16: found by the look at what is kept, not at the gradient."""
    case = build((2048,), device=DEVICE, state_dtype=torch.bfloat16)
    case.residual.zero_()
    case.grads = [torch.full((2048,), 3.4028234e38, device=DEVICE)]
    out = both(case, 2, accumulate="residual", with_trust=False, weight_decay=0.0)
    assert int(out["flag_before_header"]) == 1


def test_without_a_gradient_zeros_go_to_distinct_places_and_states_stay() -> None:
    case = build((2049, 70001, 3), device=DEVICE, missing=(1,))
    out = both(case, 9)
    blocks = slice(int(case.segments.first_blocks[1]), int(case.segments.first_blocks[2]) + 1)
    places, where = out["places"][blocks], case.segments.slices[1]
    assert not out["values"][places[0] : places[-1]].any()
    for number, (first, last) in enumerate(zip(places[:-1].tolist(), places[1:].tolist(), strict=True)):
        block = blocks.start + number
        expected = torch.arange(last - first, device=DEVICE) + block * BLOCK % PAGE
        assert torch.equal(out["out_indices"][first:last].int() & 0xFFFF, expected.int())
    assert torch.equal(out["residual"][where], case.residual[where])
    assert torch.equal(out["velocity"][where], case.velocity[where])
    assert int(out["header"][HEADER_WORDS]) == 0b101


@given(seed=seeds, per_block=st.integers(1, 64), half=st.booleans())
def test_the_set_is_that_of_the_selection_keys(seed: int, per_block: int, half: bool) -> None:
    """Against torch.topk of each block's keys, ties and all; where magnitudes are distinct, of those."""
    case = build((2048, 700), state_dtype=torch.bfloat16 if half else torch.float32, device=DEVICE)
    generator = torch.Generator().manual_seed(seed)
    for where in case.segments.slices:
        case.residual[where] = torch.randn(where.stop - where.start, generator=generator)
    case.grads = [torch.zeros_like(p) for p in case.params]
    before, step = case.residual.clone(), case.seed.clone()
    out = block_pass(TWINS, case, per_block, accumulate="residual", with_trust=False, weight_decay=0.0)
    for block, where in enumerate(case.segments.slices):
        index = torch.arange(where.start, where.stop, device=DEVICE)
        mine = slice(int(out["places"][block]), int(out["places"][block + 1]))
        sent = out["out_indices"][mine].int()  # both are on the first page
        k = min(per_block, where.stop - where.start)
        keys = selection_key(before[where].float(), index, step, half)
        assert torch.equal(sent.long(), index[keys.topk(k).indices].sort().values)
        magnitudes = before[where].float().abs()
        if magnitudes.unique().numel() == magnitudes.numel():
            assert torch.equal(sent.long(), index[magnitudes.topk(k).indices].sort().values)

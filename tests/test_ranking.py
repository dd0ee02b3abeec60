"""Entries ranked by weight * |residual|: kernels against twins, and what is sent against torch.topk in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_cases import SIZES, Case, build
from kernel_runs import DEVICE, KERNELS, TWINS, TYPES, both, same, whole_pass

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

PAGE = 65536


def sent(out: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Padded indices and values of what the payload holds."""
    starts = out["starts"].long()
    count = int(starts[-1])
    page = torch.arange(len(starts) - 1, device=starts.device).repeat_interleave(starts[1:] - starts[:-1])
    return page * PAGE + (out["out_indices"][:count].long() & 0xFFFF), out["values"][:count]


def is_conserved(out: dict[str, Tensor]) -> bool:
    """Do what was sent, the value itself, and what is kept add up to what was there, bit for bit?"""
    index, values = sent(out)
    whole = out["residual"].float().index_put((index,), out["residual"][index].float() + values.float())
    return len(index.unique()) == len(index) and torch.equal(whole, out["residual_before_pack"].float())


def largest(case: Case, out: dict[str, Tensor], fraction: float) -> list[int]:
    """The padded indices of the largest weight * |residual| of every scope, in float64."""
    segments, found = case.segments, []
    ranks = case.weights.double() * out["residual_before_pack"].double().abs()
    for scope, numel in enumerate(segments.scope_numels):
        inside = torch.zeros(segments.padded_numel, dtype=torch.bool, device=ranks.device)
        for segment, where in enumerate(segments.slices):
            inside[where] = segments.scope_of(segment) == scope
        mine = torch.where(inside, ranks, -1.0)
        found += mine.topk(max(1, round(numel * fraction))).indices.tolist()
    return sorted(found)


@pytest.mark.parametrize("per_tensor", [False, True], ids=["bucket", "tensor"])
@pytest.mark.parametrize("name", SIZES)
def test_weighted_pass_over_sizes(name: str, per_tensor: bool) -> None:
    case = build(SIZES[name], device=DEVICE, per_tensor=per_tensor)
    out = both(case, 0.02, with_weights=True)
    assert is_conserved(out)
    assert sent(out)[0].tolist() == largest(case, out, 0.02)


@pytest.mark.parametrize("parity", [None, 0, 1])
@pytest.mark.parametrize("state_dtype", TYPES[:2])
@pytest.mark.parametrize("dtype", TYPES)
def test_weighted_pass_over_types(dtype: torch.dtype, state_dtype: torch.dtype, parity: int | None) -> None:
    """States of 16 bits too are ranked by a product of 32."""
    per_tensor, scales = dtype == torch.float16, parity == 1
    case = build((3, 2048, 5000, 2049), device=DEVICE, per_tensor=per_tensor, dtype=dtype, state_dtype=state_dtype)
    out = both(case, 0.02, with_weights=True, with_trust=not scales, with_scales=scales, parity=parity)
    assert is_conserved(out)
    assert sent(out)[0].tolist() == largest(case, out, 0.02)


@pytest.mark.parametrize("accumulate", ["none", "residual", "momentum", "nesterov"])
def test_weighted_pass_over_memories(accumulate: str) -> None:
    case = build(SIZES["mixed"], device=DEVICE, missing=(3,), shift=1)
    out = both(case, 0.05, accumulate=accumulate, with_weights=True, wire=torch.bfloat16)
    assert not set(range(*case.segments.slices[3].indices(1 << 40))) & set(sent(out)[0].tolist())


@pytest.mark.parametrize("values", ["ties", "clustered", "nan", "inf"])
@pytest.mark.parametrize("state_dtype", TYPES[:2])
def test_weighted_unusual_values(values: str, state_dtype: torch.dtype) -> None:
    """What is not finite is above all others at the least weight, and sets the flag."""
    case = build((4096, 3000, 6144), device=DEVICE, values=values, state_dtype=state_dtype)
    broken = case.segments.slices[2].start + 3072
    case.weights[broken] = 1e-30
    outs = [whole_pass(modules, case.copy(), 0.01, with_weights=True) for modules in (KERNELS, TWINS)]
    if (values, state_dtype) != ("nan", torch.bfloat16):  # whose bits are torch's own on a CPU
        same(*outs)
    for out in outs:
        assert int(out["flag_before_pack"]) == (values in ("nan", "inf")) == int(out["header"][2])
        assert (broken in sent(out)[0].tolist()) == (values in ("nan", "inf"))


def test_a_full_candidate_buffer_keeps_the_rest() -> None:
    case = build((10243,), device=DEVICE)
    out = both(case, 0.05, capacity=100, with_weights=True)
    assert is_conserved(out)
    assert len(sent(out)[0]) == 100


@pytest.mark.parametrize("values", ["normal", "ties"])
@pytest.mark.parametrize("state_dtype", TYPES[:2])
def test_weights_of_one_are_none(values: str, state_dtype: torch.dtype) -> None:
    """The same payload and states, bit for bit; only keys of 16-bit states are laid out otherwise."""
    case = build((4096, 3000, 6144), device=DEVICE, values=values, state_dtype=state_dtype)
    case.weights.fill_(1.0)
    weighted, plain = (both(case, 0.01, with_weights=with_weights) for with_weights in (True, False))
    for name in ("starts", "out_indices", "values", "residual", "velocity"):
        assert torch.equal(weighted[name], plain[name]), name


@given(
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    fraction=st.floats(1e-3, 0.9),
    spread=st.integers(0, 12),
    half=st.booleans(),
    per_tensor=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_the_largest_products_are_sent(
    numels: list[int], fraction: float, spread: int, half: bool, per_tensor: bool
) -> None:
    """Whatever the weights: up to products that fp32 cannot tell apart; values whole; nothing lost."""
    state_dtype = torch.bfloat16 if half else torch.float32
    case = build(tuple(numels), device=DEVICE, per_tensor=per_tensor, state_dtype=state_dtype)
    case.weights.pow_(spread / 8)
    modules = KERNELS if DEVICE == "cuda" else TWINS
    out = whole_pass(modules, case.copy(), fraction, with_weights=True)
    assert is_conserved(out)
    index, values = sent(out)
    assert torch.equal(values, out["residual_before_pack"][index].float())
    ranks = case.weights.double() * out["residual_before_pack"].double().abs()
    expected = torch.tensor(largest(case, out, fraction), device=DEVICE)
    assert len(index) == len(expected)
    one_way = ranks[index].sort().values
    torch.testing.assert_close(one_way, ranks[expected].sort().values, rtol=2.0**-23, atol=0.0)
    products = ranks.float()
    if len(products.unique()) == len(products):
        assert index.tolist() == expected.tolist()

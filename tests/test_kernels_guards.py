"""What guards a step against its own gradients, kernels against twins: scales, clipping, states of two halves, the
verdict that undoes a step; without a GPU interpreted."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fusedcomp.kernels.headers import TRAILER_WORDS
from fusedcomp.kernels.segments import BLOCK, Operands
from kernel_cases import POISON, SIZES, Case, build, scratch
from kernel_runs import DEVICE, KERNELS, STEP, SUM, TWINS, TYPES, both, halved, i32, same, unread, whole_pass, written

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

BOTH = (KERNELS, TWINS)
STATES = TYPES[:2]
MODULES = pytest.mark.parametrize("modules", BOTH, ids=["kernel", "twin"])
NAN, INF = float("nan"), float("inf")


def f32(*values: float) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def multiplied(case: Case) -> Case:
    """The same bucket, its gradients multiplied beforehand."""
    other = case.copy()
    other.grads = [None if g is None else g.mul_(s) for g, s in zip(other.grads, case.scales, strict=True)]
    return other


# ---- scales --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("dtype", TYPES)
def test_scales_multiply_gradients(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """As if gradients had come multiplied: by powers of two, which gradients of 16 bits survive unrounded."""
    case = build((3, 2048, 5000, 2049), device=DEVICE, missing=(1,), dtype=dtype, state_dtype=state_dtype)
    case.scales = f32(0.5, NAN, 4.0, 2.0)  # nothing is there to be multiplied by NaN
    out = both(case, 0.02, with_scales=True, grad_scale=-1.0)
    same(out, whole_pass(KERNELS, multiplied(case), 0.02, grad_scale=-1.0))


@pytest.mark.parametrize("accumulate", ["none", "residual", "momentum", "nesterov"])
def test_scales_over_memories(accumulate: str) -> None:
    case = build(SIZES["mixed"], device=DEVICE, per_tensor=True)
    out = both(case, 0.05, with_scales=True, accumulate=accumulate)
    same(out, whole_pass(KERNELS, multiplied(case), 0.05, accumulate=accumulate))


@pytest.mark.parametrize("dtype", TYPES)
def test_dense_scales(dtype: torch.dtype) -> None:
    case = build((5, 2048, 3001, 1), device=DEVICE, missing=(2,), dtype=dtype)
    case.scales = f32(0.5, 4.0, NAN, 2.0)
    results = []
    for modules, mine in (*((m, case) for m in BOTH), (KERNELS, multiplied(case))):
        flat, flag = torch.full((case.segments.numel,), POISON, device=DEVICE), i32(0)
        scales = None if mine is not case else case.scales
        modules["dense"].pack_dense(case.segments, mine.operands(), scales, flat, flag, grad_scale=-1.0)
        results.append({"flat": flat, "flag": flag})
    same(*results[:2])
    same(*results[1:])
    assert not results[0]["flat"][case.segments.compact_slices[2]].any()
    assert not results[0]["flag"].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_first_norms_are_of_scaled_gradients(dtype: torch.dtype) -> None:
    case = build((1, 2048, 10243, 70001), device=DEVICE, missing=(1,), dtype=dtype)
    case.scales = f32(0.5, NAN, 2.0, 4.0)
    known, results = f32(0.0, 0.0, 4.0, 0.0, 0.0, 7.0, 9.0, 0.0).view(2, 4), []
    for modules, mine in (*((m, case) for m in BOTH), (KERNELS, multiplied(case))):
        trust = torch.full((4,), POISON, device=DEVICE)
        modules["norms"].trust_ratios(
            case.segments, mine.operands(), known, case.scales if mine is case else None, trust,
            coefficient=0.01, weight_decay=0.1, eps=1e-8, fallback=True,
        )  # fmt: skip
        results.append(trust)
    torch.testing.assert_close(results[0], results[1], **SUM)
    assert torch.equal(results[0], results[2])
    assert results[0][1] == 1.0


# ---- clipping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_factors", [False, True], ids=["", "factors"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", TYPES)
def test_gradient_squares(dtype: torch.dtype, shift: int, with_factors: bool) -> None:
    case, results = build((1, 2048, 10243, 33, 600001), device=DEVICE, missing=(3,), dtype=dtype, shift=shift), []
    for modules in BOTH:
        partials = torch.full((case.segments.num_blocks,), POISON, device=DEVICE)
        squares = torch.full((5,), POISON, device=DEVICE)
        factors = torch.tensor([1.0, 3.0, 1.25, 2.0, 1.7], device=DEVICE) if with_factors else None
        modules["clip"].gradient_squares(case.segments, case.operands(), factors, partials, squares)
        results.append({"partials": partials, "squares": squares})
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], **SUM)
    squares, powers = results[0]["squares"].double(), torch.ones(5) if factors is None else factors.double().square()
    for grad, square, power in zip(case.grads, squares, powers, strict=True):
        expected = torch.zeros_like(square) if grad is None else grad.double().square().sum() * power
        torch.testing.assert_close(square, expected, rtol=1e-5, atol=0.0)


def clipped_by_torch(grads: list[Tensor], max_norm: float, per_tensor: bool) -> list[Tensor]:
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    for group in [[p] for p in params] if per_tensor else [params]:
        torch.nn.utils.clip_grad_norm_(group, max_norm)
    return [p.grad for p in params]


@example(exponents=[0.0] * 300, max_norm=1.0, loss_scale=65536.0, per_tensor=False, sampled=True)
@example(exponents=[0.0] * 300, max_norm=1e-3, loss_scale=None, per_tensor=True, sampled=False)
@given(
    exponents=st.lists(st.floats(-6.0, 6.0), min_size=1, max_size=9),
    max_norm=st.floats(1e-3, 1e3),
    loss_scale=st.none() | st.floats(1e-3, 2.0**20),
    per_tensor=st.booleans(),
    sampled=st.booleans(),
)
def test_scales_clip_as_torch_does(
    exponents: list[float], max_norm: float, loss_scale: float | None, per_tensor: bool, sampled: bool
) -> None:
    """Gradients of the loss times its scale become what torch makes of them when that has been undone.

    A sampler's factors come before all else.
    """
    generator = torch.Generator().manual_seed(len(exponents))
    grads = [torch.randn(7, generator=generator).mul_(10.0**e).to(DEVICE) for e in exponents]
    factors = 1.0 + torch.rand(len(grads), generator=generator).to(DEVICE) if sampled else None
    drawn = grads if factors is None else [g * factor for g, factor in zip(grads, factors, strict=True)]
    squares = torch.stack([g.square().sum() for g in drawn])
    inverse = 1.0 if loss_scale is None else 1.0 / loss_scale
    expected = clipped_by_torch([g * inverse for g in drawn], max_norm, per_tensor)
    results = []
    for modules in BOTH:
        scales = torch.full_like(squares, POISON)
        modules["clip"].gradient_scales(
            squares, None if loss_scale is None else f32(loss_scale), factors, scales, max_norm=max_norm,
            per_tensor=per_tensor,
        )  # fmt: skip
        results.append(scales)
        for grad, scale, clipped in zip(grads, scales, expected, strict=True):
            torch.testing.assert_close(grad * scale, clipped, rtol=1e-5, atol=0.0)
    if per_tensor:
        assert torch.equal(*results)
    else:
        torch.testing.assert_close(*results, rtol=1e-5, atol=0.0)


@MODULES
def test_scales_without_clipping_and_of_broken_norms(modules: dict) -> None:
    scales = torch.full((300,), POISON, device=DEVICE)

    def of(squares: Tensor | None, loss_scale: Tensor | None, per_tensor: bool) -> list[float]:
        modules["clip"].gradient_scales(squares, loss_scale, None, scales, max_norm=0.5, per_tensor=per_tensor)
        return scales.tolist()

    for per_tensor in (False, True):
        assert of(None, f32(3.0), per_tensor) == [float(f32(1.0) / f32(3.0))] * 300
        assert of(None, None, per_tensor) == [1.0] * 300
    squares = torch.zeros(300, device=DEVICE)
    assert of(squares, None, True) == of(squares, None, False) == [1.0] * 300
    squares[270] = INF
    assert of(squares, f32(2.0), True) == [0.5] * 270 + [0.0] + [0.5] * 29
    assert of(squares, f32(2.0), False) == [0.0] * 300
    squares[3] = NAN
    assert of(squares, None, False) != [0.0] * 300
    assert scales.isnan().all()
    of(squares, None, True)
    assert scales.isnan().nonzero().view(-1).tolist() == [3]


@pytest.mark.parametrize("per_tensor", [False, True], ids=["all", "tensor"])
@pytest.mark.parametrize("values", ["normal", "nan", "inf"])
def test_a_broken_gradient_is_seen_behind_its_scale(values: str, per_tensor: bool) -> None:
    """An infinite norm clips to 0, which leaves an infinite gradient NaN."""
    case = build((4096, 3000, 6144), device=DEVICE, values=values)
    flags = []
    for modules in BOTH:
        partials, squares = (torch.full((n,), POISON, device=DEVICE) for n in (case.segments.num_blocks, 3))
        modules["clip"].gradient_squares(case.segments, case.operands(), None, partials, squares)
        modules["clip"].gradient_scales(squares, f32(8.0), None, case.scales, max_norm=1.0, per_tensor=per_tensor)
        out = whole_pass(modules, case.copy(), 0.1, with_scales=True)
        flat, flag = torch.zeros(case.segments.numel, device=DEVICE), i32(0)
        modules["dense"].pack_dense(case.segments, case.operands(), case.scales, flat, flag, grad_scale=1.0)
        mine, other = case.copy(), i32(0)
        modules["compress"].compress_all(
            case.segments, mine.operands(), None, mine.residual, None, case.scales, mine.seed, None, None,
            mine.residual, flat, None, other, **STEP | {"accumulate": "residual"},
        )  # fmt: skip
        flags += [int(out["flag_before_pack"]), int(flag), int(other)]
    assert flags == [int(values != "normal")] * 6


# ---- states of two halves ------------------------------------------------------------------------------------------


def both_parities(case: Case, fraction: float, **step: object) -> None:
    """With either half read, kernels equal twins, and both what they are without halves, bit for bit."""
    one = both(case, fraction, **step)
    for parity in (0, 1):
        same(both(case, fraction, parity=parity, **step), one)


@pytest.mark.parametrize("name", SIZES)
def test_halves_over_sizes(name: str) -> None:
    both_parities(build(SIZES[name], device=DEVICE, per_tensor=name == "mixed"), 0.02)


@pytest.mark.parametrize("accumulate", ["none", "residual", "momentum", "nesterov"])
@pytest.mark.parametrize("masking", [False, True])
def test_halves_over_memories(accumulate: str, masking: bool) -> None:
    case = build(SIZES["mixed"], device=DEVICE, missing=(3,))
    both_parities(case, 0.05, accumulate=accumulate, masking=masking, with_scales=masking, with_trust=not masking)


@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("dtype", TYPES)
def test_halves_over_types(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Ties are broken and states rounded alike in both halves. The middle segment has no gradient: it is copied."""
    case = build(
        (3001, 2048, 5000), device=DEVICE, missing=(1,), values="ties", dtype=dtype, state_dtype=state_dtype, shift=1
    )
    both_parities(case, 0.1, wire=torch.bfloat16)


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("state_dtype", STATES)
def test_halves_in_a_dense_step(state_dtype: torch.dtype, parity: int) -> None:
    case, results = build((3001, 2048, 5000), device=DEVICE, missing=(1,), state_dtype=state_dtype), []
    for modules, half in ((KERNELS, None), (KERNELS, parity), (TWINS, parity)):
        velocity, residual = halved(case.velocity.clone(), half), halved(case.residual.clone(), half)
        sent, out = torch.full((case.segments.numel,), POISON, device=DEVICE), scratch(case, 1, 1)
        modules["compress"].compress_all(
            case.segments, case.operands(), velocity, residual, case.trust, case.scales, case.seed,
            None if half is None else i32(half), velocity, residual, sent, out["partials"], out["flag"], **STEP,
        )  # fmt: skip
        unread(case.velocity, velocity, half)
        unread(case.residual, residual, half)
        states = {"velocity": written(velocity, half), "residual": written(residual, half)}
        results.append(states | {"sent": sent, "partials": out["partials"]})
    same(results[1], results[0])
    same(results[1], results[2])
    assert torch.equal(results[1]["residual"][2 * BLOCK : 3 * BLOCK], case.residual[2 * BLOCK : 3 * BLOCK])


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("state_dtype", STATES)
def test_settling_works_on_the_half_in_force(state_dtype: torch.dtype, parity: int) -> None:
    case, results = build((3000, 2048, 5000), device=DEVICE, missing=(0, 1), state_dtype=state_dtype), []
    for modules, half in ((KERNELS, None), (KERNELS, parity), (TWINS, parity)):
        velocity, residual = halved(case.velocity.clone(), half), halved(case.residual.clone(), half)
        modules["compress"].settle(
            case.segments, case.operands(), i32(1, 0, 1), case.trust, case.seed, None if half is None else i32(half),
            velocity, residual, accumulate="nesterov", weight_decay=0.1, momentum=0.9,
        )  # fmt: skip
        if half is not None:
            assert (written(residual, half) == torch.full_like(case.residual, POISON)).all()
            velocity, residual = written(velocity, 1 - half), written(residual, 1 - half)
        results.append({"velocity": velocity, "residual": residual})
    same(results[1], results[0])
    same(results[1], results[2])
    assert not torch.equal(results[0]["residual"], case.residual)


# ---- the verdict ---------------------------------------------------------------------------------------------------


@MODULES
@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("found", [False, True])
def test_conclude_and_annul(modules: dict, found: bool, parity: int) -> None:
    nonfinite, found_inf, half, status = i32(int(found)), f32(POISON), i32(parity), i32(5, 2, 3)
    modules["verdict"].conclude(nonfinite, found_inf, half, status)
    assert (nonfinite.tolist(), found_inf.tolist()) == ([0], [float(found)])
    assert half.tolist() == [parity if found else 1 - parity]
    assert status.tolist() == [5, 2, 3 + found]
    for segments in (1, 32, 70):
        seed, present = i32(42), i32(*[i % 2 for i in range(segments)])
        modules["verdict"].annul(found_inf, seed, present)
        assert seed.tolist() == [42 - found]
        assert present.tolist() == [0 if found else i % 2 for i in range(segments)]


@MODULES
@pytest.mark.parametrize("broken", [0, 1, 3])
def test_headers_tell_what_is_not_finite(modules: dict, broken: int) -> None:
    """Of any number of ranks; what another bucket has said stays."""
    words = [[1, 0, int(rank < broken), 7, 1] for rank in range(3)]
    trailer = torch.zeros(1 + TRAILER_WORDS, device=DEVICE)
    trailer[1] = float(broken)
    for before in (0, 1):
        for nonfinite in (i32(before), None):
            status, present = i32(0, 0, 9), i32(-7)
            headers = torch.tensor(words, dtype=torch.int32, device=DEVICE)
            modules["headers"].read_headers(headers, status, nonfinite, present)
            modules["headers"].read_trailer(trailer, status, nonfinite, present, world=3)
            assert status.tolist() == [2 * (broken > 0), 0, 9]
            assert nonfinite is None or nonfinite.tolist() == [int(before or broken > 0)]


@MODULES
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_apply_asks_for_the_verdict(modules: dict, found: float, dtype: torch.dtype) -> None:
    """Undone, parameters are what they were bit for bit, whatever was sent; else the verdict changes nothing."""
    case = build((70001, 3000, 2049), device=DEVICE, dtype=dtype)
    packed = whole_pass(TWINS, build((70001, 3000, 2049), device=DEVICE), 0.02)
    starts, indices, values = (packed[name].unsqueeze(0) for name in ("starts", "out_indices", "values"))
    if found:
        values[0, ::2], values[0, 1::2] = NAN, INF
    results = []
    for found_inf in (f32(found), None):
        mine, status, present = case.copy(), i32(1, 2, 3), i32(-7, -7, -7)
        sums = None if dtype == torch.float32 else torch.zeros(case.segments.padded_numel, device=DEVICE)
        modules["apply"].apply_payloads(
            mine.segments, mine.operands(), starts, indices, values, f32(0.1), None, status, found_inf, present, sums,
            inverse_world=1.0,
        )  # fmt: skip
        assert sums is None or not sums.nan_to_num().any()
        assert (status.tolist(), present.tolist()) == ([1, 2, 3], [-7, -7, -7])
        results.append({f"param{i}": p for i, p in enumerate(mine.params)})
    expected = {f"param{i}": p for i, p in enumerate(case.params)} if found else results[1]
    assert all(torch.equal(results[0][name], expected[name]) for name in expected)
    assert not torch.equal(results[1]["param0"], case.params[0])


@MODULES
def test_apply_does_not_read_headers_that_judge_it(modules: dict) -> None:
    case = build((5,), device=DEVICE)
    nothing, words = i32(0, 0).view(1, 2), i32(1, 0, 0, 7, 1).view(1, 5)
    with pytest.raises(AssertionError, match="verdict"):
        modules["apply"].apply_payloads(
            case.segments, case.operands(), nothing, nothing.short(), f32(0.0, 0.0).view(1, 2), f32(0.1), words,
            i32(0, 0, 0), f32(0.0), i32(0), None, inverse_world=1.0,
        )  # fmt: skip


@MODULES
@pytest.mark.parametrize("state_dtype", STATES)
def test_an_undone_step_never_was(modules: dict, state_dtype: torch.dtype) -> None:
    """A step with a NaN, undone, then the one with good gradients: all is as if the second had been the only one."""
    good = build((3001, 2048, 5000), device=DEVICE, state_dtype=state_dtype)
    bad = good.copy()
    bad.grads[2][17] = NAN
    alone = whole_pass(modules, good.copy(), 0.02)
    velocity, residual = (torch.stack([s, s]).view(-1) for s in (good.velocity, good.residual))
    parity, status, nonfinite, found_inf, seed = i32(1), i32(0, 0, 0), i32(0), f32(POISON), good.seed.clone()
    for case in (bad, good):
        mine, half = case.copy(), int(parity)
        mine.velocity, mine.residual = (s.view(2, -1)[half].clone() for s in (velocity, residual))
        mine.seed = seed
        out = whole_pass(modules, mine, 0.02, parity=half)
        for state, name in ((velocity, "velocity"), (residual, "residual")):
            written(state, half).copy_(out[name])
        present = i32(-7, -7, -7)
        modules["headers"].read_headers(out["header"].view(1, -1), status, nonfinite, present)
        modules["verdict"].conclude(nonfinite, found_inf, parity, status)
        modules["verdict"].annul(found_inf, seed, present)
        assert present.tolist() == [int(case is good)] * 3
    same(out, alone)
    assert (parity.tolist(), status.tolist()) == ([0], [1, 0, 1])


@MODULES
def test_what_is_annulled_is_left_alone(modules: dict) -> None:
    """Dense updates, norms and settling follow presence."""
    case = build((5, 2048), device=DEVICE, missing=(0,))
    mine, present, seed = case.copy(), i32(1, 1), i32(8)
    modules["verdict"].annul(f32(1.0), seed, present)
    summed = Operands(mine.params)
    summed.update([torch.full_like(p, NAN) for p in mine.params])
    modules["dense"].update_dense(
        mine.segments, summed, present, None, f32(0.1), mine.velocity,
        inverse_world=1.0, weight_decay=0.1, momentum=0.9, nesterov=False,
    )  # fmt: skip
    modules["compress"].settle(
        mine.segments, mine.operands(), present, None, seed, None, mine.velocity, mine.residual,
        accumulate="momentum", weight_decay=0.1, momentum=0.9,
    )  # fmt: skip
    norms = f32(1.0, 2.0, 3.0, 4.0).view(2, 2)
    modules["norms"].commit_norms(f32(9.0, 9.0, 9.0, 9.0).view(1, 4), present, norms, inverse_world=1.0)
    assert norms.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    before, after = ([*c.params, c.velocity, c.residual] for c in (case, mine))
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_nothing_that_is_not_finite_escapes_a_step_that_may_be_undone() -> None:
    """It may lie behind the last candidate that has room, or come about in the sum: the pass looks at all entries."""
    case = build((5000, 4096), device=DEVICE)
    case.grads[1][-1] = NAN
    for modules in BOTH:
        flags = [whole_pass(modules, case.copy(), 0.001, capacity=3, parity=p)["header"][2] for p in (None, 0, 1)]
        assert list(map(int, flags)) == [0, 1, 1]
    case.grads[1][-1] = 2e34
    for modules in BOTH:
        flags = [whole_pass(modules, case.copy(), 0.001, parity=p)["header"][2] for p in (None, 0)]
        assert list(map(int, flags)) == [0, 1]
    case.grads[1][-1] = 3e33
    case.trust = torch.ones_like(case.trust)
    assert int(whole_pass(KERNELS, case.copy(), 0.001, parity=0)["header"][2]) == 0
    case.grads[1][-1] = 3e38
    case.residual[case.segments.slices[1].stop - 1] = 3e38
    same(*(whole_pass(modules, case.copy(), 0.001, capacity=3, parity=0) for modules in BOTH))
    assert int(whole_pass(KERNELS, case.copy(), 0.001, capacity=3, parity=0)["header"][2]) == 1

"""The compress side's kernels against their twins, bit for bit but for sums of squares; without a GPU interpreted."""

import pytest
import torch

from fusedcomp import SGD, TopK
from fusedcomp.kernels.segments import BLOCK
from kernel_cases import POISON, SIZES, build, scratch
from kernel_runs import DEVICE, KERNELS, STEP, TWINS, TYPES, both, i64, same, whole_pass

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize("per_tensor", [False, True], ids=["bucket", "tensor"])
@pytest.mark.parametrize("name", SIZES)
def test_whole_pass_over_sizes(name: str, per_tensor: bool) -> None:
    case = build(SIZES[name], device=DEVICE, per_tensor=per_tensor)
    out = both(case, 0.02)
    ranks = [max(1, round(n * 0.02)) for n in case.segments.scope_numels]
    assert int(out["starts"][-1]) == sum(ranks)  # exactly k


@pytest.mark.parametrize("accumulate", ["none", "residual", "momentum", "nesterov"])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_whole_pass_over_memories(accumulate: str, weight_decay: float) -> None:
    case = build(SIZES["mixed"], device=DEVICE)
    both(case, 0.05, accumulate=accumulate, weight_decay=weight_decay, with_trust=weight_decay > 0, grad_scale=-1.0)


@pytest.mark.parametrize("wire", TYPES)
@pytest.mark.parametrize("state_dtype", TYPES[:2])
@pytest.mark.parametrize("dtype", TYPES)
def test_whole_pass_over_types(dtype: torch.dtype, state_dtype: torch.dtype, wire: torch.dtype) -> None:
    """And nothing is lost in any of them: what was sent and what is kept add up to what was there, bit for bit."""
    if (state_dtype, wire) == (torch.bfloat16, torch.float16):
        pytest.skip("refused at construction")
    per_tensor = dtype == torch.float16
    case = build((3, 2048, 5000, 2049), device=DEVICE, per_tensor=per_tensor, dtype=dtype, state_dtype=state_dtype)
    out = both(case, 0.02, with_trust=False, wire=wire)
    sent = torch.zeros_like(out["residual"], dtype=torch.float32)
    sent[out["out_indices"][: int(out["starts"][-1])].long() & 0xFFFF] = out["values"].float()
    assert torch.equal(out["residual"].float() + sent, out["residual_before_pack"].float())


@pytest.mark.parametrize("wire", TYPES[1:])
def test_large_values_stay_finite_on_the_wire(wire: torch.dtype) -> None:
    """The largest value the type holds is sent, the rest waits in the residual; inf and NaN are what they are."""
    case = build((4096,), device=DEVICE)
    case.grads[0].zero_(), case.velocity.zero_(), case.residual.zero_()
    special = torch.tensor([1e5, -1e30, 3.4e38, -3.4e38, float("inf"), float("nan"), 65504.0, 1e-30], device=DEVICE)
    case.residual[: len(special)] = special
    out = both(case, len(special) / 4096, wire=wire, accumulate="residual", weight_decay=0.0, with_trust=False)
    sent, largest = out["values"].float(), torch.finfo(wire).max
    index = out["out_indices"].long()
    assert sent[index < 4].abs().max() <= largest
    assert sent[index == 4].item() == float("inf")
    assert sent[index == 5].isnan()
    kept = out["residual"][:4]
    torch.testing.assert_close(sent[index < 4] + kept, special[:4], rtol=1e-7, atol=0.0)
    assert not out["residual"][4:6].any()


def test_stochastic_rounding_is_unbiased() -> None:
    """bf16 states: over many steps a value between two representable ones is on average itself."""
    value, steps = 1.0 + 0.3 * 2**-7, 64
    mean = torch.zeros(2048, dtype=torch.float64, device=DEVICE)
    for step in range(steps):
        case = build((2048,), device=DEVICE, state_dtype=torch.bfloat16)
        case.residual.zero_(), case.velocity.zero_(), case.seed.fill_(step)
        case.grads[0].fill_(value)
        out = whole_pass(TWINS, case, 1e-9, accumulate="residual", weight_decay=0.0, with_trust=False)
        assert set(out["residual_before_pack"].tolist()) <= {1.0, 1.0 + 2**-7}
        mean += out["residual_before_pack"].double() / steps
    deviation = (0.3 * 0.7) ** 0.5 * 2**-7
    assert abs(mean.mean().item() - value) < 5 * deviation / (2048 * steps) ** 0.5
    assert (mean - value).abs().max().item() < 6 * deviation / steps**0.5


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_unaligned_addresses(shift: int) -> None:
    """Gradients of concatenated parameters are views 4, 8 or 12 bytes past a 16-byte boundary."""
    case = build((5000, 2048, 4096), device=DEVICE, shift=shift)
    assert all(p.data_ptr() % 16 == 4 * shift for p in case.params)
    both(case, 0.02)


@pytest.mark.parametrize("values", ["ties", "clustered", "nan", "inf"])
@pytest.mark.parametrize("per_tensor", [False, True], ids=["bucket", "tensor"])
def test_unusual_values(values: str, per_tensor: bool) -> None:
    """Ties; hundreds of winners in one block; a broken gradient sets the flag."""
    case = build((4096, 3000, 6144), device=DEVICE, per_tensor=per_tensor, values=values)
    out = both(case, 0.1)
    assert int(out["flag_before_pack"]) == (values in ("nan", "inf")) == int(out["header"][2])
    if values == "clustered" and not per_tensor:
        assert int(out["offsets"][1]) > 512, "this case is to crowd a block"


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1.0])
def test_extreme_densities(fraction: float) -> None:
    case = build((2049, 5000), device=DEVICE)
    out = both(case, fraction)
    assert int(out["starts"][-1]) == max(1, round(7049 * fraction))


def test_full_candidate_buffer_keeps_the_rest() -> None:
    """More candidates than the buffer holds: those left out stay in the residual, none is lost or doubled."""
    case = build((10243,), device=DEVICE)
    out = both(case, 0.05, capacity=100)
    before = out["residual_before_pack"]
    sent = torch.zeros_like(before)
    index = out["out_indices"][: int(out["starts"][-1])].long() & 0xFFFF
    sent[index] = out["values"][: len(index)]
    assert torch.equal(sent + out["residual"], before)
    assert len(index) == 100 == len(index.unique())


def test_missing_gradients_leave_their_segments_alone() -> None:
    case = build((3000, 2048, 5000), device=DEVICE, missing=(1,))
    out = both(case, 0.02)
    where = case.segments.slices[1]
    assert torch.equal(out["residual"][where], case.residual[where])
    assert torch.equal(out["velocity"][where], case.velocity[where])


def test_no_masking_keeps_the_velocity() -> None:
    both(build((3000, 5000), device=DEVICE), 0.02, masking=False)


def test_separate_output_states() -> None:
    """States are read from one buffer and written to another; the input stays as it was."""
    case = build((3000, 5000), device=DEVICE)
    out, results = scratch(case, 10, 10), []
    for modules in (KERNELS, TWINS):
        velocity, residual = torch.full_like(case.velocity, POISON), torch.full_like(case.residual, POISON)
        before = case.copy()
        modules["compress"].compress(
            case.segments, case.operands(), case.velocity, case.residual, None, i64(1 << 62), case.trust, None,
            case.seed, None, velocity, residual, out["counts"], out["marks"], out["partials"], None, **STEP,
        )  # fmt: skip
        assert torch.equal(case.velocity, before.velocity)
        assert torch.equal(case.residual, before.residual)
        results.append({"velocity": velocity, "residual": residual})
    same(*results)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 2])
def test_dense_step_of_a_compressed_bucket(shift: int, state_dtype: torch.dtype) -> None:
    case, results = build((3001, 2048, 5000), device=DEVICE, shift=shift, missing=(1,), state_dtype=state_dtype), []
    for modules in (KERNELS, TWINS):
        mine = case.copy()
        sent = torch.full((case.segments.numel,), POISON, device=DEVICE)
        out = scratch(mine, 1, 1)
        modules["compress"].compress_all(
            mine.segments, mine.operands(), mine.velocity, mine.residual, mine.trust, None, mine.seed, None,
            mine.velocity, mine.residual, sent, out["partials"], out["flag"], **STEP,
        )  # fmt: skip
        results.append(
            {"sent": sent, "velocity": mine.velocity, "residual": mine.residual, "partials": out["partials"]}
        )
    same(*results)
    assert not results[0]["residual"][: 2 * BLOCK].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settle_only_touches_segments_present_elsewhere(dtype: torch.dtype) -> None:
    case, results = build((3000, 2048, 5000), device=DEVICE, missing=(0, 1), dtype=dtype, state_dtype=dtype), []
    present = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    for modules in (KERNELS, TWINS):
        mine = case.copy()
        modules["compress"].settle(
            mine.segments, mine.operands(), present, mine.trust, mine.seed, None, mine.velocity, mine.residual,
            accumulate="nesterov", weight_decay=0.1, momentum=0.9,
        )  # fmt: skip
        results.append({"velocity": mine.velocity, "residual": mine.residual})
    same(*results)
    changed = [not torch.equal(results[0]["residual"][w], case.residual[w]) for w in case.segments.slices]
    assert changed == [True, False, False]


def test_a_step_done_again_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same scratch, from the same states and step: no launch takes for its own what another left."""
    monkeypatch.setenv("FUSEDCOMP_OPS", "kernels")
    numel = 40_000_000 if DEVICE == "cuda" else 5000
    param = torch.nn.Parameter(torch.zeros(numel, device=DEVICE))
    optimizer = SGD([param], lr=0.0, momentum=0.9, compressor=TopK(0.01), _always_sparse=True)
    exchange = optimizer._exchanges[0]
    generator, payloads = torch.Generator(DEVICE).manual_seed(0), []
    gradients = [torch.randn(numel, device=DEVICE, generator=generator) for _ in range(2)]
    for number in (0, 1, 0, 1, 0, 1):
        for state in (exchange.velocity, exchange.residual, exchange.seed):
            state.zero_()
        param.grad = gradients[number]
        optimizer.step()
        payloads.append(exchange.buffers.own.clone())
    assert not torch.equal(payloads[0], payloads[1])
    assert all(torch.equal(payload, payloads[i % 2]) for i, payload in enumerate(payloads))


def test_all_entries_get_their_turn_among_equals() -> None:
    """All magnitudes equal: winners change with the step and cover the tensor evenly, whatever their address."""
    n, steps, hits = 5000, 60, torch.zeros(5000, device=DEVICE)
    for step in range(steps):
        case = build((n,), device=DEVICE)
        case.residual[:n], case.velocity[:n] = 1.0, 0.0
        case.grads[0].zero_()
        case.seed.fill_(step)
        out = whole_pass(TWINS, case, 0.1, accumulate="residual", weight_decay=0.0, with_trust=False)
        hits[out["indices"][out["keys"] >= out["thresholds"][0]]] += 1
    quarters = hits.view(4, -1).sum(1) / hits.sum()
    assert (quarters - 0.25).abs().max() < 0.02
    assert hits.min() > 0 or (hits == 0).float().mean() < 0.01

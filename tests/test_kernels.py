"""Every kernel against its twin, bit for bit except sums of squares; without a GPU the kernels are interpreted."""

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fusedcomp import SGD, TopK
from fusedcomp.kernels.sample import SAMPLES
from fusedcomp.kernels.segments import BLOCK, Operands
from kernel_cases import POISON, SIZES, Case, build, scratch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SUM = {"rtol": 1e-5, "atol": 1e-6}  # sums of squares: another order of additions

NAMES = ("sample", "compress", "refine", "apply", "norms", "dense", "headers")
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


def whole_pass(modules: Modules, case: Case, fraction: float, **step: object) -> dict[str, Tensor]:
    """sample -> compress -> list -> select -> pack, everything written comes back."""
    options = STEP | step
    segments, operands = case.segments, case.operands()
    velocity = case.velocity if options["accumulate"] in ("momentum", "nesterov") else None
    trust = case.trust if options.pop("with_trust", True) else None
    masking, wire = options.pop("masking", True), options.pop("wire", torch.float32)
    ks = [max(1, round(n * fraction)) for n in segments.scope_numels]
    capacity, ranks = options.pop("capacity", segments.numel), i64(*ks)
    out = scratch(case, capacity, sum(ks), wire)
    shared = out["histograms"], out["tickets"]
    samples, groups, in_scope = sample_table(case)
    sample_ranks = i64(*[min(n, max(1, round(2 * fraction * n) + 3)) for n in in_scope])
    out["sample_keys"] = torch.full((len(samples),), -7, dtype=torch.int64, device=DEVICE)
    thresholds, widths = i64(*[-7] * len(ks)), torch.zeros(len(ks), dtype=torch.int32, device=DEVICE)
    modules["sample"].sample_threshold(
        segments, operands, samples, groups, sample_ranks, (sample_ranks // 3).clamp(min=1), velocity, case.residual,
        trust, case.seed, out["sample_keys"], *shared, thresholds, widths, **options,
    )  # fmt: skip
    out["sampled_thresholds"] = thresholds.clone()
    modules["compress"].compress(
        segments, operands, velocity, case.residual, thresholds, trust, case.seed, velocity, case.residual,
        out["counts"], out["marks"], out["partials"], **options,
    )  # fmt: skip
    out["residual_before_pack"] = case.residual.clone()
    modules["refine"].list_candidates(
        segments, out["counts"], out["marks"], out["scanned"], out["offsets"], out["indices"]
    )
    bounds, near = i64(*[(-7, -7, -7)] * len(ks)), torch.full_like(out["keys"], -7)
    near_counts = torch.zeros(len(ks), dtype=torch.int32, device=DEVICE)
    modules["refine"].select_candidates(
        segments, out["offsets"], out["indices"], case.residual, case.seed, ranks, widths, out["histograms"], bounds,
        near, near_counts, out["tickets"], thresholds, out["keys"], out["flag"],
    )  # fmt: skip
    out["flag_before_pack"] = out["flag"].clone()
    assert not near_counts.any()
    modules["refine"].pack_payload(
        segments, operands, out["keys"], out["indices"], out["offsets"], thresholds, velocity if masking else None,
        case.residual, out["flag"], case.seed, out["packed"],
        out["starts"], out["out_indices"], out["values"], out["header"],
    )  # fmt: skip
    for name in ("scanned", "packed"):  # left behind by the kernels alone
        del out[name]
    return out | {"thresholds": thresholds, "velocity": case.velocity, "residual": case.residual, "seed": case.seed}


def both(case: Case, fraction: float, **step: object) -> dict[str, Tensor]:
    twin = whole_pass(TWINS, case.copy(), fraction, **step)
    fast = whole_pass(KERNELS, case.copy(), fraction, **step)
    same(fast, twin)
    return fast


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
            case.segments, case.operands(), case.velocity, case.residual, i64(1 << 62), case.trust, case.seed,
            velocity, residual, out["counts"], out["marks"], out["partials"], **STEP,
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
            mine.segments, mine.operands(), mine.velocity, mine.residual, mine.trust, mine.seed, mine.velocity,
            mine.residual, sent, out["partials"], out["flag"], **STEP,
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
            mine.segments, mine.operands(), present, mine.trust, mine.seed, mine.velocity, mine.residual,
            accumulate="nesterov", weight_decay=0.1, momentum=0.9,
        )  # fmt: skip
        results.append({"velocity": mine.velocity, "residual": mine.residual})
    same(*results)
    changed = [not torch.equal(results[0]["residual"][w], case.residual[w]) for w in case.segments.slices]
    assert changed == [True, False, False]


@pytest.mark.parametrize("wire", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("world", [1, 3])
def test_apply(world: int, dtype: torch.dtype, wire: torch.dtype) -> None:
    """Against the twin, and the twin against a float64 scatter, rounded once."""
    case = build((70001, 3000, 2049), device=DEVICE, dtype=dtype)
    cases = [build((70001, 3000, 2049), device=DEVICE, shift=rank) for rank in range(world)]
    packed = [whole_pass(TWINS, mine.copy(), 0.02, wire=wire) for mine in cases]
    sums = None if dtype == torch.float32 else torch.zeros(case.segments.padded_numel, device=DEVICE)
    names = ("starts", "out_indices", "values", "header")
    starts, indices, values, headers = (torch.stack([p[k] for p in packed]) for k in names)
    lr = torch.tensor([0.1], device=DEVICE)
    results = []
    for modules in (KERNELS, TWINS):
        mine = case.copy()
        status, present = i32(0, 0), i32(-7, -7, -7)
        modules["apply"].apply_payloads(
            mine.segments, mine.operands(), starts, indices, values, lr, headers, status, present, sums,
            inverse_world=1.0 / world,
        )  # fmt: skip
        assert sums is None or not sums.any()
        assert present.tolist() == [1, 1, 1]
        assert status.tolist() == [0, 0]
        results.append({f"param{i}": p for i, p in enumerate(mine.params)})
    same(*results)
    update = torch.zeros(case.segments.padded_numel, dtype=torch.float64, device=DEVICE)
    for rank in range(world):
        for page in range(case.segments.num_pages):
            at = slice(int(starts[rank, page]), int(starts[rank, page + 1]))
            update.index_add_(0, page * 65536 + (indices[rank, at].long() & 0xFFFF), values[rank, at].double())
    for i, (param, where) in enumerate(zip(case.params, case.segments.slices, strict=True)):
        expected = param.double() - 0.1 / world * update[where]
        if dtype == torch.float32:
            torch.testing.assert_close(results[0][f"param{i}"].double(), expected, rtol=1e-6, atol=1e-6)
        else:  # one rounding: the nearest, but where fp32 arithmetic falls on the other side of a tie
            nearest, got = expected.to(dtype), results[0][f"param{i}"]
            assert (got == nearest).double().mean() > 0.999
            torch.testing.assert_close(got, nearest, rtol=torch.finfo(dtype).eps, atol=0.0)


def test_apply_survives_hostile_payloads() -> None:
    """Starts and indices from a peer are clamped: no store outside the parameters."""
    case, results = build((3000, 2049), device=DEVICE), []
    starts = torch.tensor([[-50, 1 << 30], [5, 2]], dtype=torch.int32, device=DEVICE)
    indices = torch.arange(-32768, 32768, 257, device=DEVICE).to(torch.int16).expand(2, -1).contiguous()
    values = torch.ones(indices.shape, device=DEVICE)
    for modules in (KERNELS, TWINS):
        mine = case.copy()
        guard = [torch.full((n + 64,), POISON, device=DEVICE) for n in case.segments.numels]
        for box, param in zip(guard, mine.params, strict=True):
            box[32 : 32 + param.numel()] = param
        mine.params = [box[32:-32] for box in guard]
        modules["apply"].apply_payloads(
            mine.segments, mine.operands(), starts, indices, values, torch.ones(1, device=DEVICE), None,
            i32(0, 0), i32(0, 0), None, inverse_world=0.5,
        )  # fmt: skip
        results.append({f"param{i}": p for i, p in enumerate(guard)})
        assert all((box[:32] == POISON).all() and (box[-32:] == POISON).all() for box in guard)
    same(*results)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dense_pack_and_update(momentum: float, nesterov: bool, dtype: torch.dtype) -> None:
    case, results = build((5, 2048, 3001, 1), device=DEVICE, missing=(2,), dtype=dtype), []
    lr = torch.tensor([0.1], device=DEVICE)
    for modules in (KERNELS, TWINS):
        mine = case.copy()
        flat = torch.full((case.segments.numel,), POISON, device=DEVICE)
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        modules["dense"].pack_dense(mine.segments, mine.operands(), flat, flag, grad_scale=-1.0)
        summed = Operands(mine.params)
        summed.update([flat[w] for w in case.segments.compact_slices])
        modules["dense"].update_dense(
            mine.segments, summed, torch.tensor([1, 1, 0, 1], dtype=torch.int32, device=DEVICE), mine.trust, lr,
            mine.velocity if momentum else None,
            inverse_world=0.25, weight_decay=0.01, momentum=momentum, nesterov=nesterov and momentum > 0,
        )  # fmt: skip
        results.append({"flat": flat, "momentum": mine.velocity} | {f"p{i}": p for i, p in enumerate(mine.params)})
    same(*results)
    assert torch.equal(results[0]["p2"], case.params[2])  # absent everywhere: skipped


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_and_trust(dtype: torch.dtype) -> None:
    """A segment without a positive gradient norm takes the norms of its operands; the others what is known."""
    case = build((1, 2048, 10243, 70001), device=DEVICE, missing=(1,), dtype=dtype)
    known = torch.tensor([[0.0, 0.0, 4.0, 0.0], [0.0, 7.0, 9.0, 0.0]], device=DEVICE)
    results = []
    for modules in (KERNELS, TWINS):
        trust = torch.full((4,), POISON, device=DEVICE)
        modules["norms"].trust_ratios(
            case.segments, case.operands(), known, trust, coefficient=0.01, weight_decay=0.1, eps=1e-8, fallback=True
        )
        results.append(trust)
    torch.testing.assert_close(*results, **SUM)
    for segment in (0, 3):
        g, w = case.grads[segment].double(), case.params[segment].double()
        expected = 0.01 * w.norm() / (g.norm() + 0.1 * w.norm() + 1e-8)
        torch.testing.assert_close(results[0][segment].double(), expected, rtol=1e-5, atol=0.0)
    assert results[0][1] == 1.0  # no gradient: a norm of 0
    assert float(results[0][2]) == pytest.approx(0.01 * 3.0 / (2.0 + 0.3), rel=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_of_blocks(dtype: torch.dtype) -> None:
    """Of fp32 gradients (sums over ranks) and parameters of any type, against float64."""
    case, results = build((1, 2048, 10243), device=DEVICE, dtype=dtype), []
    summed = Operands(case.params)
    summed.update([g.float() for g in case.grads])
    for modules in (KERNELS, TWINS):
        partials = torch.full((case.segments.num_blocks, 2), POISON, device=DEVICE)
        norms, trust = torch.full((2, 3), POISON, device=DEVICE), torch.full((3,), POISON, device=DEVICE)
        modules["norms"].block_norms(case.segments, summed, partials)
        modules["norms"].reduce_norms(case.segments, partials, norms)
        modules["norms"].trust_ratios(
            case.segments, summed, norms, trust, coefficient=1.0, weight_decay=0.0, eps=0.0, fallback=False
        )
        results.append((norms, trust))
    for fast, twin in zip(*results, strict=True):
        torch.testing.assert_close(fast, twin, **SUM)
    for segment in range(3):
        square = [t[segment].double().square().sum() for t in (case.grads, case.params)]
        torch.testing.assert_close(results[0][0][:, segment].double(), torch.stack(square), rtol=1e-5, atol=0.0)


def test_commit_norms_keeps_the_last_usable_ones() -> None:
    """Mean over ranks of |g|^2, rank 0's |w|^2; zero, NaN, inf and absent segments keep what is known."""
    nan, inf = float("nan"), float("inf")
    received = torch.tensor(
        [[1.0, 0.0, nan, inf, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0], [3.0, 0.0, 1.0, 1.0, 5.0, 9.0, 9.0, 9.0, 9.0, 9.0]],
        device=DEVICE,
    )
    present = torch.tensor([1, 1, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    for modules in (KERNELS, TWINS):
        norms = torch.full((2, 5), 7.0, device=DEVICE)
        modules["norms"].commit_norms(received, present, norms, inverse_world=0.5)
        assert norms.tolist() == [[2.0, 7.0, 7.0, 7.0, 7.0], [10.0, 7.0, 7.0, 7.0, 7.0]]


@pytest.mark.parametrize("segments", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("failed", [False, True])
def test_headers_and_trailers(segments: int, failed: bool) -> None:
    """What ranks wrote comes back together: who had gradients, who was not finite, who failed."""
    grads = [[torch.ones(1) if (i * 7 + r) % 3 == 0 else None for i in range(segments)] for r in range(2)]
    expected = [int(any(grads[r][i] is not None for r in range(2))) for i in range(segments)]
    for modules in (KERNELS, TWINS):
        headers, trailers = [], []
        for rank in range(2):
            missing = tuple(i for i in range(segments) if grads[rank][i] is None)
            case = build((1,) * segments, device=DEVICE, missing=missing)
            case.seed.fill_(41)
            if rank == 0:
                case.grads[0].fill_(float("nan"))
            out = whole_pass(modules, case, 1.0, capacity=segments)
            headers.append(out["header"])
            assert int(case.seed) == 42
            assert int(out["flag"]) == 0
            flag = torch.tensor([1 - rank], dtype=torch.int32, device=DEVICE)
            trailers.append(torch.full((segments + 2,), POISON, device=DEVICE))
            modules["headers"].write_trailer(case.operands(), flag, trailers[rank], failed=failed and rank == 1)
            assert int(flag) == 0
        present = [sum(g is not None for g in grads[rank]) for rank in range(2)]
        assert [h[:4].tolist() for h in headers] == [[1, present[0], 1, 41], [1, present[1], 0, 41]]
        if failed:  # a third rank
            headers.append(torch.zeros_like(headers[0]))
            modules["headers"].write_failure(case.seed, headers[2])
            assert headers[2].tolist() == [1, 0, 2, 42] + [0] * (len(headers[2]) - 4)
            assert int(case.seed) == 43
        for read, source in (("read_headers", torch.stack(headers)), ("read_trailer", sum(trailers))):
            status = torch.zeros(2, dtype=torch.int32, device=DEVICE)
            found = torch.full((segments,), -7, dtype=torch.int32, device=DEVICE)
            getattr(modules["headers"], read)(source, status, found)
            assert found.tolist() == expected
            assert status.tolist() == [1, int(failed)]


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

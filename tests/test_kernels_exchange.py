"""Kernels behind the exchange against their twins: apply, dense buckets, norms, headers; without a GPU interpreted."""

import pytest
import torch

from fusedcomp.kernels.headers import TRAILER_WORDS
from fusedcomp.kernels.segments import Operands
from kernel_cases import POISON, build
from kernel_runs import DEVICE, KERNELS, SUM, TWINS, TYPES, i32, same, whole_pass

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


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
        status, present = i32(0, 0, 0), i32(-7, -7, -7)
        modules["apply"].apply_payloads(
            mine.segments, mine.operands(), starts, indices, values, lr, headers, status, None, present, sums,
            inverse_world=1.0 / world,
        )  # fmt: skip
        assert sums is None or not sums.any()
        assert present.tolist() == [1, 1, 1]
        assert status.tolist() == [0, 0, 0]
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


@pytest.mark.parametrize("dtype", TYPES)
def test_apply_where_pages_are_many(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crowded pages are not shared out then."""
    monkeypatch.setattr(KERNELS["apply"], "_FEW_PAGES", 0)
    test_apply(3, dtype, torch.float32)


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
            i32(0, 0, 0), None, i32(0, 0), None, inverse_world=0.5,
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
        modules["dense"].pack_dense(mine.segments, mine.operands(), None, flat, flag, grad_scale=-1.0)
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


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("own_momentum", [False, True])
def test_decay(own_momentum: bool, nesterov: bool) -> None:
    case, results = build((5, 2048, 3001, 1), device=DEVICE), []
    lr, present = torch.tensor([0.1], device=DEVICE), i32(1, 1, 0, 1)
    for modules in (KERNELS, TWINS):
        mine = case.copy()
        modules["decay"].decay_params(
            mine.segments, mine.operands(), present, lr, mine.velocity if own_momentum else None,
            weight_decay=0.03, momentum=0.9, nesterov=nesterov and own_momentum,
        )  # fmt: skip
        results.append({"buffer": mine.velocity} | {f"p{i}": p for i, p in enumerate(mine.params)})
    same(*results)
    assert torch.equal(results[0]["p2"], case.params[2])  # absent everywhere: skipped
    assert not torch.equal(results[0]["p1"], case.params[1])


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_and_trust(dtype: torch.dtype) -> None:
    """A segment without a positive gradient norm takes the norms of its operands; the others what is known."""
    case = build((1, 2048, 10243, 70001), device=DEVICE, missing=(1,), dtype=dtype)
    known = torch.tensor([[0.0, 0.0, 4.0, 0.0], [0.0, 7.0, 9.0, 0.0]], device=DEVICE)
    results = []
    for modules in (KERNELS, TWINS):
        trust = torch.full((4,), POISON, device=DEVICE)
        modules["norms"].trust_ratios(
            case.segments, case.operands(), known, None, trust,
            coefficient=0.01, weight_decay=0.1, eps=1e-8, fallback=True,
        )  # fmt: skip
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
            case.segments, summed, norms, None, trust, coefficient=1.0, weight_decay=0.0, eps=0.0, fallback=False
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
        norms = torch.full((2, 5), 2.25, device=DEVICE)
        modules["norms"].commit_norms(received, present, norms, inverse_world=0.5)
        assert norms.tolist() == [[2.0, 2.25, 2.25, 2.25, 2.25], [10.0, 2.25, 2.25, 2.25, 2.25]]


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
            trailers.append(torch.full((segments + TRAILER_WORDS,), POISON, device=DEVICE))
            modules["headers"].write_trailer(
                case.operands(), flag, case.seed, trailers[rank], failed=failed and rank == 1
            )
            assert int(flag) == 0
            assert int(case.seed) == 43
        present = [sum(g is not None for g in grads[rank]) for rank in range(2)]
        assert [h[:4].tolist() for h in headers] == [
            [1 + (segments << 16), present[0], 1, 41],
            [1 + (segments << 16), present[1], 0, 41],
        ]
        if failed:  # a third rank
            headers.append(torch.zeros_like(headers[0]))
            modules["headers"].write_failure(case.seed, headers[2])
            assert headers[2].tolist() == [1, 0, 2, 43] + [0] * (len(headers[2]) - 4)
            assert int(case.seed) == 44
        for read, source in (("read_headers", torch.stack(headers)), ("read_trailer", sum(trailers))):
            status, nonfinite = i32(0, 0, 0), i32(0)
            found = torch.full((segments,), -7, dtype=torch.int32, device=DEVICE)
            world = {"world": 2} if read == "read_trailer" else {}
            getattr(modules["headers"], read)(source, status, nonfinite, found, **world)
            assert found.tolist() == expected
            assert status.tolist() == [1, int(failed), 0]
            assert nonfinite.tolist() == [1]

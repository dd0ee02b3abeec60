"""dense_dtype=torch.bfloat16: what is never compressed travels in 16 bits, and what rounding loses is not lost."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedcomp
from fusedcomp import Residual, TopK
from fusedcomp.narrow import NarrowExchange, is_narrow
from fusedcomp.pipeline import DenseExchange
from kernel_cases import POISON, build
from kernel_runs import DEVICE, KERNELS, TWINS, TYPES, halved, i32, i64, same, unread, written
from ranks import digest, loss_of, message_of, net, run

NARROW: dict[str, Any] = {"dense_dtype": torch.bfloat16}


def narrow_of(optimizer: Any) -> list[NarrowExchange]:
    return [e for e in optimizer._exchanges if isinstance(e, NarrowExchange)]


def vectors() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(n)) for n in (100, 3, 1, 33)]


def whole_grads(params: list[nn.Parameter], generator: torch.Generator) -> None:
    """Sums of which are exact in fp32, and which bf16 does not hold."""
    for param in params:
        param.grad = torch.randint(-(2**13), 2**13, param.shape, generator=generator).float() / 16


# ---- kernels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parity", [None, 0, 1])
@pytest.mark.parametrize("with_scales", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("numels", [(1,), (2048,), (1, 2049, 5, 7000)])
def test_packing(numels: tuple[int, ...], dtype: torch.dtype, with_scales: bool, parity: int | None) -> None:
    """Sent and kept add up to gradient and residual, bit for bit; where there is no gradient the residual stays."""
    missing = (1,) if len(numels) > 1 else ()
    case = build(numels, device=DEVICE, dtype=dtype, shift=1, missing=missing)
    case.residual.mul_(2.0**-8)
    results = []
    for modules in (KERNELS, TWINS):
        mine, flag = case.copy(), i32(0)
        residual = halved(mine.residual, parity)
        if parity is not None:  # padding is zeros in both halves
            residual.view(2, -1)[1 - parity].zero_()
        values = torch.full((case.segments.numel,), POISON, dtype=torch.bfloat16, device=DEVICE)
        modules["narrow"].pack_narrow(
            mine.segments, mine.operands(), mine.scales if with_scales else None,
            None if parity is None else i32(parity), residual, values, flag, grad_scale=-1.0,
        )  # fmt: skip
        unread(case.residual, residual, parity)
        results.append({"residual": written(residual, parity), "values": values, "flag": flag})
    same(*results)
    assert int(results[0]["flag"]) == 0
    for segment, grad in enumerate(case.grads):
        where = case.segments.slices[segment]
        sent, kept = results[0]["values"][case.segments.compact_slices[segment]], results[0]["residual"][where]
        if grad is None:
            assert not sent.any()
            assert torch.equal(kept, case.residual[where])
            continue
        scaled = -grad.float() * (case.scales[segment] if with_scales else 1.0)
        assert torch.equal(sent.float() + kept, scaled + case.residual[where])
        assert (kept.abs() <= 2.0**-8 * sent.float().abs()).all()


@pytest.mark.parametrize("values", ["nan", "inf"])
def test_what_is_not_finite_is_sent_and_told(values: str) -> None:
    case, results = build((5, 2049), device=DEVICE, values=values), []
    for modules in (KERNELS, TWINS):
        mine, flag = case.copy(), i32(0)
        sent = torch.zeros(case.segments.numel, dtype=torch.bfloat16, device=DEVICE)
        modules["narrow"].pack_narrow(
            mine.segments, mine.operands(), None, None, mine.residual, sent, flag, grad_scale=1.0
        )
        results.append({"residual": mine.residual, "values": sent.float(), "flag": flag})
    same(*results)
    assert int(results[0]["flag"]) == 1
    assert results[0]["residual"].isfinite().all()
    assert int((~results[0]["values"].isfinite()).sum()) == 1


def test_the_largest_values_stay_finite() -> None:
    case, results = build((8,), device=DEVICE), []
    case.residual.zero_()
    case.grads[0].copy_(torch.tensor([3.4e38, -3.4e38, 1e-40, 1e-45, 0.0, -0.0, 1.0, 1.00390625]))
    for modules in (KERNELS, TWINS):
        mine, flag = case.copy(), i32(0)
        sent = torch.zeros(8, dtype=torch.bfloat16, device=DEVICE)
        modules["narrow"].pack_narrow(
            mine.segments, mine.operands(), None, None, mine.residual, sent, flag, grad_scale=1.0
        )
        results.append({"residual": mine.residual, "values": sent.float(), "flag": flag})
    same(*results)
    assert int(results[0]["flag"]) == 0
    assert torch.equal(results[0]["values"] + results[0]["residual"][:8], case.grads[0])


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("numel", [1, 2048, 5001])
def test_sums_in_rank_order(numel: int, world: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    rows = torch.randn(world, numel + 8, generator=generator).bfloat16().to(DEVICE)[:, 8:]
    results = []
    for modules in (KERNELS, TWINS):
        mean = torch.full((numel,), POISON, device=DEVICE)
        modules["narrow"].sum_narrow(rows, mean, inverse_world=1.0 / 3.0)
        results.append({"mean": mean})
    same(*results)


@pytest.mark.parametrize("numels", [(5,), (5,) * 40])
def test_headers(numels: tuple[int, ...]) -> None:
    case, results = build(numels, device=DEVICE, missing=(0,)), []
    values = torch.zeros(sum(numels), dtype=torch.bfloat16, device=DEVICE)
    for modules in (KERNELS, TWINS):
        flag, seed, header = i32(1), i32(7), i32(*[-7] * (4 + -(-len(numels) // 32)))
        modules["narrow"].end_narrow(case.operands(), flag, seed, values, header)
        results.append({"flag": flag, "seed": seed, "header": header})
    same(*results)
    assert results[0]["header"][:4].tolist() == [1 + 256 + (sum(numels) << 16), sum(numels), 1, 7]
    assert int(results[0]["seed"]) == 8
    assert i64(int(results[0]["header"][4]) & 1).item() == 0


# ---- what a step does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(1, 9))
def test_only_where_it_moves_fewer_bytes(ranks: int) -> None:
    assert is_narrow(10_000, 5, torch.bfloat16, ranks) == (ranks <= 3)
    assert not is_narrow(10_000, 5, torch.float32, ranks)
    assert not is_narrow(4, 4, torch.bfloat16, ranks)  # headers


def test_the_default_is_fp32() -> None:
    for more in ({}, {"dense_dtype": torch.float32}):
        params = vectors()
        optimizer = fusedcomp.SGD(params, lr=1.0, **more)
        assert [type(e) for e in optimizer._exchanges] == [DenseExchange]
        assert not any(optimizer.state[p] for p in params)


@pytest.mark.parametrize("maximize", [False, True])
def test_nothing_is_lost(maximize: bool) -> None:
    """Over a run, bit for bit; and half as many bytes."""
    params = vectors()
    optimizer = fusedcomp.SGD(params, lr=1.0, maximize=maximize, **NARROW)
    generator, totals = torch.Generator().manual_seed(0), [torch.zeros_like(p) for p in params]
    for _ in range(20):
        whole_grads(params, generator)
        for total, param in zip(totals, params, strict=True):
            total += -param.grad if maximize else param.grad
        optimizer.step()
    (exchange,) = narrow_of(optimizer)
    for total, param in zip(totals, params, strict=True):
        assert torch.equal(optimizer.state[param]["residual"] - param.detach(), total)
    found = optimizer.metrics()
    assert int(found["bytes_dense"]) == 4 * 137
    assert int(found["bytes_sent"]) == exchange.own.nbytes == 32 + 2 * 144  # header and values, each up to 16 bytes
    norm = torch.cat([optimizer.state[p]["residual"].view(-1) for p in params]).norm()
    torch.testing.assert_close(found["residual_norm"], norm)


def test_it_follows_torch_with_momentum_and_decay() -> None:
    """Error feedback: after many steps as near as after one, to a few roundings of a step."""
    ours, theirs = vectors(), vectors()
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}
    optimizer, plain = fusedcomp.SGD(ours, **options, **NARROW), torch.optim.SGD(theirs, **options)
    for _ in range(200):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape) + 1.0
            other.grad = mine.grad.clone()
        optimizer.step()
        plain.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=0.01 * 10 * 4 * 2.0**-8)


# ---- ranks ---------------------------------------------------------------------------------------------------------


def _over_ranks(rank: int, world: int) -> bool:
    """Replicas agree; over ranks mass is conserved bit for bit; on four they travel in fp32."""
    params = vectors()
    optimizer = fusedcomp.SGD(params, lr=1.0, **NARROW)
    generator, totals = torch.Generator().manual_seed(rank), [torch.zeros_like(p) for p in params]
    for _ in range(10):
        whole_grads(params, generator)
        if rank == 1:
            params[1].grad = None  # what another rank has a gradient of, this one sends zeros for
        for total, param in zip(totals, params, strict=True):
            total += 0.0 if param.grad is None else param.grad
        optimizer.step()
    everyone = [None] * world
    dist.all_gather_object(everyone, [p.detach().numpy().tobytes() for p in params])
    assert all(bits == everyone[0] for bits in everyone)
    for total, param in zip(totals, params, strict=True):
        kept = optimizer.state[param].get("residual", torch.zeros_like(param)).clone()
        dist.all_reduce(kept)
        dist.all_reduce(total)
        assert torch.equal(kept / world - param.detach(), total / world)
    return bool(narrow_of(optimizer))


def test_replicas_agree_and_nothing_is_lost() -> None:
    assert run(_over_ranks, 2) == [True] * 2
    assert run(_over_ranks, 4) == [False] * 4


def _resumed(rank: int, world: int, optimizer_class: str) -> bytes:
    make = {"lr": 0.05, "momentum": 0.9, "compressor": TopK(0.05), **NARROW}
    model, again = net(), net(1)
    build_one = getattr(fusedcomp, optimizer_class)
    optimizer, resumed = build_one(model.parameters(), **make), build_one(again.parameters(), **make)
    for number in range(10):
        if number == 5:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            again.load_state_dict(model.state_dict())
            resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        for m, o in ((model, optimizer), (again, resumed)):
            if o is resumed and number < 5:
                continue
            o.zero_grad()
            loss_of(m, rank, number).backward()
            o.step()
    assert narrow_of(optimizer)
    assert digest(model) == digest(again)
    return digest(model)


@pytest.mark.parametrize("optimizer_class", ["SGD", "LARS"])
def test_a_resumed_run_is_bit_exact(optimizer_class: str) -> None:
    assert len(set(run(_resumed, 2, optimizer_class))) == 1


def _void_steps(rank: int, world: int) -> None:
    """A run with void steps ends where one without them does, bit for bit."""
    ended = []
    for voids in (False, True):
        params = vectors()
        optimizer = fusedcomp.SGD(params, lr=1.0, momentum=0.5, skip_nonfinite=True, **NARROW)
        generator = torch.Generator().manual_seed(rank)
        for number in range(12):
            if voids and number % 3 == 1:
                for param in params:
                    param.grad = torch.full_like(param, float("nan") if rank == 1 else 1.0)
                optimizer.step()
            whole_grads(params, generator)
            optimizer.step()
        assert optimizer.skipped == 4 * voids
        optimizer.state_dict()  # the half that holds becomes the first
        residuals = [optimizer.state[p]["residual"].clone() for p in params]
        assert sum(r.abs().sum() for r in residuals) > 0
        ended.append([p.detach().clone() for p in params] + residuals)
    assert all(map(torch.equal, *ended))


def test_void_steps() -> None:
    run(_void_steps, 2)


def _a_failing_rank(rank: int, world: int, skips: bool) -> None:
    """Its residual stays, its peers are told, and all go on alike."""
    params = [*vectors(), nn.Parameter(torch.zeros(64, 64))]
    optimizer = fusedcomp.SGD(
        params, lr=1.0, compressor=TopK(0.1), memory=Residual(), bucket_cap_mb=0.001, skip_nonfinite=skips, **NARROW
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    whole_grads(params, generator)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state_dict()  # the half that holds becomes the first
    before = [optimizer.state[p]["residual"].clone() for p in params[:-1]]
    sum(param.sum() * float(rank + 1) for param in params).backward()
    if rank == 1:  # the last bucket, of the vectors, is not on its way yet
        assert "told" in message_of(lambda: optimizer.fail("told"))
        optimizer.state_dict()
        assert all(map(torch.equal, before, [optimizer.state[p]["residual"] for p in params[:-1]]))
    else:
        assert "another rank failed" in message_of(optimizer.step)
    optimizer.zero_grad()
    whole_grads(params, generator)
    optimizer.step()
    everyone = [None] * world
    dist.all_gather_object(everyone, [p.detach().numpy().tobytes() for p in params])
    assert all(bits == everyone[0] for bits in everyone)


@pytest.mark.parametrize("skips", [False, True])
def test_a_failing_rank(skips: bool) -> None:
    run(_a_failing_rank, 2, skips)


def test_bad_arguments() -> None:
    message = message_of(lambda: fusedcomp.SGD(vectors(), dense_dtype=torch.float16))
    assert message == "ValueError: dense_dtype must be torch.float32 or torch.bfloat16, got torch.float16"
    message = message_of(lambda: fusedcomp.SGD([{"params": vectors(), **NARROW}]))
    assert "dense_dtype is the constructor's, for all param groups alike" in message

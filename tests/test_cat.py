"""CAT: what a step does with the entries that were chosen, and ranks; the invariants of Khirirat et al., 2021."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from cat_oracle import BOUND, KINDS, alphas, chosen, costs_of, seeds, values_of
from fusedcomp import CAT, AffineCost, LinkCost, MomentumCorrection, NoMemory, PacketCost, Residual
from fusedcomp.ddp import CompressionState
from fusedcomp.rooms import Adaptive
from fusedcomp.sparse import SparseExchange
from ranks import digest, loss_of, message_of, net, run
from sameness import hook_and_optimizer, run_and_resumed, train
from steppers import sent_by, stepper

shapes = st.tuples(st.integers(1, 70), st.integers(1, 70))
halves = st.sampled_from([torch.float32, torch.bfloat16])
room_for_all = patch.multiple(Adaptive, _FIRST=1, _SETTLING=10**6)


# ---- a step --------------------------------------------------------------------------------------------------------


@given(shape=shapes, seed=seeds, fixed=st.floats(0.0, 1e4), kind=KINDS)
def test_the_largest_are_sent(shape: Any, seed: int, fixed: float, kind: str) -> None:
    """As many as were chosen, where there is room; the header says how many were wanted."""
    cost = AffineCost(1.0, fixed)
    weight, optimizer, exchange = stepper(shape, CAT(cost), NoMemory(), 0.0)
    weight.grad = values_of(kind, weight.numel(), seed).view(shape)
    gradient = weight.grad.flatten().clone()
    optimizer.step()
    wanted = chosen(gradient, cost.terms(exchange._message()))
    assert int(exchange.buffers.payloads.header[0, 1]) == wanted
    sent = sent_by(exchange)[: len(gradient)]
    count = min(max(wanted, 1), exchange.selection.k)
    assert int(optimizer.metrics()["overflow"]) == max(wanted - exchange.selection.k, 0)
    assert torch.equal(sent[sent != 0].abs().sort().values, gradient[gradient != 0].abs().sort().values[-count:])


@given(shape=shapes, seed=seeds, fixed=st.floats(0.0, 1e4), momentum=st.sampled_from([0.0, 0.9]), dtype=halves)
def test_sent_and_kept_add_up(shape: Any, seed: int, fixed: float, momentum: float, dtype: Any) -> None:
    """Bit for bit, and they share no entry."""
    generator = torch.Generator().manual_seed(seed)
    memory = MomentumCorrection() if momentum else Residual()
    weight, optimizer, exchange = stepper(
        shape, CAT(AffineCost(fixed=fixed), wire_dtype=dtype), memory, momentum, state_dtype=dtype
    )
    accumulated: list[Tensor] = []
    refine = exchange._refine
    exchange._refine = lambda: (accumulated.append(exchange.residual.float().clone()), refine())  # type: ignore[method-assign, func-returns-value]
    for _ in range(3):
        weight.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        sent, kept = sent_by(exchange), exchange.residual.float()
        assert torch.equal(sent + kept, accumulated[-1])
        assert not (sent * kept).any()


@given(seed=seeds, fixed=st.floats(0.0, 1e4), packets=st.booleans())
def test_the_guaranteed_descent(seed: int, fixed: float, packets: bool) -> None:
    """Invariant 5: on quadratics, F(x - Q(g) / L) <= F(x) - alpha(T) |g|^2 / (2 L)."""
    draw = torch.Generator().manual_seed(seed)
    factor = torch.randn(40, 40, generator=draw, dtype=torch.float64)
    hessian = factor @ factor.T
    smoothness = float(torch.linalg.eigvalsh(hessian)[-1])
    cost = PacketCost(60.0, 20.0, fixed) if packets else AffineCost(fixed=fixed)
    weight, optimizer, exchange = stepper((40,), CAT(cost), NoMemory(), 0.0, lr=1.0 / smoothness)
    with torch.no_grad():
        weight.copy_(torch.randn(40, generator=draw))

    def loss() -> float:
        return float(weight.detach().double() @ hessian @ weight.detach().double()) / 2

    for _ in range(5):
        before, gradient = loss(), (hessian @ weight.detach().double()).float()
        weight.grad = gradient.clone()
        optimizer.step()
        gained = float(sent_by(exchange)[:40].double().square().sum()) / (2 * smoothness)
        assert loss() <= before - gained + 1e-5 * before
        rates = alphas(gradient) / costs_of(cost.terms(exchange._message()), np.arange(1, 41))
        room = min(exchange.selection.k, 40)
        assert rates[int((sent_by(exchange) != 0).sum()) - 1] >= BOUND * rates[:room].max() * (1 - 1e-9)


def test_few_that_are_not_zero() -> None:
    """A gradient with five entries in 70000, which no sample finds: they are sent, and the room becomes small."""
    weight, optimizer, exchange = stepper((700, 100), CAT(AffineCost()), Residual(), 0.0)
    for _ in range(30):
        weight.grad = torch.zeros(700, 100)
        weight.grad.view(-1)[[5, 700, 30_001, 52_000, 69_999]] = 1.0
        optimizer.step()
        assert int(exchange.wanted) == 5 == int((sent_by(exchange) != 0).sum())
    assert exchange.selection.k == 64
    weight.grad = torch.zeros(700, 100)
    optimizer.step()
    assert int(exchange.wanted) == 0
    assert not sent_by(exchange).any()


def test_a_costly_message_goes_dense_and_comes_back() -> None:
    """Where as much is wanted as an all-reduce would move; eight steps later a payload shows what is wanted."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = fusedcomp.SGD([weight], lr=1.0, compressor=CAT(AffineCost(fixed=1e7)), memory=Residual())
    (exchange,) = [e for e in optimizer._exchanges if isinstance(e, SparseExchange)]
    total, dense = torch.zeros_like(weight), []
    for number in range(60):
        weight.grad = torch.randint(-8, 9, weight.shape).float() * (number < 30)
        total += weight.grad
        optimizer.step()
        assert int(optimizer.metrics()["bytes_sent"]) <= 4 * weight.numel() + 64
        dense.append(exchange.dense_step)
    assert any(dense[8:30])
    assert not any(dense[-8:])
    assert torch.equal(optimizer.state[weight]["residual"] - weight.detach(), total)


# ---- ranks ---------------------------------------------------------------------------------------------------------


def _rooms(rank: int, world: int) -> tuple[bytes, list[int], list[int], bool]:
    """Ranks that want differently much, and a change: the rooms, what was wanted, and that nothing is lost."""
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer = fusedcomp.SGD([weight], lr=1.0, compressor=CAT(AffineCost(fixed=300.0)), memory=Residual())
    (exchange,) = [e for e in optimizer._exchanges if isinstance(e, SparseExchange)]
    generator = torch.Generator().manual_seed(rank)
    total, rooms, wanted = torch.zeros_like(weight), [], []
    for number in range(60):
        power = 1 if 20 <= number < 35 else 5 - 2 * rank
        weight.grad = (torch.randn(64, 128, generator=generator) ** power).mul(8).round()
        total += weight.grad
        optimizer.step()
        rooms.append(exchange.selection.k)
        wanted.append(int(exchange.wanted))
        assert int(optimizer.metrics()["nnz"]) <= exchange.selection.k
    kept = optimizer.state[weight]["residual"].clone()
    dist.all_reduce(kept)
    dist.all_reduce(total)
    model = nn.Module()
    model.weight = weight
    return digest(model), rooms, wanted, torch.equal(kept - world * weight.detach(), total)


@pytest.mark.parametrize("world", [2, 4])
def test_rooms_follow_what_ranks_want(world: int) -> None:
    results = run(_rooms, world)
    assert len({bits for bits, *_ in results}) == 1
    assert all(rooms == results[0][1] for _, rooms, *_ in results)  # the same decision on every rank
    assert all(whole for *_, whole in results)
    rooms = results[0][1]
    assert rooms[0] == 64 * 128 // 32
    assert len(set(rooms)) > 2
    most = [max(wanted[number] for _, _, wanted, _ in results) for number in range(60)]
    assert len({tuple(wanted) for _, _, wanted, _ in results}) == world  # every rank chooses its own
    assert rooms[-1] >= min(most[-16:])


@room_for_all
def _resumed(rank: int, world: int) -> bytes:
    """Where rooms suffice: what an overflow leaves waiting is for the tests of rooms."""
    runs = run_and_resumed(rank, {"lr": 0.05, "momentum": 0.9, "compressor": CAT(AffineCost(fixed=100.0))})
    for number in range(12, 24):
        for each in runs:
            train(each, rank, number)
            assert int(each[1].metrics()["overflow"]) == 0
    (model, _), (again, _) = runs
    assert digest(model) == digest(again)
    return digest(model)


def test_resume_and_replicas_are_bit_exact() -> None:
    assert len(set(run(_resumed, 2))) == 1


@room_for_all
def _hook_and_optimizer(rank: int, world: int) -> None:
    hook_and_optimizer(rank, world, CAT(AffineCost(fixed=100.0)))


def test_the_hook_sends_the_same() -> None:
    run(_hook_and_optimizer, 2)


def _other_costs(rank: int, world: int) -> str:
    cost = AffineCost(fixed=float(rank))
    return message_of(lambda: fusedcomp.SGD([nn.Parameter(torch.zeros(64, 64))], lr=0.1, compressor=CAT(cost)))


def test_costs_are_equal_on_all_ranks() -> None:
    for message in run(_other_costs, 2):
        assert "compressor of group 0" in message


def _measured(rank: int, world: int) -> tuple[Any, bytes]:
    """A link as it is, and a training with it."""
    cost = LinkCost.measure(compute=0.01, seconds=0.0)
    model = net()
    optimizer = fusedcomp.SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=CAT(cost, objective="time"))
    for number in range(10):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()
    return (cost.latency, cost.bandwidth, cost.compute), digest(model)


def test_a_link_is_measured_alike_on_all_ranks() -> None:
    (first, other) = run(_measured, 2)
    assert first == other
    (latency, bandwidth, compute), _ = first
    assert latency > 0
    assert bandwidth > 0
    assert compute == 0.01


def _failing(rank: int, world: int) -> tuple[bytes, str]:
    """Rank 1 does what is not allowed between backward and step; the others learn of it, and nothing drifts."""
    model = net()
    optimizer = fusedcomp.SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=CAT(AffineCost(fixed=100.0)))
    message = ""
    for number in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        if rank == 1 and number == 2:
            model[0].weight.grad.mul_(2.0)
        said = message_of(optimizer.step)
        message = said if said != "nothing was raised" else message
    return digest(model), message


def test_a_rank_that_fails() -> None:
    results = run(_failing, 2)
    assert len({bits for bits, _ in results}) == 1
    assert "another rank failed" in results[0][1]
    assert "changed" in results[1][1] or "grad" in results[1][1]


# ---- the record ----------------------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    for make, told in (
        (lambda: CAT(1.0), "TypeError: CAT: cost must be AffineCost(...), PacketCost(...) or LinkCost(...), got 1.0"),
        (lambda: CAT(AffineCost(), wire_dtype=torch.int8), "ValueError: CAT: wire_dtype must be"),
        (lambda: CAT(AffineCost(), "bytes"), "ValueError: CAT: objective must be 'bits' or 'time', got 'bytes'"),
        (lambda: CAT(AffineCost(), "time"), "ValueError: CAT: objective='time' goes with cost=LinkCost(...)"),
        (lambda: CAT(LinkCost(1e-5, 1e9)), "ValueError: CAT: objective='time' goes with cost=LinkCost(...)"),
        (lambda: LinkCost(1e-5, 0), "ValueError: LinkCost: bandwidth must be > 0, got 0.0"),
        (lambda: LinkCost(-1.0, 1e9), "ValueError: LinkCost: latency must be a number from 0 to 1e15, got -1.0"),
        (lambda: CompressionState(CAT(LinkCost(1e-5, 1e9, 0.1), "time")), "ValueError: CompressionState: CAT("),
        (lambda: AffineCost(-1.0), "ValueError: AffineCost: per_byte must be a number from 0 to 1e15, got -1.0"),
        (
            lambda: AffineCost(1.0, float("nan")),
            "ValueError: AffineCost: fixed must be a number from 0 to 1e15, got nan",
        ),
        (lambda: AffineCost(0.0), "ValueError: AffineCost: per_byte or fixed must be > 0, got 0.0 for both"),
        (lambda: PacketCost(5), "ValueError: PacketCost: payload must be at least 6 bytes, an entry's, got 5"),
        (lambda: PacketCost(1e30), "ValueError: PacketCost: payload must be a number from 0 to 1e15, got 1e+30"),
        (lambda: PacketCost(512, True), "ValueError: PacketCost: header must be a number from 0 to 1e15, got True"),
    ):
        assert message_of(make).startswith(told)


@pytest.mark.parametrize("variant", ["sparse", "sparse_quantized", "stochastic"])
def test_only_ratios_of_costs_matter(variant: str) -> None:
    """Down to what fp64 just holds: the same number of entries in every step."""

    def sent(unit: float) -> list[int]:
        cost = AffineCost(unit, 1500.0 * unit)
        memory = NoMemory() if variant == "stochastic" else Residual()
        weight, optimizer, _ = stepper((4096,), CAT(cost, variant=variant), memory, 0.0)
        draw, found = torch.Generator().manual_seed(0), []
        for _ in range(3):
            weight.grad = torch.randn(4096, generator=draw) ** 3
            optimizer.step()
            found.append(int(optimizer.metrics()["nnz"]))
        return found

    assert min(sent(1.0)) > 1
    assert all(sent(2.0**power) == sent(1.0) for power in (-1074, -1000, -100, 38))


@pytest.mark.parametrize("cost", [AffineCost(2.0, 60.0), PacketCost(512, 64, 64), LinkCost(1e-5, 1e9, 0.1)])
def test_a_record_through_a_checkpoint(cost: Any, tmp_path: Any) -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    compressor = CAT(cost, "time" if isinstance(cost, LinkCost) else "bits", torch.bfloat16)
    optimizer = fusedcomp.SGD([weight], lr=0.1, compressor=compressor)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = fusedcomp.SGD([weight], lr=0.1)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.param_groups[0]["compressor"] == compressor

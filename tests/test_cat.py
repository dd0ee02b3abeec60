"""CAT: how many entries are chosen, what a step does with them, ranks; the invariants of Khirirat et al., 2021."""

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
from fusedcomp import CAT, AffineCost, LinkCost, MomentumCorrection, NoMemory, PacketCost, Residual
from fusedcomp.costs import Message, Terms
from fusedcomp.ddp import CompressionState
from fusedcomp.kernels.reference.tune import choose_entries, tally_magnitudes
from fusedcomp.kernels.segments import BLOCK
from fusedcomp.kernels.tune import COUNTERS, MAGNITUDES, STEPS
from fusedcomp.sizing import Adaptive
from fusedcomp.sparse import SparseExchange
from hooked import step as hooked_step
from hooked import wrapped
from kernel_cases import SIZES, build, scratch
from kernel_runs import DEVICE, KERNELS, STEP, TWINS, i32, i64, same
from ranks import digest, loss_of, message_of, net, run
from steppers import sent_by, stepper

seeds = st.integers(0, 2**31)
shapes = st.tuples(st.integers(1, 70), st.integers(1, 70))
halves = st.sampled_from([torch.float32, torch.bfloat16])
room_for_all = patch.multiple(Adaptive, _FIRST=1, _SETTLING=10**6)
BOUND = 1.0 / (1.0 + 1.0 / STEPS.value) ** 2  # of the best rate, which the rate found has at least


def values_of(kind: str, numel: int, seed: int) -> Tensor:
    """f32, of kinds that gradients are of, and of some that they are not."""
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(numel, generator=draw, dtype=torch.float64)
    if kind == "heavy":
        normal = normal**5
    if kind == "ties":
        normal = (2 * normal).round()
    if kind == "alike":
        normal = normal.sign()
    if kind == "wide":
        normal = normal * 2.0 ** (torch.rand(numel, generator=draw) * 20 - 10)
    if kind == "one":
        normal[0] = 1e4
    return normal.float()


KINDS = st.sampled_from(["normal", "heavy", "ties", "alike", "wide", "one"])
AFFINE = st.tuples(st.floats(1e-3, 1e3), st.floats(0.0, 1e6)).map(lambda of: Terms(*of))
PACKETS = st.tuples(st.floats(1.0, 1e3), st.floats(0.0, 1e4), st.integers(1, 400), st.integers(0, 300)).map(
    lambda of: Terms(*of)
)


def chosen(values: Tensor, terms: Terms, room: int = 1 << 30) -> int:
    """The number of entries that the twins find."""
    counters = torch.zeros(COUNTERS, MAGNITUDES, dtype=torch.int32)
    tally_magnitudes(counters, nn.functional.pad(values, (0, -len(values) % BLOCK)))
    ranks, wanted = torch.tensor([-7]), torch.tensor([-7], dtype=torch.int32)
    costs = torch.tensor([terms.each, terms.fixed], dtype=torch.float64)
    shape = torch.tensor([terms.whole, terms.lead])
    choose_entries(costs, shape, counters, ranks, wanted, room=room, numel=len(values))
    assert not counters.any()
    assert int(ranks) == min(max(int(wanted), 1), room)
    return int(wanted)


def costs_of(terms: Terms, entries: np.ndarray) -> np.ndarray:
    return terms.each * np.ceil((entries + terms.lead) / terms.whole) + terms.fixed


def alphas(values: Tensor) -> np.ndarray:
    """alpha(1), alpha(2), ... in float64, by sorting."""
    squares = np.sort(values.double().numpy() ** 2)[::-1].cumsum()
    return squares / squares[-1]


# ---- the choice ----------------------------------------------------------------------------------------------------


@given(kind=KINDS, numel=st.integers(1, 3 * BLOCK), seed=seeds, terms=AFFINE | PACKETS)
def test_the_rate_is_within_the_bound_of_the_best(kind: str, numel: int, seed: int, terms: Terms) -> None:
    """Invariant 8: against all T by brute force, in float64; also the least cost of what is sent is paid for."""
    values = values_of(kind, numel, seed)
    found = chosen(values, terms)
    if not values.any():
        assert found == 0
        return
    rates = alphas(values) / costs_of(terms, np.arange(1, numel + 1))
    assert rates[found - 1] >= BOUND * rates.max() * (1 - 1e-9)


@pytest.mark.parametrize("fixed", [0.0, 10.0, 100.0, 1e3, 1e4])
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_the_rate_is_nearly_the_best_where_magnitudes_are_spread(kind: str, fixed: float) -> None:
    """The bound is of magnitudes that all lie at edges of bins; at random places two in a hundred are lost at most."""
    values = values_of(kind, 50_000, 1)
    terms = Terms(1.0, fixed)
    rates = alphas(values) / costs_of(terms, np.arange(1, len(values) + 1))
    assert rates[chosen(values, terms) - 1] >= (0.98 if fixed else BOUND) * rates.max()


@given(kind=KINDS, numel=st.integers(1, 3 * BLOCK), seed=seeds)
def test_what_alpha_is(kind: str, numel: int, seed: int) -> None:
    """Invariant 1, of the oracle: in (0, 1], rising, concave, at least T / d, 1 at d."""
    values = values_of(kind, numel, seed)
    if not values.any():
        return
    alpha = alphas(values)
    assert alpha[0] > 0
    assert alpha[-1] == 1.0
    gains = np.diff(alpha, prepend=0.0)
    assert (gains >= 0).all()
    assert (np.diff(gains) <= 1e-12).all()
    assert (alpha >= np.arange(1, numel + 1) / numel - 1e-12).all()


@given(kind=KINDS, numel=st.integers(1, 2 * BLOCK), seed=seeds, terms=AFFINE | PACKETS, power=st.integers(-60, 60))
def test_scale_sign_and_order_do_not_matter(kind: str, numel: int, seed: int, terms: Terms, power: int) -> None:
    """Invariant 2: T does not depend on the norm; to the bit for powers of two, which move no value in its bin."""
    values = values_of(kind, numel, seed)
    found = chosen(values, terms)
    assert chosen(-values * 2.0**power, terms) == found
    assert chosen(values[torch.randperm(numel, generator=torch.Generator().manual_seed(seed))], terms) == found


@given(kind=KINDS, numel=st.integers(1, 2 * BLOCK), seed=seeds)
def test_ends_of_the_cost(kind: str, numel: int, seed: int) -> None:
    """Invariant 3: if a message costs nothing but its entries, one is sent; if entries cost nothing, all that are."""
    values = values_of(kind, numel, seed)
    there = int((values != 0).sum())
    assert chosen(values, Terms(1.0, 0.0)) == min(there, 1)
    most = chosen(values, Terms(0.0, 1.0))  # but for what is next to nothing beside the others
    assert most == there or alphas(values)[most - 1] >= 1.0 - 1e-9


@given(kind=KINDS, numel=st.integers(1, 2 * BLOCK), seed=seeds, fixed=st.tuples(*[st.floats(0, 1e5)] * 2))
def test_more_is_sent_where_a_message_costs_more(kind: str, numel: int, seed: int, fixed: tuple[float, float]) -> None:
    """Invariant 4."""
    values, (less, more) = values_of(kind, numel, seed), sorted(fixed)
    assert chosen(values, Terms(1.0, less)) <= chosen(values, Terms(1.0, more * (1 + 1e-9)))


@given(kind=KINDS, numel=st.integers(1, 3 * BLOCK), seed=seeds, terms=PACKETS)
def test_packets_are_full(kind: str, numel: int, seed: int, terms: Terms) -> None:
    """Invariant 6: the entries fill packets, or are all there are, but for what is next to nothing beside them."""
    values = values_of(kind, numel, seed)
    found = chosen(values, terms)
    assert (found + terms.lead) % terms.whole == 0 or not values.any() or alphas(values)[found - 1] >= 1.0 - 1e-9


@given(numel=st.integers(1, 2 * BLOCK), seed=seeds, room=st.integers(1, 2 * BLOCK))
def test_no_more_are_sent_than_there_is_room_for(numel: int, seed: int, room: int) -> None:
    chosen(values_of("normal", numel, seed), Terms(1.0, 100.0), room)


@given(kind=KINDS, seed=seeds, compute=st.floats(1e-4, 1.0), world=st.integers(1, 64))
def test_more_is_sent_over_a_faster_link(kind: str, seed: int, compute: float, world: int) -> None:
    """The step's computing buys more entries the less they take; its rate is the best per second."""
    values, message = values_of(kind, 5000, seed), Message(40, 6, world, 1.0)
    found = [chosen(values, LinkCost(2e-5, rate, compute).terms(message)) for rate in (1e6, 1e8, 1e10)]
    assert found == sorted(found)
    hops = max(world - 1, 1)
    entries = np.arange(1, 5001)
    rates = alphas(values) / (compute + hops * (2e-5 + (40 + 6 * entries) / 1e8))
    assert rates[found[1] - 1] >= BOUND * rates.max() * (1 - 1e-9)


def test_the_terms_of_a_cost() -> None:
    """In bytes of the very payload: 6 or 4 an entry, and its header."""
    message = Message(head=40, entry=6, world_size=4, share=0.5)
    assert AffineCost(2.0, 100.0).terms(message) == Terms(12.0, 180.0)
    assert PacketCost(512, 64, 64).terms(message) == Terms(576.0, 64.0, 85, 7)
    assert PacketCost(512, 64, 64).terms(message._replace(entry=4)) == Terms(576.0, 64.0, 128, 10)
    assert LinkCost(1e-5, 1e6, 0.01).terms(message) == pytest.approx((18e-6, 120e-6 + 3e-5 + 0.005, 1, 0))
    assert LinkCost(1e-5, 1e6).terms(message._replace(world_size=1)) == LinkCost(1e-5, 1e6).terms(
        message._replace(world_size=2)
    )
    for entries in range(300):  # entries are not divided, the header fills a whole number of their places
        packets = -(-(entries + 7) // 85)
        assert packets * 85 * 6 >= 40 + 6 * entries


# ---- kernels and twins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", ["normal", "ties", "clustered", "nan", "inf"])
@pytest.mark.parametrize("name", ["one", "2047", "2049", "mixed", "two_pages"])
def test_counting_and_choosing(name: str, values: str, state_dtype: torch.dtype) -> None:
    """Counts of the residuals that the pass leaves, in whatever copies; the rest of the pass is as without."""
    missing = (3,) if name == "mixed" else ()
    case = build(SIZES[name], device=DEVICE, values=values, state_dtype=state_dtype, missing=missing)
    results = []
    for modules in (KERNELS, TWINS):
        mine, counters = case.copy(), torch.zeros(COUNTERS, MAGNITUDES, dtype=torch.int32, device=DEVICE)
        out = scratch(mine, 1, 1)
        written = (mine.velocity, mine.residual, out["counts"], out["marks"], None, out["flag"])
        modules["compress"].compress(
            mine.segments, mine.operands(), mine.velocity, mine.residual, None, i64(1 << 60), None, None, mine.seed,
            None, *written, counters, **STEP,
        )  # fmt: skip
        result = {"counted": counters.sum(0), "residual": mine.residual, "marks": out["marks"], "counts": out["counts"]}
        for number, (whole, lead, room) in enumerate([(1, 0, 10**6), (1, 0, 3), (85, 7, 10**6)]):
            again, rank, wanted = counters.clone(), i64(-7), i32(-7)
            modules["tune"].choose_entries(
                torch.tensor([6.0, 300.0], dtype=torch.float64, device=DEVICE), i64(whole, lead), again, rank, wanted,
                room=room, numel=mine.segments.numel,
            )  # fmt: skip
            assert not again.any()
            result |= {f"rank{number}": rank, f"wanted{number}": wanted}
        results.append(result)
    same(*results)
    left = torch.cat([results[0]["residual"][where] for where in case.segments.slices]).float()
    if values not in ("nan", "inf") and not missing:  # all but what is next to nothing beside the largest of its block
        assert 0 <= int((left != 0).sum() - results[0]["counted"].sum()) <= 0.001 * len(left)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [0, 1, 1000])
def test_choosing_from_any_counts(most: int, seed: int) -> None:
    """Empty bins, octaves far apart, all of fp32's; poisoned outputs."""
    draw, results = torch.Generator().manual_seed(seed), []
    counted = torch.randint(most + 1, (COUNTERS, MAGNITUDES), generator=draw, dtype=torch.int32)
    counted *= (torch.rand(MAGNITUDES, generator=draw) < 0.02 * seed).int()
    counted[:, 0] = 0
    for modules in (KERNELS, TWINS):
        counters, rank, wanted = counted.clone().to(DEVICE), i64(-7), i32(-7)
        modules["tune"].choose_entries(
            torch.tensor([0.37, 10.0 ** seed], dtype=torch.float64, device=DEVICE), i64(1 + 40 * (seed % 2), seed),
            counters, rank, wanted, room=100, numel=int(counted.sum()),
        )  # fmt: skip
        results.append({"rank": rank, "wanted": wanted, "counters": counters})
    same(*results)
    assert not results[0]["counters"].any()
    assert int(results[0]["wanted"]) > 0 or not counted.any()


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs kernels on CPU tensors")
@pytest.mark.parametrize("guarded", [False, True])
def test_a_run_of_kernels_is_a_run_of_twins(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cost, found = PacketCost(60, 20) if guarded else AffineCost(), set()
    for ops in ("kernels", "reference"):
        monkeypatch.setenv("FUSEDCOMP_OPS", ops)
        weight = nn.Parameter(torch.zeros(50, 60))
        optimizer = fusedcomp.SGD([weight], lr=0.1, momentum=0.9, compressor=CAT(cost), skip_nonfinite=guarded)
        generator, wanted = torch.Generator().manual_seed(0), []
        for _ in range(3):
            weight.grad = torch.randn(50, 60, generator=generator)
            optimizer.step()
            wanted.append(int(optimizer._exchanges[0].wanted))
        found.add((weight.detach().numpy().tobytes(), tuple(wanted)))
    assert len(found) == 1
    assert min(wanted) > 0


# ---- a step --------------------------------------------------------------------------------------------------------


@given(shape=shapes, seed=seeds, fixed=st.floats(0.0, 1e4), kind=KINDS)
def test_the_largest_are_sent(shape: Any, seed: int, fixed: float, kind: str) -> None:
    """As many as were chosen, where there is room; the header says how many were wanted."""
    cost = AffineCost(1.0, fixed)
    weight, optimizer, exchange = stepper(shape, CAT(cost), NoMemory(), 0.0)
    weight.grad = values_of(kind, weight.numel(), seed).view(shape)
    gradient = weight.grad.flatten().clone()
    optimizer.step()
    wanted = chosen(gradient, cost.terms(exchange._message(weight.numel())))
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
        rates = alphas(gradient) / costs_of(cost.terms(exchange._message(40)), np.arange(1, 41))
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
    """A resume forgets the room, which matters only where it does not suffice."""
    model, again = net(), net(1)
    make = {"lr": 0.05, "momentum": 0.9, "compressor": CAT(AffineCost(fixed=100.0))}
    optimizer = fusedcomp.SGD(model.parameters(), **make)
    for number in range(12):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()
    resumed = fusedcomp.SGD(again.parameters(), **make)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for number in range(12, 24):
        for m, o in ((model, optimizer), (again, resumed)):
            o.zero_grad()
            loss_of(m, rank, number).backward()
            o.step()
            assert int(o.metrics()["overflow"]) == 0
    assert digest(model) == digest(again)
    return digest(model)


def test_resume_and_replicas_are_bit_exact() -> None:
    assert len(set(run(_resumed, 2))) == 1


@room_for_all
def _hook_and_optimizer(rank: int, world: int) -> None:
    compressor = CAT(AffineCost(fixed=100.0))
    model, other = net(), net()
    ddp = wrapped(model, CompressionState(compressor, model.named_parameters()), bucket_cap_mb=100)
    plain = torch.optim.SGD(model.parameters(), lr=2.0**-5)
    optimizer = fusedcomp.SGD(other.parameters(), lr=2.0**-5, compressor=compressor)
    for number in range(4):
        hooked_step(ddp, plain, rank, number)
        optimizer.zero_grad()
        loss_of(other, rank, number).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


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
        (lambda: LinkCost(-1.0, 1e9), "ValueError: LinkCost: latency must be finite and >= 0, got -1.0"),
        (lambda: CompressionState(CAT(LinkCost(1e-5, 1e9, 0.1), "time")), "ValueError: CompressionState: CAT("),
        (lambda: AffineCost(-1.0), "ValueError: AffineCost: per_byte must be finite and >= 0, got -1.0"),
        (lambda: AffineCost(1.0, float("nan")), "ValueError: AffineCost: fixed must be finite and >= 0, got nan"),
        (lambda: AffineCost(0.0), "ValueError: AffineCost: per_byte or fixed must be > 0, got 0.0 for both"),
        (lambda: PacketCost(5), "ValueError: PacketCost: payload must be at least 6 bytes, an entry's, got 5"),
        (lambda: PacketCost(512, True), "ValueError: PacketCost: header must be finite and >= 0, got True"),
    ):
        assert message_of(make).startswith(told)


@pytest.mark.parametrize("cost", [AffineCost(2.0, 60.0), PacketCost(512, 64, 64), LinkCost(1e-5, 1e9, 0.1)])
def test_a_record_through_a_checkpoint(cost: Any, tmp_path: Any) -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    compressor = CAT(cost, "time" if isinstance(cost, LinkCost) else "bits", torch.bfloat16)
    optimizer = fusedcomp.SGD([weight], lr=0.1, compressor=compressor)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = fusedcomp.SGD([weight], lr=0.1)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.param_groups[0]["compressor"] == compressor

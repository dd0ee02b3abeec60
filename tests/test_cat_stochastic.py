"""CAT with variant="stochastic": the choice, kernels against twins, what is sent on average, ranks."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from cat_oracle import AFFINE, BOUND, KINDS, PACKETS, alphas, costs_of, drawn, guaranteed, omegas, seeds, values_of
from fusedcomp import CAT, AffineCost, LinkCost, NoMemory, PacketCost, Residual
from fusedcomp.costs import Terms
from fusedcomp.ddp import CompressionState
from fusedcomp.kernels.keys import DRAW_UNIT
from fusedcomp.kernels.reference.keys import drawn_weight
from fusedcomp.kernels.segments import BLOCK
from fusedcomp.kernels.tune import COUNTERS, MAGNITUDES
from hooked import step as hooked_step
from hooked import wrapped
from kernel_cases import SIZES, build
from kernel_runs import DEVICE, KERNELS, TWINS, both, i32, i64, same
from ranks import digest, message_of, net, run
from sameness import run_and_resumed, train
from steppers import sent_by, stepper
from test_cat import room_for_all, shapes
from test_guards import _void_steps


def stochastic(cost: Any, **more: Any) -> CAT:
    return CAT(cost, variant="stochastic", **more)


# ---- the choice ----------------------------------------------------------------------------------------------------


@given(kind=KINDS, numel=st.integers(1, 3 * BLOCK), seed=seeds, terms=AFFINE | PACKETS)
def test_the_rate_is_within_the_bound_of_the_best(kind: str, numel: int, seed: int, terms: Terms) -> None:
    """Invariant 8: against all numbers by brute force, in float64. Half a hundredth for what is between the middles."""
    values = values_of(kind, numel, seed)
    found = drawn(values, terms)
    if not values.any():
        assert found == -1
        return
    omega = guaranteed(values)
    rates = omega / costs_of(terms, np.arange(1, len(omega) + 1))
    assert rates[found - 1] >= 0.995 * BOUND * rates.max()


@pytest.mark.parametrize("fixed", [10.0, 100.0, 1e3, 1e4])
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_the_rate_is_nearly_the_best_where_magnitudes_are_spread(kind: str, fixed: float) -> None:
    values = values_of(kind, 20_000, 1)
    omega, terms = guaranteed(values), Terms(1.0, fixed)
    rates = omega / costs_of(terms, np.arange(1, len(omega) + 1))
    assert rates[drawn(values, terms) - 1] >= 0.99 * rates.max()


@given(kind=KINDS, numel=st.integers(1, 2 * BLOCK), seed=seeds, terms=AFFINE | PACKETS, power=st.integers(-40, 40))
def test_scale_sign_and_order_do_not_matter(kind: str, numel: int, seed: int, terms: Terms, power: int) -> None:
    values = values_of(kind, numel, seed)
    found = drawn(values, terms)
    assert drawn(-values * 2.0**power, terms) == found
    assert drawn(values[torch.randperm(numel, generator=torch.Generator().manual_seed(seed))], terms) == found


@given(kind=KINDS, numel=st.integers(2, 3 * BLOCK), seed=seeds, terms=PACKETS)
def test_packets_are_full(kind: str, numel: int, seed: int, terms: Terms) -> None:
    """Invariant 6."""
    values = values_of(kind, numel, seed)
    found = drawn(values, terms)
    if values.any():  # or all are sent, but for what is next to nothing beside the others
        assert (found + terms.lead) % terms.whole == 0 or alphas(values)[found - 1] >= 1.0 - 1e-9


@given(numel=st.integers(1, 2 * BLOCK), seed=seeds, room=st.integers(1, 2 * BLOCK))
def test_no_more_are_sent_than_there_is_room_for(numel: int, seed: int, room: int) -> None:
    drawn(values_of("normal", numel, seed), Terms(1.0, 100.0), room)


# ---- kernels and twins ---------------------------------------------------------------------------------------------


def test_weights_are_one_over_uniform() -> None:
    """And of steps, of ranks and of neighbours they have nothing to do with one another: 4 standard deviations."""
    index, count = torch.arange(1 << 16), 1 << 16
    draws = {}
    for seed, salt in ((0, 1), (1, 1), (0, 2), (0, 3), (7, 4)):
        weight = drawn_weight(index, torch.tensor([seed]), torch.tensor([salt], dtype=torch.int32))
        u = DRAW_UNIT.value / weight.double()
        assert 0.0 < float(u.min()) < 1e-4
        assert 1.0 - 1e-4 < float(u.max()) <= 1.0
        empirical = (u.sort().values - torch.arange(1, count + 1) / count).abs().max()
        assert float(empirical) < 2.0 / count**0.5  # Kolmogorov and Smirnov: one time in 1500
        draws[seed, salt] = u - 0.5
        draws[seed, salt, "next"] = u.roll(1) - 0.5
    names = list(draws)
    for number, one in enumerate(names):
        for other in names[:number]:
            assert abs(float((draws[one] * draws[other]).mean())) < 4.0 / 12.0 / count**0.5


@pytest.mark.parametrize("name", ["one", "2047", "2049", "two_pages", "mixed"])
@pytest.mark.parametrize("values", ["normal", "ties", "clustered", "nan", "inf"])
def test_drawing(name: str, values: str) -> None:
    """All that the twin leaves; and that what is sent is at least the threshold, with its sign."""
    case = build(SIZES[name], device=DEVICE, values=values, missing=(3,) if name == "mixed" else ())
    for parity in (None, 0):
        out = both(case, 0.02, drawn=True, parity=parity)
    count = int(out["starts"][-1])
    assert count <= len(out["values"])
    if values in ("nan", "inf"):
        return
    least = float((out["thresholds"] >> 32).int().view(torch.float32)) / DRAW_UNIT.value
    sent = out["values"][:count]
    assert (sent.abs() >= least).all()
    before = out["residual_before_pack"]
    page = torch.arange(case.segments.num_pages, device=DEVICE).repeat_interleave(out["starts"].diff().long())
    value = before[page * 65536 + (out["out_indices"][:count].long() & 0xFFFF)]
    assert torch.equal(sent, torch.where(value.abs() < least, least * value.sign(), value))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_drawing_from_states(state_dtype: torch.dtype) -> None:
    case = build((10243, 33), device=DEVICE, state_dtype=state_dtype, dtype=torch.bfloat16)
    both(case, 0.05, drawn=True, accumulate="none", with_scales=True)
    both(case, 0.05, drawn=True, accumulate="none", capacity=100)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [0, 1, 1000])
def test_choosing_from_any_counts(most: int, seed: int) -> None:
    draw, results = torch.Generator().manual_seed(seed), []
    counted = torch.randint(most + 1, (COUNTERS, MAGNITUDES), generator=draw, dtype=torch.int32)
    counted *= (torch.rand(MAGNITUDES, generator=draw) < 0.02 * seed).int()
    counted[:, 0] = 0
    counted[:, 8 * 20 * seed + 8 if seed % 3 else MAGNITUDES :] = 0
    for modules in (KERNELS, TWINS):
        counters, rank, wanted = counted.clone().to(DEVICE), i64(-7), i32(-7)
        modules["tune"].choose_draws(
            torch.tensor([0.37, 10.0 ** seed], dtype=torch.float64, device=DEVICE), i64(1 + 40 * (seed % 2), seed),
            counters, rank, wanted, i32(-7), room=100, numel=int(counted.sum()) + 1,
        )  # fmt: skip
        results.append({"rank": rank, "wanted": wanted, "counters": counters})
    same(*results)
    assert not results[0]["counters"].any()
    assert int(results[0]["wanted"]) > 1 or not counted.any()


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs kernels on CPU tensors")
@pytest.mark.parametrize("guarded", [False, True])
def test_a_run_of_kernels_is_a_run_of_twins(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cost, found = PacketCost(60, 20) if guarded else AffineCost(fixed=100.0), set()
    for ops in ("kernels", "reference"):
        monkeypatch.setenv("FUSEDCOMP_OPS", ops)
        weight = nn.Parameter(torch.zeros(50, 60))
        optimizer = fusedcomp.SGD([weight], lr=0.1, momentum=0.9, compressor=stochastic(cost), skip_nonfinite=guarded)
        generator, wanted = torch.Generator().manual_seed(0), []
        for _ in range(3):
            weight.grad = torch.randn(50, 60, generator=generator)
            optimizer.step()
            wanted.append(int(optimizer._exchanges[0].wanted))
        found.add((weight.detach().numpy().tobytes(), tuple(wanted)))
    assert len(found) == 1
    assert min(wanted) > 1


# ---- a step --------------------------------------------------------------------------------------------------------


@given(shape=shapes, seed=seeds, fixed=st.floats(0.0, 1e4), kind=KINDS)
def test_as_many_are_sent_as_were_chosen(shape: Any, seed: int, fixed: float, kind: str) -> None:
    """Where there is room. In one of a thousand steps candidates are fewer."""
    weight, optimizer, exchange = stepper(shape, stochastic(AffineCost(fixed=fixed)), NoMemory(), 0.0)
    weight.grad = values_of(kind, weight.numel(), seed).view(shape)
    gradient = weight.grad.flatten().clone()
    optimizer.step()
    wanted = int(exchange.wanted)
    assert int(exchange.buffers.payloads.header[0, 1]) == wanted
    sent = sent_by(exchange)[: len(gradient)]
    count, there = int((sent != 0).sum()), int((gradient != 0).sum())
    rank = min(max(wanted, 1), exchange.selection.k)  # the threshold's
    if rank > there or rank == len(gradient):  # all
        assert torch.equal(sent, gradient)
    else:
        assert count == rank - 1
    threshold = float(optimizer.metrics()["threshold"])
    assert ((sent == 0) | (sent == gradient) | (sent == threshold * gradient.sign())).all()


def _sent_over(steps: int, gradient: Tensor, compressor: CAT, **selection: Any) -> tuple[Tensor, Any]:
    """What many steps with one gradient send, a row each."""
    weight, optimizer, exchange = stepper(gradient.shape, compressor, NoMemory(), 0.0)
    exchange.sizing.selection = exchange.sizing.selection._replace(**selection)
    sent = []
    for _ in range(steps):
        weight.grad = gradient.clone()
        optimizer.step()
        sent.append(sent_by(exchange)[: len(gradient)])
    return torch.stack(sent).double(), exchange


STEPS = 2000


def _is_unbiased(sent: Tensor, gradient: Tensor) -> None:
    """Within 5 standard errors of every coordinate, and 4 of a few sums, in which small ones count."""
    error = (sent.mean(0) - gradient).abs()
    deviation = sent.std(0) / len(sent) ** 0.5
    seen = (sent != 0).sum(0) >= 30  # of fewer the deviation is not known
    assert (error[seen] <= 5.0 * deviation[seen] + 1e-6).all()
    for direction in (gradient.sign(), 1.0 / gradient, gradient.sign() * (~seen)):
        along = sent @ direction.double()
        assert abs(float(along.mean() - gradient.double() @ direction.double())) <= 4.0 * float(
            along.std() / len(sent) ** 0.5
        ) + 1e-4 * float(along.abs().mean())


@pytest.mark.parametrize(("kind", "fixed"), [("normal", 60.0), ("heavy", 300.0), ("one", 1e6)])
def test_what_is_sent_is_the_gradient_on_average(kind: str, fixed: float) -> None:
    """Invariant 7: and its mean square is at most that of one entry less by independent draws."""
    gradient = values_of(kind, 300, 3)
    sent, exchange = _sent_over(STEPS, gradient, stochastic(AffineCost(fixed=fixed)))
    counts = (sent != 0).sum(1)
    k = int(exchange.wanted) - 1
    assert (counts == k).double().mean() > 0.99
    assert 8 < k < 200
    _is_unbiased(sent, gradient)
    square = sent.square().sum(1)
    bound = float(gradient.double().square().sum()) / omegas(gradient)[k - 2]
    assert float(square.mean()) <= bound + 4.0 * float(square.std()) / STEPS**0.5


@pytest.mark.parametrize("case", ["few candidates", "little room"])
def test_the_average_holds_where_fewer_are_sent(case: str) -> None:
    """The sampled threshold counts where candidates are few; the room where it is less than wanted."""
    gradient = values_of("normal", 300, 4)
    selection = {"sample_ranks": (16,)} if case == "few candidates" else {}
    with patch.multiple("fusedcomp.rooms.Adaptive", _FLOOR=16, _FIRST=20, _after=lambda sizing, row: sizing.selection):
        sent, exchange = _sent_over(STEPS, gradient, stochastic(AffineCost(fixed=1000.0)), **selection)
    counts = (sent != 0).sum(1)
    assert int(exchange.wanted) > exchange.selection.k == 16
    fewer = float((counts < 15).double().mean())
    assert 0.1 < fewer < 0.9 if case == "few candidates" else fewer < 0.01
    assert int(counts.max()) == (16 if case == "few candidates" else 15)
    _is_unbiased(sent, gradient)


@pytest.mark.parametrize("fixed", [60.0, 300.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_guaranteed_descent(seed: int, fixed: float) -> None:
    """Invariant 5: on quadratics, E F(x - omega Q(g) / L) <= F(x) - omega |g|^2 / (2 L), by 1000 draws."""
    draw, steps = torch.Generator().manual_seed(seed), 1000
    factor = torch.randn(40, 40, generator=draw, dtype=torch.float64)
    hessian = factor @ factor.T
    smoothness = float(torch.linalg.eigvalsh(hessian)[-1])
    place = torch.randn(40, generator=draw, dtype=torch.float64)
    gradient = (hessian @ place).float()
    sent, exchange = _sent_over(steps, gradient, stochastic(AffineCost(fixed=fixed)))
    omega = guaranteed(gradient)[int(exchange.wanted) - 2]
    after = place - omega / smoothness * sent
    losses = (after * (after @ hessian)).sum(1) / 2
    before = float(place @ hessian @ place) / 2
    gained = omega * float(gradient.double().square().sum()) / (2 * smoothness)
    assert float(losses.mean()) <= before - gained + 4.0 * float(losses.std()) / steps**0.5


# ---- ranks, and what else a step may meet --------------------------------------------------------------------------


def _trained(rank: int, world: int) -> tuple[bytes, bytes, list[int]]:
    """A run, and one that is resumed half-way; what a rank draws."""
    settings = {"lr": 0.02, "momentum": 0.9, "compressor": stochastic(AffineCost(fixed=1000.0))}
    (model, optimizer), (again, resumed) = run_and_resumed(rank, settings)
    for number in range(12, 24):
        for each in ((model, optimizer), (again, resumed)):
            train(each, 0, number)  # the same on all ranks
    exchange = next(e for e in optimizer._exchanges if hasattr(e, "wanted"))
    return digest(model), digest(again), exchange.buffers.payload.indices[0].tolist()


def test_resume_and_replicas_are_bit_exact_and_ranks_draw_for_themselves() -> None:
    results = run(_trained, 2)
    assert len({bits for model, again, _ in results for bits in (model, again)}) == 1
    assert results[0][2] != results[1][2]


@room_for_all
def _void(rank: int, world: int) -> tuple[bytes, int]:
    """Rooms go by the steps that were tried, so that they must suffice."""
    return _void_steps(rank, world, {"compressor": stochastic(AffineCost(fixed=30.0)), "momentum": 0.9})


def test_a_void_step_leaves_no_trace() -> None:
    first, second = run(_void, 2)
    assert first == second


def _hooked(rank: int, world: int) -> tuple[bytes, float]:
    """What an entry's draw depends on is its place in the bucket: the hook's are others than the optimizer's."""
    model = net()
    state = CompressionState(stochastic(LinkCost(1e-4, 1e7), objective="time"), model.named_parameters())
    assert state.memory == NoMemory()
    ddp, plain = wrapped(model, state), torch.optim.SGD(model.parameters(), lr=0.02)
    for number in range(6):
        hooked_step(ddp, plain, rank, number)
    return digest(model), float(state.metrics()["nnz"])


def test_the_hook_draws() -> None:
    (first, sent), (second, _) = run(_hooked, 2)
    assert first == second
    assert sent > 2


def test_memory() -> None:
    """None by itself; none other."""
    weight = nn.Parameter(torch.zeros(64, 64))
    for momentum in (0.0, 0.9):
        optimizer = fusedcomp.SGD([weight], lr=0.1, momentum=momentum, compressor=stochastic(AffineCost()))
        assert optimizer.param_groups[0]["memory"] == NoMemory()
    for make, told in (
        (
            lambda: fusedcomp.SGD([weight], lr=0.1, compressor=stochastic(AffineCost()), memory=Residual()),
            "ValueError: SGD: variant='stochastic' needs memory=NoMemory()",
        ),
        (
            lambda: CompressionState(stochastic(AffineCost()), memory=Residual()),
            "ValueError: CompressionState: variant='stochastic' needs memory=NoMemory()",
        ),
        (
            lambda: stochastic(AffineCost(), wire_dtype=torch.float16),
            "ValueError: CAT: wire_dtype is of variant='sparse' alone, got torch.float16",
        ),
    ):
        assert message_of(make).startswith(told)

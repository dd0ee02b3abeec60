"""Threshold: what is sent, what stays, and how much room payloads have; the invariants of Sahu et al., NeurIPS 2021."""

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from fusedcomp import MomentumCorrection, NoMemory, Residual, Threshold, TopK
from fusedcomp.ddp import CompressionState
from fusedcomp.kernels.reference.keys import selection_key
from fusedcomp.rooms import Adaptive
from fusedcomp.sizing import threshold_key
from fusedcomp.sparse import SparseExchange
from ranks import digest, message_of, run
from sameness import hook_and_optimizer, run_and_resumed, train
from steppers import sent_by, stepper

shapes = st.tuples(st.integers(1, 70), st.integers(1, 70))
seeds = st.integers(0, 2**31)
halves = st.sampled_from([torch.float32, torch.bfloat16])
room_for_all = patch.multiple(Adaptive, _FIRST=1, _SETTLING=10**6)


def exchanges_of(optimizer: Any) -> list[SparseExchange]:
    return [e for e in optimizer._exchanges if isinstance(e, SparseExchange)]


# ---- what is sent --------------------------------------------------------------------------------------------------


@given(value=st.floats(1e-30, 1e30), half=st.booleans(), seed=seeds)
def test_the_key_of_a_threshold(value: float, half: bool, seed: int) -> None:
    """What has at least this magnitude, and nothing else; also next to it, where rounding decides."""
    near = torch.tensor([value], dtype=torch.float64).float()
    beside = [torch.nextafter(near, near * side) for side in (0.0, 1.0, 2.0)]
    values = torch.cat([*beside, near * 0.5, near * 2.0])
    if half:
        cut = values.view(torch.int32).bitwise_and(-65536).view(torch.float32)
        values = torch.cat([values, cut]).bfloat16().float()
    values = torch.cat([values, -values])
    keys = selection_key(values, torch.arange(len(values)) + seed, torch.tensor([seed]), half)
    assert torch.equal(keys >= threshold_key(value, half), values.abs().double() >= value)


@given(shape=shapes, value=st.floats(1e-3, 8.0), seed=seeds, momentum=st.sampled_from([0.0, 0.9]), dtype=halves)
def test_what_reaches_the_threshold_is_sent(shape: Any, value: float, seed: int, momentum: float, dtype: Any) -> None:
    """Invariants 1 to 4: sent and kept add up bit for bit and share no entry; the one is >= value, the other below."""
    generator = torch.Generator().manual_seed(seed)
    memory = MomentumCorrection() if momentum else Residual()
    with room_for_all:
        weight, optimizer, exchange = stepper(shape, Threshold(value), memory, momentum, state_dtype=dtype)
    accumulated: list[Tensor] = []
    refine = exchange._refine
    exchange._refine = lambda: (accumulated.append(exchange.residual.float().clone()), refine())  # type: ignore[method-assign, func-returns-value]
    for _ in range(3):
        weight.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        sent, kept = sent_by(exchange), exchange.residual.float()
        assert torch.equal(sent + kept, accumulated[-1])
        assert not (sent * kept).any()
        assert not ((sent != 0) & (sent.abs().double() < value)).any()
        assert float(kept.abs().max()) < value
        assert int((sent != 0).sum()) * value**2 <= float(accumulated[-1].double().square().sum()) * (1 + 1e-6)


@pytest.mark.parametrize(("options_of_halves", "buckets"), [({}, 1), ({"bucket_cap_mb": 1e-5}, 2)])
@given(seed=seeds, value=st.floats(0.1, 3.0))
def test_layers_do_not_matter(options_of_halves: dict[str, float], buckets: int, seed: int, value: float) -> None:
    """Invariant 5: of one parameter or of the same elements in two, the same are sent; in one bucket or in two."""
    torch.manual_seed(seed)
    whole = nn.Parameter(torch.zeros(40, 60))
    halves = [nn.Parameter(torch.zeros(20, 60)) for _ in range(2)]
    options: dict[str, Any] = {"lr": 1.0, "compressor": Threshold(value), "memory": Residual(), "_always_sparse": True}
    with room_for_all:
        optimizers = [fusedcomp.SGD([whole], **options), fusedcomp.SGD(halves, **options, **options_of_halves)]
    assert len(optimizers[1]._exchanges) == buckets
    for _ in range(3):
        whole.grad = torch.randn_like(whole)
        halves[0].grad, halves[1].grad = whole.grad[:20].clone(), whole.grad[20:].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole, torch.cat([h.detach() for h in halves]))


@pytest.mark.parametrize("value", [1e-20, 1e20])
def test_extreme_values(value: float) -> None:
    """Invariant 3: nearly 0 sends everything, densely where that is cheaper; more than there is sends nothing."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = fusedcomp.SGD([weight], lr=1.0, compressor=Threshold(value), memory=Residual())
    total = torch.zeros_like(weight)
    for number in range(12):
        weight.grad = torch.randint(-8, 9, weight.shape).float()
        total += weight.grad
        optimizer.step()
        sent = optimizer.metrics()
        assert int(sent["bytes_sent"]) <= 4 * weight.numel() + 64
        if number > 8 and value < 1:
            assert exchanges_of(optimizer)[0].dense_step
            assert not optimizer.state[weight]["residual"].any()
    assert torch.equal(optimizer.state[weight]["residual"] - weight.detach(), total)
    assert value < 1 or not weight.any()


@given(seed=seeds, value=st.floats(0.1, 3.0), share=st.floats(0.0, 1.0), near=st.floats(0.9, 1.1))
def test_no_other_entries_cost_less(seed: int, value: float, share: float, near: float) -> None:
    """Invariant 6: an entry costs value^2 if it is sent, its square if it stays; what is sent makes the sum least."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(2000, generator=generator)
    with room_for_all:
        weight, optimizer, exchange = stepper((40, 50), Threshold(value), NoMemory(), 0.0)
    weight.grad = gradient.view(40, 50).clone()
    optimizer.step()
    sent = sent_by(exchange)[:2000] != 0

    def cost(mask: Tensor) -> float:
        return float(gradient[~mask].double().square().sum()) + value**2 * int(mask.sum())

    def chance(of_each: float) -> Tensor:
        return torch.rand(2000, generator=generator) < of_each

    everything = torch.ones(2000, dtype=torch.bool)
    above = [gradient.abs() >= other_value for other_value in (4.0 * share, near * value)]
    for other in (chance(share), ~everything, everything, sent ^ chance(0.01), *above):
        assert cost(sent) <= cost(other) * (1 + 1e-9)


def left_behind(vectors: Tensor, shape: Sequence[int], compressor: Any) -> tuple[float, int]:
    """Of a sequence of gradients, without memory: the sum of squares that were not sent, and how many were."""
    with room_for_all:
        weight, optimizer, exchange = stepper(shape, compressor, NoMemory(), 0.0)
    error, count = 0.0, 0
    for vector in vectors:
        weight.grad = vector.view(shape).clone()
        optimizer.step()
        sent = sent_by(exchange)[: len(vector)]
        error += float((vector - sent).double().square().sum())
        count += int((sent != 0).sum())
    return error, count


@given(seed=seeds, k=st.integers(1, 30), power=st.sampled_from([1, 3]))
def test_least_error_of_any_sequence(seed: int, k: int, power: int) -> None:
    """Invariant 6: of as many entries in all, Top-k leaves at least as much behind."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(8, 400, generator=generator) ** power * torch.rand(8, 1, generator=generator) ** 3
    largest = vectors.abs().flatten().topk(8 * k + 1).values
    assume(largest[-2] > largest[-1])  # else the threshold sends one more
    threshold = left_behind(vectors, (20, 20), Threshold(float(largest[-2])))
    topk = left_behind(vectors, (20, 20), TopK(k / 400))
    assert threshold[1] == topk[1] == 8 * k
    assert threshold[0] <= topk[0] * (1 + 1e-9)


def test_much_less_error_where_gradients_shrink() -> None:
    """A sequence with heavy tails and a falling scale, as of a training: Top-k leaves more than a quarter more."""
    generator = torch.Generator().manual_seed(0)
    normal, scale = torch.randn(200, 4, 2048, generator=generator), 0.98 ** torch.arange(200.0)
    vectors = normal[:, 0] / normal[:, 1:].square().mean(1).sqrt() * scale[:, None]  # Student's t of 3
    value = float(vectors.abs().flatten().topk(200 * 20).values[-1])
    threshold = left_behind(vectors, (32, 64), Threshold(value))
    topk = left_behind(vectors, (32, 64), TopK(20 / 2048))
    assert threshold[1] == topk[1] == 4000
    assert threshold[0] < 0.8 * topk[0]


@given(seed=seeds, value=st.floats(0.1, 3.0))
def test_no_drift_under_a_constant_gradient(seed: int, value: float) -> None:
    """Invariant 7: what was sent in t steps is within the threshold of t gradients, everywhere."""
    with room_for_all:
        weight, optimizer, _ = stepper((40, 50), Threshold(value), Residual(), 0.0)
    gradient = torch.randn(40, 50, generator=torch.Generator().manual_seed(seed))
    for number in range(1, 30):
        weight.grad = gradient.clone()
        optimizer.step()
        assert float((number * gradient + weight.detach()).abs().max()) < value + 1e-4


# ---- ranks ---------------------------------------------------------------------------------------------------------


def _virtual_iterate(rank: int, world: int) -> list[int]:
    """How many entries each step sent; the second rank's gradients are smaller, so that it sends less and later."""
    weight = nn.Parameter(torch.zeros(40, 60))
    optimizer = fusedcomp.SGD([weight], lr=0.5, compressor=Threshold(6.0), memory=Residual(), _always_sparse=True)
    (exchange,) = exchanges_of(optimizer)
    generator = torch.Generator().manual_seed(0)
    total, counts = torch.zeros_like(weight), []
    for _ in range(20):
        gradients = torch.randint(-2, 3, (world, 40, 60), generator=generator).float()
        gradients[1:] *= 0.75
        weight.grad = gradients[rank].clone()
        total += gradients.mean(0)
        optimizer.step()
        counts.append(int((sent_by(exchange) != 0).sum()))
        mean = optimizer.state[weight]["residual"].clone()
        dist.all_reduce(mean)
        assert torch.equal(weight.detach() - 0.5 * mean / world, -0.5 * total)
    return counts


def test_the_virtual_iterate_is_sgd() -> None:
    """Invariants 8 and 9: x - lr mean(residual) moves by -lr mean(gradient), whoever sends how much.

    Steps in which nobody sends, in which one rank does, and in which both do, but not as much, all occur.
    """
    pairs = list(zip(*run(_virtual_iterate, 2), strict=True))
    assert (0, 0) in pairs
    assert any(first and not second for first, second in pairs)
    assert any(first and second and first != second for first, second in pairs)


def _rooms(rank: int, world: int) -> tuple[bytes, list[int], list[int], bool]:
    """Ranks of other scales, and a burst: the rooms, what found none, and that nothing is lost."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer = fusedcomp.SGD([weight], lr=1.0, compressor=Threshold(8.0), memory=Residual())
    (exchange,) = exchanges_of(optimizer)
    generator = torch.Generator().manual_seed(rank)
    total, rooms, overflows = torch.zeros_like(weight), [], []
    for number in range(60):
        scale = (1 + rank) * (4 if 20 <= number < 30 else 1)
        weight.grad = (torch.randn(64, 128, generator=generator) * scale).round()
        total += weight.grad
        optimizer.step()
        sent = optimizer.metrics()
        rooms.append(exchange.selection.k)
        overflows.append(int(sent["overflow"]))
        assert int(sent["bytes_sent"]) <= 4 * weight.numel() + 64  # headers
    kept = optimizer.state[weight]["residual"].clone()
    dist.all_reduce(kept)
    dist.all_reduce(total)
    return digest(optimizer_model(weight)), rooms, overflows, torch.equal(kept / world - weight.detach(), total / world)


def optimizer_model(weight: nn.Parameter) -> nn.Module:
    model = nn.Module()
    model.weight = weight
    return model


def test_rooms_follow_what_ranks_ask_for() -> None:
    results = run(_rooms, 2)
    (bits, rooms, overflows, whole), other = results
    assert bits == other[0]
    assert rooms == other[1]  # the same decision on every rank
    assert whole
    assert other[3]
    assert rooms[0] == 64 * 128 // 32
    assert max(overflows[20:28] + other[2][20:28]) > 0  # the burst finds too little room for eight steps
    assert rooms[28] > rooms[19]
    assert rooms[-1] < rooms[29]


@patch.multiple(Adaptive, _FIRST=10**9)
def _with_rooms_that_overflow(rank: int, world: int) -> bytes:
    """A resume takes up the room, which does not suffice, and what the headers before it said."""
    settings = {"lr": 0.05, "momentum": 0.9, "memory": Residual(), "compressor": Threshold(0.1)}
    (model, optimizer), (again, resumed) = run_and_resumed(rank, settings)
    over, sizes = 0, []
    for number in range(12, 30):
        for each in ((model, optimizer), (again, resumed)):
            train(each, rank, number)
            over += int(each[1].metrics()["overflow"]) > 0
        sizes.append(optimizer._exchanges.sizes())
        assert sizes[-1] == resumed._exchanges.sizes()
    assert over > 0
    assert any(size != sizes[0] for size in sizes)
    assert digest(model) == digest(again)
    return digest(model)


def test_resume_and_replicas_are_bit_exact() -> None:
    assert len(set(run(_with_rooms_that_overflow, 2))) == 1


@room_for_all
def _hook_and_optimizer(rank: int, world: int) -> None:
    hook_and_optimizer(rank, world, Threshold.from_density(0.02))


def test_the_hook_sends_the_same() -> None:
    run(_hook_and_optimizer, 2)


# ---- the record ----------------------------------------------------------------------------------------------------


def test_the_rule_for_a_density() -> None:
    """1 / (2 sqrt k): the authors' table for ResNet-18 has 4.73e-3."""
    assert math.isclose(Threshold.from_density(0.001).value_for(11_173_962), 4.73e-3, rel_tol=2e-3)
    weights = [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(32, 64)), nn.Parameter(torch.zeros(9))]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}]
    optimizer = fusedcomp.SGD(groups, lr=0.1, compressor=Threshold.from_density(0.01))
    value = torch.tensor(0.5 / math.sqrt(0.01 * 96 * 64))
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    thresholds = optimizer.metrics()["threshold"]
    torch.testing.assert_close(thresholds, value.expand_as(thresholds))


def test_bad_arguments() -> None:
    for arguments, told in (
        ({}, "give value or density, and not both, got value=None, density=None"),
        ({"value": 1.0, "density": 0.1}, "and not both"),
        ({"value": 0.0}, "value must be > 0 and at most 3.4e38, got 0.0"),
        ({"value": float("nan")}, "value must be > 0 and at most 3.4e38, got nan"),
        ({"value": True}, "value must be > 0 and at most 3.4e38, got True"),
        ({"value": 1e40}, "value must be > 0 and at most 3.4e38, got 1e+40"),
        ({"density": 1.5}, "density must be in (0, 1], got 1.5"),
        ({"value": 1.0, "wire_dtype": torch.int8}, "wire_dtype must be"),
    ):
        message = message_of(lambda arguments=arguments: Threshold(**arguments))
        assert message.startswith("ValueError: Threshold: ")
        assert told in message
    assert "pass params=model.named_parameters()" in message_of(lambda: CompressionState(Threshold.from_density(0.1)))


def test_a_record_through_a_checkpoint() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    compressor = Threshold.from_density(0.01, wire_dtype=torch.bfloat16)
    optimizer = fusedcomp.SGD([weight], lr=0.1, compressor=compressor)
    other = fusedcomp.SGD([weight], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["compressor"] == compressor

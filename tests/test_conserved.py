"""Over ranks and steps: what went in was applied or waits, whatever changes meanwhile; on whole numbers bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedcomp
from fusedcomp import BlockTopK, MomentumCorrection, RandomK, Residual, Threshold, TopK
from ranks import run
from steppers import sent_by, stepper


def _schedule(rank: int, world: int, compressor: Any) -> list[bool]:
    """Sparse, dense and sparse again, with as many entries as the schedule has: which steps were dense."""
    weight = nn.Parameter(torch.zeros(300, 1001))
    optimizer = fusedcomp.SGD([weight], lr=1.0, compressor=compressor, memory=Residual())
    generator, total, dense = torch.Generator().manual_seed(rank), torch.zeros_like(weight), []
    for _ in range(9):
        weight.grad = torch.randint(-64, 65, weight.shape, generator=generator).float()
        total += weight.grad
        optimizer.step()
        dense.append(optimizer._exchanges[0].dense_step)
        kept, went_in = optimizer.state[weight]["residual"].clone(), total.clone()
        dist.all_reduce(kept)
        dist.all_reduce(went_in)
        assert torch.equal(kept / world - weight.detach(), went_in / world)
    return dense


FALLS_AND_RISES = {"warmup_steps": 6, "warmup_densities": [0.02, 1.0, 0.1]}


@pytest.mark.parametrize(
    "compressor",
    [
        *(TopK(0.002, collective=how, **FALLS_AND_RISES) for how in ("gather", "tree", "split")),
        BlockTopK(0.002, **FALLS_AND_RISES),
    ],
    ids=["gather", "tree", "split", "blocks"],
)
def test_a_schedule_loses_nothing(compressor: Any) -> None:
    for dense in run(_schedule, 2, compressor):
        assert dense == [False, False, True, True, False, False, False, False, False]


def _virtual_iterate(rank: int, world: int) -> None:
    """Without masking, x - lr mean(residual) is dense SGD with momentum, of the mean gradient."""
    weight = nn.Parameter(torch.zeros(60, 70))
    optimizer = fusedcomp.SGD(
        [weight], lr=0.5, momentum=0.5, compressor=TopK(0.02), memory=MomentumCorrection(masking=False)
    )
    generator = torch.Generator().manual_seed(0)
    velocity, total = torch.zeros(60, 70), torch.zeros(60, 70)
    for _ in range(10):  # a half of a half ... of a whole number: ten more bits
        gradients = torch.randint(-8, 9, (world, 60, 70), generator=generator).float()
        weight.grad = gradients[rank].clone()
        velocity = 0.5 * velocity + gradients.mean(0)
        total += velocity
        optimizer.step()
        mean = optimizer.state[weight]["residual"].clone()
        dist.all_reduce(mean)
        assert mean.any()
        assert torch.equal(weight.detach() - 0.5 * mean / world, -0.5 * total)


@pytest.mark.parametrize("world", [2, 4])
def test_momentum_correction_without_masking_is_sgd_with_momentum(world: int) -> None:
    run(_virtual_iterate, world)


def test_what_waits_is_a_gradient_whatever_the_learning_rate() -> None:
    """The rate is that of the step which applies an entry, not of the one in which it came."""
    waiting = []
    for rates in ([1.0] * 6, [1.0] * 3 + [0.125] * 3):
        generator = torch.Generator().manual_seed(0)
        weight, optimizer, exchange = stepper((64, 64), TopK(0.05), Residual(), 0.0)
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            weight.data.zero_()
            weight.grad = torch.randint(-8, 9, weight.shape, generator=generator).float()
            optimizer.step()
            assert torch.equal(-weight.detach().view(-1), rate * sent_by(exchange)[: weight.numel()])
        waiting.append(exchange.residual.clone())
    assert waiting[0].any()
    assert torch.equal(*waiting)


def _absent(rank: int, world: int, compressor: Any) -> None:
    """A rank that has no gradient takes part with one of zero."""
    weight, memory = nn.Parameter(torch.zeros(64, 64)), MomentumCorrection(masking=False)
    optimizer = fusedcomp.SGD([weight], lr=1.0, momentum=0.5, compressor=compressor, memory=memory, _always_sparse=True)
    weight.grad = torch.randint(-8, 9, weight.shape, generator=torch.Generator().manual_seed(rank)).float()
    optimizer.step()
    before = {name: state.clone() for name, state in optimizer.state[weight].items()}
    weight.data.zero_()
    weight.grad = None if rank == 1 else torch.zeros_like(weight)
    optimizer.step()
    after = optimizer.state[weight]
    assert before["velocity"].any()
    assert torch.equal(after["velocity"], 0.5 * before["velocity"])
    sent = before["residual"] + after["velocity"] - after["residual"]
    dist.all_reduce(sent)
    assert sent.any()
    assert torch.equal(-weight.detach(), sent / world)


@pytest.mark.parametrize(
    "compressor", [TopK(0.02), BlockTopK(0.02), RandomK(0.1), Threshold(3.0)], ids=lambda c: type(c).__name__
)
def test_a_rank_without_a_gradient_has_one_of_zero(compressor: Any) -> None:
    run(_absent, 2, compressor)

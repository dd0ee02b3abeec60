"""Weight decay that is no part of the gradient: DGC's with a momentum of its own, and decoupled."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fusedcomp import SGD, Identity, Residual, Threshold, TopK
from guarded import step
from ranks import digest, loss_of, message_of, net, run, train

PLACES = ("decoupled", "own_momentum")
COMPRESSORS = [TopK(0.05), TopK(1.0), Identity(), Threshold(0.1)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: type(c).__name__)
def test_decay_does_not_depend_on_what_is_sent(compressor: Any, nesterov: bool, place: str) -> None:
    """DGC invariant 7: with gradients of zero, parameters decay as the formula has it, whatever compresses."""
    model, decay, lr = net(), 0.1, 0.05
    optimizer = SGD(
        model.parameters(), lr=lr, momentum=0.9, nesterov=nesterov, weight_decay=decay, decay=place,
        compressor=compressor,
    )  # fmt: skip
    expected = [p.detach().double().clone() for p in model.parameters()]
    buffers = [torch.zeros_like(p) for p in expected]
    for _ in range(5):
        for param, value, buffer in zip(model.parameters(), expected, buffers, strict=True):
            param.grad = torch.zeros_like(param)
            update = decay * value
            if place == "own_momentum":
                buffer.mul_(0.9).add_(update)
                update = update + 0.9 * buffer if nesterov else buffer
            value -= lr * update
        optimizer.step()
    for param, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.double(), value, rtol=1e-5, atol=1e-8)


def _decayed(rank: int, world: int, place: str) -> bytes:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = SGD(
        [weight], lr=0.05, momentum=0.9, weight_decay=0.1, decay=place, compressor=TopK(0.05), max_grad_norm=1e-3
    )
    for _ in range(5):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    return weight.detach().numpy().tobytes()


@pytest.mark.parametrize("place", PLACES)
def test_decay_knows_neither_ranks_nor_clipping(place: str) -> None:
    """DGC invariant 7. That it is what the formula has, the test above says."""
    torch.manual_seed(0)
    before = torch.randn(64, 64).numpy().tobytes()
    (alone,), several = run(_decayed, 1, place), run(_decayed, 3, place)
    assert {alone, *several} == {alone}
    assert alone != before


def test_decoupled_is_the_l2_penalty_without_momentum() -> None:
    """Without momentum the three agree where everything is sent, to rounding."""
    models = [net() for _ in range(4)]
    for model, place in zip(models, ("gradient", *PLACES, None), strict=True):
        options = {"lr": 0.05, "weight_decay": 0.1}
        optimizer = (
            torch.optim.SGD(model.parameters(), **options)
            if place is None
            else SGD(model.parameters(), **options, decay=place)
        )
        train(model, optimizer, 5)
    for model in models[:3]:
        for a, b in zip(model.parameters(), models[3].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def _on_ranks(rank: int, world: int, place: str) -> bytes:
    """Replicas stay the same bits; a resume is exact; a void step does not decay."""
    model, again = net(), net(1)
    make = {
        "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "decay": place, "compressor": TopK(0.05),
        "skip_nonfinite": True,
    }  # fmt: skip
    optimizer = SGD(model.parameters(), **make)
    for number in range(4):
        step(model, optimizer, rank, number)
    before = digest(model)
    step(model, optimizer, rank, 4, math.inf if rank == 1 else 1.0)
    assert digest(model) == before
    resumed = SGD(again.parameters(), **make)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for number in range(5, 9):
        step(model, optimizer, rank, number)
        step(again, resumed, rank, number)
    assert digest(model) == digest(again)
    everyone = [b""] * world
    dist.all_gather_object(everyone, digest(model))
    assert len(set(everyone)) == 1
    return digest(model)


@pytest.mark.parametrize("place", PLACES)
def test_replicas_resume_and_void_steps(place: str) -> None:
    run(_on_ranks, 2, place)


def test_parameters_without_a_gradient_do_not_decay() -> None:
    used, unused = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 64))
    optimizer = SGD([used, unused], lr=0.1, weight_decay=0.1, decay="decoupled", compressor=TopK(0.01))
    used.grad = torch.zeros_like(used)
    optimizer.step()
    assert torch.equal(unused, torch.ones(64, 64))
    torch.testing.assert_close(used, torch.full((64, 64), 0.99))


def test_a_place_can_be_changed_between_steps() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, weight_decay=0.1, compressor=TopK(0.05), memory=Residual())
    train(model, optimizer, 2)
    optimizer.param_groups[0]["decay"] = "own_momentum"
    assert "call optimizer.zero_grad()" in message_of(lambda: loss_of(model, 0, 0).backward())
    optimizer.zero_grad()
    train(model, optimizer, 2)
    assert all("decay_buffer" in optimizer.state[p] for p in model.parameters())


def test_bad_places() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    assert "decay must be 'gradient', 'decoupled' or 'own_momentum', got 'local'" in message_of(
        lambda: SGD([weight], lr=0.1, decay="local")
    )
    half = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    assert "would be rounded away" in message_of(lambda: SGD([half], lr=0.1, decay="decoupled"))
    assert "decay: own_momentum" in repr(SGD([weight], lr=0.1, decay="own_momentum"))

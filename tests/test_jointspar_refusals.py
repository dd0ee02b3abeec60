"""JointSpar: what is refused, and misuse."""

import gc
import math
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from fusedcomp import SGD
from fusedcomp.jointspar import JointSpar
from sampled import OPTIMIZERS, batch_loss, drawing, mlp, train

# ---- arguments and misuse --------------------------------------------------------------------------------------------


def tied() -> nn.Sequential:
    model = mlp(2)
    model[2].weight = model[0].weight
    return model


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "budget 0": ({"budget": 0}, ValueError, "budget must be in (0, 1], a share of the blocks, got 0"),
    "budget 2": ({"budget": 2}, ValueError, "budget must be in (0, 1], a share of the blocks, got 2"),
    "budget nan": ({"budget": math.nan}, ValueError, "budget must be in (0, 1]"),
    "budget text": ({"budget": "half"}, ValueError, "got 'half'"),
    "budget True": ({"budget": True}, ValueError, "got True"),
    "budget small": ({"budget": 0.2}, ValueError, "budget must be at least one of the 4 blocks, 0.25, got 0.2"),
    "floor": ({"min_probability": 0.6}, ValueError,
              "min_probability must be in (0, budget], got 0.6 with budget 0.5"),
    "floor 0": ({"min_probability": 0.0}, ValueError, "min_probability must be in (0, budget], got 0.0"),
    "rate": ({"learning_rate": 0.0}, ValueError, "learning_rate must be finite and > 0, got 0.0"),
    "loss": ({"loss": "mean"}, ValueError, "loss must be 'gain' or 'shifted', got 'mean'"),
    "sampling": ({"sampling": "rank"}, ValueError, "sampling must be 'shared' or 'per_rank', got 'rank'"),
    "redraw_every": ({"redraw_every": 0}, ValueError, "redraw_every must be an integer >= 1, got 0"),
    "lag": ({"lag": -1}, ValueError, "lag must be an integer >= 0, got -1"),
    "seed": ({"seed": 0.5}, ValueError, "seed must be an integer >= 0, got 0.5"),
    "group": ({"process_group": "world"}, TypeError, "process_group must be a torch.distributed.ProcessGroup or None"),
    "blocks": ({"blocks": [3]}, TypeError, "blocks must be modules or parameters, got int"),
    "exclude": ({"exclude": ["head"]}, TypeError, "exclude must be modules or parameters, got str"),
    "one module": ({"exclude": nn.Linear(3, 2)}, TypeError, "exclude must be a list, got Linear"),
    "a number": ({"blocks": 3}, TypeError, "blocks must be a list, got int"),
    "no parameters": ({"blocks": [nn.ReLU()]}, ValueError, "there is no block to draw: neither blocks= nor"),
    "stranger": ({"blocks": [nn.Linear(3, 2)]}, ValueError,
                 "a parameter of shape (2, 3) in block 0 is not the optimizer's"),
    "none": ({"blocks": []}, ValueError, "there is no block to draw"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    arguments, kind, words = BAD[case]
    with pytest.raises(kind) as caught:
        JointSpar(torch.optim.SGD(mlp(4).parameters()), **{"budget": 0.5, **arguments})
    assert words in str(caught.value)


def test_a_parameter_belongs_to_one_block() -> None:
    model = tied()
    optimizer = torch.optim.SGD(model.named_parameters())
    with pytest.raises(ValueError, match=r"parameter '0.weight' is in blocks 0 and 1; where modules share"):
        JointSpar(optimizer, 0.5, blocks=[model[0], model[2]])
    with pytest.raises(TypeError, match="optimizer must be a torch"):
        JointSpar(model, 0.5)
    with pytest.raises(TypeError, match="must leave parameters without a gradient alone, got LBFGS"):
        JointSpar(torch.optim.LBFGS(mlp(2).parameters()), 0.5)


@pytest.mark.parametrize("bucket_cap_mb", [None, 100.0, 1e-5])
def test_backward_without_a_draw(bucket_cap_mb: float | None) -> None:
    """Of a fusedcomp optimizer as soon as a bucket is to be sent: of the last one, in ``step()``."""
    model = mlp(4)
    if bucket_cap_mb is None:
        sampler = JointSpar(torch.optim.SGD(model.parameters(), lr=0.1), 0.5)
    else:
        sampler = JointSpar(SGD(model.parameters(), lr=0.1, bucket_cap_mb=bucket_cap_mb), 0.5)
    for step in (0, 2):
        before = ranks.digest(model)
        with pytest.raises(RuntimeError, match=r"without a draw\(\) since the last step"):  # noqa: PT012
            batch_loss(model, 0, step).backward()
            assert bucket_cap_mb == 100.0
            sampler.optimizer.step()
        assert ranks.digest(model) == before
        train(model, sampler, 2)


def test_a_draw_between_backward_and_step() -> None:
    """Refused where gradients were sent; elsewhere nobody has seen them yet, and they are dropped."""
    model = mlp(4)
    sampler = JointSpar(SGD(model.parameters(), lr=0.1), 0.5)
    sampler.draw()
    batch_loss(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"draw\(\) was called between backward\(\) and step\(\)"):
        sampler.draw()
    train(model, sampler, 2)
    for optimizer in (torch.optim.SGD(mlp(4).parameters()), SGD(mlp(4).parameters(), overlap=False)):
        sampler = JointSpar(optimizer, 0.5)
        for _ in range(2):
            sampler.draw()
            sum(p.sum() for block in sampler.blocks for p in block).backward()
        optimizer.step()


def test_remove_and_forgetting_a_sampler() -> None:
    one, other = ranks.net(), ranks.net()
    sampler = JointSpar(OPTIMIZERS["SGD-TopK"](one), 1.0)
    plain = OPTIMIZERS["SGD-TopK"](other)
    train(one, sampler, 2)
    sampler.remove()
    ranks.train(one, sampler.optimizer, 3, 2)
    ranks.train(other, plain, 5)
    assert ranks.digest(one) == ranks.digest(other)
    sampler = JointSpar(torch.optim.SGD(one.parameters(), lr=0.1), 0.5)
    train(one, sampler, 1)
    assert not all(p.requires_grad for p in one.parameters())
    gc.disable()
    try:
        del sampler
        assert all(p.requires_grad for p in one.parameters())
    finally:
        gc.enable()
    ranks.loss_of(one, 0, 0).backward()


def test_freezing_a_block_under_a_sampler() -> None:
    """``draw()`` would switch it on again; without the sampler it stays frozen."""
    model = mlp(2)
    sampler = JointSpar(torch.optim.SGD(model.parameters(), lr=0.1), 1.0)
    train(model, sampler, 1)
    model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"of shape \(8, 8\) in block 0 was switched off since the last draw"):
        sampler.draw()


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 1e-5}, {"overlap": False}], ids=str)
def test_a_gradient_of_an_inactive_block(options: dict[str, Any]) -> None:
    """All ranks count on its absence."""
    model = mlp(4)
    sampler = JointSpar(SGD(model.parameters(), lr=0.05, **options), 0.5)
    with drawing([True, False, True, True]):
        sampler.draw()
    model[2].weight.requires_grad_(True)
    before = model[2].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"parameter 2 of group 0 \(8, 8\) received a gradient, but its block"):  # noqa: PT012
        batch_loss(model, 0, 0).backward()
        sampler.optimizer.step()
    assert torch.equal(model[2].weight, before)
    train(model, sampler, 2)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_removed_sampler_draws_no_more(make: Any) -> None:
    """It would switch off blocks that nothing switches on again."""
    model = mlp(4)
    optimizer = make(model)
    sampler = JointSpar(optimizer, 0.5)
    sampler.draw()
    sampler.remove()
    with pytest.raises(RuntimeError, match=r"this JointSpar was removed: build a new one, or go on with optimizer\."):
        sampler.draw()
    assert all(param.requires_grad for param in model.parameters())
    JointSpar(optimizer, 0.5).draw()


def test_removing_between_backward_and_step() -> None:
    model = mlp(4)
    optimizer = SGD(model.parameters(), lr=0.1)
    sampler = JointSpar(optimizer, 0.5)
    sampler.draw()
    batch_loss(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"remove\(\) was called between backward\(\) and step\(\)"):
        sampler.remove()
    sampler.draw()
    sampler.remove()

"""Models, optimizers and samplers, for the tests of JointSpar."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

import ranks
from fusedcomp import LARS, SGD, TopK, jointspar
from fusedcomp.jointspar import JointSpar


def mlp(layers: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*itertools.chain(*[(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)]))


def batch_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * step + rank)
    inputs, targets = torch.randn(16, 8, generator=generator), torch.randn(16, 8, generator=generator)
    return nn.functional.mse_loss(model(inputs), targets)


def train(model: nn.Module, sampler: JointSpar, steps: int, first: int = 0, rank: int = 0) -> None:
    loss_of = ranks.loss_of if isinstance(model[0], nn.Conv2d) else batch_loss
    for step in range(first, first + steps):
        sampler.draw()
        loss_of(model, rank, step).backward()
        sampler.optimizer.step()


def probabilities(sampler: JointSpar) -> list[float]:
    return sampler.metrics()["probabilities"].tolist()


def active(sampler: JointSpar) -> list[bool]:
    return sampler.metrics()["active"].tolist()


@contextmanager
def drawing(*sets: Sequence[bool]) -> Iterator[None]:
    """These sets come out of the next draws."""
    with mock.patch.object(jointspar, "draw", mock.Mock(side_effect=[list(s) for s in sets])):
        yield


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch.SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "torch.Adam": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "SGD": lambda m: SGD(m.named_parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "SGD-TopK": lambda m: SGD(
        m.named_parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.05), bucket_cap_mb=0.02
    ),
    "SGD-TopK-late": lambda m: SGD(m.named_parameters(), lr=0.05, compressor=TopK(0.05), overlap=False),
    "LARS": lambda m: LARS(m.named_parameters(), lr=0.5, momentum=0.9, weight_decay=1e-3),
    "LARS-TopK": lambda m: LARS(m.named_parameters(), lr=0.5, momentum=0.9, compressor=TopK(0.05)),
}  # fmt: skip


def names_of(sampler: JointSpar, model: nn.Module) -> list[list[str]]:
    named = {param: name for name, param in model.named_parameters()}
    return [[named[p] for p in block] for block in sampler.blocks]


def raw_squares(model: nn.Module, rank: int, step: int) -> list[float]:
    """|g|^2 of every layer of an ``mlp``, without sampling."""
    copied = mlp(sum(isinstance(m, nn.Linear) for m in model))
    copied.load_state_dict(model.state_dict())
    batch_loss(copied, rank, step).backward()
    return [
        sum(p.grad.double().square().sum().item() for p in m.parameters()) for m in copied if isinstance(m, nn.Linear)
    ]

"""Two runs that must end alike: one that goes on and one that was resumed; the hook's and an optimizer's."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

import fusedcomp
from fusedcomp.compressors import Compressor
from fusedcomp.ddp import CompressionState
from hooked import step as hooked_step
from hooked import wrapped
from ranks import digest, loss_of, net

Run = tuple[nn.Module, fusedcomp.SGD]


def train(run: Run, rank: int, number: int) -> None:
    """A step with a rank's data."""
    model, optimizer = run
    optimizer.zero_grad()
    loss_of(model, rank, number).backward()
    optimizer.step()


def run_and_resumed(rank: int, settings: Mapping[str, Any], numbers: Iterable[int] = range(12)) -> tuple[Run, Run]:
    """A run after these steps, and another that takes up its checkpoint."""
    model, again = net(), net(1)
    optimizer = fusedcomp.SGD(model.parameters(), **settings)
    for number in numbers:
        train((model, optimizer), rank, number)
    resumed = fusedcomp.SGD(again.parameters(), **settings)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    return (model, optimizer), (again, resumed)


def hook_and_optimizer(rank: int, world: int, compressor: Compressor, steps: int = 4) -> bytes:
    """Both in one bucket, with a learning rate by which they move alike to rounding; the hook's model, bit for bit."""
    model, other = net(), net()
    ddp = wrapped(model, CompressionState(compressor, model.named_parameters()), bucket_cap_mb=100)
    plain = torch.optim.SGD(model.parameters(), lr=2.0**-5)
    optimizer = fusedcomp.SGD(other.parameters(), lr=2.0**-5, compressor=compressor)
    for number in range(steps):
        hooked_step(ddp, plain, rank, number)
        train((other, optimizer), rank, number)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    return digest(model)

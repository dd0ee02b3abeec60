"""Models in DistributedDataParallel with the compression hook, for the tests of both."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomp.ddp import CompressionState, compress_hook
from ranks import loss_of

LARGE = {"2.weight", "6.weight"}  # of net(): what is compressed
SMALL = 0.02  # MB: several of DDP's buckets


def wrapped(model: nn.Module, state: CompressionState | None, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **({"bucket_cap_mb": SMALL} | options))
    if state is not None:
        ddp.register_comm_hook(state, compress_hook)
    return ddp


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (loss_of(ddp, rank, number) * factor).backward()
    optimizer.step()


def residuals(state: CompressionState) -> dict[str, Tensor]:
    return {name: kept["residual"] for name, kept in state.state_dict()["state"].items() if "residual" in kept}

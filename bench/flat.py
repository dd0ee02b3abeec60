"""Exchange and update with nothing to hide behind: what compression costs where links are fast, what payloads cost
where they are slow.

``NVLINK``: 100 M elements, one bucket, overlap off (netlab.py)

fusedcomp_fp32      SGD, momentum 0.9, TopK(0.001): compress, all_gather, apply
fusedcomp_fp32_wd   with weight decay
nccl_fp32           NCCL all-reduce of the gradient in one piece, torch's fused SGD on parameters in one piece
nccl_bf16           the same through a bf16 copy of the gradient

``LINKS``: 6.5 M elements in 20 tensors, one bucket, overlap off (collectives.py)

gather0.001, tree0.001, split0.001: the same SGD and TopK, payloads on each of their ways; 0.05 in place of 0.001
alone0.001          the same in a world of one, on all ranks at once: compress and apply, and no exchange
nccl_fp32           as above

Every repeat has new gradients (cubed normals: a few large entries) and starts on all ranks together, behind a tiny
all-reduce in the stream, with the whole step queued before: device time. Residuals are those of 30 steps before.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import exchanges
import harness
from fusedcomp import SGD, TopK

DENSITY, DENSITIES = 0.001, (0.001, 0.05)
DECAY = 1e-4
STEPS_BEFORE = 30
# Tensors have two dimensions, because vectors are never compressed.
NVLINK_SHAPE = (50, 2000, 1000)
LINK_SHAPE = (20, 512, 640)  # 100 pages of the wire format
QUICK_SHAPE = (4, 64, 64)
_HOLD = 1e-2  # seconds; longer than the host needs to queue a step

Row = dict[str, Any]


class Contestant:
    """Parameters and gradients in one piece each, and a step that exchanges and updates."""

    def __init__(self, device: torch.device, shape: tuple[int, ...]) -> None:
        self.flat, self.grad = torch.zeros(shape, device=device), torch.empty(shape, device=device)
        self.params = [nn.Parameter(p) for p in self.flat]
        for param, grad in zip(self.params, self.grad, strict=True):
            param.grad = grad
        self.step: Callable[[], Any] = harness.nothing
        self.optimizer: SGD | None = None

    def refill(self) -> None:
        self.grad.normal_().pow_(3).mul_(1e-3)

    def sent(self) -> int | None:
        """Bytes that this rank handed to the collectives in the last step, where the optimizer knows."""
        return None if self.optimizer is None else int(self.optimizer.metrics()["bytes_sent"])


Build = Callable[[torch.device, tuple[int, ...]], Contestant]


def _ours(compressor: TopK, decay: float = 0.0, alone: bool = False) -> Build:
    def build(device: torch.device, shape: tuple[int, ...]) -> Contestant:
        own = Contestant(device, shape)
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())] if alone else []
        own.optimizer = SGD(
            own.params, lr=1e-3, momentum=exchanges.MOMENTUM, weight_decay=decay, compressor=compressor,
            overlap=False, bucket_cap_mb=1000.0, process_group=groups[dist.get_rank()] if alone else None,
        )  # fmt: skip
        own.step = own.optimizer.step
        return own

    return build


def _dense(dtype: torch.dtype) -> Build:
    def build(device: torch.device, shape: tuple[int, ...]) -> Contestant:
        own = Contestant(device, (1, *shape))
        optimizer = torch.optim.SGD(own.params, lr=1e-3, momentum=exchanges.MOMENTUM, fused=True)
        wire = own.grad if dtype == own.grad.dtype else own.grad.to(dtype)
        average = own.grad.is_cuda  # gloo cannot

        def step() -> None:
            if wire is not own.grad:
                wire.copy_(own.grad)
            dist.all_reduce(wire, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
            if wire is not own.grad:
                own.grad.copy_(wire)
            optimizer.step()

        own.step = step
        return own

    return build


NVLINK: dict[str, Build] = {
    "fusedcomp_fp32": _ours(TopK(DENSITY)),
    "fusedcomp_fp32_wd": _ours(TopK(DENSITY), DECAY),
    "nccl_fp32": _dense(torch.float32),
    "nccl_bf16": _dense(torch.bfloat16),
}
LINKS: dict[str, Build] = {
    **{f"alone{density:g}": _ours(TopK(density), alone=True) for density in DENSITIES},
    **{f"{way}{density:g}": _ours(TopK(density, collective=way))
       for density in DENSITIES for way in ("gather", "tree", "split")},
    "nccl_fp32": _dense(torch.float32),
}  # fmt: skip


class Flat:
    """Contestants of one size on this rank, built and settled when they are first asked for."""

    def __init__(self, device: torch.device, quick: bool, builds: Mapping[str, Build], shape: tuple[int, ...]) -> None:
        self.device, self.clock, self.builds = device, harness.clock_for(device), builds
        self.shape, self.repeats = (QUICK_SHAPE, 2) if quick else (shape, 20)
        self.align = torch.zeros(1, device=device)
        self.contestants: dict[str, Contestant] = {}

    def settle(self, name: str) -> None:
        """The steps that make the residuals."""
        if name in self.contestants:
            return
        own = self.contestants[name] = self.builds[name](self.device, self.shape)
        for _ in range(STEPS_BEFORE):
            own.refill()
            own.step()
        self.clock.synchronise()

    def plain(self, name: str) -> Row:
        """Milliseconds of plain calls; are parameters the same on all ranks; bytes sent."""
        self.settle(name)
        own = self.contestants[name]
        row = self._timed(own, own.step)
        return row | {"identical": exchanges.identical(own.params), "bytes_sent": own.sent()}

    def graph(self, name: str) -> Row:
        """The same, replayed from a CUDA graph; the reason, where it cannot be captured."""
        own = self.contestants[name]
        try:
            return self._timed(own, self.clock.graph(own.step, own.refill))
        except Exception as error:
            return {"reason": f"{type(error).__name__}: {error}"[:500]}

    def _timed(self, own: Contestant, step: Callable[[], Any]) -> Row:
        times = []
        for repeat in range(self.repeats + 3):
            own.refill()
            self.clock.hold(_HOLD)
            dist.all_reduce(self.align)
            start = self.clock.mark()
            step()
            end = self.clock.mark()
            self.clock.synchronise()
            if repeat >= 3:
                times.append(self.clock.between(start, end))
        return {"ms": times}

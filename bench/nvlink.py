"""Exchange and update of 100 M elements with nothing to hide behind: what compression costs where links are fast.

fusedcomp_fp32      SGD, momentum 0.9, TopK(0.001), one bucket, overlap off: compress, all_gather, apply
fusedcomp_fp32_wd   with weight decay
nccl_fp32           NCCL all-reduce of the gradient in one piece, torch's fused SGD on parameters in one piece
nccl_bf16           the same through a bf16 copy of the gradient

Every repeat has new gradients (cubed normals: a few large entries) and starts on all ranks together, behind a tiny
all-reduce in the stream, with the whole step queued before: device time. Residuals are those of 30 steps before.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import exchanges
import harness
from fusedcomp import SGD, TopK

DENSITY = 0.001
DECAY = 1e-4
STEPS_BEFORE = 30
_SHAPE, _COUNT = (2000, 1000), 50  # of two dimensions, because vectors are never compressed
_HOLD = 2e-3  # seconds; longer than the host needs to queue a step

Row = dict[str, Any]


class Contestant:
    """Parameters and gradients in one piece each, and a step that exchanges and updates."""

    def __init__(self, device: torch.device, shape: tuple[int, int], count: int, tensors: int) -> None:
        numel = shape[0] * shape[1] * count
        self.flat, self.grad = torch.zeros(numel, device=device), torch.empty(numel, device=device)
        parts = (count, *shape) if tensors > 1 else (1, numel)
        self.params = [nn.Parameter(p) for p in self.flat.view(parts)]
        for param, grad in zip(self.params, self.grad.view(parts), strict=True):
            param.grad = grad
        self.step: Callable[[], Any] = harness.nothing

    def refill(self) -> None:
        self.grad.normal_().pow_(3).mul_(1e-3)


def contestants(device: torch.device, quick: bool) -> dict[str, Contestant]:
    shape, count = ((64, 64), 4) if quick else (_SHAPE, _COUNT)
    built = {}
    for name, decay in (("fusedcomp_fp32", 0.0), ("fusedcomp_fp32_wd", DECAY)):
        own = built[name] = Contestant(device, shape, count, tensors=count)
        own.step = SGD(
            own.params, lr=1e-3, momentum=exchanges.MOMENTUM, weight_decay=decay, compressor=TopK(DENSITY),
            overlap=False, bucket_cap_mb=1000.0,
        ).step  # fmt: skip
    for name, dtype in (("nccl_fp32", torch.float32), ("nccl_bf16", torch.bfloat16)):
        own = built[name] = Contestant(device, shape, count, tensors=1)
        own.step = _dense(own, dtype)
    return built


def _dense(own: Contestant, dtype: torch.dtype) -> Callable[[], None]:
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

    return step


class Flat100M:
    """The four contestants on this rank; plain calls first, as a failed capture can spoil everything after it."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device, self.quick, self.clock = device, quick, harness.clock_for(device)
        self.repeats = 2 if quick else 20
        self.align = torch.zeros(1, device=device)
        self.contestants = contestants(device, quick)

    def plain(self) -> dict[str, Row]:
        """Milliseconds of plain calls, after the steps that make the residuals."""
        rows = {}
        for name, own in self.contestants.items():
            for _ in range(STEPS_BEFORE):
                own.refill()
                own.step()
            rows[name] = self._timed(own, own.step) | {"identical": exchanges.identical(own.params)}
        return rows

    def graphs(self) -> dict[str, Row]:
        """The same, replayed from a CUDA graph; what cannot be captured is left out, with the reason."""
        rows: dict[str, Row] = {}
        for name, own in reversed(self.contestants.items()):
            try:
                rows[name] = self._timed(own, self.clock.graph(own.step, own.refill))
            except Exception as error:
                rows[name] = {"reason": f"{type(error).__name__}: {error}"[:500]}
        return rows

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

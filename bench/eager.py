"""Deep Gradient Compression in plain torch: what a user would write, and what the authors wrote.

FlatDGC       one flat vector, gradients flat already, exact top-k: eager torch at its best, and capturable
PerTensorDGC  a loop over tensors with a sampled threshold, as in github.com/synxlin/deep-gradient-compression b929ca7
              with its defaults (1 % strided samples, at most 10 corrections, then top-k among the rest)
FlatApply     what W ranks sent, added up and subtracted from a flat parameter vector
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SAMPLE_RATIO, LOWER, UPPER, CORRECTIONS = 0.01, 0.8, 1.3, 10  # DGC's own defaults


def compress_flat(velocity: Tensor, residual: Tensor, grad: Tensor, k: int, momentum: float) -> tuple[Tensor, Tensor]:
    """DGC's algorithm 1 for one rank; states in place. Returns what is sent: values and indices."""
    velocity.mul_(momentum).add_(grad)
    residual.add_(velocity)
    index = residual.abs().topk(k, sorted=False).indices
    values = residual[index]
    residual.index_fill_(0, index, 0.0)
    velocity.index_fill_(0, index, 0.0)
    return values, index


class _States:
    """Velocities and residuals that are put back before every repeat."""

    def __init__(self, velocities: Sequence[Tensor], residuals: Sequence[Tensor]) -> None:
        self.frozen = [*velocities, *residuals]
        live = [t.clone() for t in self.frozen]
        self.live = live
        self.velocities, self.residuals = live[: len(velocities)], live[len(velocities) :]

    def reset(self) -> None:
        torch._foreach_copy_(self.live, self.frozen)


class FlatDGC(_States):
    """``compiled`` runs the same function through torch.compile."""

    def __init__(self, velocity: Tensor, residual: Tensor, grad: Tensor, k: int, momentum: float) -> None:
        super().__init__([velocity], [residual])
        self.grad, self.k, self.momentum = grad, k, momentum
        self.magnitudes = (residual + (velocity * momentum + grad)).abs()  # what selection ranks
        self._compiled: Any = None

    def _arguments(self) -> tuple[Any, ...]:
        return self.velocities[0], self.residuals[0], self.grad, self.k, self.momentum

    def run(self) -> tuple[Tensor, Tensor]:
        return compress_flat(*self._arguments())

    def compiled(self) -> tuple[Tensor, Tensor]:
        if self._compiled is None:
            self._compiled = compile_for(self.grad.device, compress_flat)
        return self._compiled(*self._arguments())

    def top_k(self) -> Any:
        return self.magnitudes.topk(self.k, sorted=False)


class PerTensorDGC(_States):
    """Asks the device for a number per tensor and correction, as the original does: not capturable."""

    def __init__(
        self,
        velocities: Sequence[Tensor],  # flat, one per tensor
        residuals: Sequence[Tensor],
        grads: Sequence[Tensor],
        density: float,
        momentum: float,
    ) -> None:
        super().__init__(velocities, residuals)
        self.grads, self.density, self.momentum = grads, density, momentum
        self.plans = [_plan(g.numel(), density) for g in grads]

    def run(self) -> list[tuple[Tensor, Tensor]]:
        sent = []
        for velocity, residual, grad, plan in zip(self.velocities, self.residuals, self.grads, self.plans, strict=True):
            velocity.mul_(self.momentum).add_(grad)
            residual.add_(velocity)
            index = _select(residual, *plan)
            sent.append((residual[index], index))
            velocity.index_fill_(0, index, 0.0)
            residual.index_fill_(0, index, 0.0)
        return sent


def _plan(numel: int, density: float) -> tuple[int, int, int]:
    """(entries to send, samples, their stride) for a tensor."""
    least = max(math.ceil(numel * SAMPLE_RATIO), math.ceil(2 / density))
    if numel <= math.ceil(2 / density):
        return math.ceil(numel * density), numel, 1
    stride = math.ceil(numel / least / 32) * 32 + 1
    while numel // stride < least:
        stride -= 8
    return math.ceil(numel * density), numel // stride, stride


def _select(residual: Tensor, k: int, samples: int, stride: int) -> Tensor:
    """Indices of roughly the k largest: a threshold from samples, corrected until it is about right."""
    importance = residual.abs()
    numel = importance.numel()
    looked_at = importance if samples == numel else importance[random.randint(0, stride - 1) :: stride]
    top = max(1, math.ceil(samples * k / numel))
    threshold = looked_at.topk(min(top, looked_at.numel()), sorted=False).values.min()
    index = (importance >= threshold).nonzero().view(-1)
    for _ in range(CORRECTIONS if samples < numel else 0):
        if index.numel() > k * UPPER:
            index = index[importance[index].topk(k, sorted=False).indices]
            break
        if index.numel() >= k * LOWER:
            break
        threshold = threshold * LOWER
        index = (importance >= threshold).nonzero().view(-1)
    return index[:k]


class FlatApply:
    """Subtract the mean of what W ranks sent: a dense vector, filled rank by rank. ``lr`` is a tensor."""

    def __init__(self, param: Tensor, payloads: Sequence[tuple[Tensor, Tensor]], lr: Tensor) -> None:
        self.frozen, self.param = param, param.clone()
        self.payloads, self.lr = payloads, lr
        self._compiled: Any = None

    def reset(self) -> None:
        self.param.copy_(self.frozen)

    def run(self) -> None:
        apply_flat(self.param, [v for v, _ in self.payloads], [i for _, i in self.payloads], self.lr)

    def compiled(self) -> None:
        if self._compiled is None:
            self._compiled = compile_for(self.param.device, apply_flat)
        self._compiled(self.param, [v for v, _ in self.payloads], [i for _, i in self.payloads], self.lr)


def apply_flat(param: Tensor, values: Sequence[Tensor], indices: Sequence[Tensor], lr: Tensor) -> None:
    total = torch.zeros_like(param)
    for value, index in zip(values, indices, strict=True):
        total.index_add_(0, index, value)
    param.sub_(total * (lr / len(values)))


def compile_for(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile on a GPU; on a CPU only its front, because nobody reads the figures."""
    return torch.compile(function, backend="inductor" if device.type == "cuda" else "eager", dynamic=False)

"""Trained once, continued with every optimizer that is measured: where realistic states and payloads come from."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import bandwidth
import harness
import workloads
from fusedcomp import LARS, SGD, BlockTopK, TopK
from fusedcomp.gathered import GatheredExchange

MOMENTUM, DENSITY = 0.9, 0.001


@dataclasses.dataclass(frozen=True)
class Config:
    """An optimizer to measure. ``provider`` in records is "fusedcomp_" and ``name``."""

    name: str
    kind: str = "SGD"
    density: float = DENSITY
    half: bool = False  # states of 16 bits
    blocks: bool = False  # BlockTopK
    guarded: bool = False  # a step may be void: states of two halves
    buckets: str = "one"  # or "25mb"
    keep: int = 8  # payloads of the last so many steps, taken for those of as many ranks

    def build(self, params: Sequence[Tensor], lr: float, cap_mb: float) -> Any:
        """In a world of one, overlap off: gradients are compressed in ``step()``, where they can be frozen."""
        kind = {"SGD": SGD, "LARS": LARS}[self.kind]
        compressor = (BlockTopK if self.blocks else TopK)(density=self.density)
        more: dict[str, Any] = {"state_dtype": torch.bfloat16} if self.half else {}
        more |= {"skip_nonfinite": True} if self.guarded else {}
        return kind(
            params, lr=lr, momentum=MOMENTUM, compressor=compressor, overlap=False, bucket_cap_mb=cap_mb, **more
        )


def sparse_exchanges(optimizer: Any) -> list[GatheredExchange]:
    return [e for e in optimizer._exchanges if isinstance(e, GatheredExchange)]


class Trained:
    """A workload after ``steps`` steps of compressed SGD: its parameters, velocities and residuals.

    Raises:
        RuntimeError: the loss is not finite.
    """

    def __init__(self, workload: workloads.Workload, lr: float, steps: int) -> None:
        self.workload, self.lr = workload, lr
        optimizer = Config("fp32").build(workload.params, lr, cap_mb=1e6)
        begin = time.perf_counter()
        losses = take_steps(workload, optimizer, steps)
        if losses[0] is not None:
            shown = [torch.stack(part).mean().item() for part in (losses[:10], losses[-10:])]
            harness.log(
                f"loss {shown[0]:.3f} -> {shown[1]:.3f} in {steps} steps, {time.perf_counter() - begin:.1f} s "
                "with the compilation of the kernels (means of ten)"
            )
            if not all(map(math.isfinite, shown)):
                raise RuntimeError("training diverged: the states are not realistic")
        self._params = [p.detach().clone() for p in workload.params]
        self._states = [{name: t.clone() for name, t in optimizer.state[p].items()} for p in workload.params]

    def continue_with(self, config: Config, cap_mb: float) -> tuple[Any, list[Tensor]]:
        """Train ``config.keep`` more steps with another optimizer that takes the states over.

        Returns:
            The optimizer, and the payloads of these steps per sparse bucket, (keep, nbytes), with a gradient in place.
        """
        params = self.workload.params
        with torch.no_grad():
            torch._foreach_copy_([p.detach() for p in params], self._params)
        optimizer = config.build(params, self.lr, cap_mb)
        with torch.no_grad():
            for param, kept in zip(params, self._states, strict=True):
                for name in kept.keys() & optimizer.state[param].keys():
                    bandwidth.values(optimizer.state[param][name]).copy_(kept[name])
        payloads: list[list[Tensor]] = [[] for _ in sparse_exchanges(optimizer)]

        def keep() -> None:
            for kept, exchange in zip(payloads, sparse_exchanges(optimizer), strict=True):
                kept.append(exchange.buffers.own.clone())

        take_steps(self.workload, optimizer, config.keep, keep)
        optimizer.zero_grad()
        self.workload.backward()
        return optimizer, [torch.stack(kept) for kept in payloads]


def take_steps(
    workload: workloads.Workload, optimizer: Any, steps: int, after: Callable[[], Any] = harness.nothing
) -> list[Any]:
    """Losses of ``steps`` training steps."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(workload.backward())
        optimizer.step()
        after()
    return losses

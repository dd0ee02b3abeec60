"""An optimizer stopped between backward and step, its states real; and the check that kernels equal twins there."""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import harness
import launches
import workloads
from fusedcomp import SGD, TopK, _dispatch
from fusedcomp.overlap import _in_layout
from fusedcomp.pipeline import DenseExchange, Exchange, SparseExchange

DENSITY, MOMENTUM, RANKS = 0.001, 0.9, 8


def train(workload: workloads.Workload, lr: float, cap_mb: float, steps: int) -> tuple[SGD, list[Tensor]]:
    """A world of one, overlap off: gradients are compressed in ``step()``, where they can be frozen.

    Returns:
        The optimizer, and the payloads of the last 8 steps per sparse bucket, (8, nbytes), with a gradient in place.
    """
    optimizer = SGD(
        workload.params,
        lr=lr,
        momentum=MOMENTUM,
        compressor=TopK(density=DENSITY),
        overlap=False,
        bucket_cap_mb=cap_mb,
    )
    payloads: list[list[Tensor]] = [[] for _ in sparse_exchanges(optimizer)]
    losses = []
    for step in range(steps + 1):
        optimizer.zero_grad()
        losses.append(workload.backward())
        if step == steps:
            break
        _step(optimizer, first=step == 0)
        if step >= steps - RANKS:
            for kept, exchange in zip(payloads, sparse_exchanges(optimizer), strict=True):
                kept.append(exchange.buffers.own.clone())
    if losses[0] is not None:
        shown = [torch.stack(part).mean().item() for part in (losses[:10], losses[-10:])]
        harness.log(f"loss {shown[0]:.3f} -> {shown[1]:.3f} in {steps} steps (means of ten)")
        if not all(map(math.isfinite, shown)):
            raise RuntimeError("training diverged: the states are not realistic")
    return optimizer, [torch.stack(kept) for kept in payloads]


def _step(optimizer: SGD, first: bool) -> None:
    """The first one compiles the kernels, once for every way their arguments are specialised."""
    if not first:
        optimizer.step()
        return
    synchronise = torch.cuda.synchronize if optimizer._buckets[0].device.type == "cuda" else harness.nothing
    synchronise()
    begin = time.perf_counter()
    optimizer.step()
    synchronise()
    harness.log(
        f"first step {time.perf_counter() - begin:.1f} s, {launches.compiled_variants()} kernels compiled so far"
    )


def sparse_exchanges(optimizer: SGD) -> list[SparseExchange]:
    return [e for e in optimizer._exchanges if isinstance(e, SparseExchange)]


class _RecordedRanks:
    """A group of 8 whose payloads lie there already; the exchange itself takes no time."""

    world_size, rank = RANKS, 0

    def all_gather(self, out: Tensor, own: Tensor) -> None:
        out[0].copy_(own)

    def all_reduce(self, tensor: Tensor) -> None:
        pass


class Frozen:
    """An optimizer between backward and step: its gradients, and copies of all that a step changes."""

    def __init__(self, optimizer: SGD, payloads: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        self.exchanges: list[Exchange] = list(optimizer._exchanges)
        self.sparse = sparse_exchanges(optimizer)
        self.dense = [e for e in self.exchanges if isinstance(e, DenseExchange)]
        self.params = [p.detach() for e in self.exchanges for p in e.bucket.params]
        self.grads = [[_take_grad(p) for p in e.bucket.params] for e in self.exchanges]
        for exchange, received in zip(self.sparse, payloads, strict=True):
            exchange.buffers.received = received
            exchange.buffers.payloads = exchange.buffers.layout.views(received)
        for exchange in self.exchanges:
            exchange.group = _RecordedRanks()  # type: ignore[assignment]
        optimizer._mirror_lr()
        self.states = [t for e in self.exchanges for t in e.bucket.states.values()]
        self.counters = [t for e in self.sparse for t in (e.seed, e.flag)]
        self.copies = [[t.clone() for t in live] for live in (self.states, self.counters, self.params)]
        self.numel_sparse = sum(e.bucket.segments.numel for e in self.sparse)
        self.numel_dense = sum(e.bucket.segments.numel for e in self.dense)
        self.k = sum(e.buffers.layout.k for e in self.sparse)

    def reset_states(self) -> None:
        """What the compress side changes."""
        for exchange, grads in zip(self.exchanges, self.grads, strict=True):
            exchange.bucket.operands.update(grads)  # ``optimizer.step()`` lets go of them; addresses stay the same
        for live, copies in zip((self.states, self.counters), self.copies, strict=False):
            copy_all(live, copies)

    def reset(self) -> None:
        """What a whole step changes."""
        self.reset_states()
        copy_all(self.params, self.copies[2])

    def hyper(self, exchange: Exchange, weight_decay: float) -> Any:
        hyper = self.optimizer._hyper(exchange.bucket.treatment.group)
        return dataclasses.replace(hyper, weight_decay=weight_decay)

    def launch(self, weight_decay: float = 0.0) -> None:
        """The whole compress side, by the pipeline's own code: what runs during backward."""
        for exchange, grads in zip(self.exchanges, self.grads, strict=True):
            exchange.launch(grads, self.hyper(exchange, weight_decay), self.optimizer._step)

    def apply(self) -> None:
        """What runs in ``step()``, of 8 ranks' payloads."""
        for exchange in self.exchanges:
            exchange.apply(self.hyper(exchange, 0.0))

    def whole_step(self, weight_decay: float = 0.0) -> None:
        self.launch(weight_decay)
        self.apply()

    def optimizer_step(self) -> None:
        """The same through the front door: ``optimizer.step()``, which compresses here because overlap is off."""
        self.optimizer.step()

    def outcome(self) -> dict[str, Tensor]:
        """Everything a step leaves behind that matters; live tensors."""
        named = {f"bucket {i}: {name}": t for i, e in enumerate(self.exchanges) for name, t in e.bucket.states.items()}
        named |= {f"sparse bucket {i}: payload": e.buffers.own for i, e in enumerate(self.sparse)}
        named |= {f"sparse bucket {i}: step": e.seed for i, e in enumerate(self.sparse)}
        named |= {f"dense bucket {i}: sums": e.reduced.whole for i, e in enumerate(self.dense)}
        return named | {f"parameter {i}": p for i, p in enumerate(self.params)}


def _take_grad(param: Tensor) -> Tensor | None:
    """As the product takes it; torch.optim gets the same one."""
    param.grad = _in_layout(param)
    return param.grad


def copy_all(live: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    if live:
        torch._foreach_copy_(list(live), list(copies))


def runs_kernels(device: torch.device) -> bool:
    """Kernels, or the twins that are their own yardstick then? As ``_dispatch`` decides."""
    return _dispatch.ops(device) is _dispatch._KERNELS


# ---- correctness first ---------------------------------------------------------------------------------------------


@contextmanager
def on_twins(exchanges: Sequence[Exchange]) -> Iterator[None]:
    """Run the pipeline on the plain-torch twins."""
    with ExitStack() as stack:
        for exchange in exchanges:
            stack.enter_context(patch.object(exchange, "ops", _dispatch._TWINS))
        yield


def gate(frozen: Frozen, weight_decay: float) -> None:
    """Kernels and twins do the same to this very input, bit for bit.

    Raises:
        RuntimeError: they do not; nothing of this case is worth timing.
    """
    frozen.reset()
    frozen.whole_step(weight_decay)
    fast = {name: tensor.clone() for name, tensor in frozen.outcome().items()}
    frozen.reset()
    with on_twins(frozen.exchanges):
        frozen.whole_step(weight_decay)
    different = [name for name, tensor in frozen.outcome().items() if not torch.equal(tensor, fast[name])]
    frozen.reset()
    if different:
        raise RuntimeError(f"kernels differ from twins (weight decay {weight_decay}) in: {', '.join(different[:20])}")
    if not all(bool(state.isfinite().all()) for state in frozen.states):
        raise RuntimeError("velocity or residual is not finite: the states are not realistic")

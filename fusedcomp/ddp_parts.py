"""What the DDP hook (ddp.py) is made of: DDP's buckets, their parts with an exchange each, a watch over momenta."""

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fusedcomp.exchange import Exchange, Hyper


class Entry:
    """One of DDP's buckets."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.parts: list[Part] = []  # what is exchanged as soon as it is here
        self.rest: list[int] = []  # positions of what is exchanged with the rest of other buckets
        self.grads: list[Tensor] = []  # of this step: parts of DDP's buffer
        self.buffer: Tensor
        self.future: Future[Tensor]

    def take(self, bucket: Any) -> Future[Tensor]:
        """What DDP hands over in this step, a GradBucket, and what it will wait for."""
        self.grads, self.buffer = bucket.gradients(), bucket.buffer()
        self.future = Future(devices=[self.buffer.device]) if self.buffer.is_cuda else Future()
        return self.future


class Part:
    """Parameters of one exchange, by bucket and position."""

    def __init__(self, exchange: Exchange, sources: list[tuple[Entry, int]]) -> None:
        self.exchange, self.sources = exchange, sources

    def _inputs(self) -> list[Tensor | None]:
        """Gradients; None where backward left none: DDP's buffer has zeros there, which mean nothing."""
        targets = [entry.grads[i] for entry, i in self.sources]
        self.exchange.bucket.operands.params = targets
        pairs = zip(self.sources, targets, strict=True)
        return [None if entry.params[i].grad is None else target for (entry, i), target in pairs]

    def measure(self) -> None:
        """Norms of the gradients."""
        self.exchange.bucket.operands.update(self._inputs())
        self.exchange.measure()

    def launch(self, hyper: Hyper, step: int) -> None:
        """Start the exchange on the current stream."""
        self.exchange.launch(self._inputs(), hyper, step)


def named(params: Any) -> dict[Tensor, str]:
    """Parameter -> name; a position where none was given. DDP's prefix, which all names have, goes."""
    found: dict[Tensor, str] = {}
    if isinstance(params, Tensor) or not isinstance(params, Iterable | None):
        raise TypeError(f"params must be parameters or (name, parameter) pairs, got {type(params).__name__}")
    for index, item in enumerate([] if params is None else params):
        name, param = item if isinstance(item, tuple) else (str(index), item)
        if not isinstance(param, Tensor):
            raise TypeError(f"params must be parameters or (name, parameter) pairs, got {type(param).__name__}")
        if name in found.values() and param not in found:
            raise ValueError(f"params: the name {name!r} was given to two parameters")
        found.setdefault(param, name)
    if params is not None and not found:
        raise ValueError("params is empty: pass model.named_parameters(), or leave it out")
    if all(name.startswith("module.") for name in found.values()):
        found = {param: name.removeprefix("module.") for param, name in found.items()}
    return found


class MomentumWatch:
    """Warns when an optimizer with momentum first steps the parameters of a state that has momentum too."""

    def __init__(self, state: Any) -> None:
        weak = weakref.ref(state)

        def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            state = weak()
            if state is not None and not self.done:
                self._look(state, optimizer)

        self.done = False
        self._handle = register_optimizer_step_pre_hook(look)
        weakref.finalize(state, self._handle.remove)

    def close(self) -> None:
        """Not from within an optimizer's step, which goes through the hooks."""
        if self.done:
            self._handle.remove()

    def _look(self, state: Any, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(p) for entry in state._entries.values() for p in entry.params}
        for group in optimizer.param_groups:
            if mine.isdisjoint(map(id, group["params"])):
                continue
            self.done = True
            if group.get("momentum", 0.0) or group.get("betas", (0.0,))[0]:
                warnings.warn(
                    f"{type(optimizer).__name__} has momentum (or a first beta), and so has the compression hook "
                    f"(momentum={state.momentum}): it is applied twice. Take it out of one of them",
                    stacklevel=5,
                )
                return

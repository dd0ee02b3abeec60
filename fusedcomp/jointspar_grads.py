"""Gradients under JointSpar: how they are divided by the chance of their block, and how their norms are known.

Inside   fusedcomp's optimizers: factors of the pass, which leaves the norms: no gradient is touched by itself
Hooked   any others: tensor hooks, which come before accumulation, and so before what sends gradients
"""

import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedcomp.optimizer import CompressedOptimizer
from fusedcomp.overlap import Sampler

UNDRAWN = (
    "backward() reached a block of JointSpar without a draw() since the last step: call draw() before the forward pass "
    "of every step, in place of optimizer.zero_grad(), or remove() the sampler"
)


class Inside:
    """Of an optimizer of fusedcomp's.

    Args:
        optimizer: whose they are.
        blocks: their parameters.
        sampler: asked before anything is sent, and told when a step is over.
        shared: do all ranks draw alike?
    """

    def __init__(
        self, optimizer: CompressedOptimizer, blocks: Sequence[Sequence[Tensor]], sampler: Sampler, shared: bool
    ) -> None:
        self._optimizer, self._blocks, self._shared = optimizer, blocks, shared
        self._order: list[int] = []  # of the parameters of all buckets, in order, their blocks; -1: none
        self._places = torch.zeros(0, dtype=torch.int64)  # among them of the blocks' parameters
        optimizer._sampler = weakref.ref(sampler)

    def draw(self, chances: Sequence[float], active: Sequence[bool], observed: bool) -> None:
        """These blocks from now on, and the chances to divide by. ``observed``: norms of the step will be asked for."""
        exchanges = self._optimizer._exchanges
        if not exchanges.is_sampled:  # its buckets are new
            self._find()
        inverse, on = [*(1.0 / chance for chance in chances), 1.0], [*active, True]
        known = [on[block] for block in self._order] if self._shared else None
        exchanges.sample([inverse[block] for block in self._order], known, observed)

    def _find(self) -> None:
        params = [param for bucket in self._optimizer._buckets for param in bucket.params]
        block_of = {param: index for index, block in enumerate(self._blocks) for param in block}
        self._order = [block_of.get(param, -1) for param in params]
        position = {param: index for index, param in enumerate(params)}
        places = [position[param] for block in self._blocks for param in block]
        self._places = torch.tensor(places, device=params[0].device)

    def end(self) -> None:
        """The step is over."""

    def square_norms(self) -> Tensor:
        """|g / p|^2 of every parameter, in the order of blocks, on the device; 0 where there was no gradient."""
        squares = self._optimizer._exchanges.shared.squares
        assert squares is not None
        return squares[self._places]

    def release(self) -> None:
        """Gradients are as they were before a sampler."""
        self._optimizer._sampler = None
        self._optimizer._exchanges.end_sampling()


class Hooked:
    """Of any other optimizer."""

    def __init__(self, blocks: Sequence[Sequence[Tensor]]) -> None:
        self._params = [param for block in blocks for param in block]
        self._chances = [math.nan] * len(blocks)  # not drawn
        hooks = [_dividing(self._chances, index) for index in range(len(blocks))]
        self._handles = [p.register_hook(hook) for block, hook in zip(blocks, hooks, strict=True) for p in block]
        dtype = torch.float32
        for param in self._params:
            dtype = torch.promote_types(dtype, param.dtype)
        self._zero = torch.zeros((), dtype=dtype, device=self._params[0].device)

    def draw(self, chances: Sequence[float], active: Sequence[bool], observed: bool) -> None:
        """Divide by these from now on, block by block."""
        self._chances[:] = chances

    def end(self) -> None:
        """The step is over."""
        self._chances[:] = [math.nan] * len(self._chances)

    def square_norms(self) -> Tensor:
        """|g / p|^2 of every parameter, in the order of blocks, on the device; 0 where there is no gradient."""
        grads = {i: _values(p.grad) for i, p in enumerate(self._params) if p.grad is not None}
        found = torch._foreach_norm(list(grads.values()), 2, self._zero.dtype) if grads else []
        norms = dict(zip(grads, found, strict=True))
        return torch.stack([norms.get(i, self._zero) for i in range(len(self._params))]).square()

    def release(self) -> None:
        """Gradients are as they were before a sampler."""
        for handle in self._handles:
            handle.remove()


def _dividing(chances: list[float], block: int) -> Callable[[Tensor], Tensor | None]:
    """A tensor hook. It holds nothing that holds the sampler or the parameter."""

    def hook(grad: Tensor) -> Tensor | None:
        chance = chances[block]
        if chance == 1.0:
            return None
        if math.isnan(chance):
            raise RuntimeError(UNDRAWN)
        return grad / chance

    return hook


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad

"""Segments and operands: where the parameters of a bucket lie, and at which addresses this step's tensors are.

A bucket is a list of parameters. Each is a *segment*: its elements in memory order, padded to whole blocks of
``BLOCK`` elements, so that no block straddles two parameters. ``PAGE`` elements of that padded space share one start
offset on the wire, which leaves 16 bits for the index inside a page; of ``SIGNED_PAGE`` 15, and one for a sign.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

BLOCK = 2048
PAGE = 65536
BLOCKS_PER_PAGE = PAGE // BLOCK
SIGNED_PAGE = PAGE // 2
WORDS = BLOCK // 32  # of a block where an element is a bit
_BLOCKS_PER_PART = 128  # some 800 candidates at density 0.001: what one program of the selection looks at
_CANDIDATES_PER_PART = 2048  # where it is known that there may be more


@dataclass(frozen=True, eq=False)
class Segments:
    """The static table of a bucket. ``per_tensor``: selection ranks inside each segment, not over the bucket."""

    numels: tuple[int, ...]
    per_tensor: bool
    num_blocks: int
    numel: int  # elements of all segments, without padding
    block_table: Tensor  # i32 (num_blocks, 2): segment, block in segment
    numel_table: Tensor  # i64 (segments,)
    start_table: Tensor  # i64 (segments,): first element in the compact (unpadded) order
    first_blocks: Tensor  # i64 (segments + 1,)
    scope_blocks: Tensor  # i64 (scopes + 1,): first block of every scope
    part_table: Tensor  # i64 (parts, 5): scope, its first block and the next one's; number of the part, of how many
    slices: tuple[slice, ...]  # of the padded space
    compact_slices: tuple[slice, ...]

    @staticmethod
    def build(numels: Sequence[int], device: torch.device, *, per_tensor: bool = False) -> "Segments":
        """Lay out segments of ``numels`` elements on ``device`` (one host-to-device copy a table; not for the step)."""
        table: list[tuple[int, int]] = []
        starts, first_blocks, slices, compact = [], [0], [], []
        start = 0
        for segment, numel in enumerate(numels):
            blocks = _blocks(numel)
            padded = first_blocks[-1] * BLOCK
            table += [(segment, block) for block in range(blocks)]
            slices.append(slice(padded, padded + numel))
            compact.append(slice(start, start + numel))
            starts.append(start)
            first_blocks.append(first_blocks[-1] + blocks)
            start += numel

        def i64(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return Segments(
            numels=tuple(numels),
            per_tensor=per_tensor,
            num_blocks=len(table),
            numel=start,
            block_table=torch.tensor(table, dtype=torch.int32, device=device).view(-1, 2),
            numel_table=i64(numels),
            start_table=i64(starts),
            first_blocks=i64(first_blocks),
            scope_blocks=i64(first_blocks if per_tensor else [0, first_blocks[-1]]),
            part_table=_parts(numels, per_tensor, _BLOCKS_PER_PART).to(device),
            slices=tuple(slices),
            compact_slices=tuple(compact),
        )

    @property
    def padded_numel(self) -> int:
        """Elements of a flat state."""
        return self.num_blocks * BLOCK

    @property
    def num_pages(self) -> int:
        """Pages of the padded space, the last one perhaps in part."""
        return self.pages_of(PAGE)

    def pages_of(self, page: int) -> int:
        """The same for pages of another size, whole blocks."""
        return -(-self.num_blocks // (page // BLOCK))

    @property
    def scope_numels(self) -> tuple[int, ...]:
        """Elements that each selection ranks over."""
        return self.numels if self.per_tensor else (self.numel,)

    def scope_of(self, segment: int) -> int:
        """The selection that a segment takes part in."""
        return segment if self.per_tensor else 0

    def parted(self, candidates: int) -> "Segments":
        """The same, in as many parts as so many candidates call for; asks the device for nothing."""
        blocks = max(1, self.num_blocks * _CANDIDATES_PER_PART // candidates)
        if blocks >= _BLOCKS_PER_PART:
            return self
        table, device = _parts(self.numels, self.per_tensor, blocks), self.part_table.device
        table = table.pin_memory() if device.type == "cuda" else table
        return replace(self, part_table=table.to(device, non_blocking=True))


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _parts(numels: Sequence[int], per_tensor: bool, blocks_per_part: int) -> Tensor:
    """See ``Segments.part_table``."""
    counts = [_blocks(numel) for numel in numels]
    scope_blocks = [0, *accumulate(counts if per_tensor else [sum(counts)])]
    parts = [
        (scope, begin, end, part, count)
        for scope, (begin, end) in enumerate(pairwise(scope_blocks))
        for count in [-(-(end - begin) // blocks_per_part)]
        for part in range(count)
    ]
    return torch.tensor(parts, dtype=torch.int64).view(-1, 5)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Staging:
    """Numbers of the host on their way to a device, without waiting for it.

    They go through pinned memory that is not reused while a copy from it is pending.
    """

    _SLOTS = 4

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._slot = 0
        if device.type == "cuda":
            self._pinned = torch.empty((self._SLOTS, *shape), dtype=dtype, pin_memory=True)
            self._copied = [torch.cuda.Event() for _ in range(self._SLOTS)]

    def send(self, host: Tensor, out: Tensor) -> None:
        """Copy ``host`` to ``out`` on the current stream."""
        if not out.is_cuda:
            out.copy_(host)
            return
        self._slot = (self._slot + 1) % self._SLOTS
        if not self._copied[self._slot].query():
            self._copied[self._slot].synchronize()  # four changes in flight: the host is far ahead of the device
        self._pinned[self._slot].copy_(host)
        out.copy_(self._pinned[self._slot], non_blocking=True)
        self._copied[self._slot].record()


class Operands:
    """The tensors of a bucket as both sides of the twin need them: lists for torch, addresses for the kernels.

    All tensors of a segment share one dense layout, so that "element i" is the i-th in memory. A missing gradient is
    None, address 0. Addresses are sent only when one changed.

    A table that a CUDA graph reads is its own from then on: plain steps between its replays use another. What differs
    under capture from what was sent reaches the graph's table as arguments of kernels, which the graph keeps.
    """

    def __init__(self, params: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
        self.params = list(params)
        self.grads: list[Tensor | None] = [None] * len(self.params)
        self.dtype = dtype or self.params[0].dtype  # of all parameters and gradients
        device = self.params[0].device
        self.addresses = torch.zeros((2, len(self.params)), dtype=torch.int64, device=device)  # gradients, parameters
        self._sent: list[list[int]] | None = None  # what the table holds; None: only the device knows
        self._masked = False
        self._captured = False  # does a graph read the table?
        self._of_graphs: list[Tensor] = []
        self._staging = Staging(self.addresses.shape, torch.int64, device)

    @property
    def lacking(self) -> bool:
        """Is a gradient missing, or may it be?"""
        return self._masked or any(grad is None for grad in self.grads)

    def release(self) -> None:
        """Let go of the gradients, so that zero_grad() frees them; the addresses stay."""
        self.grads = [None] * len(self.params)

    def update(self, grads: Sequence[Tensor | None]) -> None:
        """Take this step's gradients; on CUDA the copy runs on the current stream."""
        self.grads, self._masked = list(grads), False
        addresses = [[0 if g is None else g.data_ptr() for g in grads], [p.data_ptr() for p in self.params]]
        capturing = _capturing(self.addresses.device)
        if addresses != self._sent:
            if capturing or self._captured:
                self._of_graphs.append(self.addresses)  # a graph, or work on another stream, may still read it
                self.addresses = torch.zeros_like(self.addresses)
                self._captured = False
            if capturing:
                torch._foreach_add_(list(self.addresses.view(-1).unbind()), [a for row in addresses for a in row])
            else:
                self._staging.send(torch.tensor(addresses, dtype=torch.int64), self.addresses)
            self._sent = None if capturing else addresses
        self._captured = self._captured or capturing

    def keep_present(self, present: Tensor) -> None:
        """Of the gradients taken, let those be none for which ``present`` (segments,) is 0: the device knows which."""
        self.addresses[0].mul_(present != 0)
        self._sent, self._masked = None, True
        if not self.addresses.is_cuda:
            self.grads = [grad if there else None for grad, there in zip(self.grads, present.tolist(), strict=True)]


def memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor of any layout as a 1-D view, in the order they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))

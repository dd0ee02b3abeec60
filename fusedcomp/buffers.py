"""Buffers: what an exchange works in beside the states; no checkpoint needs them.

Payloads        a compressed bucket's payloads
PayloadBuffers  the same, and the scratch that depends on k
Summed          what is summed over ranks, and its trailer
Reduced         the same of all of a bucket's elements
strata_table    from which parts of a bucket elements are drawn
places_of       where in a payload the entries of every block are
sample_table    which elements a bucket's threshold is sampled from
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedcomp.buckets import Bucket
from fusedcomp.compressors import CAT, TopK
from fusedcomp.kernels.headers import TRAILER_WORDS
from fusedcomp.kernels.pack import PACK
from fusedcomp.kernels.sample import SAMPLES
from fusedcomp.kernels.segments import BLOCK, Operands, Segments
from fusedcomp.sizing import Selection, count_at, num_samples
from fusedcomp.wire import Payload, PayloadLayout, dense_numel


@dataclass
class Payloads:
    """What a rank sends and receives: made anew when k changes."""

    layout: PayloadLayout
    own: Tensor  # u8 (nbytes,)
    received: Tensor  # u8 (world, nbytes)
    payload: Payload  # views of ``own``
    payloads: Payload  # views of ``received``

    @staticmethod
    def of(layout: PayloadLayout, world: int, device: torch.device, room: Tensor | None = None) -> "Payloads":
        """Zeros. ``room``: u8 zeros, where to receive."""
        if room is None:
            room = torch.zeros(world * layout.nbytes, dtype=torch.uint8, device=device)
        received = room[: world * layout.nbytes].view(world, -1)
        own = received[0] if world == 1 else torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        return Payloads(layout, own, received, layout.views(own.view(1, -1)), layout.views(received))


@dataclass
class PayloadBuffers(Payloads):
    """The same, and what else depends on k."""

    numbers: Tensor  # i64 (3, scopes), of which the next three are rows
    ranks: Tensor
    sample_ranks: Tensor
    sample_aims: Tensor
    keys: Tensor  # i64 (capacity,)
    indices: Tensor  # i64 (capacity,)
    near: Tensor  # i64 (capacity,)
    packed: Tensor  # i64 (1 + 2 programs of pack_payload,)

    @staticmethod
    def allocate(
        layout: PayloadLayout, selection: Selection, world: int, device: torch.device, room: Tensor | None
    ) -> "PayloadBuffers":
        """Zeros, and the numbers of the selection, sent without waiting. ``room``: u8 zeros, where to receive."""

        def zeros(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=torch.int64, device=device)

        travels = Payloads.of(layout, world, device, room)
        host = torch.tensor(selection.numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
        numbers = host.to(device, non_blocking=True)
        ranks, sample_ranks, sample_aims = numbers
        return PayloadBuffers(
            **vars(travels),
            numbers=numbers,
            ranks=ranks,
            sample_ranks=sample_ranks,
            sample_aims=sample_aims,
            keys=zeros(selection.capacity),
            indices=zeros(selection.capacity),
            near=zeros(selection.capacity),
            packed=zeros(1 + 2 * -(-selection.capacity // PACK)),
        )

    def cut(self, layout: PayloadLayout) -> "PayloadBuffers":
        """Room for fewer entries in the same memory."""
        world = self.received.shape[0]
        received = self.received.view(-1)[: world * layout.nbytes].view(world, -1)
        own = received[0] if world == 1 else self.own[: layout.nbytes]
        payload, payloads = layout.views(own.view(1, -1)), layout.views(received)
        return dataclasses.replace(
            self, layout=layout, own=own, received=received, payload=payload, payloads=payloads
        )  # fmt: skip


@dataclass(frozen=True)
class Summed:
    """A flat buffer that is summed over ranks (wire.py), and views into it."""

    whole: Tensor
    values: Tensor  # f32 (numel,)
    trailer: Tensor  # f32 (segments + TRAILER_WORDS,)
    norms: Tensor  # f32 (2 * segments,) or (0,)

    @staticmethod
    def of(numel: int, segments: int, with_norms: bool, device: torch.device) -> "Summed":
        """Zeros for so many values of so many segments."""
        whole = torch.zeros(dense_numel(segments, numel, with_norms), dtype=torch.float32, device=device)
        return Summed.within(whole, segments, with_norms)

    @staticmethod
    def within(whole: Tensor, segments: int, with_norms: bool) -> "Summed":
        """Views of a buffer that has room for as many values as there is place."""
        ends = [segments + TRAILER_WORDS, 2 * segments if with_norms else 0]
        return Summed(whole, *whole.split([whole.numel() - sum(ends), *ends]))


@dataclass(frozen=True)
class Reduced(Summed):
    """The same of all of a bucket's elements, as gradients and as parameters."""

    as_grads: Operands  # gradients: the segments of ``values``; parameters: the bucket's
    as_params: Operands  # parameters: the segments of ``values``

    @staticmethod
    def allocate(bucket: Bucket, with_norms: bool) -> "Reduced":
        """A zeroed buffer for one bucket."""
        segments = bucket.segments
        count = len(segments.numels)
        summed = Summed.of(segments.numel, count, with_norms, bucket.device)
        views = [summed.values[where] for where in segments.compact_slices]
        as_grads, as_params = Operands(bucket.params, bucket.treatment.dtype), Operands(views)
        as_grads.update(views)
        as_params.update([None] * count)
        return Reduced(summed.whole, summed.values, summed.trailer, summed.norms, as_grads, as_params)

    def place(self, order: Sequence[int], numels: Sequence[int]) -> list[slice]:
        """Let the segments lie one behind the other in this order, as gradients; where each of them is."""
        sizes = [numels[segment] for segment in order]
        grads: list[Tensor | None] = [None] * len(sizes)
        where, start = [slice(0)] * len(sizes), 0
        for segment, size, view in zip(order, sizes, self.values.split(sizes), strict=True):
            grads[segment], where[segment] = view, slice(start, start + size)
            start += size
        self.as_grads.update(grads)
        return where

    def gradients(self, operands: Operands) -> Operands:
        """The sums as gradients beside the parameters, wherever those are by now."""
        self.as_grads.params = operands.params
        self.as_grads.update(self.as_grads.grads)
        return self.as_grads


def places_of(per_block: int, segments: Segments) -> Tensor:
    """The first entry of every block in a payload with so many of each, and their number: i64 (blocks + 1,).

    Worked out by the device, that no step waits for a copy.
    """
    segment, block = segments.block_table.long().unbind(1)
    counts = (segments.numel_table[segment] - block * BLOCK).clamp(max=per_block)
    return torch.cat([torch.zeros_like(counts[:1]), counts.cumsum(0)])


def sample_table(compressor: TopK | CAT, segments: Segments) -> tuple[Tensor, Tensor]:
    """Evenly spaced (segment, offset) pairs for every scope, and which programs' share they are (sample.py)."""
    starts = torch.tensor([s.start for s in segments.compact_slices])
    rows: list[Tensor] = []
    groups: list[tuple[int, int, int]] = []
    first = 0
    for scope, numel in enumerate(segments.scope_numels):
        samples = num_samples(compressor, numel)
        position = torch.arange(samples, dtype=torch.int64) * numel // samples + first
        segment = torch.searchsorted(starts, position, right=True) - 1
        rows.append(torch.stack([segment, position - starts[segment]], 1))
        rows.append(torch.tensor([[-1, 0]]).repeat(-samples % SAMPLES, 1))
        programs = range(len(groups), len(groups) + -(-samples // SAMPLES))
        groups += [(scope, programs.start, programs.stop)] * len(programs)
        first += numel
    device = segments.block_table.device
    return torch.cat(rows).to(device), torch.tensor(groups, dtype=torch.int32, device=device)


def strata_table(density: float, segments: Segments) -> Tensor:
    """(first padded index, size) of every part of every segment that one element is drawn from; i64 (k, 2)."""
    rows = []
    for where, numel in zip(segments.slices, segments.numels, strict=True):
        count = count_at(density, numel)
        edges = torch.arange(count + 1, dtype=torch.int64) * numel // count
        rows.append(torch.stack([where.start + edges[:-1], edges.diff()], 1))
    return torch.cat(rows).to(segments.block_table.device)

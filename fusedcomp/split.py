"""Split and reduce, after Ok-Topk: every rank sums a range of the bucket, and what comes of the ranges is gathered.

launch:  [sample -> compress -> refine] -> payload -> a piece for every owner -> all_to_all
         owner:  pieces of all ranks -> add up -> its share of the k largest -> all_gather;  the rest -> residual
apply:   headers -> what has come of all ranges -> parameters
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedcomp.kernels.headers import NON_FINITE
from fusedcomp.kernels.segments import BLOCK, BLOCKS_PER_PAGE, Segments
from fusedcomp.merging import Merger, make_vector, mask
from fusedcomp.sizing import Selection
from fusedcomp.sparse import SparseExchange
from fusedcomp.wire import Payload, PayloadLayout, Split, split_is_dearer, split_layouts


@dataclass
class _Parts:
    """What a bucket's exchange works in; made anew when k changes."""

    split: Split
    cut: Tensor  # u8 (owners, nbytes): own pieces
    received: Tensor  # u8 (world, nbytes): of the own range, or (0, nbytes)
    share: Tensor  # u8 (nbytes,): what comes of the own range
    shares: Tensor  # u8 (world, nbytes)
    own: Payload  # views of ``cut``
    pieces: Payload  # views of ``received``
    outcome: Payload  # views of ``share``
    gathered: Payload  # views of ``shares``
    joined: Payload  # of all ranges, under all ranks' headers
    sent: Payload  # all own pieces
    merger: Merger | None  # of an owner


class SplitExchange(SparseExchange):
    """The entries that ``TopK`` selects, and of their sums the largest of every range."""

    _follows_draws = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Velocities are masked where something is applied, which is known at the end; alone it is a gather.
        self.alone = self.group.world_size == 1
        self.masked_at_last: Tensor | None = None
        if not self.alone:
            self.masked_at_last, self.masked, self.peers = self.masked, None, 1
            make_vector(self.shared, self.bucket.segments.padded_numel, self.bucket.device)
        # The own range, which is the same for every k: its tables are no work for a step.
        segments, rank = self.bucket.segments, self.group.rank
        size = Split.of(segments.num_pages, 1, self.group.world_size).pages * BLOCKS_PER_PAGE
        first, last = (min(number * size, segments.num_blocks) for number in (rank, rank + 1))
        self.range = Segments.build([(last - first) * BLOCK], self.bucket.device) if last > first else None
        halves = self.residual.view(-1, segments.padded_numel)
        self.own_residuals = halves[:, first * BLOCK : last * BLOCK]
        self.parts: _Parts

    def _layouts(self, k: int) -> tuple[Split, PayloadLayout, PayloadLayout]:
        """Of a piece, and of what comes of a range."""
        segments = self.bucket.segments
        return split_layouts(
            len(segments.numels), segments.num_pages, k, self.compressor.wire_dtype, self.trust is not None,
            self.group.world_size,
        )  # fmt: skip

    def _goes_dense(self, k: int) -> bool:
        if self.alone or self.always_sparse:
            return super()._goes_dense(k)
        split, piece, share = self._layouts(k)
        raw = 4 * self.bucket.segments.numel
        return split_is_dearer(split, piece.nbytes, share.nbytes, raw, self.group.world_size)

    def prepare(self, selection: Selection, dense: bool, room: Tensor | None) -> None:
        """Buffers for this selection."""
        super().prepare(selection, dense, room)
        if not dense and not self.alone:
            self.parts = self._allocate(selection.k)

    def _allocate(self, k: int) -> _Parts:
        split, piece, share = self._layouts(k)
        segments, world, device, mine = self.bucket.segments, self.group.world_size, self.bucket.device, self.range

        def rows(count: int, layout: PayloadLayout) -> Tensor:
            return torch.zeros((count, layout.nbytes), dtype=torch.uint8, device=device)

        def joined(room: int) -> Payload:
            layout = PayloadLayout(
                len(segments.numels), segments.num_pages, split.owners * room, False, piece.wire_dtype
            )
            return layout.views(rows(1, layout))

        cut, received, shares = rows(split.owners, piece), rows(world if mine else 0, piece), rows(world, share)
        own_share, gathered = rows(1, share), share.views(shares)
        merger, pieces = None, piece.views(received)
        if mine is not None:
            merger = Merger(self, mine, [split.share], min(world * split.room, mine.numel))
            pieces = pieces._replace(starts=pieces.starts[:, : mine.num_pages + 1])
        return _Parts(
            split, cut, received, own_share[0], shares, piece.views(cut), pieces,
            share.views(own_share), gathered,
            joined(split.share)._replace(header=gathered.header, norms=gathered.norms), joined(split.room), merger,
        )  # fmt: skip

    # ---- launch --------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        if self.alone:
            super()._gather()
            return
        parts, payload = self.parts, self.buffers.payload
        self.ops.pieces.cut_payload(
            self.bucket.segments, payload.starts[0], payload.indices[0], payload.values[0], self.seed,
            self.shared.parity, self.residual, parts.own.starts, parts.own.indices, parts.own.values,
        )  # fmt: skip
        self.nbytes = parts.cut.numel() + parts.share.numel()
        self.work = self.group.all_to_all(parts.received, parts.cut, parts.split.owners)
        if self.seed.is_cuda:  # on CPU waiting stops the host, and with it backward: in ``wait``
            self._reduce()

    def _reduce(self) -> None:
        """What comes of the own range, on its way to all ranks, under the header of the own payload."""
        parts, payload = self.parts, self.buffers.payload
        self.work.wait()
        told = 0
        if parts.merger is not None:
            parts.merger.merge(parts.pieces, parts.outcome, 0, self.own_residuals, 0, 1)
            starts, pages = parts.outcome.starts[0], parts.merger.segments.num_pages
            starts[pages + 1 :] = starts[pages]  # the last range may lack some
            told = parts.outcome.header[0, 2] & NON_FINITE.value  # a sum of finite values may be infinite
        parts.outcome.norms.copy_(payload.norms)
        flags = payload.header[0, 2] | told
        parts.outcome.header.copy_(payload.header)
        parts.outcome.header[0, 2] = flags
        self.work = self.group.all_gather(parts.shares, parts.share)

    # ---- step ----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Make the current stream wait for the exchange; on CPU, sum the own range."""
        if self.alone or self.dense_step:
            super().wait()
            return
        if not self.seed.is_cuda:
            self._reduce()
        super().wait()
        parts = self.parts
        shares, owners = parts.gathered, parts.split.owners
        self._join(shares.starts[:owners], shares.indices[:owners], shares.values[:owners], parts.joined)
        if self.masked_at_last is not None:
            self._join(parts.own.starts, parts.own.indices, parts.own.values, parts.sent)
            mask(self, parts.joined, parts.sent, self.masked_at_last)

    def _join(self, starts: Tensor, indices: Tensor, values: Tensor, out: Payload) -> None:
        self.ops.pieces.join_pieces(
            self.bucket.segments, starts, indices, values, out.starts[0], out.indices[0], out.values[0]
        )  # fmt: skip

    def _arrived(self) -> Payload:
        return self.buffers.payloads if self.alone else self.parts.joined

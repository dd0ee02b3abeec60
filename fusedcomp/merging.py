"""Merging payloads: their sum, of it the largest entries as a payload, and the rest back into a residual.

vector <- payloads added up -> candidates -> the k largest -> payload;   residual <- residual + what is left
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomp.exchange import Shared
from fusedcomp.kernels.pack import PACK
from fusedcomp.kernels.refine import SCAN
from fusedcomp.kernels.segments import Segments
from fusedcomp.sparse import SparseExchange
from fusedcomp.wire import Payload

_FROM_ZERO = 55  # bits of a digit when candidates begin at key 0: 256 digits are all exponents (kernels/digits.py)


def make_vector(shared: Shared, numel: int, device: torch.device) -> None:
    """Room for sums of so many elements; buckets take turns."""
    if shared.vector is None or shared.vector.numel() < numel:
        shared.vector = torch.zeros(numel, dtype=torch.float32, device=device)


class Merger:
    """Merges payloads of one exchange; made anew when k changes.

    Args:
        exchange: whose scratch is used.
        segments: of the bucket, or of the range of its pages that is merged.
        ks: entries that a merge leaves, per scope.
        capacity: entries that come together at most.
    """

    def __init__(self, exchange: SparseExchange, segments: Segments, ks: Sequence[int], capacity: int) -> None:
        self.exchange, self.segments = exchange, segments.parted(capacity)
        device, blocks = exchange.bucket.device, segments.num_blocks

        def i64(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=torch.int64, device=device)

        host = torch.tensor(ks, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.ranks = host.to(device, non_blocking=True)
        self.counts, self.marks = exchange.counts[:blocks], exchange.marks[:blocks]
        self.scanned, self.offsets = i64(1 + 2 * -(-blocks // SCAN)), i64(blocks + 1)
        self.least, self.widths = i64(len(ks)), torch.full_like(exchange.widths, _FROM_ZERO)
        self.keys, self.indices, self.near = i64(capacity), i64(capacity), i64(capacity)
        self.packed = i64(1 + 2 * -(-capacity // PACK))
        self.seed, self.flag = torch.zeros_like(exchange.seed), torch.zeros_like(exchange.flag)

    @property
    def vector(self) -> Tensor:
        """Zeros between merges."""
        vector = self.exchange.shared.vector
        assert vector is not None
        return vector[: self.segments.padded_numel]

    def merge(self, rows: Payload, out: Payload, number: int, residuals: Tensor, place: int, places: int) -> None:
        """The largest of the sum of the rows, the same wherever the same rows are merged.

        Args:
            rows: payloads in the order of their ranks.
            out: a payload of one row; its header says whether a sum was not finite.
            number: of the merge in its step: ties are broken anew in every one.
            residuals: f32 (halves, padded), where the rest goes; rows may be strided.
            place: of ``places`` that merge the same: which indices' rest is kept here.
            places: how many.
        """
        exchange, segments, vector, refine = self.exchange, self.segments, self.vector, self.exchange.ops.refine
        torch.add(exchange.seed, number, out=self.seed)
        self.least.zero_()
        exchange.ops.merge.sum_payloads(
            segments, rows.starts, rows.indices, rows.values, vector, self.counts, self.marks
        )  # fmt: skip
        refine.list_candidates(segments, self.counts, self.marks, self.scanned, self.offsets, self.indices)
        refine.select_candidates(
            segments, self.offsets, self.indices, vector, None, self.seed, None, self.ranks, self.widths,
            exchange.histograms, exchange.bounds, self.near, exchange.near_counts, exchange.tickets, self.least,
            self.keys, self.flag, coarse=True,
        )  # fmt: skip
        starts = out.starts[0, : segments.num_pages + 1]  # a payload may have room for more pages
        exchange.ops.pack.pack_payload(
            segments, exchange.bucket.operands, self.keys, self.indices, self.offsets, self.least, None, vector,
            self.flag, self.seed, None, self.packed, starts, out.indices[0], out.values[0], out.header[0],
        )  # fmt: skip
        exchange.ops.merge.keep_rest(
            self.offsets, self.indices, exchange.shared.parity, vector, residuals, place=place, places=places
        )


def mask(exchange: SparseExchange, winners: Payload, sent: Payload, velocity: Tensor) -> None:
    """Zero the velocity of what this rank has sent and all ranks apply."""
    segments, vector = exchange.bucket.segments, exchange.shared.vector
    assert vector is not None
    exchange.ops.merge.mask_winners(
        segments, winners.starts[0], winners.indices[0], sent.starts[0], sent.indices[0], exchange.shared.parity,
        vector[: segments.padded_numel], velocity,
    )  # fmt: skip

"""The largest entries of every block: one pass that selects, a header, one gather.

launch:  compress, which fills the payload -> header -> all_gather
apply:   headers -> parameters, in rank order
"""

from typing import Any

import torch
from torch import Tensor

from fusedcomp.buckets import Bucket
from fusedcomp.buffers import Payloads, places_of
from fusedcomp.compressors import BlockTopK
from fusedcomp.exchange import Shared
from fusedcomp.gathered import GatheredExchange
from fusedcomp.kernels.segments import BLOCK, BLOCKS_PER_PAGE
from fusedcomp.memories import Memory
from fusedcomp.sizing import count_of_blocks


class BlockExchange(GatheredExchange):
    """The entries that ``BlockTopK`` selects. Where each is in the payload is known: only a new k moves them."""

    compressor: BlockTopK

    def __init__(
        self,
        bucket: Bucket,
        shared: Shared,
        seed: Tensor,
        compressor: BlockTopK,
        memory: Memory,
        with_momentum: bool,
        state_dtype: torch.dtype,
        always_sparse: bool,
        sums: Tensor | None,
    ) -> None:
        super().__init__(
            bucket, shared, seed, compressor, memory, with_momentum, state_dtype, always_sparse, sums
        )  # fmt: skip
        self.per_block = self.count = 0  # there was no step yet
        self.places: Tensor

    def _prepare(self, step: int) -> None:
        per_block = self.compressor.per_block_at(step)
        if per_block == self.per_block:
            return
        segments = self.bucket.segments
        self.per_block, self.count = per_block, count_of_blocks(per_block, segments.numels)
        self._set_dense(self._goes_dense(self.count))
        if not self.dense_step:
            self.buffers = Payloads.of(self._layout(self.count), self.group.world_size, self.bucket.device)
            self.places = places_of(per_block, segments)
            self._fill_places()

    def _fill_places(self) -> None:
        """What the payload has beside values: where pages begin, and, until there was a pass, valid indices."""
        payload, places = self.buffers.payload, self.places
        payload.starts[0].copy_(torch.cat([places[:-1:BLOCKS_PER_PAGE], places[-1:]]))
        entry = torch.arange(self.count, device=places.device)
        block = torch.searchsorted(places, entry, right=True) - 1
        payload.indices[0].copy_(block % BLOCKS_PER_PAGE * BLOCK + entry - places[block])  # wraps to 16 bits

    def _compress(self, numbers: dict[str, Any], failed: Tensor | None) -> None:
        payload = self.buffers.payload
        self.ops.compress.compress_blocks(
            self.bucket.segments, self.bucket.operands, self.velocity, self.residual, self.places, self.trust,
            self.scales, self.seed, self.shared.parity, self.velocity, self.residual, payload.indices[0],
            payload.values[0], self.partials, self.flag,
            **numbers, per_block=self.per_block, masking=self.masked is not None,
        )  # fmt: skip
        self.ops.headers.write_header(
            self.bucket.operands, self.flag, self.seed, payload.header[0],
            entries=self.count, wire_dtype=self.compressor.wire_dtype,
        )  # fmt: skip
        self._send(failed)

    def _send_nothing(self) -> None:
        payload = self.buffers.payload
        for field in (payload.header, payload.norms, payload.values):  # the places stay
            field.zero_()
        self.ops.headers.write_failure(self.seed, payload.header[0])
        self._gather()

    def metrics(self) -> dict[str, Tensor]:
        """This bucket's share of ``CompressedOptimizer.metrics``; there is no threshold."""
        device = self.bucket.device
        entries = self.bucket.segments.numel if self.dense_step else self.count
        count = torch.full((), entries, dtype=torch.int64, device=device)
        return {
            "nnz": count,
            "candidates": torch.zeros_like(count) if self.dense_step else count,
            "overflow": torch.zeros_like(count),
            "threshold": torch.zeros(len(self.thresholds), dtype=torch.float32, device=device),
            "residual_square_norm": self.residual_square_norm(),
        }

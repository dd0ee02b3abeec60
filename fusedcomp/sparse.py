"""What is selected by magnitude: one pass, one payload, one gather; a dense step where that is cheaper.

launch:  [sample -> compress -> refine] -> payload -> all_gather
apply:   headers -> parameters, in rank order
"""

from typing import Any

import torch
from torch import Tensor

from fusedcomp.buckets import RANK_WEIGHTS, Bucket
from fusedcomp.buffers import PayloadBuffers, Reduced, sample_table
from fusedcomp.compressors import Threshold, TopK
from fusedcomp.exchange import Hyper, Shared
from fusedcomp.kernels.digits import BINS
from fusedcomp.kernels.headers import FAILED
from fusedcomp.kernels.refine import SCAN
from fusedcomp.kernels.segments import Operands, Segments
from fusedcomp.memories import Memory
from fusedcomp.pipeline import CompressedExchange
from fusedcomp.sizing import NOTHING, THRESHOLD_WIDTH, Adaptive, Scheduled, Selection, Sizing, threshold_key
from fusedcomp.wire import Payload, PayloadLayout, dense_is_cheaper


def layout_of(compressor: TopK | Threshold, segments: Segments, with_norms: bool, k: int) -> PayloadLayout:
    """What a rank sends for a bucket of these segments if it sends k entries."""
    return PayloadLayout(len(segments.numels), segments.num_pages, k, with_norms, compressor.wire_dtype)


class SparseExchange(CompressedExchange):
    """The entries that ``TopK`` or ``Threshold`` selects."""

    def __init__(
        self,
        bucket: Bucket,
        shared: Shared,
        seed: Tensor,
        compressor: TopK | Threshold,
        memory: Memory,
        with_momentum: bool,
        state_dtype: torch.dtype,
        always_sparse: bool,
        sums: Tensor | None,
        compressed: int,
        ranked: bool,
    ) -> None:
        super().__init__(bucket, shared, seed, memory, with_momentum, state_dtype, sums)
        self.compressor, self.always_sparse = compressor, always_sparse
        self.peers = self.group.world_size  # whose payloads are received whole
        if ranked:
            self.weights = bucket.add_state(RANK_WEIGHTS).fill_(1.0)
        segments, device = bucket.segments, bucket.device
        scopes = len(segments.scope_numels)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.offsets = zeros(segments.num_blocks + 1, dtype=torch.int64)
        self.widths = zeros(scopes, dtype=torch.int32)
        self.bounds = zeros(scopes, 3, dtype=torch.int64)
        self.near_counts = zeros(scopes, dtype=torch.int32)
        self.histograms = zeros(scopes, BINS, dtype=torch.int32)
        self.tickets = zeros(scopes, dtype=torch.int32)
        self.scanned = zeros(1 + 2 * -(-segments.num_blocks // SCAN), dtype=torch.int64)
        self.sizing: Sizing
        if isinstance(compressor, Threshold):
            key = threshold_key(compressor.value_for(compressed), self.residual.itemsize == 2)
            self.least = torch.full((scopes,), key, dtype=torch.int64, device=device)
            self.widths.fill_(THRESHOLD_WIDTH)
            self.sizing = Adaptive(segments.numel, self._goes_dense, self.group.world_size, device)
        else:
            self.samples, self.sample_groups = sample_table(compressor, segments)
            self.sample_keys = zeros(len(self.samples), dtype=torch.int64)
            self.sizing = Scheduled(compressor, segments.scope_numels)
        self.selection = NOTHING  # that ``buffers`` are for
        self.buffers: PayloadBuffers

    def _prepare(self, step: int) -> None:
        selection = self.sizing.at(step)
        if selection is not self.selection:
            self.prepare(selection, self._goes_dense(selection.k), None)

    def _layout(self, k: int) -> PayloadLayout:
        return layout_of(self.compressor, self.bucket.segments, self.trust is not None, k)

    def _goes_dense(self, k: int) -> bool:
        nbytes, raw = self._layout(k).nbytes, 4 * self.bucket.segments.numel
        collective = getattr(self.compressor, "collective", "gather")
        return dense_is_cheaper(nbytes, raw, self.group.world_size, collective) and not self.always_sparse

    def prepare(self, selection: Selection, dense: bool, room: Tensor | None) -> None:
        """Buffers for this selection; the same decision on every rank. ``room``: u8, where to receive."""
        self.selection, self.dense_step = selection, dense
        if self.reduced is None and (dense or "momentum_buffer" in self.bucket.states):
            self.reduced = Reduced.allocate(self.bucket, self.trust is not None)
        if not dense:
            self.buffers = PayloadBuffers.allocate(
                self._layout(selection.k), selection, self.peers, self.bucket.device, room
            )  # fmt: skip

    def _compress(self, numbers: dict[str, Any], failed: Tensor | None) -> None:
        payload = self.buffers.payload
        self._find_threshold(numbers)
        self._pass(numbers)
        self._refine()
        if payload.norms.numel() > 0:
            self.ops.norms.reduce_norms(self.bucket.segments, self.partials, payload.norms[0].view(2, -1))
        if failed is not None:
            payload.header[0, 2] |= failed * FAILED.value
        self._gather()

    def _find_threshold(self, numbers: dict[str, Any]) -> None:
        """What a candidate must reach: sampled, or the compressor's own."""
        if isinstance(self.compressor, Threshold):
            self.thresholds.copy_(self.least)  # where there was no room for all, refining has raised it
            return
        self.ops.sample.sample_threshold(
            self.bucket.segments, self.bucket.operands, self.samples, self.sample_groups, self.buffers.sample_ranks,
            self.buffers.sample_aims, self.velocity, self.residual, self.weights, self.trust, self.scales, self.seed,
            self.shared.parity, self.sample_keys, self.histograms, self.tickets, self.thresholds, self.widths,
            **numbers,
        )  # fmt: skip

    def _refine(self) -> None:
        segments, buffers, refine = self.bucket.segments, self.buffers, self.ops.refine
        refine.list_candidates(segments, self.counts, self.marks, self.scanned, self.offsets, buffers.indices)
        refine.select_candidates(
            segments, self.offsets, buffers.indices, self.residual, self.weights, self.seed, self.shared.parity,
            buffers.ranks, self.widths,
            self.histograms, self.bounds, buffers.near, self.near_counts, self.tickets, self.thresholds, buffers.keys,
            self.flag,
        )  # fmt: skip
        payload = buffers.payload
        refine.pack_payload(
            segments, self.bucket.operands, buffers.keys, buffers.indices, self.offsets, self.thresholds,
            self.masked, self.residual, self.flag, self.seed, self.shared.parity, buffers.packed,
            payload.starts[0], payload.indices[0], payload.values[0], payload.header[0],
        )  # fmt: skip

    def _gather(self) -> None:
        self.work = self.group.all_gather(self.buffers.received, self.buffers.own)
        self.nbytes = self.buffers.layout.nbytes

    def _send_nothing(self) -> None:
        self.buffers.own.zero_()
        self.ops.headers.write_failure(self.seed, self.buffers.payload.header[0])
        self._gather()

    def wait(self) -> None:
        """Make the current stream (on CPU: the host) wait for the exchange."""
        super().wait()
        if not self.dense_step:
            self.sizing.note(self.buffers.payloads.header)

    def _arrived(self) -> Payload:
        """What is applied, with the norms of all ranks."""
        return self.buffers.payloads

    def _read_sent(self) -> None:
        verdict = self.shared.verdict
        self.ops.headers.read_headers(
            self.buffers.payloads.header, self.status, None if verdict is None else verdict.nonfinite, self.present
        )

    def _apply_sent(self, hyper: Hyper) -> None:
        segments, inverse = self.bucket.segments, 1.0 / self.group.world_size
        payload = self._arrived()
        # Who had a gradient matters before the update; mostly nobody asks, and the update reads the headers itself,
        # unless payloads were merged.
        merged = self.peers < self.group.world_size
        asks = merged or self.trust is not None or self.bucket.operands.lacking or self.decays_apart
        if asks:
            if self.shared.verdict is None:
                self.read()
            self.settle(hyper, payload.norms)
            self.decay(hyper)
        entries = (payload.starts, payload.indices, payload.values)
        headers = None if asks or self.shared.verdict is not None else payload.header
        told = (headers, self.status, self.shared.found_inf, self.present)

        def put(operands: Operands, lr: Tensor) -> None:
            sums = self.sums if operands is self.bucket.operands else None
            self.ops.apply.apply_payloads(segments, operands, *entries, lr, *told, sums, inverse_world=inverse)

        self._land(put, hyper)

    def metrics(self) -> dict[str, Tensor]:
        """This bucket's share of ``CompressedOptimizer.metrics``."""
        segments, device = self.bucket.segments, self.bucket.device
        if self.dense_step or self.selection is NOTHING:  # there was no step yet
            nnz = torch.full((), segments.numel if self.dense_step else 0, dtype=torch.int64, device=device)
            candidates = overflow = torch.zeros_like(nnz)
            threshold = torch.zeros(len(self.thresholds), dtype=torch.float32, device=device)
        else:
            nnz = self.buffers.payload.starts[0, -1].long()
            candidates = self.offsets[-1].clone()
            room = self.selection.k if isinstance(self.compressor, Threshold) else self.buffers.keys.numel()
            overflow = (candidates - room).clamp(min=0)
            coarse = self.residual.itemsize == 2 and self.weights is None
            hashed = 48 if coarse else 32  # the key's bits below the magnitude (kernels/keys.py)
            threshold = (self.thresholds >> hashed << hashed - 32).to(torch.int32).view(torch.float32)
        return {
            "nnz": nnz,
            "candidates": candidates,
            "overflow": overflow,
            "threshold": threshold,
            "residual_square_norm": self.residual_square_norm(),
        }

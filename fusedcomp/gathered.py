"""What travels as payloads: gathered, read, and added to the parameters in rank order; a dense step where cheaper."""

import torch
from torch import Tensor

from fusedcomp.buckets import Bucket
from fusedcomp.buffers import Payloads, Reduced
from fusedcomp.compressors import CAT, BlockTopK, Threshold, TopK
from fusedcomp.exchange import Hyper, Shared
from fusedcomp.kernels.headers import FAILED
from fusedcomp.kernels.segments import PAGE, SIGNED_PAGE, Operands, Segments
from fusedcomp.memories import Memory
from fusedcomp.pipeline import CompressedExchange
from fusedcomp.wire import Payload, PayloadLayout, dense_is_cheaper


def layout_of(
    compressor: TopK | Threshold | CAT | BlockTopK, segments: Segments, with_norms: bool, k: int
) -> PayloadLayout:  # fmt: skip
    """What a rank sends for a bucket of these segments if it sends k entries."""
    signed = isinstance(compressor, CAT) and compressor.variant == "sparse_quantized"
    pages = segments.pages_of(SIGNED_PAGE if signed else PAGE)
    return PayloadLayout(len(segments.numels), pages, k, with_norms, compressor.wire_dtype, signed)


class GatheredExchange(CompressedExchange):
    """Entries and where they belong, in payloads of one size on all ranks."""

    buffers: Payloads

    def __init__(
        self,
        bucket: Bucket,
        shared: Shared,
        seed: Tensor,
        compressor: TopK | Threshold | CAT | BlockTopK,
        memory: Memory,
        with_momentum: bool,
        state_dtype: torch.dtype,
        always_sparse: bool,
        sums: Tensor | None,
    ) -> None:
        super().__init__(bucket, shared, seed, memory, with_momentum, state_dtype, sums)
        self.compressor, self.always_sparse = compressor, always_sparse
        self.peers = self.group.world_size  # whose payloads are received whole

    def _layout(self, k: int) -> PayloadLayout:
        return layout_of(self.compressor, self.bucket.segments, self.trust is not None, k)

    def _goes_dense(self, k: int) -> bool:
        nbytes, raw = self._layout(k).nbytes, 4 * self.bucket.segments.numel
        return dense_is_cheaper(nbytes, raw, self.group.world_size) and not self.always_sparse

    def _set_dense(self, dense: bool) -> None:
        """Whether steps are dense from now on, and the sums that are needed then, or for momentum."""
        self.dense_step = dense
        if self.reduced is None and (dense or "momentum_buffer" in self.bucket.states):
            self.reduced = Reduced.allocate(self.bucket, self.trust is not None)

    def _send(self, failed: Tensor | None) -> None:
        """A payload that is complete but for norms, on its way. ``failed``: as for ``start``."""
        payload = self.buffers.payload
        if payload.norms.numel() > 0:
            self.ops.norms.reduce_norms(self.bucket.segments, self.partials, payload.norms[0].view(2, -1))
        if failed is not None:
            payload.header[0, 2] |= failed * FAILED.value
        self._gather()

    def _gather(self) -> None:
        self.work = self.group.all_gather(self.buffers.received, self.buffers.own)
        self.nbytes = self.buffers.layout.nbytes

    def _arrived(self) -> Payload:
        """What is applied, with the norms of all ranks."""
        return self.buffers.payloads

    def _read_sent(self) -> None:
        verdict = self.shared.verdict
        self.ops.headers.read_headers(
            self._arrived().header, self.status, None if verdict is None else verdict.nonfinite, self.present
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
            self.ops.apply.apply_payloads(
                segments, operands, *entries, lr, *told, sums, inverse_world=inverse, signed=self.buffers.layout.signed
            )

        self._land(put, hyper)

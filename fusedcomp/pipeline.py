"""The pipeline: what happens to a bucket, in order. Nothing here asks the device for a value.

    sparse bucket   launch:  [sample -> compress -> refine] -> payload -> all_gather
                    apply:   headers -> parameters, in rank order
    dense bucket    launch:  pack -> all_reduce
                    apply:   (norms ->) fused update

``launch`` runs on the caller's current stream, during backward; ``apply`` on the main stream, in ``step()``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedcomp._dispatch import ops
from fusedcomp.buckets import Bucket
from fusedcomp.buffers import PayloadBuffers, Reduced, sample_table
from fusedcomp.collectives import Group
from fusedcomp.compressors import TopK, plan_selection
from fusedcomp.kernels.digits import BINS
from fusedcomp.kernels.refine import SCAN
from fusedcomp.kernels.segments import WORDS
from fusedcomp.memories import Memory, MomentumCorrection, NoMemory, accumulation
from fusedcomp.wire import PayloadLayout, dense_is_cheaper


@dataclass(frozen=True)
class Hyper:
    """The numbers of a param group at this step."""

    lr: Tensor  # f32 (1,) on the device
    momentum: float
    nesterov: bool
    weight_decay: float
    maximize: bool
    trust_coefficient: float = 0.0
    eps: float = 0.0


class _Exchange:
    """What sparse and dense buckets share: the summed buffer, presence, status, trust ratios, the pending work."""

    def __init__(self, bucket: Bucket, group: Group, status: Tensor, step: int) -> None:
        self.bucket, self.group, self.status = bucket, group, status
        self.seed = torch.full((1,), step, dtype=torch.int32, device=bucket.device)  # the step, kept by the device
        self.ops = ops(bucket.device)
        count, device = len(bucket.segments.numels), bucket.device
        self.present = torch.zeros(count, dtype=torch.int32, device=device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.trust = self.partials = None
        if bucket.treatment.trust:
            self.trust = torch.ones(count, dtype=torch.float32, device=device)
            self.partials = torch.zeros((bucket.segments.num_blocks, 2), dtype=torch.float32, device=device)
        self.work: Any = None
        self.nbytes = 0  # handed to the collective in this step

    def reduce(self, reduced: Reduced, failed: bool) -> None:
        """Fill in the trailer and start the sum over ranks."""
        self.ops.headers.write_trailer(self.bucket.operands, self.flag, self.seed, reduced.trailer, failed=failed)
        self.work = self.group.all_reduce(reduced.whole)
        self.nbytes = reduced.whole.nbytes

    def wait(self) -> None:
        """Make the current stream (on CPU: the host) wait for the exchange."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def weight_decay(self, hyper: Hyper) -> float:
        """The group's, or 0 for a bucket that does not decay."""
        return hyper.weight_decay if self.bucket.treatment.decay else 0.0


class DenseExchange(_Exchange):
    """Never compressed: the mean gradient is all-reduced, the update is torch's (or LARS's), fused."""

    def __init__(self, bucket: Bucket, group: Group, status: Tensor, with_momentum: bool, step: int) -> None:
        super().__init__(bucket, group, status, step)
        if with_momentum:
            bucket.add_state("momentum_buffer")
        if bucket.treatment.trust:
            self.mean_norms = torch.zeros(
                (2, len(bucket.segments.numels)), dtype=torch.float32, device=bucket.device
            )  # of the mean gradient
        self.reduced = Reduced.allocate(bucket, with_norms=False)

    def launch(self, grads: Sequence[Tensor | None], hyper: Hyper, step: int) -> None:
        """Start the exchange of these gradients, on the current stream."""
        self.bucket.operands.update(grads)
        # Divided before the sum, as torch's hooks do.
        scale = (-1.0 if hyper.maximize else 1.0) / self.group.world_size
        self.ops.dense.pack_dense(
            self.bucket.segments, self.bucket.operands, self.reduced.values, self.flag, grad_scale=scale
        )
        self.reduce(self.reduced, failed=False)

    def launch_nothing(self, step: int) -> None:
        """Take part in the exchange with zeros, as a rank that failed."""
        self.bucket.operands.update([None] * len(self.bucket.params))
        self.reduced.whole.zero_()
        self.reduce(self.reduced, failed=True)

    def apply(self, hyper: Hyper) -> None:
        """Take in what arrived: headers, then parameters."""
        segments, operands = self.bucket.segments, self.reduced.gradients()
        self.ops.headers.read_trailer(self.reduced.trailer, self.status, self.present, world=self.group.world_size)
        decay = self.weight_decay(hyper)
        if self.trust is not None:
            self.ops.norms.block_norms(segments, operands, self.partials)
            self.ops.norms.reduce_norms(segments, self.partials, self.mean_norms)
            self.ops.norms.trust_ratios(
                segments, operands, self.mean_norms, self.trust,
                coefficient=hyper.trust_coefficient, weight_decay=decay, eps=hyper.eps, fallback=False,
            )  # fmt: skip
        self.ops.dense.update_dense(
            segments, operands, self.present, self.trust, hyper.lr,
            self.bucket.states.get("momentum_buffer"), inverse_world=1.0, weight_decay=decay,
            momentum=hyper.momentum, nesterov=hyper.nesterov,
        )  # fmt: skip


class SparseExchange(_Exchange):
    """Compressed: one pass, one payload, one gather; a dense step where that is cheaper."""

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        status: Tensor,
        compressor: TopK,
        memory: Memory,
        with_momentum: bool,
        state_dtype: torch.dtype,
        always_sparse: bool,
        sums: Tensor | None,
        step: int,
    ) -> None:
        super().__init__(bucket, group, status, step)
        self.compressor, self.memory, self.always_sparse, self.sums = compressor, memory, always_sparse, sums
        segments, device = bucket.segments, bucket.device
        scopes = len(segments.scope_numels)
        if bucket.treatment.trust:
            bucket.norms = torch.zeros((2, len(segments.numels)), dtype=torch.float32, device=device)
        # Without memory the residual is scratch, no state: written by the pass, read by refine.
        keeps = not isinstance(memory, NoMemory)
        self.residual = (
            bucket.add_state("residual", state_dtype)
            if keeps
            else torch.zeros(segments.padded_numel, dtype=state_dtype, device=device)
        )
        corrects = isinstance(memory, MomentumCorrection)
        self.velocity = bucket.add_state("velocity", state_dtype) if corrects else None
        if with_momentum and not corrects:
            bucket.add_state("momentum_buffer")
        self.masked = self.velocity if isinstance(memory, MomentumCorrection) and memory.masking else None

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.samples, self.sample_groups = sample_table(compressor, segments)
        self.sample_keys = zeros(len(self.samples), dtype=torch.int64)
        self.thresholds = zeros(scopes, dtype=torch.int64)
        self.counts = zeros(segments.num_blocks, dtype=torch.int32)
        self.marks = zeros(segments.num_blocks, WORDS, dtype=torch.int32)
        self.offsets = zeros(segments.num_blocks + 1, dtype=torch.int64)
        self.widths = zeros(scopes, dtype=torch.int32)
        self.bounds = zeros(scopes, 3, dtype=torch.int64)
        self.near_counts = zeros(scopes, dtype=torch.int32)
        self.histograms = zeros(scopes, BINS, dtype=torch.int32)
        self.tickets = zeros(scopes, dtype=torch.int32)
        self.scanned = zeros(1 + 2 * -(-segments.num_blocks // SCAN), dtype=torch.int64)
        self.minus_one = torch.full((1,), -1.0, dtype=torch.float32, device=device)
        self.density = 0.0  # that ``buffers`` are for
        self.buffers: PayloadBuffers
        self.dense_step = False
        self.reduced: Reduced | None = None

    def launch(self, grads: Sequence[Tensor | None], hyper: Hyper, step: int) -> None:
        """Start the exchange of these gradients, on the current stream."""
        operands = self.bucket.operands
        operands.update(grads)
        self._prepare(step)
        decay = self.weight_decay(hyper)
        numbers = {
            "accumulate": accumulation(self.memory, hyper.nesterov),
            "grad_scale": -1.0 if hyper.maximize else 1.0,
            "weight_decay": decay,
            "momentum": hyper.momentum,
        }
        if self.trust is not None:
            self._trust_ratios(hyper, decay)
        if self.dense_step:
            self._compress_all(numbers)
        else:
            self._compress(numbers)

    def launch_nothing(self, step: int) -> None:
        """Take part in the exchange with an empty payload, as a rank that failed; states stay as they are."""
        self.bucket.operands.update([None] * len(self.bucket.params))
        self._prepare(step)
        if self.dense_step and self.reduced is not None:
            self.reduced.whole.zero_()
            self.reduce(self.reduced, failed=True)
        else:
            self.buffers.own.zero_()
            self.ops.headers.write_failure(self.seed, self.buffers.payload.header[0])
            self._gather()

    def _prepare(self, step: int) -> None:
        """Buffers for this step's density, and whether the bucket goes dense: the same decision on every rank."""
        density = self.compressor.density_at(step)
        if density == self.density:
            return
        self.density = density
        segments, device, world = self.bucket.segments, self.bucket.device, self.group.world_size
        selection = plan_selection(self.compressor, segments.scope_numels, step)
        with_norms = self.trust is not None
        layout = PayloadLayout(
            len(segments.numels), segments.num_pages, selection.k, with_norms, self.compressor.wire_dtype
        )
        self.dense_step = dense_is_cheaper(layout.nbytes, 4 * segments.numel, world) and not self.always_sparse
        if self.reduced is None and (self.dense_step or "momentum_buffer" in self.bucket.states):
            self.reduced = Reduced.allocate(self.bucket, with_norms)
        if not self.dense_step:
            self.buffers = PayloadBuffers.allocate(layout, selection, world, device)

    def _trust_ratios(self, hyper: Hyper, decay: float) -> None:
        """From the last exchange's norms; where there is none yet, from this rank's norms of this very step."""
        self.ops.norms.trust_ratios(
            self.bucket.segments, self.bucket.operands, self.bucket.norms, self.trust,
            coefficient=hyper.trust_coefficient, weight_decay=decay, eps=hyper.eps, fallback=True,
        )  # fmt: skip

    def _compress(self, numbers: dict[str, Any]) -> None:
        segments, operands, buffers = self.bucket.segments, self.bucket.operands, self.buffers
        self.ops.sample.sample_threshold(
            segments, operands, self.samples, self.sample_groups, buffers.sample_ranks, buffers.sample_aims,
            self.velocity, self.residual, self.trust, self.seed,
            self.sample_keys, self.histograms, self.tickets, self.thresholds, self.widths, **numbers,
        )  # fmt: skip
        self.ops.compress.compress(
            segments, operands, self.velocity, self.residual, self.thresholds, self.trust, self.seed,
            self.velocity, self.residual, self.counts, self.marks, self.partials, **numbers,
        )  # fmt: skip
        self._refine()
        if self.trust is not None:
            self.ops.norms.reduce_norms(segments, self.partials, buffers.payload.norms[0].view(2, -1))
        self._gather()

    def _refine(self) -> None:
        segments, buffers, refine = self.bucket.segments, self.buffers, self.ops.refine
        refine.list_candidates(segments, self.counts, self.marks, self.scanned, self.offsets, buffers.indices)
        refine.select_candidates(
            segments, self.offsets, buffers.indices, self.residual, self.seed, buffers.ranks, self.widths,
            self.histograms, self.bounds, buffers.near, self.near_counts, self.tickets, self.thresholds, buffers.keys,
            self.flag,
        )  # fmt: skip
        payload = buffers.payload
        refine.pack_payload(
            segments, self.bucket.operands, buffers.keys, buffers.indices, self.offsets, self.thresholds,
            self.masked, self.residual, self.flag, self.seed, buffers.packed,
            payload.starts[0], payload.indices[0], payload.values[0], payload.header[0],
        )  # fmt: skip

    def _gather(self) -> None:
        self.work = self.group.all_gather(self.buffers.received, self.buffers.own)
        self.nbytes = self.buffers.layout.nbytes

    def _compress_all(self, numbers: dict[str, Any]) -> None:
        segments, reduced = self.bucket.segments, self.reduced
        assert reduced is not None
        self.ops.compress.compress_all(
            segments, self.bucket.operands, self.velocity, self.residual, self.trust, self.seed,
            self.velocity, self.residual, reduced.values, self.partials, self.flag, **numbers,
        )  # fmt: skip
        if self.trust is not None:
            norms = reduced.norms.view(2, -1)
            self.ops.norms.reduce_norms(segments, self.partials, norms)
            if self.group.rank != 0:
                norms[1].zero_()
        self.reduce(reduced, failed=False)

    def apply(self, hyper: Hyper) -> None:
        """Take in what arrived: headers, then parameters."""
        if self.dense_step:
            self._apply_reduced(hyper)
        else:
            self._apply_payloads(hyper)

    def _apply_reduced(self, hyper: Hyper) -> None:
        reduced = self.reduced
        assert reduced is not None
        self.ops.headers.read_trailer(reduced.trailer, self.status, self.present, world=self.group.world_size)
        self._settle(hyper)
        self._commit_norms(reduced.norms.view(1, -1))
        self._update(reduced, hyper, 1.0 / self.group.world_size)

    def _apply_payloads(self, hyper: Hyper) -> None:
        segments, inverse = self.bucket.segments, 1.0 / self.group.world_size
        payload = self.buffers.payloads
        headers: Tensor | None = payload.header
        if self.trust is not None or self.bucket.operands.lacking:  # who had a gradient matters before the update
            self.ops.headers.read_headers(payload.header, self.status, self.present)
            self._settle(hyper)
            self._commit_norms(payload.norms)
            headers = None
        entries = (payload.starts, payload.indices, payload.values)
        told = (headers, self.status, self.present)
        if "momentum_buffer" not in self.bucket.states:
            self.ops.apply.apply_payloads(
                segments, self.bucket.operands, *entries, hyper.lr, *told, self.sums, inverse_world=inverse
            )
            return
        # Momentum follows the exchange: the mean update becomes a dense vector first.
        reduced = self.reduced
        assert reduced is not None
        reduced.values.zero_()
        self.ops.apply.apply_payloads(
            segments, reduced.as_params, *entries, self.minus_one, *told, None, inverse_world=inverse
        )
        self._update(reduced, hyper, 1.0)

    def _update(self, reduced: Reduced, hyper: Hyper, inverse_world: float) -> None:
        """Decay and trust ratio went through the wire; what remains is the step itself."""
        self.ops.dense.update_dense(
            self.bucket.segments, reduced.gradients(), self.present, None, hyper.lr,
            self.bucket.states.get("momentum_buffer"), inverse_world=inverse_world, weight_decay=0.0,
            momentum=hyper.momentum, nesterov=hyper.nesterov,
        )  # fmt: skip

    def _commit_norms(self, received: Tensor) -> None:
        if self.trust is not None:
            self.ops.norms.commit_norms(
                received, self.present, self.bucket.norms, inverse_world=1.0 / self.group.world_size
            )

    def metrics(self) -> dict[str, Tensor]:
        """This bucket's share of ``CompressedOptimizer.metrics``."""
        segments, device = self.bucket.segments, self.bucket.device
        if self.dense_step or self.density == 0.0:  # there was no step yet
            nnz = torch.full((), segments.numel if self.dense_step else 0, dtype=torch.int64, device=device)
            candidates = overflow = torch.zeros_like(nnz)
            threshold = torch.zeros(len(self.thresholds), dtype=torch.float32, device=device)
        else:
            nnz = self.buffers.payload.starts[0, -1].long()
            candidates = self.offsets[-1].clone()
            overflow = (candidates - self.buffers.keys.numel()).clamp(min=0)
            hashed = 48 if self.residual.itemsize == 2 else 32  # the key's bits below the magnitude (kernels/keys.py)
            threshold = (self.thresholds >> hashed << hashed - 32).to(torch.int32).view(torch.float32)
        square = torch.zeros((), dtype=torch.float64, device=device)
        if "residual" in self.bucket.states:  # in parts of 128 MB: torch copies what it widens
            for part in self.residual.split(1 << 24):
                square += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        return {
            "nnz": nnz,
            "candidates": candidates,
            "overflow": overflow,
            "threshold": threshold,
            "residual_square_norm": square,
        }

    def _settle(self, hyper: Hyper) -> None:
        """Parameters that only other ranks had a gradient for accumulate a zero gradient here."""
        operands = self.bucket.operands
        if not operands.lacking:
            return
        self.ops.compress.settle(
            self.bucket.segments, operands, self.present, self.trust, self.seed, self.velocity, self.residual,
            accumulate=accumulation(self.memory, hyper.nesterov), weight_decay=self.weight_decay(hyper),
            momentum=hyper.momentum,
        )  # fmt: skip


Exchange = DenseExchange | SparseExchange

"""The pipeline: what happens to a bucket, in order. Nothing here asks the device for a value.

    compressed bucket   launch:  one pass -> what is sent -> gather or all-reduce       sparse.py, randomk.py
                        apply:   headers -> parameters
    dense bucket        launch:  pack -> all_reduce
                        apply:   (norms ->) fused update

``launch`` runs on the caller's current stream, during backward; ``apply`` on the main stream, in ``step()``.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomp.buckets import Bucket
from fusedcomp.buffers import Reduced, Summed
from fusedcomp.exchange import Exchange, Hyper, Shared
from fusedcomp.kernels.segments import WORDS, Operands, Staging
from fusedcomp.memories import Memory, MomentumCorrection, NoMemory, accumulation

_NOTHING = {"grad_scale": 1.0, "weight_decay": 0.0, "momentum": 0.0}


class DenseExchange(Exchange):
    """Never compressed: the mean gradient is all-reduced, the update is torch's (or LARS's), fused."""

    def __init__(self, bucket: Bucket, shared: Shared, seed: Tensor, with_momentum: bool) -> None:
        super().__init__(bucket, shared, seed)
        if with_momentum:
            bucket.add_state("momentum_buffer")
        if bucket.treatment.trust:
            self.mean_norms = torch.zeros(
                (2, len(bucket.segments.numels)), dtype=torch.float32, device=bucket.device
            )  # of the mean gradient
        self.reduced = Reduced.allocate(bucket, with_norms=False)
        self.packed, self.sent = bucket.segments, self.reduced  # where gradients are put; what of it travels
        self._starts: Tensor | None = None  # of ``packed``, where a sampler draws

    def arrange(self, active: Sequence[bool] | None) -> None:
        """Active parameters alone travel: they lie behind the others, next to the trailer."""
        super().arrange(active)
        segments = self.bucket.segments
        if self._starts is None:
            self._starts = torch.zeros_like(segments.start_table)
            self._staging = Staging(self._starts.shape, torch.int64, self.bucket.device)
        every = range(len(segments.numels))
        order = every if active is None else sorted(every, key=active.__getitem__)
        where = self.reduced.place(order, segments.numels)
        self._staging.send(torch.tensor([w.start for w in where]), self._starts)
        self.packed = dataclasses.replace(segments, start_table=self._starts, compact_slices=tuple(where))
        idle = sum(param.numel() for param in self.asleep)
        self.sent = dataclasses.replace(self.reduced, whole=self.reduced.whole[idle:])

    def launch(self, grads: Sequence[Tensor | None], hyper: Hyper, step: int) -> None:
        """Start the exchange of these gradients, on the current stream."""
        self.bucket.operands.update(grads)
        self.scale()
        # Divided before the sum, as torch's hooks do.
        sign = (-1.0 if hyper.maximize else 1.0) / self.group.world_size
        self.ops.dense.pack_dense(
            self.packed, self.bucket.operands, self.scales, self.reduced.values, self.flag, grad_scale=sign
        )
        self.reduce(self.sent, failed=False)

    def launch_nothing(self, hyper: Hyper, step: int) -> None:
        """Take part in the exchange with zeros, as a rank that failed."""
        self.bucket.operands.update([None] * len(self.bucket.params))
        self.reduced.whole.zero_()
        self.reduce(self.sent, failed=True)

    def read(self) -> None:
        """Take in the headers."""
        self.read_trailer(self.reduced)

    def apply(self, hyper: Hyper) -> None:
        """Take in what arrived: headers, unless they have been read for the verdict, then parameters."""
        segments, operands = self.bucket.segments, self.reduced.gradients(self.bucket.operands)
        if self.shared.verdict is None:
            self.read()
        self.decay(hyper)
        decay = self.weight_decay(hyper)
        if self.trust is not None:
            self.ops.norms.block_norms(segments, operands, self.partials)
            self.ops.norms.reduce_norms(segments, self.partials, self.mean_norms)
            self.ops.norms.trust_ratios(
                segments, operands, self.mean_norms, None, self.trust,
                coefficient=hyper.trust_coefficient, weight_decay=decay, eps=hyper.eps, fallback=False,
            )  # fmt: skip
        self.ops.dense.update_dense(
            segments, operands, self.present, self.trust, hyper.lr,
            self.bucket.states.get("momentum_buffer"), inverse_world=1.0, weight_decay=decay,
            momentum=hyper.momentum, nesterov=hyper.nesterov,
        )  # fmt: skip


class CompressedExchange(Exchange):
    """What has velocity and residual: the pass, and the dense step where sending a part would not be cheaper.

    Args:
        bucket: gets the states.
        shared: what the front's buckets have in common.
        seed: the step, kept by the device.
        memory: what accumulates.
        with_momentum: does the group have momentum?
        state_dtype: of velocity and residual.
        sums: room for the sums over ranks of 16-bit parameters.
    """

    def __init__(
        self,
        bucket: Bucket,
        shared: Shared,
        seed: Tensor,
        memory: Memory,
        with_momentum: bool,
        state_dtype: torch.dtype,
        sums: Tensor | None,
    ) -> None:
        super().__init__(bucket, shared, seed)
        self.memory, self.sums = memory, sums
        segments, device = bucket.segments, bucket.device
        if bucket.treatment.trust:
            bucket.norms = torch.zeros((2, len(segments.numels)), dtype=torch.float32, device=device)
        # Without memory the residual is scratch, no state: written by the pass, read by what packs.
        keeps, halves = not isinstance(memory, NoMemory), 1 if shared.verdict is None else 2
        self.residual = (
            bucket.add_state("residual", state_dtype, halves)
            if keeps
            else torch.zeros(halves * segments.padded_numel, dtype=state_dtype, device=device)
        )
        corrects = isinstance(memory, MomentumCorrection)
        self.velocity = bucket.add_state("velocity", state_dtype, halves) if corrects else None
        if with_momentum and not corrects:
            bucket.add_state("momentum_buffer")
        self.masked = self.velocity if isinstance(memory, MomentumCorrection) and memory.masking else None
        self.weights: Tensor | None = None  # of entries, where they are not ranked by |residual| alone
        # What a candidate must reach, per scope; how many a block has, and which.
        self.thresholds = torch.zeros(len(segments.scope_numels), dtype=torch.int64, device=device)
        self.counts = torch.zeros(segments.num_blocks, dtype=torch.int32, device=device)
        self.marks = torch.zeros(segments.num_blocks, WORDS, dtype=torch.int32, device=device)
        self.counters: Tensor | None = None  # i32 (COUNTERS, MAGNITUDES), where magnitudes are counted
        self.minus_one = torch.full((1,), -1.0, dtype=torch.float32, device=device)
        self.dense_step = False
        self.reduced: Reduced | None = None

    # ---- what is sent --------------------------------------------------------------------------------------------

    @abstractmethod
    def _prepare(self, step: int) -> None:
        """Room for what this step sends, and whether it is a dense one."""

    @abstractmethod
    def _compress(self, numbers: dict[str, Any], failed: Tensor | None) -> None:
        """The pass, and what follows from it, on its way. ``failed``: as for ``start``."""

    @abstractmethod
    def _send_nothing(self) -> None:
        """An empty payload of a rank that failed, on its way."""

    @abstractmethod
    def _read_sent(self) -> None:
        """Take in the headers of what was sent."""

    @abstractmethod
    def _apply_sent(self, hyper: Hyper) -> None:
        """Take in what arrived."""

    # ---- launch --------------------------------------------------------------------------------------------------

    def launch(self, grads: Sequence[Tensor | None], hyper: Hyper, step: int) -> None:
        """Start the exchange of these gradients, on the current stream."""
        self.bucket.operands.update(grads)
        self.scale()
        self._prepare(step)
        self.start(hyper)

    def start(self, hyper: Hyper, failed: Tensor | None = None) -> None:
        """The same for gradients that are in place. ``failed``: i32, 1 where what is sent must say so of this rank."""
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
            self._compress_all(numbers, failed)
        else:
            self._compress(numbers, failed)

    def launch_nothing(self, hyper: Hyper, step: int) -> None:
        """Take part in the exchange with an empty payload, as a rank that failed; states stay as they are."""
        self.bucket.operands.update([None] * len(self.bucket.params))
        self._prepare(step)
        if self.shared.verdict is not None:  # what stays must be in the half that will hold
            self._pass({"accumulate": accumulation(self.memory, hyper.nesterov)} | _NOTHING)
        if self.dense_step and self.reduced is not None:
            self.reduced.whole.zero_()
            self.reduce(self.reduced, failed=True)
        else:
            self._send_nothing()

    def _trust_ratios(self, hyper: Hyper, decay: float) -> None:
        """From the last exchange's norms; where there is none yet, from this rank's norms of this very step."""
        self.ops.norms.trust_ratios(
            self.bucket.segments, self.bucket.operands, self.bucket.norms, self.scales, self.trust,
            coefficient=hyper.trust_coefficient, weight_decay=decay, eps=hyper.eps, fallback=True,
        )  # fmt: skip

    def _pass(self, numbers: dict[str, Any]) -> None:
        segments, operands = self.bucket.segments, self.bucket.operands
        self.ops.compress.compress(
            segments, operands, self.velocity, self.residual, self.weights, self.thresholds, self.trust, self.scales,
            self.seed, self.shared.parity, self.velocity, self.residual, self.counts, self.marks, self.partials,
            self.flag, self.counters, **numbers,
        )  # fmt: skip

    def _compress_all(self, numbers: dict[str, Any], failed: Tensor | None) -> None:
        segments, reduced = self.bucket.segments, self.reduced
        assert reduced is not None
        self.ops.compress.compress_all(
            segments, self.bucket.operands, self.velocity, self.residual, self.trust, self.scales, self.seed,
            self.shared.parity, self.velocity, self.residual, reduced.values, self.partials, self.flag, **numbers,
        )  # fmt: skip
        self._sum_norms(reduced)
        self.reduce(reduced, False if failed is None else failed)

    def _sum_norms(self, summed: Summed) -> None:
        """Of gradients the sum over ranks; parameters are the same on all, so that one rank's will do."""
        if self.trust is not None:
            norms = summed.norms.view(2, -1)
            self.ops.norms.reduce_norms(self.bucket.segments, self.partials, norms)
            if self.group.rank != 0:
                norms[1].zero_()

    # ---- step ----------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Take in the headers."""
        if self.dense_step and self.reduced is not None:
            self.read_trailer(self.reduced)
        else:
            self._read_sent()

    def apply(self, hyper: Hyper) -> None:
        """Take in what arrived: headers, unless they have been read for the verdict, then parameters."""
        if self.dense_step:
            self._apply_reduced(hyper)
        else:
            self._apply_sent(hyper)

    def _apply_reduced(self, hyper: Hyper) -> None:
        reduced = self.reduced
        assert reduced is not None
        if self.shared.verdict is None:
            self.read()
        self.settle(hyper, reduced.norms.view(1, -1))
        self.decay(hyper)
        self._update(reduced, hyper, 1.0 / self.group.world_size)

    def _land(self, put: Callable[[Operands, Tensor], None], hyper: Hyper) -> None:
        """Update by what was sent: ``put(operands, lr)`` takes lr times its mean over ranks from the parameters."""
        if "momentum_buffer" not in self.bucket.states:
            put(self.bucket.operands, hyper.lr)
            return
        # Momentum follows the exchange: the mean update becomes a dense vector first.
        reduced = self.reduced
        assert reduced is not None
        reduced.values.zero_()
        put(reduced.as_params, self.minus_one)
        self._update(reduced, hyper, 1.0)

    def _update(self, reduced: Reduced, hyper: Hyper, inverse_world: float) -> None:
        """Decay and trust ratio went through the wire; what remains is the step itself."""
        self.ops.dense.update_dense(
            self.bucket.segments, reduced.gradients(self.bucket.operands), self.present, None, hyper.lr,
            self.bucket.states.get("momentum_buffer"), inverse_world=inverse_world, weight_decay=0.0,
            momentum=hyper.momentum, nesterov=hyper.nesterov,
        )  # fmt: skip

    def settle(self, hyper: Hyper, norms: Tensor) -> None:
        """Parameters that only other ranks had a gradient for accumulate a zero gradient here; norms are kept.

        norms: f32 (ranks, 2 * segments) or, without trust ratios, (ranks, 0).
        """
        operands = self.bucket.operands
        if operands.lacking:
            self.ops.compress.settle(
                self.bucket.segments, operands, self.present, self.trust, self.seed, self.shared.parity,
                self.velocity, self.residual, accumulate=accumulation(self.memory, hyper.nesterov),
                weight_decay=self.weight_decay(hyper), momentum=hyper.momentum,
            )  # fmt: skip
        if self.trust is not None:
            self.ops.norms.commit_norms(
                norms, self.present, self.bucket.norms, inverse_world=1.0 / self.group.world_size
            )

    def residual_square_norm(self) -> Tensor:
        """Of what is left behind on this rank, float64."""
        if "residual" not in self.bucket.states:
            return torch.zeros((), dtype=torch.float64, device=self.bucket.device)
        return held_square_norm(self.residual, self.bucket.segments.padded_numel, self.shared.parity)


def held_square_norm(state: Tensor, padded_numel: int, parity: Tensor | None) -> Tensor:
    """Of a state, or of the half of it that holds; float64."""
    square, *other = [_square_norm(half) for half in state.split(padded_numel)]
    return square if parity is None else torch.where(parity[0] == 0, square, other[0])


def _square_norm(values: Tensor) -> Tensor:
    """In parts of 128 MB: torch copies what it widens."""
    square = torch.zeros((), dtype=torch.float64, device=values.device)
    for part in values.split(1 << 24):
        square += torch.linalg.vector_norm(part, dtype=torch.float64).square()
    return square

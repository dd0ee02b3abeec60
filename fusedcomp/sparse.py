"""What is selected by magnitude: one pass, one payload, one gather; a dense step where that is cheaper.

launch:  [sample -> compress -> refine] -> payload -> all_gather
apply:   headers -> parameters, in rank order
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomp.buckets import RANK_WEIGHTS, Bucket
from fusedcomp.buffers import PayloadBuffers, sample_table
from fusedcomp.compressors import CAT, Threshold, TopK
from fusedcomp.exchange import Shared
from fusedcomp.gathered import GatheredExchange
from fusedcomp.kernels.digits import BINS
from fusedcomp.kernels.refine import SCAN
from fusedcomp.kernels.segments import Staging
from fusedcomp.memories import Memory, NoMemory
from fusedcomp.rooms import Adaptive, Anew, Sizing, Waiting
from fusedcomp.shares import Share, Shares, most_entries
from fusedcomp.sizing import (
    NOTHING,
    THRESHOLD_WIDTH,
    Scheduled,
    Selection,
    log_ratios,
    of_share,
    threshold_key,
    threshold_room,
)

Ranked = TopK | Threshold | CAT  # compressors that send the largest entries


class SparseExchange(GatheredExchange):
    """The entries that ``TopK`` or ``Threshold`` selects; ``CAT``'s (tuned.py)."""

    compressor: Ranked
    buffers: PayloadBuffers

    def __init__(
        self,
        bucket: Bucket,
        shared: Shared,
        seed: Tensor,
        compressor: Ranked,
        memory: Memory,
        with_momentum: bool,
        state_dtype: torch.dtype,
        always_sparse: bool,
        sums: Tensor | None,
        compressed: int,
        ranked: bool,
    ) -> None:
        super().__init__(
            bucket, shared, seed, compressor, memory, with_momentum, state_dtype, always_sparse, sums
        )  # fmt: skip
        self.compressed = compressed
        self.is_kept = not isinstance(memory, NoMemory)
        if ranked:
            self.weights = bucket.add_state(RANK_WEIGHTS).fill_(1.0)
        segments, device = bucket.segments, bucket.device
        scopes = len(segments.scope_numels)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.offsets = zeros(segments.num_blocks + 1, dtype=torch.int64)
        self.widths = zeros(scopes, dtype=torch.int32)
        self.bounds = zeros(scopes, 4, dtype=torch.int64)
        self.near_counts = zeros(scopes, dtype=torch.int32)
        self.histograms = zeros(scopes, BINS, dtype=torch.int32)
        self.tickets = zeros(scopes, dtype=torch.int32)
        self.scanned = zeros(1 + 2 * -(-segments.num_blocks // SCAN), dtype=torch.int64)
        self.sizing: Sizing | Share
        self.shares: Shares | None = None  # where the selection ranks over several buckets
        if isinstance(compressor, Threshold):
            key = threshold_key(compressor.value_for(compressed), self.residual.itemsize == 2)
            self.least = torch.full((scopes,), key, dtype=torch.int64, device=device)
            self.widths.fill_(THRESHOLD_WIDTH)
            self.sizing = self._adaptive(threshold_room(segments.numel))
        else:
            self.samples, self.sample_groups = sample_table(compressor, segments)
            self.sample_keys = zeros(len(self.samples), dtype=torch.int64)
            if isinstance(compressor, TopK):
                self.sizing = Scheduled(compressor, segments.scope_numels)
        if self._estimates:
            self.logs = zeros(scopes, dtype=torch.int64)  # of n / k
        self.selection = NOTHING  # that ``whole`` is for
        self.whole: PayloadBuffers  # ``buffers`` are they, or a part of them where a sampler draws
        self.cut_to: tuple[int, ...] = ()  # entries of every scope that ``buffers`` have room for
        self.active: list[int] | None = None  # elements of every scope that may have a gradient; None: all
        self._staging = Staging((3, scopes), torch.int64, device)
        self.drawn = False  # are weights drawn?

    @property
    def limit(self) -> int:
        """The most entries that can be sent; 0: every step is dense."""
        return most_entries(self.bucket.segments.numel, self._goes_dense)

    def join(self, shares: Shares, number: int) -> None:
        """Be bucket ``number`` of those that the selection ranks over."""
        self.shares, self.sizing = shares, Share(shares, number)
        self.thresholds = shares.thresholds[number : number + 1]

    def _adaptive(self, with_room: Callable[[int], Selection]) -> Adaptive:
        numel, world, device = self.bucket.segments.numel, self.group.world_size, self.bucket.device
        return Adaptive(numel, with_room, self._goes_dense, world, device, self._demand())

    def _demand(self) -> Waiting | Anew:
        return Waiting() if self.is_kept else Anew()

    _follows_draws = True  # can a payload have fewer entries than there is room for?

    def arrange(self, active: Sequence[bool] | None) -> None:
        """Of the active elements alone, a share of the entries is sent that is as large as theirs."""
        super().arrange(active)
        segments = self.bucket.segments
        self.active = None
        if active is not None and self._follows_draws:
            self.active = [0] * len(segments.scope_numels)
            for segment, (numel, on) in enumerate(zip(segments.numels, active, strict=True)):
                self.active[segments.scope_of(segment)] += numel * on

    def _prepare(self, step: int) -> None:
        selection = self.sizing.at(step)
        if selection is not self.selection:
            self.prepare(selection, self._goes_dense(selection.k), None)
        if isinstance(self.sizing, Scheduled) and not self.dense_step:
            self._cut(selection, self.sizing.compressor)

    def _cut(self, selection: Selection, compressor: TopK) -> None:
        """Let ``buffers`` be what this step needs."""
        if self.active is not None:
            selection = of_share(compressor, selection, self.bucket.segments.scope_numels, self.active)
        if selection.ks != self.cut_to:
            self.cut_to = selection.ks
            self._staging.send(torch.tensor(selection.numbers), self.whole.numbers)
            self.buffers = self.whole.cut(self._layout(selection.k))

    def prepare(self, selection: Selection, dense: bool, room: Tensor | None) -> None:
        """Buffers for this selection; the same decision on every rank. ``room``: u8, where to receive."""
        self.selection = selection
        self._set_dense(dense)
        if not dense:
            self.buffers = self.whole = PayloadBuffers.allocate(
                self._layout(selection.k), selection, self.peers, self.bucket.device, room
            )  # fmt: skip
            self.cut_to = selection.ks
            if self._estimates:
                logs = log_ratios(self.bucket.segments.scope_numels, selection.ks)
                host = torch.tensor(logs, dtype=torch.int64, pin_memory=self.logs.is_cuda)
                self.logs.copy_(host, non_blocking=True)

    def _compress(self, numbers: dict[str, Any], failed: Tensor | None) -> None:
        self._find_threshold(numbers)
        self._pass(numbers)
        self._refine()
        if self.shares is not None:
            self.ops.shares.count_reaching(
                self.offsets, self.buffers.keys, self.shares.model_key, self.near_counts, self.tickets,
                self.buffers.payload.header[0],
            )  # fmt: skip
        self._send(failed)

    def _find_threshold(self, numbers: dict[str, Any]) -> None:
        """What a candidate must reach: sampled, or the compressor's own."""
        if isinstance(self.compressor, Threshold):
            self.thresholds.copy_(self.least)  # where there was no room for all, refining has raised it
            return
        self.ops.sample.sample_threshold(
            self.bucket.segments, self.bucket.operands, self.samples, self.sample_groups, self.buffers.sample_ranks,
            self.buffers.sample_aims, self.velocity, self.residual, self._sample_weights, self.trust, self.scales,
            self.seed, self.shared.parity, self.sample_keys, self.histograms, self.tickets, self.thresholds,
            self.widths, **numbers,
        )  # fmt: skip
        if self._estimates:
            self.ops.sidco.estimate_threshold(
                self.sample_keys, self.sample_groups, self.buffers.sample_aims, self.logs, self.residual,
                self.thresholds,
            )  # fmt: skip

    @property
    def _sample_weights(self) -> Tensor | None:
        """What samples are ranked by."""
        return self.weights

    @property
    def _estimates(self) -> bool:
        return isinstance(self.compressor, TopK) and self.compressor.selection == "sidco"

    def _refine(self) -> None:
        segments, buffers, refine = self.bucket.segments, self.buffers, self.ops.refine
        refine.list_candidates(segments, self.counts, self.marks, self.scanned, self.offsets, buffers.indices)
        refine.select_candidates(
            segments, self.offsets, buffers.indices, self.residual, self.weights, self.seed, self.shared.parity,
            buffers.ranks, self.widths,
            self.histograms, self.bounds, buffers.near, self.near_counts, self.tickets, self.thresholds, buffers.keys,
            self.flag, coarse=not isinstance(self.compressor, TopK),
        )  # fmt: skip
        payload = buffers.payload
        self.ops.pack.pack_payload(
            segments, self.bucket.operands, buffers.keys, buffers.indices, self.offsets, self.thresholds,
            self.masked, self.residual, self.flag, self.seed, self.shared.parity, buffers.packed,
            payload.starts[0], payload.indices[0], payload.values[0], payload.header[0], signed=buffers.layout.signed,
            drawn=self.drawn,
        )  # fmt: skip

    def _send_nothing(self) -> None:
        self.buffers.own.zero_()
        self.ops.headers.write_failure(self.seed, self.buffers.payload.header[0])
        self._gather()

    def wait(self) -> None:
        """Make the current stream (on CPU: the host) wait for the exchange."""
        super().wait()
        if not self.dense_step:
            self.sizing.note(self.buffers.payloads.header)

    def _asked(self, candidates: Tensor) -> Tensor:
        """How many entries this rank would have sent, had there been room."""
        return candidates

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
            asked = self._asked(candidates)
            room = self.buffers.keys.numel() if isinstance(self.compressor, TopK) else self.selection.k
            overflow = (asked - room).clamp(min=0)
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

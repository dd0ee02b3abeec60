"""What chance picks: the pass, the drawn values, one all-reduce.

launch:  compress -> take what is drawn -> all_reduce
apply:   trailer -> parameters
"""

from typing import Any

import torch
from torch import Tensor

from fusedcomp.buckets import Bucket
from fusedcomp.buffers import Reduced, Summed, strata_table
from fusedcomp.compressors import RandomK
from fusedcomp.exchange import Hyper, Shared
from fusedcomp.kernels.segments import Operands
from fusedcomp.memories import Memory, NoMemory
from fusedcomp.pipeline import CompressedExchange
from fusedcomp.sizing import count_at

_NO_CANDIDATES = (1 << 63) - 1  # above every selection key


class RandomExchange(CompressedExchange):
    """The entries that ``RandomK`` draws."""

    def __init__(
        self,
        bucket: Bucket,
        shared: Shared,
        seed: Tensor,
        compressor: RandomK,
        memory: Memory,
        with_momentum: bool,
        state_dtype: torch.dtype,
        sums: Tensor | None,
    ) -> None:
        super().__init__(bucket, shared, seed, memory, with_momentum, state_dtype, sums)
        segments, with_norms = bucket.segments, self.trust is not None
        self.unbiased = isinstance(memory, NoMemory)
        self.count = sum(count_at(compressor.density, numel) for numel in segments.numels)
        self.dense_step = self.count == segments.numel
        self.thresholds.fill_(_NO_CANDIDATES)
        if not self.dense_step:
            self.strata = strata_table(compressor.density, segments)
            self.summed = Summed.of(self.count, len(segments.numels), with_norms, bucket.device)
        if self.dense_step or "momentum_buffer" in bucket.states:
            self.reduced = Reduced.allocate(bucket, with_norms)

    def _prepare(self, step: int) -> None:
        """Every step is like the last."""

    def _compress(self, numbers: dict[str, Any], failed: Tensor | None) -> None:
        summed = self.summed
        self._pass(numbers)
        self.ops.draws.take_drawn(
            self.bucket.segments, self.bucket.operands, self.strata, self.masked, self.residual, self.seed,
            self.shared.parity, self.flag, summed.values, unbiased=self.unbiased,
        )  # fmt: skip
        self._sum_norms(summed)
        self.reduce(summed, False if failed is None else failed)

    def _send_nothing(self) -> None:
        self.summed.whole.zero_()
        self.reduce(self.summed, failed=True)

    def _read_sent(self) -> None:
        self.read_trailer(self.summed)

    def _apply_sent(self, hyper: Hyper) -> None:
        if self.shared.verdict is None:
            self.read()
        self.settle(hyper, self.summed.norms.view(1, -1))
        self.decay(hyper)

        def put(operands: Operands, lr: Tensor) -> None:
            self.ops.draws.put_drawn(
                self.bucket.segments, operands, self.strata, self.seed, self.present, lr, self.summed.values,
                inverse_world=1.0 / self.group.world_size,
            )  # fmt: skip

        self._land(put, hyper)

    def metrics(self) -> dict[str, Tensor]:
        """This bucket's share of ``CompressedOptimizer.metrics``; there is no threshold."""
        device = self.bucket.device
        count = torch.full((), self.count, dtype=torch.int64, device=device)
        return {
            "nnz": count,
            "candidates": count,
            "overflow": torch.zeros_like(count),
            "threshold": torch.zeros(len(self.thresholds), dtype=torch.float32, device=device),
            "residual_square_norm": self.residual_square_norm(),
        }

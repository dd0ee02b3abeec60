"""What is never compressed, in 16 bits: rounded with error feedback, gathered, and summed in fp32 in rank order.

launch:  gradient + residual -> values of 16 bits -> all_gather
apply:   headers, mean over ranks -> fused update, as of any dense bucket
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomp.buckets import Bucket
from fusedcomp.exchange import Exchange, Hyper, Shared
from fusedcomp.kernels.headers import HEADER_WORDS
from fusedcomp.pipeline import DenseExchange, held_square_norm
from fusedcomp.wire import dense_is_cheaper


class NarrowExchange(DenseExchange):
    """A dense bucket whose gradients travel as ``dtype``.

    An all-reduce would round on every hop, and nobody would know what was lost (docs/decisions/0029-narrow-dense.md).
    """

    def __init__(self, bucket: Bucket, shared: Shared, seed: Tensor, with_momentum: bool, dtype: torch.dtype) -> None:
        super().__init__(bucket, shared, seed, with_momentum)
        world, device, segments = self.group.world_size, bucket.device, bucket.segments
        self.residual = bucket.add_state("residual", halves=1 if shared.verdict is None else 2)
        nbytes = narrow_nbytes(segments.numel, len(segments.numels), dtype)
        self.received = torch.zeros((world, nbytes), dtype=torch.uint8, device=device)
        self.own = self.received[0] if world == 1 else torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.headers, self.rows = _views(self.received, bucket, dtype)
        (self.header,), (self.values,) = _views(self.own.view(1, -1), bucket, dtype)

    def arrange(self, active: Sequence[bool] | None) -> None:
        """All travels, whatever is drawn."""
        Exchange.arrange(self, active)

    def launch(self, grads: Sequence[Tensor | None], hyper: Hyper, step: int) -> None:
        """Start the exchange of these gradients, on the current stream."""
        self.bucket.operands.update(grads)
        self.scale()
        self._pack(-1.0 if hyper.maximize else 1.0)
        self.ops.narrow.end_narrow(self.bucket.operands, self.flag, self.seed, self.values, self.header)
        self._gather()

    def launch_nothing(self, hyper: Hyper, step: int) -> None:
        """Take part in the exchange with zeros, as a rank that failed; the residual stays."""
        self.bucket.operands.update([None] * len(self.bucket.params))
        self._pack(1.0)  # without gradients: what stays must be in the half that will hold
        self.own.zero_()
        self.ops.headers.write_failure(self.seed, self.header)
        self._gather()

    def _pack(self, sign: float) -> None:
        self.ops.narrow.pack_narrow(
            self.bucket.segments, self.bucket.operands, self.scales, self.shared.parity, self.residual, self.values,
            self.flag, grad_scale=sign,
        )  # fmt: skip

    def _gather(self) -> None:
        self.work = self.group.all_gather(self.received, self.own)
        self.nbytes = self.own.nbytes

    def read(self) -> None:
        """Take in the headers."""
        verdict = self.shared.verdict
        self.ops.headers.read_headers(
            self.headers, self.status, None if verdict is None else verdict.nonfinite, self.present
        )

    def apply(self, hyper: Hyper) -> None:
        """Take in what arrived: headers, unless they have been read for the verdict, then parameters."""
        self.ops.narrow.sum_narrow(self.rows, self.reduced.values, inverse_world=1.0 / self.group.world_size)
        super().apply(hyper)

    def metrics(self) -> dict[str, Tensor]:
        """This bucket's share of ``CompressedOptimizer.metrics``: what rounding left behind; nothing is selected."""
        nothing = torch.zeros((), dtype=torch.int64, device=self.bucket.device)
        square = held_square_norm(self.residual, self.bucket.segments.padded_numel, self.shared.parity)
        return {
            "nnz": nothing,
            "candidates": nothing,
            "overflow": nothing,
            "threshold": torch.zeros(0, dtype=torch.float32, device=self.bucket.device),
            "residual_square_norm": square,
        }


def narrow_nbytes(numel: int, segments: int, dtype: torch.dtype) -> int:
    """Bytes handed to the collective by one rank: header, values, zeros up to 16."""
    return _header_nbytes(segments) + -(-numel * dtype.itemsize // 16) * 16


def is_narrow(numel: int, segments: int, dtype: torch.dtype, world_size: int) -> bool:
    """Would a gather of such values move fewer bytes than an all-reduce in fp32? On up to three ranks, mostly."""
    nbytes = narrow_nbytes(numel, segments, dtype)
    return dtype != torch.float32 and not dense_is_cheaper(nbytes, 4 * numel, world_size)


def _header_nbytes(segments: int) -> int:
    return -(-4 * (HEADER_WORDS + -(-segments // 32)) // 16) * 16


def _views(rows: Tensor, bucket: Bucket, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Headers, i32 (world, words), and values (world, numel) of u8 rows."""
    count = len(bucket.segments.numels)
    first = _header_nbytes(count) // dtype.itemsize
    headers = rows.view(torch.int32)[:, : HEADER_WORDS + -(-count // 32)]
    return headers, rows.view(dtype)[:, first : first + bucket.segments.numel]

"""Metrics: what the last step did, over all buckets, as device tensors. Nothing here asks the device for a value.

``bytes_sent`` is of whole payloads: values, indices and headers together, and what pads them to the room that all ranks
share. Entries alone are ``nnz``. Between backward and step it already counts launched buckets with the new step;
``nonfinite`` is a running count over all steps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomp.exchange import Exchange


def of_step(exchanges: Sequence[Exchange], status: Tensor, skipped: int, device: torch.device) -> dict[str, Tensor]:
    """What ``CompressedOptimizer.metrics`` documents. ``skipped``: before this run."""
    parts = [part for exchange in exchanges if (part := exchange.metrics())]

    def total(name: str, dtype: torch.dtype = torch.int64) -> Tensor:
        return sum((part[name] for part in parts), torch.zeros((), dtype=dtype, device=device))

    def count(value: int) -> Tensor:
        return torch.full((), value, dtype=torch.int64, device=device)

    return {
        "bytes_dense": count(sum(e.bucket.segments.numel * e.bucket.treatment.dtype.itemsize for e in exchanges)),
        "bytes_sent": count(sum(e.nbytes for e in exchanges)),
        "bytes_intra": count(sum(e.nbytes_intra for e in exchanges)),
        "nnz": total("nnz"),
        "candidates": total("candidates"),
        "overflow": total("overflow"),
        "threshold": torch.cat(
            [torch.zeros(0, dtype=torch.float32, device=device), *(part["threshold"] for part in parts)]
        ),
        "residual_norm": total("residual_square_norm", torch.float64).sqrt().float(),
        "nonfinite": status[0].to(device, torch.int64, non_blocking=True, copy=True),
        "skipped": status[2].to(device, torch.int64, non_blocking=True, copy=True) + skipped,
    }

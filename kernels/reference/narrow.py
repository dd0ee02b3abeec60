"""Twin of ``kernels/narrow.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.headers import ENCODING
from fusedcomp.kernels.reference.compress import scaled
from fusedcomp.kernels.reference.elements import half_of, narrow_clamped
from fusedcomp.kernels.reference.headers import end_payload
from fusedcomp.kernels.segments import Operands, Segments, memory_order


def pack_narrow(
    segments: Segments,
    operands: Operands,
    scales: Tensor | None,
    parity: Tensor | None,
    residual: Tensor,
    values: Tensor,
    flag: Tensor,
    *,
    grad_scale: float,
) -> None:
    old, new = half_of(residual, parity, 0), half_of(residual, parity, 1)
    for segment, grad in enumerate(operands.grads):
        where, flat = segments.slices[segment], values[segments.compact_slices[segment]]
        if grad is None:
            new[where] = old[where]
            flat.zero_()
            continue
        total = scaled(memory_order(grad), scales, segment, grad_scale) + old[where]
        flag |= (~total.isfinite()).any().to(torch.int32)
        flat.copy_(narrow_clamped(total, values.dtype))
        new[where] = torch.where(total.isfinite(), total - flat.float(), 0.0)


def end_narrow(operands: Operands, flag: Tensor, seed: Tensor, values: Tensor, header: Tensor) -> None:
    count = torch.tensor(values.numel())
    end_payload(operands, flag, seed, header, count, values.numel(), ENCODING[values.dtype])


def sum_narrow(rows: Tensor, mean: Tensor, *, inverse_world: float) -> None:
    mean.zero_()
    for row in rows:
        mean += row.float()
    mean *= inverse_world

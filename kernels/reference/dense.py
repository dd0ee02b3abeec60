"""Twin of ``kernels/dense.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.compress import scaled
from fusedcomp.kernels.reference.elements import INFINITE
from fusedcomp.kernels.reference.keys import magnitude_bits
from fusedcomp.kernels.segments import Operands, Segments, memory_order


def pack_dense(
    segments: Segments, operands: Operands, scales: Tensor | None, flat: Tensor, flag: Tensor, *, grad_scale: float
) -> None:
    for segment, (where, grad) in enumerate(zip(segments.compact_slices, operands.grads, strict=True)):
        flat[where] = 0.0 if grad is None else scaled(memory_order(grad), scales, segment, grad_scale)
    flag |= (magnitude_bits(flat) >= INFINITE).any().to(torch.int32)


def update_dense(
    segments: Segments,
    operands: Operands,
    present: Tensor,
    trust: Tensor | None,
    lr: Tensor,
    momentum_buffer: Tensor | None,
    *,
    inverse_world: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    for segment, where in enumerate(segments.slices):
        grad = operands.grads[segment]
        if present[segment] == 0 or grad is None:
            continue
        param, grad = memory_order(operands.params[segment]), memory_order(grad) * inverse_world
        if weight_decay != 0.0:
            grad = grad + param.float() * weight_decay
        if trust is not None:
            grad = trust[segment] * grad
        update = grad
        if momentum_buffer is not None:
            momentum_buffer[where] = update = momentum_buffer[where] * momentum + grad
            if nesterov:
                update = grad + update * momentum
        param.copy_(param.float() - lr * update)

"""Twin of ``kernels/draws.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.elements import half_of
from fusedcomp.kernels.reference.keys import tie_hash
from fusedcomp.kernels.segments import BLOCK, Operands, Segments, memory_order


def _drawn(strata: Tensor, seed: Tensor) -> Tensor:
    """Padded index of the element drawn from each stratum."""
    return strata[:, 0] + tie_hash(strata[:, 0], seed) % strata[:, 1]


def take_drawn(
    segments: Segments,
    operands: Operands,
    strata: Tensor,
    velocity: Tensor | None,
    residual: Tensor,
    seed: Tensor,
    parity: Tensor | None,
    flag: Tensor,
    values: Tensor,
    *,
    unbiased: bool,
) -> None:
    velocity, residual = half_of(velocity, parity, 1), half_of(residual, parity, 1)
    index = _drawn(strata, seed)
    has_grad = torch.tensor([grad is not None for grad in operands.grads], device=index.device)
    mine = has_grad[segments.block_table[index // BLOCK, 0].long()]
    taken = torch.where(mine, residual[index].float(), 0.0)
    flag |= (~taken.isfinite()).any().to(torch.int32)
    values.copy_(taken * strata[:, 1].float() if unbiased else taken)
    residual[index[mine]] = 0.0
    if velocity is not None:
        velocity[index[mine]] = 0.0


def put_drawn(
    segments: Segments,
    operands: Operands,
    strata: Tensor,
    seed: Tensor,
    present: Tensor,
    lr: Tensor,
    values: Tensor,
    *,
    inverse_world: float,
) -> None:
    index = _drawn(strata, seed - 1)
    for segment, where in enumerate(segments.slices):
        if present[segment] == 0:
            continue
        mine = (index >= where.start) & (index < where.stop)
        flat, offset = memory_order(operands.params[segment]), index[mine] - where.start
        flat[offset] = (flat[offset].float() - lr * inverse_world * values[mine]).to(flat.dtype)

"""Twin of ``kernels/compress.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.compress import STAGE
from fusedcomp.kernels.reference.accumulate import ACCUMULATE, magnitude_bits, mix32, selection_key
from fusedcomp.kernels.segments import BLOCK, Operands, Segments, memory_order

NOT_FINITE = 0x7F800000


def _prepared(
    grad: Tensor, param: Tensor, trust: Tensor | None, segment: int, grad_scale: float, weight_decay: float
) -> Tensor:
    """Gradient -> what memory accumulates."""
    grad = grad * grad_scale
    if weight_decay != 0.0:
        grad = grad + param * weight_decay
    return grad if trust is None else trust[segment] * grad


def _sum_squares(values: Tensor, out: Tensor) -> None:
    """Per-block sums of squares of one segment."""
    squares = torch.zeros(out.numel() * BLOCK, device=values.device)
    squares[: values.numel()] = values * values
    torch.sum(squares.view(-1, BLOCK), 1, out=out)


def sample(
    segments: Segments,
    operands: Operands,
    sample_table: Tensor,
    velocity: Tensor | None,
    residual: Tensor,
    trust: Tensor | None,
    seed: Tensor,
    keys: Tensor,
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    turn = mix32(seed.to(torch.int64) & 0xFFFFFFFF)
    for segment, (grad, param) in enumerate(zip(operands.grads, operands.params, strict=True)):
        mine = sample_table[:, 0] == segment
        if grad is None:
            keys[mine] = -1
            continue
        offset = (sample_table[mine, 1] + turn) % segments.numels[segment]
        index = segments.slices[segment].start + offset
        g = _prepared(memory_order(grad)[offset], memory_order(param)[offset], trust, segment, grad_scale, weight_decay)
        old = residual[index]
        _, new = ACCUMULATE[accumulate](g, old if velocity is None else velocity[index], old, momentum)
        keys[mine] = selection_key(new, index, seed)


def _accumulate_segment(
    segments: Segments,
    operands: Operands,
    segment: int,
    velocity_in: Tensor | None,
    residual_in: Tensor,
    trust: Tensor | None,
    partials: Tensor | None,
    flag: Tensor,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> tuple[Tensor | None, Tensor]:
    """New velocity and residual of one segment; its norms and its flag on the way."""
    grad, where = operands.grads[segment], segments.slices[segment]
    old_velocity = None if velocity_in is None else velocity_in[where].clone()
    old_residual = residual_in[where].clone()
    param = memory_order(operands.params[segment])
    if partials is not None:
        blocks = slice(where.start // BLOCK, -(-where.stop // BLOCK))
        _sum_squares(torch.zeros_like(param) if grad is None else memory_order(grad), partials[blocks, 0])
        _sum_squares(param, partials[blocks, 1])
    if grad is None:
        return old_velocity, old_residual
    flag |= (magnitude_bits(memory_order(grad) * grad_scale) >= NOT_FINITE).any().to(torch.int32)
    g = _prepared(memory_order(grad), param, trust, segment, grad_scale, weight_decay)
    velocity, residual = ACCUMULATE[accumulate](
        g, old_residual if old_velocity is None else old_velocity, old_residual, momentum
    )
    return (None if old_velocity is None else velocity), residual


def compress(
    segments: Segments,
    operands: Operands,
    velocity_in: Tensor | None,
    residual_in: Tensor,
    thresholds: Tensor | None,
    trust: Tensor | None,
    seed: Tensor,
    velocity_out: Tensor | None,
    residual_out: Tensor,
    counts: Tensor,
    staged: Tensor,
    partials: Tensor | None,
    flag: Tensor,
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    assert thresholds is not None
    numbers = (accumulate, grad_scale, weight_decay, momentum)
    chosen = torch.zeros(segments.padded_numel, dtype=torch.bool, device=residual_in.device)
    for segment, where in enumerate(segments.slices):
        velocity, residual = _accumulate_segment(
            segments, operands, segment, velocity_in, residual_in, trust, partials, flag, *numbers
        )
        if velocity_out is not None and velocity is not None:
            velocity_out[where] = velocity
        residual_out[where] = residual
        if operands.grads[segment] is not None:
            index = torch.arange(where.start, where.stop, device=residual.device)
            chosen[where] = selection_key(residual, index, seed) >= thresholds[segments.scope_of(segment)]
    _clear_padding(segments, velocity_out, residual_out)
    rows = chosen.view(-1, BLOCK)
    torch.sum(rows, 1, out=counts)
    block, offset = rows.nonzero(as_tuple=True)
    position = torch.arange(block.numel(), device=block.device) - (counts.cumsum(0) - counts)[block]
    fits = counts[block] <= STAGE
    staged[block[fits], position[fits]] = offset[fits].to(torch.int16)


def compress_all(
    segments: Segments,
    operands: Operands,
    velocity_in: Tensor | None,
    residual_in: Tensor,
    trust: Tensor | None,
    velocity_out: Tensor | None,
    residual_out: Tensor,
    sent: Tensor,
    partials: Tensor | None,
    flag: Tensor,
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    numbers = (accumulate, grad_scale, weight_decay, momentum)
    for segment, where in enumerate(segments.slices):
        velocity, residual = _accumulate_segment(
            segments, operands, segment, velocity_in, residual_in, trust, partials, flag, *numbers
        )
        if velocity_out is not None and velocity is not None:
            velocity_out[where] = velocity
        present = operands.grads[segment] is not None
        sent[segments.compact_slices[segment]] = residual if present else 0.0
        residual_out[where] = 0.0 if present else residual
    _clear_padding(segments, velocity_out, residual_out)


def _clear_padding(segments: Segments, *states: Tensor | None) -> None:
    """Padding is 0 in and 0 out."""
    for where in segments.slices:
        for state in states:
            if state is not None:
                state[where.stop : -(-where.stop // BLOCK) * BLOCK] = 0.0


def settle(
    segments: Segments,
    operands: Operands,
    present: Tensor,
    trust: Tensor | None,
    velocity: Tensor | None,
    residual: Tensor,
    *,
    accumulate: str,
    weight_decay: float,
    momentum: float,
) -> None:
    for segment, where in enumerate(segments.slices):
        if operands.grads[segment] is not None or present[segment] == 0:
            continue
        param = memory_order(operands.params[segment])
        grad = _prepared(torch.zeros_like(param), param, trust, segment, 1.0, weight_decay)
        old = residual[where].clone()
        new_velocity, residual[where] = ACCUMULATE[accumulate](
            grad, old if velocity is None else velocity[where], old, momentum
        )
        if velocity is not None:
            velocity[where] = new_velocity

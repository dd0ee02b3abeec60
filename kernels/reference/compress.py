"""Twin of ``kernels/compress.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.compress import LARGEST
from fusedcomp.kernels.reference.accumulate import ACCUMULATE
from fusedcomp.kernels.reference.elements import half_of, narrow_clamped, rounding_noise, stochastic
from fusedcomp.kernels.reference.keys import rank_key, selection_key
from fusedcomp.kernels.reference.tune import tally_magnitudes
from fusedcomp.kernels.segments import BLOCK, PAGE, Operands, Segments, memory_order


def scaled(grad: Tensor, scales: Tensor | None, segment: int, grad_scale: float) -> Tensor:
    """The gradient in fp32, times both scales."""
    grad = grad.float() * grad_scale
    return grad if scales is None else grad * scales[segment]


def prepared(
    grad: Tensor,
    param: Tensor,
    trust: Tensor | None,
    scales: Tensor | None,
    segment: int,
    grad_scale: float,
    weight_decay: float,
) -> Tensor:
    """Gradient -> what memory accumulates, in fp32."""
    grad = scaled(grad, scales, segment, grad_scale)
    if weight_decay != 0.0:
        grad = grad + param.float() * weight_decay
    return grad if trust is None else trust[segment] * grad


def _sum_squares(values: Tensor, out: Tensor) -> None:
    """Per-block sums of squares of one segment."""
    torch.sum(_whole_blocks(values * values).view(-1, BLOCK), 1, out=out)


def _whole_blocks(values: Tensor) -> Tensor:
    """With zeros at the end."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))


def _accumulate_segment(
    segments: Segments,
    operands: Operands,
    segment: int,
    velocity_in: Tensor | None,
    residual_in: Tensor,
    trust: Tensor | None,
    scales: Tensor | None,
    partials: Tensor | None,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """New velocity and residual of one segment, not rounded, and what they took in; its norms on the way."""
    grad, where = operands.grads[segment], segments.slices[segment]
    old_velocity = None if velocity_in is None else velocity_in[where].to(torch.float32, copy=True)
    old_residual = residual_in[where].to(torch.float32, copy=True)
    param = memory_order(operands.params[segment])
    if partials is not None:
        blocks = slice(where.start // BLOCK, -(-where.stop // BLOCK))
        flat = torch.zeros_like(param) if grad is None else scaled(memory_order(grad), scales, segment, grad_scale)
        _sum_squares(flat.float(), partials[blocks, 0])
        _sum_squares(param.float(), partials[blocks, 1])
    if grad is None:
        return old_velocity, old_residual, None
    g = prepared(memory_order(grad), param, trust, scales, segment, grad_scale, weight_decay)
    velocity, residual = ACCUMULATE[accumulate](
        g, old_residual if old_velocity is None else old_velocity, old_residual, momentum
    )
    return (None if old_velocity is None else velocity), residual, g


def compress(
    segments: Segments,
    operands: Operands,
    velocity_in: Tensor | None,
    residual_in: Tensor,
    weights: Tensor | None,
    thresholds: Tensor | None,
    trust: Tensor | None,
    scales: Tensor | None,
    seed: Tensor,
    parity: Tensor | None,
    velocity_out: Tensor | None,
    residual_out: Tensor,
    counts: Tensor,
    marks: Tensor,
    partials: Tensor | None,
    flag: Tensor | None,
    counters: Tensor | None = None,
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    assert thresholds is not None
    velocity_in, residual_in = half_of(velocity_in, parity, 0), half_of(residual_in, parity, 0)
    velocity_out, residual_out = half_of(velocity_out, parity, 1), half_of(residual_out, parity, 1)
    numbers = (accumulate, grad_scale, weight_decay, momentum)
    chosen = torch.zeros(segments.padded_numel, dtype=torch.bool, device=residual_in.device)
    for segment, where in enumerate(segments.slices):
        velocity, residual, taken = _accumulate_segment(
            segments, operands, segment, velocity_in, residual_in, trust, scales, partials, *numbers
        )
        if parity is not None and flag is not None and taken is not None:
            flag |= _bad(residual, taken)
        index = torch.arange(where.start, where.stop, device=residual.device)
        noise = rounding_noise(index, seed)
        if velocity_out is not None and velocity is not None:
            velocity_out[where] = stochastic(velocity, noise >> 16, velocity_out.itemsize == 2)
        residual = stochastic(residual, noise, residual_out.itemsize == 2)
        residual_out[where] = residual
        if operands.grads[segment] is not None:
            key = rank_key(residual, index, seed, residual_out.itemsize == 2, weights)
            chosen[where] = key >= thresholds[segments.scope_of(segment)]
            if counters is not None:
                tally_magnitudes(counters, _whole_blocks(residual))
    _clear_padding(segments, velocity_out, residual_out)
    counts.copy_(chosen.view(-1, BLOCK).sum(1))
    bits = chosen.view(*marks.shape, 32).long() << torch.arange(32, device=chosen.device)
    marks.copy_(bits.sum(2).to(torch.int32))


def compress_blocks(
    segments: Segments,
    operands: Operands,
    velocity_in: Tensor | None,
    residual_in: Tensor,
    block_starts: Tensor,
    trust: Tensor | None,
    scales: Tensor | None,
    seed: Tensor,
    parity: Tensor | None,
    velocity_out: Tensor | None,
    residual_out: Tensor,
    out_indices: Tensor,
    values: Tensor,
    partials: Tensor | None,
    flag: Tensor,
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
    per_block: int,
    masking: bool,
) -> None:
    device = residual_in.device
    counts = torch.empty(segments.num_blocks, dtype=torch.int32, device=device)
    marks = torch.empty(segments.num_blocks, BLOCK // 32, dtype=torch.int32, device=device)
    nothing = torch.full_like(segments.scope_blocks[1:], (1 << 63) - 1)  # above every key
    compress(
        segments, operands, velocity_in, residual_in, None, nothing, trust, scales, seed, parity, velocity_out,
        residual_out, counts, marks, partials, flag, accumulate=accumulate, grad_scale=grad_scale,
        weight_decay=weight_decay, momentum=momentum,
    )  # fmt: skip
    velocity, residual = half_of(velocity_out, parity, 1), half_of(residual_out, parity, 1)
    lossless = residual.itemsize == 2 or values.itemsize == 4
    for block, (segment, number) in enumerate(segments.block_table.tolist()):
        extent = min(BLOCK, segments.numels[segment] - number * BLOCK)
        index = torch.arange(block * BLOCK, block * BLOCK + extent, device=device)
        wanted, place = min(per_block, extent), slice(int(block_starts[block]), int(block_starts[block + 1]))
        if operands.grads[segment] is None:
            won, sent = index[:wanted], torch.zeros(wanted, device=device).to(values.dtype)
        else:
            key = selection_key(residual[index].float(), index, seed, residual.itemsize == 2)
            flag |= (~residual[index].isfinite()).any().to(torch.int32)
            won = index[torch.topk(key, wanted).indices.sort().values]
            value = residual[won].float()
            sent = narrow_clamped(value, values.dtype)
            residual[won] = 0.0 if lossless else torch.where(value.isfinite(), value - sent.float(), 0.0)
            if velocity is not None and masking:
                velocity[won] = 0.0
        values[place] = sent
        out_indices[place] = (((won % PAGE) + 32768) % PAGE - 32768).to(torch.int16)


def compress_all(
    segments: Segments,
    operands: Operands,
    velocity_in: Tensor | None,
    residual_in: Tensor,
    trust: Tensor | None,
    scales: Tensor | None,
    seed: Tensor,
    parity: Tensor | None,
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
    velocity_in, residual_in = half_of(velocity_in, parity, 0), half_of(residual_in, parity, 0)
    velocity_out, residual_out = half_of(velocity_out, parity, 1), half_of(residual_out, parity, 1)
    numbers = (accumulate, grad_scale, weight_decay, momentum)
    for segment, where in enumerate(segments.slices):
        velocity, residual, taken = _accumulate_segment(
            segments, operands, segment, velocity_in, residual_in, trust, scales, partials, *numbers
        )
        if velocity_out is not None and velocity is not None:
            noise = rounding_noise(torch.arange(where.start, where.stop, device=residual.device), seed)
            velocity_out[where] = stochastic(velocity, noise >> 16, velocity_out.itemsize == 2)
        grad = operands.grads[segment]
        present = grad is not None
        if grad is not None:
            flag |= (~scaled(grad, scales, segment, grad_scale).isfinite()).any().to(torch.int32)
        if parity is not None and taken is not None:
            flag |= _bad(residual, taken)
        sent[segments.compact_slices[segment]] = residual if present else 0.0
        residual_out[where] = 0.0 if present else residual
    _clear_padding(segments, velocity_out, residual_out)


def _bad(residual: Tensor, taken: Tensor) -> Tensor:
    return (~residual.isfinite() | (taken.abs() >= LARGEST.value)).any().to(torch.int32)


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
    seed: Tensor,
    parity: Tensor | None,
    velocity: Tensor | None,
    residual: Tensor,
    *,
    accumulate: str,
    weight_decay: float,
    momentum: float,
) -> None:
    velocity, residual = half_of(velocity, parity, 0), half_of(residual, parity, 0)
    for segment, where in enumerate(segments.slices):
        if operands.grads[segment] is not None or present[segment] == 0:
            continue
        param = memory_order(operands.params[segment])
        grad = prepared(torch.zeros_like(param), param, trust, None, segment, 1.0, weight_decay)
        old = residual[where].to(torch.float32, copy=True)
        new_velocity, new_residual = ACCUMULATE[accumulate](
            grad, old if velocity is None else velocity[where].float(), old, momentum
        )
        noise = rounding_noise(torch.arange(where.start, where.stop, device=residual.device), seed)
        residual[where] = stochastic(new_residual, noise, residual.itemsize == 2)
        if velocity is not None:
            velocity[where] = stochastic(new_velocity, noise >> 16, velocity.itemsize == 2)

"""Twin of ``kernels/clip.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.compress import _sum_squares
from fusedcomp.kernels.segments import BLOCK, Operands, Segments, memory_order


def gradient_squares(
    segments: Segments, operands: Operands, factors: Tensor | None, partials: Tensor, squares: Tensor
) -> None:
    for segment, (where, grad) in enumerate(zip(segments.slices, operands.grads, strict=True)):
        blocks = slice(where.start // BLOCK, -(-where.stop // BLOCK))
        if grad is None:
            partials[blocks] = 0.0
        else:
            _sum_squares(memory_order(grad).float(), partials[blocks])
        squares[segment] = partials[blocks].sum()
    if factors is not None:
        squares *= factors * factors


def gradient_scales(
    squares: Tensor | None,
    loss_scale: Tensor | None,
    factors: Tensor | None,
    scales: Tensor,
    *,
    max_norm: float,
    per_tensor: bool,
) -> None:
    inverse, clip = torch.ones_like(scales), torch.ones_like(scales)
    if loss_scale is not None:
        inverse = inverse / loss_scale
    if squares is not None:
        square = squares if per_tensor else squares.sum()
        norm = square.double().sqrt().float() * inverse  # torch's root of fp32 is not the nearest on every CPU
        clip = (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0)
    scales.copy_(inverse * clip if factors is None else inverse * clip * factors)

"""Twin of ``kernels/norms.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.compress import _sum_squares, scaled
from fusedcomp.kernels.segments import BLOCK, Operands, Segments, memory_order


def block_norms(segments: Segments, operands: Operands, partials: Tensor) -> None:
    for segment, where in enumerate(segments.slices):
        grad, param = operands.grads[segment], memory_order(operands.params[segment]).float()
        blocks = slice(where.start // BLOCK, -(-where.stop // BLOCK))
        _sum_squares(torch.zeros_like(param) if grad is None else memory_order(grad).float(), partials[blocks, 0])
        _sum_squares(param, partials[blocks, 1])


def reduce_norms(segments: Segments, partials: Tensor, norms: Tensor) -> None:
    for segment, where in enumerate(segments.slices):
        norms[:, segment] = partials[where.start // BLOCK : -(-where.stop // BLOCK)].sum(0)


def trust_ratios(
    segments: Segments,
    operands: Operands,
    norms: Tensor,
    scales: Tensor | None,
    trust: Tensor,
    *,
    coefficient: float,
    weight_decay: float,
    eps: float,
    fallback: bool,
) -> None:
    squares = norms.clone()
    if fallback:
        for segment in range(len(segments.numels)):
            if norms[0, segment] <= 0.0:
                grad = operands.grads[segment]
                squares[0, segment] = 0.0 if grad is None else scaled(grad, scales, segment, 1.0).square().sum()
                squares[1, segment] = operands.params[segment].float().square().sum()
    of_grad, of_param = squares.sqrt()
    ratio = (of_param * coefficient) / (of_grad + of_param * weight_decay + eps)
    trust.copy_(torch.where((of_grad > 0.0) & (of_param > 0.0), ratio, 1.0))


def commit_norms(received: Tensor, present: Tensor, norms: Tensor, *, inverse_world: float) -> None:
    segments = norms.shape[1]
    grad = torch.zeros_like(norms[0])
    for rank in range(received.shape[0]):
        grad = grad + received[rank, :segments]
    new = torch.stack([grad * inverse_world, received[0, segments:]])
    usable = (present != 0) & (new[0] > 0.0) & torch.isfinite(new).all(0)
    new[0] = torch.maximum(new[0], norms[0] * 0.81)
    norms.copy_(torch.where(usable, new, norms))

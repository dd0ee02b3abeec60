"""Twin of ``kernels/norms.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.compress import _sum_squares
from fusedcomp.kernels.segments import BLOCK, Operands, Segments, memory_order


def block_norms(segments: Segments, operands: Operands, known: Tensor | None, partials: Tensor) -> None:
    for segment, where in enumerate(segments.slices):
        if known is not None and known[segment] > 0.0:
            continue
        grad, param = operands.grads[segment], memory_order(operands.params[segment])
        blocks = slice(where.start // BLOCK, -(-where.stop // BLOCK))
        _sum_squares(torch.zeros_like(param) if grad is None else memory_order(grad), partials[blocks, 0])
        _sum_squares(param, partials[blocks, 1])


def reduce_norms(segments: Segments, partials: Tensor, norms: Tensor) -> None:
    for segment, where in enumerate(segments.slices):
        norms[:, segment] = partials[where.start // BLOCK : -(-where.stop // BLOCK)].sum(0)


def trust_ratios(
    norms: Tensor, fallback: Tensor | None, trust: Tensor, *, coefficient: float, weight_decay: float, eps: float
) -> None:
    if fallback is not None:
        norms = torch.where(norms[0] > 0.0, norms, fallback)
    grad, param = norms.sqrt()
    ratio = (param * coefficient) / (grad + param * weight_decay + eps)
    trust.copy_(torch.where((grad > 0.0) & (param > 0.0), ratio, 1.0))


def commit_norms(received: Tensor, present: Tensor, norms: Tensor, *, inverse_world: float) -> None:
    segments = norms.shape[1]
    grad = torch.zeros_like(norms[0])
    for rank in range(received.shape[0]):
        grad = grad + received[rank, :segments]
    new = torch.stack([grad * inverse_world, received[0, segments:]])
    usable = (present != 0) & (new[0] > 0.0) & torch.isfinite(new).all(0)
    norms.copy_(torch.where(usable, new, norms))

"""Twin of ``kernels/apply.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.segments import PAGE, Operands, Segments, memory_order


def apply_payloads(
    segments: Segments,
    operands: Operands,
    starts: Tensor,
    indices: Tensor,
    values: Tensor,
    lr: Tensor,
    *,
    inverse_world: float,
) -> None:
    scale = lr * inverse_world
    pages = torch.arange(segments.num_pages, device=values.device)
    for rank in range(values.shape[0]):
        begin, end = starts[rank, :-1].clamp(0, values.shape[1]), starts[rank, 1:].clamp(0, values.shape[1])
        lengths = (end - begin).clamp(min=0)
        page = pages.repeat_interleave(lengths)
        first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        at = begin.repeat_interleave(lengths) + torch.arange(page.numel(), device=values.device) - first
        index = page * PAGE + (indices[rank, at].long() & 0xFFFF)
        for where, param in zip(segments.slices, operands.params, strict=True):
            mine = (index >= where.start) & (index < where.stop)
            flat, offset = memory_order(param), index[mine] - where.start
            flat[offset] = flat[offset] - scale * values[rank, at[mine]]

"""Twin of ``kernels/apply.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.headers import read_headers
from fusedcomp.kernels.segments import PAGE, SIGNED_PAGE, Operands, Segments, memory_order


def apply_payloads(
    segments: Segments,
    operands: Operands,
    starts: Tensor,
    indices: Tensor,
    values: Tensor,
    lr: Tensor,
    headers: Tensor | None,
    status: Tensor,
    found_inf: Tensor | None,
    present: Tensor,
    sums: Tensor | None,
    *,
    inverse_world: float,
    signed: bool = False,
) -> None:
    assert headers is None or found_inf is None, "the verdict is passed on headers that have been read"
    if headers is not None:
        read_headers(headers, status, None, present)
    if found_inf is not None and found_inf.item() != 0.0:
        return
    scale = lr * inverse_world
    flats = [memory_order(param) for param in operands.params]
    totals = [torch.zeros_like(flat, dtype=torch.float32) for flat in flats]
    size, count = SIGNED_PAGE if signed else PAGE, indices.shape[1]
    pages = torch.arange(segments.pages_of(size), device=values.device)
    for rank in range(values.shape[0]):
        begin, end = starts[rank, :-1].clamp(0, count), starts[rank, 1:].clamp(0, count)
        lengths = (end - begin).clamp(min=0)
        page = pages.repeat_interleave(lengths)
        first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        at = begin.repeat_interleave(lengths) + torch.arange(page.numel(), device=values.device) - first
        word = indices[rank, at].long()
        index = page * size + (word & (size - 1))
        sent = torch.where((word & size) != 0, -values[rank], values[rank]) if signed else values[rank, at].float()
        for where, flat, total in zip(segments.slices, flats, totals, strict=True):
            mine = (index >= where.start) & (index < where.stop)
            offset, value = index[mine] - where.start, sent[mine]
            if operands.dtype == torch.float32:
                flat[offset] = flat[offset] - scale * value
            else:
                total[offset] = total[offset] + value
    if operands.dtype != torch.float32:
        for flat, total in zip(flats, totals, strict=True):
            flat.copy_(flat.float() - scale * total)

"""Twin of ``kernels/pieces.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.elements import half_of
from fusedcomp.kernels.reference.keys import tie_hash
from fusedcomp.kernels.segments import PAGE, Segments


def cut_payload(
    segments: Segments,
    starts: Tensor,
    indices: Tensor,
    values: Tensor,
    seed: Tensor,
    parity: Tensor | None,
    residual: Tensor,
    out_starts: Tensor,
    out_indices: Tensor,
    out_values: Tensor,
) -> None:
    residual = half_of(residual, parity, 1)
    pages_each, room = out_starts.shape[1] - 1, out_values.shape[1]
    out_indices.zero_()
    out_values.zero_()
    for owner in range(out_starts.shape[0]):
        pages = torch.arange(owner * pages_each, (owner + 1) * pages_each + 1, device=starts.device)
        edges = starts[pages.clamp(max=segments.num_pages)]
        base, count = int(edges[0]), int(edges[-1] - edges[0])
        excess = max(count - room, 0)
        first = int(tie_hash(torch.tensor([owner], device=seed.device), seed)) % max(count, 1)
        sent = torch.ones(count, dtype=torch.bool, device=starts.device)
        sent[(first + torch.arange(excess, device=starts.device)) % max(count, 1)] = False
        before = torch.cat([torch.zeros(1, dtype=torch.int64, device=starts.device), sent.cumsum(0)])
        out_starts[owner] = before[(edges - base).long()].to(torch.int32)
        at = base + torch.arange(count, device=starts.device)
        out_indices[owner, : count - excess] = indices[at[sent]]
        out_values[owner, : count - excess] = values[at[sent]]
        page = torch.searchsorted(starts, at[~sent].to(torch.int32), right=True) - 1
        left = page * PAGE + (indices[at[~sent]].long() & 0xFFFF)
        residual[left] = residual[left] + values[at[~sent]].float()


def join_pieces(
    segments: Segments,
    starts: Tensor,
    indices: Tensor,
    values: Tensor,
    out_starts: Tensor,
    out_indices: Tensor,
    out_values: Tensor,
) -> None:
    pages_each, base = starts.shape[1] - 1, 0
    for owner in range(starts.shape[0]):
        pages = range(owner * pages_each, min((owner + 1) * pages_each, segments.num_pages))
        held = int(starts[owner, -1].clamp(0, values.shape[1]))
        edges = starts[owner].clamp(0, held)
        out_starts[pages.start : pages.stop + 1] = base + edges[: len(pages) + 1]
        out_indices[base : base + held] = indices[owner, :held]
        out_values[base : base + held] = values[owner, :held]
        base += held

"""Twin of ``kernels/merge.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.elements import half_of
from fusedcomp.kernels.segments import BLOCK, PAGE, Segments


def _entries(segments: Segments, starts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of a payload's entries and their padded indices, of those that exist."""
    begin, end = starts[:-1].clamp(0, indices.numel()), starts[1:].clamp(0, indices.numel())
    lengths = (end - begin).clamp(min=0)
    page = torch.arange(segments.num_pages, device=starts.device).repeat_interleave(lengths)
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    at = begin.repeat_interleave(lengths) + torch.arange(page.numel(), device=starts.device) - first
    index = page * PAGE + (indices[at].long() & 0xFFFF)
    inside = index < segments.padded_numel
    return at[inside], index[inside]


def sum_payloads(
    segments: Segments,
    starts: Tensor,
    indices: Tensor,
    values: Tensor,
    vector: Tensor,
    counts: Tensor,
    marks: Tensor,
) -> None:
    touched = torch.zeros(segments.padded_numel, dtype=torch.bool, device=vector.device)
    for row in range(values.shape[0]):
        at, index = _entries(segments, starts[row], indices[row])
        vector[index] = vector[index] + values[row, at].float()
        touched[index] = True
    counts.copy_(touched.view(-1, BLOCK).sum(1))
    bits = touched.view(*marks.shape, 32).long() << torch.arange(32, device=touched.device)
    marks.copy_(bits.sum(2).to(torch.int32))


def keep_rest(
    offsets: Tensor,
    indices: Tensor,
    parity: Tensor | None,
    vector: Tensor,
    residuals: Tensor,
    *,
    place: int,
    places: int,
) -> None:
    residual, index = residuals[0 if parity is None else int(parity) ^ 1], indices[: int(offsets[-1])]
    mine = index[(index % places == place) & (vector[index] != 0.0)]
    residual[mine] = residual[mine] + vector[mine]
    vector[index] = 0.0


def mask_winners(
    segments: Segments,
    winner_starts: Tensor,
    winner_indices: Tensor,
    sent_starts: Tensor,
    sent_indices: Tensor,
    parity: Tensor | None,
    vector: Tensor,
    velocity: Tensor,
) -> None:
    _, winners = _entries(segments, winner_starts, winner_indices)
    _, sent = _entries(segments, sent_starts, sent_indices)
    half_of(velocity, parity, 1)[sent[torch.isin(sent, winners)]] = 0.0

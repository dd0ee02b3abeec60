"""Twin of ``kernels/refine.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.elements import half_of
from fusedcomp.kernels.reference.keys import rank_key
from fusedcomp.kernels.segments import Segments


def list_candidates(
    segments: Segments, counts: Tensor, marks: Tensor, shared: Tensor, offsets: Tensor, indices: Tensor
) -> None:
    offsets[0] = 0
    torch.cumsum(counts, 0, out=offsets[1:])
    bits = marks.view(-1, 1) >> torch.arange(32, device=marks.device) & 1
    found = bits.view(-1).nonzero().view(-1)[: indices.numel()]
    indices[: found.numel()] = found


def select_candidates(
    segments: Segments,
    offsets: Tensor,
    indices: Tensor,
    residual: Tensor,
    weights: Tensor | None,
    seed: Tensor,
    parity: Tensor | None,
    ranks: Tensor,
    widths: Tensor,
    histograms: Tensor,
    bounds: Tensor,
    near: Tensor,
    near_counts: Tensor,
    tickets: Tensor,
    thresholds: Tensor,
    keys: Tensor,
    flag: Tensor,
    *,
    coarse: bool = False,
) -> None:
    residual = half_of(residual, parity, 1)
    limits = offsets[segments.scope_blocks].clamp(max=keys.numel()).tolist()
    found = indices[: limits[-1]]
    keys[: limits[-1]] = rank_key(residual[found].float(), found, seed, residual.itemsize == 2, weights)
    flag |= (~residual[found].isfinite()).any().to(torch.int32)
    for scope, rank in enumerate(ranks.tolist()):
        mine = keys[limits[scope] : limits[scope + 1]]
        if mine.numel() > rank:
            thresholds[scope] = torch.topk(mine, rank).values[-1]

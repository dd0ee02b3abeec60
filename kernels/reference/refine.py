"""Twin of ``kernels/refine.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.accumulate import selection_key
from fusedcomp.kernels.segments import BLOCK, PAGE, Segments


def gather_candidates(
    segments: Segments,
    counts: Tensor,
    staged: Tensor,
    residual: Tensor,
    thresholds: Tensor,
    seed: Tensor,
    offsets: Tensor,
    keys: Tensor,
    indices: Tensor,
) -> None:
    torch.cumsum(counts, 0, out=offsets[1:])
    block_scope = segments.block_table[:, 0].long() if segments.per_tensor else torch.zeros_like(counts)
    index = torch.arange(segments.padded_numel, device=residual.device)
    key = selection_key(residual, index, seed)
    valid = torch.zeros_like(residual, dtype=torch.bool)
    for where in segments.slices:
        valid[where] = True
    chosen = valid & (key >= thresholds[block_scope].repeat_interleave(BLOCK))
    chosen &= (counts > 0).repeat_interleave(BLOCK)  # a segment without a gradient has no candidates
    found = chosen.nonzero().view(-1)[: keys.numel()]
    keys[: found.numel()] = key[found]
    indices[: found.numel()] = found


def _threshold(keys: Tensor, rank: int) -> int:
    """The rank-th largest key, cut to the digits of 8 bits that tell it from the next one."""
    if keys.numel() <= rank:
        return 0
    least = int(torch.topk(keys, rank).values[-1])
    if least < 0:
        return 0
    for shift in (55, 47, 39, 31, 23, 15, 7, 0):
        low = least >> shift << shift
        if int((keys >= low).sum()) == rank:
            return low
    raise AssertionError("keys are distinct")


def select_threshold(keys: Tensor, offsets: Tensor, scopes: Tensor, ranks: Tensor, thresholds: Tensor) -> None:
    bounds = offsets[scopes].clamp(max=keys.numel()).tolist()
    for scope, rank in enumerate(ranks.tolist()):
        thresholds[scope] = _threshold(keys[bounds[scope] : bounds[scope + 1]], rank)


def select_candidates(
    segments: Segments,
    keys: Tensor,
    offsets: Tensor,
    ranks: Tensor,
    states: Tensor,
    histograms: Tensor,
    thresholds: Tensor,
) -> None:
    select_threshold(keys, offsets, segments.scope_blocks, ranks, thresholds)


def pack_payload(
    segments: Segments,
    keys: Tensor,
    indices: Tensor,
    offsets: Tensor,
    thresholds: Tensor,
    velocity: Tensor | None,
    residual: Tensor,
    winners: Tensor,
    starts: Tensor,
    out_indices: Tensor,
    values: Tensor,
) -> None:
    total = min(int(offsets[-1]), keys.numel())
    keys, indices = keys[:total], indices[:total]
    scope = segments.block_table[indices // BLOCK, 0].long() if segments.per_tensor else torch.zeros_like(indices)
    won = indices[keys >= thresholds[scope]]
    winners[0] = torch.bincount(won // PAGE, minlength=segments.num_pages)
    torch.cumsum(winners[0], 0, dtype=torch.int32, out=winners[1])
    starts[0] = 0
    starts[1:] = winners[1]
    out_indices.zero_()
    values.zero_()
    # Unsigned 16 bits in an int16: 32768.. wrap to the negative numbers with the same bits.
    out_indices[: won.numel()] = (((won % PAGE) + 32768) % PAGE - 32768).to(torch.int16)
    values[: won.numel()] = residual[won]
    residual[won] = 0.0
    if velocity is not None:
        velocity[won] = 0.0

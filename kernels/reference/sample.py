"""Twin of ``kernels/sample.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.accumulate import ACCUMULATE
from fusedcomp.kernels.reference.compress import prepared
from fusedcomp.kernels.reference.elements import half_of, rounding_noise, stochastic
from fusedcomp.kernels.reference.keys import mix32, rank_key
from fusedcomp.kernels.sample import LENIENCE, SAMPLES
from fusedcomp.kernels.segments import Operands, Segments, memory_order

_SHIFTS = (50, 42, 34, 26, 18, 10, 2, 0)  # where a sampled threshold may end: its lower bits are 0


def sample_threshold(
    segments: Segments,
    operands: Operands,
    samples: Tensor,
    groups: Tensor,
    ranks: Tensor,
    aims: Tensor,
    velocity: Tensor | None,
    residual: Tensor,
    weights: Tensor | None,
    trust: Tensor | None,
    scales: Tensor | None,
    seed: Tensor,
    parity: Tensor | None,
    keys: Tensor,
    histograms: Tensor,
    tickets: Tensor,
    thresholds: Tensor,
    widths: Tensor,
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    velocity, residual = half_of(velocity, parity, 0), half_of(residual, parity, 0)
    turn = mix32(seed.to(torch.int64) & 0xFFFFFFFF)
    keys.fill_(-1)
    for segment, (grad, param) in enumerate(zip(operands.grads, operands.params, strict=True)):
        mine = samples[:, 0] == segment
        if grad is None:
            continue
        offset = (samples[mine, 1] + turn) % segments.numels[segment]
        index = segments.slices[segment].start + offset
        entries = (memory_order(grad)[offset], memory_order(param)[offset])
        g = prepared(*entries, trust, scales, segment, grad_scale, weight_decay)
        old = residual[index].float()
        _, new = ACCUMULATE[accumulate](g, old if velocity is None else velocity[index].float(), old, momentum)
        new = stochastic(new, rounding_noise(index, seed), residual.itemsize == 2)
        keys[mine] = rank_key(new, index, seed, residual.itemsize == 2, weights)
    for scope, first, last in set(map(tuple, groups.tolist())):
        sampled, rank = keys[first * SAMPLES : last * SAMPLES], int(ranks[scope])
        sampled = sampled[sampled >= 0]
        thresholds[scope] = _cut(sampled, rank) if sampled.numel() > rank else 0


def _cut(keys: Tensor, rank: int) -> int:
    """The rank-th largest key, cut to as few digits as let a quarter more through."""
    least = int(torch.topk(keys, rank).values[-1])
    cuts = (least >> shift << shift for shift in _SHIFTS)
    return next(cut for cut in cuts if int((keys >= cut).sum()) - rank <= rank // LENIENCE)

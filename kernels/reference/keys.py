"""Twin of ``kernels/keys.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.keys import DRAW_UNIT


def mix32(x: Tensor) -> Tensor:
    """The bijection of 32 bits of the kernels, on non-negative int64 values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x2C1B3C6D) & 0xFFFFFFFF
    return x ^ (x >> 12)


def tie_hash(index: Tensor, seed: Tensor) -> Tensor:
    return mix32((index & 0xFFFFFFFF) ^ mix32(seed.to(torch.int64) & 0xFFFFFFFF))


def drawn_weight(index: Tensor, seed: Tensor, salt: Tensor) -> Tensor:
    draw = mix32((index & 0xFFFFFFFF) ^ mix32((seed.to(torch.int64) & 0xFFFFFFFF) ^ mix32(salt.to(torch.int64))))
    return 2.0**32 * DRAW_UNIT.value / (draw.float() + 1.0)


def magnitude_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32) & 0x7FFFFFFF


def selection_key(values: Tensor, index: Tensor, seed: Tensor, half: bool) -> Tensor:
    shift = 16 if half else 0
    return (magnitude_bits(values).to(torch.int64) << 32) | (tie_hash(index, seed) << shift)


def rank_key(values: Tensor, index: Tensor, seed: Tensor, half: bool, weights: Tensor | None) -> Tensor:
    """The key that entries of a bucket are ranked by: of 32 bits where there are weights."""
    if weights is None:
        return selection_key(values, index, seed, half)
    drawn = weights.dtype == torch.int32
    return selection_key(values * (drawn_weight(index, seed, weights) if drawn else weights[index]), index, seed, False)

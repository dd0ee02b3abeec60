"""Twin of ``kernels/elements.py``: torch's own conversions round to nearest; only stochastic rounding is spelt out."""

from typing import overload

import torch
from torch import Tensor

from fusedcomp.kernels.reference.keys import tie_hash

INFINITE = 0x7F800000
_LARGEST = {torch.bfloat16: 3.3895313892515355e38, torch.float16: 65504.0}


def rounding_noise(index: Tensor, seed: Tensor) -> Tensor:
    """32 random bits of every element, as non-negative int64."""
    return tie_hash(index, seed)


@overload
def half_of(state: Tensor, parity: Tensor | None, other: int) -> Tensor: ...
@overload
def half_of(state: None, parity: Tensor | None, other: int) -> None: ...
def half_of(state: Tensor | None, parity: Tensor | None, other: int) -> Tensor | None:
    """The half of a state that a step reads, ``other``: that it writes; all of it where there are no halves."""
    return state if state is None or parity is None else state.view(2, -1)[int(parity) ^ other]


def stochastic(values: Tensor, noise: Tensor, half: bool) -> Tensor:
    """fp32 values as a state keeps them: of 16 bits, rounded up with the probability of what is cut off."""
    if not half:
        return values
    bits = values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    bits = (bits + (noise & 0xFFFF)) >> 16 << 16
    bits = torch.where(values.isnan(), 0x7FC00000, bits)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def narrow_clamped(values: Tensor, element: torch.dtype) -> Tensor:
    """To the nearest value of the type; what is finite stays finite."""
    if element == torch.float32:
        return values
    largest = _LARGEST[element]
    return torch.where(values.isfinite(), values.clamp(-largest, largest), values).to(element)

"""Twin of ``kernels/tune.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.elements import INFINITE
from fusedcomp.kernels.reference.keys import magnitude_bits
from fusedcomp.kernels.segments import BLOCK
from fusedcomp.kernels.tune import MAGNITUDES, SUM_BITS

_STEPS, _SHIFT, _WINDOW = 8, 20, 256


def tally_magnitudes(counters: Tensor, values: Tensor) -> None:
    """Add the magnitudes of whole blocks to the first counter."""
    digits = (magnitude_bits(values).clamp(max=INFINITE) >> _SHIFT).view(-1, BLOCK)
    counted = digits[(digits > 0) & (digits > digits.amax(1, keepdim=True) - _WINDOW)]
    counters[0] += torch.bincount(counted, minlength=MAGNITUDES).to(torch.int32)


def choose_entries(
    costs: Tensor, shape: Tensor, counters: Tensor, ranks: Tensor, wanted: Tensor, *, room: int, numel: int
) -> None:
    count = counters.sum(0)
    counters.zero_()
    digit = torch.arange(MAGNITUDES, device=count.device)
    octave, place = digit // _STEPS, _STEPS + digit % _STEPS
    below = (octave * (count > 0)).max() - octave
    square = (place * (place + 1) << max(0, SUM_BITS - numel.bit_length())) >> (2 * below).clamp(0, 63)
    end = count.flip(0).cumsum(0).flip(0)
    begin = end - count
    above = (count * square).flip(0).cumsum(0).flip(0) - count * square
    (each, fixed), (whole, lead) = costs, shape
    first = ((begin + lead) // whole + 1) * whole - lead
    last = (end + lead) // whole * whole - lead
    entries = torch.cat([first, last, end])
    exists = torch.cat([first <= end, last > begin, (end > begin) & (end == end[0])])
    begin, above, square = begin.repeat(3), above.repeat(3), square.repeat(3)
    cost = each * ((entries + lead + whole - 1) // whole).double() + fixed
    rate = torch.where(exists, (above + (entries - begin) * square).double() / cost, -1.0)
    wanted[0] = torch.where(exists & (rate == rate.max()), entries, end[0]).min()
    ranks[0] = wanted[0].clamp(1, room)

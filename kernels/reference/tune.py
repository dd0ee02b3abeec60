"""Twin of ``kernels/tune.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.reference.elements import INFINITE
from fusedcomp.kernels.reference.keys import magnitude_bits
from fusedcomp.kernels.segments import BLOCK
from fusedcomp.kernels.tune import MAGNITUDES, SUM_BITS

_STEPS, _SHIFT, _WINDOW, _LAST = 8, 20, 256, 2039


def tally_magnitudes(counters: Tensor, values: Tensor) -> None:
    """Add the magnitudes of whole blocks to the first counter."""
    digits = (magnitude_bits(values).clamp(max=INFINITE) >> _SHIFT).view(-1, BLOCK)
    counted = digits[(digits > 0) & (digits > digits.amax(1, keepdim=True) - _WINDOW)]
    counters[0] += torch.bincount(counted, minlength=MAGNITUDES).to(torch.int32)


def choose_entries(
    costs: Tensor,
    shape: Tensor,
    counters: Tensor,
    ranks: Tensor,
    wanted: Tensor,
    thresholds: Tensor,
    widths: Tensor,
    scale: Tensor | None = None,
    *,
    room: int,
    numel: int,
) -> None:
    count = counters.sum(0)
    counters.zero_()
    digit = torch.arange(MAGNITUDES, device=count.device)
    octave, place = digit // _STEPS, _STEPS + digit % _STEPS
    top, precision = (octave * (count > 0)).max(), max(0, SUM_BITS - numel.bit_length())
    below = (top - octave).clamp(min=0)
    if scale is None:
        one = (place * (place + 1) << precision) >> (2 * below).clamp(max=63)
    else:
        one = (2 * place + 1 << precision) >> below.clamp(max=63)
    end = count.flip(0).cumsum(0).flip(0)
    begin = end - count
    above = (count * one).flip(0).cumsum(0).flip(0) - count * one
    (each, fixed), (whole, lead) = costs, shape
    first = ((begin + lead) // whole + 1) * whole - lead
    last = (end + lead) // whole * whole - lead
    entries = torch.cat([first, last, end])
    exists = torch.cat([first <= end, last > begin, (end > begin) & ((end == end[0]) | (scale is not None))])
    descent = (above.repeat(3) + (entries - begin.repeat(3)) * one.repeat(3)).double()
    if scale is not None:
        descent = descent * descent / entries.clamp(min=1)
    cost = each * ((entries + lead + whole - 1) // whole).double() + fixed
    rate = torch.where(exists, descent / cost, -1.0)
    wanted[0] = torch.where(exists & (rate == rate.max()), entries, end[0]).min()
    ranks[0] = sent = wanted[0].long().clamp(1, room)
    if scale is not None:
        here = (begin < sent) & (sent <= end)
        mean = ((above + (sent - begin) * one) * here).sum().double() / sent
        edge = ((digit * here).sum() << _SHIFT).int().view(torch.float32)
        scale[0] = _scale(mean * 2.0 ** -(precision + 4), edge, int(top))


def choose_draws(
    costs: Tensor, shape: Tensor, counters: Tensor, ranks: Tensor, wanted: Tensor, widths: Tensor, *, room: int,
    numel: int,
) -> None:  # fmt: skip
    count = counters.sum(0)
    counters.zero_()
    digit = torch.arange(MAGNITUDES, device=count.device)
    largest, precision = int((digit * (count > 0)).max()), max(0, SUM_BITS - numel.bit_length())
    top = largest // _STEPS
    below, place = (top - digit // _STEPS).clamp(min=0), _STEPS + digit % _STEPS
    sums = (count * ((2 * place + 1 << precision) >> below.clamp(max=63))).cumsum(0)
    rest = sums.double() * 2.0 ** (top - 131 - precision)
    square = count * ((place * (place + 1) << precision) >> (2 * below).clamp(max=63))
    squares = (square.flip(0).cumsum(0).flip(0) - square).double() * 2.0 ** (2 * (top - 127) - 6 - precision)
    end = count.flip(0).cumsum(0).flip(0)
    total, begin = end[:1], end - count
    middle = ((digit.clamp(max=_LAST) << _SHIFT) + (1 << _SHIFT - 1)).int().view(torch.float32).double()
    after = middle[(digit + 1).clamp(max=_LAST)]
    (each, fixed), (whole, lead) = costs, shape
    least = torch.where(digit == largest, 2, begin + 1 + (rest / after).ceil().long())
    most = torch.minimum(begin + 1 + (rest / middle).floor().long(), total)
    first = (least + lead + whole - 1) // whole * whole - lead
    last = (most + lead) // whole * whole - lead
    there = (digit > 0) & (digit <= largest) & (sums > 0)
    entries = torch.cat([first, last, total])
    exists = torch.cat([there & (first <= most), there & (last >= least), total > 0])
    share = rest * rest / (torch.stack([first, last]) - 1 - begin).clamp(min=1)
    all_squares = square.sum().view(1).double() * 2.0 ** (2 * (top - 127) - 6 - precision)
    mean_square = torch.cat([(squares + share).flatten(), all_squares])
    cost = each * ((entries + lead + whole - 1) // whole).double() + fixed
    rate = torch.where(exists, 1.0 / torch.where(exists, mean_square * cost, 1.0), -1.0)
    best = torch.where(exists & (rate == rate.max()), entries, total).min()
    wanted[0] = (best + 1).clamp(max=numel) if int(total) > 0 else 0
    ranks[0] = wanted[0].long().clamp(1, room)


def _scale(mean: Tensor, edge: Tensor, top: int) -> Tensor:
    """Of a mean in units of the octave ``top``, with 5 bits."""
    fraction, exponent = torch.frexp(mean)
    fraction = (32.0 * fraction + 0.5).floor() / 32.0
    scale = torch.ldexp(fraction, exponent + (top - 127)).float()
    return torch.minimum(scale, 2.0 * edge) if top < 255 else torch.full_like(edge, float("inf"))

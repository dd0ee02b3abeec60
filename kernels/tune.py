"""How many entries a step sends: as many as buy the most descent for what the message costs.

    rate(T) = descent(T) / cost(T)
    descent(T) = sum of the T largest squares
    cost(T) = each * ceil((T + lead) / whole) + fixed           whole: entries of a packet, 1 without packets

The pass counts magnitudes by their leading bits, ``STEPS`` bins an octave; one program that looks at the counts finds
the best T. A square counts as the product of its bin's edges, at most a factor 1 + 1 / STEPS from what it is, and so
does every sum of them: the rate found is at least 1 / (1 + 1 / STEPS)^2 of the best. Inside a bin, where ``descent`` is
a line, the rate has no maximum but at its ends, with packets at the first and the last that are full.

Sums are integers, of which the order does not matter: a step that is taken again finds the same T.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import launch
from fusedcomp.kernels.digits import take_histogram
from fusedcomp.kernels.keys import INFINITE, magnitude_bits

STEPS = tl.constexpr(8)  # bins an octave: of the 31 bits of a magnitude the first 8 + 3
_SHIFT = tl.constexpr(20)
MAGNITUDES = 2048  # bins of all magnitudes there are
COUNTERS = 16  # programs add to different copies: an address takes one addition at a time
# A block counts what lies in the 32 octaves below its largest. The rest of it is less than 2^-52 of its square norm.
_WINDOW = tl.constexpr(256)
SUM_BITS = 54  # of sums of squares, beside the 8 of (2 STEPS - 1) 2 STEPS: below 2^62 in all


@triton.jit
def count_magnitudes(counter_ptr, block, values, COUNTERS: tl.constexpr, MAGNITUDES: tl.constexpr):
    """Add the magnitudes of a block to the counters; zeros, and what lies outside a segment, do not count."""
    digit = tl.minimum(magnitude_bits(values), INFINITE) >> _SHIFT  # a NaN's own bits are the device's affair
    lowest = tl.max(digit) - (_WINDOW - 1)
    counted = tl.histogram(tl.maximum(digit - lowest, 0), _WINDOW, mask=(digit >= lowest) & (digit > 0))
    mine = counter_ptr + (block % COUNTERS) * MAGNITUDES + lowest
    tl.atomic_add(mine + tl.arange(0, _WINDOW), counted, mask=counted > 0, sem="relaxed")


@triton.jit
def _rate(entries, exists, begin, above, square, each, fixed, whole, lead):
    """Of sending so many entries, of which those past ``begin`` are of one square; -1 where there are none such."""
    descent = above + (entries - begin) * square
    cost = each * ((entries + lead + whole - 1) // whole).to(tl.float64) + fixed
    return tl.where(exists, descent.to(tl.float64) / tl.where(exists, cost, 1.0), -1.0)


@triton.jit(do_not_specialize=["room", "precision"])
def _choose_entries_kernel(
    cost_ptr, shape_ptr,  # in
    counter_ptr,  # scratch
    rank_ptr, wanted_ptr,  # out
    room, precision,
    COUNTERS: tl.constexpr, MAGNITUDES: tl.constexpr,
):  # fmt: skip
    count = tl.zeros((MAGNITUDES,), tl.int32)
    for copy in range(COUNTERS):
        count += take_histogram(counter_ptr + copy * MAGNITUDES, MAGNITUDES)
    count = count.to(tl.uint32, bitcast=True).to(tl.int64)  # a bucket may have 2^32 elements
    digit = tl.arange(0, MAGNITUDES)
    octave = digit // STEPS
    below = tl.max(tl.where(count > 0, octave, 0)) - octave  # octaves below the largest
    place = STEPS + digit % STEPS
    square = ((place * (place + 1)).to(tl.int64) << precision) >> tl.minimum(tl.maximum(2 * below, 0), 63)
    end = tl.cumsum(count, reverse=True)
    begin = end - count
    above = tl.cumsum(count * square, reverse=True) - count * square

    each, fixed = tl.load(cost_ptr), tl.load(cost_ptr + 1)
    whole, lead = tl.load(shape_ptr), tl.load(shape_ptr + 1)
    first = ((begin + lead) // whole + 1) * whole - lead  # entries that fill packets, more than ``begin``
    last = (end + lead) // whole * whole - lead
    at_first = _rate(first, first <= end, begin, above, square, each, fixed, whole, lead)
    at_last = _rate(last, last > begin, begin, above, square, each, fixed, whole, lead)
    total = tl.max(end)  # the last packet may be in part
    at_end = _rate(end, (end > begin) & (end == total), begin, above, square, each, fixed, whole, lead)
    best = tl.maximum(tl.max(tl.maximum(tl.maximum(at_first, at_last), at_end)), 0.0)  # if there is none, no T has it
    wanted = tl.min(tl.where(at_first == best, first, total))
    wanted = tl.minimum(wanted, tl.min(tl.where(at_last == best, last, total)))
    tl.store(wanted_ptr, wanted.to(tl.int32))
    tl.store(rank_ptr, tl.maximum(tl.minimum(wanted, room), 1))


def choose_entries(
    costs: Tensor,  # f64 (2,): each, fixed
    shape: Tensor,  # i64 (2,): whole, lead
    counters: Tensor,  # scratch: i32 (COUNTERS, MAGNITUDES): of the pass; zeros after
    ranks: Tensor,  # out: i64 (1,): entries to send, 1 to ``room``
    wanted: Tensor,  # out: i32 (1,): as many as would be best
    *,
    room: int,
    numel: int,
) -> None:
    """The number of entries with the best rate, the least of equals. ``numel``: no more magnitudes were counted."""
    launch(
        _choose_entries_kernel, 1, counters,
        costs, shape,
        counters,
        ranks, wanted,
        room, max(0, SUM_BITS - numel.bit_length()),
        COUNTERS=COUNTERS, MAGNITUDES=MAGNITUDES, shape="stretch",
    )  # fmt: skip

"""How many entries a step sends: as many as buy the most descent for what the message costs.

    rate(T) = descent(T) / cost(T)
    descent(T) = sum of the T largest squares                   sent as they are
                 (sum of the T largest magnitudes)^2 / T        sent as their mean, the scale, with their signs
    cost(T) = each * ceil((T + lead) / whole) + fixed           whole: entries of a packet, 1 without packets

The pass counts magnitudes by their leading bits, ``STEPS`` bins an octave; one program that looks at the counts finds
the best T. A square counts as the product of its bin's edges, at most a factor 1 + 1 / STEPS from what it is, and so
does every sum of them: the rate found is at least 1 / (1 + 1 / STEPS)^2 of the best. A magnitude counts as the middle
of its bin, whose edges are a factor 1 + 1 / STEPS apart: squares of sums are as good.

Inside a bin, where ``descent`` is a line, or convex, the rate has no maximum but at its ends, with packets at the first
and the last that are full. A line rises; what is convex may fall, so that the end of a bin that fills no packet counts
too.

Entries that are drawn (keys.py) have a choice of their own, ``choose_draws``. With chances min(1, a / mu) that add up
to T the mean square of what is sent is the least there is, and k drawn entries do not exceed it for T = k - 1 (Szegedy,
2006: priority sampling is no worse than one entry less by independent draws):

    descent(k) = 1 / (S + R^2 / (k - 1 - c))        c: entries of at least mu, S: their squares, R: the others' sum

From one bin's middle down to the next, mu passes the same entries, and k grows by an eighth at most: the first and the
last k are looked at. Where all are sent, there is nothing to draw.

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
_HALF = tl.constexpr(1 << 19)  # of a bin
_LAST = tl.constexpr(2039)  # bin of finite numbers
MAGNITUDES = 2048  # bins of all magnitudes there are
COUNTERS = 16  # programs add to different copies: an address takes one addition at a time
# A block counts what lies in the 32 octaves below its largest. The rest of it is less than 2^-52 of its square norm.
_WINDOW = tl.constexpr(256)
# Of the refining's 256 bins above the threshold (digits.py) the last one sent lies in the first 64 to 128: were it in
# the last, which is open, one program would have to look at all that are larger.
_BITS = tl.constexpr(8)
_BITS_TO_LAST = tl.constexpr(6)
_OCTAVE = tl.constexpr(23 + 32)  # bits of a key that a factor of two in its magnitude is worth
_OCTAVES_MORE = tl.constexpr(4)  # than there would be if as many candidates passed as there is room for
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
def _better(best, wanted, entries, exists, begin, above, one, each, fixed, whole, lead, HAS_SCALE: tl.constexpr):
    """The best rate and its number of entries, the least of equals: of ``best``, and of sending ``entries``, of which
    those past ``begin`` weigh the same. One kind of numbers after another: all rates at once are too many registers.
    """
    descent = (above + (entries - begin) * one).to(tl.float64)
    if HAS_SCALE:
        descent = descent * descent / tl.where(exists, entries, 1).to(tl.float64)
    cost = each * ((entries + lead + whole - 1) // whole).to(tl.float64) + fixed
    rate = tl.where(exists, descent / tl.where(exists, cost, 1.0), -1.0)
    highest = tl.max(rate)
    least = tl.min(tl.where(rate == highest, entries, 0x7FFFFFFFFFFFFFFF))
    least = tl.where(highest == best, tl.minimum(least, wanted), least)
    return tl.maximum(highest, best), tl.where(highest >= best, least, wanted)


@triton.jit
def _scale_of(sent, total, edge, top, precision):
    """The mean of so many magnitudes, as near as 5 bits come; at most twice ``edge``, the least of them.

    ``total``: their sum in units of 2^-precision / 16 of the octave ``top``. Of what is not finite: infinity.
    """
    mean = (total.to(tl.float64) / sent.to(tl.float64)).to(tl.int64, bitcast=True)
    mean = ((mean + (1 << 47)) >> 48) << 48  # a float64 has 52 bits behind the first
    scale = (mean.to(tl.float64, bitcast=True) * _power(top - 131 - precision)).to(tl.float32)
    return tl.where(top < 255, tl.minimum(scale, 2.0 * edge), float("inf"))


@triton.jit
def _counted(counter_ptr, COUNTERS: tl.constexpr, MAGNITUDES: tl.constexpr):
    """The counts of all copies, which are left empty."""
    count = tl.zeros((MAGNITUDES,), tl.int32)
    for copy in range(COUNTERS):
        count += take_histogram(counter_ptr + copy * MAGNITUDES, MAGNITUDES)
    return count.to(tl.uint32, bitcast=True).to(tl.int64)  # a bucket may have 2^32 elements


@triton.jit
def _middle(digit):
    """f64: of a bin of finite numbers."""
    bits = (tl.minimum(digit, _LAST) << _SHIFT) + _HALF
    return bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _power(exponent):
    """f64: of 2."""
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _log2(number):
    """i32: rounded down, of a positive number; of one just below a power of two up."""
    return (number.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit(do_not_specialize=["room", "precision"])
def _choose_entries_kernel(
    cost_ptr, shape_ptr, threshold_ptr,  # in
    counter_ptr,  # scratch
    rank_ptr, wanted_ptr, width_ptr, scale_ptr,  # out
    room, precision,
    HAS_SCALE: tl.constexpr, COUNTERS: tl.constexpr, MAGNITUDES: tl.constexpr,
):  # fmt: skip
    count = _counted(counter_ptr, COUNTERS, MAGNITUDES)
    digit = tl.arange(0, MAGNITUDES)
    octave = digit // STEPS
    top = tl.max(tl.where(count > 0, octave, 0))
    below = top - octave
    place = STEPS + digit % STEPS
    if HAS_SCALE:
        one = ((2 * place + 1).to(tl.int64) << precision) >> tl.minimum(tl.maximum(below, 0), 63)
    else:
        one = ((place * (place + 1)).to(tl.int64) << precision) >> tl.minimum(tl.maximum(2 * below, 0), 63)
    end = tl.cumsum(count, reverse=True)
    begin = end - count
    above = tl.cumsum(count * one, reverse=True) - count * one

    each, fixed = tl.load(cost_ptr), tl.load(cost_ptr + 1)
    whole, lead = tl.load(shape_ptr), tl.load(shape_ptr + 1)
    first = ((begin + lead) // whole + 1) * whole - lead  # entries that fill packets, more than ``begin``
    last = (end + lead) // whole * whole - lead
    total = tl.max(end)
    best, wanted = tl.full((), 0.0, tl.float64), total  # rates of what there is are positive
    best, wanted = _better(
        best, wanted, first, first <= end, begin, above, one, each, fixed, whole, lead, HAS_SCALE
    )  # fmt: skip
    best, wanted = _better(
        best, wanted, last, last > begin, begin, above, one, each, fixed, whole, lead, HAS_SCALE
    )  # fmt: skip
    at_end = (end > begin) & (HAS_SCALE | (end == total))
    _, wanted = _better(best, wanted, end, at_end, begin, above, one, each, fixed, whole, lead, HAS_SCALE)
    sent = tl.maximum(tl.minimum(wanted, room), 1)
    tl.store(wanted_ptr, wanted.to(tl.int32))
    tl.store(rank_ptr, sent)
    here = (begin < sent) & (sent <= end)
    last_key = (tl.sum(tl.where(here, digit, 0)) + 1).to(tl.int64) << _SHIFT + 32  # the last one's bin ends there
    span = tl.maximum(last_key - tl.load(threshold_ptr), 1)
    tl.store(width_ptr, tl.maximum(_log2(span) - _BITS_TO_LAST, 0))
    if HAS_SCALE:
        sum_sent = tl.sum(tl.where(here, above + (sent - begin) * one, 0))
        edge = (tl.sum(tl.where(here, digit, 0)) << _SHIFT).to(tl.float32, bitcast=True)
        tl.store(scale_ptr, _scale_of(sent, sum_sent, edge, top, precision))


@triton.jit
def _better_draw(best, wanted, entries, exists, begin, squares, rest, each, fixed, whole, lead):
    """As ``_better``, of drawing: entries past ``begin`` share what the rest adds up to."""
    share = rest * rest / tl.where(exists, entries - 1 - begin, 1).to(tl.float64)
    cost = each * ((entries + lead + whole - 1) // whole).to(tl.float64) + fixed
    rate = tl.where(exists, 1.0 / tl.where(exists, (squares + share) * cost, 1.0), -1.0)
    highest = tl.max(rate)
    least = tl.min(tl.where(rate == highest, entries, 0x7FFFFFFFFFFFFFFF))
    least = tl.where(highest == best, tl.minimum(least, wanted), least)
    return tl.maximum(highest, best), tl.where(highest >= best, least, wanted)


@triton.jit(do_not_specialize=["room", "numel", "precision"])
def _choose_draws_kernel(
    cost_ptr, shape_ptr,  # in
    counter_ptr,  # scratch
    rank_ptr, wanted_ptr, width_ptr,  # out
    room, numel, precision,
    COUNTERS: tl.constexpr, MAGNITUDES: tl.constexpr,
):  # fmt: skip
    count = _counted(counter_ptr, COUNTERS, MAGNITUDES)
    digit = tl.arange(0, MAGNITUDES)
    largest = tl.max(tl.where(count > 0, digit, 0))
    top = largest // STEPS
    below = tl.maximum(top - digit // STEPS, 0)
    place = STEPS + digit % STEPS
    one = ((2 * place + 1).to(tl.int64) << precision) >> tl.minimum(below, 63)
    sums = tl.cumsum(count * one)  # of this bin and those below
    rest = sums.to(tl.float64) * _power(top - 131 - precision)
    square = ((place * (place + 1)).to(tl.int64) << precision) >> tl.minimum(2 * below, 63)
    squares = tl.cumsum(count * square, reverse=True)
    unit = _power(2 * (top - 127) - 6 - precision)
    whole_square = tl.max(squares).to(tl.float64) * unit
    squares = (squares - count * square).to(tl.float64) * unit  # of those above
    end = tl.cumsum(count, reverse=True)
    total, begin = tl.max(end), end - count

    each, fixed = tl.load(cost_ptr), tl.load(cost_ptr + 1)
    whole, lead = tl.load(shape_ptr), tl.load(shape_ptr + 1)
    least = begin + 1 + tl.ceil(rest / _middle(digit + 1)).to(tl.int64)
    least = tl.where(digit == largest, 2, least)  # none is certain: so it is for any fewer
    most = tl.minimum(begin + 1 + tl.floor(rest / _middle(digit)).to(tl.int64), total)
    first = (least + lead + whole - 1) // whole * whole - lead  # entries that fill packets
    last = (most + lead) // whole * whole - lead
    there = (digit > 0) & (digit <= largest) & (sums > 0)
    cost = each * ((total + lead + whole - 1) // whole).to(tl.float64) + fixed
    best = tl.where(total > 0, 1.0 / tl.where(total > 0, whole_square * cost, 1.0), 0.0)  # of all there are
    best, wanted = _better_draw(
        best, total, first, there & (first <= most), begin, squares, rest, each, fixed, whole, lead
    )  # fmt: skip
    best, wanted = _better_draw(
        best, wanted, last, there & (last >= least), begin, squares, rest, each, fixed, whole, lead
    )  # fmt: skip
    wanted = tl.where(total > 0, tl.minimum(wanted + 1, numel), 0)
    sent = tl.maximum(tl.minimum(wanted, room), 1)
    tl.store(wanted_ptr, wanted.to(tl.int32))
    tl.store(rank_ptr, sent)
    # Half as many keys are twice as large.
    octaves = _log2(room / sent) + _OCTAVES_MORE
    tl.store(width_ptr, _log2(2 * octaves - 1) + (_OCTAVE - _BITS))  # the logarithm rounded up


def choose_entries(
    costs: Tensor,  # f64 (2,): each, fixed
    shape: Tensor,  # i64 (2,): whole, lead
    counters: Tensor,  # scratch: i32 (COUNTERS, MAGNITUDES): of the pass; zeros after
    ranks: Tensor,  # out: i64 (1,): entries to send, 1 to ``room``
    wanted: Tensor,  # out: i32 (1,): as many as would be best
    thresholds: Tensor,  # i64 (1,): that candidates reach
    widths: Tensor,  # out: i32 (1,): for the refining, as of sample.py, so that it looks finely at the last one sent
    scale: Tensor | None = None,  # out: f32 (1,): what they are sent as, 5 bits. None: as they are
    *,
    room: int,
    numel: int,
) -> None:
    """The number of entries with the best rate, the least of equals. ``numel``: no more magnitudes were counted."""
    launch(
        _choose_entries_kernel, 1, counters,
        costs, shape, thresholds,
        counters,
        ranks, wanted, widths, scale,
        room, max(0, SUM_BITS - numel.bit_length()),
        HAS_SCALE=scale is not None, COUNTERS=COUNTERS, MAGNITUDES=MAGNITUDES, shape="stretch",
    )  # fmt: skip


def choose_draws(
    costs: Tensor,  # f64 (2,): each, fixed
    shape: Tensor,  # i64 (2,): whole, lead
    counters: Tensor,  # scratch: i32 (COUNTERS, MAGNITUDES): of the pass; zeros after
    ranks: Tensor,  # out: i64 (1,): of the threshold, 1 to ``room``
    wanted: Tensor,  # out: i32 (1,): as would be best
    widths: Tensor,  # out: i32 (1,): for the refining
    *,
    room: int,
    numel: int,
) -> None:
    """The same of entries that are drawn: one more, whose key is the threshold that those before it exceed."""
    launch(
        _choose_draws_kernel, 1, counters,
        costs, shape,
        counters,
        ranks, wanted, widths,
        room, numel, max(0, SUM_BITS - numel.bit_length()),
        COUNTERS=COUNTERS, MAGNITUDES=MAGNITUDES, shape="stretch",
    )  # fmt: skip

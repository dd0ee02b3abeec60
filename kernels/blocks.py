"""The k largest of one block, chosen in registers by the program that made them: device functions of the pass.

    wanted = min(k, elements of the block)
    least  = the wanted-th largest magnitude     a few maxima, or a bit of it at a time
    chosen = magnitudes above least, and of those equal to it the ones with the largest tie hashes
    sent   = what is chosen, in index order, from the place in the payload that is the block's

That is the order of selection keys (keys.py), no two of which are equal: the k largest are one set.
"""

import triton
import triton.language as tl

from fusedcomp.kernels.elements import narrow, narrow_clamped, widen
from fusedcomp.kernels.keys import INFINITE, magnitude_bits, tie_hash
from fusedcomp.kernels.segments import BLOCKS_PER_PAGE

# Bits tell the k-th of 2048 magnitudes from the next after some 20 counts, and a count costs what a maximum does: the
# usual k, 1 to 4, should not wait for that.
_MAXIMA = tl.constexpr(8)
_PAGE_BLOCKS = tl.constexpr(BLOCKS_PER_PAGE)


@triton.jit
def largest_of_block(values, index, seed, extent, flag_ptr, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Which entries are sent; raises the flag if one of them is not finite. What lies outside is 0."""
    magnitude, inside = magnitude_bits(values), tl.arange(0, BLOCK) < extent
    most = tl.max(magnitude)
    if most >= INFINITE:
        tl.store(flag_ptr, 1)
    wanted = tl.minimum(extent, PER_BLOCK).to(tl.int32)
    reached = tl.minimum(extent, BLOCK).to(tl.int32)  # so many are at least 0
    least = most * 0
    if PER_BLOCK <= _MAXIMA:
        for _ in tl.static_range(PER_BLOCK - 1):
            most = tl.max(tl.where(magnitude < most, magnitude, 0))
        count = tl.sum((magnitude >= most).to(tl.int32))
        least = tl.where(count == wanted, most, least)  # otherwise magnitudes tie, or a short block has no more
        reached = tl.where(count == wanted, count, reached)
    bit = tl.full((), 1 << 30, tl.int32)
    while (reached > wanted) & (bit > 0):
        count = tl.sum((magnitude >= (least | bit)).to(tl.int32))
        least = tl.where(count >= wanted, least | bit, least)
        reached = tl.where(count >= wanted, count, reached)
        bit = bit >> 1
    chosen = (magnitude >= least) & inside
    if reached > wanted:
        tied = (magnitude == least) & inside
        above = reached - tl.sum(tied.to(tl.int32))
        rank = tl.where(tied, tie_hash(index, seed), 0)
        tie = tl.full((), 0, tl.uint32)
        high = tl.full((), 1 << 31, tl.uint32)
        while reached > wanted:  # ends: no two of a bucket have one hash
            count = above + tl.sum((rank >= (tie | high)).to(tl.int32))
            tie = tl.where(count >= wanted, tie | high, tie)
            reached = tl.where(count >= wanted, count, reached)
            high = high >> 1
        chosen = (magnitude > least) | (tied & (rank >= tie))
    return chosen


@triton.jit
def what_stays(values, HALF: tl.constexpr, WIRE: tl.constexpr):
    """Of the residual where it is sent: what rounding to the wire's type loses."""
    kept = tl.zeros_like(values)
    if not (HALF or WIRE.is_fp32()):  # what is not finite has gone whole
        kept = tl.where(magnitude_bits(values) < INFINITE, values - widen(narrow_clamped(values, WIRE), WIRE), 0.0)
    return kept


@triton.jit
def send_of_block(
    block, values, chosen, place_ptr, values_ptr, indices_ptr,
    WIRE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put what is chosen into the payload, in index order: one of every 32 elements at a time."""
    # Rows of 32 elements lie with a few neighbouring threads: a sum over them needs no barrier.
    bit = (tl.full((32,), 1, tl.int32) << tl.arange(0, 32))[None, :]
    rows = tl.reshape(chosen, (WORDS, 32))
    bits = tl.sum(tl.where(rows, bit, 0), 1).to(tl.uint32, bitcast=True)
    count = tl.sum(rows.to(tl.int32), 1)
    slot = tl.load(place_ptr + block) + tl.cumsum(count) - count
    page_offset = (block % _PAGE_BLOCKS).to(tl.int32) * BLOCK
    for _ in range(0, tl.max(count)):
        rest = bits & (bits - 1)
        lowest = bits ^ rest  # a power of two: its exponent is the place
        place = tl.maximum((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, 0)
        at = tl.arange(0, WORDS) * 32 + place
        tl.store(values_ptr + slot, narrow_clamped(tl.gather(values, at, 0), WIRE), mask=bits != 0)
        tl.store(indices_ptr + slot, (page_offset + at).to(tl.int16), mask=bits != 0)
        bits = rest
        slot += 1


@triton.jit
def send_nothing_of(
    block, extent, place_ptr, values_ptr, indices_ptr,
    PER_BLOCK: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block without a gradient has its places too: zeros for its first entries."""
    offsets = tl.arange(0, BLOCK)
    taken = offsets < tl.minimum(extent, PER_BLOCK)
    place = tl.load(place_ptr + block)
    inside = (block % _PAGE_BLOCKS).to(tl.int32) * BLOCK + offsets
    tl.store(values_ptr + place + offsets, narrow(tl.zeros((BLOCK,), tl.float32), WIRE), mask=taken)
    tl.store(indices_ptr + place + offsets, inside.to(tl.int16), mask=taken)

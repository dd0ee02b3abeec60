"""Radix selection, a digit at a time from the top: in which bin of a histogram the rank-th largest key lies.

low      the rank-th key's digits so far, zeros below
rank     the key's rank among the keys of its bin
excess   keys of the bin that are smaller: 0 says that ``low`` already divides the rank largest from the rest
"""

import triton
import triton.language as tl

BINS = 8192  # of every scope's histogram: of 13-bit digits, or of copies of one of 8 bits
DIGIT_BINS = tl.constexpr(256)
COPIES = tl.constexpr(4)  # programs add to different copies: an address takes one addition at a time


@triton.jit
def pick(histogram, rank, BINS: tl.constexpr):
    """The bin of the rank-th largest key, the key's rank in it, and the excess."""
    bins = tl.arange(0, BINS)
    at_least = tl.cumsum(histogram, reverse=True)
    digit = tl.sum((at_least >= rank).to(tl.int32)) - 1
    here = tl.sum(tl.where(bins == digit, histogram, 0)).to(tl.int64)
    rank = rank - (tl.sum(tl.where(bins == digit, at_least, 0)).to(tl.int64) - here)
    return digit.to(tl.int64), rank, here - rank


@triton.jit
def take_histogram(histogram_ptr, BINS: tl.constexpr):
    """A histogram that other programs have added to, which is left empty."""
    bins = tl.arange(0, BINS)
    histogram = tl.load(histogram_ptr + bins, cache_modifier=".cg")
    tl.debug_barrier()  # where bins are fewer than threads, several read what one of them is about to clear
    tl.store(histogram_ptr + bins, tl.zeros((BINS,), tl.int32))
    return histogram


@triton.jit
def pick_among(keys_ptr, begin, end, base, low, rank, shift, below, CHUNK: tl.constexpr):
    """One more digit of 8 bits, bits ``below`` to ``shift`` of key - base, by one program that reads all keys."""
    histogram = tl.zeros((DIGIT_BINS,), tl.int32)
    for chunk in range(begin, end, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        key = tl.load(keys_ptr + at, mask=at < end, other=-1, cache_modifier=".cg")
        inside = (at < end) & (key >= base) & (((key - base) >> shift) == (low >> shift))
        histogram += tl.histogram((((key - base) >> below) & 255).to(tl.int32), DIGIT_BINS, mask=inside)
    digit, rank, excess = pick(histogram, rank, DIGIT_BINS)
    return low | (digit << below), rank, excess

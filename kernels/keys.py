"""Selection keys: magnitude above, tie hash below. All keys of a step are distinct, so "the k largest" is one set.

bits    62 .. 32             31 .. 0            states of 32 bits
        |residual|           tie hash

        62 .. 48   47 .. 16  15 .. 0            states of 16 bits, whose magnitudes repeat: the hash decides often
        |residual| tie hash  0

Where entries have weights their product with the residual, of 32 bits in any case, takes the residual's place.
"""

import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity


@triton.jit
def mix32(x):
    """A bijection of 32 bits (xorshift-multiply): distinct inputs, distinct outputs."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x2C1B3C6D
    return x ^ (x >> 12)


@triton.jit
def tie_hash(index, seed):
    """The order of entries of equal magnitude: a hash of (index, step) that favours no address."""
    return mix32(index.to(tl.uint32) ^ mix32(seed.to(tl.uint32)))


@triton.jit
def magnitude_bits(values):
    """|values| as an integer of the same order; NaN above inf above all numbers."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def selection_key(values, index, seed, HALF: tl.constexpr):
    """i64 keys of fp32 values; HALF: the values have 16 bits."""
    SHIFT: tl.constexpr = 16 if HALF else 0
    return (magnitude_bits(values).to(tl.int64) << 32) | (tie_hash(index, seed).to(tl.int64) << SHIFT)


@triton.jit
def reaches(values, index, seed, key, inside, HALF: tl.constexpr):
    """Is the selection key of a value at least ``key``, inside? Mostly by one comparison.

    Sampled thresholds are cut to their leading bits, so that the hash's part of them is 0 unless magnitudes tie. What
    lies outside is 0: a magnitude above 0 keeps it out. NaN, above all numbers, is not less than any.
    """
    SHIFT: tl.constexpr = 16 if HALF else 0
    least = ((key >> (32 + SHIFT)) << SHIFT).to(tl.int32)
    tie = ((key >> SHIFT) & 0xFFFFFFFF).to(tl.uint32)
    if (tie == 0) & (least > 0) & (least <= INFINITE):
        above = ~(tl.abs(values) < least.to(tl.float32, bitcast=True))
    else:
        magnitude = magnitude_bits(values)
        above = inside & ((magnitude > least) | ((magnitude == least) & (tie_hash(index, seed) >= tie)))
    return above

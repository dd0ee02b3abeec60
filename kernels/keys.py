"""Selection keys: magnitude above, tie hash below. All keys of a step are distinct, so "the k largest" is one set.

bits    62 .. 32             31 .. 0            states of 32 bits
        |residual|           tie hash

        62 .. 48   47 .. 16  15 .. 0            states of 16 bits, whose magnitudes repeat: the hash decides often
        |residual| tie hash  0

Where entries have weights their product with the residual, of 32 bits in any case, takes the residual's place. Weights
may be drawn: 1 / u with u uniform in (0, 1], in a unit that leaves room above and below for gradients from 1e-32 to
1e34. Whatever the threshold, an entry of magnitude a then reaches it with the chance min(1, a / threshold).
"""

import triton
import triton.language as tl

INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity


DRAW_UNIT = tl.constexpr(2.0**-20)  # of a drawn weight: 1 / u is at least 1, at most 2^32


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
def drawn_weight(index, seed, salt):
    """DRAW_UNIT / u of an element and a step, and of whoever draws: u from a hash, in steps of 2^-32.

    salt: above 0, of which the hash would be the tie's.
    """
    draw = mix32(index.to(tl.uint32) ^ mix32(seed.to(tl.uint32) ^ mix32(salt.to(tl.uint32))))
    return tl.div_rn(tl.full(draw.shape, DRAW_UNIT * 4294967296.0, tl.float32), draw.to(tl.float32) + 1.0)


@triton.jit
def weighted(values, weight_ptr, index, seed, mask, HAS_WEIGHTS: tl.constexpr, IS_DRAWN: tl.constexpr):
    """What entries are ranked by; IS_DRAWN: ``weight_ptr`` is who draws. A mask of None costs nothing."""
    if IS_DRAWN:
        values = values * drawn_weight(index, seed, tl.load(weight_ptr))
    elif HAS_WEIGHTS:
        if mask is None:
            values = values * tl.load(weight_ptr + index)
        else:
            values = values * tl.load(weight_ptr + index, mask=mask, other=0)
    return values


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

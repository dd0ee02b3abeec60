"""Elements in memory and in registers: parameters, gradients and wire values of three types, states of two.

In registers everything is fp32. bf16 is read and written as its bits: integer arithmetic rounds alike on the device
and in Triton's interpreter, whose own conversion to bf16 truncates.
"""

import triton
import triton.language as tl

from fusedcomp.kernels.keys import INFINITE, magnitude_bits, tie_hash

_BF16_NAN = tl.constexpr(0x7FC0)
BF16_MAX = tl.constexpr(3.3895313892515355e38)
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def from_bits(bits):
    """bf16 bits as fp32: exact."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bits(values, noise):
    """fp32 as bf16 bits, rounded up where the 16 bits cut off exceed what ``noise`` (0 .. 65535) lacks to 65536."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(magnitude_bits(values) > INFINITE, _BF16_NAN, (bits + noise) >> 16).to(tl.int16)


@triton.jit
def nearest(values):
    """The noise that rounds to nearest, ties to even."""
    return 0x7FFF + ((values.to(tl.int32, bitcast=True) >> 16) & 1)


@triton.jit
def rounding_noise(index, seed):
    """32 random bits of an element and a step: noise for two roundings, the lower half the residual's.

    They are the tie hash once more. Its upper half, which breaks ties among rounded residuals, has rounded only
    velocities, and those of entries that win are masked.
    """
    return tie_hash(index, seed).to(tl.int32, bitcast=True)


@triton.jit
def stochastic(values, noise, HALF: tl.constexpr):
    """Values as a state keeps them: of 16 bits rounded up with the probability of what is cut off, or unchanged."""
    if HALF:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where(values == values, bits + (noise & 0xFFFF), bits)  # NaN stays NaN
        values = (bits & -0x10000).to(tl.float32, bitcast=True)
    return values


@triton.jit
def half_offset(parity_ptr, half_numel, OTHER: tl.constexpr, HAS_PARITY: tl.constexpr):
    """Where the half of the states starts that a step reads, OTHER: that it writes; 0 where there are no halves.

    A half is whole blocks, and the compiler sees that it is a multiple of 16: accesses stay as wide as without.
    """
    offset = tl.full((), 0, tl.int64)
    if HAS_PARITY:
        offset = (tl.load(parity_ptr) ^ OTHER).to(tl.int64) * half_numel
    return offset


@triton.jit
def load_state(pointers, mask, HALF: tl.constexpr):
    """States as fp32, zeros outside the mask; a mask of None costs nothing."""
    values = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)
    if HALF:
        values = from_bits(values)
    return values


@triton.jit
def store_state(pointers, values, mask, HALF: tl.constexpr):
    """Store values that the state can hold exactly."""
    if HALF:
        values = (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(pointers, values, mask=mask)


@triton.jit
def element_pointer(address, offset, ELEMENT: tl.constexpr):
    """Where element ``offset`` of the tensor at an int64 address lies."""
    STORED: tl.constexpr = tl.int16 if ELEMENT.is_bf16() else ELEMENT
    return (address + offset * (ELEMENT.primitive_bitwidth // 8)).to(tl.pointer_type(STORED))


@triton.jit
def widen(values, ELEMENT: tl.constexpr):
    """Loaded elements as fp32."""
    if ELEMENT.is_bf16():
        values = from_bits(values)
    return values.to(tl.float32)


@triton.jit
def narrow(values, ELEMENT: tl.constexpr):
    """fp32 as elements to store, rounded to nearest."""
    if ELEMENT.is_bf16():
        return to_bits(values, nearest(values))
    else:
        return values.to(ELEMENT)


@triton.jit
def narrow_clamped(values, ELEMENT: tl.constexpr):
    """``narrow``, but what is finite stays finite: error feedback can wait for the rest, not for infinity."""
    if not ELEMENT.is_fp32():
        LIMIT: tl.constexpr = FP16_MAX if ELEMENT.is_fp16() else BF16_MAX
        finite = magnitude_bits(values) < INFINITE
        values = tl.where(finite & (values > LIMIT), LIMIT, values)
        values = tl.where(finite & (values < -LIMIT), -LIMIT, values)
    return narrow(values, ELEMENT)


@triton.jit
def load_block(address, start, remaining, ELEMENT: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 of elements start.. of the tensor at an int64 address, zeros past ``remaining``.

    A base from a table has no known alignment: the hinted branch gives 128-bit loads; gradients of concatenated or
    stacked parameters (views with an offset of 8 or 12 bytes) and last blocks take the other. The hint must stand where
    the pointer is made: it would be lost on the result of another function.
    """
    STORED: tl.constexpr = tl.int16 if ELEMENT.is_bf16() else ELEMENT
    pointer = (address + start * (ELEMENT.primitive_bitwidth // 8)).to(tl.pointer_type(STORED))
    offsets = tl.arange(0, BLOCK)
    if (remaining >= BLOCK) & (address % 16 == 0):
        values = tl.load(tl.multiple_of(pointer, 16) + offsets)
    else:
        values = tl.load(pointer + offsets, mask=offsets < remaining, other=0)
    return widen(values, ELEMENT)


@triton.jit
def store_block(address, start, remaining, values, ELEMENT: tl.constexpr, BLOCK: tl.constexpr):
    """The store that mirrors ``load_block``."""
    STORED: tl.constexpr = tl.int16 if ELEMENT.is_bf16() else ELEMENT
    pointer = (address + start * (ELEMENT.primitive_bitwidth // 8)).to(tl.pointer_type(STORED))
    offsets = tl.arange(0, BLOCK)
    values = narrow(values, ELEMENT)
    if (remaining >= BLOCK) & (address % 16 == 0):
        tl.store(tl.multiple_of(pointer, 16) + offsets, values)
    else:
        tl.store(pointer + offsets, values, mask=offsets < remaining)

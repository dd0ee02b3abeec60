"""How memory accumulates: device functions that the compress and settle kernels take as a constexpr.

none        residual <- update,             update = gradient
residual    residual <- residual + update,  update = gradient
momentum    velocity <- momentum * velocity + gradient;  residual <- residual + velocity
nesterov    velocity <- momentum * velocity + gradient;  residual <- residual + (gradient + momentum * velocity)
"""

import triton
import triton.language as tl


@triton.jit
def accumulate_none(grad, velocity, residual, momentum):
    return velocity, grad


@triton.jit
def accumulate_residual(grad, velocity, residual, momentum):
    return velocity, residual + grad


@triton.jit
def accumulate_momentum(grad, velocity, residual, momentum):
    velocity = momentum * velocity + grad
    return velocity, residual + velocity


@triton.jit
def accumulate_nesterov(grad, velocity, residual, momentum):
    velocity = momentum * velocity + grad
    return velocity, residual + (grad + momentum * velocity)


ACCUMULATE = {
    "none": accumulate_none,
    "residual": accumulate_residual,
    "momentum": accumulate_momentum,
    "nesterov": accumulate_nesterov,
}


@triton.jit
def load_block(address, start, remaining, BLOCK: tl.constexpr):
    """fp32 elements start.. of the tensor at an int64 address, zeros past ``remaining``.

    A base from a table has no known alignment: the hinted branch gives 128-bit loads; gradients of concatenated or
    stacked parameters (views with an offset of 8 or 12 bytes) and last blocks take the other.
    """
    pointer = (address + start * 4).to(tl.pointer_type(tl.float32))
    offsets = tl.arange(0, BLOCK)
    if (remaining >= BLOCK) & (address % 16 == 0):
        values = tl.load(tl.multiple_of(pointer, 16) + offsets)
    else:
        values = tl.load(pointer + offsets, mask=offsets < remaining, other=0.0)
    return values


@triton.jit
def store_block(address, start, remaining, values, BLOCK: tl.constexpr):
    """The store that mirrors ``load_block``."""
    pointer = (address + start * 4).to(tl.pointer_type(tl.float32))
    offsets = tl.arange(0, BLOCK)
    if (remaining >= BLOCK) & (address % 16 == 0):
        tl.store(tl.multiple_of(pointer, 16) + offsets, values)
    else:
        tl.store(pointer + offsets, values, mask=offsets < remaining)


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
def selection_key(values, index, seed):
    """i64 keys, all distinct: magnitude above, tie hash below. "The k largest" is one well-defined set."""
    return (magnitude_bits(values).to(tl.int64) << 32) | tie_hash(index, seed).to(tl.int64)

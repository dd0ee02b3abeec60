"""Random-k: entries drawn alike on all ranks, so that values alone travel and can be summed on the way.

A segment is cut into as many equal strata as entries of it are sent; one element of each is drawn, by a hash of stratum
and step. So all are distinct, every element is drawn with the chance 1 / (size of its stratum), and nobody need be told
which they are.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch
from fusedcomp.kernels.elements import element_pointer, half_offset, load_state, narrow, store_state, widen
from fusedcomp.kernels.keys import INFINITE, magnitude_bits, tie_hash
from fusedcomp.kernels.segments import BLOCK, Operands, Segments

_CHUNK = 512


@triton.jit
def drawn(strata_ptr, at, mask, seed):
    """Padded index of the element drawn from each stratum, and the stratum's size."""
    start = tl.load(strata_ptr + 2 * at, mask=mask, other=0)
    size = tl.load(strata_ptr + 2 * at + 1, mask=mask, other=1)
    return start + (tie_hash(start, seed).to(tl.int64) % size), size


@triton.jit
def _take_drawn_kernel(
    strata_ptr, block_table_ptr, address_ptr, seed_ptr, parity_ptr,  # in
    velocity_ptr, residual_ptr, flag_ptr,  # in-out
    values_ptr,  # out
    count, half_numel,
    MASK_VELOCITY: tl.constexpr, UNBIASED: tl.constexpr, HAS_PARITY: tl.constexpr, HALF: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    exists = at < count
    index, size = drawn(strata_ptr, at, exists, tl.load(seed_ptr))
    segment = tl.load(block_table_ptr + 2 * (index // BLOCK), mask=exists, other=0)
    mine = exists & (tl.load(address_ptr + segment, mask=exists, other=0) != 0)
    residual_ptr += half_offset(parity_ptr, half_numel, 1, HAS_PARITY)
    value = load_state(residual_ptr + index, mine, HALF)
    if tl.max(magnitude_bits(value)) >= INFINITE:
        tl.store(flag_ptr, 1)
    if UNBIASED:
        value = value * size.to(tl.float32)
    tl.store(values_ptr + at, value, mask=exists)
    store_state(residual_ptr + index, tl.zeros((CHUNK,), tl.float32), mine, HALF)
    if MASK_VELOCITY:
        velocity_ptr += half_offset(parity_ptr, half_numel, 1, HAS_PARITY)
        store_state(velocity_ptr + index, tl.zeros((CHUNK,), tl.float32), mine, HALF)


@triton.jit
def _put_drawn_kernel(
    strata_ptr, block_table_ptr, address_ptr, seed_ptr, present_ptr, lr_ptr, values_ptr,  # in
    inverse_world, count, num_segments,
    ELEMENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    exists = at < count
    index, _ = drawn(strata_ptr, at, exists, tl.load(seed_ptr) - 1)
    block = index // BLOCK
    segment = tl.load(block_table_ptr + 2 * block, mask=exists, other=0)
    exists = exists & (tl.load(present_ptr + segment, mask=exists, other=0) != 0)
    inside = tl.load(block_table_ptr + 2 * block + 1, mask=exists, other=0).to(tl.int64) * BLOCK + index % BLOCK
    address = tl.load(address_ptr + num_segments + segment, mask=exists, other=0)
    pointer = element_pointer(address, inside, ELEMENT)
    param = widen(tl.load(pointer, mask=exists, other=0), ELEMENT)
    value = tl.load(values_ptr + at, mask=exists, other=0.0)
    tl.store(pointer, narrow(param - tl.load(lr_ptr) * inverse_world * value, ELEMENT), mask=exists)


def take_drawn(
    segments: Segments,
    operands: Operands,
    strata: Tensor,  # i64 (k, 2): first padded index, size
    velocity: Tensor | None,  # in-out: masked where something is taken; None: left alone
    residual: Tensor,  # in-out
    seed: Tensor,  # i32 (1,): the step
    parity: Tensor | None,
    flag: Tensor,  # in-out: i32 (1,): set to 1 if a value is not finite
    values: Tensor,  # out: f32 (k,); 0 of segments without a gradient, whose states stay
    *,
    unbiased: bool,
) -> None:
    """Take the drawn entries out of the residual; unbiased: times the size of their stratum."""
    launch(
        _take_drawn_kernel, -(-len(strata) // _CHUNK), residual,
        strata, segments.block_table, operands.addresses, seed, parity,
        velocity, residual, flag,
        values,
        len(strata), segments.padded_numel,
        MASK_VELOCITY=velocity is not None, UNBIASED=unbiased, HAS_PARITY=parity is not None,
        HALF=residual.itemsize == 2, CHUNK=_CHUNK, BLOCK=BLOCK, shape="page",
    )  # fmt: skip


def put_drawn(
    segments: Segments,
    operands: Operands,  # in-out: the parameters
    strata: Tensor,  # i64 (k, 2)
    seed: Tensor,  # i32 (1,): of the step after
    present: Tensor,  # i32 (segments,): 0 where no rank had a gradient
    lr: Tensor,  # f32 (1,)
    values: Tensor,  # f32 (k,), summed over ranks
    *,
    inverse_world: float,
) -> None:
    """``param -= lr * inverse_world * value`` for the entries that the step before has drawn."""
    launch(
        _put_drawn_kernel, -(-len(strata) // _CHUNK), values,
        strata, segments.block_table, operands.addresses, seed, present, lr, values,
        inverse_world, len(strata), len(segments.numels),
        ELEMENT=ELEMENT[operands.dtype], CHUNK=_CHUNK, BLOCK=BLOCK, shape="page",
    )  # fmt: skip

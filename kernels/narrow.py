"""What is never compressed, in values of 16 bits: rounded with error feedback, gathered, summed in rank order.

    sent     = gradient + residual, rounded to bf16          finite values stay finite
    residual <- gradient + residual - sent                   exact: no more than the bits that rounding cut off
    mean     = (sent of rank 0 + sent of rank 1 + ...) / ranks, in fp32

A segment without a gradient sends zeros and keeps its residual.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch
from fusedcomp.kernels.elements import element_pointer, half_offset, load_block, narrow_clamped, widen
from fusedcomp.kernels.headers import ENCODING, HEADER_WORDS, fill_header
from fusedcomp.kernels.keys import INFINITE, magnitude_bits
from fusedcomp.kernels.segments import BLOCK, Operands, Segments


@triton.jit
def _pack_narrow_kernel(
    block_table_ptr, address_ptr, numel_ptr, start_ptr, scale_ptr, parity_ptr,  # in
    residual_ptr,  # in-out
    values_ptr, flag_ptr,  # out
    grad_scale, half_numel,
    HAS_SCALES: tl.constexpr, HAS_PARITY: tl.constexpr, ELEMENT: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
    remaining = tl.load(numel_ptr + segment) - start
    grad_address = tl.load(address_ptr + segment)
    grad = load_block(grad_address, start, tl.where(grad_address != 0, remaining, 0), ELEMENT, BLOCK) * grad_scale
    if HAS_SCALES:  # of a gradient that is there: zeros times NaN would be NaN
        grad = grad * tl.load(scale_ptr + segment, mask=grad_address != 0, other=1.0)
    offsets = tl.arange(0, BLOCK)
    index = block * BLOCK + offsets
    old = tl.load(residual_ptr + half_offset(parity_ptr, half_numel, 0, HAS_PARITY) + index)
    total = tl.where(grad_address != 0, grad + old, 0.0)
    finite = magnitude_bits(total) < INFINITE
    if tl.max(magnitude_bits(total)) >= INFINITE:
        tl.atomic_or(flag_ptr, 1)
    sent = narrow_clamped(total, WIRE)
    kept = tl.where(finite, total - widen(sent, WIRE), 0.0)
    kept = tl.where(grad_address != 0, kept, old)
    tl.store(residual_ptr + half_offset(parity_ptr, half_numel, 1, HAS_PARITY) + index, kept)
    pointer = element_pointer(values_ptr.to(tl.int64), tl.load(start_ptr + segment) + start + offsets, WIRE)
    tl.store(pointer, sent, mask=offsets < remaining)


@triton.jit
def _end_narrow_kernel(
    address_ptr,  # in
    flag_ptr, seed_ptr,  # in-out
    header_ptr,  # out
    num_values, num_segments, words,
    VERSION: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    count = tl.cast(num_values, tl.int64)
    fill_header(address_ptr, flag_ptr, seed_ptr, header_ptr, count, count, num_segments, words, VERSION, FIRST)


@triton.jit
def _sum_narrow_kernel(
    values_ptr,  # in
    mean_ptr,  # out
    inverse_world, numel, stride, world,
    WIRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in range(world):
        pointer = element_pointer(values_ptr.to(tl.int64), tl.cast(rank, tl.int64) * stride + at, WIRE)
        total += widen(tl.load(pointer, mask=at < numel, other=0), WIRE)
    tl.store(mean_ptr + at, total * inverse_world, mask=at < numel)


def pack_narrow(
    segments: Segments,
    operands: Operands,
    scales: Tensor | None,  # f32 (segments,): the gradient is multiplied by it first
    parity: Tensor | None,  # i32 (1,): the residual is two halves, of which the other is written
    residual: Tensor,  # in-out: f32 (padded,)
    values: Tensor,  # out: bf16 (numel,), compact
    flag: Tensor,  # in-out: i32 (1,): set to 1 if a value is not finite
    *,
    grad_scale: float,
) -> None:
    """Round gradient and residual to what is sent; what that loses stays."""
    launch(
        _pack_narrow_kernel, segments.num_blocks, residual,
        segments.block_table, operands.addresses, segments.numel_table, segments.start_table, scales, parity,
        residual,
        values, flag,
        grad_scale, segments.padded_numel,
        HAS_SCALES=scales is not None, HAS_PARITY=parity is not None, ELEMENT=ELEMENT[operands.dtype],
        WIRE=ELEMENT[values.dtype], BLOCK=BLOCK,
    )  # fmt: skip


def end_narrow(
    operands: Operands,
    flag: Tensor,  # in-out: i32 (1,); reset
    seed: Tensor,  # in-out: i32 (1,): the bucket's step, increased by one
    values: Tensor,  # bf16 (numel,)
    header: Tensor,  # out: i32 (HEADER_WORDS + ceil(segments / 32),)
) -> None:
    """The header, when all values are packed."""
    launch(
        _end_narrow_kernel, 1, header,
        operands.addresses,
        flag, seed,
        header,
        values.numel(), len(operands.params), header.numel() - HEADER_WORDS,
        VERSION=ENCODING[values.dtype], FIRST=HEADER_WORDS, shape="small",
    )  # fmt: skip


def sum_narrow(
    rows: Tensor,  # bf16 (world, numel), what ranks sent; may be strided
    mean: Tensor,  # out: f32 (numel,)
    *,
    inverse_world: float,
) -> None:
    """Add up what all ranks sent, in rank order: the same bits on all of them."""
    launch(
        _sum_narrow_kernel, -(-mean.numel() // BLOCK), mean,
        rows,
        mean,
        inverse_world, mean.numel(), rows.stride(0), rows.shape[0],
        WIRE=ELEMENT[rows.dtype], BLOCK=BLOCK,
    )  # fmt: skip

"""Apply: add the payloads of all ranks to the parameters, in rank order, in work proportional to what was sent.

    param <- param - (lr / world) * value        for rank 0, 1, ..., each rank's indices being distinct

One program per page takes the ranks one after another, so every parameter sees the same additions in the same order
on every rank: no atomics, bit-identical replicas.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import launch
from fusedcomp.kernels.segments import BLOCK, BLOCKS_PER_PAGE, Operands, Segments

_CHUNK = 256


@triton.jit
def _apply_payloads_kernel(
    block_table_ptr, address_ptr, numel_ptr, starts_ptr, indices_ptr, values_ptr, lr_ptr,  # in
    inverse_world, world, num_values, starts_stride, indices_stride, values_stride, num_segments, num_blocks,
    BLOCKS_PER_PAGE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0).to(tl.int64)
    scale = tl.load(lr_ptr) * inverse_world
    for rank in range(world):
        row = tl.cast(rank, tl.int64)
        # A peer's numbers never lead to a load or a store outside: positions and indices are clamped or masked.
        begin = tl.minimum(tl.maximum(tl.load(starts_ptr + row * starts_stride + page), 0), num_values)
        end = tl.minimum(tl.maximum(tl.load(starts_ptr + row * starts_stride + page + 1), 0), num_values)
        for chunk in range(begin, end, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            mask = at < end
            inside = tl.load(indices_ptr + row * indices_stride + at, mask=mask, other=0).to(tl.int32) & 0xFFFF
            value = tl.load(values_ptr + row * values_stride + at, mask=mask, other=0.0)
            block = page * BLOCKS_PER_PAGE + inside // BLOCK
            mask = mask & (block < num_blocks)
            segment = tl.load(block_table_ptr + 2 * block, mask=mask, other=0)
            offset = tl.load(block_table_ptr + 2 * block + 1, mask=mask, other=0).to(tl.int64) * BLOCK + inside % BLOCK
            mask = mask & (offset < tl.load(numel_ptr + segment, mask=mask, other=0))
            address = tl.load(address_ptr + num_segments + segment, mask=mask, other=0) + offset * 4
            pointer = address.to(tl.pointer_type(tl.float32))
            param = tl.load(pointer, mask=mask, other=0.0)
            tl.store(pointer, param - scale * value, mask=mask)
        tl.debug_barrier()  # the next rank reads what this one wrote


def apply_payloads(
    segments: Segments,
    operands: Operands,  # in-out: the parameters
    starts: Tensor,  # i32 (world, pages + 1)
    indices: Tensor,  # i16 (world, k)
    values: Tensor,  # f32 (world, k)
    lr: Tensor,  # f32 (1,), device scalar
    *,
    inverse_world: float,
) -> None:
    """``param -= lr * inverse_world * value`` for all entries of all ranks, rank by rank."""
    launch(
        _apply_payloads_kernel, segments.num_pages, values,
        segments.block_table, operands.addresses, segments.numel_table, starts, indices, values, lr,
        inverse_world, values.shape[0], values.shape[1], starts.stride(0), indices.stride(0), values.stride(0),
        len(segments.numels), segments.num_blocks,
        BLOCKS_PER_PAGE=BLOCKS_PER_PAGE, CHUNK=_CHUNK, BLOCK=BLOCK, warps="page",
    )  # fmt: skip

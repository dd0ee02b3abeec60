"""The bandwidth twin of the pass: the same tables, reads and writes as ``compress``, and next to no arithmetic.

    velocity <- velocity + gradient (+ param);  residual <- residual + velocity        an addition keeps a load alive

What the pass takes longer than this is arithmetic, not memory.
"""

import triton  # noqa: TID251  a kernel that is no part of the product
import triton.language as tl  # noqa: TID251
from torch import Tensor

import harness  # noqa: F401  makes the checkout importable
from fusedcomp.kernels._launch import launch
from fusedcomp.kernels.accumulate import load_block
from fusedcomp.kernels.segments import BLOCK, Operands, Segments


@triton.jit
def _bandwidth_twin_kernel(
    block_table_ptr, address_ptr, numel_ptr,  # in
    velocity_ptr, residual_ptr,  # in-out
    counts_ptr,  # out
    num_segments,
    HAS_DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
    extent = tl.load(numel_ptr + segment) - start
    index = block * BLOCK + tl.arange(0, BLOCK)
    grad = load_block(tl.load(address_ptr + segment), start, extent, BLOCK)
    residual = tl.load(residual_ptr + index)
    velocity = tl.load(velocity_ptr + index)
    if HAS_DECAY:
        velocity = velocity + load_block(tl.load(address_ptr + num_segments + segment), start, extent, BLOCK)
    velocity = velocity + grad
    tl.store(velocity_ptr + index, velocity)
    tl.store(residual_ptr + index, residual + velocity)
    tl.store(counts_ptr + block, extent)


def bandwidth_twin(
    segments: Segments,
    operands: Operands,
    velocity: Tensor,  # in-out: f32 (padded,)
    residual: Tensor,  # in-out: f32 (padded,)
    counts: Tensor,  # out: i64 (blocks,)
    *,
    with_decay: bool,
) -> None:
    """Move what one launch of the pass moves."""
    launch(
        _bandwidth_twin_kernel, segments.num_blocks, residual,
        segments.block_table, operands.addresses, segments.numel_table,
        velocity, residual,
        counts,
        len(segments.numels),
        HAS_DECAY=with_decay, BLOCK=BLOCK,
    )  # fmt: skip

"""The pass without what it does: the same tables, reads and writes as ``compress``.

twin        velocity <- velocity + gradient (+ param);    residual <- residual + velocity    additions keep loads alive
accumulate  velocity <- m * velocity + gradient (+ wd * param);  residual <- residual + velocity    without selection

Without a velocity there is no memory: residual <- gradient (+ param), scratch that only what packs reads.

What the pass takes longer than the twin is arithmetic, not memory; what the whole of compress takes longer than
accumulate is the price of the selection. States of 16 bits are bfloat16, cut off when stored.
"""

from collections.abc import Sequence

import torch
import triton  # noqa: TID251  a kernel that is no part of the product
import triton.language as tl  # noqa: TID251
from torch import Tensor

import harness  # noqa: F401  makes the checkout importable
from fusedcomp.kernels._launch import launch
from fusedcomp.kernels.segments import BLOCK, WORDS, Operands, Segments, memory_order


@triton.jit
def _load_block(address, start, remaining, BLOCK: tl.constexpr):
    """fp32 elements of a tensor at an int64 address, with 128-bit loads wherever the address allows."""
    pointer = (address + start * 4).to(tl.pointer_type(tl.float32))
    offsets = tl.arange(0, BLOCK)
    if (remaining >= BLOCK) & (address % 16 == 0):
        values = tl.load(tl.multiple_of(pointer, 16) + offsets)
    else:
        values = tl.load(pointer + offsets, mask=offsets < remaining, other=0.0)
    return values


@triton.jit
def _load_state(pointers, HALF: tl.constexpr):
    values = tl.load(pointers)
    if HALF:
        values = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _store_state(pointers, values, HALF: tl.constexpr):
    if HALF:
        tl.store(pointers, (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16))
    else:
        tl.store(pointers, values)


@triton.jit
def _bandwidth_twin_kernel(
    block_table_ptr, address_ptr, numel_ptr,  # in
    velocity_ptr, residual_ptr,  # in-out
    counts_ptr, marks_ptr,  # out
    momentum, weight_decay, num_segments,
    HAS_MEMORY: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_MOMENTUM: tl.constexpr, HALF: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
    extent = tl.load(numel_ptr + segment) - start
    index = block * BLOCK + tl.arange(0, BLOCK)
    grad = _load_block(tl.load(address_ptr + segment), start, extent, BLOCK)
    if HAS_DECAY:
        param = _load_block(tl.load(address_ptr + num_segments + segment), start, extent, BLOCK)
        grad = grad + (weight_decay * param if HAS_MOMENTUM else param)
    residual = grad
    if HAS_MEMORY:
        residual = _load_state(residual_ptr + index, HALF)
        velocity = _load_state(velocity_ptr + index, HALF)
        if HAS_MOMENTUM:
            velocity = momentum * velocity
        velocity = velocity + grad
        _store_state(velocity_ptr + index, velocity, HALF)
        residual = residual + velocity
    _store_state(residual_ptr + index, residual, HALF)
    tl.store(counts_ptr + block, extent)
    tl.store(marks_ptr + block * WORDS + tl.arange(0, WORDS), tl.zeros((WORDS,), tl.int32))


def move(
    segments: Segments,
    operands: Operands,
    velocity: Tensor | None,  # in-out: f32, or the bits of bf16 as i16 (padded,); None without memory
    residual: Tensor,  # in-out: of the same type (padded,)
    counts: Tensor,  # out: integers (blocks,)
    marks: Tensor,  # out: i32 (blocks, WORDS)
    *,
    momentum: float | None,
    weight_decay: float,
) -> None:
    """Move what one launch of the pass moves. ``momentum=None``: the bandwidth twin; else ``accumulate``."""
    if residual.is_cuda:
        move_by_kernel(segments, operands, velocity, residual, counts, marks, momentum, weight_decay)
    else:
        move_in_torch(segments.slices, operands, velocity, residual, momentum, weight_decay)


def move_by_kernel(
    segments: Segments,
    operands: Operands,
    velocity: Tensor | None,
    residual: Tensor,
    counts: Tensor,
    marks: Tensor,
    momentum: float | None,
    weight_decay: float,
) -> None:
    launch(
        _bandwidth_twin_kernel, segments.num_blocks, residual,
        segments.block_table, operands.addresses, segments.numel_table,
        velocity, residual,
        counts, marks,
        momentum or 0.0, weight_decay, len(segments.numels),
        HAS_MEMORY=velocity is not None, HAS_DECAY=weight_decay != 0.0, HAS_MOMENTUM=momentum is not None,
        HALF=residual.dtype != torch.float32, WORDS=WORDS, BLOCK=BLOCK,
    )  # fmt: skip


def move_in_torch(
    slices: Sequence[slice],
    operands: Operands,
    velocity: Tensor | None,
    residual: Tensor,
    momentum: float | None,
    weight_decay: float,
) -> None:
    """The same on a CPU, where no figure means anything."""
    for where, grad, param in zip(slices, operands.grads, operands.params, strict=True):
        assert grad is not None
        step = memory_order(grad)
        if weight_decay:
            step = step + memory_order(param) * (1.0 if momentum is None else weight_decay)
        r = values(residual)[where]
        if velocity is None:
            r.copy_(step)
        else:
            r.add_(values(velocity)[where].mul_(1.0 if momentum is None else momentum).add_(step))


def values(state: Tensor) -> Tensor:
    """A state as floats: those of 16 bits may be kept as their bits."""
    return state.view(torch.bfloat16) if state.dtype == torch.int16 else state

"""The pass: everything a compressed step does to a parameter's elements, in one trip through memory.

    gradient <- scale * gradient                  scale: -1 to maximise, later the inverse loss scale
    gradient <- gradient + weight_decay * param
    gradient <- trust * gradient                  LARS
    velocity, residual <- ACCUMULATE(gradient, velocity, residual, momentum)
    candidates: entries whose key (|residual|, tie hash) reaches the sampled threshold of their scope

What leaves the pass besides the states: per block the number of candidates, their offsets where they fit into a
staging row, the sums of squares of gradient and parameter, and a flag if a gradient was not finite. A segment without
a gradient is left as it is.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import launch
from fusedcomp.kernels.accumulate import (
    ACCUMULATE,
    load_block,
    magnitude_bits,
    mix32,
    selection_key,
    store_block,
    tie_hash,
)
from fusedcomp.kernels.segments import BLOCK, Operands, Segments

STAGE = 64  # candidates a block can stage: ten times the average at density 0.001; fuller blocks are read again
_SAMPLES = 256  # samples per program
NOT_FINITE = tl.constexpr(0x7F800000)


@triton.jit
def _sample_kernel(
    sample_ptr, address_ptr, numel_ptr, first_block_ptr, velocity_ptr, residual_ptr, trust_ptr, seed_ptr,  # in
    keys_ptr,  # out
    grad_scale, weight_decay, momentum, num_samples, num_segments,
    ACCUMULATE: tl.constexpr, HAS_VELOCITY: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_TRUST: tl.constexpr,
    SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    mask = sample < num_samples
    segment = tl.load(sample_ptr + 2 * sample, mask=mask, other=0)
    offset = tl.load(sample_ptr + 2 * sample + 1, mask=mask, other=0)
    seed = tl.load(seed_ptr)
    # The grid of samples is turned by a new amount every step, so that no entry is always or never looked at.
    turn = mix32(seed.to(tl.uint32)).to(tl.int64)
    offset = (offset + turn) % tl.load(numel_ptr + segment, mask=mask, other=1)
    grad_address = tl.load(address_ptr + segment, mask=mask, other=0)
    mask = mask & (grad_address != 0)
    grad = tl.load((grad_address + offset * 4).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0) * grad_scale
    if HAS_DECAY:
        param_address = tl.load(address_ptr + num_segments + segment, mask=mask, other=0)
        param = tl.load((param_address + offset * 4).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
        grad = grad + weight_decay * param
    if HAS_TRUST:
        grad = tl.load(trust_ptr + segment, mask=mask, other=0.0) * grad
    index = tl.load(first_block_ptr + segment, mask=mask, other=0) * BLOCK + offset
    residual = tl.load(residual_ptr + index, mask=mask, other=0.0)
    velocity = residual
    if HAS_VELOCITY:
        velocity = tl.load(velocity_ptr + index, mask=mask, other=0.0)
    velocity, residual = ACCUMULATE(grad, velocity, residual, momentum)
    keys = tl.where(mask, selection_key(residual, index, seed), -1)
    tl.store(keys_ptr + sample, keys, mask=sample < num_samples)


@triton.jit
def _compress_kernel(
    block_table_ptr, address_ptr, numel_ptr, start_ptr, velocity_in_ptr, residual_in_ptr,  # in
    threshold_ptr, trust_ptr, seed_ptr,
    velocity_out_ptr, residual_out_ptr, sent_ptr, counts_ptr, staged_ptr, partials_ptr, flag_ptr,  # out
    grad_scale, weight_decay, momentum, num_segments,
    ACCUMULATE: tl.constexpr, HAS_VELOCITY: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_TRUST: tl.constexpr,
    HAS_NORMS: tl.constexpr, SEND_ALL: tl.constexpr, PER_TENSOR: tl.constexpr, STAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
    grad_address = tl.load(address_ptr + segment)
    param_address = tl.load(address_ptr + num_segments + segment)
    present = grad_address != 0
    extent = tl.load(numel_ptr + segment) - start
    remaining = tl.where(present, extent, 0)
    offsets = tl.arange(0, BLOCK)
    index = block * BLOCK + offsets

    grad = load_block(grad_address, start, remaining, BLOCK) * grad_scale
    old_residual = tl.load(residual_in_ptr + index)
    velocity = old_residual
    if HAS_VELOCITY:
        velocity = tl.load(velocity_in_ptr + index)
    old_velocity = velocity
    broken = (magnitude_bits(grad) >= NOT_FINITE).to(tl.int32)
    grad_squares, num_broken = 0.0, 0
    if HAS_NORMS:  # there are reductions here anyway
        grad_squares = tl.sum(grad * grad)
        num_broken = tl.sum(broken)
    if HAS_DECAY or HAS_NORMS:
        param = load_block(param_address, start, extent, BLOCK)
        if HAS_NORMS:
            tl.store(partials_ptr + 2 * block, grad_squares)
            tl.store(partials_ptr + 2 * block + 1, tl.sum(param * param))
        if HAS_DECAY:
            grad = grad + weight_decay * param
    if HAS_TRUST:
        grad = tl.load(trust_ptr + segment) * grad
    velocity, residual = ACCUMULATE(grad, velocity, old_residual, momentum)
    velocity = tl.where(present, velocity, old_velocity)
    residual = tl.where(present, residual, old_residual)
    if HAS_VELOCITY:
        tl.store(velocity_out_ptr + index, velocity)

    if SEND_ALL:
        sent = tl.where(present, residual, 0.0)
        address = sent_ptr.to(tl.int64) + tl.load(start_ptr + segment) * 4
        store_block(address, start, extent, sent, BLOCK)
        tl.store(residual_out_ptr + index, tl.where(present, 0.0, residual))
        if not HAS_NORMS:
            num_broken = tl.sum(broken)
    else:
        tl.store(residual_out_ptr + index, residual)
        key = tl.load(threshold_ptr + segment * PER_TENSOR)
        least = (key >> 32).to(tl.int32)
        magnitude = magnitude_bits(residual)
        tie = tie_hash(index, tl.load(seed_ptr)) >= (key & 0xFFFFFFFF).to(tl.uint32)
        chosen = ((magnitude > least) | ((magnitude == least) & tie)) & (offsets < remaining)
        if HAS_NORMS:
            count = tl.sum(chosen.to(tl.int32))
        else:  # one reduction for two counts of at most 2048 each: a reduction is two barriers for the whole block
            both = tl.sum(chosen.to(tl.int32) + (broken << 16))
            count = both & 0xFFFF
            num_broken = both >> 16
        tl.store(counts_ptr + block, count.to(tl.int64))
        if (count > 0) & (count <= STAGE):
            position = tl.cumsum(chosen.to(tl.int32)) - 1
            tl.store(staged_ptr + block * STAGE + position, offsets.to(tl.int16), mask=chosen)
    if num_broken > 0:
        tl.atomic_or(flag_ptr, 1)


def sample(
    segments: Segments,
    operands: Operands,
    sample_table: Tensor,  # i64 (samples, 2): segment, offset in segment
    velocity: Tensor | None,  # f32 (padded,)
    residual: Tensor,  # f32 (padded,)
    trust: Tensor | None,  # f32 (segments,)
    seed: Tensor,  # i32 (1,)
    keys: Tensor,  # out: i64 (samples,); -1 where the segment has no gradient
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    """Keys of the residual as the pass will leave it, at the sampled entries. Changes no state."""
    launch(
        _sample_kernel, -(-keys.numel() // _SAMPLES), residual,
        sample_table, operands.addresses, segments.numel_table, segments.first_blocks, velocity, residual, trust, seed,
        keys,
        grad_scale, weight_decay, momentum, keys.numel(), len(segments.numels),
        ACCUMULATE=ACCUMULATE[accumulate], HAS_VELOCITY=velocity is not None, HAS_DECAY=weight_decay != 0.0,
        HAS_TRUST=trust is not None, SAMPLES=_SAMPLES, BLOCK=BLOCK,
    )  # fmt: skip


def compress(
    segments: Segments,
    operands: Operands,
    velocity_in: Tensor | None,  # f32 (padded,)
    residual_in: Tensor,  # f32 (padded,)
    thresholds: Tensor | None,  # i64 (scopes,): least key of a candidate
    trust: Tensor | None,  # f32 (segments,)
    seed: Tensor,  # i32 (1,)
    velocity_out: Tensor | None,  # may be velocity_in: in place
    residual_out: Tensor,  # may be residual_in: in place
    counts: Tensor,  # out: i64 (blocks,): candidates of every block
    staged: Tensor,  # out: i16 (blocks, STAGE): their offsets, ascending, in rows that hold them all
    partials: Tensor | None,  # out: f32 (blocks, 2): sums of squares of gradient and parameter
    flag: Tensor,  # in-out: i32 (1,): set to 1 if a gradient is not finite
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    """One pass: accumulate the gradient into velocity and residual and find the candidates."""
    _launch_pass(
        segments, operands, velocity_in, residual_in, thresholds, trust, seed,
        velocity_out, residual_out, None, counts, staged, partials, flag,
        accumulate, grad_scale, weight_decay, momentum,
    )  # fmt: skip


def compress_all(
    segments: Segments,
    operands: Operands,
    velocity_in: Tensor | None,
    residual_in: Tensor,
    trust: Tensor | None,
    velocity_out: Tensor | None,
    residual_out: Tensor,
    sent: Tensor,  # out: f32 (numel,), compact
    partials: Tensor | None,
    flag: Tensor,
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    """The same pass for a dense step: everything is sent, the residual becomes 0, the velocity is not masked."""
    _launch_pass(
        segments, operands, velocity_in, residual_in, None, trust, None,
        velocity_out, residual_out, sent, None, None, partials, flag,
        accumulate, grad_scale, weight_decay, momentum,
    )  # fmt: skip


def _launch_pass(
    segments: Segments, operands: Operands, velocity_in: Tensor | None, residual_in: Tensor,
    thresholds: Tensor | None, trust: Tensor | None, seed: Tensor | None,
    velocity_out: Tensor | None, residual_out: Tensor, sent: Tensor | None, counts: Tensor | None,
    staged: Tensor | None, partials: Tensor | None, flag: Tensor,
    accumulate: str, grad_scale: float, weight_decay: float, momentum: float,
) -> None:  # fmt: skip
    launch(
        _compress_kernel, segments.num_blocks, residual_in,
        segments.block_table, operands.addresses, segments.numel_table, segments.start_table, velocity_in, residual_in,
        thresholds, trust, seed,
        velocity_out, residual_out, sent, counts, staged, partials, flag,
        grad_scale, weight_decay, momentum, len(segments.numels),
        ACCUMULATE=ACCUMULATE[accumulate], HAS_VELOCITY=velocity_in is not None, HAS_DECAY=weight_decay != 0.0,
        HAS_TRUST=trust is not None, HAS_NORMS=partials is not None, SEND_ALL=sent is not None,
        PER_TENSOR=sent is None and segments.per_tensor, STAGE=STAGE, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _settle_kernel(
    block_table_ptr, address_ptr, numel_ptr, present_ptr, trust_ptr,  # in
    velocity_ptr, residual_ptr,  # in-out
    weight_decay, momentum, num_segments,
    ACCUMULATE: tl.constexpr, HAS_VELOCITY: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_TRUST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
    if (tl.load(address_ptr + segment) == 0) & (tl.load(present_ptr + segment) != 0):
        remaining = tl.load(numel_ptr + segment) - start
        index = block * BLOCK + tl.arange(0, BLOCK)
        residual = tl.load(residual_ptr + index)
        velocity = residual
        if HAS_VELOCITY:
            velocity = tl.load(velocity_ptr + index)
        grad = tl.zeros((BLOCK,), tl.float32)
        if HAS_DECAY:
            param = load_block(tl.load(address_ptr + num_segments + segment), start, remaining, BLOCK)
            grad = grad + weight_decay * param
        if HAS_TRUST:
            grad = tl.load(trust_ptr + segment) * grad
        velocity, residual = ACCUMULATE(grad, velocity, residual, momentum)
        if HAS_VELOCITY:
            tl.store(velocity_ptr + index, velocity)
        tl.store(residual_ptr + index, residual)


def settle(
    segments: Segments,
    operands: Operands,
    present: Tensor,  # i32 (segments,): 1 where any rank had a gradient
    trust: Tensor | None,
    velocity: Tensor | None,  # in-out
    residual: Tensor,  # in-out
    *,
    accumulate: str,
    weight_decay: float,
    momentum: float,
) -> None:
    """Segments without a gradient here but with one elsewhere accumulate a zero gradient, after the exchange."""
    launch(
        _settle_kernel, segments.num_blocks, residual,
        segments.block_table, operands.addresses, segments.numel_table, present, trust,
        velocity, residual,
        weight_decay, momentum, len(segments.numels),
        ACCUMULATE=ACCUMULATE[accumulate], HAS_VELOCITY=velocity is not None, HAS_DECAY=weight_decay != 0.0,
        HAS_TRUST=trust is not None, BLOCK=BLOCK,
    )  # fmt: skip

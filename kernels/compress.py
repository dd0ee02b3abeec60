"""The pass: everything a compressed step does to a parameter's elements, in one trip through memory.

    gradient <- scale * gradient                  -1 to maximise; the segment's: inverse loss scale, clipping (clip.py)
    gradient <- gradient + weight_decay * param
    gradient <- trust * gradient                  LARS
    velocity, residual <- ACCUMULATE(gradient, velocity, residual, momentum)
    candidates: entries whose key (weight * |residual|, tie hash) reaches the sampled threshold of their scope

What leaves the pass besides the states: a bit per element that marks the candidates, per block their number and the
sums of squares of gradient and parameter; if asked for, how many residuals there are of what magnitude (tune.py). A
segment without a gradient is left as it is. What is not finite is marked, being larger than all numbers; the selection,
which sees it, raises the flag, or the pass where the step may be undone.
States of 16 bits are rounded
stochastically before they are looked at, so what is sent and what is kept still add up to what was there, bit for bit.

A step that may be undone (verdict.py) has states of two halves: it reads one, and all that it writes goes to the other.

Where every block sends its own k largest (blocks.py), nothing is left to select: the pass puts them into the payload,
at places that are known beforehand, and raises the flag itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch, weighing
from fusedcomp.kernels.accumulate import ACCUMULATE
from fusedcomp.kernels.blocks import largest_of_block, send_nothing_of, send_of_block, what_stays
from fusedcomp.kernels.elements import (
    half_offset,
    load_block,
    load_state,
    rounding_noise,
    stochastic,
    store_block,
    store_state,
)
from fusedcomp.kernels.keys import INFINITE, magnitude_bits, reaches, weighted
from fusedcomp.kernels.segments import BLOCK, WORDS, Operands, Segments
from fusedcomp.kernels.tune import COUNTERS, MAGNITUDES, count_magnitudes

# A gradient that a step which may be undone takes in. Its velocity adds up to it / (1 - momentum); what overflowed then
# would make that step void, and all later ones, which start from the same states.
LARGEST = tl.constexpr(1e34)


@triton.jit
def _leave(
    block, index, start, extent, segment, param_address, velocity_in_ptr, residual_in_ptr, start_ptr, place_ptr,
    velocity_out_ptr, residual_out_ptr, sent_ptr, indices_ptr, counts_ptr, marks_ptr, partials_ptr,
    HAS_VELOCITY: tl.constexpr, HAS_NORMS: tl.constexpr, SEND_ALL: tl.constexpr, PER_BLOCK: tl.constexpr,
    HALF: tl.constexpr, ELEMENT: tl.constexpr, WIRE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a segment without a gradient: states stay, nothing is marked or sent, the parameter has its norm."""
    store_state(residual_out_ptr + index, load_state(residual_in_ptr + index, None, HALF), None, HALF)
    if HAS_VELOCITY:
        store_state(velocity_out_ptr + index, load_state(velocity_in_ptr + index, None, HALF), None, HALF)
    if HAS_NORMS:
        param = load_block(param_address, start, extent, ELEMENT, BLOCK)
        tl.store(partials_ptr + 2 * block, 0.0)
        tl.store(partials_ptr + 2 * block + 1, tl.sum(param * param))
    if SEND_ALL:
        address = sent_ptr.to(tl.int64) + tl.load(start_ptr + segment) * 4
        store_block(address, start, extent, tl.zeros((BLOCK,), tl.float32), tl.float32, BLOCK)
    elif PER_BLOCK > 0:
        send_nothing_of(block, extent, place_ptr, sent_ptr, indices_ptr, PER_BLOCK, WIRE, BLOCK)
    else:
        tl.store(counts_ptr + block, 0)
        tl.store(marks_ptr + block * WORDS + tl.arange(0, WORDS), tl.zeros((WORDS,), tl.int32))


@triton.jit
def _compress_kernel(
    block_table_ptr, address_ptr, numel_ptr, start_ptr, velocity_in_ptr, residual_in_ptr, weight_ptr,  # in
    threshold_ptr, trust_ptr, scale_ptr, seed_ptr, parity_ptr, place_ptr,
    velocity_out_ptr, residual_out_ptr, sent_ptr, indices_ptr, counts_ptr, marks_ptr, partials_ptr, flag_ptr,  # out
    counter_ptr,
    grad_scale, weight_decay, momentum, num_segments, half_numel,
    ACCUMULATE: tl.constexpr, HAS_VELOCITY: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_DECAY: tl.constexpr, HAS_TRUST: tl.constexpr, HAS_NORMS: tl.constexpr, HAS_PARITY: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, IS_DRAWN: tl.constexpr, HAS_COUNTERS: tl.constexpr, SEND_ALL: tl.constexpr,
    PER_BLOCK: tl.constexpr, MASK_VELOCITY: tl.constexpr, PER_TENSOR: tl.constexpr, HALF: tl.constexpr,
    ELEMENT: tl.constexpr, WIRE: tl.constexpr, COUNTERS: tl.constexpr, MAGNITUDES: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
    grad_address = tl.load(address_ptr + segment)
    param_address = tl.load(address_ptr + num_segments + segment)
    extent = tl.load(numel_ptr + segment) - start
    offsets = tl.arange(0, BLOCK)
    index = block * BLOCK + offsets
    residual_in_ptr += half_offset(parity_ptr, half_numel, 0, HAS_PARITY)
    residual_out_ptr += half_offset(parity_ptr, half_numel, 1, HAS_PARITY)
    if HAS_VELOCITY:
        velocity_in_ptr += half_offset(parity_ptr, half_numel, 0, HAS_PARITY)
        velocity_out_ptr += half_offset(parity_ptr, half_numel, 1, HAS_PARITY)
    if grad_address == 0:
        _leave(
            block, index, start, extent, segment, param_address, velocity_in_ptr, residual_in_ptr, start_ptr, place_ptr,
            velocity_out_ptr, residual_out_ptr, sent_ptr, indices_ptr, counts_ptr, marks_ptr, partials_ptr,
            HAS_VELOCITY, HAS_NORMS, SEND_ALL, PER_BLOCK, HALF, ELEMENT, WIRE, WORDS, BLOCK,
        )  # fmt: skip
        return

    grad = load_block(grad_address, start, extent, ELEMENT, BLOCK)
    residual = load_state(residual_in_ptr + index, None, HALF)
    velocity = residual
    if HAS_VELOCITY:
        velocity = load_state(velocity_in_ptr + index, None, HALF)
    if HAS_SCALE:
        grad = grad * grad_scale
    if HAS_SCALES:
        grad = grad * tl.load(scale_ptr + segment)
    if SEND_ALL:  # noqa: SIM102  a constant decides what is compiled, a value what runs
        if tl.max(magnitude_bits(grad)) >= INFINITE:
            tl.store(flag_ptr, 1)
    if HAS_NORMS:
        tl.store(partials_ptr + 2 * block, tl.sum(grad * grad))
    if HAS_DECAY or HAS_NORMS:
        param = load_block(param_address, start, extent, ELEMENT, BLOCK)
        if HAS_NORMS:
            tl.store(partials_ptr + 2 * block + 1, tl.sum(param * param))
        if HAS_DECAY:
            grad = grad + weight_decay * param
    if HAS_TRUST:
        grad = tl.load(trust_ptr + segment) * grad
    velocity, residual = ACCUMULATE(grad, velocity, residual, momentum)
    if HAS_PARITY:
        # All that the step would leave: the selection sees no more than fits its buffer. And what it would let grow.
        bad = (magnitude_bits(residual) >= INFINITE) | (tl.abs(grad) >= LARGEST)
        if tl.max(bad.to(tl.int32)) != 0:
            tl.store(flag_ptr, 1)
    seed = tl.load(seed_ptr)
    if HALF:
        noise = rounding_noise(index, seed)
        velocity = stochastic(velocity, noise >> 16, HALF)
        if not SEND_ALL:
            residual = stochastic(residual, noise, HALF)
    if PER_BLOCK > 0:
        accumulated = residual
        chosen = largest_of_block(residual, index, seed, extent, flag_ptr, PER_BLOCK, BLOCK)
        residual = tl.where(chosen, what_stays(residual, HALF, WIRE), residual)
        if MASK_VELOCITY:
            velocity = tl.where(chosen, 0.0, velocity)
    if HAS_VELOCITY:
        store_state(velocity_out_ptr + index, velocity, None, HALF)
    if SEND_ALL:
        address = sent_ptr.to(tl.int64) + tl.load(start_ptr + segment) * 4
        store_block(address, start, extent, residual, tl.float32, BLOCK)
        store_state(residual_out_ptr + index, tl.zeros((BLOCK,), tl.float32), None, HALF)
    else:
        store_state(residual_out_ptr + index, residual, None, HALF)
    if PER_BLOCK > 0:  # at last: values change threads on the way, and the registers of the states are free by now
        send_of_block(block, accumulated, chosen, place_ptr, sent_ptr, indices_ptr, WIRE, WORDS, BLOCK)
    elif not SEND_ALL:
        least = tl.load(threshold_ptr + segment * PER_TENSOR)
        ranked = weighted(residual, weight_ptr, index, seed, None, HAS_WEIGHTS, IS_DRAWN)
        chosen = reaches(ranked, index, seed, least, offsets < extent, HALF and not (HAS_WEIGHTS or IS_DRAWN))
        tl.store(counts_ptr + block, tl.sum(chosen.to(tl.int32)))
        # Rows of 32 elements lie with a few neighbouring threads: a sum over them needs no barrier.
        bit = (tl.full((32,), 1, tl.int32) << tl.arange(0, 32))[None, :]
        marks = tl.sum(tl.where(tl.reshape(chosen, (WORDS, 32)), bit, 0), 1)
        tl.store(marks_ptr + block * WORDS + tl.arange(0, WORDS), marks)
        if HAS_COUNTERS:
            count_magnitudes(counter_ptr, block, residual, COUNTERS, MAGNITUDES)


def compress(
    segments: Segments,
    operands: Operands,
    velocity_in: Tensor | None,  # f32 or bf16 (padded,)
    residual_in: Tensor,  # f32 or bf16 (padded,)
    weights: Tensor | None,  # f32 (padded,), in (0, 1]: entries are ranked by weight * |residual|. None: all are 1.
    # i32 (1,): they are drawn, by whom it says (keys.py)
    thresholds: Tensor | None,  # i64 (scopes,): least key of a candidate
    trust: Tensor | None,  # f32 (segments,)
    scales: Tensor | None,  # f32 (segments,): the gradient is multiplied by it first
    seed: Tensor,  # i32 (1,)
    parity: Tensor | None,  # i32 (1,): states of two halves, (2 * padded,): it is read, the other written. None: one
    velocity_out: Tensor | None,  # may be velocity_in: in place, or the other half
    residual_out: Tensor,  # may be residual_in
    counts: Tensor,  # out: i32 (blocks,): candidates of every block
    marks: Tensor,  # out: i32 (blocks, WORDS): a bit per element, the lowest of a word first: is it a candidate
    partials: Tensor | None,  # out: f32 (blocks, 2): sums of squares of gradient and parameter
    flag: Tensor | None,  # in-out: i32 (1,): with ``parity`` set to 1 if a residual is not finite or a gradient 1e34
    counters: Tensor | None = None,  # in-out: i32 (COUNTERS, MAGNITUDES): residuals, by magnitude
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    """One pass: accumulate the gradient into velocity and residual and find the candidates."""
    _launch_pass(
        segments, operands, velocity_in, residual_in, weights, thresholds, trust, scales, seed, parity,
        velocity_out, residual_out, None, counts, marks, partials, flag, counters,
        accumulate, grad_scale, weight_decay, momentum,
    )  # fmt: skip


def compress_blocks(
    segments: Segments,
    operands: Operands,
    velocity_in: Tensor | None,
    residual_in: Tensor,
    block_starts: Tensor,  # i64 (blocks + 1,): every block's first entry in the payload, and their number
    trust: Tensor | None,
    scales: Tensor | None,
    seed: Tensor,
    parity: Tensor | None,
    velocity_out: Tensor | None,
    residual_out: Tensor,
    out_indices: Tensor,  # out: i16 (k,): index inside the page, as unsigned 16 bits
    values: Tensor,  # out: f32, bf16 or f16 (k,)
    partials: Tensor | None,
    flag: Tensor,  # in-out: i32 (1,): set to 1 if a residual is not finite; with ``parity`` also of a gradient of 1e34
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
    per_block: int,
    masking: bool,
) -> None:
    """The same pass where every block sends its ``per_block`` largest entries, a shorter one all if it has no more.

    They are in the payload, in index order, and gone from the residual (but for what the payload's rounding lost) and,
    ``masking``, from the velocity. Segments without a gradient send zeros for their blocks' first entries.
    """
    _launch_pass(
        segments, operands, velocity_in, residual_in, None, None, trust, scales, seed, parity,
        velocity_out, residual_out, values, None, None, partials, flag, None,
        accumulate, grad_scale, weight_decay, momentum, block_starts, out_indices, per_block, masking,
    )  # fmt: skip


def compress_all(
    segments: Segments,
    operands: Operands,
    velocity_in: Tensor | None,
    residual_in: Tensor,
    trust: Tensor | None,
    scales: Tensor | None,
    seed: Tensor,
    parity: Tensor | None,
    velocity_out: Tensor | None,
    residual_out: Tensor,
    sent: Tensor,  # out: f32 (numel,), compact
    partials: Tensor | None,
    flag: Tensor,  # in-out: i32 (1,): set to 1 if a gradient is not finite
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    """The same pass for a dense step: everything is sent, the residual becomes 0, the velocity is not masked."""
    _launch_pass(
        segments, operands, velocity_in, residual_in, None, None, trust, scales, seed, parity,
        velocity_out, residual_out, sent, None, None, partials, flag, None,
        accumulate, grad_scale, weight_decay, momentum,
    )  # fmt: skip


def _launch_pass(
    segments: Segments, operands: Operands, velocity_in: Tensor | None, residual_in: Tensor, weights: Tensor | None,
    thresholds: Tensor | None, trust: Tensor | None, scales: Tensor | None, seed: Tensor, parity: Tensor | None,
    velocity_out: Tensor | None, residual_out: Tensor, sent: Tensor | None, counts: Tensor | None,
    marks: Tensor | None, partials: Tensor | None, flag: Tensor | None, counters: Tensor | None,
    accumulate: str, grad_scale: float, weight_decay: float, momentum: float,
    places: Tensor | None = None, indices: Tensor | None = None, per_block: int = 0, masking: bool = False,
) -> None:  # fmt: skip
    wire = torch.float32 if sent is None else sent.dtype
    launch(
        _compress_kernel, segments.num_blocks, residual_in,
        segments.block_table, operands.addresses, segments.numel_table, segments.start_table, velocity_in, residual_in,
        weights, thresholds, trust, scales, seed, parity, places,
        velocity_out, residual_out, sent, indices, counts, marks, partials, flag, counters,
        grad_scale, weight_decay, momentum, len(segments.numels), segments.padded_numel,
        ACCUMULATE=ACCUMULATE[accumulate], HAS_VELOCITY=velocity_in is not None, HAS_SCALE=grad_scale != 1.0,
        HAS_SCALES=scales is not None, HAS_DECAY=weight_decay != 0.0, HAS_TRUST=trust is not None,
        HAS_NORMS=partials is not None, HAS_PARITY=parity is not None, **weighing(weights),
        HAS_COUNTERS=counters is not None, SEND_ALL=sent is not None and per_block == 0, PER_BLOCK=per_block,
        MASK_VELOCITY=masking and velocity_in is not None, PER_TENSOR=sent is None and segments.per_tensor,
        HALF=residual_in.itemsize == 2, ELEMENT=ELEMENT[operands.dtype], WIRE=ELEMENT[wire], COUNTERS=COUNTERS,
        MAGNITUDES=MAGNITUDES, WORDS=WORDS, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _settle_kernel(
    block_table_ptr, address_ptr, numel_ptr, present_ptr, trust_ptr, seed_ptr, parity_ptr,  # in
    velocity_ptr, residual_ptr,  # in-out
    weight_decay, momentum, num_segments, half_numel,
    ACCUMULATE: tl.constexpr, HAS_VELOCITY: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_TRUST: tl.constexpr,
    HAS_PARITY: tl.constexpr, HALF: tl.constexpr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
    if (tl.load(address_ptr + segment) == 0) & (tl.load(present_ptr + segment) != 0):
        remaining = tl.load(numel_ptr + segment) - start
        index = block * BLOCK + tl.arange(0, BLOCK)
        residual_ptr += half_offset(parity_ptr, half_numel, 0, HAS_PARITY)
        residual = load_state(residual_ptr + index, None, HALF)
        velocity = residual
        if HAS_VELOCITY:
            velocity_ptr += half_offset(parity_ptr, half_numel, 0, HAS_PARITY)
            velocity = load_state(velocity_ptr + index, None, HALF)
        grad = tl.zeros((BLOCK,), tl.float32)
        if HAS_DECAY:
            param = load_block(tl.load(address_ptr + num_segments + segment), start, remaining, ELEMENT, BLOCK)
            grad = grad + weight_decay * param
        if HAS_TRUST:
            grad = tl.load(trust_ptr + segment) * grad
        velocity, residual = ACCUMULATE(grad, velocity, residual, momentum)
        noise = rounding_noise(index, tl.load(seed_ptr))
        if HAS_VELOCITY:
            store_state(velocity_ptr + index, stochastic(velocity, noise >> 16, HALF), None, HALF)
        store_state(residual_ptr + index, stochastic(residual, noise, HALF), None, HALF)


def settle(
    segments: Segments,
    operands: Operands,
    present: Tensor,  # i32 (segments,): 1 where any rank had a gradient
    trust: Tensor | None,
    seed: Tensor,  # i32 (1,)
    parity: Tensor | None,  # i32 (1,), of the step after: half ``parity`` is what the exchange has left
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
        segments.block_table, operands.addresses, segments.numel_table, present, trust, seed, parity,
        velocity, residual,
        weight_decay, momentum, len(segments.numels), segments.padded_numel,
        ACCUMULATE=ACCUMULATE[accumulate], HAS_VELOCITY=velocity is not None, HAS_DECAY=weight_decay != 0.0,
        HAS_TRUST=trust is not None, HAS_PARITY=parity is not None, HALF=residual.itemsize == 2,
        ELEMENT=ELEMENT[operands.dtype], BLOCK=BLOCK,
    )  # fmt: skip

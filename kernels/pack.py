"""From candidates to payload: the winners in index order, their states cleared.

    winners = candidates with key >= T  -> payload;  residual <- what the payload's rounding lost, velocity <- 0

One launch, whose programs find out from one another where theirs go.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch
from fusedcomp.kernels.elements import half_offset, load_state, narrow, narrow_clamped, store_state, widen
from fusedcomp.kernels.headers import ENCODING, HEADER_WORDS, SIGNED, fill_header
from fusedcomp.kernels.keys import DRAW_UNIT, INFINITE, magnitude_bits
from fusedcomp.kernels.order import offset_before, start_order
from fusedcomp.kernels.segments import BLOCK, PAGE, SIGNED_PAGE, Operands, Segments

PACK = 512  # candidates a program looks at
_LOOK_BACK = 256


@triton.jit
def _winning(
    keys_ptr, indices_ptr, block_table_ptr, threshold_ptr, at, end, PER_TENSOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Index, key and verdict of the candidates ``at``."""
    mask = at < end
    key = tl.load(keys_ptr + at, mask=mask, other=-1)
    index = tl.load(indices_ptr + at, mask=mask, other=0)
    if PER_TENSOR:
        segment = tl.load(block_table_ptr + 2 * (index // BLOCK), mask=mask, other=0)
        threshold = tl.load(threshold_ptr + segment)
        won = mask & (key >= threshold)
    else:
        won = mask & (key >= tl.load(threshold_ptr))
    return index, key, won


@triton.jit(do_not_specialize=["programs"])  # for 1 and a loop that never runs triton 3.6 fails
def _pack_payload_kernel(
    keys_ptr, indices_ptr, block_table_ptr, offsets_ptr, threshold_ptr, address_ptr, parity_ptr,  # in
    velocity_ptr, residual_ptr, flag_ptr, seed_ptr,  # in-out
    shared_ptr,  # scratch
    starts_ptr, out_indices_ptr, values_ptr, header_ptr,  # out
    capacity, num_blocks, programs, pages, num_values, num_segments, words, half_numel,
    PER_TENSOR: tl.constexpr, MASK_VELOCITY: tl.constexpr, HAS_PARITY: tl.constexpr, HALF: tl.constexpr,
    IS_SIGNED: tl.constexpr, IS_DRAWN: tl.constexpr, WIRE: tl.constexpr, VERSION: tl.constexpr, FIRST: tl.constexpr,
    PAGE: tl.constexpr, LOOK_BACK: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, number = start_order(shared_ptr, programs)
    candidates = tl.minimum(tl.load(offsets_ptr + num_blocks), capacity)
    first = program.to(tl.int64) * CHUNK
    if first >= tl.maximum(candidates, 1):
        return  # the capacity is some times what there usually is
    at = first + tl.arange(0, CHUNK)
    index, key, won = _winning(keys_ptr, indices_ptr, block_table_ptr, threshold_ptr, at, candidates, PER_TENSOR, BLOCK)
    if IS_DRAWN:  # what others are as likely to reach: the threshold is not sent itself
        threshold = tl.load(threshold_ptr)
        won = won & (key > threshold)
        least = (threshold >> 32).to(tl.int32).to(tl.float32, bitcast=True) * (1.0 / DRAW_UNIT)
    if IS_SIGNED:  # what is sent is at least half of what it is sent as, so that the difference is exact
        scale = tl.load(values_ptr)
        won = won & ((key >> 32) >= magnitude_bits(0.5 * scale))
    count = tl.sum(won.to(tl.int32))
    before = offset_before(shared_ptr, programs, program, count, number, LOOK_BACK).to(tl.int32)
    slot = before + tl.cumsum(won.to(tl.int32)) - won.to(tl.int32)  # winners before this candidate
    # A page starts where its first candidate is, or the first of a later page.
    page = index // PAGE
    previous = tl.load(indices_ptr + at - 1, mask=(at > 0) & (at < candidates), other=-PAGE) // PAGE
    opened = tl.where(at < candidates, (page - previous).to(tl.int32), 0)
    for skipped in range(0, tl.max(opened)):
        tl.store(starts_ptr + page - skipped, slot, mask=skipped < opened)

    residual_ptr += half_offset(parity_ptr, half_numel, 1, HAS_PARITY)
    value = load_state(residual_ptr + index, won, HALF)
    inside = index % PAGE
    kept = tl.zeros((CHUNK,), tl.float32)
    if IS_SIGNED:
        inside = tl.where(value < 0.0, inside + PAGE, inside)
        kept = value - tl.where(value < 0.0, -scale, scale)
    else:
        if IS_DRAWN:  # in place of what is as large and was not drawn
            value = tl.where(tl.abs(value) < least, tl.where(value < 0.0, -least, least), value)
        sent = narrow_clamped(value, WIRE)
        tl.store(values_ptr + slot, sent, mask=won)
        if not (HALF or WIRE.is_fp32()):
            kept = value - widen(sent, WIRE)
    tl.store(out_indices_ptr + slot, inside.to(tl.int16), mask=won)
    kept = tl.where(magnitude_bits(value) < INFINITE, kept, 0.0)  # what is not finite has gone whole
    store_state(residual_ptr + index, kept, won, HALF)
    if MASK_VELOCITY:
        velocity_ptr += half_offset(parity_ptr, half_numel, 1, HAS_PARITY)
        store_state(velocity_ptr + index, tl.zeros((CHUNK,), tl.float32), won, HALF)

    if first + CHUNK >= candidates:  # the pages after the last candidate, no stale memory on the wire, the header
        total = before + count
        last = tl.load(indices_ptr + candidates - 1, mask=candidates > 0, other=-PAGE) // PAGE
        for later in range(last + 1, pages + 1, CHUNK):
            after = later + tl.arange(0, CHUNK)
            tl.store(starts_ptr + after, total, mask=after <= pages)
        for tail in range(total, num_values, CHUNK):
            unused = tail + tl.arange(0, CHUNK)
            tl.store(out_indices_ptr + unused, tl.zeros((CHUNK,), tl.int16), mask=unused < num_values)
            if not IS_SIGNED:
                tl.store(values_ptr + unused, narrow(tl.zeros((CHUNK,), tl.float32), WIRE), mask=unused < num_values)
        fill_header(
            address_ptr, flag_ptr, seed_ptr, header_ptr, tl.load(offsets_ptr + num_blocks), num_values, num_segments,
            words, VERSION, FIRST,
        )  # fmt: skip


def pack_payload(
    segments: Segments,
    operands: Operands,
    keys: Tensor,  # i64 (capacity,)
    indices: Tensor,  # i64 (capacity,)
    offsets: Tensor,  # i64 (blocks + 1,)
    thresholds: Tensor,  # i64 (scopes,)
    velocity: Tensor | None,  # in-out: f32 or bf16 (padded,), None: not masked
    residual: Tensor,  # in-out: f32 or bf16 (padded,)
    flag: Tensor,  # in-out: i32 (1,): a candidate was not finite; reset
    seed: Tensor,  # in-out: i32 (1,): the bucket's step, increased by one
    parity: Tensor | None,  # i32 (1,): as above
    shared: Tensor,  # scratch: i64 (1 + 2 ceil(capacity / PACK),), zeros at first
    starts: Tensor,  # out: i32 (pages + 1,): first value of every page, and their number
    out_indices: Tensor,  # out: i16 (k,): index inside the page, as unsigned 16 bits
    values: Tensor,  # out: f32, bf16 or f16 (k,); zeros past the last. ``signed``: in, f32 (1,): the scale
    header: Tensor,  # out: i32 (HEADER_WORDS + ceil(segments / 32),)
    *,
    signed: bool = False,
    drawn: bool = False,
) -> None:
    """Move candidates with key >= threshold to the payload, in index order; zero residual and velocity there.

    Values of 16 bits are rounded to nearest, finite ones to a finite one; what that loses stays in the residual.

    ``signed``: all are sent as the scale with their sign, which is bit 15 of the index, and pages are ``SIGNED_PAGE``.
    What differs from the scale stays. Nothing below half of it is sent, states have 32 bits.

    ``drawn``: keys are of drawn weights, and their threshold is no winner's. What is below it without its weight is
    sent as that threshold; nothing is kept.
    """
    assert not (signed and residual.itemsize == 2), "what stays would be rounded"
    programs, page = -(-keys.numel() // PACK), SIGNED_PAGE if signed else PAGE
    launch(
        _pack_payload_kernel, programs, keys,
        keys, indices, segments.block_table, offsets, thresholds, operands.addresses, parity,
        velocity, residual, flag, seed,
        shared,
        starts, out_indices, values, header,
        keys.numel(), segments.num_blocks, programs, segments.pages_of(page), out_indices.numel(), len(segments.numels),
        header.numel() - HEADER_WORDS, segments.padded_numel,
        PER_TENSOR=segments.per_tensor, MASK_VELOCITY=velocity is not None, HAS_PARITY=parity is not None,
        HALF=residual.itemsize == 2, IS_SIGNED=signed, IS_DRAWN=drawn, WIRE=ELEMENT[values.dtype],
        VERSION=SIGNED if signed else ENCODING[values.dtype], FIRST=HEADER_WORDS, PAGE=page, LOOK_BACK=_LOOK_BACK,
        CHUNK=PACK, BLOCK=BLOCK, shape="page",
    )  # fmt: skip

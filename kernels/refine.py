"""From marks to payload: list the candidates, find the k-th key of every scope, pack the winners, clear their state.

    candidates = entries that the pass has marked              (a few k, in index order)
    T          = k-th largest candidate key of the scope       (all candidates where there are no more than k)
    winners    = candidates with key >= T  -> payload;  residual <- what the payload's rounding lost, velocity <- 0

Work proportional to k, but for a look at the marks, in five launches. Exact: keys are distinct, so the k largest are
one well-defined set.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch, weighing
from fusedcomp.kernels.digits import COPIES, DIGIT_BINS, pick, pick_among, take_histogram
from fusedcomp.kernels.elements import half_offset, load_state, narrow, narrow_clamped, store_state, widen
from fusedcomp.kernels.headers import ENCODING, HEADER_WORDS, SIGNED, fill_header
from fusedcomp.kernels.keys import DRAW_UNIT, INFINITE, magnitude_bits, selection_key, weighted
from fusedcomp.kernels.order import last_arrival, offset_before, start_order
from fusedcomp.kernels.segments import BLOCK, PAGE, SIGNED_PAGE, WORDS, Operands, Segments

_LIST = 8  # blocks whose candidates a program lists
PACK = 512  # candidates a program looks at
SCAN = 1024  # blocks a program scans
_LOOK_BACK = 256
_NO_LIMIT = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit(do_not_specialize=["programs"])  # for 1 and a loop that never runs triton 3.6 fails
def _scan_counts_kernel(
    counts_ptr,  # in
    shared_ptr,  # scratch
    offsets_ptr,  # out
    num_blocks, programs,
    CHUNK: tl.constexpr, LOOK_BACK: tl.constexpr,
):  # fmt: skip
    program, number = start_order(shared_ptr, programs)
    block = program * CHUNK + tl.arange(0, CHUNK)
    count = tl.load(counts_ptr + block, mask=block < num_blocks, other=0)
    total = tl.sum(count)
    before = offset_before(shared_ptr, programs, program, total, number, LOOK_BACK)
    tl.store(offsets_ptr + block, before + tl.cumsum(count) - count, mask=block < num_blocks)
    if program == programs - 1:
        tl.store(offsets_ptr + num_blocks, before + total)


@triton.jit
def _population(bits):
    """How many bits are set."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["num_blocks"])
def _list_candidates_kernel(
    marks_ptr, offsets_ptr,  # in
    indices_ptr,  # out
    capacity, num_blocks,
    WORDS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    word = tl.arange(0, BLOCKS * WORDS)
    # 0, but the compiler cannot know: with an address of unknown alignment a thread reads single words, which is how
    # it stores single indices. Otherwise all values would change threads at every turn of the loop.
    nothing = num_blocks >> 31
    exists = word < (num_blocks - first) * WORDS
    bits = tl.load(marks_ptr + first * WORDS + nothing + word, mask=exists, other=0).to(tl.uint32, bitcast=True)
    count = _population(bits)
    slot = tl.cumsum(count) - count
    before = tl.load(offsets_ptr + first)
    free = capacity - before
    for _ in range(0, tl.max(count)):
        rest = bits & (bits - 1)
        lowest = bits ^ rest  # a power of two: its exponent is the place
        place = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        index = first * (WORDS * 32) + (word * 32 + place)
        tl.store(indices_ptr + before + slot, index, mask=(bits != 0) & (slot < free))
        bits = rest
        slot += 1


@triton.jit
def _share(part_ptr, offsets_ptr, capacity, part):
    """A part's scope and the range of its candidates: equal shares of the scope's, wherever they are crowded."""
    row = part_ptr + 5 * tl.cast(part, tl.int64)
    first = tl.minimum(tl.load(offsets_ptr + tl.load(row + 1)), capacity)
    last = tl.minimum(tl.load(offsets_ptr + tl.load(row + 2)), capacity)
    number, parts = tl.load(row + 3), tl.load(row + 4)
    begin = first + (last - first) * number // parts
    end = first + (last - first) * (number + 1) // parts
    return tl.load(row), parts, first, begin, end


@triton.jit
def _count_candidates_kernel(
    part_ptr, offsets_ptr, indices_ptr, residual_ptr, weight_ptr, seed_ptr, parity_ptr, rank_ptr, threshold_ptr,  # in
    width_ptr,
    histogram_ptr, ticket_ptr,  # scratch
    keys_ptr, bounds_ptr, flag_ptr,  # out
    capacity, half_numel,
    HAS_PARITY: tl.constexpr, HAS_WEIGHTS: tl.constexpr, IS_DRAWN: tl.constexpr, HALF: tl.constexpr,
    BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    scope, parts, _, begin, end = _share(part_ptr, offsets_ptr, capacity, part)
    least = tl.load(threshold_ptr + scope)
    width = tl.load(width_ptr + scope)
    seed = tl.load(seed_ptr)
    residual_ptr += half_offset(parity_ptr, half_numel, 1, HAS_PARITY)
    counted = tl.zeros((DIGIT_BINS,), tl.int32)
    for chunk in range(begin, end, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        index = tl.load(indices_ptr + at, mask=at < end, other=0)
        residual = load_state(residual_ptr + index, at < end, HALF)
        ranked = weighted(residual, weight_ptr, index, seed, at < end, HAS_WEIGHTS, IS_DRAWN)
        key = selection_key(ranked, index, seed, HALF and not (HAS_WEIGHTS or IS_DRAWN))
        tl.store(keys_ptr + at, key, mask=at < end)
        digit = tl.minimum((key - least) >> width, DIGIT_BINS - 1).to(tl.int32)
        counted += tl.histogram(digit, DIGIT_BINS, mask=at < end)
        tl.store(flag_ptr + tl.zeros_like(digit), 1, mask=(at < end) & ((key >> 32) >= INFINITE))
    _add(histogram_ptr + scope * BINS, part, counted)
    if last_arrival(ticket_ptr + scope, parts):
        histogram, rank = _all_counts(histogram_ptr + scope * BINS), tl.load(rank_ptr + scope)
        rank = tl.where(tl.sum(histogram) > rank, rank, 0)  # 0: no more candidates than asked for, all of them
        _bound(histogram, bounds_ptr + 4 * scope, least, tl.full((), _NO_LIMIT, tl.int64), rank, width.to(tl.int64))


@triton.jit
def _add(histogram_ptr, part, counted):
    """A part's counts, to one of the copies."""
    bins = (part % COPIES) * DIGIT_BINS + tl.arange(0, DIGIT_BINS)
    tl.atomic_add(histogram_ptr + bins, counted, mask=counted > 0, sem="relaxed")


@triton.jit
def _all_counts(histogram_ptr):
    """All parts' counts, which are taken away."""
    copies = take_histogram(histogram_ptr, COPIES * DIGIT_BINS)
    return tl.sum(tl.reshape(copies, (COPIES, DIGIT_BINS)), 0)


@triton.jit
def _bound(histogram, bounds_ptr, low, high, rank, width):
    """The bin of the rank-th largest key: where it begins and ends, the key's rank in it, its bits."""
    bits = tl.full((), 63, tl.int64)  # the last bin has no end, unless there was one before
    if rank > 0:
        digit, rank, _ = pick(histogram, rank, DIGIT_BINS)
        low += digit << width
        if (digit < DIGIT_BINS - 1) | (high < _NO_LIMIT):
            high = low + (tl.full((), 1, tl.int64) << width)
            bits = width
    tl.store(bounds_ptr, low)
    tl.store(bounds_ptr + 1, high)
    tl.store(bounds_ptr + 2, rank)
    tl.store(bounds_ptr + 3, bits)


@triton.jit
def _count_again_kernel(
    part_ptr, offsets_ptr, keys_ptr, width_ptr,  # in
    bounds_ptr,  # in-out
    histogram_ptr, ticket_ptr,  # scratch
    capacity,
    BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    scope, parts, _, begin, end = _share(part_ptr, offsets_ptr, capacity, part)
    bounds_ptr += 4 * scope
    low, high, rank = tl.load(bounds_ptr), tl.load(bounds_ptr + 1), tl.load(bounds_ptr + 2)
    width = tl.maximum(tl.load(width_ptr + scope) - 8, 0)
    if rank > 0:
        counted = tl.zeros((DIGIT_BINS,), tl.int32)
        for chunk in range(begin, end, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            key = tl.load(keys_ptr + at, mask=at < end, other=-1)
            near = (key >= low) & (key < high)
            digit = tl.minimum((key - low) >> width, DIGIT_BINS - 1)
            counted += tl.histogram(tl.where(near, digit, 0).to(tl.int32), DIGIT_BINS, mask=near)
        _add(histogram_ptr + scope * BINS, part, counted)
        if last_arrival(ticket_ptr + scope, parts):
            _bound(_all_counts(histogram_ptr + scope * BINS), bounds_ptr, low, high, rank, width.to(tl.int64))


@triton.jit
def _select_candidates_kernel(
    part_ptr, offsets_ptr, keys_ptr, bounds_ptr,  # in
    near_ptr, count_ptr, ticket_ptr,  # scratch
    threshold_ptr,  # out
    capacity,
    CHUNK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    scope, parts, origin, begin, end = _share(part_ptr, offsets_ptr, capacity, tl.program_id(0))
    low = tl.load(bounds_ptr + 4 * scope)
    high = tl.load(bounds_ptr + 4 * scope + 1)
    rank = tl.load(bounds_ptr + 4 * scope + 2)
    if rank > 0:  # bring together the candidates of the k-th one's bin, in any order
        for chunk in range(begin, end, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            key = tl.load(keys_ptr + at, mask=at < end, other=-1)
            near = (key >= low) & (key < high)
            count = tl.sum(near.to(tl.int32))
            if count > 0:
                slot = tl.atomic_add(count_ptr + scope, count, sem="relaxed") + tl.cumsum(near.to(tl.int32)) - 1
                tl.store(near_ptr + origin + slot, key, mask=near)
    # Where there are no more candidates than asked for, what let them in stays the threshold.
    if last_arrival(ticket_ptr + scope, parts) & (rank > 0):
        end = origin + tl.load(count_ptr + scope, cache_modifier=".cg")
        shift = tl.load(bounds_ptr + 4 * scope + 3)  # in the bin's own coordinates: as many bits as it is wide
        digits, excess = rank * 0, rank
        while (excess > 0) & (shift > 0):
            below = tl.maximum(shift - 8, 0)
            digits, rank, excess = pick_among(near_ptr, origin, end, low, digits, rank, shift, below, ALONE)
            shift = below
        threshold = high
        for chunk in range(origin, end, ALONE):  # the smallest of those that have these digits is the k-th
            at = chunk + tl.arange(0, ALONE)
            key = tl.load(near_ptr + at, mask=at < end, other=0, cache_modifier=".cg")
            same = (at < end) & (((key - low) >> shift) == (digits >> shift))
            threshold = tl.minimum(threshold, tl.min(tl.where(same, key, _NO_LIMIT)))
        tl.debug_barrier()  # all have read the count
        tl.store(count_ptr + scope, 0)
        tl.store(threshold_ptr + scope, threshold)


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


def list_candidates(
    segments: Segments,
    counts: Tensor,  # i32 (blocks,)
    marks: Tensor,  # i32 (blocks, WORDS)
    shared: Tensor,  # scratch: i64 (1 + 2 ceil(blocks / SCAN),), zeros at first
    offsets: Tensor,  # out: i64 (blocks + 1,): running number of candidates
    indices: Tensor,  # out: i64 (capacity,), padded index
) -> None:
    """The candidates of all blocks in index order; what exceeds the capacity stays in the residual."""
    programs = -(-segments.num_blocks // SCAN)
    launch(
        _scan_counts_kernel, programs, counts,
        counts,
        shared,
        offsets,
        segments.num_blocks, programs,
        CHUNK=SCAN, LOOK_BACK=_LOOK_BACK, shape="page",
    )  # fmt: skip
    launch(
        _list_candidates_kernel, -(-segments.num_blocks // _LIST), marks,
        marks, offsets,
        indices,
        indices.numel(), segments.num_blocks,
        WORDS=WORDS, BLOCKS=_LIST, shape="page",
    )  # fmt: skip


def select_candidates(
    segments: Segments,
    offsets: Tensor,  # i64 (blocks + 1,)
    indices: Tensor,  # i64 (capacity,)
    residual: Tensor,  # f32 or bf16 (padded,)
    weights: Tensor | None,  # f32 (padded,), in (0, 1]: entries are ranked by weight * |residual|. None: all are 1.
    # i32 (1,): they are drawn, by whom it says (keys.py)
    seed: Tensor,  # i32 (1,)
    parity: Tensor | None,  # i32 (1,): the states are two halves, of which the pass has written the other
    ranks: Tensor,  # i64 (scopes,), >= 1
    widths: Tensor,  # i32 (scopes,)
    histograms: Tensor,  # scratch: i32 (scopes, BINS), zeros before and after
    bounds: Tensor,  # scratch: i64 (scopes, 4): the k-th key is the rank-th of those from .. to; bits between them
    near: Tensor,  # scratch: i64 (capacity,): those keys
    near_counts: Tensor,  # scratch: i32 (scopes,), zeros before and after
    tickets: Tensor,  # scratch: i32 (scopes,), zeros before and after
    thresholds: Tensor,  # in-out: i64 (scopes,): least candidate; ranks-th largest where there are more
    keys: Tensor,  # out: i64 (capacity,)
    flag: Tensor,  # in-out: i32 (1,): set to 1 if a candidate is not finite
    *,
    coarse: bool = False,
) -> None:
    """The ranks-th largest key of every scope: one look at all candidates, another at those of its bin.

    ``coarse``: bins are wide. All programs count those of its bin once more, since one of them looks at what is left:
    a bin of 300,000 took it 2 ms.
    """
    launch(
        _count_candidates_kernel, segments.part_table.shape[0], keys,
        segments.part_table, offsets, indices, residual, weights, seed, parity, ranks, thresholds, widths,
        histograms, tickets,
        keys, bounds, flag,
        keys.numel(), segments.padded_numel,
        HAS_PARITY=parity is not None, **weighing(weights), HALF=residual.itemsize == 2,
        BINS=histograms.shape[1], CHUNK=1024, shape="item",
    )  # fmt: skip
    if coarse:
        launch(
            _count_again_kernel, segments.part_table.shape[0], keys,
            segments.part_table, offsets, keys, widths,
            bounds,
            histograms, tickets,
            keys.numel(),
            BINS=histograms.shape[1], CHUNK=1024, shape="item",
        )  # fmt: skip
    launch(
        _select_candidates_kernel, segments.part_table.shape[0], keys,
        segments.part_table, offsets, keys, bounds,
        near, near_counts, tickets,
        thresholds,
        keys.numel(),
        CHUNK=1024, ALONE=2048, shape="item",
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

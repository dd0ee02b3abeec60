"""From marks to a threshold: list the candidates, find the k-th key of every scope.

    candidates = entries that the pass has marked              (a few k, in index order)
    T          = k-th largest candidate key of the scope       (all candidates where there are no more than k)
    (pack.py: winners = candidates with key >= T)

Work proportional to k, but for a look at the marks, in four launches; five where bins are coarse. Exact: keys are
distinct, so the k largest are one well-defined set.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import launch, weighing
from fusedcomp.kernels.digits import COPIES, DIGIT_BINS, pick, pick_among, take_histogram
from fusedcomp.kernels.elements import half_offset, load_state
from fusedcomp.kernels.keys import INFINITE, selection_key, weighted
from fusedcomp.kernels.order import last_arrival, offset_before, start_order
from fusedcomp.kernels.segments import WORDS, Segments

_LIST = 8  # blocks whose candidates a program lists
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

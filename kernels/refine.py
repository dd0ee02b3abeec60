"""From candidates to payload: gather them, find the k-th key of every scope, pack the winners, clear their state.

    candidates = entries with key >= sampled threshold         (a few k, in index order)
    T          = k-th largest candidate key of the scope       (all candidates where there are no more than k)
    winners    = candidates with key >= T  -> payload;  residual, velocity <- 0 there

Work proportional to k. Exact: keys are distinct, so the k largest are one well-defined set.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import launch
from fusedcomp.kernels.accumulate import selection_key
from fusedcomp.kernels.compress import STAGE
from fusedcomp.kernels.segments import BLOCK, BLOCKS_PER_PAGE, PAGE, Segments

DIGITS = 5
_BITS = 8
BINS = 1 << _BITS
_CHUNK = 1024  # candidates at a time; packing holds twice as much of each, and spills 8 bytes at 1024


@triton.jit
def _gather_candidates_kernel(
    block_table_ptr, numel_ptr, counts_ptr, offsets_ptr, staged_ptr, residual_ptr, threshold_ptr, seed_ptr,  # in
    keys_ptr, indices_ptr,  # out
    capacity,
    PER_TENSOR: tl.constexpr, STAGE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + block)
    seed = tl.load(seed_ptr)
    position = tl.load(offsets_ptr + block)
    if (count > 0) & (count <= STAGE):
        slot = tl.arange(0, STAGE)
        index = block * BLOCK + tl.load(staged_ptr + block * STAGE + slot, mask=slot < count, other=0).to(tl.int64)
        key = selection_key(tl.load(residual_ptr + index), index, seed)
        mask = (slot < count) & (position + slot < capacity)
        tl.store(keys_ptr + position + slot, key, mask=mask)
        tl.store(indices_ptr + position + slot, index, mask=mask)
    if count > STAGE:  # the row could not hold them (an embedding's hot rows): read the block again
        segment = tl.load(block_table_ptr + 2 * block)
        start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
        remaining = tl.load(numel_ptr + segment) - start
        least = tl.load(threshold_ptr + segment * PER_TENSOR)
        for chunk in range(0, BLOCK, CHUNK):
            offset = chunk + tl.arange(0, CHUNK)
            index = block * BLOCK + offset
            key = selection_key(tl.load(residual_ptr + index), index, seed)
            chosen = (key >= least) & (offset < remaining)
            slot = position + tl.cumsum(chosen.to(tl.int64)) - 1
            mask = chosen & (slot < capacity)
            tl.store(keys_ptr + slot, key, mask=mask)
            tl.store(indices_ptr + slot, index, mask=mask)
            position += tl.sum(chosen.to(tl.int64))


@triton.jit
def _pick(histogram, low, rank, shift, BINS: tl.constexpr):
    """Radix selection, one digit: the rank-th key's digit joins ``low``; rank becomes that inside its bin.

    A rank of 0 says that all keys of the bin win: those from ``low`` on are the k largest.
    """
    bins = tl.arange(0, BINS)
    at_least = tl.cumsum(histogram, reverse=True)
    pick = tl.sum((at_least >= rank).to(tl.int32)) - 1
    here = tl.sum(tl.where(bins == pick, histogram, 0)).to(tl.int64)
    rank = rank - (tl.sum(tl.where(bins == pick, at_least, 0)).to(tl.int64) - here)
    return low | (pick.to(tl.int64) << shift), tl.where(here == rank, 0, rank)


@triton.jit
def _count_digits_kernel(
    keys_ptr, offsets_ptr, item_ptr, scope_ptr, rank_ptr, state_ptr, histogram_ptr,  # in
    new_state_ptr, new_histogram_ptr,  # out
    capacity, shift,
    FIRST: tl.constexpr, BITS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    scope = tl.load(item_ptr + 3 * item)
    block = tl.load(item_ptr + 3 * item + 1)
    begin = tl.minimum(tl.load(offsets_ptr + block), capacity)
    end = tl.minimum(tl.load(offsets_ptr + tl.load(item_ptr + 3 * item + 2)), capacity)
    scope_block = tl.load(scope_ptr + scope)
    bins = tl.arange(0, BINS)
    if FIRST:
        first = tl.minimum(tl.load(offsets_ptr + scope_block), capacity)
        last = tl.minimum(tl.load(offsets_ptr + tl.load(scope_ptr + scope + 1)), capacity)
        rank = tl.load(rank_ptr + scope)
        rank = tl.where(last - first > rank, rank, 0)
        low = rank * 0
    else:  # every program of a scope draws the same conclusion from the digit before
        low = tl.load(state_ptr + 2 * scope)
        rank = tl.load(state_ptr + 2 * scope + 1)
        if rank > 0:
            low, rank = _pick(tl.load(histogram_ptr + scope * BINS + bins), low, rank, shift + BITS, BINS)
    if block == scope_block:
        tl.store(new_state_ptr + 2 * scope, low)
        tl.store(new_state_ptr + 2 * scope + 1, rank)
    if (rank > 0) & (begin < end):
        histogram = tl.zeros((BINS,), tl.int32)
        for chunk in range(begin, end, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            key = tl.load(keys_ptr + at, mask=at < end, other=-1)
            inside = (key >> (shift + BITS)) == (low >> (shift + BITS))
            histogram += tl.histogram(((key >> shift) & (BINS - 1)).to(tl.int32), BINS, mask=inside)
        tl.atomic_add(new_histogram_ptr + scope * BINS + bins, histogram, mask=histogram > 0)


@triton.jit
def _select_threshold_kernel(
    keys_ptr, offsets_ptr, scope_ptr, rank_ptr, state_ptr, histogram_ptr,  # in
    threshold_ptr,  # out
    capacity, shift,
    HAS_STATE: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    scope = tl.program_id(0)
    begin = tl.minimum(tl.load(offsets_ptr + tl.load(scope_ptr + scope)), capacity)
    end = tl.minimum(tl.load(offsets_ptr + tl.load(scope_ptr + scope + 1)), capacity)
    rank = tl.load(rank_ptr + scope)
    rank = tl.where(end - begin > rank, rank, 0)  # no more keys than asked: all of them
    low = rank * 0
    if HAS_STATE:  # noqa: SIM102  a constant decides what is compiled, a value what runs
        if rank > 0:
            low = tl.load(state_ptr + 2 * scope)
            rank = tl.load(state_ptr + 2 * scope + 1)
            if rank > 0:
                bins = tl.arange(0, BINS)
                low, rank = _pick(tl.load(histogram_ptr + scope * BINS + bins), low, rank, shift, BINS)
    while (shift > 0) & (rank > 0):
        parent = shift
        shift = tl.maximum(shift - 8, 0)
        histogram = tl.zeros((256,), tl.int32)
        for chunk in range(begin, end, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            key = tl.load(keys_ptr + at, mask=at < end, other=-1)
            inside = (key >> parent) == (low >> parent)
            # The last digit may overlap the one before: its upper bits are then the same for all keys inside.
            histogram += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=inside)
        low, rank = _pick(histogram, low, rank, shift, 256)
    tl.store(threshold_ptr + scope, tl.maximum(low, 0))  # fewer samples with a gradient than asked: all


@triton.jit
def _winning(
    keys_ptr, indices_ptr, block_table_ptr, threshold_ptr, at, end, PER_TENSOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Index and verdict of the candidates ``at``."""
    mask = at < end
    key = tl.load(keys_ptr + at, mask=mask, other=-1)
    index = tl.load(indices_ptr + at, mask=mask, other=0)
    if PER_TENSOR:
        segment = tl.load(block_table_ptr + 2 * (index // BLOCK), mask=mask, other=0)
        threshold = tl.load(threshold_ptr + segment)
        won = mask & (key >= threshold)
    else:
        won = mask & (key >= tl.load(threshold_ptr))
    return index, won


@triton.jit
def _count_winners_kernel(
    keys_ptr, indices_ptr, block_table_ptr, offsets_ptr, threshold_ptr,  # in
    winners_ptr,  # out
    capacity, num_blocks,
    BLOCKS_PER_PAGE: tl.constexpr, PER_TENSOR: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0).to(tl.int64)
    begin = tl.minimum(tl.load(offsets_ptr + page * BLOCKS_PER_PAGE), capacity)
    end = tl.load(offsets_ptr + tl.minimum((page + 1) * BLOCKS_PER_PAGE, num_blocks))
    end = tl.minimum(end, capacity)
    count = tl.zeros((CHUNK,), tl.int32)
    for chunk in range(begin, end, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        _, won = _winning(keys_ptr, indices_ptr, block_table_ptr, threshold_ptr, at, end, PER_TENSOR, BLOCK)
        count += won.to(tl.int32)
    tl.store(winners_ptr + page, tl.sum(count))


@triton.jit
def _pack_payload_kernel(
    keys_ptr, indices_ptr, block_table_ptr, offsets_ptr, threshold_ptr, winners_ptr, cumulative_ptr,  # in
    velocity_ptr, residual_ptr,  # in-out
    starts_ptr, out_indices_ptr, values_ptr,  # out
    capacity, num_blocks, num_pages, num_values,
    BLOCKS_PER_PAGE: tl.constexpr, PER_TENSOR: tl.constexpr, MASK_VELOCITY: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0).to(tl.int64)
    begin = tl.minimum(tl.load(offsets_ptr + page * BLOCKS_PER_PAGE), capacity)
    end = tl.load(offsets_ptr + tl.minimum((page + 1) * BLOCKS_PER_PAGE, num_blocks))
    end = tl.minimum(end, capacity)
    total = tl.load(cumulative_ptr + page)
    position = total - tl.load(winners_ptr + page)
    tl.store(starts_ptr + page, position.to(tl.int32))
    for chunk in range(begin, end, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        index, won = _winning(keys_ptr, indices_ptr, block_table_ptr, threshold_ptr, at, end, PER_TENSOR, BLOCK)
        slot = position + tl.cumsum(won.to(tl.int32)) - 1
        value = tl.load(residual_ptr + index, mask=won, other=0.0)
        tl.store(out_indices_ptr + slot, (index % PAGE).to(tl.int16), mask=won)
        tl.store(values_ptr + slot, value, mask=won)
        tl.store(residual_ptr + index, tl.zeros((CHUNK,), tl.float32), mask=won)
        if MASK_VELOCITY:
            tl.store(velocity_ptr + index, tl.zeros((CHUNK,), tl.float32), mask=won)
        position += tl.sum(won.to(tl.int32))
    if page == num_pages - 1:  # the end of the last page, and no stale memory on the wire
        tl.store(starts_ptr + num_pages, total.to(tl.int32))
        for tail in range(total, num_values, CHUNK):
            unused = tail + tl.arange(0, CHUNK)
            tl.store(out_indices_ptr + unused, tl.zeros((CHUNK,), tl.int16), mask=unused < num_values)
            tl.store(values_ptr + unused, tl.zeros((CHUNK,), tl.float32), mask=unused < num_values)


def gather_candidates(
    segments: Segments,
    counts: Tensor,  # i64 (blocks,)
    staged: Tensor,  # i16 (blocks, STAGE)
    residual: Tensor,  # f32 (padded,)
    thresholds: Tensor,  # i64 (scopes,)
    seed: Tensor,  # i32 (1,)
    offsets: Tensor,  # in-out: i64 (blocks + 1,), [0] is 0: running number of candidates
    keys: Tensor,  # out: i64 (capacity,)
    indices: Tensor,  # out: i64 (capacity,), padded index
) -> None:
    """The candidates of all blocks in index order; what exceeds the capacity stays in the residual."""
    torch.cumsum(counts, 0, out=offsets[1:])
    launch(
        _gather_candidates_kernel, segments.num_blocks, residual,
        segments.block_table, segments.numel_table, counts, offsets, staged, residual, thresholds, seed,
        keys, indices,
        keys.numel(),
        PER_TENSOR=segments.per_tensor, STAGE=STAGE, CHUNK=256, BLOCK=BLOCK, warps="gather",
    )  # fmt: skip


def select_threshold(
    keys: Tensor,  # i64 (capacity,)
    offsets: Tensor,  # i64 (m,): ascending positions in keys, clamped to the capacity
    scopes: Tensor,  # i64 (scopes + 1,): scope s owns keys offsets[scopes[s]] .. offsets[scopes[s + 1]]
    ranks: Tensor,  # i64 (scopes,), >= 1
    thresholds: Tensor,  # out: i64 (scopes,)
) -> None:
    """A threshold that the rank largest keys of every scope reach and no other; 0 where a scope has no more.

    One program per scope: for some ten thousand keys.
    """
    launch(
        _select_threshold_kernel, thresholds.numel(), keys,
        keys, offsets, scopes, ranks, None, None,
        thresholds,
        keys.numel(), 63,
        HAS_STATE=False, BINS=BINS, CHUNK=_CHUNK * 4, warps="select",
    )  # fmt: skip


def select_candidates(
    segments: Segments,
    keys: Tensor,  # i64 (capacity,)
    offsets: Tensor,  # i64 (blocks + 1,)
    ranks: Tensor,  # i64 (scopes,), >= 1
    states: Tensor,  # scratch: i64 (DIGITS, scopes, 2)
    histograms: Tensor,  # scratch: i32 (DIGITS, scopes, BINS)
    thresholds: Tensor,  # out: i64 (scopes,)
) -> None:
    """``select_threshold`` for the candidates of a bucket, on all multiprocessors.

    Five digits of 8 bits are the magnitude and 9 bits of the hash; what they leave open, one program per scope decides.
    """
    histograms.zero_()
    shift = 63
    for digit in range(DIGITS):
        shift -= _BITS
        before = (states[digit - 1], histograms[digit - 1]) if digit else (None, None)
        launch(
            _count_digits_kernel, segments.item_table.shape[0], keys,
            keys, offsets, segments.item_table, segments.scope_blocks, ranks, *before,
            states[digit], histograms[digit],
            keys.numel(), shift,
            FIRST=digit == 0, BITS=_BITS, BINS=BINS, CHUNK=_CHUNK, warps="page",
        )  # fmt: skip
    launch(
        _select_threshold_kernel, thresholds.numel(), keys,
        keys, offsets, segments.scope_blocks, ranks, states[-1], histograms[-1],
        thresholds,
        keys.numel(), shift,
        HAS_STATE=True, BINS=BINS, CHUNK=_CHUNK * 4, warps="select",
    )  # fmt: skip


def pack_payload(
    segments: Segments,
    keys: Tensor,  # i64 (capacity,)
    indices: Tensor,  # i64 (capacity,)
    offsets: Tensor,  # i64 (blocks + 1,)
    thresholds: Tensor,  # i64 (scopes,)
    velocity: Tensor | None,  # in-out: f32 (padded,), None: not masked
    residual: Tensor,  # in-out: f32 (padded,)
    winners: Tensor,  # scratch: i32 (2, pages)
    starts: Tensor,  # out: i32 (pages + 1,): first value of every page, and their number
    out_indices: Tensor,  # out: i16 (k,): index inside the page, as unsigned 16 bits
    values: Tensor,  # out: f32 (k,); zeros past the last
) -> None:
    """Move candidates with key >= threshold to the payload, in index order; zero residual and velocity there."""
    common: dict[str, Any] = dict(
        BLOCKS_PER_PAGE=BLOCKS_PER_PAGE, PER_TENSOR=segments.per_tensor, BLOCK=BLOCK, warps="page"
    )
    launch(
        _count_winners_kernel, segments.num_pages, keys,
        keys, indices, segments.block_table, offsets, thresholds,
        winners[0],
        keys.numel(), segments.num_blocks,
        CHUNK=_CHUNK, **common,
    )  # fmt: skip
    torch.cumsum(winners[0], 0, dtype=torch.int32, out=winners[1])
    launch(
        _pack_payload_kernel, segments.num_pages, keys,
        keys, indices, segments.block_table, offsets, thresholds, winners[0], winners[1],
        velocity, residual,
        starts, out_indices, values,
        keys.numel(), segments.num_blocks, segments.num_pages, values.numel(),
        MASK_VELOCITY=velocity is not None, PAGE=PAGE, CHUNK=_CHUNK // 2, **common,
    )  # fmt: skip

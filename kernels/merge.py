"""Merging payloads: their sum as a vector with marks, from which a payload is selected as from a residual.

    vector    <- vector + values           for row 0, 1, ..., each rounding once; where something was added is marked
    (refine.py: the marked entries are candidates; the k largest become a payload and leave the vector)
    residual  <- residual + vector         what is left, on the one rank that keeps it;  vector <- 0

One program per page adds up the rows one after another, so that whoever merges the same payloads finds the same sums.
Marks and counts are integers: atomics leave the same ones in any order.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch
from fusedcomp.kernels.elements import half_offset, widen
from fusedcomp.kernels.segments import BLOCK, BLOCKS_PER_PAGE, PAGE, WORDS, Segments

_CHUNK = 512  # entries of a row at a time


@triton.jit
def _page_range(starts_ptr, page, num_values):
    """Where the values of a page begin and end; clamped, for they are a peer's numbers."""
    begin = tl.minimum(tl.maximum(tl.load(starts_ptr + page), 0), num_values)
    end = tl.minimum(tl.maximum(tl.load(starts_ptr + page + 1), 0), num_values)
    return begin, end


@triton.jit
def _places(indices_ptr, at, end, page, num_blocks, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Padded index of the entries ``at``, and which of them exist: a peer's index may be anything."""
    inside = tl.load(indices_ptr + at, mask=at < end, other=0).to(tl.int32) & 0xFFFF
    index = page * PAGE + inside
    return index, (at < end) & (index < tl.cast(num_blocks, tl.int64) * BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _sum_payloads_kernel(
    starts_ptr, indices_ptr, values_ptr,  # in
    vector_ptr,  # in-out
    counts_ptr, marks_ptr,  # out
    rows, num_values, starts_stride, indices_stride, values_stride, num_blocks,
    WIRE: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr, WORDS: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0).to(tl.int64)
    block = page * BLOCKS_PER_PAGE + tl.arange(0, BLOCKS_PER_PAGE)
    tl.store(counts_ptr + block, tl.zeros((BLOCKS_PER_PAGE,), tl.int32), mask=block < num_blocks)
    word = page * BLOCKS_PER_PAGE * WORDS + tl.arange(0, BLOCKS_PER_PAGE * WORDS)
    tl.store(marks_ptr + word, tl.zeros((BLOCKS_PER_PAGE * WORDS,), tl.int32), mask=word < num_blocks * WORDS)
    tl.debug_barrier()  # before anybody adds to them
    for number in range(rows):
        row = tl.cast(number, tl.int64)
        begin, end = _page_range(starts_ptr + row * starts_stride, page, num_values)
        for chunk in range(begin, end, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            index, exists = _places(indices_ptr + row * indices_stride, at, end, page, num_blocks, PAGE, BLOCK)
            value = widen(tl.load(values_ptr + row * values_stride + at, mask=exists, other=0), WIRE)
            total = tl.load(vector_ptr + index, mask=exists, other=0.0)
            tl.store(vector_ptr + index, total + value, mask=exists)
            bit = tl.full((CHUNK,), 1, tl.int32) << (index % 32).to(tl.int32)
            marked = tl.atomic_or(marks_ptr + index // 32, bit, mask=exists, sem="relaxed")
            first = exists & ((marked & bit) == 0)
            tl.atomic_add(counts_ptr + index // BLOCK, tl.full((CHUNK,), 1, tl.int32), mask=first, sem="relaxed")
        tl.debug_barrier()  # the next row reads what this one wrote


@triton.jit(do_not_specialize=["place", "places"])
def _keep_rest_kernel(
    offsets_ptr, indices_ptr, parity_ptr,  # in
    vector_ptr, residual_ptr,  # in-out
    capacity, place, places, num_blocks, half_numel,
    HAS_PARITY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    end = tl.minimum(tl.load(offsets_ptr + num_blocks), capacity)
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    residual_ptr += half_offset(parity_ptr, half_numel, 1, HAS_PARITY)
    index = tl.load(indices_ptr + at, mask=at < end, other=0)
    rest = tl.load(vector_ptr + index, mask=at < end, other=0.0)
    tl.store(vector_ptr + index, tl.zeros((CHUNK,), tl.float32), mask=at < end)
    mine = (at < end) & (index % places == place) & (rest != 0.0)
    kept = tl.load(residual_ptr + index, mask=mine, other=0.0)
    tl.store(residual_ptr + index, kept + rest, mask=mine)


@triton.jit
def _mask_winners_kernel(
    winner_starts_ptr, winner_indices_ptr, sent_starts_ptr, sent_indices_ptr, parity_ptr,  # in
    vector_ptr, velocity_ptr,  # in-out
    num_winners, num_sent, num_blocks, half_numel,
    HAS_PARITY: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0).to(tl.int64)
    velocity_ptr += half_offset(parity_ptr, half_numel, 1, HAS_PARITY)
    begin, end = _page_range(winner_starts_ptr, page, num_winners)
    first, last = _page_range(sent_starts_ptr, page, num_sent)
    for chunk in range(begin, end, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        index, exists = _places(winner_indices_ptr, at, end, page, num_blocks, PAGE, BLOCK)
        tl.store(vector_ptr + index, tl.full((CHUNK,), 1.0, tl.float32), mask=exists)
    tl.debug_barrier()
    for chunk in range(first, last, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        index, exists = _places(sent_indices_ptr, at, last, page, num_blocks, PAGE, BLOCK)
        won = exists & (tl.load(vector_ptr + index, mask=exists, other=0.0) != 0.0)
        tl.store(velocity_ptr + index, tl.zeros((CHUNK,), tl.float32), mask=won)
    tl.debug_barrier()
    for chunk in range(begin, end, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        index, exists = _places(winner_indices_ptr, at, end, page, num_blocks, PAGE, BLOCK)
        tl.store(vector_ptr + index, tl.zeros((CHUNK,), tl.float32), mask=exists)


def sum_payloads(
    segments: Segments,
    starts: Tensor,  # i32 (rows, pages + 1)
    indices: Tensor,  # i16 (rows, k)
    values: Tensor,  # f32, bf16 or f16 (rows, k)
    vector: Tensor,  # in-out: f32 (padded,), zeros before
    counts: Tensor,  # out: i32 (blocks,): marked elements of every block
    marks: Tensor,  # out: i32 (blocks, WORDS): a bit per element, as of the pass: has any row an entry there
) -> None:
    """Add up the rows in their order."""
    launch(
        _sum_payloads_kernel, segments.num_pages, values,
        starts, indices, values,
        vector,
        counts, marks,
        values.shape[0], values.shape[1], starts.stride(0), indices.stride(0), values.stride(0), segments.num_blocks,
        WIRE=ELEMENT[values.dtype], BLOCKS_PER_PAGE=BLOCKS_PER_PAGE, WORDS=WORDS, PAGE=PAGE, CHUNK=_CHUNK, BLOCK=BLOCK,
        shape="page",
    )  # fmt: skip


def keep_rest(
    offsets: Tensor,  # i64 (blocks + 1,): the last is the number of candidates
    indices: Tensor,  # i64 (capacity,): theirs, each once
    parity: Tensor | None,  # i32 (1,): there are two halves, of which the pass has written the other
    vector: Tensor,  # in-out: f32 (padded,): what is left of the sums; zeros after
    residuals: Tensor,  # in-out: f32 (halves, padded), rows may be strided
    *,
    place: int,
    places: int,
) -> None:
    """What is left of the candidates goes to the residual where the index is ``place`` modulo ``places``."""
    launch(
        _keep_rest_kernel, -(-indices.numel() // _CHUNK), vector,
        offsets, indices, parity,
        vector, residuals,
        indices.numel(), place, places, offsets.numel() - 1, residuals.stride(0),
        HAS_PARITY=parity is not None, CHUNK=_CHUNK, shape="page",
    )  # fmt: skip


def mask_winners(
    segments: Segments,
    winner_starts: Tensor,  # i32 (pages + 1,)
    winner_indices: Tensor,  # i16 (k,)
    sent_starts: Tensor,  # i32 (pages + 1,)
    sent_indices: Tensor,  # i16 (k,)
    parity: Tensor | None,  # i32 (1,): as above
    vector: Tensor,  # scratch: f32 (padded,), zeros before and after
    velocity: Tensor,  # in-out: f32 (padded,)
) -> None:
    """Zero the velocity of what this rank has sent and all ranks apply."""
    launch(
        _mask_winners_kernel, segments.num_pages, vector,
        winner_starts, winner_indices, sent_starts, sent_indices, parity,
        vector, velocity,
        winner_indices.numel(), sent_indices.numel(), segments.num_blocks, segments.padded_numel,
        HAS_PARITY=parity is not None, PAGE=PAGE, CHUNK=_CHUNK, BLOCK=BLOCK, shape="page",
    )  # fmt: skip

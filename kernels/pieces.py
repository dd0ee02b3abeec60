"""Pieces of a payload: its pages are cut into ranges of equal length, one for every owner, and joined again.

    cut     entries of a range -> its piece, as many as there is room for;  residual <- residual + the others
    join    pieces in order -> one payload of all pages

Where a range has more entries than a piece has room for, a run of them is left out, which begins at another place in
every step, so that each gets its turn. One program per page.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch
from fusedcomp.kernels.elements import half_offset, widen
from fusedcomp.kernels.keys import tie_hash
from fusedcomp.kernels.segments import PAGE, Segments

_CHUNK = 512  # entries at a time


@triton.jit
def _left_out(number, first, wrapped, run):
    """Is an entry of a range left out, and how many before it are; of [0, wrapped) and [first, first + run)."""
    out = (number < wrapped) | ((number >= first) & (number < first + run))
    before = tl.minimum(number, wrapped) + tl.minimum(tl.maximum(number - first, 0), run)
    return out, before


@triton.jit(do_not_specialize=["pages_each"])
def _cut_payload_kernel(
    starts_ptr, indices_ptr, values_ptr, seed_ptr, parity_ptr,  # in
    residual_ptr,  # in-out
    out_starts_ptr, out_indices_ptr, out_values_ptr,  # out
    pages_each, num_pages, room, starts_stride, indices_stride, values_stride, half_numel,
    HAS_PARITY: tl.constexpr, WIRE: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0)
    owner = page // pages_each
    origin = owner * pages_each
    last = tl.minimum(origin + pages_each, num_pages)
    row = tl.cast(owner, tl.int64)
    out_starts_ptr += row * starts_stride
    out_indices_ptr += row * indices_stride
    out_values_ptr += row * values_stride
    residual_ptr += half_offset(parity_ptr, half_numel, 1, HAS_PARITY)
    base = tl.load(starts_ptr + origin)
    count = tl.load(starts_ptr + last) - base
    excess = tl.maximum(count - room, 0)
    first = (tie_hash(row, tl.load(seed_ptr)).to(tl.int64) % tl.maximum(count, 1)).to(tl.int32)
    wrapped = tl.maximum(first + excess - count, 0)
    run = excess - wrapped
    begin, end = tl.load(starts_ptr + page) - base, tl.load(starts_ptr + page + 1) - base
    _, earlier = _left_out(begin, first, wrapped, run)
    tl.store(out_starts_ptr + page - origin, begin - earlier)
    for chunk in range(begin, end, CHUNK):
        number = chunk + tl.arange(0, CHUNK)
        exists = number < end
        inside = tl.load(indices_ptr + base + number, mask=exists, other=0)
        value = tl.load(values_ptr + base + number, mask=exists, other=0)
        out, before = _left_out(number, first, wrapped, run)
        tl.store(out_indices_ptr + number - before, inside, mask=exists & ~out)
        tl.store(out_values_ptr + number - before, value, mask=exists & ~out)
        place = residual_ptr + tl.cast(page, tl.int64) * PAGE + (inside.to(tl.int32) & 0xFFFF)
        kept = tl.load(place, mask=exists & out, other=0.0)
        tl.store(place, kept + widen(value, WIRE), mask=exists & out)
    if page == last - 1:  # the pages that the last range lacks, no stale memory on the wire
        sent = count - excess
        for later in range(last - origin, pages_each + 1):
            tl.store(out_starts_ptr + later, sent)
        for tail in range(sent, room, CHUNK):
            unused = tail + tl.arange(0, CHUNK)
            tl.store(out_indices_ptr + unused, tl.zeros((CHUNK,), tl.int16), mask=unused < room)
            tl.store(out_values_ptr + unused, tl.zeros((CHUNK,), out_values_ptr.dtype.element_ty), mask=unused < room)


@triton.jit(do_not_specialize=["pages_each", "rows"])
def _join_pieces_kernel(
    starts_ptr, indices_ptr, values_ptr,  # in
    out_starts_ptr, out_indices_ptr, out_values_ptr,  # out
    pages_each, rows, num_pages, room, starts_stride, indices_stride, values_stride,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0)
    owner = page // pages_each
    lane = tl.arange(0, ROWS)
    held = tl.load(starts_ptr + lane.to(tl.int64) * starts_stride + pages_each, mask=lane < rows, other=0)
    held = tl.minimum(tl.maximum(held, 0), room)  # a peer's numbers, here and below
    base = tl.sum(tl.where(lane < owner, held, 0))
    mine = tl.sum(tl.where(lane == owner, held, 0))
    row = tl.cast(owner, tl.int64)
    at = starts_ptr + row * starts_stride + page - owner * pages_each
    begin = tl.minimum(tl.maximum(tl.load(at), 0), mine)
    end = tl.minimum(tl.maximum(tl.load(at + 1), 0), mine)
    tl.store(out_starts_ptr + page, base + begin)
    if page == num_pages - 1:
        tl.store(out_starts_ptr + num_pages, base + end)
    for chunk in range(begin, end, CHUNK):
        number = chunk + tl.arange(0, CHUNK)
        inside = tl.load(indices_ptr + row * indices_stride + number, mask=number < end, other=0)
        value = tl.load(values_ptr + row * values_stride + number, mask=number < end, other=0)
        tl.store(out_indices_ptr + base + number, inside, mask=number < end)
        tl.store(out_values_ptr + base + number, value, mask=number < end)


def cut_payload(
    segments: Segments,
    starts: Tensor,  # i32 (pages + 1,)
    indices: Tensor,  # i16 (k,)
    values: Tensor,  # f32, bf16 or f16 (k,)
    seed: Tensor,  # i32 (1,)
    parity: Tensor | None,  # i32 (1,): there are two halves, of which the pass has written the other
    residual: Tensor,  # in-out: f32 (halves * padded,)
    out_starts: Tensor,  # out: i32 (owners, pages each + 1)
    out_indices: Tensor,  # out: i16 (owners, room)
    out_values: Tensor,  # out: as values (owners, room); zeros past the last
) -> None:
    """Deal a payload out to the owners of its pages."""
    launch(
        _cut_payload_kernel, segments.num_pages, values,
        starts, indices, values, seed, parity,
        residual,
        out_starts, out_indices, out_values,
        out_starts.shape[1] - 1, segments.num_pages, out_values.shape[1], out_starts.stride(0), out_indices.stride(0),
        out_values.stride(0), segments.padded_numel,
        HAS_PARITY=parity is not None, WIRE=ELEMENT[values.dtype], PAGE=PAGE, CHUNK=_CHUNK, shape="page",
    )  # fmt: skip


def join_pieces(
    segments: Segments,
    starts: Tensor,  # i32 (owners, pages each + 1)
    indices: Tensor,  # i16 (owners, room)
    values: Tensor,  # f32, bf16 or f16 (owners, room)
    out_starts: Tensor,  # out: i32 (pages + 1,)
    out_indices: Tensor,  # out: i16 (owners * room,)
    out_values: Tensor,  # out: as values (owners * room,); what is past the last is left as it was
) -> None:
    """One payload of all pages, without the gaps between pieces."""
    launch(
        _join_pieces_kernel, segments.num_pages, values,
        starts, indices, values,
        out_starts, out_indices, out_values,
        starts.shape[1] - 1, starts.shape[0], segments.num_pages, values.shape[1], starts.stride(0),
        indices.stride(0), values.stride(0),
        ROWS=triton.next_power_of_2(starts.shape[0]), CHUNK=_CHUNK, shape="page",
    )  # fmt: skip

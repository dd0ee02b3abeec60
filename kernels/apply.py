"""Apply: add the payloads of all ranks to the parameters, in rank order, in work proportional to what was sent.

    fp32 parameters    param <- param - (lr / world) * value        for rank 0, 1, ..., each rounding once
    16-bit parameters  sum   <- sum + value                         for rank 0, 1, ..., in fp32
                       param <- param - (lr / world) * sum          rounded once

One program per page takes the ranks one after another, so every parameter sees the same additions in the same order
on every rank: no atomics, bit-identical replicas. An embedding's hot pages are shared out among several programs.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch
from fusedcomp.kernels.elements import element_pointer, narrow, widen
from fusedcomp.kernels.headers import HEADER_WORDS, take_headers
from fusedcomp.kernels.segments import BLOCK, PAGE, SIGNED_PAGE, Operands, Segments

_CHUNK = 512  # entries of a rank at a time; a page to which a rank sent more is crowded
_SHARES = 4  # programs for a crowded page; in other pages all but the first have nothing to do,
_FEW_PAGES = 2048  # which takes 2 ns of the whole each: too much where a bucket has more pages than this


@triton.jit
def _locate(
    inside, mask, page, alone, segment, first, block_table_ptr, address_ptr, numel_ptr, num_segments, num_blocks,
    ELEMENT: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pointers to the parameters at indices inside a page, and which of those exist: a peer's index may be anything.

    alone: the page is inside one segment, so that no table need be read entry by entry.
    """
    if alone:
        offset = first.to(tl.int64) * BLOCK + inside
        numel = tl.load(numel_ptr + segment)
        address = tl.load(address_ptr + num_segments + segment)
        exists = mask & (offset < numel)
        pointer = element_pointer(address, offset, ELEMENT)
    else:
        block = page * BLOCKS_PER_PAGE + inside // BLOCK
        exists = mask & (block < num_blocks)
        segments = tl.load(block_table_ptr + 2 * block, mask=exists, other=0)
        offset = tl.load(block_table_ptr + 2 * block + 1, mask=exists, other=0).to(tl.int64) * BLOCK + inside % BLOCK
        exists = exists & (offset < tl.load(numel_ptr + segments, mask=exists, other=0))
        addresses = tl.load(address_ptr + num_segments + segments, mask=exists, other=0)
        pointer = element_pointer(addresses, offset, ELEMENT)
    return pointer, exists


@triton.jit
def _ranges(
    starts_ptr, indices_ptr, page, share, world, starts_stride, indices_stride, num_values,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, SHARES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """(2 RANKS,) where a share of what every rank sent for a page begins, then where it ends.

    A peer's numbers never lead to a load or a store outside: positions are clamped here, indices masked in ``_locate``.
    """
    lane = tl.arange(0, 2 * RANKS)
    row = (lane % RANKS).to(tl.int64)
    starts_ptr += row * starts_stride + page
    low = tl.minimum(tl.maximum(tl.load(starts_ptr, mask=row < world, other=0), 0), num_values)
    high = tl.minimum(tl.maximum(tl.load(starts_ptr + 1, mask=row < world, other=0), 0), num_values)
    crowded = tl.max(high - low) > CHUNK
    if SHARES == 1 or not crowded:
        low = tl.where(lane < RANKS, low, high)
        low = tl.where(share == 0, low, 0)
    else:
        # The rank that sent most is cut into equal parts, the others at the same places, by bisection: indices ascend.
        most = tl.argmax(high - low, 0)
        first = tl.sum(tl.where(lane == most, low, 0))
        count = tl.sum(tl.where(lane == most, high, 0)) - first
        part = share + lane // RANKS
        at = indices_ptr + (most % RANKS).to(tl.int64) * indices_stride + first + count * part // SHARES
        least = tl.load(at, mask=part < SHARES, other=0).to(tl.int32) & (PAGE - 1)
        least = tl.where(part == 0, 0, tl.where(part == SHARES, PAGE, least))
        while tl.max(high - low) > 0:
            middle = (low + high) // 2
            search = low < high
            inside = tl.load(indices_ptr + row * indices_stride + middle, mask=search, other=0)
            before = (inside.to(tl.int32) & (PAGE - 1)) < least
            low = tl.where(search & before, middle + 1, low)
            high = tl.where(search & ~before, middle, high)
    return low


@triton.jit
def _sent(values_ptr, at, mask, word, IS_SIGNED: tl.constexpr, WIRE: tl.constexpr, PAGE: tl.constexpr):
    """The values of a rank's entries; IS_SIGNED: its one value, with the sign that is above the index."""
    if IS_SIGNED:
        scale = widen(tl.load(values_ptr), WIRE)
        value = tl.where((word & PAGE) != 0, -scale, scale)
    else:
        value = widen(tl.load(values_ptr + at, mask=mask, other=0), WIRE)
    return value


@triton.jit
def _apply_payloads_kernel(
    block_table_ptr, address_ptr, numel_ptr, starts_ptr, indices_ptr, values_ptr, lr_ptr, header_ptr,  # in
    found_inf_ptr,
    status_ptr,  # in-out
    present_ptr,  # out
    sums_ptr,  # scratch
    inverse_world, world, num_values, starts_stride, indices_stride, values_stride, header_stride, num_segments,
    num_blocks,
    HAS_HEADERS: tl.constexpr, HAS_VERDICT: tl.constexpr, IS_SIGNED: tl.constexpr, ELEMENT: tl.constexpr,
    WIRE: tl.constexpr, FIRST: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    SHARES: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0) % SHARES
    page = (tl.program_id(0) // SHARES).to(tl.int64)
    if HAS_HEADERS:  # noqa: SIM102  a constant decides what is compiled, a value what runs
        if tl.program_id(0) == 0:
            take_headers(
                header_ptr, status_ptr, None, present_ptr, world, header_stride, num_segments, False, FIRST, 128
            )  # fmt: skip
    if HAS_VERDICT:  # noqa: SIM102
        if tl.load(found_inf_ptr) != 0.0:
            return
    edges = _ranges(
        starts_ptr, indices_ptr, page, share, world, starts_stride, indices_stride, num_values,
        PAGE, CHUNK, SHARES, RANKS,
    )  # fmt: skip
    lane = tl.arange(0, 2 * RANKS)
    if tl.max(edges) == 0:
        return
    scale = tl.load(lr_ptr) * inverse_world
    first_block = page * BLOCKS_PER_PAGE
    last_block = tl.minimum(first_block + BLOCKS_PER_PAGE, num_blocks) - 1
    segment = tl.load(block_table_ptr + 2 * first_block)
    first = tl.load(block_table_ptr + 2 * first_block + 1)
    alone = tl.load(block_table_ptr + 2 * last_block) == segment
    SUMS: tl.constexpr = not ELEMENT.is_fp32()
    for sweep in tl.static_range(2 if SUMS else 1):
        for rank in range(world):
            row = tl.cast(rank, tl.int64)
            begin = tl.sum(tl.where(lane == rank, edges, 0))
            end = tl.sum(tl.where(lane == rank + RANKS, edges, 0))
            for chunk in range(begin, end, CHUNK):
                at = chunk + tl.arange(0, CHUNK)
                mask = at < end
                word = tl.load(indices_ptr + row * indices_stride + at, mask=mask, other=0).to(tl.int32)
                inside = word & (PAGE - 1)
                pointer, exists = _locate(
                    inside, mask, page, alone, segment, first, block_table_ptr, address_ptr, numel_ptr, num_segments,
                    num_blocks, ELEMENT, BLOCKS_PER_PAGE, BLOCK,
                )  # fmt: skip
                if SUMS and sweep == 0:
                    total = sums_ptr + page * PAGE + inside
                    value = _sent(values_ptr + row * values_stride, at, mask, word, IS_SIGNED, WIRE, PAGE)
                    tl.store(total, tl.load(total, mask=exists, other=0.0) + value, mask=exists)
                else:
                    if SUMS:  # taken by the first rank that sent the entry; 0 for the others
                        total = sums_ptr + page * PAGE + inside
                        value = tl.load(total, mask=exists, other=0.0)
                        tl.store(total, tl.zeros((CHUNK,), tl.float32), mask=exists)
                    else:
                        value = _sent(values_ptr + row * values_stride, at, mask, word, IS_SIGNED, WIRE, PAGE)
                    param = widen(tl.load(pointer, mask=exists, other=0), ELEMENT)
                    tl.store(pointer, narrow(param - scale * value, ELEMENT), mask=exists)
            tl.debug_barrier()  # the next rank reads what this one wrote


def apply_payloads(
    segments: Segments,
    operands: Operands,  # in-out: the parameters
    starts: Tensor,  # i32 (world, pages + 1)
    indices: Tensor,  # i16 (world, k)
    values: Tensor,  # f32, bf16 or f16 (world, k); ``signed``: f32 (world, 1)
    lr: Tensor,  # f32 (1,), device scalar
    headers: Tensor | None,  # i32 (world, words), rows may be strided; None: have been read
    status: Tensor,  # in-out: i32 (3,), as for ``headers.read_headers``
    found_inf: Tensor | None,  # f32 (1,): not 0: nothing is to be done (verdict.py); all headers have been read then
    present: Tensor,  # out: i32 (segments,)
    sums: Tensor | None,  # scratch for 16-bit parameters: f32 (padded,), zeros before and after
    *,
    inverse_world: float,
    signed: bool = False,
) -> None:
    """``param -= lr * inverse_world * value`` for all entries of all ranks, rank by rank; reads headers on the way.

    ``signed``: as for ``pack_payload``.
    """
    assert headers is None or found_inf is None, "the verdict is passed on headers that have been read"
    page = SIGNED_PAGE if signed else PAGE
    pages = segments.pages_of(page)
    shares = _SHARES if pages <= _FEW_PAGES else 1
    launch(
        _apply_payloads_kernel, pages * shares, values,
        segments.block_table, operands.addresses, segments.numel_table, starts, indices, values, lr, headers,
        found_inf,
        status,
        present,
        sums,
        inverse_world, values.shape[0], indices.shape[1], starts.stride(0), indices.stride(0), values.stride(0),
        0 if headers is None else headers.stride(0), len(segments.numels), segments.num_blocks,
        HAS_HEADERS=headers is not None, HAS_VERDICT=found_inf is not None, IS_SIGNED=signed,
        ELEMENT=ELEMENT[operands.dtype], WIRE=ELEMENT[values.dtype], FIRST=HEADER_WORDS, BLOCKS_PER_PAGE=page // BLOCK,
        PAGE=page, CHUNK=_CHUNK, SHARES=shares, RANKS=triton.next_power_of_2(values.shape[0]), BLOCK=BLOCK,
        shape="page",
    )  # fmt: skip

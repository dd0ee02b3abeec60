"""Headers: what ranks tell each other beside the values. Who had gradients, whether all were finite, who failed.

A sparse payload carries words (presence a bit per segment); an all-reduced buffer carries a trailer of floats that add
up (presence a float per segment, then the number of ranks with a non-finite gradient, of ranks that failed, and sums
that tell whether all are at the same step).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import launch
from fusedcomp.kernels.segments import Operands

FORMAT_VERSION = 1
# The version word of a payload. Two of different types may have one size, and would be misread without a sign.
ENCODING = {torch.float32: FORMAT_VERSION, torch.bfloat16: FORMAT_VERSION + 256, torch.float16: FORMAT_VERSION + 512}
SIGNED = FORMAT_VERSION + 768  # no values, but one magnitude for all, and signs
NON_FINITE = tl.constexpr(1)  # bits of the flags word
FAILED = tl.constexpr(2)
A_RANK_FAILED = tl.constexpr(1)  # bits of the second word of the status
RANKS_DIFFER = tl.constexpr(2)
HEADER_WORDS = 4  # version, number of candidates, flags, step; then the presence words
TRAILER_WORDS = 6  # ranks that are not finite, that failed; sums of step % 64, of its square, and of the same of % 61


@triton.jit
def _told_by_sums(first, second, world):
    """Did all ranks add the same number? From the sums of what each added and of its square (Cauchy and Schwarz)."""
    first, second = first.to(tl.int64), second.to(tl.int64)
    return second * world == first * first


@triton.jit
def fill_header(
    address_ptr, flag_ptr, seed_ptr, header_ptr, candidates, asked, num_segments, words,
    VERSION: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """A payload's header, by the program that packs its end; resets the flag, ends the bucket's step."""
    seed = tl.load(seed_ptr)
    # Payloads of equal size differ by a few entries at most: the low bits tell how many were asked for.
    tl.store(header_ptr, VERSION + ((asked & 0x7FFF) << 16))
    tl.store(header_ptr + 1, candidates.to(tl.int32))
    tl.store(header_ptr + 2, tl.where(tl.load(flag_ptr) != 0, NON_FINITE, 0))
    tl.store(header_ptr + 3, seed)
    lane = tl.arange(0, 32)
    for word in range(words):
        segment = word * 32 + lane
        present = tl.load(address_ptr + segment, mask=segment < num_segments, other=0) != 0
        tl.store(header_ptr + FIRST + word, tl.sum(present.to(tl.int32) << lane))
    tl.store(flag_ptr, 0)
    tl.store(seed_ptr, seed + 1)


@triton.jit
def _write_header_kernel(
    address_ptr,  # in
    flag_ptr, seed_ptr,  # in-out
    header_ptr,  # out
    entries, num_segments, words,
    VERSION: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    entries = tl.cast(entries, tl.int64)
    fill_header(address_ptr, flag_ptr, seed_ptr, header_ptr, entries, entries, num_segments, words, VERSION, FIRST)


@triton.jit
def _write_failure_kernel(
    seed_ptr,  # in-out
    header_ptr,  # out
    VERSION: tl.constexpr,
):  # fmt: skip
    seed = tl.load(seed_ptr)
    tl.store(header_ptr, VERSION)
    tl.store(header_ptr + 2, FAILED)
    tl.store(header_ptr + 3, seed)
    tl.store(seed_ptr, seed + 1)


@triton.jit
def take_headers(
    header_ptr, status_ptr, nonfinite_ptr, present_ptr, world, stride, num_segments,
    HAS_NONFINITE: tl.constexpr, FIRST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What all ranks' headers say together, by one program."""
    flags = 0
    # Version and step as one number, of the ranks that did not fail: those sent nothing that could be misread.
    least = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    most = -least
    for rank in range(world):
        header = header_ptr + tl.cast(rank, tl.int64) * stride
        told = tl.load(header + 2)
        origin = (tl.load(header).to(tl.int64) << 32) + tl.load(header + 3)
        least = tl.where((told & FAILED) != 0, least, tl.minimum(least, origin))
        most = tl.where((told & FAILED) != 0, most, tl.maximum(most, origin))
        flags = flags | told
    if (flags & NON_FINITE) != 0:
        tl.store(status_ptr, tl.load(status_ptr) + 1)
        if HAS_NONFINITE:
            tl.store(nonfinite_ptr, 1)
    if (flags & FAILED) != 0:
        tl.store(status_ptr + 1, tl.load(status_ptr + 1) | A_RANK_FAILED)
    if least < most:
        tl.store(status_ptr + 1, tl.load(status_ptr + 1) | RANKS_DIFFER)
    for chunk in range(0, num_segments, CHUNK):
        segment = chunk + tl.arange(0, CHUNK)
        mask = segment < num_segments
        seen = tl.zeros((CHUNK,), tl.int32)
        for rank in range(world):
            words = header_ptr + tl.cast(rank, tl.int64) * stride + FIRST
            seen = seen | ((tl.load(words + segment // 32, mask=mask, other=0) >> (segment % 32)) & 1)
        tl.store(present_ptr + segment, seen, mask=mask)


@triton.jit
def _read_headers_kernel(
    header_ptr,  # in
    status_ptr, nonfinite_ptr,  # in-out
    present_ptr,  # out
    world, stride, num_segments,
    HAS_NONFINITE: tl.constexpr, FIRST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    take_headers(
        header_ptr, status_ptr, nonfinite_ptr, present_ptr, world, stride, num_segments, HAS_NONFINITE, FIRST, CHUNK
    )  # fmt: skip


@triton.jit
def _write_trailer_kernel(
    address_ptr,  # in
    flag_ptr, seed_ptr,  # in-out
    trailer_ptr,  # out
    num_segments,
    HAS_FAILED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    for chunk in range(0, num_segments, CHUNK):
        segment = chunk + tl.arange(0, CHUNK)
        mask = segment < num_segments
        present = tl.load(address_ptr + segment, mask=mask, other=0) != 0
        tl.store(trailer_ptr + segment, present.to(tl.float32), mask=mask)
    flag = tl.load(flag_ptr)
    tl.store(trailer_ptr + num_segments, (flag != 0).to(tl.float32))
    tl.store(trailer_ptr + num_segments + 1, 1.0 if HAS_FAILED else 0.0)
    seed = tl.load(seed_ptr)
    even, odd = (seed % 64).to(tl.float32), (seed % 61).to(tl.float32)
    tl.store(trailer_ptr + num_segments + 2, even)
    tl.store(trailer_ptr + num_segments + 3, even * even)
    tl.store(trailer_ptr + num_segments + 4, odd)
    tl.store(trailer_ptr + num_segments + 5, odd * odd)
    tl.store(flag_ptr, 0)
    tl.store(seed_ptr, seed + 1)


@triton.jit
def _read_trailer_kernel(
    trailer_ptr,  # in
    status_ptr, nonfinite_ptr,  # in-out
    present_ptr,  # out
    num_segments, world,
    HAS_NONFINITE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    for chunk in range(0, num_segments, CHUNK):
        segment = chunk + tl.arange(0, CHUNK)
        mask = segment < num_segments
        ranks = tl.load(trailer_ptr + segment, mask=mask, other=0.0)
        tl.store(present_ptr + segment, (ranks > 0.0).to(tl.int32), mask=mask)
    if tl.load(trailer_ptr + num_segments) > 0.0:
        tl.store(status_ptr, tl.load(status_ptr) + 1)
        if HAS_NONFINITE:
            tl.store(nonfinite_ptr, 1)
    if tl.load(trailer_ptr + num_segments + 1) > 0.0:
        tl.store(status_ptr + 1, tl.load(status_ptr + 1) | A_RANK_FAILED)
    steps_ptr = trailer_ptr + num_segments + 2
    even = _told_by_sums(tl.load(steps_ptr), tl.load(steps_ptr + 1), world)
    odd = _told_by_sums(tl.load(steps_ptr + 2), tl.load(steps_ptr + 3), world)
    if not (even & odd):
        tl.store(status_ptr + 1, tl.load(status_ptr + 1) | RANKS_DIFFER)


def write_header(
    operands: Operands,
    flag: Tensor,  # in-out: i32 (1,); reset
    seed: Tensor,  # in-out: i32 (1,): the bucket's step, increased by one
    header: Tensor,  # out: i32 (HEADER_WORDS + ceil(segments / 32),)
    *,
    entries: int,
    wire_dtype: torch.dtype,
) -> None:
    """The header of a payload whose ``entries`` were known beforehand: all that were asked for are there."""
    launch(
        _write_header_kernel, 1, header,
        operands.addresses,
        flag, seed,
        header,
        entries, len(operands.params), header.numel() - HEADER_WORDS,
        VERSION=ENCODING[wire_dtype], FIRST=HEADER_WORDS, shape="small",
    )  # fmt: skip


def write_failure(
    seed: Tensor,  # in-out: i32 (1,): the bucket's step, increased by one
    header: Tensor,  # in-out: i32 (HEADER_WORDS + ceil(segments / 32),), zeros before
) -> None:
    """The header of a rank that failed: an empty payload that says so, and has no encoding to name."""
    launch(_write_failure_kernel, 1, header, seed, header, VERSION=FORMAT_VERSION, shape="small")


def read_headers(
    headers: Tensor,  # i32 (world, words), rows may be strided
    status: Tensor,  # in-out: i32 (3,): non-finite buckets so far; 1: a rank failed, 2: ranks differ; steps skipped
    nonfinite: Tensor | None,  # in-out: i32 (1,): set to 1 if any rank's gradient was not finite
    present: Tensor,  # out: i32 (segments,): 1 where any rank had a gradient
) -> None:
    """Take together what all ranks wrote into their headers; those that did not fail have one encoding and one step."""
    launch(
        _read_headers_kernel, 1, headers,
        headers,
        status, nonfinite,
        present,
        headers.shape[0], headers.stride(0), present.numel(),
        HAS_NONFINITE=nonfinite is not None, FIRST=HEADER_WORDS, CHUNK=32, shape="small",
    )  # fmt: skip


def write_trailer(
    operands: Operands,
    flag: Tensor,  # in-out: i32 (1,); reset
    seed: Tensor,  # in-out: i32 (1,): the bucket's step, increased by one
    trailer: Tensor,  # out: f32 (segments + TRAILER_WORDS,)
    *,
    failed: bool,
) -> None:
    """Fill the trailer of a buffer that is about to be summed over ranks."""
    launch(
        _write_trailer_kernel, 1, trailer,
        operands.addresses,
        flag, seed,
        trailer,
        len(operands.params),
        HAS_FAILED=failed, CHUNK=32, shape="small",
    )  # fmt: skip


def read_trailer(
    trailer: Tensor,  # f32 (segments + TRAILER_WORDS,), summed over ranks
    status: Tensor,  # in-out: i32 (3,)
    nonfinite: Tensor | None,  # in-out: i32 (1,)
    present: Tensor,  # out: i32 (segments,)
    *,
    world: int,
) -> None:
    """What ``read_headers`` does, from a summed trailer."""
    launch(
        _read_trailer_kernel, 1, trailer,
        trailer,
        status, nonfinite,
        present,
        present.numel(), world,
        HAS_NONFINITE=nonfinite is not None, CHUNK=32, shape="small",
    )  # fmt: skip

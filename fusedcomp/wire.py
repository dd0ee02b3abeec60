"""The wire format, version 1: what one rank sends for one bucket, byte by byte. The only place that knows bytes.

A sparse payload is one flat buffer of little-endian fields, in this order, padded with zeros to 16 bytes:

    field     type  count                  content
    header    i32   4                      version + 256 * type of the values (0: f32, 1: bf16, 2: f16,
                                           3: signs of one magnitude)
                                           + 65536 * (k % 32768); number of candidates: entries
                                           that reached the threshold, sent or not (CAT: of
                                           entries it wanted to send); flags (1: a gradient was not
                                           finite, 2: this rank failed, sends nothing and names no type); the
                                           bucket's step
    presence  u32   ceil(segments / 32)    bit s % 32 of word s // 32: segment s had a gradient on this rank
    norms     f32   2 * segments or 0      squared norms of the gradients, then of the parameters (LARS only)
    starts    u32   pages + 1              position of the first value of every 65536-element page of the padded flat
                                           space; then the number of values
    values    f32   k                      in index order; zeros past the last; bf16 or f16 if wire_dtype says so
    indices   u16   k                      index inside the page

Where entries are signs (CAT's variant="sparse_quantized"):

    starts    u32   pages + 1              of pages of 32768 elements
    values    f32   1                      the magnitude of all entries
    indices   u16   k                      index inside the page; bit 15: the entry is negative

The host knows k: TopK's and BlockTopK's by the density, Threshold's and CAT's room by the headers of eight steps before
(sizing.py, rooms.py). Sizes are never exchanged; payloads of equal size differ in k by a few at most.
Ranks whose first or last header word differs from the others' make all ranks raise (docs/decisions/0013-encodings.md).
A dense buffer is summed, not gathered:

    values    f32   numel                  without padding
    trailer   f32   segments + 6           ranks with a gradient, per segment; ranks with a non-finite gradient;
                                           ranks that failed; sums of step % 64, of its square, of step % 61 and
                                           of its square, from which differing steps are seen
    norms     f32   2 * segments or 0      as above; only rank 0 fills in the parameters' half

With TopK's collective="tree" payloads are swapped in pairs, each with a trailer (and norms) behind it: two payloads
become one, and their trailers are summed as in a dense buffer. There the step is increased by the header's first word,
so that the sums tell encodings too; headers of merged payloads are not read.

With collective="split" a payload is cut into pieces, which have the same fields for the pages of a range, and a header
that is not filled in; what comes of a range is gathered as a payload of the range's pages, under its sender's header.

With ``dense_dtype=torch.bfloat16`` a dense buffer is gathered instead (narrow.py): header and presence as above, padded
to 16 bytes, then values of bf16 (numel), padded to 16 bytes.

RandomK's is one too, with k values in place of all: those drawn, in the order of their strata (kernels/draws.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fusedcomp.kernels.headers import HEADER_WORDS, TRAILER_WORDS


class Payload(NamedTuple):
    """Typed views of the payloads of ``world`` ranks; rows are strided."""

    header: Tensor  # i32 (world, words): header and presence
    norms: Tensor  # f32 (world, 2 * segments) or (world, 0)
    starts: Tensor  # i32 (world, pages + 1), the bits of u32
    values: Tensor  # f32, bf16 or f16 (world, k); of signs f32 (world, 1)
    indices: Tensor  # i16 (world, k), the bits of u16


@dataclass(frozen=True)
class PayloadLayout:
    """Sizes of a sparse payload."""

    segments: int
    pages: int
    k: int
    with_norms: bool
    wire_dtype: torch.dtype
    signed: bool = False  # entries are signs of one magnitude

    @property
    def _fields(self) -> tuple[tuple[str, torch.dtype, int], ...]:
        return (
            ("header", torch.int32, HEADER_WORDS + -(-self.segments // 32)),
            ("norms", torch.float32, 2 * self.segments if self.with_norms else 0),
            ("starts", torch.int32, self.pages + 1),
            ("values", self.wire_dtype, 1 if self.signed else self.k),
            ("indices", torch.int16, self.k),
        )

    @property
    def nbytes(self) -> int:
        """Bytes handed to the collective by one rank."""
        return -(-sum(count * dtype.itemsize for _, dtype, count in self._fields) // 16) * 16

    def views(self, buffer: Tensor) -> Payload:
        """Views of a u8 buffer of shape (world, nbytes)."""
        views, start = {}, 0
        for name, dtype, count in self._fields:
            first = start // dtype.itemsize
            views[name] = buffer.view(dtype)[:, first : first + count]
            start += count * dtype.itemsize
        return Payload(**views)


def dense_numel(segments: int, numel: int, with_norms: bool) -> int:
    """Floats in a dense buffer."""
    return numel + segments + TRAILER_WORDS + (2 * segments if with_norms else 0)


class Split(NamedTuple):
    """How the pages of a bucket are dealt out to owners, and what room pieces have: all ranks know it beforehand."""

    owners: int  # the first so many ranks own a range
    pages: int  # of every range; the last may have fewer
    room: int  # entries of a piece: twice an equal share
    share: int  # entries that come of a range

    @staticmethod
    def of(pages: int, k: int, world_size: int) -> "Split":
        """Ranges of as many pages as it takes to have no more of them than ranks."""
        each = -(-pages // world_size)
        owners = -(-pages // each)
        return Split(owners, each, min(k, -(-2 * k // owners)), -(-k // owners))


def payloads_received(collective: str, world_size: int) -> int:
    """How many payloads a rank receives at most."""
    if collective == "gather":
        return world_size - 1
    rounds = world_size.bit_length() - 1
    return rounds if world_size == 1 << rounds else rounds + 2  # "tree": folded in, and told the outcome


def dense_is_cheaper(payload_bytes: int, raw_bytes: int, world_size: int, collective: str = "gather") -> bool:
    """Would the payloads that a rank receives be at least what a ring all-reduce of the raw bucket moves?

    Per rank the gather receives (W - 1) payload, the all-reduce 2 (W - 1) / W raw. More than raw is never sent,
    whatever W: a gather sends its payload once, a tree one in every round.
    """
    count = payloads_received(collective, world_size)
    sent = payload_bytes * (1 if collective == "gather" else max(1, count))
    return _moves_as_much(count * payload_bytes, raw_bytes, world_size) or sent >= raw_bytes


def split_layouts(
    segments: int, pages: int, k: int, wire_dtype: torch.dtype, with_norms: bool, world_size: int
) -> tuple[Split, PayloadLayout, PayloadLayout]:
    """How a bucket is dealt out; a piece, and what comes of a range."""
    split = Split.of(pages, k, world_size)
    piece = PayloadLayout(segments, split.pages, split.room, False, wire_dtype)
    return split, piece, PayloadLayout(segments, split.pages, split.share, with_norms, wire_dtype)


def split_is_dearer(split: Split, piece_bytes: int, share_bytes: int, raw_bytes: int, world_size: int) -> bool:
    """``dense_is_cheaper`` of pieces and shares: an owner receives one of each from all others; never is more sent."""
    received = (world_size - 1) * (piece_bytes + share_bytes)
    sent = split.owners * piece_bytes + share_bytes
    return _moves_as_much(received, raw_bytes, world_size) or sent >= raw_bytes


def _moves_as_much(received_bytes: int, raw_bytes: int, world_size: int) -> bool:
    """Does a rank receive at least what a ring all-reduce of the raw bucket brings it?"""
    return world_size > 1 and received_bytes * world_size >= 2 * (world_size - 1) * raw_bytes

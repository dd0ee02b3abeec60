"""Twin of ``kernels/headers.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.headers import ENCODING, FORMAT_VERSION, HEADER_WORDS, TRAILER_WORDS
from fusedcomp.kernels.segments import Operands

NON_FINITE, FAILED = 1, 2
A_RANK_FAILED, RANKS_DIFFER = 1, 2


def _presence(operands: Operands) -> Tensor:
    return operands.addresses[0] != 0


def _bits(words: Tensor, count: int) -> Tensor:
    return ((words[..., None] >> torch.arange(32, device=words.device)) & 1).flatten(-2)[..., :count]


def end_payload(
    operands: Operands, flag: Tensor, seed: Tensor, header: Tensor, candidates: Tensor, asked: int, version: int
) -> None:
    """What ``fill_header`` does on the device."""
    header[0] = version + ((asked & 0x7FFF) << 16)
    header[1] = candidates
    header[2] = (flag[0] != 0) * NON_FINITE
    header[3] = seed[0]
    bits = torch.zeros((header.numel() - HEADER_WORDS) * 32, dtype=torch.int64, device=header.device)
    bits[: len(operands.params)] = _presence(operands).long()
    words = (bits.view(-1, 32) << torch.arange(32, device=header.device)).sum(1)
    header[HEADER_WORDS:] = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    flag.zero_()
    seed += 1


def write_header(
    operands: Operands, flag: Tensor, seed: Tensor, header: Tensor, *, entries: int, wire_dtype: torch.dtype
) -> None:
    end_payload(operands, flag, seed, header, header.new_tensor(entries), entries, ENCODING[wire_dtype])


def write_failure(seed: Tensor, header: Tensor) -> None:
    header[0] = FORMAT_VERSION
    header[2] = FAILED
    header[3] = seed[0]
    seed += 1


def read_headers(headers: Tensor, status: Tensor, nonfinite: Tensor | None, present: Tensor) -> None:
    broken = int(((headers[:, 2] & NON_FINITE) != 0).any())
    status[0] += broken
    if nonfinite is not None:
        nonfinite |= broken
    failed = (headers[:, 2] & FAILED) != 0
    status[1] |= int(failed.any()) * A_RANK_FAILED
    origins = headers[~failed][:, [0, 3]]  # version and step
    status[1] |= int((origins != origins[:1]).any()) * RANKS_DIFFER
    present.copy_(_bits(headers[:, HEADER_WORDS:], present.numel()).amax(0))


def write_trailer(operands: Operands, flag: Tensor, seed: Tensor, trailer: Tensor, *, failed: bool) -> None:
    trailer[:-TRAILER_WORDS] = _presence(operands).float()
    told = [(flag[0] != 0).float(), torch.full_like(trailer[0], float(failed))]
    for number in (seed[0] % 64, seed[0] % 61):
        told += [number.float(), number.float() ** 2]
    trailer[-TRAILER_WORDS:] = torch.stack(told)
    flag.zero_()
    seed += 1


def read_trailer(trailer: Tensor, status: Tensor, nonfinite: Tensor | None, present: Tensor, *, world: int) -> None:
    present.copy_(trailer[:-TRAILER_WORDS] > 0.0)
    broken, failed, even, even_squares, odd, odd_squares = map(int, trailer[-TRAILER_WORDS:].tolist())
    status[0] += int(broken > 0)
    if nonfinite is not None:
        nonfinite |= int(broken > 0)
    status[1] |= int(failed > 0) * A_RANK_FAILED
    same = even_squares * world == even**2 and odd_squares * world == odd**2
    status[1] |= (not same) * RANKS_DIFFER

"""Twin of ``kernels/headers.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.headers import FORMAT_VERSION, HEADER_WORDS
from fusedcomp.kernels.segments import Operands

NON_FINITE, FAILED = 1, 2
A_RANK_FAILED, RANKS_DIFFER = 1, 2


def _presence(operands: Operands) -> Tensor:
    return operands.addresses[0] != 0


def _bits(words: Tensor, count: int) -> Tensor:
    return ((words[..., None] >> torch.arange(32, device=words.device)) & 1).flatten(-2)[..., :count]


def end_payload(operands: Operands, flag: Tensor, seed: Tensor, header: Tensor, count: Tensor, version: int) -> None:
    """What ``fill_header`` does on the device."""
    header[0] = version
    header[1] = count
    header[2] = (flag[0] != 0) * NON_FINITE
    header[3] = seed[0]
    bits = torch.zeros((header.numel() - HEADER_WORDS) * 32, dtype=torch.int64, device=header.device)
    bits[: len(operands.params)] = _presence(operands).long()
    words = (bits.view(-1, 32) << torch.arange(32, device=header.device)).sum(1)
    header[HEADER_WORDS:] = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    flag.zero_()
    seed += 1


def write_failure(seed: Tensor, header: Tensor) -> None:
    header[0] = FORMAT_VERSION
    header[2] = FAILED
    header[3] = seed[0]
    seed += 1


def read_headers(headers: Tensor, status: Tensor, present: Tensor) -> None:
    status[0] += int(((headers[:, 2] & NON_FINITE) != 0).any())
    failed = (headers[:, 2] & FAILED) != 0
    status[1] |= int(failed.any()) * A_RANK_FAILED
    origins = headers[~failed][:, [0, 3]]  # version and step
    status[1] |= int((origins != origins[:1]).any()) * RANKS_DIFFER
    present.copy_(_bits(headers[:, HEADER_WORDS:], present.numel()).amax(0))


def write_trailer(operands: Operands, flag: Tensor, trailer: Tensor, *, failed: bool) -> None:
    trailer[:-2] = _presence(operands).float()
    trailer[-2] = (flag[0] != 0).float()
    trailer[-1] = float(failed)
    flag.zero_()


def read_trailer(trailer: Tensor, status: Tensor, present: Tensor) -> None:
    present.copy_(trailer[:-2] > 0.0)
    status[0] += int(trailer[-2] > 0.0)
    status[1] |= int(trailer[-1] > 0.0) * A_RANK_FAILED

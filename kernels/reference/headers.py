"""Twin of ``kernels/headers.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.headers import FORMAT_VERSION, HEADER_WORDS
from fusedcomp.kernels.segments import Operands

NON_FINITE, FAILED = 1, 2


def _presence(operands: Operands) -> Tensor:
    return operands.addresses[0] != 0


def _bits(words: Tensor, count: int) -> Tensor:
    return ((words[..., None] >> torch.arange(32, device=words.device)) & 1).flatten(-2)[..., :count]


def end_payload(operands: Operands, flag: Tensor, seed: Tensor, header: Tensor, count: Tensor) -> None:
    """What ``fill_header`` does on the device."""
    header[0] = FORMAT_VERSION
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
    status[0] += ((headers[:, 2] & NON_FINITE) != 0).any()
    status[1] |= ((headers[:, 2] & FAILED) != 0).any()
    present.copy_(_bits(headers[:, HEADER_WORDS:], present.numel()).amax(0))


def write_trailer(operands: Operands, flag: Tensor, trailer: Tensor, *, failed: bool) -> None:
    trailer[:-2] = _presence(operands).float()
    trailer[-2] = (flag[0] != 0).float()
    trailer[-1] = float(failed)
    flag.zero_()


def read_trailer(trailer: Tensor, status: Tensor, present: Tensor) -> None:
    present.copy_(trailer[:-2] > 0.0)
    status[0] += trailer[-2] > 0.0
    status[1] |= (trailer[-1] > 0.0).int()

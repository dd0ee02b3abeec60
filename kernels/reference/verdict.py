"""Twin of ``kernels/verdict.py``."""

from torch import Tensor


def conclude(nonfinite: Tensor, found_inf: Tensor, parity: Tensor, status: Tensor) -> None:
    found = nonfinite.item() != 0
    nonfinite.zero_()
    found_inf.fill_(float(found))
    if found:
        status[2] += 1
    else:
        parity ^= 1


def annul(found_inf: Tensor, seed: Tensor, present: Tensor) -> None:
    if found_inf.item() != 0.0:
        seed -= 1
        present.zero_()

"""Twin of ``kernels/shares.py``."""

import torch
from torch import Tensor


def count_reaching(
    offsets: Tensor, keys: Tensor, model_key: Tensor, counts: Tensor, tickets: Tensor, header: Tensor
) -> None:
    found = keys[: min(int(offsets[-1]), keys.numel())]
    header[1] = (found >= model_key).sum()


def meet_thresholds(thresholds: Tensor, asked: Tensor, found_inf: Tensor | None, model_key: Tensor) -> None:
    mean = ((thresholds >> 32) * asked).sum() // asked.sum()
    void = torch.zeros_like(mean, dtype=torch.bool) if found_inf is None else found_inf[0] != 0.0
    model_key.copy_(torch.where(void, model_key, mean << 32))

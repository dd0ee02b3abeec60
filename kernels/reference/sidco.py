"""Twin of ``kernels/sidco.py``."""

import torch
from torch import Tensor

_LOG_TWO, _LOG_FOUR = 45426, 90852
_LARGEST, _FRACTION = 0x7F7FFFFF, 12


def estimate_threshold(
    keys: Tensor, groups: Tensor, aims: Tensor, logs: Tensor, residual: Tensor, thresholds: Tensor
) -> None:
    mask = 0x7FFF0000 if residual.itemsize == 2 else 0x7FFFFFFF
    samples = keys.numel() // groups.shape[0]
    for scope, first, last in sorted(set(map(tuple, groups.tolist()))):
        sampled = keys[first * samples : last * samples]
        bits = (sampled[sampled >= 0] >> 32).clamp(max=_LARGEST)
        exponent = max(int(bits.max()) >> 23, 1) if bits.numel() else 1
        bits = bits & mask
        own = (bits >> 23).clamp(min=1)
        mantissa = (bits & 0x7FFFFF) + torch.where(bits >> 23 > 0, 0x800000, 0)
        magnitudes = (mantissa << _FRACTION) >> (exponent - own).clamp(0, 40)
        best = _in_stages(magnitudes, int(aims[scope]), int(logs[scope]))
        if best is None:
            continue
        found = int(torch.tensor(best, dtype=torch.int64).float().view(torch.int32))
        found += (exponent - (127 + 23 + _FRACTION)) << 23
        found = min(found, _LARGEST) & mask if found >> 23 > 0 else 0
        thresholds[scope] = max(found << 32, int(thresholds[scope]))


def _in_stages(magnitudes: Tensor, aim: int, log: int) -> int | None:
    """The threshold of the fewest stages that come within a fifth of the aim, or of those that come nearest.

    None if fewer than half of the aim reach it.
    """
    best, reached, nearest = 0, 0, 1 << 63
    for stages in range(1, max(-(-log // _LOG_TWO), 1) + 1):
        threshold = 0
        for stage in range(stages):
            ratio = log if stages == 1 else _LOG_FOUR if stage == 0 else (log - _LOG_FOUR) // (stages - 1)
            beyond = magnitudes[magnitudes >= threshold]
            if beyond.numel():
                threshold += (int(beyond.sum()) // beyond.numel() - threshold) * ratio >> 16
        passing = int((magnitudes >= threshold).sum())
        distance = abs(passing - aim)
        if distance < nearest:
            best, reached, nearest = threshold, passing, distance
        if 5 * distance <= aim:
            break
    return best if 2 * reached >= aim else None

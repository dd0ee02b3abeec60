"""SIDCo (Abdelmoniem et al., MLSys 2021): a threshold from a distribution that is fitted to magnitudes, in stages.

    threshold <- threshold + (mean of the magnitudes beyond it - threshold) * ln(1 / ratio)       exponential tails

One stage aims at the whole ratio k / n; of M stages the first aims at a quarter, the others at equal ratios of what is
left: each fits the tail that the last one has left. The fewest stages are taken with which the sampled entries that
pass are within a fifth of those expected; where no number of stages comes that near, the one that comes nearest. If
fewer than half as many pass even there, magnitudes have no such tail (equal ones have none at all): the sampled
threshold stands.

Whole numbers throughout: sums are the same in any order.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import launch

LOG_ONE = 65536  # of a logarithm in whole numbers
_CHUNK = 8192
_LOG_TWO, _LOG_FOUR = tl.constexpr(45426), tl.constexpr(90852)
_LARGEST = tl.constexpr(0x7F7FFFFF)
_FRACTION = tl.constexpr(12)  # more bits than a magnitude has: what is 2**36 times smaller than the largest is 0


@triton.jit
def _magnitudes(keys_ptr, chunk, end, exponent, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Magnitudes in units of the largest exponent; -1 where nothing was sampled."""
    at = chunk + tl.arange(0, CHUNK)
    key = tl.load(keys_ptr + at, mask=at < end, other=-1)
    bits = tl.minimum(key >> 32, _LARGEST)
    if HALF:
        bits = bits & 0x7FFF0000
    own = tl.maximum(bits >> 23, 1)
    mantissa = (bits & 0x7FFFFF) + tl.where(bits >> 23 > 0, 0x800000, 0)
    shift = tl.minimum(tl.maximum(exponent - own, 0), 40)
    return tl.where(key >= 0, (mantissa << _FRACTION) >> shift, -1)


@triton.jit
def _estimate_threshold_kernel(
    keys_ptr, group_ptr, aim_ptr, log_ptr,  # in
    threshold_ptr,  # in-out
    HALF: tl.constexpr, SAMPLES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = tl.load(group_ptr + 3 * program + 1)
    if program != first:
        return  # one program a scope
    scope = tl.load(group_ptr + 3 * program)
    begin = first * SAMPLES
    end = tl.load(group_ptr + 3 * program + 2) * SAMPLES
    aim = tl.load(aim_ptr + scope)
    log = tl.load(log_ptr + scope)
    most = tl.maximum((log + _LOG_TWO - 1) // _LOG_TWO, 1)

    largest = aim * 0
    for chunk in range(begin, end, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        key = tl.load(keys_ptr + at, mask=at < end, other=0)
        largest = tl.maximum(largest, tl.max(key) >> 32)
    exponent = tl.maximum(tl.minimum(largest, _LARGEST) >> 23, 1)

    best = aim * 0
    reached = best  # by how many samples
    nearest = best + 0x7FFFFFFFFFFFFFFF
    stages = best + 1
    while stages <= most:
        threshold = best * 0
        passing = best * 0
        stage = best * 0
        while stage <= stages:  # after the last one there is only counting
            passing = passing * 0
            total = passing
            for chunk in range(begin, end, CHUNK):
                magnitude = _magnitudes(keys_ptr, chunk, end, exponent, HALF, CHUNK)
                beyond = magnitude >= threshold
                passing += tl.sum(beyond.to(tl.int64))
                total += tl.sum(tl.where(beyond, magnitude, 0))
            ratio = tl.where(stage == 0, _LOG_FOUR, (log - _LOG_FOUR) // tl.maximum(stages - 1, 1))
            ratio = tl.where(stages == 1, log, ratio)
            excess = total // tl.maximum(passing, 1) - threshold
            threshold += tl.where((passing > 0) & (stage < stages), (excess * ratio) >> 16, 0)
            stage += 1
        distance = tl.abs(passing - aim)
        best = tl.where(distance < nearest, threshold, best)
        reached = tl.where(distance < nearest, passing, reached)
        nearest = tl.minimum(nearest, distance)
        stages = tl.where(5 * distance <= aim, most, stages) + 1

    # Back to the bits of a magnitude; what lies below the smallest exponent lets everything in.
    bits = best.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) + ((exponent - (127 + 23 + _FRACTION)) << 23)
    bits = tl.where((bits >> 23 > 0) & (2 * reached >= aim), tl.minimum(bits, _LARGEST), 0)
    if HALF:
        bits = bits & 0x7FFF0000
    tl.store(threshold_ptr + scope, tl.maximum(bits << 32, tl.load(threshold_ptr + scope)))


def estimate_threshold(
    keys: Tensor,  # i64 (programs * SAMPLES,): of the sampled entries, -1: none
    groups: Tensor,  # i32 (programs, 3): scope, first and last program of the scope
    aims: Tensor,  # i64 (scopes,), >= 1: the rank that the k-th key would have among the samples
    logs: Tensor,  # i64 (scopes,): LOG_ONE times the logarithm of n / k
    residual: Tensor,  # whose type the keys are of
    thresholds: Tensor,  # in-out: i64 (scopes,): raised to the estimate, if at least half of the aim reaches it
) -> None:
    """What a fitted distribution expects k entries to reach; no less than the sampled threshold."""
    launch(
        _estimate_threshold_kernel, groups.shape[0], keys,
        keys, groups, aims, logs,
        thresholds,
        HALF=residual.itemsize == 2, SAMPLES=keys.numel() // groups.shape[0], CHUNK=_CHUNK, shape="stretch",
    )  # fmt: skip

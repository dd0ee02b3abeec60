"""Shares: how many entries every bucket sends where ``TopK(scope="model")`` ranks over all of them.

The shares add up to k of all elements, so payloads have sizes that the host knows, the same on all ranks. They follow
what headers said eight steps before: how many candidates of each bucket reached a key that is one for all buckets
(kernels/shares.py), summed over ranks.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomp._dispatch import ops
from fusedcomp.compressors import TopK
from fusedcomp.rooms import LAG
from fusedcomp.sizing import NOTHING, Selection, count_at, selection_of

_LEAST_WEIGHT = 1e-9  # of all: where every other bucket is at its limit, one that found nothing takes the rest


class Shares:
    """Of one compressor, over the buckets that have it.

    Args:
        compressor: what they share.
        numels: their elements.
        limits: the most entries each may send; with more it would go dense.
        world_size: ranks whose headers there are.
        device: where they are.
    """

    # With error feedback a bucket's k-th key gathers what was not sent, so that shares steer it through an integral and
    # a lag: twice this gain makes them swing (docs/decisions/0027-shares-of-the-model.md).
    _GAIN = 1.0 / 32.0
    _TOLERANCE = 1.0 / 32.0  # of a share, and one entry: what payloads are not made anew for

    def __init__(
        self, compressor: TopK, numels: Sequence[int], limits: Sequence[int], world_size: int, device: torch.device
    ) -> None:
        self.compressor, self.numels, self.limits, self.device = compressor, list(numels), list(limits), device
        self.weights = [numel / sum(numels) for numel in numels]
        self.thresholds = torch.zeros(len(numels), dtype=torch.int64, device=device)  # k-th keys: the buckets' views
        self.asked = torch.ones(len(numels), dtype=torch.int64, device=device)  # k, as the weight of a bucket's key
        self.model_key = torch.zeros(1, dtype=torch.int64, device=device)
        self.ks: list[int] = []  # as planned; empty: no plan yet, or a dense step
        self._selections = [NOTHING] * len(numels)
        self._density, self._due = 0.0, 0  # what the plan is for, when it is looked at again
        pinned = device.type == "cuda"
        shape = (LAG, len(numels), world_size, 2)  # reached, and flags
        self._reached = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        self._copied = [torch.cuda.Event() for _ in range(LAG)] if pinned else []
        self._steps = [-1] * LAG  # whose headers the rows are
        self._told: dict[int, list[int]] = {}  # rows that came from a checkpoint
        self._step = -1

    # ---- a step ------------------------------------------------------------------------------------------------

    def at(self, step: int) -> list[Selection]:
        """The selections of this step; in a CUDA graph, those that there were."""
        if step != self._step and not (self._is_capturing() and self._density > 0.0):
            row, before = step % LAG, step - LAG
            if before >= 0 and self._steps[row] == before:
                self._learn(self._counts(row))
            self._told.pop(row, None)
            self._step = step
            self._plan(step)
            self._steps[row] = step if self.ks else -1  # a dense step has no headers
        return self._selections

    def note(self, bucket: int, headers: Tensor) -> None:
        """Take in the headers of all ranks, of the step whose selections were the last: i32 (world, words)."""
        if self._is_capturing():
            return
        row = self._step % LAG
        self._reached[row, bucket].copy_(headers[:, 1:3], non_blocking=True)
        if self._copied:
            self._copied[row].record()

    def meet(self, found_inf: Tensor | None) -> None:
        """All buckets have selected: the key that the next step counts against. ``found_inf``: was it no step?"""
        if self.ks:
            ops(self.device).shares.meet_thresholds(self.thresholds, self.asked, found_inf, self.model_key)

    def _counts(self, row: int) -> list[int]:
        """What reached the key, per bucket, over all ranks; nothing where a step is no measure of what is to come."""
        if row in self._told:
            return self._told[row]
        if self._copied and not self._copied[row].query():
            self._copied[row].synchronize()
        reached = self._reached[row]
        if reached[:, :, 1].any():  # not finite, or a rank failed
            return []
        return reached[:, :, 0].sum(1, dtype=torch.int64).tolist()

    def _learn(self, counts: Sequence[int]) -> None:
        total = sum(counts)
        if total > 0:
            pairs = zip(self.weights, counts, strict=True)
            self.weights = [weight + self._GAIN * (count / total - weight) for weight, count in pairs]

    def _plan(self, step: int) -> None:
        density = self.compressor.density_at(step)
        if density == self._density and step < self._due:
            return
        total = max(len(self.numels), count_at(density, sum(self.numels)))
        ks = [] if total > sum(self.limits) else apportion(total, self.weights, self.limits)
        if density != self._density or _differ(ks, self.ks, self._TOLERANCE):
            self._adopt(ks)
        self._density, self._due = density, step + LAG

    def _adopt(self, ks: list[int]) -> None:
        """Nothing: all buckets go dense."""
        self.ks = ks
        selections = [
            selection_of(self.compressor, [numel], [k]) if ks else Selection((numel,), (0,), (0,), numel)
            for numel, k in zip(self.numels, ks or self.numels, strict=True)
        ]
        # The same object as long as nothing changes: a bucket makes its payload anew for another.
        pairs = zip(self._selections, selections, strict=True)
        self._selections = [old if old == new else new for old, new in pairs]
        if ks:
            # What is at its limit has a greater key than all others, for good: they meet without it.
            free = [k if k < limit else 0 for k, limit in zip(ks, self.limits, strict=True)]
            host = torch.tensor(free if any(free) else ks, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            self.asked.copy_(host, non_blocking=True)

    def _is_capturing(self) -> bool:
        return bool(self._copied) and torch.cuda.is_current_stream_capturing()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data; the key is this rank's own, all else is the same on all ranks. Asks the device."""
        rows = [[step, self._counts(row)] for row, step in enumerate(self._steps) if step >= 0]
        return {
            "numels": self.numels, "limits": self.limits, "weights": self.weights, "ks": self.ks,
            "density": self._density, "due": self._due, "model_key": int(self.model_key), "reached": rows,
        }  # fmt: skip

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from there, if it is of these buckets; else shares begin with the buckets' sizes."""
        if (kept.get("numels"), kept.get("limits")) != (self.numels, self.limits):
            return
        self.weights, self._density, self._due = list(kept["weights"]), kept["density"], kept["due"]
        self.model_key.fill_(kept["model_key"])
        for step, counts in kept["reached"]:
            self._steps[step % LAG], self._told[step % LAG] = step, counts
        if self._density > 0.0:
            self._adopt(list(kept["ks"]))


class Share:
    """One bucket's: what ``Scheduled`` is to a bucket that ranks alone."""

    def __init__(self, shares: Shares, bucket: int) -> None:
        self.shares, self.bucket = shares, bucket

    def at(self, step: int) -> Selection:
        """The selection of this step."""
        return self.shares.at(step)[self.bucket]

    def note(self, headers: Tensor) -> None:
        """Take in what ranks found in this bucket."""
        self.shares.note(self.bucket, headers)


def most_entries(numel: int, goes_dense: Callable[[int], bool]) -> int:
    """The most entries that are not sent densely; 0, if one already is."""
    return bisect.bisect_left(range(1, numel + 1), True, key=goes_dense)


def apportion(total: int, weights: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Integers from 1 to their limits that add up to ``total``, as nearly in proportion to the weights as may be.

    By largest remainders, of equal ones the first: the same on all ranks. ``total`` lies between the number of weights
    and the sum of the limits.
    """
    least = _LEAST_WEIGHT * sum(weights)
    weights = [max(weight, least) for weight in weights]

    def scaled(scale: float) -> list[float]:
        return [min(max(scale * weight, 1.0), float(limit)) for weight, limit in zip(weights, limits, strict=True)]

    low = total / sum(weights)
    if sum(scaled(low)) != total:  # some are at 1 or at their limit: what scale suits the others?
        low, high = 0.0, max(limits) / min(weights)
        for _ in range(100):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if sum(scaled(middle)) <= total else (low, middle)
    shares = scaled(low)
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(counts)), key=lambda i: (counts[i] - shares[i], i))
    while (rest := total - sum(counts)) > 0:
        for i in [i for i in order if counts[i] < limits[i]][:rest]:
            counts[i] += 1
    return counts


def _differ(new: Sequence[int], old: Sequence[int], tolerance: float) -> bool:
    """By more than is worth new payloads?"""
    return any(abs(a - b) > tolerance * b + 1.0 for a, b in zip(new, old, strict=True))

"""How many entries a payload has room for: the same number on every rank, known to the host before the pass.

Scheduled  TopK: what its density makes of the bucket, exactly
Adaptive   Threshold, CAT: somewhat more than any rank asked for some steps ago, which the headers of all ranks say
"""

import math
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomp.compressors import CAT, TopK
from fusedcomp.kernels.sample import LENIENCE
from fusedcomp.kernels.segments import BLOCK
from fusedcomp.kernels.sidco import LOG_ONE

# Sampled entries per scope: 16 are expected among the k largest, so that six standard deviations of their number lie
# between k and 6 k (docs/decisions/0003-selection-margin.md).
_SAMPLES_ABOVE = 16
_LEAST_SAMPLES = 4096
_CAT_SAMPLES = 16384  # whatever its room: between the 9th of them and the k-th entry there are 0.06 % of a scope
_DEVIATIONS = 6.0
# Of the sample's rank, upwards: so that never fewer than k entries pass, or hardly ever fewer than 0.8 k; what an
# estimate does not fall below.
_MARGIN = {"exact": _DEVIATIONS, "sampled": 2.0, "sidco": 2.0}


class Selection(NamedTuple):
    """The host's numbers for one selection: all sizes are known before the pass runs."""

    ks: tuple[int, ...]  # entries to send, per scope
    sample_ranks: tuple[int, ...]  # the sampled threshold is the sample of this rank, per scope
    sample_aims: tuple[int, ...]  # the rank that the k-th entry would have among the samples, per scope
    capacity: int  # of the candidate buffer

    @property
    def k(self) -> int:
        """Entries to send, over all scopes."""
        return sum(self.ks)


def count_at(density: float, numel: int) -> int:
    """k: ``density * numel`` rounded up, at least 1; a product that is whole but for rounding stays whole."""
    return max(1, min(numel, math.ceil(density * numel * (1.0 - 1e-12))))


def count_of_blocks(per_block: int, numels: Sequence[int]) -> int:
    """Entries where every block of a tensor sends so many, a last, shorter one all if it has no more."""
    return sum(numel // BLOCK * per_block + min(numel % BLOCK, per_block) for numel in numels)


def num_samples(compressor: TopK | CAT, numel: int) -> int:
    """How many of ``numel`` entries the threshold is sampled from; all of a small scope."""
    if isinstance(compressor, CAT):
        return min(numel, _CAT_SAMPLES)
    return min(numel, max(_LEAST_SAMPLES, math.ceil(_SAMPLES_ABOVE / compressor.density)))


def plan_selection(compressor: TopK, scope_numels: Sequence[int], density: float) -> Selection:
    """k, sample rank and candidate capacity for every scope, which all have the same density."""
    return selection_of(compressor, scope_numels, [count_at(density, numel) for numel in scope_numels])


def selection_of(compressor: TopK, scope_numels: Sequence[int], ks: Sequence[int]) -> Selection:
    """Sample rank and candidate capacity for every scope, for its k.

    Of s samples, m = k s / n are expected among the k largest. The threshold is the sample of rank m + 6 sqrt(m) + 6
    (``"sampled"``: 2 in place of 6): fewer than k candidates would need that many samples above the k-th entry. The
    capacity has the margin of 6 upward,
    beyond the quarter that cutting the threshold to few bits may let through (sample.py).
    """
    scopes = [
        _from_samples(k, numel, num_samples(compressor, numel), _MARGIN[compressor.selection])
        for numel, k in zip(scope_numels, ks, strict=True)
    ]
    _, ranks, aims, capacities = zip(*scopes, strict=True)
    return Selection(tuple(ks), ranks, aims, sum(capacities))


def _from_samples(k: int, numel: int, samples: int, deviations: float) -> tuple[int, int, int, int]:
    """k, sample rank, aim and capacity of one scope."""
    rank = k
    if samples < numel:
        expected = k * samples / numel
        margin = deviations * (math.sqrt(expected) + 1.0)
        rank = min(samples, max(1, math.ceil(expected + margin)))
    through = rank + rank // LENIENCE
    most = (through + _DEVIATIONS * (math.sqrt(through) + 1.0)) * numel / samples
    return k, rank, max(1, round(k * samples / numel)), min(numel, math.ceil(most))


def sampled_room(compressor: CAT, numel: int) -> Callable[[int], Selection]:
    """The selection with room for so many entries, of which the device says how many are sent."""
    samples = num_samples(compressor, numel)

    def with_room(entries: int) -> Selection:
        k, rank, aim, capacity = _from_samples(entries, numel, samples, _DEVIATIONS)
        return Selection((k,), (rank,), (aim,), capacity)

    return with_room


def threshold_room(numel: int) -> Callable[[int], Selection]:
    """Candidates are what reaches the threshold; of twice as many as there is room for the largest are sent."""
    return lambda entries: Selection((entries,), (0,), (0,), min(numel, 2 * entries))


def log_ratios(scope_numels: Sequence[int], ks: Sequence[int]) -> list[int]:
    """ln(n / k) of every scope in whole numbers, for the stages of an estimate (kernels/sidco.py)."""
    return [round(LOG_ONE * math.log(numel / k)) for numel, k in zip(scope_numels, ks, strict=True)]


# Bits of a digit above a given threshold: 64 to a factor of two, 256 reach 16 times as far (kernels/digits.py).
THRESHOLD_WIDTH = 49
NOTHING = Selection((), (), (), 0)


class Scheduled:
    """By TopK's density of the step. The same object as long as nothing changes."""

    def __init__(self, compressor: TopK, scope_numels: Sequence[int]) -> None:
        self.compressor, self.scope_numels = compressor, scope_numels
        self.density, self.selection = 0.0, NOTHING

    def at(self, step: int) -> Selection:
        """The selection of this step."""
        density = self.compressor.density_at(step)
        if density != self.density:
            self.density = density
            self.selection = plan_selection(self.compressor, self.scope_numels, density)
        return self.selection

    def note(self, headers: Tensor) -> None:
        """What ranks ask for is known."""


def threshold_key(value: float, half: bool) -> int:
    """The least key of a magnitude of at least ``value`` (> 0) in fp32; half: among magnitudes of 16 bits."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    if struct.unpack("<f", struct.pack("<f", value))[0] < value:  # rounded down
        bits += 1
    if half:
        bits = -(-bits // 65536) * 65536
    return int(bits) << 32


class Adaptive:
    """By what ranks asked for.

    Every rank sees the same headers, those of exactly ``LAG`` steps before, waiting for their copy if it must: so all
    come to the same size, without a word more on the wire. There is room for the most of as many of them. In a CUDA
    graph the size stays what it was.

    Args:
        numel: elements of the bucket.
        with_room: the selection with room for so many entries.
        goes_dense: would a payload with room for so many entries be sent densely?
        world_size: ranks whose headers there are.
        device: where they are.
    """

    LAG = 8
    _FIRST = 32  # at first there is room for numel / 32 entries
    _SETTLING = 2 * LAG  # steps for which that is the least: residuals begin at zero, and so does what they ask for
    _SLACK, _LEAST = 1.15, 16  # more room than was asked for
    _FLOOR = 64  # entries: a burst after a quiet time sends some at least
    _WASTE = 1.4  # more room than so many times what is needed becomes less

    def __init__(
        self,
        numel: int,
        with_room: Callable[[int], Selection],
        goes_dense: Callable[[int], bool],
        world_size: int,
        device: torch.device,
    ) -> None:
        self._with_room = with_room
        self.everything = with_room(numel)
        self.limit = with_room(_most(numel, goes_dense))
        self.selection = self._fitting(max(self._FLOOR, numel // self._FIRST))
        pinned = device.type == "cuda"
        self._asked = torch.zeros((self.LAG, world_size, 2), dtype=torch.int32, pin_memory=pinned)  # and flags
        self._copied = [torch.cuda.Event() for _ in range(self.LAG)] if pinned else []
        self._steps = [-1] * self.LAG  # whose headers the rows are
        self._was_dense = [False] * self.LAG
        self._step, self._settled = -1, self._SETTLING
        self._recent: deque[int] = deque(maxlen=self.LAG)  # what the most demanding rank asked for

    def at(self, step: int) -> Selection:
        """The selection of this step."""
        if self._is_capturing():
            return self.selection
        self._step = step
        self._settled -= 1
        row, before = step % self.LAG, step - self.LAG
        if before >= 0 and self._steps[row] == before:
            self.selection = self._after(row)
        # Of a dense step there will be no header.
        self._steps[row], self._was_dense[row] = step, self.selection is self.everything
        return self.selection

    def note(self, headers: Tensor) -> None:
        """Take in the headers of all ranks, of the step whose selection was the last: i32 (world, words)."""
        if self._is_capturing():
            return
        row = self._step % self.LAG
        self._asked[row].copy_(headers[:, 1:3], non_blocking=True)
        if self._copied:
            self._copied[row].record()

    def _after(self, row: int) -> Selection:
        if self._was_dense[row]:  # nobody was asked: see what a payload can take
            return self.limit if self.selection is self.everything else self.selection
        most, is_flagged = self._found(row)
        if is_flagged:  # not finite, or a rank failed
            return self.selection
        self._recent.append(most)
        if self._recent[-1] > self.limit.k:
            return self.everything
        asked, room = min(max(self._recent), self.limit.k), self.selection.k
        needed = max(self._FLOOR, math.ceil(self._SLACK * asked) + self._LEAST)
        wasteful = room > self._WASTE * needed and self._settled < 0
        if asked > room or wasteful or self.selection is self.everything:
            return self._fitting(needed)
        return self.selection

    def state(self) -> dict[str, Any]:
        """Plain data, the same on all ranks. Waits for copies that are on their way."""
        steps = [[step, self._was_dense[row], *self._found(row)] for row, step in enumerate(self._steps) if step >= 0]
        return {
            "limit": self.limit.k, "everything": self.everything.k, "room": self.selection.k, "settled": self._settled,
            "recent": list(self._recent), "steps": steps,
        }  # fmt: skip

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from there, if it is of such a bucket among as many ranks; else rooms begin anew."""
        if (kept.get("limit"), kept.get("everything")) != (self.limit.k, self.everything.k):
            return
        room = kept["room"]
        self.selection = self.everything if room == self.everything.k else self._fitting(room)
        self._settled, self._recent = kept["settled"], deque(kept["recent"], maxlen=self.LAG)
        for step, was_dense, most, is_flagged in kept["steps"]:
            row = step % self.LAG
            self._steps[row], self._was_dense[row] = step, was_dense
            self._asked[row] = torch.tensor([most, is_flagged])

    def _found(self, row: int) -> tuple[int, bool]:
        """What the most demanding rank asked for, and whether it is no measure of what is to come."""
        if self._copied and not self._copied[row].query():
            self._copied[row].synchronize()
        return int(self._asked[row, :, 0].max()), bool(self._asked[row, :, 1].any())

    def _fitting(self, entries: int) -> Selection:
        """Room for at least so many, if that is a payload at all."""
        return self.limit if entries >= self.limit.k else self._with_room(entries)

    def _is_capturing(self) -> bool:
        return bool(self._copied) and torch.cuda.is_current_stream_capturing()


def _most(numel: int, goes_dense: Callable[[int], bool]) -> int:
    """The most entries that are not sent densely; all, if none are."""
    if goes_dense(1):
        return numel
    low, high = 1, numel + 1  # the first is a payload, the last too large
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if goes_dense(middle) else (middle, high)
    return low


Sizing = Scheduled | Adaptive

"""The host's numbers for a selection: how many entries, and what a candidate must reach, known before the pass."""

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

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

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """What the device needs of it."""
        return self.ks, self.sample_ranks, self.sample_aims


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


def of_share(compressor: TopK, whole: Selection, scope_numels: Sequence[int], active: Sequence[int]) -> Selection:
    """A selection where so many of every scope's elements are active: as large a part of the entries, at least one."""
    if len(active) == 1:
        k = count_at(whole.ks[0] / scope_numels[0], active[0])
        return selection_of(compressor, scope_numels, [k])
    # A tensor is active as a whole; thresholds of the others do not matter.
    return whole._replace(ks=tuple(k if there else 1 for k, there in zip(whole.ks, active, strict=True)))


def _from_samples(
    k: int, numel: int, samples: int, deviations: float, drawn: bool = False
) -> tuple[int, int, int, int]:
    """k, sample rank, aim and capacity of one scope. ``drawn``: samples are ranked by other draws than entries.

    Then chance is in the entries' number above a threshold too: by samples / numel as much as in the samples'.
    """
    rank, varying = k, 1.0 + samples / numel if drawn else 1.0
    if samples < numel or drawn:
        expected = k * samples / numel
        margin = deviations * (math.sqrt(varying * expected) + 1.0)
        rank = min(samples, max(1, math.ceil(expected + margin)))
    through = rank + rank // LENIENCE
    most = (through + _DEVIATIONS * (math.sqrt(varying * through) + 1.0)) * numel / samples
    return k, rank, max(1, round(k * samples / numel)), min(numel, math.ceil(most))


def sampled_room(compressor: CAT, numel: int) -> Callable[[int], Selection]:
    """The selection with room for so many entries, of which the device says how many are sent."""
    samples, drawn = num_samples(compressor, numel), compressor.variant == "stochastic"

    def with_room(entries: int) -> Selection:
        k, rank, aim, capacity = _from_samples(entries, numel, samples, _DEVIATIONS, drawn)
        return Selection((k,), (rank,), (aim,), capacity)

    return with_room


def threshold_room(numel: int) -> Callable[[int], Selection]:
    """Candidates are what reaches the threshold; of four times as many as there is room for the largest are sent.

    In a steady state 2.6 times as many reach it: what arrives, a ninth more than there is room for, and what waits,
    1.6 times as much (rooms.py).
    """
    return lambda entries: Selection((entries,), (0,), (0,), min(numel, 4 * entries))


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

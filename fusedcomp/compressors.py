"""Compressors: what is sent. Frozen records that hold no tensors and check themselves.

TopK      the density * numel entries of largest |residual|, exactly, found in the one pass
Identity  everything: torch's own optimizer, in our buckets
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from fusedcomp.kernels.sample import LENIENCE
from fusedcomp.values import is_count, is_number, plain

# Sampled entries per scope: 16 are expected among the k largest, so that six standard deviations of their number lie
# between k and 6 k (docs/decisions/0003-selection-margin.md).
_SAMPLES_ABOVE = 16
_LEAST_SAMPLES = 4096
_DEVIATIONS = 6.0
_WARMUP_STAGES = 4


@dataclass(frozen=True)
class Identity:
    """Send every gradient entry: an all-reduce of the mean gradient, then torch's own update rule."""


@dataclass(frozen=True)
class TopK:
    """Send the ``density`` largest-magnitude entries of the residual (Lin et al., ICLR 2018, algorithm 1).

    Args:
        density: share of entries sent, in (0, 1]; 0.001 is Deep Gradient Compression's setting. 1 is a dense step.
        warmup_steps: steps over which the density falls exponentially to ``density``: four equal stages at
            ``density ** (1/5)``, ``(2/5)``, ``(3/5)``, ``(4/5)``; for 0.001 these are the paper's 25 %, 6.3 %, 1.6 %
            and 0.4 %.
        selection: ``"exact"`` sends exactly the k largest. ``"sampled"`` aims the sampled threshold at k itself and
            sends what passes it, at most k: a few per cent fewer entries, less work (DGC's own selection).
        scope: what the selection ranks over, ``"bucket"`` or ``"tensor"``. It changes results. ``"tensor"`` does not
            depend on bucket sizes; ``"bucket"`` lets layers compete and reached higher accuracy in our trials.
        wire_dtype: type of the values sent: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``. Two bytes
            instead of four; what rounding loses stays in the residual, bit for bit. A value beyond what the type holds
            (65504 in fp16) is sent as its largest and the rest stays, exactly below 2**29. One below what the type
            resolves (3e-8 in fp16) is sent as 0 and stays. A bucket that goes dense travels in fp32 whatever this says.

    Raises:
        ValueError: an argument is out of range.
    """

    density: float
    warmup_steps: int = 0
    selection: str = "exact"
    scope: str = "bucket"
    wire_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not is_number(self.density) or not 0.0 < self.density <= 1.0:
            raise ValueError(f"TopK: density must be in (0, 1], got {self.density!r}")
        if not is_count(self.warmup_steps):
            raise ValueError(f"TopK: warmup_steps must be an integer >= 0, got {self.warmup_steps!r}")
        for name in ("density", "warmup_steps"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if self.selection not in ("exact", "sampled"):
            raise ValueError(f"TopK: selection must be 'exact' or 'sampled', got {self.selection!r}")
        if self.scope not in ("bucket", "tensor"):
            raise ValueError(f"TopK: scope must be 'bucket' or 'tensor', got {self.scope!r}")
        if self.wire_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"TopK: wire_dtype must be torch.float32, torch.bfloat16 or torch.float16, got {self.wire_dtype!r}"
            )

    def density_at(self, step: int) -> float:
        """Density of optimizer step ``step`` (from 0): never rises, ends at ``density``."""
        if step >= self.warmup_steps:
            return self.density
        stage = _WARMUP_STAGES * step // self.warmup_steps + 1
        return self.density ** (stage / (_WARMUP_STAGES + 1))


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


def num_samples(compressor: TopK, numel: int) -> int:
    """How many of ``numel`` entries the threshold is sampled from; all of a small scope."""
    return min(numel, max(_LEAST_SAMPLES, math.ceil(_SAMPLES_ABOVE / compressor.density)))


def plan_selection(compressor: TopK, scope_numels: Sequence[int], step: int) -> Selection:
    """k, sample rank and candidate capacity for every scope at ``step``.

    Of s samples, m = k s / n are expected among the k largest. The threshold is the sample of rank m + 6 sqrt(m) + 6:
    fewer than k candidates would need that many samples above the k-th entry. The capacity has the same margin upward,
    beyond the quarter that cutting the threshold to few bits may let through (sample.py).
    """
    density = compressor.density_at(step)
    ks, ranks, aims, capacity = [], [], [], 0
    for numel in scope_numels:
        k, samples = count_at(density, numel), num_samples(compressor, numel)
        rank = k
        if samples < numel:
            expected = k * samples / numel
            margin = _DEVIATIONS * (math.sqrt(expected) + 1.0) if compressor.selection == "exact" else 0.0
            rank = min(samples, max(1, math.ceil(expected + margin)))
        through = rank + rank // LENIENCE
        most = (through + _DEVIATIONS * (math.sqrt(through) + 1.0)) * numel / samples
        ks.append(k)
        ranks.append(rank)
        aims.append(max(1, round(k * samples / numel)))
        capacity += min(numel, math.ceil(most))
    return Selection(tuple(ks), tuple(ranks), tuple(aims), capacity)


Compressor = TopK | Identity


def encode(record: Any) -> dict[str, Any]:
    """A record as plain data, for checkpoints that ``torch.load(weights_only=True)`` reads."""
    fields = {key: str(value) if isinstance(value, torch.dtype) else value for key, value in asdict(record).items()}
    return {"name": type(record).__name__, **fields}

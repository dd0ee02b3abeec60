"""Compressors: what is sent. Frozen records that hold no tensors and check themselves.

TopK       the density * numel entries of largest |residual|, exactly, found in the one pass
Threshold  every entry whose |residual| reaches a value that is the same in every step
BlockTopK  the largest of every block of 2048, chosen inside the pass
CAT        as many of the largest as buy the most descent for what the message costs
RandomK    entries drawn at random, the same on all ranks
Identity   everything: torch's own optimizer, in our buckets
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fusedcomp.costs import COSTS, Cost, LinkCost
from fusedcomp.kernels.segments import BLOCK
from fusedcomp.values import is_count, is_number, plain

_WARMUP_STAGES = 4
_LARGEST = 3.4e38  # what fp32 holds


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
            and 0.4 %. For epochs give their steps: ``4 * len(loader)``.
        warmup_densities: instead of those four, a list of densities in (0, 1] for as many equal stages; 1 is dense.
        selection: ``"exact"`` sends exactly the k largest. ``"sampled"`` (DGC's) puts the sampled threshold nearer to k
            and sends the k largest of what passes: about half the candidates, and in one step of a hundred somewhat
            fewer than k entries. ``"sidco"`` puts there what a fitted distribution expects k entries to reach
            (Abdelmoniem et al., MLSys 2021): at most k are sent, in half of the steps somewhat fewer.
        scope: what selection ranks over: ``"bucket"``, ``"tensor"`` or ``"model"``. It changes results. ``"tensor"``
            does not depend on bucket sizes; ``"bucket"`` lets layers compete and reached higher accuracy in our trials;
            ``"model"`` lets them compete across buckets too, whose shares follow what entries reached some steps ago.
        wire_dtype: type of the values sent: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``. Two bytes
            instead of four; what rounding loses stays in the residual, bit for bit. A value beyond what the type holds
            (65504 in fp16) is sent as its largest and the rest stays, exactly below 2**29. One below what the type
            resolves (3e-8 in fp16) is sent as 0 and stays. A bucket that goes dense travels in fp32 whatever this says.
        collective: how payloads travel. ``"gather"``: all of them to all ranks. ``"tree"`` (gTop-k, Shi et al., 2019):
            merged in pairs, log2 of the ranks times, of every sum the k largest; what a merge drops goes back into one
            rank's residual. ``"split"`` (after Ok-Topk, Li and Hoefler, 2022): every rank sums a range of the bucket's
            pages, of every sum its share of the k largest; what a range drops goes into its owner's residual. Both are
            for many ranks, and need a memory and states of fp32; ``"split"`` needs scope="bucket".

    Raises:
        ValueError: an argument is out of range.
    """

    density: float
    warmup_steps: int = 0
    selection: str = "exact"
    scope: str = "bucket"
    wire_dtype: torch.dtype = torch.float32
    warmup_densities: Sequence[float] | None = None
    collective: str = "gather"

    def __post_init__(self) -> None:
        _check_density("TopK: density", self.density)
        _check_steps("TopK", self.warmup_steps)
        if self.warmup_densities is not None:
            densities = _checked_warmup("TopK", self.warmup_densities, self.warmup_steps, _check_density)
            object.__setattr__(self, "warmup_densities", densities)
        for name in ("density", "warmup_steps"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if self.selection not in ("exact", "sampled", "sidco"):
            raise ValueError(f"TopK: selection must be 'exact', 'sampled' or 'sidco', got {self.selection!r}")
        if self.scope not in ("bucket", "tensor", "model"):
            raise ValueError(f"TopK: scope must be 'bucket', 'tensor' or 'model', got {self.scope!r}")
        _check_wire("TopK", self.wire_dtype)
        if self.collective not in ("gather", "tree", "split"):
            raise ValueError(f"TopK: collective must be 'gather', 'tree' or 'split', got {self.collective!r}")
        if self.collective == "split" and self.scope != "bucket":
            raise ValueError(
                f"TopK: collective='split' ranks over ranges of a bucket: it needs scope='bucket', got {self.scope!r}"
            )
        if self.collective == "tree" and self.scope == "model":
            raise ValueError(
                "TopK: collective='tree' brings no headers of other ranks, by which buckets share: it needs "
                "scope='bucket' or 'tensor', got 'model'"
            )

    def density_at(self, step: int) -> float:
        """Density of optimizer step ``step`` (from 0); without ``warmup_densities`` it never rises."""
        return _density_at(step, self.density, self.warmup_steps, self.warmup_densities)


@dataclass(frozen=True)
class Threshold:
    """Send every entry of the residual of at least ``value`` (Sahu et al., NeurIPS 2021: hard threshold).

    Of all ways to send a given number of entries of a given sequence this one leaves the least behind, summed over
    steps; how many a single step sends varies. A payload costs what it has room for: nine tenths of the entries that
    arrive in a step at the rank where that is most, and a sixteenth of those that wait there, by what headers said some
    steps ago. The largest are sent, the others wait in the residual. With ``NoMemory()`` they are lost, and there is
    room for somewhat more than any rank asked for.

    Args:
        value: in units of the gradient, of what memory has made of it: with ``MomentumCorrection()`` entries are up to
            1 / (1 - momentum) larger. The paper has ``Residual()`` and the momentum behind the exchange.
        density: instead of ``value``: the share of entries that is expected to be sent per step, in (0, 1]. The value
            is then 1 / (2 sqrt(density * d)), d being the number of compressed elements of all param groups.
        wire_dtype: as of ``TopK``.

    Raises:
        ValueError: an argument is out of range.
    """

    value: float | None = None
    density: float | None = None
    wire_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if (self.value is None) == (self.density is None):
            raise ValueError(
                f"Threshold: give value or density, and not both, got value={self.value!r}, density={self.density!r}"
            )
        if self.value is not None and (not is_number(self.value) or not 0.0 < self.value <= _LARGEST):
            raise ValueError(f"Threshold: value must be > 0 and at most 3.4e38, got {self.value!r}")
        if self.density is not None:
            _check_density("Threshold: density", self.density)
        for name in ("value", "density"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        _check_wire("Threshold", self.wire_dtype)

    @classmethod
    def from_density(cls, density: float, wire_dtype: torch.dtype = torch.float32) -> "Threshold":
        """The authors' rule for a comparison with TopK(density): see ``density``."""
        return cls(density=density, wire_dtype=wire_dtype)

    def value_for(self, numel: int) -> float:
        """The threshold of a model with ``numel`` compressed elements."""
        if self.value is not None:
            return self.value
        assert self.density is not None
        value = 0.5 / math.sqrt(self.density * max(numel, 1))
        if value > _LARGEST:
            raise ValueError(
                f"Threshold: density must be larger for {numel} elements: {self.density!r} asks for a value of "
                f"{value:.2g}, and fp32 holds 3.4e38 at most"
            )
        return value


@dataclass(frozen=True)
class BlockTopK:
    """Send the largest entries of every block: of 2048 elements ``round(density * 2048)``, at least one.

    A block is 2048 consecutive elements of one tensor; a last, shorter one sends as many, or all if it has no more.
    Selection happens where the residual is made, in registers: no sample, no threshold, no look at candidates, two
    launches in all. Every part of every tensor sends its share, so layers cannot compete for entries as they do for
    ``TopK``'s.

    Args:
        density: share of entries sent, in [1/2048, 1]; in steps of 1/2048: 0.001 are two of a block. Of a lower density
            a block's share would be less than one entry. 1 is a dense step.
        warmup_steps: as of ``TopK``.
        warmup_densities: as of ``TopK``; each in [1/2048, 1].
        wire_dtype: as of ``TopK``.

    Raises:
        ValueError: an argument is out of range.
    """

    density: float
    warmup_steps: int = 0
    wire_dtype: torch.dtype = torch.float32
    warmup_densities: Sequence[float] | None = None

    def __post_init__(self) -> None:
        _check_block_density("BlockTopK: density", self.density)
        _check_steps("BlockTopK", self.warmup_steps)
        if self.warmup_densities is not None:
            densities = _checked_warmup("BlockTopK", self.warmup_densities, self.warmup_steps, _check_block_density)
            object.__setattr__(self, "warmup_densities", densities)
        for name in ("density", "warmup_steps"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        _check_wire("BlockTopK", self.wire_dtype)

    def per_block_at(self, step: int) -> int:
        """How many of a whole block's entries optimizer step ``step`` (from 0) sends."""
        return round(_density_at(step, self.density, self.warmup_steps, self.warmup_densities) * BLOCK)


@dataclass(frozen=True)
class CAT:
    """Send as many entries as buy the most descent for what the message costs, chosen anew in every step.

    The communication-aware adaptive tuning of Khirirat et al. (AAAI 2021): with the T largest entries of a gradient g
    a step of size 1 / L lowers an L-smooth loss by at least ``alpha(T) |g|^2 / (2 L)``, where ``alpha(T)`` is their
    share of ``|g|^2``; T is the one with the largest ``alpha(T) / cost(T)``. Every rank chooses its own, on the device,
    for every bucket by itself. The variants differ in how entries are sent, and so in what T of them guarantee.

    Payloads have room for somewhat more than any rank wanted some steps ago, which all headers say. What finds none
    stays in the residual. The paper has no memory, ``NoMemory()``; with error feedback, the default, T is that of the
    accumulated gradient.

    Args:
        cost: of a message: ``AffineCost(per_byte, fixed)`` or ``PacketCost(payload, header, fixed)``; for
            ``objective="time"`` ``LinkCost(latency, bandwidth, compute)``.
        objective: ``"bits"``: the most descent for what is paid for bytes, as in the paper. ``"time"``: for the seconds
            that the step takes.
        wire_dtype: as of ``TopK``; of ``"sparse"`` alone.
        variant: how T entries are sent. ``"sparse"``: the largest, as they are; 6 bytes an entry.
            ``"sparse_quantized"``: the largest, all as their mean magnitude with their signs; 2 bytes an entry. What
            an entry differs from that stays in the residual. Needs states of fp32. ``"stochastic"``: T that are
            drawn, larger ones more likely, each as what it stands for, so that what is sent is the gradient on average;
            6 bytes an entry. Needs ``NoMemory()``, which is then the default.

    Raises:
        TypeError: ``cost`` is none.
        ValueError: an argument is out of range.
    """

    cost: Cost
    objective: str = "bits"
    wire_dtype: torch.dtype = torch.float32
    variant: str = "sparse"

    def __post_init__(self) -> None:
        if not isinstance(self.cost, COSTS):
            raise TypeError(f"CAT: cost must be AffineCost(...), PacketCost(...) or LinkCost(...), got {self.cost!r}")
        if self.objective not in ("bits", "time"):
            raise ValueError(f"CAT: objective must be 'bits' or 'time', got {self.objective!r}")
        if isinstance(self.cost, LinkCost) != (self.objective == "time"):
            raise ValueError(
                "CAT: objective='time' goes with cost=LinkCost(...), objective='bits' with AffineCost(...) or "
                f"PacketCost(...), got objective={self.objective!r} with {self.cost!r}"
            )
        _check_wire("CAT", self.wire_dtype)
        if self.variant not in ("sparse", "sparse_quantized", "stochastic"):
            raise ValueError(f"CAT: variant must be 'sparse', 'sparse_quantized' or 'stochastic', got {self.variant!r}")
        if self.variant != "sparse" and self.wire_dtype != torch.float32:
            raise ValueError(
                f"CAT: wire_dtype is of variant='sparse' alone, got {self.wire_dtype!r} with variant={self.variant!r}: "
                "of signs there are no values, and what is drawn would no longer be the gradient on average"
            )


@dataclass(frozen=True)
class RandomK:
    """Send entries that chance picks, alike on all ranks: values alone travel, and are summed on the way.

    Of every tensor ``density * numel`` entries, one from each of as many equal parts (4 bytes an entry; its index is
    known from the step). An all-reduce costs the same for any number of ranks, where a gather grows with them.

    With error feedback, the default, what was not picked waits its turn, 1 / density steps on average. With
    ``NoMemory()`` values are divided by the chance of being picked, so that their expectation is the gradient
    (Wangni et al., NeurIPS 2018, with equal probabilities).

    Args:
        density: share of entries sent, in (0, 1]. 1 is a dense step.

    Raises:
        ValueError: an argument is out of range.
    """

    density: float

    def __post_init__(self) -> None:
        _check_density("RandomK: density", self.density)
        object.__setattr__(self, "density", plain(self.density))


def _check_density(name: str, density: Any) -> None:
    if not is_number(density) or not 0.0 < density <= 1.0:
        raise ValueError(f"{name} must be in (0, 1], got {density!r}")


def _check_block_density(name: str, density: Any) -> None:
    if not is_number(density) or not 1.0 <= density * BLOCK <= BLOCK:
        raise ValueError(f"{name} must be in [1/{BLOCK}, 1], at least one entry of every block, got {density!r}")


def _check_steps(name: str, steps: Any) -> None:
    if not is_count(steps):
        raise ValueError(f"{name}: warmup_steps must be an integer >= 0, got {steps!r}")


def _checked_warmup(name: str, densities: Any, steps: int, check: Callable[[str, Any], None]) -> tuple[float, ...]:
    """The densities of a warm-up as plain numbers."""
    try:
        found = tuple(plain(d) for d in ([densities] if isinstance(densities, str) else densities))
    except TypeError:
        raise TypeError(f"{name}: warmup_densities must be a sequence of densities, got {densities!r}") from None
    for density in found:
        check(f"{name}: warmup_densities", density)
    if not 0 < len(found) <= steps:
        raise ValueError(
            f"{name}: warmup_densities must be at least one density, and warmup_steps at least as many, got "
            f"{len(found)} densities for {steps!r} steps"
        )
    return found


def _density_at(step: int, density: float, warmup_steps: int, densities: Sequence[float] | None) -> float:
    if step >= warmup_steps:
        return density
    if densities is not None:
        return densities[len(densities) * step // warmup_steps]
    stage = _WARMUP_STAGES * step // warmup_steps + 1
    return density ** (stage / (_WARMUP_STAGES + 1))


def _check_wire(name: str, wire_dtype: Any) -> None:
    if wire_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name}: wire_dtype must be torch.float32, torch.bfloat16 or torch.float16, got {wire_dtype!r}"
        )


SPARSIFIERS = (TopK, Threshold, BlockTopK, RandomK, CAT)  # entries are selected; what is not sent can stay behind
Sparsifier = TopK | Threshold | BlockTopK | RandomK | CAT
Compressor = Sparsifier | Identity


def encode(record: Any) -> dict[str, Any]:
    """A record as plain data, for checkpoints that ``torch.load(weights_only=True)`` reads."""
    fields = {key: str(value) if isinstance(value, torch.dtype) else value for key, value in asdict(record).items()}
    if isinstance(record, CAT):
        fields["cost"] = encode(record.cost)
    return {"name": type(record).__name__, **fields}

"""Memories: what is kept of the entries that were not sent, and how the gradient accumulates in it.

MomentumCorrection  velocity <- momentum * velocity + gradient;  residual <- residual + velocity
Residual            residual <- residual + gradient; momentum after the exchange
NoMemory            what is not sent is lost
"""

from dataclasses import dataclass
from typing import Any

from fusedcomp.values import is_flag, is_number, plain


@dataclass(frozen=True)
class MomentumCorrection:
    """Accumulate the local velocity, so that a delayed entry carries the momentum it would have had (DGC, section 3.1).

    Args:
        masking: zero the velocity of entries that were sent (DGC, section 3.2). Off, density 1 is torch's SGD.

    Raises:
        TypeError: ``masking`` is not a bool.
    """

    masking: bool = True

    def __post_init__(self) -> None:
        if not is_flag(self.masking):
            raise TypeError(f"MomentumCorrection: masking must be True or False, got {self.masking!r}")
        object.__setattr__(self, "masking", plain(self.masking))


@dataclass(frozen=True)
class Residual:
    """Plain error feedback (Karimireddy et al., ICML 2019): the gradient accumulates, momentum follows the exchange.

    With momentum the update is a dense pass over all parameters, not work proportional to what was sent.
    """


@dataclass(frozen=True)
class NoMemory:
    """No error feedback: entries that are not sent are dropped. Biased; for comparison."""


Memory = MomentumCorrection | Residual | NoMemory


def default_memory(compressor: Any, momentum: float) -> Memory:
    """What is kept where nothing is said of it; what is no momentum is refused by checks.py, which comes after."""
    if getattr(compressor, "variant", None) == "stochastic":
        return NoMemory()
    return MomentumCorrection() if is_number(momentum) and momentum > 0 else Residual()


def accumulation(memory: Memory, nesterov: bool) -> str:
    """The name of the kernels' accumulate function."""
    if isinstance(memory, MomentumCorrection):
        return "nesterov" if nesterov else "momentum"
    return "residual" if isinstance(memory, Residual) else "none"

"""The bandit of JointSpar: probabilities under which gradients of sampled blocks vary least.

    variance(p) = sum_d |g_d|^2 / p_d                    of the estimate g_d / p_d for active blocks, else 0
    log w_d = log p_d + gain_d                           entropic mirror descent on it; what is not active gains nothing
    p <- argmin KL(q || w) over sum_d q_d = total, floor <= q_d <= 1
       = clip(c w, floor, 1), with the c of which the sum is right

Python's floats: some hundred numbers, and the same bits wherever the same ones go in.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence

# Of the largest square norm, per update: gradients shrink while a model trains, and under a bound that never fell the
# probabilities would come to rest. 69 updates halve it.
_FADING = 0.99


class Bandit:
    """Probabilities of blocks, and what moves them.

    Args:
        blocks: how many.
        total: what the probabilities add up to.
        floor: the least of each, at most total / blocks.
        learning_rate: alpha.
        shifted: take the paper's loss, which is never negative, in place of the gain.
    """

    def __init__(self, blocks: int, total: float, floor: float, learning_rate: float, shifted: bool) -> None:
        self.total, self.floor, self.learning_rate, self.shifted = total, floor, learning_rate, shifted
        self.probabilities = [total / blocks] * blocks
        self.bound = 0.0  # L^2: the largest square norm seen, fading

    def update(self, square_norms: Sequence[float | None], inclusion: Sequence[float]) -> None:
        """Learn from one draw.

        Args:
            square_norms: |g_d|^2 of active blocks, before any scaling; None where nothing was seen.
            inclusion: the chances with which the blocks were drawn.
        """
        seen = [square for square in square_norms if square is not None]
        self.bound = max([*seen, _FADING * self.bound])
        if self.bound == 0.0:  # nothing but zero gradients so far
            return
        log_weights = [
            math.log(p) + (0.0 if square is None else self._gain(square, chance))
            for p, square, chance in zip(self.probabilities, square_norms, inclusion, strict=True)
        ]
        self.probabilities = project(log_weights, self.total, self.floor)

    def _gain(self, square: float, chance: float) -> float:
        """The exponent alpha (|g| floor / (L chance))^2 / chance; shifted: less alpha / chance.

        The paper's exp(-a l / p) with l = -|g|^2 / p^2 (+ L^2 / floor^2), in units in which l is in [0, 1]:
        alpha = a L^2 / floor^2. Unscaled, its exponents underflow.
        """
        share = square / self.bound * (self.floor / chance) ** 2
        return self.learning_rate * (share - self.shifted) / chance


def project(log_weights: Sequence[float], total: float, floor: float) -> list[float]:
    """The q nearest to the weights, argmin KL(q || w), with sum q = total and floor <= q <= 1: clip(c w, floor, 1).

    The sum of clip(c w) rises with c, bending where an entry leaves the floor or reaches 1. The two bends around
    ``total`` are found by bisection; between them the sum is linear in c, so that c is known exactly.

    Args:
        log_weights: log w, of any size: nothing overflows.
        total: between len(log_weights) * floor and len(log_weights).
        floor: in (0, 1].
    """
    log_floor = math.log(floor)

    def clipped(log_c: float) -> list[float]:
        return [max(floor, math.exp(min(0.0, w + log_c))) for w in log_weights]

    bends = sorted([-w for w in log_weights] + [log_floor - w for w in log_weights])
    index = bisect_right(bends, total, key=lambda log_c: math.fsum(clipped(log_c)))
    begin = bends[max(0, index - 1)]
    # What moves until the next bend. At a bend an entry may round to either side: compare bends, not values.
    moving = [w for w in log_weights if log_floor - w <= begin < -w]
    if index == len(bends) or not moving:
        return clipped(begin)
    rest = sum(begin >= -w for w in log_weights) + floor * sum(begin < log_floor - w for w in log_weights)
    largest = max(moving)
    log_sum = largest + math.log(math.fsum(math.exp(w - largest) for w in moving))
    return clipped(max(begin, math.log(total - rest) - log_sum))


def draw(probabilities: Sequence[float], rng: random.Random, may_be_empty: bool = False) -> list[bool]:
    """Every block by itself; anew while none is active, unless that may be."""
    while True:
        active = [rng.random() < p for p in probabilities]
        if may_be_empty or any(active):
            return active


def inclusion(probabilities: Sequence[float], may_be_empty: bool = False) -> list[float]:
    """The chance of each block to be active in ``draw``: p / (1 - prod(1 - p)) where draws of none do not count."""
    none = 0.0 if may_be_empty else math.prod(1.0 - p for p in probabilities)
    return [min(1.0, p / (1.0 - none)) for p in probabilities]

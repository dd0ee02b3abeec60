"""JointSpar's bandit: the projection, the update, draws and their chances."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedcomp.bandit import Bandit, draw, inclusion, project

# ---- the projection --------------------------------------------------------------------------------------------------


@st.composite
def projections(draws: st.DrawFn) -> tuple[list[float], float, float]:
    """(log weights, total, floor), now and then out of the range of exp, equal, or at an end of what is feasible."""
    size = draws(st.sampled_from([1.0, 10.0, 2000.0]))
    log_weights = draws(st.lists(st.floats(-size, size), min_size=1, max_size=30))
    floor = draws(st.floats(1e-3, 1.0))
    share = draws(st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0))
    return log_weights, len(log_weights) * (floor + share * (1.0 - floor)), floor


def by_bisection(log_weights: Sequence[float], total: float, floor: float) -> list[float]:
    """The same by nothing but halving an interval of log c, in tensors."""
    w = torch.tensor(log_weights, dtype=torch.float64)
    low, high = -w.max() + math.log(floor) - 1.0, -w.min() + 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (w + middle).clamp(math.log(floor), 0.0).exp().sum() < total else (low, middle)
    return (w + high).clamp(math.log(floor), 0.0).exp().tolist()


@given(projections())
def test_the_projection_is_feasible_keeps_order_and_is_what_bisection_finds(case) -> None:
    log_weights, total, floor = case
    q = project(*case)
    assert math.fsum(q) == pytest.approx(total, rel=1e-12)
    assert all(floor <= x <= 1.0 for x in q)
    for (w, x), (v, y) in itertools.pairwise(sorted(zip(log_weights, q, strict=True))):
        assert x <= y
        assert w != v or x == y
    assert q == pytest.approx(by_bisection(*case), abs=1e-9)


def kl(q: Sequence[float], log_weights: Sequence[float]) -> float:
    """But for what is the same for all q of one sum."""
    return math.fsum(x * (math.log(x) - w) for x, w in zip(q, log_weights, strict=True))


@given(projections(), st.integers(0, 2**32))
def test_nothing_feasible_is_nearer_to_the_weights(case, seed) -> None:
    """Points around, and far from, the projection: probability moved between random pairs as far as bounds allow."""
    log_weights, total, floor = case
    q, rng = project(*case), random.Random(seed)
    best = kl(q, log_weights)
    for start in (q, [total / len(q)] * len(q)):
        other = list(start)
        for _ in range(20):
            i, j = rng.randrange(len(q)), rng.randrange(len(q))
            moved = rng.random() ** 3 * max(0.0, min(1.0 - other[i], other[j] - floor))
            if i != j:
                other[i], other[j] = other[i] + moved, other[j] - moved
            assert best <= kl(other, log_weights) + 1e-9 * (1.0 + abs(best))


# ---- the bandit ------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 1e6), min_size=2, max_size=20), st.floats(0.05, 1.0), st.booleans(), st.data())
def test_probabilities_stay_feasible(squares, budget, shifted, data) -> None:
    total = max(1.0, budget * len(squares))
    floor = data.draw(st.floats(1e-3, total / len(squares)))
    bandit, rng = Bandit(len(squares), total, floor, data.draw(st.floats(1e-3, 100.0)), shifted), random.Random(0)
    for _ in range(10):
        active = draw(bandit.probabilities, rng)
        seen = [square if on else None for square, on in zip(squares, active, strict=True)]
        bandit.update(seen, inclusion(bandit.probabilities))
        assert math.fsum(bandit.probabilities) == pytest.approx(total, rel=1e-12)
        assert all(floor <= p <= 1.0 for p in bandit.probabilities)


@pytest.mark.parametrize("shifted", [False, True])
def test_equal_norms_of_all_blocks_change_nothing(shifted: bool) -> None:
    bandit = Bandit(8, 4.0, 0.1, 0.3, shifted)
    bandit.update([2.0] * 8, [0.5] * 8)
    assert bandit.probabilities == pytest.approx([0.5] * 8, rel=1e-14)


def test_the_update_by_hand() -> None:
    """l = -|g|^2 / p^2 (+ L^2 / floor^2), w = p exp(-a l / p), with a = alpha floor^2 / L^2."""
    squares, floor, alpha = [4.0, 1.0, None, 0.25], 0.2, 0.5
    for shifted in (False, True):
        bandit = Bandit(4, 2.0, floor, alpha, shifted)
        bandit.update(squares, [0.5] * 4)
        a = alpha * floor**2 / 4.0
        losses = [0.0 if s is None else -s / 0.5**2 + shifted * 4.0 / floor**2 for s in squares]
        log_weights = [math.log(0.5) - a * loss / 0.5 for loss in losses]
        assert bandit.probabilities == pytest.approx(by_bisection(log_weights, 2.0, floor), abs=1e-12)


def test_blocks_that_were_not_seen_keep_their_place_and_zeros_teach_nothing() -> None:
    bandit = Bandit(3, 1.5, 0.1, 0.5, False)
    bandit.update([0.0, None, 0.0], [0.5] * 3)
    assert bandit.probabilities == [0.5] * 3
    assert bandit.bound == 0.0
    bandit.update([1.0, None, None], [0.5] * 3)
    first, second, third = bandit.probabilities
    assert first > 0.5 > second == third


def test_the_bound_fades_so_that_small_gradients_still_count() -> None:
    bandit = Bandit(2, 1.0, 0.1, 0.1, False)
    bandit.update([1e12, 1e12], [0.5] * 2)
    for number in range(1, 4001):
        bandit.update([1.0, 0.01], inclusion(bandit.probabilities))
        if number == 69:  # L^2 by half, L in 138
            assert bandit.bound == pytest.approx(1e12 / 2, rel=1e-2)
    assert bandit.bound == 1.0
    assert bandit.probabilities[0] > 0.8


def variance(squares: Sequence[float], probabilities: Sequence[float]) -> float:
    return math.fsum(s / p for s, p in zip(squares, probabilities, strict=True))


def lognormal_squares(seed: int, blocks: int = 20) -> list[float]:
    rng = random.Random(seed)
    return [math.exp(2 * rng.gauss(0.0, 0.7)) for _ in range(blocks)]


def optimum(squares: Sequence[float], total: float, floor: float) -> list[float]:
    """clip(c |g|, floor, 1)."""
    return project([math.log(s) / 2 for s in squares], total, floor)


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=15), st.floats(0.1, 1.0), st.integers(0, 2**32))
def test_probabilities_in_proportion_to_norms_vary_least(squares, share, seed) -> None:
    floor, rng = 0.1, random.Random(seed)
    total = len(squares) * (floor + share * (1 - floor))
    best = variance(squares, optimum(squares, total, floor))
    assert best <= variance(squares, [total / len(squares)] * len(squares)) * (1 + 1e-12)
    for _ in range(20):
        assert best <= variance(squares, project([rng.gauss(0, 2) for _ in squares], total, floor)) * (1 + 1e-12)


def trained_variance(squares: Sequence[float], alpha: float, shifted: bool, updates: int, seed: int = 0) -> float:
    """The mean over the last fifth of the updates; total 10 of 20, floor 0.1."""
    bandit, rng, found = Bandit(len(squares), 10.0, 0.1, alpha, shifted), random.Random(seed), []
    for _ in range(updates):
        active = draw(bandit.probabilities, rng)
        seen = [s if on else None for s, on in zip(squares, active, strict=True)]
        bandit.update(seen, inclusion(bandit.probabilities))
        found.append(variance(squares, bandit.probabilities))
    return math.fsum(found[-updates // 5 :]) / (updates // 5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_gain_form_comes_near_the_least_variance_and_the_shifted_one_does_not(seed: int) -> None:
    """20 lognormal norms, half of them active. The shift serves the regret proof; its noise is what is seen."""
    squares = lognormal_squares(seed)
    uniform, best = variance(squares, [0.5] * 20), variance(squares, optimum(squares, 10.0, 0.1))
    assert uniform > 1.2 * best
    gain = {alpha: trained_variance(squares, alpha, False, 4000) for alpha in (0.01, 0.1, 0.3)}
    shifted = {alpha: trained_variance(squares, alpha, True, 4000) for alpha in (0.01, 0.1)}
    assert gain[0.1] < 1.04 * best
    assert gain[0.3] < 1.02 * best
    assert gain[0.01] < 1.5 * best
    assert gain[0.01] < uniform
    assert shifted[0.01] > best + (gain[0.1] - best) * 2
    assert shifted[0.1] > uniform


FEW_AT_THE_FLOOR = [math.exp(2 * x) for x in (-2.0, -1.5, -1.0, -0.3, 0.0, 0.4, 1.0, 1.5)]


@pytest.mark.parametrize(
    ("squares", "floor", "at_the_floor"), [(lognormal_squares(3, 8), 0.1, 0), (FEW_AT_THE_FLOOR, 0.2, 2)]
)
def test_constant_norms_lead_to_probabilities_in_proportion(
    squares: list[float], floor: float, at_the_floor: int
) -> None:
    """Clipped at the floor and at 1."""
    bandit, rng, sums = Bandit(8, 4.0, floor, 0.3, False), random.Random(0), [0.0] * 8
    for step in range(8000):
        active = draw(bandit.probabilities, rng)
        bandit.update([s if on else None for s, on in zip(squares, active, strict=True)],
                      inclusion(bandit.probabilities))  # fmt: skip
        if step >= 4000:
            sums = [total + p / 4000 for total, p in zip(sums, bandit.probabilities, strict=True)]
    best = optimum(squares, 4.0, floor)
    assert sum(p == pytest.approx(floor) for p in best) >= at_the_floor
    assert sums == pytest.approx(best, abs=0.03)


# ---- draws -----------------------------------------------------------------------------------------------------------


def subsets(probabilities: Sequence[float]) -> Iterator[tuple[tuple[bool, ...], float]]:
    """Every set that is not empty and its chance, given that it is not."""
    none = math.prod(1 - p for p in probabilities)
    for active in itertools.product([False, True], repeat=len(probabilities)):
        if any(active):
            chance = math.prod(p if on else 1 - p for p, on in zip(probabilities, active, strict=True))
            yield active, chance / (1 - none)


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=7))
def test_estimates_are_unbiased_and_their_size_is_known(probabilities) -> None:
    """Over all sets there are: E[1 / p of what is drawn] = 1, and E|g|^2 = sum |g_d|^2 / p_d."""
    chances, everything = inclusion(probabilities), list(subsets(probabilities))
    for block, chance in enumerate(chances):
        assert math.fsum(c / chance for active, c in everything if active[block]) == pytest.approx(1.0, rel=1e-9)
    squares = [1.0 + d for d in range(len(probabilities))]
    sizes = [
        c * sum(s / p**2 for s, p, on in zip(squares, chances, active, strict=True) if on) for active, c in everything
    ]
    assert math.fsum(sizes) == pytest.approx(variance(squares, chances), rel=1e-9)


def test_draws_have_the_chances_they_should() -> None:
    probabilities, rng, times = [0.1, 0.3, 0.6], random.Random(0), 20_000
    counts = Counter(tuple(draw(probabilities, rng)) for _ in range(times))
    for active, chance in subsets(probabilities):
        assert counts[active] / times == pytest.approx(chance, abs=5 * math.sqrt(chance / times))
    assert counts[False, False, False] == 0


def test_draws_of_none_where_something_else_is_trained() -> None:
    probabilities, rng, times = [0.1, 0.3], random.Random(0), 20_000
    counts = Counter(tuple(draw(probabilities, rng, may_be_empty=True)) for _ in range(times))
    assert counts[False, False] / times == pytest.approx(0.9 * 0.7, abs=5 * math.sqrt(0.25 / times))
    assert inclusion(probabilities, may_be_empty=True) == probabilities

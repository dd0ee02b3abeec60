"""The oracles of CAT against their definitions, and choices of scaled gradients against the oracles.

alpha, beta, omega(T) are the shares of |g|^2 that a step of T entries is worth. The oracles find them by sorting; here
they are found by trying all sets of entries, or by a solver that knows no closed form.
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cat_oracle import (
    AFFINE,
    BOUND,
    KINDS,
    PACKETS,
    alphas,
    betas,
    chosen,
    costs_of,
    drawn,
    guaranteed,
    omegas,
    seeds,
    values_of,
)
from fusedcomp.costs import Terms

# ---- the oracles -----------------------------------------------------------------------------------------------------


@given(kind=KINDS, numel=st.integers(1, 8), seed=seeds)
def test_alpha_and_beta_are_of_the_best_entries(kind: str, numel: int, seed: int) -> None:
    """Of all sets of T, that which leaves least behind: sent as they are; as one number, of all numbers the best."""
    values = values_of(kind, numel, seed)
    if not values.any():
        return
    magnitudes = np.abs(values.double().numpy())
    square = (magnitudes**2).sum()
    for count, alpha, beta in zip(range(1, numel + 1), alphas(values), betas(values), strict=True):
        sets = [np.array(entries) for entries in itertools.combinations(magnitudes, count)]
        of_values = max((entries**2).sum() for entries in sets)
        left = min(square - (entries**2).sum() + ((entries - entries.mean()) ** 2).sum() for entries in sets)
        assert alpha == pytest.approx(of_values / square, rel=1e-9)
        assert beta == pytest.approx(1.0 - left / square, rel=1e-9, abs=1e-12)


@given(kind=KINDS, numel=st.integers(2, 200), seed=seeds, share=st.floats(0.0, 1.0))
def test_omega_is_of_the_best_chances(kind: str, numel: int, seed: int, share: float) -> None:
    """Invariants 1 and 7: chances in proportion to magnitudes, at most 1, with the sum T, found by halving."""
    values = values_of(kind, numel, seed)
    magnitudes = np.abs(values.double().numpy())
    magnitudes = magnitudes[magnitudes > 0]
    if len(magnitudes) < 2:
        return
    expected = 1 + round(share * (len(magnitudes) - 2))
    low, high = 0.0, 2.0 * magnitudes.sum() / expected
    for _ in range(300):
        middle = (low + high) / 2
        too_many = np.minimum(1.0, magnitudes / middle).sum() > expected
        low, high = (middle, high) if too_many else (low, middle)
    chances = np.minimum(1.0, magnitudes / high)
    assert abs(chances.sum() - expected) < 1e-6 * expected
    assert (chances > 0).all()
    assert (chances <= 1).all()
    best = (magnitudes**2 / chances).sum()
    assert omegas(values)[expected - 1] == pytest.approx((magnitudes**2).sum() / best, rel=1e-6)
    generator = np.random.default_rng(seed)
    for spread in (0.01, 0.3, 2.0):  # and none near them, or far from them, with no larger a sum does better
        other = np.minimum(1.0, chances * np.exp(spread * generator.standard_normal(len(chances))))
        other *= min(1.0, expected / other.sum())
        assert (magnitudes**2 / other).sum() >= best * (1 - 1e-6)


@given(kind=KINDS, numel=st.integers(2, 2000), seed=seeds)
def test_shares_are_at_most_alpha(kind: str, numel: int, seed: int) -> None:
    """Invariant 1: and omega rises to 1."""
    values = values_of(kind, numel, seed)
    if int((values != 0).sum()) < 2:
        return
    alpha, beta, omega = alphas(values), betas(values), omegas(values)
    assert (beta <= alpha * (1 + 1e-12)).all()
    assert (omega <= alpha[: len(omega)] * (1 + 1e-9)).all()
    assert (np.diff(omega) >= -1e-12).all()


# ---- any scale -------------------------------------------------------------------------------------------------------


def chosen_signs(values: Tensor, terms: Terms) -> int:
    return chosen(values, terms, scale=torch.zeros(1))


@pytest.mark.parametrize(
    ("choose", "shares", "bound"),
    [(chosen, alphas, BOUND), (chosen_signs, betas, BOUND), (drawn, guaranteed, 0.995 * BOUND)],
    ids=["sparse", "sparse_quantized", "stochastic"],
)
@given(kind=KINDS, seed=seeds, terms=AFFINE | PACKETS, factor=st.floats(1e-3, 1e3))
def test_any_scale_costs_no_more_than_the_bound(
    choose: Callable[..., int],
    shares: Callable[[Tensor], np.ndarray],
    bound: float,
    kind: str,
    seed: int,
    terms: Terms,
    factor: float,
) -> None:
    """Invariant 2: a factor that is no power of two moves values to other bins, and T with them, but not far."""
    values = values_of(kind, 3000, seed)
    worth = shares(values)
    rates = worth / costs_of(terms, np.arange(1, len(worth) + 1))
    assert rates[choose(-factor * values, terms) - 1] >= bound * rates.max() * (1 - 1e-6)

"""What CAT is to choose, in float64 and by sorting, and what its twins choose."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fusedcomp.costs import Terms
from fusedcomp.kernels.reference.tune import choose_draws, choose_entries, tally_magnitudes
from fusedcomp.kernels.segments import BLOCK
from fusedcomp.kernels.tune import COUNTERS, MAGNITUDES, STEPS

seeds = st.integers(0, 2**31)
BOUND = 1.0 / (1.0 + 1.0 / STEPS.value) ** 2  # of the best rate, which the rate found has at least


def values_of(kind: str, numel: int, seed: int) -> Tensor:
    """f32, of kinds that gradients are of, and of some that they are not."""
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(numel, generator=draw, dtype=torch.float64)
    if kind == "heavy":
        normal = normal**5
    if kind == "ties":
        normal = (2 * normal).round()
    if kind == "alike":
        normal = normal.sign()
    if kind == "wide":
        normal = normal * 2.0 ** (torch.rand(numel, generator=draw) * 20 - 10)
    if kind == "one":
        normal[0] = 1e4
    return normal.float()


KINDS = st.sampled_from(["normal", "heavy", "ties", "alike", "wide", "one"])
AFFINE = st.tuples(st.floats(1e-3, 1e3), st.floats(0.0, 1e6)).map(lambda of: Terms(*of))
PACKETS = st.tuples(st.floats(1.0, 1e3), st.floats(0.0, 1e4), st.integers(1, 400), st.integers(0, 300)).map(
    lambda of: Terms(*of)
)


def chosen(values: Tensor, terms: Terms, room: int = 1 << 30, scale: Tensor | None = None) -> int:
    """The number of entries that the twins find; ``scale``: out, where they are sent as that."""
    counters = torch.zeros(COUNTERS, MAGNITUDES, dtype=torch.int32)
    tally_magnitudes(counters, nn.functional.pad(values, (0, -len(values) % BLOCK)))
    ranks, wanted = torch.tensor([-7]), torch.tensor([-7], dtype=torch.int32)
    costs = torch.tensor([terms.each, terms.fixed], dtype=torch.float64)
    shape = torch.tensor([terms.whole, terms.lead])
    refining = torch.tensor([0]), torch.tensor([0], dtype=torch.int32)
    choose_entries(costs, shape, counters, ranks, wanted, *refining, scale, room=room, numel=len(values))
    assert not counters.any()
    assert int(ranks) == min(max(int(wanted), 1), room)
    return int(wanted)


def drawn(values: Tensor, terms: Terms, room: int = 1 << 30) -> int:
    """The number of entries that the twins draw, if they are not all."""
    counters = torch.zeros(COUNTERS, MAGNITUDES, dtype=torch.int32)
    tally_magnitudes(counters, nn.functional.pad(values, (0, -len(values) % BLOCK)))
    ranks, wanted = torch.tensor([-7]), torch.tensor([-7], dtype=torch.int32)
    costs = torch.tensor([terms.each, terms.fixed], dtype=torch.float64)
    shape, widths = torch.tensor([terms.whole, terms.lead]), torch.tensor([0], dtype=torch.int32)
    choose_draws(costs, shape, counters, ranks, wanted, widths, room=room, numel=1 << 30)
    assert not counters.any()
    assert int(ranks) == min(max(int(wanted), 1), room)
    return int(wanted) - 1


def costs_of(terms: Terms, entries: np.ndarray) -> np.ndarray:
    return terms.each * np.ceil((entries + terms.lead) / terms.whole) + terms.fixed


def alphas(values: Tensor) -> np.ndarray:
    """alpha(1), alpha(2), ... in float64, by sorting."""
    squares = np.sort(values.double().numpy() ** 2)[::-1].cumsum()
    return squares / squares[-1]


def betas(values: Tensor) -> np.ndarray:
    """The same of what is sent as its mean."""
    magnitudes = np.sort(np.abs(values.double().numpy()))[::-1]
    return magnitudes.cumsum() ** 2 / np.arange(1, len(values) + 1) / (magnitudes**2).sum()


def omegas(values: Tensor) -> np.ndarray:
    """omega(1), omega(2), ...: |g|^2 over the least mean square of so many entries that are drawn independently.

    Chances are min(1, |g| / mu): of all r that might be certain, the smallest that leaves none of the others above 1.
    """
    magnitudes = np.sort(np.abs(values.double().numpy()))[::-1]
    magnitudes = magnitudes[magnitudes > 0]
    squares = np.concatenate([[0.0], (magnitudes**2).cumsum()])
    rest = np.concatenate([magnitudes[::-1].cumsum()[::-1], [0.0]])
    found, r = [], 0
    for expected in range(1, len(magnitudes)):
        while (expected - r) * magnitudes[r] > rest[r]:
            r += 1
        found.append(squares[-1] / (squares[r] + rest[r] ** 2 / (expected - r)))
    return np.array([*found, 1.0])


def guaranteed(values: Tensor) -> np.ndarray:
    """omega of k = 1, 2, ... entries that are drawn: of k - 1 by independent draws; of one there is none."""
    omega = omegas(values)
    return np.concatenate([[0.0], omega[:-2], [1.0]]) if len(omega) > 1 else omega

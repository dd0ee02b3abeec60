"""Checkpoints that are loaded into the very objects they were taken from, as a search for a learning rate does.

A model, an optimizer and a sampler that have gone on since must go back to the bit: what they remember outside the
checkpoint (rooms, headers on their way, norms, active blocks) must be forgotten, not only be set where it is new.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest

import ranks
from fusedcomp import CAT, SGD, AffineCost, NoMemory, Threshold, TopK
from fusedcomp.jointspar import JointSpar
from sampled import active, probabilities, train

SGD_ = functools.partial(SGD, lr=0.05, momentum=0.9, bucket_cap_mb=0.02)
OPTIMIZERS: dict[str, Callable[..., SGD]] = {
    "threshold": functools.partial(SGD_, compressor=Threshold(0.02)),
    "cat": functools.partial(SGD_, compressor=CAT(AffineCost(fixed=100.0))),
    "cat, stochastic": functools.partial(
        SGD_, compressor=CAT(AffineCost(fixed=100.0), variant="stochastic"), memory=NoMemory()
    ),
}
STEPS, OTHER_DATA = 15, 1000


def states_of(*holders: Any) -> Any:
    return copy.deepcopy([holder.state_dict() for holder in holders])


@pytest.mark.parametrize("first", [0, 3, 12])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_back(name: str, first: int) -> None:
    model = ranks.net()
    optimizer = OPTIMIZERS[name](model.parameters())
    ranks.train(model, optimizer, first)
    saved = states_of(model, optimizer)
    ranks.train(model, optimizer, STEPS, first)
    expected = ranks.digest(model)
    ranks.train(model, optimizer, 5, OTHER_DATA)
    for holder, state in zip((model, optimizer), saved, strict=True):
        holder.load_state_dict(state)
    ranks.train(model, optimizer, STEPS, first)
    assert len({expected, ranks.digest(model)}) == 1  # pytest would take minutes to tell them apart


@pytest.mark.parametrize("first", [0, 3, 12, 13])
def test_a_sampler_goes_back(first: int) -> None:
    """With norms of two redraws on their way; 13 is in the middle of an active set's steps."""
    model = ranks.net()
    optimizer = SGD_(model.parameters(), compressor=TopK(0.05))
    sampler = JointSpar(optimizer, 0.6, lag=2, redraw_every=3, learning_rate=1.0)
    train(model, sampler, first)
    saved = states_of(model, optimizer, sampler)
    train(model, sampler, STEPS, first)
    expected, drawn = ranks.digest(model), (probabilities(sampler), active(sampler))
    train(model, sampler, 5, OTHER_DATA)
    for holder, state in zip((model, optimizer, sampler), saved, strict=True):
        holder.load_state_dict(state)
    train(model, sampler, STEPS, first)
    assert (probabilities(sampler), active(sampler)) == drawn
    assert len({expected, ranks.digest(model)}) == 1
    assert probabilities(sampler) != [0.6] * 4

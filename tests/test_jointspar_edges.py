"""JointSpar where a draw is of nothing, of everything, or of blocks with unequal chances; and under LARS's norms."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import ranks
from fusedcomp import LARS, Identity, NoMemory, TopK
from fusedcomp.compressors import Compressor
from fusedcomp.jointspar import JointSpar
from fusedcomp.kernels.headers import TRAILER_WORDS
from sampled import OPTIMIZERS, drawing, probabilities, train
from test_jointspar_grads import SGD_, SMALL, still

# ---- draws of nothing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch.SGD", "SGD", "SGD-TopK"])
def test_a_draw_of_none_moves_nothing_and_teaches_nothing(name: str) -> None:
    """Though momenta and residuals wait in every block; what is always active is trained on."""
    model = ranks.net()
    always = model[-1].bias
    sampler = JointSpar(OPTIMIZERS[name](model), 0.5, exclude=[always], lag=0, learning_rate=1.0)
    train(model, sampler, 3)
    with drawing([False] * 4, [True] * 4):
        sampler.draw()
        chances = probabilities(sampler)
        before = [param.detach().clone() for block in sampler.blocks for param in block]
        bias = always.detach().clone()
        ranks.loss_of(model, 0, 7).backward()
        sampler.optimizer.step()
        sampler.draw()  # with lag 0 it learns from the step before
    assert chances != pytest.approx([0.5] * 4, abs=1e-3)
    assert probabilities(sampler) == pytest.approx(chances, rel=1e-14)
    after = [param for block in sampler.blocks for param in block]
    assert all(map(torch.equal, before, after))
    assert not torch.equal(always, bias)


# ---- a budget of everything ------------------------------------------------------------------------------------------


def with_and_without(rank: int, world: int, sampling: str) -> tuple[bytes, bytes]:
    plain, sampled = ranks.net(), ranks.net()
    optimizer = OPTIMIZERS["SGD-TopK"](plain)
    for step in range(4):
        optimizer.zero_grad()
        ranks.loss_of(plain, rank, step).backward()
        optimizer.step()
    train(sampled, JointSpar(OPTIMIZERS["SGD-TopK"](sampled), budget=1.0, sampling=sampling), 4, 0, rank)
    return ranks.digest(plain), ranks.digest(sampled)


@pytest.mark.parametrize("sampling", ["shared", "per_rank"])
def test_on_ranks_too_a_budget_of_all_blocks_is_the_run_without(sampling: str) -> None:
    assert len({bits for pair in ranks.run(with_and_without, 2, sampling) for bits in pair}) == 1


# ---- unequal chances -------------------------------------------------------------------------------------------------


def test_expected_bytes_of_unequal_chances() -> None:
    """Over all sets there are: trailers and what is in no block always, and in the mean sum_d p_d * bytes_d."""
    model = ranks.net()
    always = model[-1].bias
    optimizer = SGD_(model.parameters(), **SMALL)
    sampler = JointSpar(optimizer, 0.5, 0.05, exclude=[always])
    chances = [0.1, 0.9, 0.7, 0.3]
    sampler._bandit.probabilities = chances
    mean = 0.0
    for active in itertools.product((False, True), repeat=4):
        with still(), drawing(active):
            sampler.draw()
        ranks.loss_of(model, 0, 0).backward()
        optimizer.step()
        chance = math.prod(p if on else 1.0 - p for p, on in zip(chances, active, strict=True))
        mean += chance * optimizer.metrics()["bytes_sent"].item()
    trailers = sum(4 * (len(bucket.params) + TRAILER_WORDS) for bucket in optimizer._buckets)
    sizes = [sum(param.nbytes for param in block) for block in sampler.blocks]
    expected = sum(p * size for p, size in zip(chances, sizes, strict=True))
    assert mean == pytest.approx(trailers + always.nbytes + expected)
    share, dense = sampler.metrics()["expected_share"].item(), optimizer.metrics()["bytes_dense"].item()
    assert mean - trailers == pytest.approx(share * dense)


# ---- LARS ------------------------------------------------------------------------------------------------------------


def last_move_of_lars(chances: Sequence[float | None], compressor: Compressor) -> dict[str, Tensor]:
    """How far the parameters of blocks move in the last of these steps, the only one with a learning rate.

    All blocks are active in each, with this chance; None: without a sampler.
    """
    model = ranks.net()
    torch.nn.init.constant_(model[3].bias, 0.5)  # of a parameter that is 0 there is no ratio
    options = {"compressor": compressor, "memory": NoMemory(), "exclude_1d_from_trust": False}
    optimizer = LARS(model.parameters(), lr=0.0, momentum=0.0, eps=0.0, **options)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    sampler = JointSpar(optimizer, 0.5, 0.05, exclude=[model[-1].bias])
    if chances[0] is None:
        sampler.remove()
    for number, chance in enumerate(chances, 1):
        optimizer.param_groups[0]["lr"] = 0.5 * (number == len(chances))
        if chance is None:
            optimizer.zero_grad()
        else:
            sampler._bandit.probabilities = [chance] * 4
            with still(), drawing([True] * 4):
                sampler.draw()
        ranks.loss_of(model, 0, 0).backward()
        optimizer.step()
    blocks = {param for block in sampler.blocks for param in block}
    return {name: param.detach() - before[name] for name, param in model.named_parameters() if param in blocks}


def same_moves(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    return [name for name, move in some.items() if move.any() and torch.equal(move, others[name])]


@pytest.mark.parametrize("compressor", [Identity(), TopK(0.25)])
def test_under_lars_a_chance_cancels(compressor: Compressor) -> None:
    """In one process: the ratio is of |g / p|. To the bit, as the chance is a power of two."""
    without = last_move_of_lars([None], compressor)
    assert same_moves(without, last_move_of_lars([0.5], compressor)) == list(without)


def test_under_lars_a_chance_that_changed_counts_where_gradients_are_compressed() -> None:
    """Their ratio is of the last exchange's |g / p|: by p_old / p_new the step is too long."""
    compressed = {"2.weight", "6.weight"}
    without = last_move_of_lars([None, None], TopK(0.25))
    changed = last_move_of_lars([0.5, 0.25], TopK(0.25))
    assert set(same_moves(without, changed)) == without.keys() - compressed
    for name in compressed:
        assert float(changed[name].norm() / without[name].norm()) == pytest.approx(0.5 / 0.25, rel=1e-3)

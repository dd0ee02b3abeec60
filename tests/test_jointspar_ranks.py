"""JointSpar on several ranks, in DDP, and through checkpoints."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomp
import ranks
from fusedcomp import SGD, TopK
from fusedcomp.bandit import Bandit, inclusion
from fusedcomp.jointspar import JointSpar
from ranks import message_of
from sampled import OPTIMIZERS, active, batch_loss, drawing, mlp, probabilities, raw_squares, train

# ---- ranks -----------------------------------------------------------------------------------------------------------


def on_ranks(rank: int, world: int, name: str, sampling: str, loss: str) -> tuple[bytes, list[float], list[Any]]:
    model = ranks.net(seed=rank)
    sampler = JointSpar(OPTIMIZERS[name](model), 0.6, sampling=sampling, loss=loss, learning_rate=1.0)
    sets = []
    for step in range(6):
        train(model, sampler, 1, step, rank)
        sets.append(active(sampler))
    return ranks.digest(model), probabilities(sampler), sets


@pytest.mark.parametrize("loss", ["gain", "shifted"])
@pytest.mark.parametrize("name", ["SGD-TopK", "LARS-TopK"])
def test_ranks_share_draws_and_probabilities(name: str, loss: str) -> None:
    first, second = ranks.run(on_ranks, 2, name, "shared", loss)
    assert first == second
    assert first[1] != [0.6] * 4


@pytest.mark.parametrize("name", ["SGD", "SGD-TopK", "LARS-TopK"])
def test_ranks_may_draw_for_themselves(name: str) -> None:
    """And still have the same parameters: a rank without a gradient adds zeros."""
    (weights, p, sets), (weights_too, other_p, other_sets) = ranks.run(on_ranks, 2, name, "per_rank", "gain")
    assert weights == weights_too
    assert p != other_p
    assert sets != other_sets


def norms_over_ranks(rank: int, world: int) -> tuple[list[float], list[float]]:
    """(what the sampler has after two steps, what mean squares over ranks of raw norms give)."""
    model = mlp(4)
    sampler = JointSpar(SGD(model.parameters(), lr=0.1), 0.6, lag=0, learning_rate=0.7)
    bandit = Bandit(4, 0.6 * 4, 0.3, 0.7, False)
    for step in range(3):
        sampler.draw()
        if step == 2:
            break
        squares = torch.tensor(raw_squares(model, rank, step), dtype=torch.float64)
        dist.all_reduce(squares)
        seen = [s / world if on else None for s, on in zip(squares.tolist(), active(sampler), strict=True)]
        bandit.update(seen, inclusion(bandit.probabilities))
        batch_loss(model, rank, step).backward()
        sampler.optimizer.step()
    return probabilities(sampler), bandit.probabilities


def test_shared_norms_are_mean_squares_over_ranks() -> None:
    (got, expected), other = ranks.run(norms_over_ranks, 2)
    assert got == other[0]
    assert got == pytest.approx(expected, rel=1e-5)


def mean_of_per_rank_gradients(rank: int, world: int) -> list[float]:
    """Parameters after one SGD step of lr 1, where only rank 0 has the first block active, only rank 1 the second."""
    params = [nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1, 1))]
    sampler = JointSpar(SGD(params, lr=1.0), 0.5, sampling="per_rank")
    with drawing([rank == 0, rank == 1]):
        sampler.draw()
    (params[0] + 10 * params[1]).sum().backward()
    sampler.optimizer.step()
    return [p.item() for p in params]


def test_a_rank_without_a_gradient_adds_zeros() -> None:
    chance = 0.5 / 0.75
    for got in ranks.run(mean_of_per_rank_gradients, 2):
        assert got == pytest.approx([-1 / chance / 2, -10 / chance / 2])


def in_ddp(rank: int, world: int) -> tuple[bytes, list[float], list[Any]]:
    model = mlp(5)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    sampler = JointSpar(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0.5, learning_rate=1.0)
    sets = []
    for step in range(8):
        sampler.draw()
        batch_loss(wrapped, rank, step).backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        sampler.optimizer.step()
        sets.append(active(sampler))
    return ranks.digest(model), probabilities(sampler), sets


def test_in_ddp_it_is_the_run_of_one_process_on_all_data() -> None:
    first, second = ranks.run(in_ddp, 2)
    assert first == second
    model = mlp(5)
    sampler = JointSpar(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0.5, learning_rate=1.0)
    sets = []
    for step in range(8):
        sampler.draw()
        ((batch_loss(model, 0, step) + batch_loss(model, 1, step)) / 2).backward()
        sampler.optimizer.step()
        sets.append(active(sampler))
    assert sets == first[2]
    assert len({tuple(s) for s in sets}) > 3
    assert probabilities(sampler) == pytest.approx(first[1], rel=1e-4)
    got = torch.frombuffer(bytearray(first[0]), dtype=torch.float32)
    expected = torch.frombuffer(bytearray(ranks.digest(model)), dtype=torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


COMPRESSED = {1: "2.weight", 2: "6.weight"}  # block of ranks.net() -> its parameter that is large enough


def in_ddp_with_the_hook(rank: int, world: int) -> tuple[bytes, list[list[bool]], list[list[bool]]]:
    """The digest; and for every step which of the compressed blocks were active, and which residuals changed."""
    model = ranks.net()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    state = fusedcomp.ddp.CompressionState(TopK(0.1, scope="tensor"), params=model.named_parameters())
    wrapped.register_comm_hook(state, fusedcomp.ddp.compress_hook)
    sampler = JointSpar(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 0.5)
    were_active, changed, before = [], [], {}
    for step in range(7):
        sampler.draw()
        ranks.loss_of(wrapped, rank, step).backward()
        sampler.optimizer.step()
        kept = state.state_dict()["state"]
        residuals = {name: kept[name]["residual"].clone() for name in COMPRESSED.values()}
        if before:
            were_active.append([active(sampler)[block] for block in COMPRESSED])
            changed.append([not torch.equal(residuals[name], before[name]) for name in residuals])
        before = residuals
    return ranks.digest(model), were_active, changed


def test_with_the_hook_of_ddp_inactive_blocks_keep_their_residual() -> None:
    first, second = ranks.run(in_ddp_with_the_hook, 2)
    assert first == second
    _, were_active, changed = first
    assert were_active == changed
    assert len({tuple(s) for s in were_active}) > 1


def at_odds(rank: int, world: int) -> list[str]:
    model = mlp(4)
    optimizer = SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = JointSpar(optimizer, 0.5)
    alone.draw()
    batch_loss(model, rank, 0).backward()
    optimizer.step()
    said = message_of(
        lambda: (alone.draw() if rank == 0 else None, batch_loss(model, rank, 1).backward(), optimizer.step())
    )
    alone.remove()
    return [
        message_of(lambda: JointSpar(optimizer, 0.5 + rank / 10)),
        message_of(lambda: JointSpar(optimizer, 0.5, exclude=[model[0]] if rank else [])),
        message_of(lambda: JointSpar(optimizer, 0.5, seed=-rank)),
        message_of(lambda: JointSpar(theirs, 0.5, sampling="per_rank")),
        said,
    ]  # fmt: skip


def test_ranks_at_odds_all_raise() -> None:
    first, second = ranks.run(at_odds, 2)
    for said in (first, second):
        assert said[0] == ("ValueError: ranks were given different settings: budget is 0.5 on rank 0, 0.6 on rank 1")
        assert (
            said[1] == "ValueError: ranks were given different settings: number of blocks is 4 on rank 0, 3 on rank 1"
        )
        assert "sampling='per_rank' needs a fusedcomp optimizer" in said[3]
    assert first[2] == "ValueError: rank 1 refused its arguments; its own error says why"
    assert second[2] == "ValueError: JointSpar: seed must be an integer >= 0, got -1"
    assert "another rank failed during the exchange" in first[4]
    assert "without a draw() since the last step" in second[4]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("redraw_every", [1, 3])
@pytest.mark.parametrize("name", ["torch.Adam", "SGD-TopK", "LARS"])
def test_a_run_goes_on_bit_for_bit(name: str, redraw_every: int) -> None:
    """Also from the middle of an active set's steps, with norms on their way."""

    def build(seed: int) -> tuple[nn.Sequential, JointSpar]:
        model = ranks.net(seed)
        options = {"redraw_every": redraw_every, "lag": 2, "learning_rate": 1.0, "seed": 3}
        return model, JointSpar(OPTIMIZERS[name](model), 0.6, **options)

    model, sampler = build(0)
    train(model, sampler, 7)
    saved = through_a_file([model.state_dict(), sampler.optimizer.state_dict(), sampler.state_dict()])
    train(model, sampler, 7, 7)
    again, resumed = build(1)
    for holder, state in zip((again, resumed.optimizer, resumed), saved, strict=True):
        holder.load_state_dict(state)
    train(again, resumed, 7, 7)
    assert ranks.digest(model) == ranks.digest(again)
    assert probabilities(sampler) == probabilities(resumed)
    assert probabilities(sampler) != [0.6] * 4


def resume_on_ranks(rank: int, world: int, sampling: str) -> bool:
    model, again = mlp(4), mlp(4, seed=1)
    sampler = JointSpar(SGD(model.parameters(), lr=0.1), 0.6, sampling=sampling, learning_rate=1.0)
    resumed = JointSpar(SGD(again.parameters(), lr=0.1), 0.6, sampling=sampling, learning_rate=1.0)
    train(model, sampler, 4, 0, rank)
    for holder, state in zip((again, resumed.optimizer, resumed),
                             through_a_file([model.state_dict(), sampler.optimizer.state_dict(), sampler.state_dict()]),
                             strict=True):  # fmt: skip
        holder.load_state_dict(state)
    train(model, sampler, 4, 4, rank)
    train(again, resumed, 4, 4, rank)
    return ranks.digest(model) == ranks.digest(again) and probabilities(sampler) == probabilities(resumed)


@pytest.mark.parametrize("sampling", ["shared", "per_rank"])
def test_a_run_of_ranks_goes_on_bit_for_bit(sampling: str) -> None:
    assert ranks.run(resume_on_ranks, 2, sampling) == [True, True]


def test_checkpoints_that_are_refused_change_nothing() -> None:
    model = mlp(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = JointSpar(optimizer, 0.5)
    train(model, sampler, 4)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match="has version 2, this JointSpar 1"):
        sampler.load_state_dict({**state, "version": 2})
    sampler.remove()
    for options, words in (
        ({"budget": 0.6}, "the sampler's checkpoint has budget=0.5, this one 0.6"),
        ({"budget": 0.5, "min_probability": 0.1}, "the sampler's checkpoint has min_probability=0.25, this one 0.1"),
        ({"budget": 0.5, "exclude": [model[0]]}, "the sampler's checkpoint has 4 blocks, this one 3"),
    ):
        other = JointSpar(optimizer, **options)
        before = probabilities(other)
        with pytest.raises(ValueError, match="sampler's checkpoint") as caught:
            other.load_state_dict(state)
        assert words in str(caught.value)
        assert probabilities(other) == before
        other.remove()

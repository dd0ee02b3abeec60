"""Clipping, void steps and loss scales on the optimizers: against torch where that is the meaning, bit for bit else."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fusedcomp import SGD, MomentumCorrection, TopK
from guarded import CONFIGS, IDS, build, flat_state, step
from ranks import average_gradients, batch, digest, loss_of, message_of, net, run, train

# ---- clipping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_clip_of_the_model_is_clip_grad_norm_on_one_rank(config: dict[str, Any]) -> None:
    mine, theirs = net(), net()
    clipped, plain = build(mine, config, max_grad_norm=0.3), build(theirs, config, overlap=False)
    for number in range(6):
        step(mine, clipped, 0, number)
        plain.zero_grad()
        loss_of(theirs, 0, number).backward()
        assert nn.utils.clip_grad_norm_(theirs.parameters(), 0.3) > 0.3  # there is something to clip
        plain.step()
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def _local_clip(rank: int, world: int, scope: str, compressed: bool) -> bool:
    mine, theirs = net(), net()
    settings = {"lr": 0.05, "momentum": 0.9, "max_grad_norm": 0.2, "clip_scope": scope, "bucket_cap_mb": 100.0}
    if compressed:  # everything is sent, through the whole of the compress side
        settings |= {"compressor": TopK(1.0), "memory": MomentumCorrection(masking=False), "_always_sparse": True}
    ours = SGD(mine.parameters(), **settings)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    for number in range(4):
        step(mine, ours, rank, number)
        reference.zero_grad()
        loss_of(theirs, rank, number).backward()
        groups = [[p] for p in theirs.parameters()] if scope == "tensor" else [list(theirs.parameters())]
        for group in groups:  # with Identity one bucket holds them all
            nn.utils.clip_grad_norm_(group, 0.2 * world**0.5)
        average_gradients(theirs)
        reference.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    return True


@pytest.mark.parametrize(
    ("scope", "compressed"),
    [("model", False), ("bucket", False), ("tensor", False), ("model", True), ("tensor", True)],
)
def test_every_rank_clips_its_own_gradient(scope: str, compressed: bool) -> None:
    assert all(run(_local_clip, 2, scope, compressed))


def test_clipping_by_bucket_and_tensor_overlaps_and_by_model_does_not() -> None:
    for scope, launched in (("bucket", True), ("tensor", True), ("model", False)):
        model = net()
        clip = {"max_grad_norm": 1.0, "clip_scope": scope}
        optimizer = SGD(model.parameters(), lr=0.1, compressor=TopK(0.1), bucket_cap_mb=0.01, **clip)
        loss_of(model, 0, 0).backward()
        assert (optimizer._backward.next > 0) == launched
        optimizer.step()


def test_clip_grad_norm_after_backward_raises_with_the_way_out() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, compressor=TopK(0.1), bucket_cap_mb=0.01)
    loss_of(model, 0, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert "max_grad_norm" in message_of(optimizer.step)


# ---- void steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_two_halves_change_nothing(config: dict[str, Any]) -> None:
    one, two = net(), net()
    plain, guarded = build(one, config), build(two, config, skip_nonfinite=True)
    train(one, plain, 7)
    train(two, guarded, 7)
    assert digest(one) == digest(two)
    assert all(map(torch.equal, flat_state(plain), flat_state(guarded)))
    assert guarded.skipped == 0


def _void_steps(rank: int, world: int, config: dict[str, Any]) -> tuple[bytes, int]:
    """Some steps are void, by one rank or another; what remains must be a run without them."""
    model, unharmed = net(), net()
    optimizer, reference = build(model, config, skip_nonfinite=True), build(unharmed, config)
    bad = {1: (0, float("inf")), 4: (1, float("nan")), 5: (0, -float("inf")), 8: (1, float("inf"))}
    good = 0
    for number in range(11):
        if number in bad:
            before, states = digest(model), flat_state(optimizer)
            who, value = bad[number]
            step(model, optimizer, rank, number, value if rank == who % world else 1.0)
            assert digest(model) == before
            assert all(map(torch.equal, states, flat_state(optimizer)))
        else:
            step(model, optimizer, rank, number)
            step(unharmed, reference, rank, number)
            good += 1
        assert optimizer.skipped == int(optimizer.metrics()["skipped"]) == number + 1 - good
    assert digest(model) == digest(unharmed)
    assert all(map(torch.equal, flat_state(optimizer), flat_state(reference)))
    assert optimizer.state_dict()["param_groups"][0]["fusedcomp"]["step"] == good
    return digest(model), optimizer.skipped


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_a_step_that_is_not_finite_anywhere_is_void_everywhere(config: dict[str, Any]) -> None:
    first, second = run(_void_steps, 2, config)
    assert first == second


def _thousand(rank: int, world: int) -> bytes:
    """1,000 steps with random injections, the verdict alone deciding, end where those without them do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))
    unharmed = copy.deepcopy(model)
    config = {"compressor": TopK(0.02), "momentum": 0.9}
    optimizer, reference = build(model, config, skip_nonfinite=True), build(unharmed, config)
    fate = torch.Generator().manual_seed(5)  # the same on all ranks
    voids = 0
    for number in range(1000):
        draw = torch.rand(2, generator=fate)
        inputs, targets = batch(rank, number, 8)
        losses = [nn.functional.cross_entropy(m(inputs.flatten(1)), targets) for m in (model, unharmed)]
        void = bool(draw[0] < 0.1)
        voids += void
        poison = float("nan") if void and rank == int(draw[1] * world) else 1.0
        optimizer.zero_grad()
        (losses[0] * poison).backward()
        optimizer.step()
        if not void:
            reference.zero_grad()
            losses[1].backward()
            reference.step()
    assert optimizer.skipped == voids > 50
    assert digest(model) == digest(unharmed)
    return digest(model)


def test_a_thousand_steps_with_random_injections() -> None:
    first, second = run(_thousand, 2)
    assert first == second


def test_one_parameter_that_is_not_finite_is_enough() -> None:
    """A bias in a dense bucket, a frozen neighbour, a parameter without a gradient."""
    model = net()
    optimizer = build(model, CONFIGS[0], skip_nonfinite=True)
    step(model, optimizer, 0, 0)
    before, states = digest(model), flat_state(optimizer)
    optimizer.zero_grad()
    handle = model[8].bias.register_hook(lambda grad: grad * float("nan"))
    model[0].weight.requires_grad_(False)
    loss_of(model, 0, 1).backward()
    optimizer.step()
    handle.remove()
    assert digest(model) == before
    assert all(map(torch.equal, states, flat_state(optimizer)))


def test_a_void_step_and_an_error_leave_states_usable() -> None:
    """The half that holds after a step that failed: the failing rank keeps what it had."""
    model = net()
    optimizer = build(model, CONFIGS[0], skip_nonfinite=True)
    for number in range(3):
        step(model, optimizer, 0, number)
    states = flat_state(optimizer)
    loss_of(model, 0, 3).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # after it was sent
    assert "was changed" in message_of(optimizer.step)
    optimizer.zero_grad()
    last = optimizer.state[model[6].weight]["residual"]
    assert last.isfinite().all()
    step(model, optimizer, 0, 4)
    assert len(flat_state(optimizer)) == len(states)


def test_resume_in_the_second_half() -> None:
    for steps in (3, 4):
        model, other = net(), net()
        optimizer = build(model, CONFIGS[0], skip_nonfinite=True)
        train(model, optimizer, steps)
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        train(model, optimizer, 4, first=steps)
        other.load_state_dict(weights)
        resumed = build(other, CONFIGS[0], skip_nonfinite=True)
        resumed.load_state_dict(saved)
        train(other, resumed, 4, first=steps)
        assert digest(model) == digest(other)


def _saved_on_one_rank(rank: int, world: int) -> bytes:
    """A void step in a warm-up, then a checkpoint of one rank: saving changes nothing, schedules go on by attempts."""
    config = {"compressor": TopK(0.01, warmup_steps=10), "momentum": 0.9}
    model, resumed = net(), net()
    optimizer = build(model, config, skip_nonfinite=True)
    for number in range(4):
        step(model, optimizer, rank, number, float("nan") if number == 2 else 1.0)
    if rank == 0:
        optimizer.state_dict()
    weights = copy.deepcopy(model.state_dict())
    for number in range(4, 14):
        if number == 5:
            saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        step(model, optimizer, rank, number)
    resumed.load_state_dict(weights)
    other = build(resumed, config, skip_nonfinite=True)
    other.load_state_dict(saved)
    assert other.skipped == int(other.metrics()["skipped"]) == 1
    for number in range(5, 14):
        step(resumed, other, rank, number)
    assert digest(model) == digest(resumed)
    return digest(model)


def test_saving_in_a_warm_up_with_void_steps() -> None:
    first, second = run(_saved_on_one_rank, 2)
    assert first == second


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([1.0, float("inf"), float("nan"), -float("inf")]), min_size=1, max_size=12))
def test_any_order_of_void_steps(factors: list[float]) -> None:
    model, unharmed = net(), net()
    optimizer, reference = build(model, CONFIGS[0], skip_nonfinite=True), build(unharmed, CONFIGS[0])
    for number, factor in enumerate(factors):
        step(model, optimizer, 0, number, factor)
        if factor == 1.0:
            step(unharmed, reference, 0, number)
    assert digest(model) == digest(unharmed)
    assert optimizer.skipped == sum(f != 1.0 for f in factors)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999])
def test_one_huge_gradient_does_not_stop_training(momentum: float) -> None:
    """It would overflow the states some steps later, and all steps from there on would be void."""
    model = net()
    optimizer = build(model, {"compressor": TopK(0.01), "momentum": momentum}, skip_nonfinite=True, lr=1e-38)
    for number in range(40):
        size = {2: 2e38, 5: 5e33}.get(number, 1.0)
        handle = model[6].weight.register_hook(lambda grad, size=size: torch.full_like(grad, size))
        step(model, optimizer, 0, number)
        handle.remove()
    assert optimizer.skipped == 1
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm must be finite and > 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be finite and > 0"),
        ({"max_grad_norm": 1.0, "clip_scope": "layer"}, "clip_scope must be"),
        ({"skip_nonfinite": 2}, "skip_nonfinite must be True or False"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    assert words in message_of(lambda: SGD(net().parameters(), lr=0.1, **options))


def _differing(rank: int, world: int) -> str:
    return message_of(lambda: SGD(net().parameters(), lr=0.1, max_grad_norm=1.0 + rank))


def test_ranks_that_clip_differently_are_told() -> None:
    assert all("max_grad_norm" in message for message in run(_differing, 2))


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = net()
        train(model, build(model, CONFIGS[0], skip_nonfinite=True, max_grad_norm=1.0), 2)
    assert not dist.is_initialized()

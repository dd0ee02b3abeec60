"""Clipping, void steps and loss scales on the optimizers: against torch where that is the meaning, bit for bit else."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from fusedcomp import LARS, SGD, GradScaler, Identity, NoMemory, Residual, TopK
from ranks import average_gradients, batch, digest, loss_of, message_of, net, run, train

CONFIGS: list[dict[str, Any]] = [
    {"compressor": TopK(0.05), "momentum": 0.9, "weight_decay": 1e-2},
    {"compressor": TopK(0.05), "memory": Residual(), "momentum": 0.9, "nesterov": True},
    {"compressor": TopK(0.05), "memory": NoMemory()},
    {"compressor": TopK(0.05, wire_dtype=torch.bfloat16), "momentum": 0.9, "state_dtype": torch.bfloat16},
    {"compressor": TopK(0.05, scope="tensor", selection="sampled"), "momentum": 0.9},
    {"compressor": TopK(1.0), "momentum": 0.9},
    {"compressor": Identity(), "momentum": 0.9, "weight_decay": 1e-2},
    {"cls": LARS, "compressor": TopK(0.05), "momentum": 0.9},
    {"cls": LARS, "momentum": 0.9},
]
IDS = [f"{i}-{c.get('cls', SGD).__name__}-{type(c.get('compressor')).__name__}" for i, c in enumerate(CONFIGS)]


def build(model: nn.Module, config: dict[str, Any], **more: Any) -> fusedcomp.SGD:
    options = {"lr": 0.05, "bucket_cap_mb": 0.05} | config | more
    return options.pop("cls", SGD)(model.named_parameters(), **options)


def step(model: nn.Module, optimizer: Any, rank: int, number: int, factor: float | Tensor = 1.0) -> None:
    optimizer.zero_grad()
    (loss_of(model, rank, number) * factor).backward()
    optimizer.step()


def flat_state(optimizer: Any) -> list[Tensor]:
    """All that a step may change, as a checkpoint has it, but for the step itself."""
    state = optimizer.state_dict()["state"]
    return [t.clone() for key in sorted(state) for _, t in sorted(state[key].items()) if isinstance(t, Tensor)]


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


def _local_clip(rank: int, world: int, scope: str) -> bool:
    mine, theirs = net(), net()
    ours = SGD(mine.parameters(), lr=0.05, momentum=0.9, max_grad_norm=0.2, clip_scope=scope, bucket_cap_mb=100.0)
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


@pytest.mark.parametrize("scope", ["model", "bucket", "tensor"])
def test_every_rank_clips_its_own_gradient(scope: str) -> None:
    assert all(run(_local_clip, 2, scope))


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


# ---- loss scales ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_halving_and_doubling_the_loss_scale_changes_nothing(config: dict[str, Any]) -> None:
    """Powers of two are exact: the trajectory is the unscaled one's, bit for bit."""
    model, plain = net(), net()
    scaler = GradScaler("cpu", init_scale=1024.0)
    optimizer, reference = build(model, config, grad_scaler=scaler), build(plain, config)
    for number in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0, number)).backward()
        scaler.step(optimizer)
        scaler.update(scaler.get_scale() * (0.5 if number % 3 else 4.0))
        step(plain, reference, 0, number)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    if config.get("cls") is not LARS:  # norms are squared: sums round otherwise
        assert digest(model) == digest(plain)


def _scaled(rank: int, world: int) -> tuple[bytes, list[float], int]:
    """Scales grow and fall on all ranks alike, whoever overflows; a scheduler follows the steps that count."""
    model = net()
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3)
    optimizer = build(model, CONFIGS[0], grad_scaler=scaler)
    scales, steps = [], 0
    for number in range(14):
        optimizer.zero_grad()
        poison = float("inf") if (rank, number) in ((0, 4), (1, 9)) else 1.0
        scaler.scale(loss_of(model, rank, number) * poison).backward()
        before = optimizer.skipped
        scaler.step(optimizer)
        scaler.update()
        steps += optimizer.skipped == before
        scales.append(scaler.get_scale())
    assert steps == 12
    return digest(model), scales, optimizer.skipped


def test_scales_are_equal_everywhere_and_torchs() -> None:
    (one, scales, skipped), other = run(_scaled, 2)
    assert (one, scales, skipped) == other
    expected, scale, good = [], 8.0, 0
    for number in range(14):  # torch's rule
        if number in (4, 9):
            scale, good = scale * 0.5, 0
        else:
            good += 1
            if good == 3:
                scale, good = scale * 2.0, 0
        expected.append(scale)
    assert scales == expected
    assert skipped == 2


def test_fp16_parameters_with_a_scaler() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).half()
    scaler = GradScaler("cpu", init_scale=2.0**24, growth_interval=20)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.05), grad_scaler=scaler)
    losses = []
    for _ in range(60):
        inputs, targets = batch(0, 0)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.flatten(1).half()).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert optimizer.skipped > 0  # 2 ** 24 overflows
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_scaler_of_the_wrong_kind_and_misuse() -> None:
    model = net()
    scaler = GradScaler("cpu")
    message = message_of(lambda: SGD(model.parameters(), lr=0.1, grad_scaler=torch.amp.GradScaler("cpu")))
    assert "fusedcomp.GradScaler" in message
    optimizer = SGD(model.parameters(), lr=0.1, grad_scaler=scaler)
    assert "max_grad_norm" in message_of(lambda: scaler.unscale_(optimizer))
    assert "TypeError" in message_of(lambda: GradScaler("cpu").step(optimizer))
    assert "step first" in message_of(scaler.update)
    loss_of(model, 0, 0).backward()  # not scaled
    assert "scaled no loss" in message_of(optimizer.step)
    for options in (
        {"init_scale": 0.0},
        {"init_scale": float("inf")},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
    ):
        assert next(iter(options)) in message_of(lambda o=options: GradScaler("cpu", **o))
    plain = torch.amp.GradScaler("cpu")
    plain.scale(torch.ones(()))
    other = SGD(net().parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"fusedcomp\.GradScaler"):
        plain.step(other)


def test_a_scaler_that_is_off_is_not_there() -> None:
    model, plain = net(), net()
    scaler = GradScaler("cpu", enabled=False)
    optimizer, reference = build(model, CONFIGS[0], grad_scaler=scaler), build(plain, CONFIGS[0])
    for number in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0, number)).backward()
        scaler.step(optimizer)
        scaler.update()
        step(plain, reference, 0, number)
    assert digest(model) == digest(plain)


def test_copies_have_scalers_of_their_own() -> None:
    scaler = GradScaler("cpu", init_scale=64.0)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, grad_scaler=scaler)
    scaler.scale(torch.ones(()))
    both, same = copy.deepcopy((model, optimizer, scaler))[1:]
    assert both.grad_scaler is same is not scaler
    same.scale(torch.ones(()))
    same.update(2.0)
    assert scaler.get_scale() == 64.0


def test_the_scaler_is_saved_and_pickles() -> None:
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=1)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, grad_scaler=scaler)
    scaler.scale(loss_of(model, 0, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    other = GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    other.scale(torch.ones(()))
    assert other.get_scale() == scaler.get_scale() == 128.0


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

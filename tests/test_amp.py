"""Loss scales on the optimizers: the unscaled run is the oracle, torch's rule that of the scale."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fusedcomp import LARS, SGD, GradScaler, TopK
from guarded import CONFIGS, IDS, build, step
from ranks import batch, digest, loss_of, message_of, net, run

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

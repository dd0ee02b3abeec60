"""The DDP hook: the faults of torch's PowerSGD hook do not exist here; what users do wrong is told."""

import copy
import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fusedcomp import MomentumCorrection, NoMemory, TopK
from fusedcomp.ddp import CompressionState
from hooked import LARGE, residuals, step, wrapped
from ranks import average_gradients, digest, loss_of, message_of, net, run

# ---- faults of torch's PowerSGD hook ---------------------------------------------------------------------------------


def _one_inf(rank: int, world: int) -> bytes:
    """One inf with torch's scaler: the step is skipped on all ranks, memory is as it was, the scale recovers."""
    model, unharmed = net(), net()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    state = CompressionState(TopK(0.05), model.named_parameters(), grad_scaler=scaler)
    reference = CompressionState(TopK(0.05), unharmed.named_parameters())
    ddps = [wrapped(model, state), wrapped(unharmed, reference)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, unharmed)]
    for number in range(12):
        optimizers[0].zero_grad()
        bad = number == 5
        before, kept = digest(model), residuals(state) if number else {}
        loss = loss_of(ddps[0], rank, number) * (float("inf") if bad and rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        if bad:
            assert digest(model) == before
            assert all(torch.equal(kept[name], now) for name, now in residuals(state).items())
            assert state.skipped == 1
        else:
            step(ddps[1], optimizers[1], rank, number)
    assert scaler.get_scale() == 8.0  # halved once, not at every step since
    for a, b in zip(model.parameters(), unharmed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    return digest(model)


def test_one_inf_does_not_poison() -> None:
    first, second = run(_one_inf, 2)
    assert first == second


def _loss_scales(rank: int, world: int) -> None:
    """Memory is in units of the loss: halving and doubling the scale every step changes nothing."""
    model, plain = net(), net()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    ddps = [
        wrapped(model, CompressionState(TopK(0.05), grad_scaler=scaler, momentum=0.5)),
        wrapped(plain, CompressionState(TopK(0.05), momentum=0.5)),
    ]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain)]
    for number in range(10):
        optimizers[0].zero_grad()
        scaler.scale(loss_of(ddps[0], rank, number)).backward()
        scaler.step(optimizers[0])
        scaler.update(scaler.get_scale() * (0.5 if number % 2 else 4.0))
        step(ddps[1], optimizers[1], rank, number)
        assert digest(model) == digest(plain)


def test_the_loss_scale_does_not_enter_memory() -> None:
    run(_loss_scales, 2)


def _exact_tensors(rank: int, world: int) -> bool:
    """What is sent whole has no residual; of fixed gradients the residual stays bounded, also after 300 steps."""
    model = net()
    state = CompressionState(TopK(0.02), model.named_parameters())
    ddp = wrapped(model, state)
    norms = []
    for number in range(300):
        model.zero_grad()
        loss_of(ddp, rank, 0).backward()
        if number in (99, 199, 299):
            norms.append(float(state.metrics()["residual_norm"]))
    assert set(residuals(state)) == LARGE
    return norms[2] < 1.5 * norms[0]


def test_no_residual_of_what_is_sent_whole() -> None:
    assert all(run(_exact_tensors, 2))


def _void(rank: int, world: int) -> bool:
    """Without a scaler: gradients are NaN on all ranks, ``found_inf`` says so, memory waits."""
    model = net()
    state = CompressionState(TopK(0.05), model.named_parameters(), skip_nonfinite=True)
    ddp = wrapped(model, state)
    for number, factor in enumerate((1.0, float("nan"), 1.0)):
        model.zero_grad()
        kept = residuals(state) if number else {}
        (loss_of(ddp, rank, number) * (factor if rank == 0 else 1.0)).backward()
        void = number == 1
        assert float(state.found_inf) == void
        assert all(bool(p.grad.isnan().all()) == void for p in model.parameters())
        if void:
            assert all(torch.equal(kept[name], now) for name, now in residuals(state).items())
    return state.skipped == 1


def test_void_steps_without_a_scaler() -> None:
    assert all(run(_void, 2))


def _fused(rank: int, world: int) -> bytes:
    """torch's fused optimizers skip by themselves what the hook says was void, whatever was loaded in between."""
    model = net()
    state = CompressionState(TopK(0.05), model.named_parameters(), skip_nonfinite=True)
    ddp = wrapped(model, state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for number in range(6):
        optimizer.zero_grad()
        void = number in (2, 4)
        (loss_of(ddp, rank, number) * (float("inf") if void and rank == 0 else 1.0)).backward()
        optimizer.found_inf = state.found_inf if number == 0 else optimizer.found_inf
        before = digest(model)
        optimizer.step()
        assert (digest(model) == before) == void
        if number == 3:
            state.load_state_dict(state.state_dict())
    assert state.skipped == 2
    return digest(model)


def test_found_inf_of_fused_optimizers() -> None:
    first, second = run(_fused, 2)
    assert first == second


# ---- what users do wrong -------------------------------------------------------------------------------------------


def _two_momenta(rank: int, world: int) -> list[str]:
    caught = []
    without = functools.partial(torch.optim.AdamW, betas=(0.0, 0.99))
    kinds = ((0.9, torch.optim.AdamW), (0.9, torch.optim.SGD), (0.0, torch.optim.AdamW), (0.9, without))
    for momentum, optimizer in kinds:
        model = net()
        ddp = wrapped(model, CompressionState(TopK(0.05), momentum=momentum))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            made = optimizer(model.parameters(), lr=1e-3)
            for number in range(3):
                step(ddp, made, rank, number)
        caught.append(" ".join(str(w.message) for w in seen if "twice" in str(w.message)))
    return caught


def test_two_momenta_warn_once() -> None:
    for adam, sgd, plain, without in run(_two_momenta, 2):
        assert adam.count("twice") == 1
        assert "AdamW" in adam
        assert sgd == plain == without == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compressor": 0.01}, "compressor must be"),
        ({"memory": "residual"}, "memory must be"),
        ({"memory": MomentumCorrection()}, "needs momentum > 0"),
        ({"momentum": 1.0}, "momentum must be in [0, 1)"),
        ({"nesterov": True}, "needs momentum > 0"),
        ({"state_dtype": torch.float16}, "state_dtype must be"),
        ({"grad_scaler": 1.0}, "torch.amp.GradScaler"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be finite and > 0"),
        ({"params": [1, 2]}, "parameters or (name, parameter) pairs"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    assert words in message_of(lambda: CompressionState(**({"compressor": TopK(0.1)} | options)))


def test_names_keep_what_is_not_ddps_prefix() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(64, 64))
    model.module = nn.Linear(64, 64)
    state = CompressionState(TopK(0.1), model.named_parameters())
    assert sorted(state._names.values()) == ["module.bias", "module.weight", "weight"]
    outer = nn.Module()
    outer.module = model
    state = CompressionState(TopK(0.1), outer.named_parameters())
    assert sorted(state._names.values()) == ["module.bias", "module.weight", "weight"]


def _launches(rank: int, world: int) -> tuple[int, int]:
    """What is never compressed is one exchange, whatever the number of DDP's buckets."""
    model = net()
    state = CompressionState(TopK(0.05))
    ddp = wrapped(model, state, bucket_cap_mb=0.001)
    for number in range(3):
        model.zero_grad()
        loss_of(ddp, rank, number).backward()
    sparse = sum(exchange.bucket.treatment.sparse for exchange in state._exchanges)
    return sparse, len(state._exchanges) - sparse


def test_one_exchange_for_what_is_never_compressed() -> None:
    assert run(_launches, 2) == [(2, 1), (2, 1)]


def _differ(rank: int, world: int) -> list[str]:
    return [
        message_of(lambda: CompressionState(TopK(0.1 if rank else 0.2))),
        message_of(lambda: CompressionState(TopK(0.1), momentum=0.9 if rank else 2.0)),
    ]


def test_ranks_that_differ_are_told_at_construction() -> None:
    for differs, refused in run(_differ, 2):
        assert "compressor is TopK(density=0.2" in differs
        assert "momentum must be in [0, 1)" in refused or "rank 0 refused its arguments" in refused


def _against_average(rank: int, world: int) -> bytes:
    """Density 1 without memory is the average, on one rank and on three (cases, 45: divided once)."""
    mine, theirs = net(), net()
    ddp = wrapped(mine, CompressionState(TopK(1.0), memory=NoMemory()))
    for number in range(2):
        mine.zero_grad()
        theirs.zero_grad()
        loss_of(ddp, rank, number).backward()
        loss_of(theirs, rank, number).backward()
        average_gradients(theirs)
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)
    return digest(mine)


@pytest.mark.parametrize("world", [1, 3])
def test_the_average_is_a_mean(world: int) -> None:
    assert len(set(run(_against_average, world))) == 1


def _refused_kinds(rank: int, world: int) -> list[str]:
    """What the kernels cannot take is refused in the first backward, by name, on all ranks."""
    told = []
    complex_model = nn.Linear(64, 64, dtype=torch.complex64)
    ddp = wrapped(complex_model, CompressionState(TopK(0.1), complex_model.named_parameters()))
    told.append(message_of(lambda: ddp(torch.ones(2, 64, dtype=torch.complex64)).abs().sum().backward()))
    sparse = nn.Embedding(100, 64, sparse=True)
    ddp = wrapped(sparse, CompressionState(TopK(0.1)))
    told.append(message_of(lambda: ddp(torch.tensor([1, 2])).sum().backward()))
    model = net()
    ddp = wrapped(model, CompressionState(TopK(0.1), copy.deepcopy(model).named_parameters()))
    told.append(message_of(lambda: loss_of(ddp, rank, 0).backward()))
    told.append(message_of(lambda: CompressionState(TopK(0.1), net().named_parameters() if rank else None)))
    return told


def test_what_the_hook_refuses() -> None:
    for complex_, sparse, strangers, names in run(_refused_kinds, 2):
        assert "complex64" in complex_
        assert "sparse=False" in sparse
        assert "params lacks" in strangers
        assert "names of params" in names


def test_names_are_given_once() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    assert "two parameters" in message_of(lambda: CompressionState(TopK(0.1), [("a", one.weight), ("a", two.weight)]))
    assert "params is empty" in message_of(lambda: CompressionState(TopK(0.1), []))
    state = CompressionState(TopK(0.1), one.named_parameters())
    for foreign in (None, {}, {"ranks": []}, {"fusedcomp": {}, "state": []}):
        assert "not one of a CompressionState" in message_of(lambda f=foreign: state.load_state_dict(f))
    assert "TopK(density=0.1" in repr(state)
    assert "state_dict()" in message_of(lambda: pickle.dumps(state))


def _averaged(rank: int, world: int) -> bool:
    """A wrapper with the hook can be copied, as torch's own averaging of weights does."""
    model = net()
    ddp = wrapped(model, CompressionState(TopK(0.1)))
    averaged = torch.optim.swa_utils.AveragedModel(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        step(ddp, optimizer, rank, number)
        averaged.update_parameters(ddp)
    return all(p.isfinite().all() for p in averaged.parameters())


def test_weights_can_be_averaged() -> None:
    assert all(run(_averaged, 2))


def _resumed_on_four(rank: int, world: int) -> None:
    """Sums over more than two ranks round as they are ordered: what is never compressed keeps its order."""
    model, other = net(), net()
    state = CompressionState(TopK(0.05, scope="tensor"), model.named_parameters())
    ddp = wrapped(model, state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(4):
        step(ddp, optimizer, rank, number)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = CompressionState(TopK(0.05, scope="tensor"), other.named_parameters())
    resumed.load_state_dict(copy.deepcopy(state.state_dict()))
    others = wrapped(other, resumed)
    second = torch.optim.SGD(other.parameters(), lr=0.05)
    for number in range(4, 8):
        step(ddp, optimizer, rank, number)
        step(others, second, rank, number)
        assert digest(model) == digest(other)


def test_resume_is_bit_exact_on_four_ranks() -> None:
    run(_resumed_on_four, 4)

"""Checkpoints: rank-local, resume bit for bit, honest about files of other ranks and of torch's own optimizers."""

import io
import warnings

import pytest
import torch
from torch import nn

from fusedcomp import LARS, SGD, Residual, TopK
from ranks import digest, loss_of, net, run

BUILDERS = {
    "topk": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4, compressor=TopK(0.01, warmup_steps=20)),
    "residual": lambda p: SGD(p, lr=0.05, momentum=0.9, compressor=TopK(0.01), memory=Residual()),
    "lars": lambda p: LARS(p, lr=1.0, weight_decay=1e-4, compressor=TopK(0.01)),
    "identity": lambda p: SGD(p, lr=0.05, momentum=0.9),
}


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(rank: int, world: int) -> dict[str, tuple[bytes, bytes, bool]]:
    results = {}
    for name, build in BUILDERS.items():
        model = net()
        optimizer = build(model.parameters())
        advance(model, optimizer, rank, 0, 10)
        saved, weights = through_a_file(optimizer.state_dict()), through_a_file(model.state_dict())
        advance(model, optimizer, rank, 10, 30)

        other = net(seed=5)
        again = build(other.parameters())
        advance(other, again, rank, 40, 43)  # a used optimizer: loading replaces all of its state
        other.load_state_dict(weights)
        again.load_state_dict(saved)
        kept = all(v.dtype == torch.float32 for s in again.state.values() for v in s.values())
        advance(other, again, rank, 10, 30)
        results[name] = (digest(model), digest(other), kept)
    return results


def test_resume_is_bit_exact() -> None:
    """Twenty steps after loading equal the unbroken run, on two ranks with residuals of their own."""
    for result in run(resumed, 2):
        for name, (unbroken, loaded, kept) in result.items():
            assert unbroken == loaded, name
            assert kept, name


def rank_zero_only(rank: int, world: int) -> tuple[bool, bool, list[str]]:
    """Every rank loads rank 0's file: what is rank 0's own is kept there and zeroed elsewhere."""
    import torch.distributed as dist

    model = net()
    optimizer = BUILDERS["topk"](model.parameters())
    advance(model, optimizer, rank, 0, 10)
    box = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(box)
    again = BUILDERS["topk"](net().parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.load_state_dict(box[0])
    weight = again.param_groups[0]["params"][6]
    state, saved = again.state[weight], box[0]["state"][6]
    residual_kept = torch.equal(state["residual"], saved["residual"]) and bool(state["residual"].any())
    velocity_kept = torch.equal(state["velocity"], saved["velocity"])
    return residual_kept, velocity_kept, [str(w.message) for w in caught if "rank" in str(w.message)]


def test_a_file_of_rank_0_on_all_ranks() -> None:
    zero, one = run(rank_zero_only, 2)
    assert zero == (True, True, [])
    residual_kept, velocity_kept, messages = one
    assert not residual_kept
    assert velocity_kept
    assert len(messages) == 1
    assert "saved by rank 0 of 2" in messages[0]
    assert "torch.save(optimizer.state_dict()" in messages[0]  # the way out


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 64)


def test_plain_data_only() -> None:
    optimizer = SGD(small().parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.01))
    group = through_a_file(optimizer.state_dict())["param_groups"][0]
    assert group["compressor"] == {
        "name": "TopK", "density": 0.01, "warmup_steps": 0, "selection": "exact", "scope": "bucket",
        "wire_dtype": "torch.float32", "warmup_densities": None, "collective": "gather",
    }  # fmt: skip
    assert group["fusedcomp"] == {"version": 1, "rank": 0, "world_size": 1, "step": 0, "skipped": 0}


def test_a_torch_sgd_checkpoint_loads() -> None:
    """Switching in mid-training: momentum goes on where torch left it."""
    model, twin = net(), net()
    before = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    advance(model, before, 0, 0, 10)
    twin.load_state_dict(model.state_dict())
    after = SGD(twin.parameters(), lr=0.9, momentum=0.9, compressor=TopK(1.0))
    after.load_state_dict(through_a_file(before.state_dict()))
    assert after.param_groups[0]["lr"] == 0.05
    assert after.param_groups[0]["compressor"] == TopK(1.0)
    advance(model, before, 0, 10, 20)
    advance(twin, after, 0, 10, 20)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_saved_compressor_wins() -> None:
    """As lr does: hyper-parameters come from the checkpoint."""
    saved = SGD(small().parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.01, scope="tensor")).state_dict()
    other = SGD(small().parameters(), lr=0.2, momentum=0.9, compressor=TopK(0.5))
    other.load_state_dict(saved)
    assert other.param_groups[0]["compressor"] == TopK(0.01, scope="tensor")
    assert other.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda g: g["fusedcomp"].update(version=99), "format version 99"),
        (lambda g: g["compressor"].update(name="Magic"), "unknown record 'Magic'"),
        (lambda g: g["params"].append(7), "doesn't match the size"),
        (lambda g: g["fusedcomp"].update(step=-1), r"checkpoint's step must be an integer in \[0, 2\*\*31\), got -1"),
        (lambda g: g["fusedcomp"].update(step=1 << 31), "checkpoint's step must be"),
        (lambda g: g["fusedcomp"].update(step=2.5), r"checkpoint's step must be .* got 2\.5"),
        (lambda g: g["fusedcomp"].pop("step"), "checkpoint's step must be .* got None"),
    ],
)
def test_bad_checkpoints_are_refused(change: object, text: str) -> None:
    optimizer = SGD(small().parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.01))
    saved = optimizer.state_dict()
    change(saved["param_groups"][0])
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("value", [torch.ones(64), torch.ones(32, 64), torch.ones(64, 64, 1), 3.0], ids=str)
@pytest.mark.parametrize("field", ["velocity", "residual", "momentum_buffer"])
def test_states_of_another_shape_are_refused_before_anything_is_loaded(field: str, value: object) -> None:
    """(64,) would be broadcast into (64, 64), and (32, 64) leave a part of the file loaded."""
    saved = SGD(small().named_parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.01)).state_dict()
    saved["state"][1]["momentum_buffer"] += 1.0  # of the bias: fine by itself
    saved["state"][0][field] = value
    optimizer = SGD(small().named_parameters(), lr=0.5, momentum=0.9, compressor=TopK(0.01))
    with pytest.raises(ValueError, match=rf"{field} of parameter 'weight' must be a tensor of shape \(64, 64\)"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not any(state.any() for states in optimizer.state.values() for state in states.values())


def test_another_number_of_param_groups_is_refused() -> None:
    """Also where the file is torch's, which says nothing of a compressor."""
    model = small()
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="has 2 param groups, this optimizer 1"):
        optimizer.load_state_dict(torch.optim.SGD(groups, lr=0.1).state_dict())


def test_other_optimizers_checkpoints_are_refused() -> None:
    """Their moments, and dampening, would be dropped without a word."""
    model = small()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.01), overlap=False)
    model(torch.ones(2, 64)).sum().backward()
    adam = torch.optim.Adam(model.parameters())
    adam.step()
    with pytest.raises(ValueError, match="not one of SGD or LARS"):
        optimizer.load_state_dict(adam.state_dict())
    damped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ValueError, match=r"dampening=0\.5"):
        optimizer.load_state_dict(damped.state_dict())


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda p: torch.optim.Adam(p), "'momentum'"),
        (lambda p: torch.optim.RMSprop(p), "'nesterov'"),
        (lambda p: torch.optim.SGD(p, lr=0.1), None),
    ],
    ids=["adam", "rmsprop", "sgd"],
)
def test_checkpoints_without_a_step_are_told_apart(make: object, missing: str | None) -> None:
    """No state yet says whose they are: the keys of their param groups do."""
    optimizer = SGD(small().parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.01))
    saved = make(small().parameters()).state_dict()
    if missing is None:
        optimizer.load_state_dict(saved)
        return
    with pytest.raises(ValueError, match=f"not one of SGD or LARS: a param group has no {missing}"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_another_world_size_is_reported() -> None:
    """Momentum is taken up. What waited on the other ranks is gone, so that of this one starts from zero as well."""
    models = [net(), net()]
    first, second = (SGD(m.parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.01)) for m in models)
    advance(models[0], first, 0, 0, 3)
    saved = first.state_dict()
    saved["param_groups"][0]["fusedcomp"]["world_size"] = 8
    with pytest.warns(UserWarning, match="rank 0 of 8"):
        second.load_state_dict(saved)
    waited = 0
    for old, new in zip(*(m.parameters() for m in models), strict=True):
        for name, state in first.state[old].items():
            taken = second.state[new][name]
            waited += name == "residual" and int(state.any())
            assert torch.equal(taken, torch.zeros_like(state) if name == "residual" else state)
    assert waited


def test_a_momentum_schedule_that_ends_at_zero_can_be_saved() -> None:
    """Nesterov needs a momentum when it is built; later on 0 is as good as any."""
    model, again = net(), net()
    settings = {"lr": 0.05, "momentum": 0.9, "nesterov": True}
    optimizer, resumed = (SGD(m.parameters(), compressor=TopK(0.01), **settings) for m in (model, again))
    advance(model, optimizer, 0, 0, 2)
    optimizer.param_groups[0]["momentum"] = 0.0
    advance(model, optimizer, 0, 2, 4)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in (optimizer, resumed):
        each.param_groups[0]["compressor"] = TopK(0.02)
    advance(model, optimizer, 0, 4, 6)
    advance(again, resumed, 0, 4, 6)
    assert resumed.param_groups[0]["momentum"] == 0.0
    assert digest(model) == digest(again)

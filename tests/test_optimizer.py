"""What users rely on in a torch optimizer, in one process: groups, schedulers, closures, shapes, layouts."""

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import fusedcomp
from fusedcomp import LARS, SGD, Identity, MomentumCorrection, NoMemory, Residual, TopK
from ranks import batch, digest, loss_of, net


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.step()


def close(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


SCHEDULERS: dict[str, Callable] = {
    "step": lambda o: lr_scheduler.StepLR(o, 5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    """Learning rate and momentum as the schedulers set them."""
    ours, theirs = net(), net()
    pair = [
        (ours, SGD(ours.parameters(), lr=0.05, momentum=0.9)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)),
    ]
    for model, optimizer in pair:
        scheduler = SCHEDULERS[name](optimizer)
        for step in range(20):
            train(model, optimizer, 1, step)
            scheduler.step(*([1.0] if name == "plateau" else []))
    close(ours, theirs)


@pytest.mark.parametrize("tensor", [False, True])
def test_lr_stays_as_given(tensor: bool) -> None:
    ours, theirs = net(), net()
    lr = torch.tensor(0.05) if tensor else 0.05
    a, b = SGD(ours.parameters(), lr=lr), torch.optim.SGD(theirs.parameters(), lr=0.05)
    for step in range(6):
        train(ours, a, 1, step)
        train(theirs, b, 1, step)
        if tensor:
            assert a.param_groups[0]["lr"] is lr
            lr.mul_(0.5)
        else:
            a.param_groups[0]["lr"] *= 0.5
        b.param_groups[0]["lr"] *= 0.5
    close(ours, theirs)


def test_param_groups_with_their_own_settings() -> None:
    ours, theirs = net(), net()

    def groups(model: nn.Sequential, compressed: bool) -> list[dict]:
        first, rest = [*model[0].parameters(), *model[2].parameters()], [*model[3:].parameters()]
        own = {"compressor": TopK(1.0), "memory": MomentumCorrection(masking=False)} if compressed else {}
        return [
            {"params": first, "lr": 0.01, "weight_decay": 0.1, **own},
            {"params": rest, "momentum": 0.5, "nesterov": True},
        ]

    a = SGD(groups(ours, True), lr=0.05, momentum=0.9)
    b = torch.optim.SGD(groups(theirs, False), lr=0.05, momentum=0.9)
    train(ours, a, 10)
    train(theirs, b, 10)
    close(ours, theirs)
    assert a.param_groups[0]["compressor"] == TopK(1.0)
    assert a.param_groups[1]["compressor"] == Identity()


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    ours, theirs = net(), net()
    pair = ((ours, SGD(ours.parameters(), lr=0.05)), (theirs, torch.optim.SGD(theirs.parameters(), lr=0.05)))
    losses = []
    for model, optimizer in pair:

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0, 0)
            loss.backward()
            return loss

        losses.append([float(optimizer.step(closure).detach()) for _ in range(5)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    close(ours, theirs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_leaves_the_residual_alone(set_to_none: bool) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.01))
    train(model, optimizer, 3)
    before = optimizer.state[model[6].weight]["residual"].clone()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert torch.equal(optimizer.state[model[6].weight]["residual"], before)
    assert before.any()


def test_add_param_group_keeps_what_is_there() -> None:
    """Residual and velocity belong to the parameter, whatever bucket it lands in."""
    model, extra = net(), nn.Linear(64, 64)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.01))
    train(model, optimizer, 3)
    before = {p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()}
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.1})
    for param, states in before.items():
        for name, value in states.items():
            assert torch.equal(optimizer.state[param][name], value)
    old = extra.weight.detach().clone()
    inputs, targets = batch(0, 9)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model[7:](torch.tanh(extra(model[:7](inputs)))), targets)
    loss.backward()
    optimizer.step()
    assert not torch.equal(extra.weight, old)


def test_residual_survives_other_bucket_sizes() -> None:
    models = [net(), net()]
    small, large = (
        SGD(m.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.01, scope="tensor"), bucket_cap_mb=cap)
        for m, cap in zip(models, (0.01, 25.0), strict=True)
    )
    for model, optimizer in zip(models, (small, large), strict=True):
        train(model, optimizer, 20)
    assert digest(models[0]) == digest(models[1]), 'scope="tensor" must not depend on bucket sizes'
    large.load_state_dict(small.state_dict())
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        for name, value in small.state[a].items():
            assert torch.equal(value, large.state[b][name])


class Shapes(nn.Module):
    """0-d, one element, thin, 5-D, zero-size at the start, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(0,), (), (1,), (3, 1, 5), (2, 3, 4, 5, 6), (0, 7), (61, 37), (5, 0)]
        self.all = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])

    def forward(self, step: int) -> torch.Tensor:
        return sum(((p * (step % 3 + 1) - 1) ** 2).sum() for p in self.all)


@pytest.mark.parametrize("sparse", [False, True])
def test_any_shape(sparse: bool) -> None:
    ours, theirs = Shapes(), Shapes()
    front = {"compressor": TopK(1.0), "memory": MomentumCorrection(masking=False), "_always_sparse": True}
    a = SGD(ours.parameters(), lr=0.01, momentum=0.9, **(front if sparse else {}))
    b = torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9)
    for step in range(10):
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
    close(ours, theirs)


def test_only_zero_size_parameters() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(0, 3))], lr=0.1)
    optimizer.step()
    assert int(optimizer.metrics()["bytes_sent"]) == 0


def relayout(model: nn.Sequential, how: str) -> nn.Sequential:
    if how == "channels_last":
        return model.to(memory_format=torch.channels_last)
    if how == "transposed":  # the linear weights lie in memory the other way round
        for layer in (model[6], model[8]):
            layer.weight.data = layer.weight.data.t().contiguous().t()
    return model


@pytest.mark.parametrize("how", ["channels_last", "transposed"])
@pytest.mark.parametrize("compressor", [Identity(), TopK(1.0)], ids=["identity", "density_1"])
def test_dense_layouts(how: str, compressor: object) -> None:
    """The layout of a parameter changes nothing, nor does a gradient of another layout."""
    ours, theirs = relayout(net(), how), net()
    memory = MomentumCorrection(masking=False)
    a = SGD(ours.parameters(), lr=0.05, momentum=0.9, compressor=compressor, memory=memory, _always_sparse=True)
    b = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    train(ours, a, 10)
    train(theirs, b, 10)
    close(ours, theirs)
    for param in ours.parameters():
        for state in a.state[param].values():
            assert state.shape == param.shape


def test_odd_strides_of_size_one_dimensions() -> None:
    weight = nn.Parameter(torch.randn(64, 64, 1, 1).to(memory_format=torch.channels_last))
    optimizer = SGD([weight], lr=0.1, compressor=TopK(1.0))
    before = weight.detach().clone()
    weight.grad = torch.ones(64, 64, 1, 1)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before - 0.1)


class Merged(nn.Module):
    """Two weights used as one: autograd hands out views of one gradient, 4 bytes off any boundary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.randn(33, 65)), nn.Parameter(torch.randn(40, 65))
        self.tied = nn.Linear(73, 65)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        merged = torch.cat([self.a, self.b])
        hidden = torch.tanh(x @ merged.t())
        return self.tied(hidden) @ self.tied.weight  # used twice


def test_merged_and_tied_parameters() -> None:
    ours, theirs = Merged(), Merged()
    x = torch.randn(16, 65, generator=torch.Generator().manual_seed(0))
    pair = (
        (ours, SGD(ours.parameters(), lr=1e-4, momentum=0.9, compressor=TopK(1.0), memory=MomentumCorrection(False))),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=1e-4, momentum=0.9)),
    )
    for model, optimizer in pair:
        for _ in range(10):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    close(ours, theirs)


def test_frozen_parameters_may_be_unfrozen() -> None:
    ours, theirs = net(), net()
    pair = (
        (ours, SGD(ours.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)),
    )
    for model, optimizer in pair:
        model[2].requires_grad_(False)
        train(model, optimizer, 5)
        model[2].requires_grad_(True)
        train(model, optimizer, 5, 5)
    close(ours, theirs)


def test_gradients_are_only_read() -> None:
    model = net()
    optimizer = LARS(model.parameters(), lr=0.1, weight_decay=0.1, compressor=TopK(0.01), maximize=True)
    loss_of(model, 0, 0).backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_gradients_are_freed_after_the_step() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.01))
    loss_of(model, 0, 0).backward()
    optimizer.step()
    grads = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    gc.collect()
    assert all(grad() is None for grad in grads)


def test_clipping_without_overlap() -> None:
    ours, theirs = net(), net()
    pair = (
        (ours, SGD(ours.parameters(), lr=0.05, overlap=False)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.05)),
    )
    for model, optimizer in pair:
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    close(ours, theirs)


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_copies_go_on_by_themselves(kind: str) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.01))
    train(model, optimizer, 5)
    if kind == "deepcopy":
        other, twin = copy.deepcopy((model, optimizer))
    else:
        other, twin = pickle.loads(pickle.dumps((model, optimizer)))
    assert twin.param_groups[0]["compressor"] == TopK(0.01)
    train(model, optimizer, 5, 5)
    train(other, twin, 5, 5)
    assert digest(model) == digest(other)


def test_torch_distributed_checkpoint_may_initialise_the_state() -> None:
    """torch.distributed.checkpoint runs a step of zero gradients on optimizers without state: ours has its state."""
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.01))
    before = digest(model)
    _init_optim_state(optimizer)
    assert digest(model) == before
    assert not any(v.any() for s in optimizer.state.values() for v in s.values())


def test_metrics() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.01))
    train(model, optimizer, 3)
    metrics = optimizer.metrics()
    dense = 4 * sum(p.numel() for p in model.parameters())
    large = [p for p in model.parameters() if p.ndim > 1 and p.numel() >= 2048]
    assert int(metrics["bytes_dense"]) == dense
    assert int(metrics["nnz"]) == -(-sum(p.numel() for p in large) // 100)
    assert 0 < int(metrics["bytes_sent"]) < dense / 10
    expected = sum(float(optimizer.state[p]["residual"].square().sum()) for p in large) ** 0.5
    assert float(metrics["residual_norm"]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["threshold"]) > 0
    assert int(metrics["nonfinite"]) == int(metrics["overflow"]) == 0
    model[0].bias.grad = torch.full_like(model[0].bias, float("nan"))
    optimizer._backward.reset()
    optimizer.step()
    assert int(optimizer.metrics()["nonfinite"]) == 1


def test_nothing_is_sent_that_is_larger_than_raw() -> None:
    """Whatever the shapes and the density, a bucket is handed over as at most its raw bytes and the trailer."""
    for density in (0.001, 0.1, 0.5, 0.9, 1.0):
        for shape in ((1, 2048), (3, 5), (64, 65), (300, 400)):
            weight = nn.Parameter(torch.randn(shape))
            optimizer = SGD([weight], lr=0.1, compressor=TopK(density))
            weight.grad = torch.randn(shape)
            optimizer.step()
            assert int(optimizer.metrics()["bytes_sent"]) <= 4 * weight.numel() + 4 * 3


def test_entries_sent_densely_leave_no_residual() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(1.0))
    train(model, optimizer, 5)
    assert not any(states["residual"].any() for states in optimizer.state.values() if "residual" in states)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-42, 3e38, -3e38])
def test_degenerate_gradients_stay_finite(value: float) -> None:
    """Blocks of equal values, zeros, denormals, the largest numbers."""
    weight = nn.Parameter(torch.zeros(70, 70))
    optimizer = SGD([weight], lr=1e-3, compressor=TopK(0.1))
    for _ in range(3):
        weight.grad = torch.full((70, 70), value)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(weight).all() == (abs(value) < 1e38)  # 3 x 3e38 overflows in any optimizer
    if value == 0.0:
        assert not weight.any()


@pytest.mark.parametrize("compressor", [Identity(), TopK(0.5)], ids=["identity", "topk"])
@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_lars_trust_is_one_where_a_norm_is_zero(compressor: object, zero: str) -> None:
    """A weight that starts at zero moves with the plain learning rate; a zero gradient moves nothing."""
    weight = nn.Parameter(torch.zeros(64, 64) if zero == "weight" else torch.ones(64, 64))
    optimizer = LARS([weight], lr=0.5, momentum=0.0, compressor=compressor)
    weight.grad = torch.ones(64, 64) if zero == "weight" else torch.zeros(64, 64)
    before = weight.detach().clone()
    optimizer.step()
    moved = before - weight.detach()
    expected = 0.5 if zero == "weight" else 0.0
    assert set(moved.unique().tolist()) <= {0.0, expected}
    assert moved.any() == (zero == "weight")


def test_lars_first_gradient_after_zeros_is_scaled() -> None:
    """Zero-initialised branches give exact zeros first: the first real gradient must not meet a trust ratio of 1."""
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = LARS([weight], lr=1.0, momentum=0.0, trust_coefficient=1e-3, compressor=TopK(1.0))
    for grad in (torch.zeros(64, 64), torch.full((64, 64), 100.0)):
        optimizer.zero_grad()
        weight.grad = grad
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((64, 64), 1.0 - 1e-3), rtol=1e-4, atol=1e-6)


def test_lars_excludes_vectors_by_two_switches() -> None:
    for switch, moved in (({}, 0.5), ({"exclude_1d_from_decay": False}, 1.0)):
        bias = nn.Parameter(torch.ones(8))
        optimizer = LARS([bias], lr=0.5, momentum=0.0, weight_decay=1.0, **switch)
        bias.grad = torch.ones(8)
        optimizer.step()
        torch.testing.assert_close(bias.detach(), torch.full((8,), 1.0 - moved))
    bias = nn.Parameter(torch.ones(8))
    optimizer = LARS([{"params": [bias], "exclude_1d_from_trust": False}], lr=1.0, momentum=0.0, trust_coefficient=0.1)
    bias.grad = torch.full((8,), 7.0)
    optimizer.step()
    torch.testing.assert_close(bias.detach(), torch.full((8,), 0.9))


def test_choices_changed_in_a_param_group() -> None:
    """A new compressor is taken in by zero_grad(), keeps the states, and is never silently ignored."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.5, scope="tensor"))
    train(model, optimizer, 2)
    before = int(optimizer.metrics()["nnz"])
    kept = optimizer.state[model[6].weight]["residual"].clone()
    optimizer.param_groups[0]["compressor"] = TopK(0.01)
    optimizer.zero_grad()
    assert torch.equal(optimizer.state[model[6].weight]["residual"], kept)
    train(model, optimizer, 1)
    assert int(optimizer.metrics()["nnz"]) < before / 40
    optimizer.param_groups[0]["memory"] = Residual()
    with pytest.raises(RuntimeError, match="compressor or memory of group 0 was changed"):
        (loss_of(model, 0, 0).backward(), optimizer.step())
    train(model, optimizer, 2)  # its zero_grad() takes the change in
    assert "momentum_buffer" in optimizer.state[model[6].weight]


def test_momentum_switched_on_and_off_later() -> None:
    ours, theirs = net(), net()
    for model, optimizer in (
        (ours, SGD(ours.parameters(), lr=0.05)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.05)),
    ):
        for step, momentum in enumerate((0.0, 0.9, 0.9, 0.0, 0.9)):
            optimizer.param_groups[0]["momentum"] = momentum
            if model is theirs and momentum == 0.0 and step:  # torch skips its buffer then; ours keeps decaying it
                optimizer.param_groups[0]["momentum"] = 1e-30
            train(model, optimizer, 2, 2 * step)
    close(ours, theirs)


def test_a_parameter_given_twice_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(3))
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="given twice"):
        SGD([weight, weight], lr=0.1)


def test_a_changed_memory_format_is_refused() -> None:
    model = net()
    optimizer = SGD(model.named_parameters(), lr=0.1, compressor=TopK(0.1), overlap=False)
    model[6].weight.data = model[6].weight.data.t().contiguous().t()
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"'6\.weight' has shape"):
        optimizer.step()


def test_a_new_optimizer_takes_over() -> None:
    """A notebook builds one optimizer after the other on the same model, deleted or not, ours or torch's."""
    model = net()
    first = SGD(model.parameters(), lr=0.05, compressor=TopK(0.1))
    train(model, first, 2)
    second = SGD(model.parameters(), lr=0.05, compressor=TopK(0.1))
    train(model, second, 2)
    alive = weakref.ref(second)
    del second
    assert alive() is None
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    train(model, first, 2)  # without overlap, as its hooks were taken over


def test_two_optimizers_as_in_a_gan() -> None:
    """The generator's backward runs through the discriminator: inside the other optimizer's no_sync()."""
    pairs = []
    for make in (lambda p: SGD(p, lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)):
        torch.manual_seed(0)
        generator, discriminator = nn.Linear(64, 64), nn.Linear(64, 64)
        first, second = make(generator.parameters()), make(discriminator.parameters())
        x = torch.randn(8, 64)
        for _ in range(4):
            second.zero_grad()
            discriminator(generator(x).detach()).square().mean().backward()
            second.step()
            first.zero_grad()
            with second.no_sync() if isinstance(second, SGD) else contextlib.nullcontext():
                discriminator(generator(x)).square().mean().backward()
            first.step()
        pairs.append(nn.ModuleList([generator, discriminator]))
    close(*pairs)


@pytest.mark.parametrize(
    "memory", [MomentumCorrection(), Residual(), NoMemory()], ids=["correction", "residual", "none"]
)
def test_the_fronts_run_on_kernels_too(memory: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole front on interpreted kernels gives the twins' bits."""
    results = []
    for chosen in ("reference", "kernels"):
        monkeypatch.setenv("FUSEDCOMP_OPS", chosen)
        model = net()
        optimizer = SGD(
            model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, memory=memory,
            compressor=TopK(0.01, warmup_steps=2, scope="tensor"),
        )  # fmt: skip
        train(model, optimizer, 4)
        results.append(digest(model))
    assert results[0] == results[1]


def test_an_unknown_choice_of_ops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMP_OPS", "fast")
    with pytest.raises(ValueError, match="FUSEDCOMP_OPS"):
        SGD(net().parameters(), lr=0.1)


def test_the_repr_tells_what_is_compressed() -> None:
    text = repr(SGD(net().parameters(), lr=0.1, compressor=TopK(0.001, scope="tensor")))
    assert "TopK(density=0.001" in text
    assert "scope='tensor'" in text
    assert fusedcomp.__version__

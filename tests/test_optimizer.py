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

from fusedcomp import LARS, SGD, Identity, MomentumCorrection, TopK
from ranks import batch, digest, loss_of, net, train


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

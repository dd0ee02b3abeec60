"""The hook of DistributedDataParallel: plain DDP is its oracle; memory belongs to parameters; faults of other hooks."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomp import SGD, Identity, NoMemory, Residual, TopK
from fusedcomp.ddp import CompressionState
from hooked import LARGE, residuals, step, wrapped
from ranks import batch, digest, loss_of, message_of, net, run

DDP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 25},
    {"static_graph": True, "gradient_as_bucket_view": True},
]


def _identity(rank: int, world: int, options: dict[str, Any], dtype: torch.dtype) -> bytes:
    """``Identity()`` is plain DDP, bit for bit on two ranks: a sum of two numbers has one order."""
    mine, theirs = net().to(dtype), net().to(dtype)
    ours = wrapped(mine, CompressionState(Identity()), **options)
    plain = wrapped(theirs, None, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=False) for m in (ours, plain)]
    for number in range(6):
        for ddp, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            inputs, targets = batch(rank, number)
            nn.functional.cross_entropy(ddp(inputs.to(dtype)).float(), targets).backward()
            optimizer.step()
        if dtype == torch.float32:
            assert digest(mine) == digest(theirs)
    return b"".join(p.detach().float().numpy().tobytes() for p in mine.parameters())


@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
def test_identity_is_plain_ddp(options: dict[str, Any]) -> None:
    first, second = run(_identity, 2, options, torch.float32)
    assert first == second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_gradients_leave_replicas_equal(dtype: torch.dtype) -> None:
    first, second = run(_identity, 2, {}, dtype)
    assert first == second


def _reference(rank: int, world: int, options: dict[str, Any], config: dict[str, Any]) -> bytes:
    """Hook and torch's SGD without momentum do what our SGD does, whatever DDP's options; rebuilt buckets included."""
    mine, theirs = net(), net()
    compressor = TopK(0.05, scope="tensor")  # buckets do not matter
    state = CompressionState(compressor, mine.named_parameters(), **config)
    ddp = wrapped(mine, state, **options)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.05)
    reference = SGD(theirs.named_parameters(), lr=0.05, compressor=compressor, **config)
    for number in range(8):
        step(ddp, optimizer, rank, number)
        step(theirs, reference, rank, number)
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert set(residuals(state)) == (set() if "memory" in config and config["memory"] == NoMemory() else LARGE)
    for name, kept in residuals(state).items():
        param = dict(theirs.named_parameters())[name]
        torch.testing.assert_close(kept, reference.state[param]["residual"], rtol=1e-5, atol=1e-6, msg=name)
    return digest(mine)


@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
def test_the_hook_is_the_optimizers_pipeline(options: dict[str, Any]) -> None:
    first, second = run(_reference, 2, options, {})
    assert first == second


@pytest.mark.parametrize(
    "config",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "memory": Residual()},
        {"memory": NoMemory()},
        {"max_grad_norm": 0.3},
        {"max_grad_norm": 0.3, "clip_scope": "tensor", "momentum": 0.9},
        {"skip_nonfinite": True, "momentum": 0.9},
    ],
    ids=str,
)
def test_all_of_the_pipeline_is_there(config: dict[str, Any]) -> None:
    first, second = run(_reference, 2, {}, config)
    assert first == second


def _conservation(rank: int, world: int) -> bool:
    """Whole numbers as gradients: what all ranks put in went out or is kept, bit for bit, across rebuilt buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    state = CompressionState(TopK(0.01), model.named_parameters())
    ddp = wrapped(model, state)
    whole = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(rank)

    def integers(name: str, grad: Tensor) -> Tensor:
        made = torch.randint(-8, 9, grad.shape, generator=generator).float()
        whole[name] += made
        return made

    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: integers(name, grad))
    went = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for _ in range(6):
        model.zero_grad()
        ddp(torch.ones(2, 64)).sum().backward()
        for name, param in model.named_parameters():
            went[name] += param.grad * world
    kept = residuals(state)
    assert set(kept) == {"0.weight", "1.weight", "2.weight"}
    for name, value in whole.items():
        rest = kept.get(name, torch.zeros_like(value))
        dist.all_reduce(value)
        dist.all_reduce(rest)
        assert torch.equal(went[name] + rest, value)
        assert int(went[name].count_nonzero()) > 0
    return True


def test_nothing_is_lost() -> None:
    assert all(run(_conservation, 2))


def _rounded_states(rank: int, world: int) -> bytes:
    """The noise that rounds them is another in other buckets; replicas agree, and it learns."""
    model = net()
    ddp = wrapped(model, CompressionState(TopK(0.05), state_dtype=torch.bfloat16, momentum=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, 0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    return digest(model)


def test_bf16_states() -> None:
    first, second = run(_rounded_states, 2)
    assert first == second


def _no_sync(rank: int, world: int) -> bytes:
    """Accumulated micro-batches, a parameter used in the first of them alone (cases, 42)."""
    mine, theirs = net(), net()
    extra = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    for model, param in zip((mine, theirs), extra, strict=True):
        model.register_parameter("extra", param)
    state = CompressionState(TopK(0.05, scope="tensor"), mine.named_parameters())
    ddp = wrapped(_Using(mine), state, find_unused_parameters=True)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.05)
    reference = SGD(theirs.named_parameters(), lr=0.05, compressor=TopK(0.05, scope="tensor"))
    alone = _Using(theirs)
    for number in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        for micro in range(3):
            inputs, targets = batch(rank, 3 * number + micro)
            for model, no_sync in ((ddp, ddp.no_sync), (alone, reference.no_sync)):
                with no_sync() if micro < 2 else torch.enable_grad():
                    nn.functional.cross_entropy(model(inputs, micro == 0), targets).backward()
        optimizer.step()
        reference.step()
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    return digest(mine)


class _Using(nn.Module):
    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, use: bool) -> Tensor:
        out = self.model(inputs)
        return out + (self.model.extra.sum() * 1e-3 if use else 0.0)


def test_no_sync_with_a_parameter_used_in_one_micro_batch() -> None:
    first, second = run(_no_sync, 2)
    assert first == second


def _unused(rank: int, world: int) -> bool:
    """A parameter that nobody used keeps its residual and has no gradient; one that a peer used gets the average."""
    model = net()
    model.register_parameter("extra", nn.Parameter(torch.ones(64, 64)))
    state = CompressionState(TopK(0.05, scope="tensor"), model.named_parameters())
    ddp = wrapped(_Using(model), state, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(6):
        optimizer.zero_grad()
        use = number == 0 or (number == 3 and rank == 0)
        before = residuals(state).get("extra") if number else None
        inputs, targets = batch(rank, number)
        nn.functional.cross_entropy(ddp(inputs, use), targets).backward()
        if number in (1, 2, 4, 5):
            assert model.extra.grad is None
            assert torch.equal(residuals(state)["extra"], before)
        else:
            assert model.extra.grad is not None
            assert int(model.extra.grad.count_nonzero()) > 0
        optimizer.step()
    return True


def test_unused_parameters() -> None:
    assert all(run(_unused, 2))


def _join(rank: int, world: int) -> bytes:
    """A rank without data goes on sending what it has not sent yet."""
    model = net()
    state = CompressionState(TopK(0.05), model.named_parameters())
    ddp = wrapped(model, state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ddp.join():
        for number in range(3 + 2 * rank):
            step(ddp, optimizer, rank, number)
    assert int(state.metrics()["bytes_sent"]) > 0
    return digest(model)


def test_join_with_uneven_batches() -> None:
    first, second = run(_join, 2)
    assert first == second


def _rebuilt(rank: int, world: int) -> bool:
    """DDP arranges its buckets anew after the first step (cases, 1): every residual moves along, bit for bit."""
    model = net()
    state = CompressionState(TopK(0.01), model.named_parameters())
    ddp = wrapped(model, state, bucket_cap_mb=0.3)
    model.zero_grad()
    loss_of(ddp, rank, 0).backward()
    before, known = residuals(state), set(state._entries)
    model.zero_grad()
    (loss_of(ddp, rank, 1) * 0.0).backward()
    assert set(state._entries) != known
    sent = {name: p.grad for name, p in model.named_parameters()}
    for name, kept in residuals(state).items():
        stayed = sent[name] == 0.0  # nobody sent it
        assert torch.equal(kept[stayed], before[name][stayed])
        assert before[name][stayed].count_nonzero() > 100
    return True


def test_memory_survives_rebuilt_buckets() -> None:
    assert all(run(_rebuilt, 2))


def _resume(rank: int, world: int, config: dict[str, Any], all_ranks: bool) -> bytes:
    def build() -> tuple[nn.Module, CompressionState, DistributedDataParallel, torch.optim.Optimizer]:
        model = net()
        # DDP's first arrangement of a new process is another than the rebuilt one: "bucket" would rank over that.
        state = CompressionState(TopK(0.02, warmup_steps=8, scope="tensor"), model.named_parameters(), **config)
        ddp = wrapped(model, state)
        return model, state, ddp, torch.optim.SGD(model.parameters(), lr=0.05)

    model, state, ddp, optimizer = build()
    for number in range(5):
        step(ddp, optimizer, rank, number)
    saved = state.state_dict(all_ranks=all_ranks)
    if all_ranks:  # one file, written by rank 0
        box = [saved]
        dist.broadcast_object_list(box)
        saved = box[0]
    saved, weights = copy.deepcopy(saved), copy.deepcopy(model.state_dict())
    for number in range(5, 12):
        step(ddp, optimizer, rank, number)
    other, resumed, ddp, optimizer = build()
    other.load_state_dict(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(saved)
    again, own = resumed.state_dict()["state"], (saved["ranks"][rank] if all_ranks else saved)["state"]
    for name, kept in own.items():  # saved before the next step
        assert all(torch.equal(value, again[name][field]) for field, value in kept.items())
    for number in range(5, 12):
        step(ddp, optimizer, rank, number)
    return digest(model) + digest(other)


@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize("config", [{}, {"momentum": 0.9, "skip_nonfinite": True}], ids=str)
def test_resume_is_bit_exact(config: dict[str, Any], all_ranks: bool) -> None:
    first, second = run(_resume, 2, config, all_ranks)
    assert first == second
    assert first[: len(first) // 2] == first[len(first) // 2 :]


def _foreign_file(rank: int, world: int) -> list[str]:
    model = net()
    state = CompressionState(TopK(0.02), model.named_parameters(), momentum=0.5)
    ddp = wrapped(model, state)
    loss_of(ddp, rank, 0).backward()
    mine = state.state_dict()
    box = [mine]
    dist.broadcast_object_list(box)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state.load_state_dict(box[0])
    messages = [str(w.message) for w in caught]
    kept = residuals(state)
    assert len(kept) == (2 if rank == 0 else 0)
    assert all(residual.any() for residual in kept.values())
    wrong = copy.deepcopy(mine)
    wrong["state"]["6.weight"]["residual"] = torch.zeros(3)
    messages.append(message_of(lambda: state.load_state_dict(wrong)))
    messages.append(message_of(lambda: state.load_state_dict({"state": {}})))
    wrong = copy.deepcopy(mine)
    wrong["state"]["7.weight"] = wrong["state"].pop("6.weight")
    messages.append(message_of(lambda: state.load_state_dict(wrong)))
    messages.append(message_of(CompressionState(TopK(0.1)).state_dict))
    return messages


def test_files_of_other_ranks_and_other_models() -> None:
    (shape, keys, name, names), (warned, *others) = run(_foreign_file, 2)
    assert "rank 0 of 2" in warned
    assert "zeroed" in warned
    assert others == [shape, keys, name, names]
    assert "of shape (64, 512), got torch.float32 of shape (3,)" in shape
    assert "not one of a CompressionState" in keys
    assert "7.weight" in name
    assert "named_parameters" in names

"""TopK's collectives that merge payloads: nothing is lost; replicas, resume, ranks that fail; what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedcomp
from fusedcomp import LARS, NoMemory, Residual, TopK
from fusedcomp.ddp import CompressionState
from ranks import digest, loss_of, message_of, net, run
from sameness import hook_and_optimizer

BOTH = pytest.mark.parametrize("collective", ["tree", "split"])


def _conserved(rank: int, world: int, collective: str, wire: torch.dtype) -> bool:
    """Over 30 steps, whatever is rounded to travel: what went in is applied or with one of the ranks, bit for bit."""
    weight = nn.Parameter(torch.zeros(300, 1001))  # five pages
    compressor = TopK(0.002, collective=collective, wire_dtype=wire)
    optimizer = fusedcomp.SGD([weight], lr=1.0, compressor=compressor, memory=Residual())
    generator = torch.Generator().manual_seed(rank)
    went_in, applied = torch.zeros_like(weight), torch.zeros_like(weight)
    for _ in range(30):
        weight.grad = torch.randint(-1000, 1001, weight.shape, generator=generator).float()
        weight.grad *= 2.0 ** torch.randint(0, 4, (1,), generator=generator)
        went_in += weight.grad
        weight.data.zero_()
        optimizer.step()
        applied += (weight.detach() * world).round()  # a third of a whole number may have been rounded
    kept = optimizer.state[weight]["residual"].clone()
    dist.all_reduce(kept)
    dist.all_reduce(went_in)
    return torch.equal(kept - applied, went_in)


@pytest.mark.parametrize(("world", "wire"), [(2, torch.float32), (4, torch.bfloat16), (3, torch.float16)])
@BOTH
def test_nothing_is_lost(collective: str, world: int, wire: torch.dtype) -> None:
    assert all(run(_conserved, world, collective, wire))


# ---- runs ----------------------------------------------------------------------------------------------------------


def _resume(rank: int, world: int, collective: str, options: dict[str, Any]) -> bytes:
    model, again = net(), net(1)
    make = {"lr": 0.05, "compressor": TopK(0.05, collective=collective), "bucket_cap_mb": 0.05} | options
    cls = make.pop("cls", fusedcomp.SGD)
    optimizer, resumed = cls(model.parameters(), **make), cls(again.parameters(), **make)
    for number in range(10):
        if number == 5:
            again.load_state_dict(model.state_dict())
            resumed.load_state_dict(optimizer.state_dict())
        for m, o in ((model, optimizer), (again, resumed)):
            if o is resumed and number < 5:
                continue
            o.zero_grad()
            loss_of(m, rank, number).backward()
            o.step()
    assert digest(model) == digest(again)
    return digest(model)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"momentum": 0.9, "weight_decay": 1e-2, "decay": "decoupled"}),
        (3, {"momentum": 0.9, "memory": Residual(), "nesterov": True}),
        (4, {"momentum": 0.9, "skip_nonfinite": True, "max_grad_norm": 1.0, "clip_scope": "tensor"}),
        (2, {"cls": LARS, "momentum": 0.9}),
    ],
    ids=["decoupled", "momentum-behind", "guarded", "lars"],
)
@BOTH
def test_replicas_and_resume_are_bit_exact(collective: str, world: int, options: dict[str, Any]) -> None:
    assert len(set(run(_resume, world, collective, options))) == 1


def _warm_up(rank: int, world: int, collective: str) -> tuple[list[int], bytes]:
    """Densities fall, from a dense start on: buffers are made anew, and what waits is taken along."""
    weight = nn.Parameter(torch.zeros(300, 1001))
    compressor = TopK(0.002, warmup_steps=6, warmup_densities=[1.0, 0.1, 0.02], collective=collective)
    optimizer = fusedcomp.SGD([weight], lr=0.5, momentum=0.5, compressor=compressor)
    generator, sent = torch.Generator().manual_seed(rank), []
    for _ in range(9):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        sent.append(int(optimizer.metrics()["bytes_sent"]))
    return sent, weight.detach().numpy().tobytes()


@BOTH
def test_a_warm_up(collective: str) -> None:
    results = run(_warm_up, 4, collective)
    assert len({bits for _, bits in results}) == 1
    sent = results[0][0]
    assert sent[0] == sent[1] >= 4 * 300 * 1001
    assert sent[1] > sent[2] == sent[3] > sent[4] == sent[5] > sent[6] == sent[8]


def _lars_norms(rank: int, world: int, collective: str) -> None:
    """All ranks' norms travel along: the trust ratios are those of a gather."""
    models, norms = [net(), net()], []
    for model, how in zip(models, ("gather", collective), strict=True):
        optimizer = LARS(model.parameters(), lr=0.0, momentum=0.9, compressor=TopK(0.02, collective=how))
        loss_of(model, rank, 0).backward()
        optimizer.step()
        norms.append([e.bucket.norms for e in optimizer._exchanges if e.bucket.norms is not None])
    for a, b in zip(*norms, strict=True):
        assert a.any()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)  # ranks are added in another order


@BOTH
def test_lars_takes_norms_along(collective: str) -> None:
    run(_lars_norms, 3, collective)


def _fails(rank: int, world: int, collective: str) -> tuple[str, bytes]:
    """The last rank changes a gradient after backward; all raise, and go on alike."""
    model = net()
    compressor = TopK(0.05, collective=collective)
    optimizer = fusedcomp.SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=compressor, bucket_cap_mb=0.05)
    told = ""
    for number in range(4):
        loss_of(model, rank, number).backward()
        if number == 1 and rank == world - 1:
            model[2].weight.grad.mul_(2.0)
        message = message_of(optimizer.step)
        if number == 1:
            told = message
        else:
            assert message == "nothing was raised"
        optimizer.zero_grad()
    return told, digest(model)


@pytest.mark.parametrize("world", [2, 3])
@BOTH
def test_a_rank_that_fails_is_told_of_everywhere(collective: str, world: int) -> None:
    *others, (own, bits) = run(_fails, world, collective)
    assert own.startswith("RuntimeError")
    assert "another rank failed" not in own
    for message, theirs in others:
        assert "another rank failed during the exchange" in message
        assert theirs == bits


def _nonfinite(rank: int, world: int, collective: str) -> tuple[list[int], bytes]:
    """A NaN of one rank: void on all, bit for bit."""
    weight = nn.Parameter(torch.zeros(64, 50))
    compressor = TopK(0.05, collective=collective)
    optimizer = fusedcomp.SGD([weight], lr=0.5, momentum=0.9, compressor=compressor, skip_nonfinite=True)
    skipped = []
    for number in range(4):
        generator = torch.Generator().manual_seed(10 * number + rank)
        weight.grad = torch.randn(64, 50, generator=generator)
        before = weight.detach().clone()
        if number == 2 and rank == world - 1:
            weight.grad[3, 7] = float("nan")
        optimizer.step()
        skipped.append(optimizer.skipped)
        assert torch.equal(weight.detach(), before) == (number == 2)
        assert all(state.isfinite().all() for state in optimizer.state_dict()["state"][0].values())
    return skipped, weight.detach().numpy().tobytes()


@BOTH
def test_a_gradient_that_is_not_finite_voids_the_step(collective: str) -> None:
    results = run(_nonfinite, 3, collective)
    assert all(r == results[0] for r in results)
    assert results[0][0] == [0, 0, 1, 1]


def _overflow(rank: int, world: int, collective: str) -> list[int]:
    weight = nn.Parameter(torch.zeros(64, 50))
    optimizer = fusedcomp.SGD([weight], lr=0.5, compressor=TopK(0.05, collective=collective), memory=Residual())
    found = []
    for value in (1.0, 3e38, 1.0):
        weight.grad = torch.zeros(64, 50)
        weight.grad[3, 7] = value
        optimizer.step()
        found.append(int(optimizer.metrics()["nonfinite"]))
    return found


@BOTH
def test_sums_that_overflow_are_told_of(collective: str) -> None:
    assert run(_overflow, 4, collective) == [[0, 1, 1]] * 4


def _differ(rank: int, world: int, collective: str) -> str:
    """One rank's compressor is replaced by another whose payloads have the same size."""
    wire = torch.float16 if rank == world - 1 else torch.bfloat16
    model = net()
    compressor = TopK(0.05, collective=collective, wire_dtype=torch.bfloat16)
    optimizer = fusedcomp.SGD(model.parameters(), lr=0.05, compressor=compressor)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.param_groups[0]["compressor"] = TopK(0.05, collective=collective, wire_dtype=wire)
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    return message_of(optimizer.step)


@BOTH
def test_ranks_that_encode_differently_raise_everywhere(collective: str) -> None:
    for message in run(_differ, 3, collective):
        assert "ranks encode their payloads differently" in message


def _absent(rank: int, world: int, collective: str) -> bytes:
    """A parameter that only rank 1 has a gradient for; the others may keep what merges leave of it."""
    weights = [nn.Parameter(torch.zeros(64, 50)), nn.Parameter(torch.ones(64, 70))]
    compressor = TopK(0.05, collective=collective)
    optimizer = fusedcomp.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-2, compressor=compressor)
    for number in range(5):
        generator = torch.Generator().manual_seed(10 * number + rank)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        if rank != 1:
            weights[1].grad = None
        optimizer.step()
    assert (weights[1] != 1.0).any()
    return b"".join(w.detach().numpy().tobytes() for w in weights)


@BOTH
def test_gradients_that_some_ranks_lack(collective: str) -> None:
    assert len(set(run(_absent, 3, collective))) == 1


def _hook(rank: int, world: int, collective: str) -> bytes:
    """The hook of DistributedDataParallel has the same tree."""
    return hook_and_optimizer(rank, world, TopK(0.05, collective=collective), steps=3)


@BOTH
def test_the_hook_sends_the_same(collective: str) -> None:
    assert len(set(run(_hook, 2, collective))) == 1


def _subset(rank: int, world: int, collective: str) -> bytes:
    """Partners are ranks of the group, whatever the default group calls them."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return b""
    model = net()
    optimizer = fusedcomp.SGD(
        model.parameters(), lr=0.05, compressor=TopK(0.05, collective=collective), process_group=group
    )
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()
    return digest(model)


@BOTH
def test_in_a_group_of_some_ranks(collective: str) -> None:
    nothing, *others = run(_subset, 3, collective)
    assert nothing == b""
    assert len(set(others)) == 1


@BOTH
def test_alone_it_is_a_gather(collective: str) -> None:
    models = [net(), net()]
    for model, how in zip(models, ("gather", collective), strict=True):
        optimizer = fusedcomp.SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.05, collective=how))
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, 0, number).backward()
            optimizer.step()
    assert digest(models[0]) == digest(models[1])


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    assert message_of(lambda: TopK(0.1, collective="ring")) == (
        "ValueError: TopK: collective must be 'gather', 'tree' or 'split', got 'ring'"
    )
    assert message_of(lambda: TopK(0.1, collective="split", scope="tensor")) == (
        "ValueError: TopK: collective='split' ranks over ranges of a bucket: it needs scope='bucket', got 'tensor'"
    )


@BOTH
def test_what_would_lose_entries_is_refused(collective: str) -> None:
    weights, compressor = [nn.Parameter(torch.zeros(64, 50))], TopK(0.1, collective=collective)
    without = message_of(lambda: fusedcomp.SGD(weights, lr=0.1, compressor=compressor, memory=NoMemory()))
    assert without.startswith(f"ValueError: SGD: collective='{collective}' needs Residual() or MomentumCorrection()")
    assert without.endswith("got NoMemory()")
    halves = message_of(lambda: fusedcomp.SGD(weights, lr=0.1, compressor=compressor, state_dtype=torch.bfloat16))
    assert halves.startswith(f"ValueError: SGD: collective='{collective}' needs state_dtype=torch.float32")
    assert halves.endswith("got torch.bfloat16")
    assert message_of(lambda: CompressionState(compressor, memory=NoMemory())).startswith(
        f"ValueError: CompressionState: collective='{collective}' needs Residual()"
    )


def _two_levels(rank: int, world: int, collective: str) -> str:
    groups = [dist.new_group([2 * n, 2 * n + 1]) for n in range(2)], [dist.new_group([p, p + 2]) for p in range(2)]
    both = groups[0][rank // 2], groups[1][rank % 2]
    compressor = TopK(0.05, collective=collective)
    return message_of(lambda: fusedcomp.SGD(net().parameters(), lr=0.1, compressor=compressor, process_group=both))


@BOTH
def test_two_levels_refuse_it(collective: str) -> None:
    for told in run(_two_levels, 4, collective):
        assert told == (
            "NotImplementedError: process_group=(intra_node, inter_node) takes collective='gather' alone, got "
            f"'{collective}'"
        )


@BOTH
def test_a_record_through_a_checkpoint(collective: str) -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    compressor = TopK(0.05, collective=collective)
    optimizer, other = fusedcomp.SGD([weight], lr=0.1, compressor=compressor), fusedcomp.SGD([weight], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["compressor"] == compressor

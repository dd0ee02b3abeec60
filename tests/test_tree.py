"""TopK(collective="tree"): equal to a simulation of the tree; nothing is lost; replicas, resume, ranks that fail."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from fusedcomp import LARS, MomentumCorrection, NoMemory, Residual, TopK
from fusedcomp.ddp import CompressionState
from fusedcomp.kernels.reference.keys import selection_key
from fusedcomp.kernels.segments import Segments
from fusedcomp.sizing import count_at
from fusedcomp.tree import Tree, TreeExchange
from fusedcomp.wire import dense_is_cheaper, payloads_received
from hooked import step as hooked_step
from hooked import wrapped
from ranks import digest, loss_of, message_of, net, run

SHAPES = ((70, 1001), (33, 77))  # two pages and a bit, and a segment that begins inside the second
LR = 0.5


# ---- who merges with whom ------------------------------------------------------------------------------------------


@given(world=st.integers(1, 200))
def test_partners_swap_and_everything_arrives(world: int) -> None:
    """Partners take part in the same round on the two sides; in the end all ranks' payloads are in everybody's."""
    trees = [Tree.of(rank, world) for rank in range(world)]
    holds = [{rank} for rank in range(world)]
    for number in range(world.bit_length()):
        before = [set(h) for h in holds]
        for rank, tree in enumerate(trees):
            for part in tree.rounds:
                if part.number != number:
                    continue
                (theirs,) = (p for p in trees[part.peer].rounds if p.number == number)
                assert (theirs.peer, theirs.side, theirs.places) == (rank, 1 - part.side, part.places)
                assert part.side == int(rank > part.peer)
                assert not before[rank] & before[part.peer]  # nothing is added twice
                holds[rank] = before[rank] | before[part.peer]
    for rank, tree in enumerate(trees):
        if tree.told_by is not None:
            assert trees[tree.told_by].tells == rank
            holds[rank] = holds[tree.told_by]
        assert holds[rank] == set(range(world))
        received = len(tree.rounds) + (tree.told_by is not None)
        assert received <= payloads_received("tree", world)
    assert max(len(t.rounds) + (t.tells is not None) for t in trees) == payloads_received("tree", world)


@given(world=st.integers(2, 64))
def test_of_those_that_merge_the_same_one_keeps_an_index(world: int) -> None:
    trees = [Tree.of(rank, world) for rank in range(world)]
    for number in range(world.bit_length()):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, tree in enumerate(trees):
            for part in tree.rounds:
                if part.number == number and number == 0:
                    groups.setdefault((min(rank, part.peer),), []).append(part.place)
                elif part.number == number:
                    groups.setdefault((rank // part.places,), []).append(part.place)
                assert 0 <= part.place < part.places
        for places in groups.values():
            assert sorted(places) == list(range(len(places)))


def test_dense_where_that_moves_no_more() -> None:
    """Of 8 ranks each receives 3 payloads, or 7/4 of everything; a gather would receive 7."""
    assert [payloads_received("tree", w) for w in (1, 2, 3, 4, 5, 8, 64)] == [0, 1, 3, 2, 4, 3, 6]
    assert not dense_is_cheaper(58, 100, 8, "tree")
    assert dense_is_cheaper(59, 100, 8, "tree")
    assert dense_is_cheaper(25, 100, 8)
    assert dense_is_cheaper(100, 100, 1, "tree")


# ---- against a simulation ------------------------------------------------------------------------------------------


class Simulated:
    """All ranks of a tree in one process, on dense vectors."""

    def __init__(self, world: int, segments: Segments, ks: list[int], momentum: float) -> None:
        self.world, self.ks, self.momentum = world, ks, momentum
        numel = segments.padded_numel
        self.scopes = segments.slices if segments.per_tensor else (slice(0, numel),)
        self.index, self.inside = torch.arange(numel), torch.zeros(numel, dtype=torch.bool)
        for where in segments.slices:
            self.inside[where] = True
        self.residuals, self.velocities = torch.zeros(world, numel), torch.zeros(world, numel)
        self.step = 0

    def largest(self, values: Tensor, among: Tensor, seed: int) -> Tensor:
        """Where the k largest of every scope are, of those ``among``."""
        chosen = torch.zeros_like(among)
        keys = selection_key(values, self.index, torch.tensor([seed]), False)
        for scope, k in zip(self.scopes, self.ks, strict=True):
            mine = keys[scope].where(among[scope], -1)
            top = torch.topk(mine, k).indices
            chosen[scope][top[mine[top] >= 0]] = True
        return chosen

    def merge(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], ranks: range | list[int], number: int) -> Any:
        total, there = a[0] + b[0], a[1] | b[1]
        kept = self.largest(total, there, self.step + 1 + number)
        for i in (there & ~kept).nonzero().view(-1).tolist():
            self.residuals[ranks[i % len(ranks)], i] += total[i]
        return total.where(kept, 0.0), kept

    def exchange(self, gradients: Tensor) -> Tensor:
        """What all apply, of gradients (world, numel)."""
        self.velocities = self.momentum * self.velocities + gradients
        self.residuals += self.velocities if self.momentum else gradients
        parts = []
        for residual in self.residuals:
            sent = self.largest(residual, self.inside, self.step)
            parts.append((residual.where(sent, 0.0), sent))
            residual[sent] = 0.0
        sent = [part[1] for part in parts]
        depth = self.world.bit_length() - 1
        for j in range(self.world - (1 << depth)):
            parts[j] = self.merge(parts[j], parts[j + (1 << depth)], [j, j + (1 << depth)], 0)
        for r in range(depth):
            for first in range(0, 1 << depth, 2 << r):
                ranks = range(first, first + (2 << r))
                merged = self.merge(parts[first], parts[first + (1 << r)], ranks, r + 1)
                for rank in ranks:
                    parts[rank] = merged
        for velocity, mine in zip(self.velocities, sent, strict=True):
            velocity[mine & parts[0][1]] = 0.0
        self.step += 1
        return parts[0][0]


def _simulated(rank: int, world: int, scope: str, momentum: float, options: dict[str, Any]) -> int:
    """Bit for bit, on dyadic data: parameters, residuals, velocities; the total is what went in."""
    weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    memory = MomentumCorrection() if momentum else Residual()
    compressor = TopK(0.003, scope=scope, collective="tree")
    optimizer = fusedcomp.SGD(weights, lr=LR, momentum=momentum, compressor=compressor, memory=memory, **options)
    (exchange,) = optimizer._exchanges
    assert isinstance(exchange, TreeExchange)
    segments = exchange.bucket.segments
    simulated = Simulated(world, segments, [count_at(0.003, n) for n in segments.scope_numels], momentum)
    generator = torch.Generator().manual_seed(0)
    applied, went_in = torch.zeros(segments.padded_numel), torch.zeros(segments.padded_numel)
    for number in range(5):
        size = (world, segments.padded_numel)
        gradients = torch.randint(-64, 65, size, generator=generator) * torch.randint(0, 2, size, generator=generator)
        gradients = (gradients * simulated.inside).float()
        went_in += gradients.sum(0)
        for param, where in zip(exchange.bucket.params, segments.slices, strict=True):
            param.grad = gradients[rank, where].view_as(param).clone()
        optimizer.step()
        update = simulated.exchange(gradients)
        applied -= LR * torch.tensor(1 / world) * update
        optimizer._exchanges.normalise()  # of two halves, look at the one that holds
        for param, where in zip(exchange.bucket.params, segments.slices, strict=True):
            assert torch.equal(param.detach().view(-1), applied[where]), number
            assert torch.equal(optimizer.state[param]["residual"].view(-1), simulated.residuals[rank, where]), number
            if momentum:
                assert torch.equal(optimizer.state[param]["velocity"].view(-1), simulated.velocities[rank, where])
        assert not exchange.shared.vector.any()
    if momentum == 0.0 and world & (world - 1) == 0:
        total = torch.zeros_like(applied)
        for param, where in zip(exchange.bucket.params, segments.slices, strict=True):
            total[where] = optimizer.state[param]["residual"].view(-1)
        dist.all_reduce(total)
        assert torch.equal(total - applied * world / LR, went_in)
    return int(optimizer.metrics()["bytes_sent"])


@pytest.mark.parametrize(
    ("world", "scope", "momentum", "options"),
    [
        (2, "bucket", 0.0, {}),
        (4, "bucket", 0.5, {}),
        (4, "bucket", 0.0, {"skip_nonfinite": True}),
        (3, "tensor", 0.5, {}),
        (5, "bucket", 0.0, {}),
    ],
)
def test_equal_to_a_simulation(world: int, scope: str, momentum: float, options: dict[str, Any]) -> None:
    sent = run(_simulated, world, scope, momentum, options)
    k = 218 if scope == "bucket" else 211 + 8
    payload = -(-(4 * (4 + 1) + 4 * 3 + 6 * k) // 16) * 16  # header, two pages
    row = -(-(payload + 4 * (2 + 6)) // 16) * 16  # and the trailer
    rounds = {2: [1, 1], 3: [3, 1, 1], 4: [2] * 4, 5: [4, 2, 2, 2, 1]}[world]
    assert sent == [r * row for r in rounds]


def _conserved(rank: int, world: int, wire: torch.dtype) -> bool:
    """Over 30 steps, whatever rounds on the way: what went in is applied or with one of the ranks, bit for bit."""
    weight = nn.Parameter(torch.zeros(64, 50))
    compressor = TopK(0.02, collective="tree", wire_dtype=wire)
    optimizer = fusedcomp.SGD([weight], lr=1.0, compressor=compressor, memory=Residual())
    generator = torch.Generator().manual_seed(rank)
    went_in = torch.zeros_like(weight)
    for _ in range(30):
        weight.grad = torch.randint(-1000, 1001, weight.shape, generator=generator).float()
        weight.grad *= 2.0 ** torch.randint(0, 4, (1,), generator=generator)
        went_in += weight.grad
        optimizer.step()
    kept = optimizer.state[weight]["residual"].clone()
    dist.all_reduce(kept)
    dist.all_reduce(went_in)
    return torch.equal(kept - world * weight.detach(), went_in)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_lost(wire: torch.dtype) -> None:
    assert all(run(_conserved, 4, wire))


# ---- runs ----------------------------------------------------------------------------------------------------------

TREE = TopK(0.05, collective="tree")


def _resume(rank: int, world: int, options: dict[str, Any]) -> bytes:
    model, again = net(), net(1)
    make = {"lr": 0.05, "compressor": TREE, "bucket_cap_mb": 0.05} | options
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
def test_replicas_and_resume_are_bit_exact(world: int, options: dict[str, Any]) -> None:
    assert len(set(run(_resume, world, options))) == 1


def _lars_norms(rank: int, world: int) -> None:
    """All ranks' norms travel with the trailers: the trust ratios are those of a gather."""
    models, norms = [net(), net()], []
    for model, collective in zip(models, ("gather", "tree"), strict=True):
        optimizer = LARS(model.parameters(), lr=0.0, momentum=0.9, compressor=TopK(0.02, collective=collective))
        loss_of(model, rank, 0).backward()
        optimizer.step()
        norms.append([e.bucket.norms for e in optimizer._exchanges if e.bucket.norms is not None])
    for a, b in zip(*norms, strict=True):
        assert a.any()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)  # ranks are added in another order


def test_lars_takes_norms_along() -> None:
    run(_lars_norms, 3)


def _fails(rank: int, world: int) -> tuple[str, bytes]:
    """The last rank changes a gradient after backward; all raise, and go on alike."""
    model = net()
    optimizer = fusedcomp.SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TREE, bucket_cap_mb=0.05)
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
def test_a_rank_that_fails_is_told_of_everywhere(world: int) -> None:
    *others, (own, bits) = run(_fails, world)
    assert own.startswith("RuntimeError")
    assert "another rank failed" not in own
    for message, theirs in others:
        assert "another rank failed during the exchange" in message
        assert theirs == bits


def _nonfinite(rank: int, world: int, broken: float) -> tuple[list[int], bytes]:
    """A NaN of one rank, then sums that overflow though no rank's value does: void on all, bit for bit."""
    weight = nn.Parameter(torch.zeros(64, 50))
    optimizer = fusedcomp.SGD([weight], lr=0.5, momentum=0.9, compressor=TREE, skip_nonfinite=True)
    skipped = []
    for number in range(4):
        generator = torch.Generator().manual_seed(10 * number + rank)
        weight.grad = torch.randn(64, 50, generator=generator)
        before = weight.detach().clone()
        if number == 2:
            weight.grad[3, 7] = broken if broken == broken or rank == world - 1 else 0.0
        optimizer.step()
        skipped.append(optimizer.skipped)
        assert torch.equal(weight.detach(), before) == (number == 2)
        assert all(state.isfinite().all() for state in optimizer.state_dict()["state"][0].values())
    return skipped, weight.detach().numpy().tobytes()


def test_a_gradient_that_is_not_finite_voids_the_step() -> None:
    results = run(_nonfinite, 3, float("nan"))
    assert all(r == results[0] for r in results)
    assert results[0][0] == [0, 0, 1, 1]


def _overflow(rank: int, world: int) -> list[int]:
    weight = nn.Parameter(torch.zeros(64, 50))
    optimizer = fusedcomp.SGD([weight], lr=0.5, compressor=TREE, memory=Residual())
    found = []
    for value in (1.0, 3e38, 1.0):
        weight.grad = torch.zeros(64, 50)
        weight.grad[3, 7] = value
        optimizer.step()
        found.append(int(optimizer.metrics()["nonfinite"]))
    return found


def test_sums_that_overflow_are_told_of() -> None:
    assert run(_overflow, 4) == [[0, 1, 1]] * 4


def _differ(rank: int, world: int) -> str:
    """One rank's compressor is replaced by another whose payloads have the same size."""
    wire = torch.float16 if rank == world - 1 else torch.bfloat16
    model = net()
    compressor = TopK(0.05, collective="tree", wire_dtype=torch.bfloat16)
    optimizer = fusedcomp.SGD(model.parameters(), lr=0.05, compressor=compressor)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    optimizer.param_groups[0]["compressor"] = TopK(0.05, collective="tree", wire_dtype=wire)
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    return message_of(optimizer.step)


def test_ranks_that_encode_differently_raise_everywhere() -> None:
    for message in run(_differ, 3):
        assert "ranks encode their payloads differently" in message


def _absent(rank: int, world: int) -> bytes:
    """A parameter that only rank 1 has a gradient for; the others may keep what merges leave of it."""
    weights = [nn.Parameter(torch.zeros(64, 50)), nn.Parameter(torch.ones(64, 70))]
    optimizer = fusedcomp.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-2, compressor=TREE)
    for number in range(5):
        generator = torch.Generator().manual_seed(10 * number + rank)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        if rank != 1:
            weights[1].grad = None
        optimizer.step()
    assert (weights[1] != 1.0).any()
    return b"".join(w.detach().numpy().tobytes() for w in weights)


def test_gradients_that_some_ranks_lack() -> None:
    assert len(set(run(_absent, 3))) == 1


def _hook(rank: int, world: int) -> bytes:
    """The hook of DistributedDataParallel has the same tree."""
    model, other = net(), net()
    ddp = wrapped(model, CompressionState(TREE, model.named_parameters()), bucket_cap_mb=100)
    plain = torch.optim.SGD(model.parameters(), lr=2.0**-5)
    optimizer = fusedcomp.SGD(other.parameters(), lr=2.0**-5, compressor=TREE)
    for number in range(3):
        hooked_step(ddp, plain, rank, number)
        optimizer.zero_grad()
        loss_of(other, rank, number).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    return digest(model)


def test_the_hook_sends_the_same() -> None:
    assert len(set(run(_hook, 2))) == 1


def _subset(rank: int, world: int) -> bytes:
    """Partners are ranks of the group, whatever the default group calls them."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return b""
    model = net()
    optimizer = fusedcomp.SGD(model.parameters(), lr=0.05, compressor=TREE, process_group=group)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()
    return digest(model)


def test_in_a_group_of_some_ranks() -> None:
    nothing, *others = run(_subset, 3)
    assert nothing == b""
    assert len(set(others)) == 1


def test_alone_it_is_a_gather() -> None:
    models = [net(), net()]
    for model, collective in zip(models, ("gather", "tree"), strict=True):
        optimizer = fusedcomp.SGD(
            model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.05, collective=collective)
        )
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, 0, number).backward()
            optimizer.step()
    assert digest(models[0]) == digest(models[1])


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    assert message_of(lambda: TopK(0.1, collective="ring")) == (
        "ValueError: TopK: collective must be 'gather' or 'tree', got 'ring'"
    )
    weights = [nn.Parameter(torch.zeros(64, 50))]
    without = message_of(lambda: fusedcomp.SGD(weights, lr=0.1, compressor=TREE, memory=NoMemory()))
    assert without.startswith("ValueError: SGD: collective='tree' needs Residual() or MomentumCorrection()")
    assert without.endswith("got NoMemory()")
    halves = message_of(lambda: fusedcomp.SGD(weights, lr=0.1, compressor=TREE, state_dtype=torch.bfloat16))
    assert halves.startswith("ValueError: SGD: collective='tree' needs state_dtype=torch.float32")
    assert halves.endswith("got torch.bfloat16")
    assert message_of(lambda: CompressionState(TREE, memory=NoMemory())).startswith(
        "ValueError: CompressionState: collective='tree' needs Residual()"
    )


def _two_levels(rank: int, world: int) -> str:
    groups = [dist.new_group([2 * n, 2 * n + 1]) for n in range(2)], [dist.new_group([p, p + 2]) for p in range(2)]
    both = groups[0][rank // 2], groups[1][rank % 2]
    return message_of(lambda: fusedcomp.SGD(net().parameters(), lr=0.1, compressor=TREE, process_group=both))


def test_two_levels_refuse_it() -> None:
    for told in run(_two_levels, 4):
        assert told == (
            "NotImplementedError: process_group=(intra_node, inter_node) takes collective='gather' alone, got 'tree'"
        )


def test_a_record_through_a_checkpoint() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer, other = fusedcomp.SGD([weight], lr=0.1, compressor=TREE), fusedcomp.SGD([weight], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["compressor"] == TREE

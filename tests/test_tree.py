"""TopK(collective="tree"): equal to a simulation of the tree; nothing is lost; replicas, resume, ranks that fail."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from fusedcomp import MomentumCorrection, Residual, TopK
from fusedcomp.kernels.reference.keys import selection_key
from fusedcomp.kernels.segments import Segments
from fusedcomp.sizing import count_at
from fusedcomp.tree import Tree, TreeExchange
from fusedcomp.wire import dense_is_cheaper, payloads_received
from ranks import run

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
    """Of 8 ranks each sends and receives 3 payloads: not as much as everything; a gather would receive 7."""
    assert [payloads_received("tree", w) for w in (1, 2, 3, 4, 5, 8, 64)] == [0, 1, 3, 2, 4, 3, 6]
    assert not dense_is_cheaper(33, 100, 8, "tree")
    assert dense_is_cheaper(34, 100, 8, "tree")
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

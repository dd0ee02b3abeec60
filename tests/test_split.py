"""TopK(collective="split"): equal to a simulation of owners and their ranges; rooms and ranges."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from fusedcomp import MomentumCorrection, Residual, TopK
from fusedcomp.kernels.reference.keys import selection_key, tie_hash
from fusedcomp.kernels.segments import PAGE, Segments
from fusedcomp.sizing import count_at
from fusedcomp.split import SplitExchange
from fusedcomp.wire import PayloadLayout, Split, payloads_received, split_is_dearer, split_layouts
from ranks import run

SHAPES = ((200, 1001), (33, 77))  # three pages and a bit, and a segment in the last
LR = 0.5


@given(pages=st.integers(1, 500), k=st.integers(1, 10**6), world=st.integers(1, 128))
def test_ranges_cover_the_pages_and_shares_the_entries(pages: int, k: int, world: int) -> None:
    split = Split.of(pages, k, world)
    assert 1 <= split.owners <= min(world, pages)
    assert (split.owners - 1) * split.pages < pages <= split.owners * split.pages
    assert k <= split.owners * split.share < k + split.owners
    assert split.room == k or 2 * k <= split.owners * split.room < 2 * k + split.owners


def test_dense_where_that_moves_no_more() -> None:
    """An owner among 8 ranks receives 7 pieces and 7 shares, by an all-reduce 7/4 of everything. Nor is more sent."""
    alone, many = Split.of(1, 1000, 8), Split.of(16, 1000, 8)
    assert alone == (1, 1, 1000, 1000)
    assert not split_is_dearer(alone, 100, 100, 801, 8)
    assert split_is_dearer(alone, 100, 100, 800, 8)
    assert many == (8, 2, 250, 125)
    assert not split_is_dearer(many, 100, 50, 851, 8)
    assert split_is_dearer(many, 100, 50, 850, 8)


class Simulated:
    """All ranks in one process, on dense vectors."""

    def __init__(self, world: int, segments: Segments, k: int, momentum: float) -> None:
        self.world, self.k, self.momentum, self.step = world, k, momentum, 0
        self.split, numel = Split.of(segments.num_pages, k, world), segments.padded_numel
        self.index, self.inside = torch.arange(numel), torch.zeros(numel, dtype=torch.bool)
        for where in segments.slices:
            self.inside[where] = True
        self.residuals, self.velocities = torch.zeros(world, numel), torch.zeros(world, numel)
        self.left_out = 0

    @staticmethod
    def largest(values: Tensor, among: Tensor, k: int, seed: int) -> Tensor:
        keys = selection_key(values, torch.arange(len(values)), torch.tensor([seed]), False).where(among, -1)
        top = torch.topk(keys, min(k, len(keys))).indices
        chosen = torch.zeros_like(among)
        chosen[top[keys[top] >= 0]] = True
        return chosen

    def cut(self, chosen: Tensor, owner: int, where: slice) -> Tensor:
        """Which of a range's entries find room: all but a run, beginning somewhere, going round."""
        at = chosen[where].nonzero().view(-1)
        excess = max(len(at) - self.split.room, 0)
        first = int(tie_hash(torch.tensor([owner]), torch.tensor([self.step + 1]))) % max(len(at), 1)
        fits = torch.zeros_like(chosen[where])
        fits[at] = True
        fits[at[[(first + i) % len(at) for i in range(excess)]]] = False
        self.left_out += excess
        return fits

    def exchange(self, gradients: Tensor) -> Tensor:
        """What all apply, of gradients (world, numel)."""
        self.velocities = self.momentum * self.velocities + gradients
        self.residuals += self.velocities if self.momentum else gradients
        chosen = [self.largest(r, self.inside, self.k, self.step) for r in self.residuals]
        outcome = torch.zeros(len(self.index))
        sent, applied = [torch.zeros_like(c) for c in chosen], torch.zeros_like(self.inside)
        for owner in range(self.split.owners):
            size = self.split.pages * PAGE
            where = slice(owner * size, min((owner + 1) * size, len(self.index)))
            total = torch.zeros_like(outcome[where])
            for rank in range(self.world):
                fits = self.cut(chosen[rank], owner, where)
                sent[rank][where] = fits
                total += self.residuals[rank, where].where(fits, 0.0)
                self.residuals[rank, where][fits] = 0.0
            there = torch.stack([s[where] for s in sent]).any(0)
            won = self.largest(total, there, self.split.share, self.step + 1)
            self.residuals[owner, where] += total.where(~won, 0.0)
            outcome[where], applied[where] = total.where(won, 0.0), won
        for velocity, mine in zip(self.velocities, sent, strict=True):
            velocity[mine & applied] = 0.0
        self.step += 1
        return outcome


@pytest.mark.parametrize("k", [6554, 327_680])
@pytest.mark.parametrize("world", [*range(2, 10), 16, 32])
def test_which_collective_moves_least(world: int, k: int) -> None:
    """What docs/algorithms/sparse-collectives.md says of 100 pages; and Ok-Topk's bound, 6 k (W - 1) / W words."""
    payload = PayloadLayout(20, 100, k, with_norms=False, wire_dtype=torch.float32).nbytes
    _, piece, share = split_layouts(20, 100, k, torch.float32, False, world)
    split = (world - 1) * (piece.nbytes + share.nbytes)
    gather, tree = ((payloads_received(how, world) * payload) for how in ("gather", "tree"))
    assert (tree < gather) == (world == 4 or world >= 6)
    assert (tree < split) == (world in (2, 4))
    assert world == 3 or (split < gather) == (world > 3)  # of three it is a header, more or less
    assert split < 24 * k * (world - 1) / world


def _simulated(rank: int, world: int, momentum: float, crowded: bool, options: dict[str, Any]) -> tuple[int, int]:
    """Bit for bit, on dyadic data: parameters, residuals, velocities. ``crowded``: the first page has it all."""
    weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    memory = MomentumCorrection() if momentum else Residual()
    compressor = TopK(0.002, collective="split")
    optimizer = fusedcomp.SGD(weights, lr=LR, momentum=momentum, compressor=compressor, memory=memory, **options)
    (exchange,) = optimizer._exchanges
    assert isinstance(exchange, SplitExchange)
    segments = exchange.bucket.segments
    simulated = Simulated(world, segments, count_at(0.002, segments.numel), momentum)
    generator = torch.Generator().manual_seed(0)
    applied = torch.zeros(segments.padded_numel)
    for number in range(5):
        size = (world, segments.padded_numel)
        gradients = torch.randint(-64, 65, size, generator=generator) * torch.randint(0, 2, size, generator=generator)
        if crowded:
            gradients[:, :PAGE] *= 64
        gradients = (gradients * simulated.inside).float()
        for param, where in zip(exchange.bucket.params, segments.slices, strict=True):
            param.grad = gradients[rank, where].view_as(param).clone()
        optimizer.step()
        applied -= LR * torch.tensor(1 / world) * simulated.exchange(gradients)
        optimizer._exchanges.normalise()  # of two halves, look at the one that holds
        for param, where in zip(exchange.bucket.params, segments.slices, strict=True):
            assert torch.equal(param.detach().view(-1), applied[where]), number
            assert torch.equal(optimizer.state[param]["residual"].view(-1), simulated.residuals[rank, where]), number
            if momentum:
                assert torch.equal(optimizer.state[param]["velocity"].view(-1), simulated.velocities[rank, where])
        assert exchange.shared.vector is not None
        assert not exchange.shared.vector.any()
    return int(optimizer.metrics()["bytes_sent"]), simulated.left_out


@pytest.mark.parametrize(
    ("world", "momentum", "crowded", "options"),
    [
        (2, 0.5, False, {}),
        (4, 0.0, True, {}),
        (4, 0.5, True, {"skip_nonfinite": True}),
        (3, 0.5, True, {}),
    ],
)
def test_equal_to_a_simulation(world: int, momentum: float, crowded: bool, options: dict[str, Any]) -> None:
    results = run(_simulated, world, momentum, crowded, options)
    k, pages = 406, {2: 2, 3: 2, 4: 1}[world]
    owners = {2: 2, 3: 2, 4: 4}[world]
    fields = 4 * (4 + 1) + 4 * (pages + 1)  # header, starts
    room, share = min(k, -(-2 * k // owners)), -(-k // owners)
    sent = owners * -(-(fields + 6 * room) // 16) * 16 + -(-(fields + 6 * share) // 16) * 16
    assert [nbytes for nbytes, _ in results] == [sent] * world
    assert (results[0][1] > 0) == (world == 4)  # of 2 owners' ranges each has room for all

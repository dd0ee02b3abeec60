"""JointSpar inside fusedcomp's optimizers: factors of the pass do what hooks that divide every gradient would.

With chances of 1/2 a product is exact, as is a quotient: runs agree bit for bit.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
from fusedcomp import LARS, SGD, BlockTopK, GradScaler, Identity, NoMemory, RandomK, Residual, TopK
from fusedcomp.bandit import Bandit
from fusedcomp.compressors import Compressor
from fusedcomp.jointspar import JointSpar
from fusedcomp.kernels.headers import TRAILER_WORDS
from sampled import active, drawing, probabilities

SETS = ([True, False, True, True], [False, True, True, False], [True, True, False, True], [False, False, True, False],
        [False, False, False, False], [True, True, True, True], [False, True, False, True])  # fmt: skip
SGD_ = functools.partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)
SMALL = {"bucket_cap_mb": 0.02}  # several buckets
CASES: dict[str, Callable[..., SGD | LARS]] = {
    "dense": SGD_,
    "dense, buckets, nesterov, maximize": functools.partial(SGD_, nesterov=True, maximize=True, **SMALL),
    "decoupled": functools.partial(SGD_, decay="decoupled"),
    "topk": functools.partial(SGD_, compressor=TopK(0.05), **SMALL),
    "topk, momentum behind": functools.partial(SGD_, compressor=TopK(0.05), memory=Residual()),
    "topk, late": functools.partial(SGD_, compressor=TopK(0.05), overlap=False),
    "topk, bf16": functools.partial(SGD_, compressor=TopK(0.05), state_dtype=torch.bfloat16),
    "topk, some steps are dense": functools.partial(
        SGD_, compressor=TopK(0.05, warmup_steps=3, warmup_densities=(1.0, 0.1, 1.0))
    ),
    "blocks": functools.partial(SGD_, compressor=BlockTopK(0.05)),
    "random": functools.partial(SGD_, compressor=RandomK(0.25), memory=NoMemory()),
    "lars": functools.partial(LARS, lr=0.5, weight_decay=1e-2),
    "lars, topk": functools.partial(LARS, lr=0.5, weight_decay=1e-2, compressor=TopK(0.05), **SMALL),
    **{
        f"clipped, {scope}": functools.partial(
            SGD_, compressor=TopK(0.05), max_grad_norm=0.3, clip_scope=scope, **SMALL
        )
        for scope in ("model", "bucket", "tensor")
    },
    "void steps": functools.partial(SGD_, compressor=TopK(0.05), skip_nonfinite=True, **SMALL),
    "scaled": functools.partial(SGD_, compressor=TopK(0.05), max_grad_norm=0.3, clip_scope="bucket"),
}


@contextlib.contextmanager
def still() -> Iterator[None]:
    """Probabilities stay what they are."""
    with mock.patch.object(Bandit, "update"):
        yield


class Hooks:
    """A sampler of nothing but requires_grad and hooks."""

    def __init__(self, optimizer: SGD | LARS, blocks: list[list[nn.Parameter]]) -> None:
        self.optimizer, self.blocks, self.sets = optimizer, blocks, iter(SETS)
        params = [param for block in blocks for param in block]
        self.handles = [param.register_hook(lambda grad: grad / 0.5) for param in params]

    def draw(self) -> None:
        for block, on in zip(self.blocks, next(self.sets), strict=True):
            for param in block:
                param.requires_grad_(on)
        self.optimizer.zero_grad()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for param in [p for block in self.blocks for p in block]:
            param.requires_grad_(True)
        self.optimizer.zero_grad()


def trained(rank: int, case: str, hooked: bool, group: object = None) -> bytes:
    """The digest after a step of every set, the third of two halves, one with a gradient that is not finite."""
    model = ranks.net()
    scaler = GradScaler("cpu", init_scale=2.0**10) if case == "scaled" else None
    options = {} if group is None else {"process_group": group}
    optimizer = CASES[case](model.parameters(), grad_scaler=scaler, **options)
    always = model[-1].bias  # so that a chance is what it seems
    sampler = JointSpar(optimizer, 0.5, exclude=[always])
    if hooked:
        blocks = sampler.blocks
        sampler.remove()
        sampler = Hooks(optimizer, blocks)
    with still(), drawing(*SETS):
        for step in range(len(SETS)):
            sampler.draw()
            loss = ranks.loss_of(model, rank, step)
            loss = loss if scaler is None else scaler.scale(loss)
            if step == 2:
                with optimizer.no_sync():
                    ranks.loss_of(model, rank, 99).backward()
            if step == 4 and case in ("void steps", "scaled"):
                loss = loss * float("inf")
            loss.backward()
            (optimizer.step if scaler is None else functools.partial(scaler.step, optimizer))()
            if scaler is not None:
                scaler.update()
    if case == "void steps":
        assert optimizer.skipped == 1
    return ranks.digest(model)


@pytest.mark.parametrize("case", CASES)
def test_factors_do_what_hooks_would(case: str) -> None:
    assert trained(0, case, hooked=False) == trained(0, case, hooked=True)


def on_ranks(rank: int, world: int, case: str, two_levels: bool) -> tuple[bytes, bytes]:
    group = None
    if two_levels:
        pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
        across = [dist.new_group(list(range(place, world, 2))) for place in range(2)]
        group = (pairs[rank // 2], across[rank % 2])
    return trained(rank, case, False, group), trained(rank, case, True, group)


@pytest.mark.parametrize("case", ["dense", "topk", "lars, topk", "clipped, model"])
def test_factors_do_what_hooks_would_on_two_ranks(case: str) -> None:
    (got, expected), other = ranks.run(on_ranks, 2, case, False)
    assert got == expected
    assert other == (got, expected)


def test_factors_do_what_hooks_would_over_two_levels() -> None:
    """But for the order in which four ranks are added up: it depends on where in a buffer an element is."""
    (got, expected), *others = ranks.run(on_ranks, 4, "topk", True)
    assert all(other == (got, expected) for other in others)
    mine, theirs = (torch.frombuffer(bytearray(bits), dtype=torch.float32) for bits in (got, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def bytes_of_steps(rank: int, world: int, compressor: Compressor, expected: list[int]) -> bytes:
    model = ranks.net()
    sampler = JointSpar(SGD_(model.parameters(), compressor=compressor, **SMALL), 0.5, exclude=[model[-1].bias])
    with still(), drawing(*SETS):
        for step, nbytes in enumerate(expected):
            sampler.draw()
            ranks.loss_of(model, rank, step).backward()
            sampler.optimizer.step()
            assert sampler.optimizer.metrics()["bytes_sent"].item() == nbytes
    return ranks.digest(model)


def test_only_active_blocks_travel() -> None:
    """And a trailer for every bucket. So the expectation of bytes is sum of p times bytes, over draws."""
    model = ranks.net()
    optimizer = SGD_(model.parameters(), **SMALL)
    sampler = JointSpar(optimizer, 0.5, exclude=[model[-1].bias])
    sizes = [sum(p.nbytes for p in block) for block in sampler.blocks]
    trailers = sum(4 * (len(bucket.params) + TRAILER_WORDS) for bucket in optimizer._buckets)
    always = model[-1].bias.nbytes + trailers
    expected = [always + sum(size for size, on in zip(sizes, active, strict=True) if on) for active in SETS]
    assert optimizer.metrics()["bytes_dense"].item() == sum(sizes) + model[-1].bias.nbytes
    first, second = ranks.run(bytes_of_steps, 2, Identity(), expected)
    assert first == second
    everything = itertools.product((False, True), repeat=4)
    mean = sum(sum(size for size, on in zip(sizes, active, strict=True) if on) for active in everything) / 16
    share = sampler.metrics()["expected_share"].item()
    assert mean + model[-1].bias.nbytes == pytest.approx(share * optimizer.metrics()["bytes_dense"].item())


def test_buckets_that_are_planned_anew_know_the_factors() -> None:
    """And where a sampler ends there are none."""
    digests = []
    for hooked in (False, True):
        model = ranks.net()
        optimizer = SGD_(model.parameters(), compressor=TopK(0.05))
        sampler: JointSpar | Hooks = JointSpar(optimizer, 0.5, exclude=[model[-1].bias])
        if hooked:
            blocks = sampler.blocks
            sampler.remove()
            sampler = Hooks(optimizer, blocks)
        with still(), drawing(*SETS):
            for step in range(3):
                optimizer.param_groups[0]["compressor"] = TopK(0.05 * (step + 1))
                sampler.draw()
                ranks.loss_of(model, 0, step).backward()
                optimizer.step()
        sampled = ranks.digest(model)
        sampler.remove()
        ranks.train(model, optimizer, 2)
        digests.append((sampled, ranks.digest(model)))
    assert digests[0] == digests[1]


def test_an_optimizer_has_one_sampler() -> None:
    model = ranks.net()
    optimizer = SGD(model.parameters(), lr=0.1)
    first = JointSpar(optimizer, 0.5, blocks=[model[0], model[2]])
    with pytest.raises(ValueError, match=r"the optimizer has a sampler already; remove\(\) that one, or give it all"):
        JointSpar(optimizer, 0.5, blocks=[model[6], model[8]])
    first.remove()
    JointSpar(optimizer, 0.5, blocks=[model[6], model[8]])


@pytest.mark.parametrize("scope", [None, "model", "tensor"])
def test_norms_come_from_the_pass(scope: str | None) -> None:
    """They are of gradients before clipping: those of torch's SGD, whose sampler has them from hooks."""
    chances = []
    for ours in (True, False):
        model = ranks.net()
        clip = {} if scope is None else {"max_grad_norm": 1e-3, "clip_scope": scope}
        optimizer = LARS(model.parameters(), lr=0.0, **clip) if ours else torch.optim.SGD(model.parameters(), lr=0.0)
        sampler = JointSpar(optimizer, 0.6, learning_rate=1.0, lag=0)
        for step in range(4):
            sampler.draw()
            ranks.loss_of(model, 0, step).backward()
            optimizer.step()
        sampler.draw()
        chances.append((probabilities(sampler), active(sampler)))
    assert chances[0][0] == pytest.approx(chances[1][0], rel=1e-5)
    assert chances[0][0] != pytest.approx([0.6] * 4, rel=1e-3)
    assert chances[0][1] == chances[1][1]

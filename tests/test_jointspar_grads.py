"""JointSpar inside fusedcomp's optimizers: factors of the pass do what hooks that divide would; what travels.

With chances of 1/2 a product is exact, as is a quotient: runs agree bit for bit. Where ranks draw for themselves (here
they come to the same) payloads are as large as without a sampler.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
from fusedcomp import (
    CAT,
    LARS,
    SGD,
    AffineCost,
    BlockTopK,
    GradScaler,
    Identity,
    NoMemory,
    RandomK,
    Residual,
    Threshold,
    TopK,
)
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
    "threshold": functools.partial(SGD_, compressor=Threshold(0.01), **SMALL),
    **{
        f"cat, {variant}": functools.partial(SGD_, compressor=CAT(AffineCost(fixed=100.0), variant=variant), **SMALL)
        for variant in ("sparse", "sparse_quantized", "stochastic")
    },
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
    sampler = JointSpar(optimizer, 0.5, exclude=[always], sampling="per_rank")
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
    (got, expected), *others = ranks.run(on_ranks, 4, "topk", True)
    assert got == expected
    assert all(other == (got, expected) for other in others)


# ---- what travels ----------------------------------------------------------------------------------------------------


def sent_in_steps(rank: int, world: int, compressor: Compressor, sampling: str) -> tuple[bytes, list[int]]:
    """The digest, and the bytes sent in the step of every set."""
    model, sent = ranks.net(), []
    optimizer = SGD_(model.parameters(), compressor=compressor, dense_dtype=torch.float32, **SMALL)
    sampler = JointSpar(optimizer, 0.5, exclude=[model[-1].bias], sampling=sampling)
    with still(), drawing(*SETS):
        for step in range(len(SETS)):
            sampler.draw()
            ranks.loss_of(model, rank, step).backward()
            optimizer.step()
            sent.append(optimizer.metrics()["bytes_sent"].item())
    return ranks.digest(model), sent


def test_only_active_blocks_travel() -> None:
    """And a trailer for every bucket: the expectation of bytes is sum of p times bytes. Parameters are the same."""
    model = ranks.net()
    optimizer = SGD_(model.parameters(), **SMALL)
    sampler = JointSpar(optimizer, 0.5, exclude=[model[-1].bias])
    sizes, bias = [sum(p.nbytes for p in block) for block in sampler.blocks], model[-1].bias.nbytes
    trailers = sum(4 * (len(bucket.params) + TRAILER_WORDS) for bucket in optimizer._buckets)

    def active_bytes(active: Sequence[bool]) -> int:
        return bias + sum(size for size, on in zip(sizes, active, strict=True) if on)

    (weights, sent), other = ranks.run(sent_in_steps, 2, Identity(), "shared")
    assert (weights, sent) == other
    assert sent == [active_bytes(active) + trailers for active in SETS]
    (weights_of_all, sent_of_all), _ = ranks.run(sent_in_steps, 2, Identity(), "per_rank")
    assert weights == weights_of_all
    assert sent_of_all == [sum(sizes) + bias + trailers] * len(SETS)
    everything = [active_bytes(active) for active in itertools.product((False, True), repeat=4)]
    dense, share = optimizer.metrics()["bytes_dense"].item(), sampler.metrics()["expected_share"].item()
    assert sum(everything) / len(everything) == pytest.approx(share * dense)


@pytest.mark.parametrize("selection", ["exact", "sampled", "sidco"])
@pytest.mark.parametrize("scope", ["bucket", "tensor"])
def test_the_largest_of_the_active_entries_are_sent_and_the_rest_is_kept(scope: str, selection: str) -> None:
    model = ranks.net()
    params = {1: model[2].weight, 2: model[6].weight}  # compressed, in one bucket; and their blocks
    optimizer = SGD(model.parameters(), lr=1.0, compressor=TopK(0.01, scope=scope, selection=selection))
    sampler = JointSpar(optimizer, 0.5, exclude=[model[-1].bias])
    (exchange,) = [e for e in optimizer._exchanges if e.bucket.treatment.sparse]
    with still(), drawing(*SETS):
        for step, active in enumerate(SETS):
            before = {block: param.detach().clone() for block, param in params.items()}
            kept = {block: optimizer.state[param]["residual"].clone() for block, param in params.items()}
            sampler.draw()
            ranks.loss_of(model, 0, step).backward()
            grads = {block: 0.0 if p.grad is None else 2.0 * p.grad for block, p in params.items()}
            optimizer.step()
            numels = [param.numel() for block, param in params.items() if active[block]]
            most = sum(map(count, numels)) if scope == "tensor" else count(sum(numels)) if numels else 0
            idle = len(params) - len(numels) if scope == "tensor" else not numels
            assert exchange.nbytes == exchange._layout(most + idle).nbytes
            nnz = optimizer.metrics()["nnz"].item()
            assert nnz == most if selection == "exact" else 0.5 * most <= nnz <= most
            moved = 0
            for block, param in params.items():
                residual = optimizer.state[param]["residual"]
                sent = before[block] - param.detach()
                moved += int((residual == 0).logical_and(sent != 0).sum())
                torch.testing.assert_close(sent + residual, kept[block] + grads[block], rtol=1e-5, atol=1e-6)
                if not active[block]:
                    assert torch.equal(param, before[block])
                    assert torch.equal(residual, kept[block])
            assert moved == nnz


def count(numel: int) -> int:
    return math.ceil(0.01 * numel)


# ---- plans, norms ----------------------------------------------------------------------------------------------------


def test_buckets_that_are_planned_anew_know_the_factors() -> None:
    """And where a sampler ends there are none."""
    digests = []
    for hooked in (False, True):
        model = ranks.net()
        optimizer = SGD_(model.parameters(), compressor=TopK(0.05))
        sampler: JointSpar | Hooks = JointSpar(optimizer, 0.5, exclude=[model[-1].bias], sampling="per_rank")
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

"""TopK(scope="model"): how many entries every bucket sends of what the whole model does, and that ranks agree on it."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from fusedcomp import MomentumCorrection, NoMemory, Residual, TopK
from fusedcomp.ddp import CompressionState
from fusedcomp.rooms import LAG
from fusedcomp.shares import Shares, apportion, most_entries
from fusedcomp.sizing import count_at
from fusedcomp.sparse import SparseExchange
from kernel_runs import DEVICE, KERNELS, TWINS, i32, i64, same
from ranks import digest, loss_of, message_of, net, run

SCALES = (1.0, 3.0, 0.5, 1.5)
SHAPES = ((100, 90), (120, 100), (64, 64), (200, 60))
DENSITY = 0.02
CAP = 0.05  # megabytes: a bucket for every one of them, or two


def weights_of(shapes: Any = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def model_sgd(weights: Any, density: float = DENSITY, **more: Any) -> fusedcomp.SGD:
    options = {"lr": 1.0, "compressor": TopK(density, scope="model"), "memory": Residual(), "bucket_cap_mb": CAP} | more
    return fusedcomp.SGD(weights, **options)


def shares_of(optimizer: Any) -> Shares:
    (shares,) = optimizer._exchanges._shares
    return shares


def exchanges_of(optimizer: Any) -> list[SparseExchange]:
    return [e for e in optimizer._exchanges if isinstance(e, SparseExchange)]


def random_grads(weights: list[nn.Parameter], generator: torch.Generator, rank: int = 0) -> None:
    """Whole numbers, so that sums are exact; layers and ranks differ in size."""
    for weight, scale in zip(weights, SCALES, strict=False):
        normal = torch.randn(weight.shape, generator=generator)
        weight.grad = (normal * (8.0 * scale * (1 + rank))).round()


def moved(optimizer: Any, weights: list[nn.Parameter], generator: torch.Generator, steps: int, rank: int = 0) -> None:
    for _ in range(steps):
        random_grads(weights, generator, rank)
        optimizer.step()


# ---- arithmetic ----------------------------------------------------------------------------------------------------


@given(
    buckets=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 10**6)), min_size=1, max_size=8),
    part=st.floats(0.0, 1.0),
)
def test_shares_add_up_and_keep_their_bounds(buckets: list[tuple[float, int]], part: float) -> None:
    weights, limits = [w + 1e-30 for w, _ in buckets], [limit for _, limit in buckets]
    total = len(limits) + round(part * (sum(limits) - len(limits)))
    counts = apportion(total, weights, limits)
    assert sum(counts) == total
    assert all(1 <= count <= limit for count, limit in zip(counts, limits, strict=True))
    # Those between their bounds are in proportion, to an entry each; none of more weight has fewer.
    inner = [(w, c) for w, c, limit in zip(weights, counts, limits, strict=True) if 1 < c < limit and w > 1e-6]
    scales = [((c - 1) / w, (c + 1) / w) for w, c in inner]
    assert max((low for low, _ in scales), default=0.0) <= min((high for _, high in scales), default=1.0) * (1 + 1e-9)


def test_largest_remainders() -> None:
    assert apportion(10, [0.5, 0.3, 0.2], [100] * 3) == [5, 3, 2]
    assert apportion(10, [1.0, 1.0, 1.0], [100] * 3) == [4, 3, 3]
    assert apportion(11, [0.56, 0.28, 0.16], [100] * 3) == [6, 3, 2]
    assert apportion(10, [1.0, 1.0, 0.0], [2, 100, 100]) == [2, 7, 1]
    assert apportion(10, [1.0, 0.0], [3, 100]) == [3, 7]


@given(numel=st.integers(1, 5000), limit=st.integers(0, 5000))
def test_the_most_entries(numel: int, limit: int) -> None:
    assert most_entries(numel, lambda k: k > limit) == min(numel, limit)


@pytest.mark.parametrize("candidates", [0, 1, 1023, 1024, 5000, 70000])
@pytest.mark.parametrize("capacity", [1, 1500, 40000])
def test_counting(candidates: int, capacity: int) -> None:
    """Past the candidates, and past the capacity, keys are not looked at; scratch is left as it was."""
    generator = torch.Generator().manual_seed(candidates)
    keys = torch.randint(0, 1 << 62, (capacity,), generator=generator).to(DEVICE)
    keys[candidates:] = (1 << 62) + 1
    offsets, model_key, results = i64(0, candidates), i64(1 << 61), []
    for modules in (KERNELS, TWINS):
        counts, tickets, header = i32(0), i32(0), i32(-7, -7, -7, -7, -7)
        modules["shares"].count_reaching(offsets, keys, model_key, counts, tickets, header)
        results.append({"counts": counts, "tickets": tickets, "header": header})
    same(*results)
    assert results[0]["header"].tolist() == [-7, int((keys[:candidates] >= 1 << 61).sum()), -7, -7, -7]


@pytest.mark.parametrize("void", [None, 0.0, 1.0])
@pytest.mark.parametrize("buckets", [1, 3, 32, 45])
def test_meeting(buckets: int, void: float | None) -> None:
    """Between the least key and the greatest, without those that do not count."""
    generator = torch.Generator().manual_seed(buckets)
    thresholds = torch.randint(0, 0x7F800000 << 32, (buckets,), generator=generator).to(DEVICE)
    asked = torch.randint(1, 10**6, (buckets,), generator=generator).to(DEVICE)
    asked[1::3] = 0
    found_inf, results = None if void is None else torch.tensor([void], device=DEVICE), []
    for modules in (KERNELS, TWINS):
        key = i64(12345)
        modules["shares"].meet_thresholds(thresholds, asked, found_inf, key)
        results.append({"key": key})
    same(*results)
    key, among = int(results[0]["key"]), thresholds[asked > 0]
    assert key == 12345 if void else int(among.min()) >> 32 << 32 <= key <= int(among.max())


# ---- what a step does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_one_bucket_it_is_scope_bucket(momentum: float, state_dtype: torch.dtype) -> None:
    """Bit for bit, through a warm-up that begins dense."""
    memory = MomentumCorrection() if momentum else Residual()
    both = []
    for scope in ("bucket", "model"):
        compressor = TopK(0.01, scope=scope, warmup_steps=15, warmup_densities=[1.0, 0.7, 0.1])
        weights = weights_of()
        optimizer = model_sgd(
            weights, compressor=compressor, memory=memory, momentum=momentum, bucket_cap_mb=100, state_dtype=state_dtype
        )  # fmt: skip
        assert len(exchanges_of(optimizer)) == 1
        moved(optimizer, weights, torch.Generator().manual_seed(0), 40)
        both.append((weights, optimizer))
    (weights, optimizer), (others, other) = both
    for weight, same_weight in zip(weights, others, strict=True):
        assert torch.equal(weight, same_weight)
        assert torch.equal(optimizer.state[weight]["residual"], other.state[same_weight]["residual"])
    assert int(optimizer.metrics()["bytes_sent"]) == int(other.metrics()["bytes_sent"])


def test_shares_come_to_what_ranking_over_the_model_sends() -> None:
    """Of gradients that stay as they are: every bucket's share within 4 % of the exact one."""
    weights = weights_of()
    optimizer = model_sgd(weights, lr=0.0, memory=NoMemory())
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(w.shape, generator=generator) * s**0.15 for w, s in zip(weights, SCALES, strict=True)]
    for _ in range(300):
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.clone()
        optimizer.step()
    total = count_at(DENSITY, sum(w.numel() for w in weights))
    magnitudes = {w: g.abs().view(-1) for w, g in zip(weights, grads, strict=True)}
    least = torch.cat(list(magnitudes.values())).topk(total).values[-1]
    assert len(exchanges_of(optimizer)) == 4
    for exchange in exchanges_of(optimizer):
        exact = sum(int((magnitudes[p] >= least).sum()) for p in exchange.bucket.params)
        assert exact >= 30
        assert abs(exchange.selection.k - exact) <= 0.04 * exact + 1
    thresholds = optimizer.metrics()["threshold"]
    assert float(thresholds.max() / thresholds.min()) < 1.03


@pytest.mark.parametrize("memory", [Residual(), MomentumCorrection()])
def test_thresholds_meet_under_error_feedback(memory: Any) -> None:
    """Buckets whose gradients differ sixfold: their k-th magnitudes come within a factor of two, and stay there."""
    spread = {}
    for scope in ("bucket", "model"):
        weights = weights_of()
        momentum = 0.9 if isinstance(memory, MomentumCorrection) else 0.0
        optimizer = model_sgd(weights, lr=0.0, compressor=TopK(0.05, scope=scope), memory=memory, momentum=momentum)
        generator, seen = torch.Generator().manual_seed(0), []
        for _ in range(24):
            moved(optimizer, weights, generator, 10)
            thresholds = optimizer.metrics()["threshold"]
            seen.append(float(thresholds.max() / thresholds.min()))
        spread[scope] = max(seen[-8:])
    assert spread["bucket"] > 4.0
    assert spread["model"] < 2.0


def test_every_step_sends_exactly_k_in_payloads_that_are_kept() -> None:
    """Over all buckets; a payload serves for eight steps at least."""
    weights = weights_of()
    optimizer = model_sgd(weights)
    generator = torch.Generator().manual_seed(0)
    total = count_at(DENSITY, sum(w.numel() for w in weights))
    ages: dict[int, int] = {}
    kept: list[Any] = []
    for _ in range(60):
        moved(optimizer, weights, generator, 1)
        payloads = [exchange.buffers for exchange in exchanges_of(optimizer)]
        assert int(optimizer.metrics()["nnz"]) == sum(len(p.values[0]) for p in (b.payload for b in payloads)) == total
        assert all(exchange.buffers.layout.k == exchange.selection.k for exchange in exchanges_of(optimizer))
        for number, buffers in enumerate(payloads):
            if kept and buffers is not kept[number]:
                assert ages[number] >= LAG
                ages[number] = 0
            ages[number] = ages.get(number, 0) + 1
        kept = payloads
    assert min(ages.values()) < 60


def test_what_goes_dense_goes_dense_together() -> None:
    """A dense stage of a warm-up leaves nothing behind; a share stays below what would be cheaper densely."""
    weights = weights_of()
    compressor = TopK(0.5, scope="model", warmup_steps=6, warmup_densities=[1.0, 0.9])
    optimizer = model_sgd(weights, compressor=compressor)
    generator = torch.Generator().manual_seed(0)
    for step in range(80):
        moved(optimizer, weights, generator, 1)
        dense = [exchange.dense_step for exchange in exchanges_of(optimizer)]
        assert dense == [step < 6] * 4
        if step < 6:
            assert not any(optimizer.state[w]["residual"].any() for w in weights)
        assert int(optimizer.metrics()["bytes_sent"]) <= 4 * sum(w.numel() for w in weights) + 400
    shares = shares_of(optimizer)
    assert sum(shares.ks) == count_at(0.5, sum(w.numel() for w in weights))
    assert any(k == limit for k, limit in zip(shares.ks, shares.limits, strict=True))


def test_groups_share_where_they_have_the_same_compressor() -> None:
    weights = weights_of()
    mine, other = TopK(DENSITY, scope="model"), TopK(0.05, scope="model")
    groups = [
        {"params": weights[:1], "compressor": mine}, {"params": weights[1:2], "compressor": other},
        {"params": weights[2:3], "compressor": mine, "lr": 0.5}, {"params": weights[3:], "compressor": TopK(0.1)},
    ]  # fmt: skip
    optimizer = model_sgd(groups)
    moved(optimizer, weights, torch.Generator().manual_seed(0), 3)
    found = {shares.compressor: sum(shares.ks) for shares in optimizer._exchanges._shares}
    numels = [w.numel() for w in weights]
    assert found == {mine: count_at(DENSITY, numels[0] + numels[2]), other: count_at(0.05, numels[1])}
    for exchange, scale in zip(exchanges_of(optimizer), (3, 2, 1, 0), strict=True):
        assert (exchange.shares is None) == (scale == 3)


def test_a_parameter_more() -> None:
    """Shares begin anew, and nothing is lost."""
    weights = weights_of()
    optimizer = model_sgd(weights[:3])
    generator = torch.Generator().manual_seed(0)
    moved(optimizer, weights[:3], generator, 30)
    optimizer.add_param_group({"params": weights[3:]})
    numels = [w.numel() for w in weights]
    assert sorted(shares_of(optimizer).weights) == sorted(n / sum(numels) for n in numels)
    before = [optimizer.state[w]["residual"] - w.detach() for w in weights]
    moved(optimizer, weights, generator, 1)
    for weight, was in zip(weights, before, strict=True):
        assert torch.equal(optimizer.state[weight]["residual"] - weight.detach(), was + weight.grad)
    assert sum(shares_of(optimizer).ks) == count_at(DENSITY, sum(numels))


def test_copies_go_on_where_the_original_is() -> None:
    weights = weights_of()
    optimizer = model_sgd(weights, momentum=0.9, memory=MomentumCorrection())
    moved(optimizer, weights, torch.Generator().manual_seed(0), 37)
    other = copy.deepcopy(optimizer)
    copies = other.param_groups[0]["params"]
    for seed in range(20):
        moved(optimizer, weights, torch.Generator().manual_seed(seed), 1)
        moved(other, copies, torch.Generator().manual_seed(seed), 1)
    assert all(map(torch.equal, weights, copies))


# ---- ranks ---------------------------------------------------------------------------------------------------------


def _gathered(mine: Any) -> list[Any]:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _replicas(rank: int, world: int) -> None:
    """Ranks whose gradients differ in size and shape agree on every share; mass is conserved bit for bit."""
    weights = weights_of()
    optimizer = model_sgd(weights)
    generator = torch.Generator().manual_seed(rank)
    total = [torch.zeros_like(w) for w in weights]
    planned = []
    for _ in range(40):
        random_grads(weights, generator, rank)
        for so_far, weight in zip(total, weights, strict=True):
            so_far += weight.grad
        optimizer.step()
        planned.append(list(shares_of(optimizer).ks))
        optimizer._exchanges.raise_if_peer_failed()
    assert planned[-1] != planned[0]
    bits = [w.detach().numpy().tobytes() for w in weights]
    told = (bits, planned, shares_of(optimizer).weights)
    assert all(other == told for other in _gathered(told))
    for weight, so_far in zip(weights, total, strict=True):
        kept: Tensor = optimizer.state[weight]["residual"].clone()
        dist.all_reduce(kept)
        dist.all_reduce(so_far)
        assert torch.equal(kept / world - weight.detach(), so_far / world)


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_agree_and_nothing_is_lost(world: int) -> None:
    run(_replicas, world)


def _resumed(rank: int, world: int, stop: int) -> bytes:
    """From a file that is plain data, in the middle of a plan, with headers still to be learned from."""
    model, again = net(), net(1)
    schedule = TopK(0.05, scope="model", warmup_steps=20)
    make = {"lr": 0.05, "momentum": 0.9, "compressor": schedule, "bucket_cap_mb": 0.02}
    optimizer, resumed = fusedcomp.SGD(model.parameters(), **make), fusedcomp.SGD(again.parameters(), **make)
    for number in range(60):
        if number == stop:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            again.load_state_dict(model.state_dict())
            resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        for m, o in ((model, optimizer), (again, resumed)):
            if o is resumed and number < stop:
                continue
            o.zero_grad()
            loss_of(m, rank, number).backward()
            o.step()
    assert len(shares_of(optimizer).ks) > 1
    assert shares_of(optimizer).state() == shares_of(resumed).state()
    assert digest(model) == digest(again)
    return digest(model)


@pytest.mark.parametrize("stop", [5, 27])
def test_a_resumed_run_is_bit_exact(stop: int) -> None:
    assert len(set(run(_resumed, 2, stop))) == 1


def _void_steps(rank: int, world: int) -> None:
    """A NaN on one rank undoes the step, and what was counted in it teaches nothing."""
    weights = weights_of()
    optimizer = model_sgd(weights, skip_nonfinite=True)
    generator = torch.Generator().manual_seed(rank)
    shares = shares_of(optimizer)
    for number in range(40):
        random_grads(weights, generator, rank)
        if number % 5 == 3 and rank == 1:
            weights[number % 4].grad[3, 3] = float("nan")
        before, key = [w.detach().clone() for w in weights], int(shares.model_key)
        optimizer.step()
        if number % 5 == 3:
            assert all(map(torch.equal, weights, before))
            assert int(shares.model_key) == key
        # What this step will teach in eight more.
        assert (shares._counts(number % LAG) == []) == (number % 5 == 3)
    assert optimizer.skipped == 8
    told = ([w.detach().numpy().tobytes() for w in weights], shares.weights)
    assert all(other == told for other in _gathered(told))


def test_void_steps() -> None:
    run(_void_steps, 2)


def _a_failing_rank(rank: int, world: int) -> None:
    """It takes part with empty payloads, which are no measure; all agree on the shares afterwards."""
    weights = weights_of()
    optimizer = model_sgd(weights)
    generator = torch.Generator().manual_seed(rank)
    moved(optimizer, weights, generator, 12, rank)
    for weight in weights:
        (weight.sum() * float(rank + 1)).backward()
    if rank == 1:
        weights[0].grad.add_(1.0)
    message = message_of(optimizer.step)
    assert ("was changed between backward()" if rank == 1 else "another rank failed") in message
    optimizer.zero_grad()
    moved(optimizer, weights, generator, 20, rank)
    told = ([w.detach().numpy().tobytes() for w in weights], shares_of(optimizer).weights)
    assert all(other == told for other in _gathered(told))


def test_a_failing_rank() -> None:
    run(_a_failing_rank, 2)


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_refused_where_buckets_are_not_known_together() -> None:
    message = message_of(lambda: CompressionState(TopK(0.01, scope="model")))
    assert message.startswith(
        "NotImplementedError: CompressionState takes scope='bucket' or 'tensor' alone, got 'model'"
    )
    message = message_of(lambda: TopK(0.01, scope="layer"))
    assert message == "ValueError: TopK: scope must be 'bucket', 'tensor' or 'model', got 'layer'"


def _two_levels(rank: int, world: int) -> str:
    intra = dist.new_group([rank], use_local_synchronization=True)
    return message_of(lambda: model_sgd(weights_of(), process_group=(intra, dist.group.WORLD)))


def test_refused_on_two_levels() -> None:
    for message in run(_two_levels, 2):
        assert "process_group=(intra_node, inter_node) takes scope='bucket' or 'tensor' alone, got 'model'" in message

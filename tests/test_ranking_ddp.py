"""The DDP hook with ``rank_by``: what Adam's scale selects, replicas, conservation, resume, refusals."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomp import Identity, RandomK, TopK, ranking
from fusedcomp.buckets import RANK_WEIGHTS, Treatment, build_bucket
from fusedcomp.ddp import CompressionState
from fusedcomp.ranking import Ranking
from fusedcomp.sizing import count_at
from hooked import LARGE, residuals, step, wrapped
from ranks import digest, loss_of, message_of, net, run

INTERVAL = 4  # in place of 32


def weights_of(state: CompressionState) -> dict[str, Tensor]:
    return {name: kept[RANK_WEIGHTS] for name, kept in state.state_dict()["state"].items() if RANK_WEIGHTS in kept}


def plain_scale(v: Tensor) -> Tensor:
    """What |residual| is divided by, in float64."""
    v = v.double()
    return (v + 1e-3 * v.mean() + 1e-30) ** 0.375


Built = tuple[nn.Module, CompressionState, DistributedDataParallel, torch.optim.Optimizer]


def build(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **config: Any) -> Built:
    model = net()
    options = config.pop("optimizer", {})
    optimizer = kind(model.parameters(), lr=1e-3, betas=(0.0, 0.999), **options)
    compressor = config.pop("compressor", TopK(0.02, scope="tensor"))
    state = CompressionState(compressor, model.named_parameters(), rank_by=optimizer, **config)
    return model, state, wrapped(model, state), optimizer


# ---- what is selected ----------------------------------------------------------------------------------------------


def _oracle(rank: int, world: int) -> bool:
    """Over tensors of one bucket: the entries with the largest |residual| in units of what Adam divides by."""
    ranking.INTERVAL = INTERVAL
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.0, 0.999))
    state = CompressionState(TopK(0.02), model.named_parameters(), rank_by=optimizer)
    ddp = wrapped(model, state, bucket_cap_mb=25)
    large = {name: p for name, p in model.named_parameters() if name in LARGE}
    own: dict[str, Tensor] = {}
    for name, param in large.items():
        param.register_hook(lambda grad, name=name: own.update({name: grad.clone()}))
    k = count_at(0.02, sum(p.numel() for p in large.values()))
    differs = []
    for number in range(2 * INTERVAL + 2):
        before = residuals(state) if number else {name: torch.zeros_like(p) for name, p in large.items()}
        if number % INTERVAL == 0:
            scales = {
                name: plain_scale(optimizer.state[p]["exp_avg_sq"]) if number else torch.ones_like(p).double()
                for name, p in large.items()
            }
        optimizer.zero_grad()
        loss_of(ddp, rank, number).backward()
        after = residuals(state)
        there = torch.cat([(before[name] + own[name]).view(-1) for name in large])
        left = torch.cat([after[name].view(-1) for name in large])
        scale = torch.cat([scales[name].view(-1) for name in large])
        sent = left != there
        assert not left[sent].any()
        assert int(sent.sum()) == k
        best = (there.double().abs() / scale).topk(k).indices
        assert torch.equal(sent.nonzero().view(-1), best.sort().values)
        differs.append(set(best.tolist()) != set(there.abs().topk(k).indices.tolist()))
        optimizer.step()
    assert not any(differs[:INTERVAL])  # there was no v yet
    assert all(differs[INTERVAL:])
    return True


def test_the_set_is_that_of_a_plain_oracle() -> None:
    assert all(run(_oracle, 2))


def moments_of(*values: Tensor) -> tuple[Ranking, list[Tensor]]:
    params = [nn.Parameter(torch.zeros_like(v, dtype=torch.float32)) for v in values]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    for param, v in zip(params, values, strict=True):
        optimizer.state[param]["exp_avg_sq"] = v
    return Ranking(optimizer, TopK(0.1), two_levels=False), params


def refreshed(*values: Tensor) -> list[Tensor]:
    """Weights of parameters in one bucket, in their shapes."""
    weighs, params = moments_of(*values)
    bucket = build_bucket(Treatment(0, True, False, "none", torch.float32), params, False)
    flat = bucket.add_state(RANK_WEIGHTS).fill_(-7.0)
    weighs.refresh(bucket, 0, repr)
    assert bool(((flat > 0) & (flat <= 1)).all())
    views = [bucket.views(i)[RANK_WEIGHTS] for i in range(len(params))]
    inside = sum(view.numel() for view in views)
    assert int((flat == 1).sum()) >= flat.numel() - inside  # the padding
    return views


def test_weights_are_the_formula_in_whatever_layout() -> None:
    torch.manual_seed(0)
    values = [
        torch.rand(40, 70).square(),
        1e-9 * torch.rand(8, 16, 5, 5).to(memory_format=torch.channels_last),
        torch.rand(64, 64).bfloat16(),
        torch.rand(48, 64).t(),
    ]
    weights = refreshed(*values)
    ratios = [w.double() * plain_scale(v.float()) for w, v in zip(weights, values, strict=True)]
    expected = torch.full((), 1e-30).double() ** 0.375  # one factor for all tensors
    for ratio in ratios:
        torch.testing.assert_close(ratio, expected.expand_as(ratio), rtol=1e-5, atol=0.0)


def test_broken_and_extreme_moments_give_usable_weights() -> None:
    wild = torch.rand(64, 64)
    wild[0, :4] = torch.tensor([torch.nan, torch.inf, 3e38, 0.0])
    zeros, tiny, huge = torch.zeros(64, 64), torch.full((64, 64), 1e-38), torch.full((64, 64), 3e38)
    weights = refreshed(wild, zeros, tiny, huge)
    assert bool((weights[1] == 1).all())
    assert float(weights[2].min()) > 0.99
    assert float(weights[3].max()) < 1e-20


# ---- over ranks ----------------------------------------------------------------------------------------------------


def _replicas(rank: int, world: int, kind: type[torch.optim.Optimizer], config: dict[str, Any]) -> bytes:
    ranking.INTERVAL = INTERVAL
    model, state, ddp, optimizer = build(kind, **config)
    seen = []
    for number in range(2 * INTERVAL + 2):
        step(ddp, optimizer, rank, number)
        assert weights_of(state).keys() == LARGE
        seen.append(torch.cat([w.reshape(-1) for w in weights_of(state).values()]))
    changes = [number for number in range(1, len(seen)) if not torch.equal(seen[number], seen[number - 1])]
    assert changes == [INTERVAL, 2 * INTERVAL]  # carried along when DDP rebuilt its buckets
    assert bool((seen[0] == 1).all())
    assert float(seen[-1].max()) < 0.1
    assert int(state.metrics()["nnz"]) == sum(
        count_at(0.02, p.numel()) for name, p in model.named_parameters() if name in LARGE
    )
    return digest(model)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"optimizer": {"fused": True}, "skip_nonfinite": True}),
        (torch.optim.Adam, {"optimizer": {"amsgrad": True, "foreach": True}, "state_dtype": torch.bfloat16}),
        (torch.optim.NAdam, {"max_grad_norm": 0.3}),
        (torch.optim.RAdam, {"momentum": 0.5, "state_dtype": torch.bfloat16, "skip_nonfinite": True}),
    ],
    ids=str,
)
def test_replicas_are_equal(kind: type[torch.optim.Optimizer], config: dict[str, Any]) -> None:
    first, second = run(_replicas, 2, kind, config)
    assert first == second


def _sampled(rank: int, world: int) -> bytes:
    """At most k are sent, and not far fewer, with 16-bit states over a bucket."""
    ranking.INTERVAL = INTERVAL
    compressor = TopK(0.02, selection="sampled", wire_dtype=torch.bfloat16)
    model, state, ddp, optimizer = build(compressor=compressor, state_dtype=torch.bfloat16)
    for number in range(2 * INTERVAL + 2):
        step(ddp, optimizer, rank, number)
        k = sum(count_at(0.02, p.numel()) for name, p in model.named_parameters() if name in LARGE)
        assert 0.8 * k <= int(state.metrics()["nnz"]) <= k + 2
    return digest(model)


def test_sampled_selection() -> None:
    first, second = run(_sampled, 2)
    assert first == second


def _threshold(rank: int, world: int, state_dtype: torch.dtype) -> bool:
    """In units of weight * |residual|: what stayed is just below it."""
    ranking.INTERVAL = INTERVAL
    _, state, ddp, optimizer = build(state_dtype=state_dtype)
    for number in range(INTERVAL + 1):
        step(ddp, optimizer, rank, number)
    told = state.metrics()["threshold"].tolist()
    weighted = [e for e in state._exchanges if RANK_WEIGHTS in e.bucket.states]
    left = [float((e.weights * e.residual.float()).abs().max()) for e in weighted]
    assert len(told) == len(left) == len(LARGE)
    return all(most <= least < most * (1 + 1e-2) for most, least in zip(left, told, strict=True))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_threshold_is_weighted(state_dtype: torch.dtype) -> None:
    assert all(run(_threshold, 2, state_dtype))


def _conservation(rank: int, world: int) -> bool:
    """Whole numbers as gradients: what all ranks put in went out or is kept, bit for bit."""
    ranking.INTERVAL = INTERVAL
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = CompressionState(TopK(0.01), model.named_parameters(), rank_by=optimizer)
    ddp = wrapped(model, state)
    whole = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    went = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(rank)

    def integers(name: str, grad: Tensor) -> Tensor:
        made = torch.randint(-8, 9, grad.shape, generator=generator).float()
        whole[name] += made
        return made

    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: integers(name, grad))
    for _ in range(2 * INTERVAL + 2):
        optimizer.zero_grad()
        ddp(torch.ones(2, 64)).sum().backward()
        for name, param in model.named_parameters():
            went[name] += param.grad * world
        optimizer.step()
    kept = residuals(state)
    for name, value in whole.items():
        rest = kept.get(name, torch.zeros_like(value))
        dist.all_reduce(value)
        dist.all_reduce(rest)
        assert torch.equal(went[name] + rest, value)
    return True


def test_nothing_is_lost() -> None:
    assert all(run(_conservation, 2))


def _resume(rank: int, world: int, config: dict[str, Any]) -> bytes:
    """Saved in the middle of an interval, when the weights are no longer those that v would give."""
    ranking.INTERVAL = INTERVAL
    model, state, ddp, optimizer = build(**config)
    for number in range(INTERVAL + 2):
        step(ddp, optimizer, rank, number)
    saved = copy.deepcopy((model.state_dict(), state.state_dict(), optimizer.state_dict()))
    weights = weights_of(state)
    for number in range(INTERVAL + 2, 3 * INTERVAL):
        step(ddp, optimizer, rank, number)
    other, resumed, ddp, optimizer = build(**config)
    for part, content in zip((other, resumed, optimizer), saved, strict=True):
        part.load_state_dict(content)
    step(ddp, optimizer, rank, INTERVAL + 2)
    for name, value in weights_of(resumed).items():
        assert torch.equal(value, weights[name])
        moment = optimizer.state[dict(other.named_parameters())[name]]["exp_avg_sq"]
        assert not torch.allclose(value, refreshed(moment)[0], rtol=1e-3)
    for number in range(INTERVAL + 3, 3 * INTERVAL):
        step(ddp, optimizer, rank, number)
    return digest(model) + digest(other)


@pytest.mark.parametrize("config", [{}, {"skip_nonfinite": True, "momentum": 0.5}], ids=str)
def test_resume_is_bit_exact_inside_an_interval(config: dict[str, Any]) -> None:
    first, second = run(_resume, 2, config)
    assert first == second
    assert first[: len(first) // 2] == first[len(first) // 2 :]


def _late(rank: int, world: int) -> bool:
    """A file saved without weights: they are made at once, not at the next interval."""
    ranking.INTERVAL = INTERVAL
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = CompressionState(TopK(0.02), model.named_parameters())
    ddp = wrapped(model, state)
    for number in range(INTERVAL + 1):
        step(ddp, optimizer, rank, number)
    _, resumed, ddp, again = build()
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(state.state_dict())
    loss_of(ddp, rank, 0).backward()
    return all(float(w.max()) < 0.1 for w in weights_of(resumed).values())


def test_a_file_without_weights() -> None:
    assert all(run(_late, 2))


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_refused_at_construction() -> None:
    model = net()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    part = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "6.weight"], lr=1e-3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def make(optimizer: Any, compressor: Any = TopK(0.1)) -> Callable[[], Any]:  # noqa: B008
        return lambda: CompressionState(compressor, model.named_parameters(), rank_by=optimizer)

    assert "TypeError: CompressionState: rank_by must be a torch optimizer with betas" in message_of(make(sgd))
    assert message_of(make(sgd)).endswith("got SGD")
    assert message_of(make("AdamW")).endswith("got str")
    for compressor in (RandomK(0.1), Identity()):
        rule = "ValueError: CompressionState: rank_by needs TopK(...), which ranks entries"
        assert message_of(make(adam, compressor)) == f"{rule}, got {compressor!r}"
    assert message_of(make(part)) == "ValueError: rank_by: parameter '6.weight' is in no param group of AdamW"


def _refused(rank: int, world: int) -> list[str]:
    ranking.INTERVAL = INTERVAL
    messages = []

    def steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for number in range(count):
            step(ddp, optimizer, rank, number)

    # No names: noticed in the first backward.
    model = net()
    part = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "6.weight"], lr=1e-3)
    ddp = wrapped(model, CompressionState(TopK(0.1), rank_by=part))
    messages.append(message_of(lambda: steps(ddp, part, 1)))
    # No Adam: noticed in the second step.
    *_, ddp, optimizer = build(torch.optim.Adamax)
    steps(ddp, optimizer, 1)
    messages.append(message_of(lambda: step(ddp, optimizer, rank, 1)))
    # Another one steps.
    model, _, ddp, optimizer = build()
    other = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps(ddp, other, INTERVAL)
    messages.append(message_of(lambda: step(ddp, other, rank, INTERVAL)))
    # A shard: this rank has no state of a parameter.
    model, _, ddp, optimizer = build()
    steps(ddp, optimizer, INTERVAL)
    del optimizer.state[dict(model.named_parameters())["2.weight"]]
    messages.append(message_of(lambda: step(ddp, optimizer, rank, INTERVAL)))
    # Two levels.
    alone = [dist.new_group([r]) for r in range(world)]
    both = dist.new_group(list(range(world)))
    levels = (alone[rank], both)
    messages.append(message_of(lambda: build(process_group=levels)))
    # Ranks that differ.
    model = net()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    messages.append(message_of(lambda: CompressionState(TopK(0.1), rank_by=adam if rank == 0 else None)))
    return messages


def test_refused_by_name_on_all_ranks() -> None:
    first, second = run(_refused, 2)
    assert first == second
    unknown, adamax, stranger, shard, levels, differ = first
    assert unknown == "ValueError: rank_by: parameter of shape (64, 512) is in no param group of AdamW"
    assert "TypeError: rank_by: Adamax has no exp_avg_sq of parameter '6.weight'" in adamax
    assert "'exp_inf'" in adamax
    assert f"RuntimeError: rank_by: AdamW has no state in step {INTERVAL}" in stranger
    assert "TypeError: rank_by: AdamW has no exp_avg_sq of parameter '2.weight'" in shard
    assert "NotImplementedError: process_group=(intra_node, inter_node) does not take rank_by" in levels
    assert "different settings: rank_by is AdamW on rank 0, None on rank 1" in differ

"""TopK(selection="exact"): the k largest, on real training steps, through shocks, schedules and a resume."""

import functools
import io
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn

import fusedcomp
from fusedcomp import MomentumCorrection, NoMemory, Residual, TopK
from fusedcomp.sizing import count_at, num_samples, plan_selection
from fusedcomp.sparse import SparseExchange
from ranks import message_of, run
from steppers import sent_by, stepper

STEPS = 1000
SPIKE, SHRINK, RESUME = 400, 600, 800


def watch(exchange: SparseExchange, records: list[tuple[int, int, int, bool]]) -> None:
    """Note for every step: k, entries sent, candidates, and whether what was sent are torch.topk's k largest."""
    pack = exchange.ops.pack.pack_payload

    def pack_and_compare(*args, **how):
        segments, offsets, residual, (starts, out, values) = args[0], args[4], args[7], args[-4:-1]
        before = residual.clone()
        pack(*args, **how)
        count = int(starts[-1])
        page = torch.arange(segments.num_pages).repeat_interleave((starts[1:] - starts[:-1]).long())
        index = page * 65536 + (out[:count].long() & 0xFFFF)
        best = before.abs().topk(len(values)).values
        # Up to ties: the same magnitudes, each entry at most once, each with its own value.
        same = (
            count == len(values)
            and torch.equal(values[:count].abs().sort(descending=True).values, best)
            and len(index.unique()) == count
            and torch.equal(values[:count], before[index])
            and torch.equal(before.index_put((index,), torch.zeros(count)), residual)
        )
        records.append((len(values), count, int(offsets[-1]), same))

    exchange.ops = type(exchange.ops)(**vars(exchange.ops))
    exchange.ops.pack = type(exchange.ops)(pack_payload=pack_and_compare)


def digits_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def real_steps(rank: int, world: int, momentum: float) -> list[tuple[int, int, int, bool]]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    targets = torch.tensor(data.target)
    model = digits_net()

    def build() -> fusedcomp.SGD:
        optimizer = fusedcomp.SGD(
            model.parameters(), lr=0.05, momentum=momentum, compressor=TopK(0.002, warmup_steps=200),
            memory=MomentumCorrection() if momentum else Residual(),
        )  # fmt: skip
        for exchange in optimizer._exchanges:
            if isinstance(exchange, SparseExchange):
                watch(exchange, records)
        return optimizer

    records: list[tuple[int, int, int, bool]] = []
    optimizer = build()
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        if step == RESUME:
            saved = optimizer.state_dict()
            optimizer._backward.remove_hooks()
            optimizer = build()
            optimizer.load_state_dict(saved)
            for exchange in optimizer._exchanges:  # rebuilt by loading
                if isinstance(exchange, SparseExchange):
                    watch(exchange, records)
        pick = torch.randint(len(images), (16,), generator=generator)
        loss = nn.functional.cross_entropy(model(images[pick]), targets[pick])
        loss = loss * {SPIKE: 1000.0, SHRINK: 1e-3}.get(step, 1.0)
        optimizer.zero_grad()
        loss.backward()
        if step == SPIKE:  # the shock is to the selection, not to the weights
            optimizer.param_groups[0]["lr"] = 0.05 / 1000
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.05
    return records


def check(records: list[tuple[int, int, int, bool]]) -> None:
    exact = sum(sent == k for k, sent, _, _ in records)
    assert len(records) >= STEPS
    assert exact >= 0.999 * len(records), f"{exact} of {len(records)}"
    assert sum(same for *_, same in records) >= 0.999 * len(records)
    # Sampling does its work: the candidates are a few k, not the whole tensor.
    late = [candidates / k for k, _, candidates, _ in records[-300:]]
    assert max(late) < 8, max(late)


def test_exact_over_a_thousand_real_steps() -> None:
    for momentum in (0.0, 0.9):
        for records in run(real_steps, 2, momentum, seconds=280):
            check(records)


@given(density=st.floats(1e-4, 1.0), numel=st.integers(1, 10**9))
def test_plan_never_exceeds_the_scope(density: float, numel: int) -> None:
    for selection in ("exact", "sampled"):
        compressor = TopK(density, selection=selection)
        plan = plan_selection(compressor, [numel], compressor.density_at(0))
        samples = num_samples(compressor, numel)
        assert 1 <= plan.k <= numel
        assert plan.k <= plan.capacity <= numel or (selection == "sampled" and plan.capacity <= numel)
        assert 1 <= plan.sample_ranks[0] <= samples <= numel


@given(density=st.floats(1e-5, 1.0), numel=st.integers(1, 10**7))
def test_k_is_the_share_rounded_up(density: float, numel: int) -> None:
    k = count_at(density, numel)
    assert k >= density * numel * (1 - 1e-9)
    assert k < density * numel + 1 or k == 1
    assert count_at(0.001, 1000) == 1
    assert count_at(0.07, 100) == 7


@given(density=st.floats(1e-4, 0.9), warmup=st.integers(1, 10_000))
def test_warmup_never_rises_and_ends_at_the_density(density: float, warmup: int) -> None:
    compressor = TopK(density, warmup_steps=warmup)
    steps = sorted({0, *(warmup * i // 20 for i in range(20)), warmup - 1, warmup, warmup + 1})
    densities = [compressor.density_at(step) for step in steps]
    assert densities == sorted(densities, reverse=True)
    assert compressor.density_at(warmup) == density
    assert densities[0] == density ** (1 / 5)


def test_warmup_is_the_papers_schedule() -> None:
    """Lin et al. section 3.3: 75 %, 93.75 %, 98.4375 %, 99.6 % sparsity, then 99.9 %."""
    compressor = TopK(0.001, warmup_steps=400)
    for step, sparsity in ((0, 0.75), (100, 0.9375), (200, 0.984375), (300, 0.996), (400, 0.999)):
        assert math.isclose(1 - compressor.density_at(step), sparsity, abs_tol=0.002)


@given(
    densities=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=6), each=st.integers(1, 50), more=st.integers(0, 5)
)
def test_a_list_of_densities(densities: list[float], each: int, more: int) -> None:
    """Equal stages in the order given; where the steps do not divide, none is longer than another by more than one."""
    stages, steps = len(densities), len(densities) * each + more % len(densities)
    compressor = TopK(0.001, warmup_steps=steps, warmup_densities=densities)
    stage_of = [stages * step // steps for step in range(steps)]
    assert [compressor.density_at(stage_of.index(stage)) for stage in range(stages)] == densities
    assert [compressor.density_at(step) for step in range(steps)] == [densities[stage] for stage in stage_of]
    lengths = [stage_of.count(stage) for stage in range(stages)]
    assert max(lengths) - min(lengths) <= 1
    assert compressor.density_at(steps) == 0.001


def test_schedules_of_groups_and_through_a_checkpoint() -> None:
    """Every param group has its own; a resumed run goes on where the schedule was."""
    weights = [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    schedule = TopK(0.01, warmup_steps=4, warmup_densities=[1.0, 0.25])
    groups = [{"params": weights[:1], "compressor": schedule}, {"params": weights[1:]}]
    make = functools.partial(fusedcomp.SGD, lr=0.1, compressor=TopK(0.05), memory=Residual())
    optimizer = make(groups)
    sent = []
    for number in range(6):
        if number == 3:
            saved = io.BytesIO()
            torch.save(optimizer.state_dict(), saved)
            optimizer = make([{"params": weights[:1]}, {"params": weights[1:]}])
            optimizer.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
            assert [g["compressor"] for g in optimizer.param_groups] == [schedule, TopK(0.05)]
        for weight in weights:
            weight.grad = torch.randn(64, 64)
        optimizer.step()
        by_bucket = [int(e.metrics()["nnz"]) for e in optimizer._exchanges]
        sent.append(sorted(by_bucket, reverse=True))
    assert sent == [[4096, 205], [4096, 205], [1024, 205], [1024, 205], [205, 41], [205, 41]]


def test_a_dense_warmup_is_dense_momentum_without_masking() -> None:
    weight, reference = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64))
    warm = TopK(0.01, warmup_steps=5, warmup_densities=[1.0])
    optimizer = fusedcomp.SGD([weight], lr=0.1, momentum=0.9, compressor=warm)
    plain = torch.optim.SGD([reference], lr=0.1, momentum=0.9)
    for _ in range(5):
        weight.grad = torch.randn(64, 64)
        reference.grad = weight.grad.clone()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(weight, reference, rtol=1e-6, atol=1e-6)
    assert not optimizer.state[weight]["residual"].any()


def test_bad_schedules() -> None:
    for arguments, told in (
        ({"warmup_densities": [0.5]}, "at least one density, and warmup_steps at least as many, got 1 densities for 0"),
        ({"warmup_steps": 3, "warmup_densities": []}, "at least one density"),
        ({"warmup_steps": 3, "warmup_densities": 0.5}, "warmup_densities must be a sequence of densities, got 0.5"),
        ({"warmup_steps": 3, "warmup_densities": [0.5, 1.5]}, "warmup_densities must be in (0, 1], got 1.5"),
    ):
        assert told in message_of(lambda arguments=arguments: TopK(0.01, **arguments))


def test_sampled_sends_at_most_k_and_seldom_less() -> None:
    """DGC invariant 4: at most k, at least one, and at least 0.8 k, where its own loop has ten tries to come there."""
    short = steps = 0
    for numel, density in ((100_000, 0.01), (400_000, 0.001), (60_000, 0.05), (2048, 1e-3)):
        weight = nn.Parameter(torch.zeros(numel // 16, 16))
        compressor = TopK(density, selection="sampled")
        optimizer = fusedcomp.SGD([weight], lr=0.0, compressor=compressor, memory=Residual(), _always_sparse=True)
        k = count_at(density, numel)
        for _ in range(50):
            weight.grad = torch.randn(numel // 16, 16) * torch.rand(numel // 16, 1)
            optimizer.step()
            sent = int(optimizer.metrics()["nnz"])
            assert 1 <= sent <= k
            short += sent < k
            assert sent >= 0.8 * k
            steps += 1
    assert short / steps < 0.05


def test_of_too_many_that_pass_a_sampled_threshold_the_largest_are_sent() -> None:
    """DGC's hierarchical re-selection: not those with the lowest addresses."""
    weight, optimizer, exchange = stepper((400, 250), TopK(0.01, selection="sampled"), NoMemory(), 0.0)
    generator, crowded = torch.Generator().manual_seed(0), 0
    for _ in range(20):
        weight.grad = torch.randn(400, 250, generator=generator)
        magnitudes = weight.grad.view(-1).abs().clone()
        optimizer.step()
        sent = sent_by(exchange)[: weight.numel()] != 0
        if int(optimizer.metrics()["candidates"]) > 1000:
            crowded += 1
            assert int(sent.sum()) == 1000
            assert magnitudes[sent].min() >= magnitudes[~sent].max()
    assert crowded > 10

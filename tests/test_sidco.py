"""TopK(selection="sidco"): how many entries pass an estimated threshold, that kernel and twin agree, what is sent."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from fusedcomp import MomentumCorrection, NoMemory, Residual, TopK
from fusedcomp.kernels.reference.keys import selection_key
from fusedcomp.kernels.sample import SAMPLES
from fusedcomp.sizing import count_at, log_ratios
from kernel_runs import DEVICE, KERNELS, TWINS, i64, same
from ranks import digest, loss_of, net, run
from steppers import sent_by, stepper

HALVES = [torch.float32, torch.bfloat16]


def values_of(kind: str, shape: Any, generator: torch.Generator) -> Tensor:
    """Laplacian, Gaussian, or generalised normal of shape 0.5 (heavier) and 1.5 (lighter), with signs."""
    if kind == "normal":
        return torch.randn(shape, generator=generator)
    beta = {"laplacian": 1.0, "heavy": 0.5, "light": 1.5}[kind]
    gamma = torch._standard_gamma(torch.full(shape, 1.0 / beta), generator=generator)
    return gamma ** (1.0 / beta) * (torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0)


def keys_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys of one scope's samples, in whole programs, some without a sample."""
    values = values.to(dtype).float()
    keys = selection_key(values, torch.arange(len(values)), torch.tensor([3]), dtype == torch.bfloat16)
    return torch.cat([keys, torch.full((-len(keys) % SAMPLES,), -1)])


def estimate(modules: Any, scopes: list[Tensor], aims: list[int], logs: list[int], dtype: torch.dtype) -> Tensor:
    keys = [keys_of(values, dtype) for values in scopes]
    rows, first = [], 0
    for scope, mine in enumerate(keys):
        count = len(mine) // SAMPLES
        rows += [(scope, first, first + count)] * count
        first += count
    thresholds = torch.full((len(scopes),), 5, dtype=torch.int64, device=DEVICE)
    modules["sidco"].estimate_threshold(
        torch.cat(keys).to(DEVICE), torch.tensor(rows, dtype=torch.int32, device=DEVICE), i64(*aims), i64(*logs),
        torch.zeros(1, dtype=dtype, device=DEVICE), thresholds,
    )  # fmt: skip
    return thresholds


def magnitude(threshold: Tensor, dtype: torch.dtype) -> float:
    cut = 48 if dtype == torch.bfloat16 else 32
    return float((threshold >> cut << cut - 32).to(torch.int32).view(torch.float32))


# ---- the estimate --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("density", [0.6, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("kind", ["laplacian", "normal", "heavy"])
def test_kernel_and_twin_agree(kind: str, density: float, dtype: torch.dtype) -> None:
    """Bit for bit, over several scopes: more samples than a round takes, one sample, as many as a program has."""
    generator = torch.Generator().manual_seed(0)
    scopes = [values_of(kind, (n,), generator) for n in (9001, 1, 512, 700)]
    aims = [max(1, round(density * len(s))) for s in scopes]
    logs = log_ratios([len(s) for s in scopes], aims)
    fast, slow = ({"thresholds": estimate(m, scopes, aims, logs, dtype)} for m in (KERNELS, TWINS))
    same(fast, slow)
    assert (fast["thresholds"] >= 5).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_extreme_values(dtype: torch.dtype) -> None:
    """Zeros, the smallest and the largest numbers, one entry far above all others, inf and NaN."""
    normal = torch.randn(600, generator=torch.Generator().manual_seed(0))
    spike, broken = normal.clone(), normal.clone()
    spike[7], broken[5], broken[6] = 1e30, float("nan"), float("inf")
    scopes = [torch.zeros(600), normal * 1e-40, normal * 1e38, spike, broken, normal.sign()]
    aims, logs = [6] * 6, log_ratios([600] * 6, [6] * 6)
    fast, slow = ({"thresholds": estimate(m, scopes, aims, logs, dtype)} for m in (KERNELS, TWINS))
    same(fast, slow)
    assert int(fast["thresholds"][0]) == 5  # nothing is known: as it was


@given(seed=st.integers(0, 2**31), exponent=st.integers(-60, 60))
def test_scaled_values_have_a_scaled_threshold(seed: int, exponent: int) -> None:
    values = values_of("laplacian", (5000,), torch.Generator().manual_seed(seed))
    logs = log_ratios([5000], [50])
    one, other = (estimate(TWINS, [values * 2.0**e], [50], logs, torch.float32)[0] for e in (0, exponent))
    assert magnitude(other, torch.float32) == magnitude(one, torch.float32) * 2.0**exponent


@given(seed=st.integers(0, 2**31))
def test_laplacian_values_need_one_stage(seed: int) -> None:
    """mean * ln(1 / density), wherever that many pass; three deviations of a mean of 4096."""
    values = values_of("laplacian", (4096,), torch.Generator().manual_seed(seed))
    threshold = magnitude(estimate(TWINS, [values], [410], log_ratios([4096], [410]), torch.float32)[0], torch.float32)
    assert threshold == pytest.approx(float(values.abs().mean()) * math.log(4096 / 410), rel=1e-4)
    assert threshold == pytest.approx(math.log(10.0), rel=5 / 64)


@given(kind=st.sampled_from(["laplacian", "normal", "heavy"]), seed=st.integers(0, 2**31), k=st.integers(8, 600))
def test_a_higher_density_has_a_lower_threshold(kind: str, seed: int, k: int) -> None:
    """Where it is higher by more than the fifth that stages may miss on either side: 0.8 * 1.6 k > 1.2 k."""
    values = values_of(kind, (4096,), torch.Generator().manual_seed(seed))
    one, other = (
        magnitude(estimate(TWINS, [values], [n], log_ratios([4096], [n]), torch.float32)[0], torch.float32)
        for n in (k, math.ceil(1.6 * k))
    )
    assert other <= one


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("kind", ["laplacian", "normal", "heavy", "light"])
def test_as_many_pass_as_the_paper_tolerates(kind: str, density: float) -> None:
    """On average 0.8 to 1.2 k of them, by which its authors adapt the number of stages."""
    weight, optimizer, exchange = stepper((2500, 64), TopK(density, selection="sidco"), NoMemory(), 0.0)
    k, generator = count_at(density, weight.numel()), torch.Generator().manual_seed(0)
    passing = []
    for _ in range(25):
        weight.grad = values_of(kind, weight.shape, generator)
        optimizer.step()
        threshold = float(optimizer.metrics()["threshold"])
        passing.append(int(optimizer.metrics()["candidates"]))
        assert int(optimizer.metrics()["nnz"]) == min(k, passing[-1]) <= exchange.buffers.layout.k == k
        assert passing[-1] <= k or int((weight.grad.abs() >= threshold).sum()) == k
    assert 0.8 * k <= sum(passing) / len(passing) <= 1.2 * k
    if kind == "laplacian" and density > 0.001:  # exponential magnitudes, as it expects them
        assert sum(passing) / len(passing) == pytest.approx(k, rel=0.1)


@pytest.mark.parametrize("scope", ["bucket", "tensor"])
@pytest.mark.parametrize("kind", ["equal", "narrow", "mask", "whole", "one larger"])
def test_magnitudes_without_a_tail_are_sent_all_the_same(kind: str, scope: str) -> None:
    """The same gradient in every step: the estimate lies above nearly all that waits, in every step."""
    compressor = TopK(0.01, selection="sidco", scope=scope)
    weight, optimizer, _ = stepper((256, 256), compressor, Residual(), 0.0)
    generator, k = torch.Generator().manual_seed(0), count_at(0.01, 256 * 256)
    signs = torch.randn(256, 256, generator=generator).sign()
    gradient = {
        "equal": signs,
        "narrow": signs * (0.9 + 0.2 * torch.rand(256, 256, generator=generator)),
        "mask": (torch.rand(256, 256, generator=generator) < 0.3).float(),
        "whole": torch.randint(-8, 9, (256, 256), generator=generator).float(),
        "one larger": torch.cat([torch.full((1, 1), 50.0), signs.view(-1, 1)[1:]]).view(256, 256),
    }[kind]
    for _ in range(12):
        weight.grad = gradient.clone()
        optimizer.step()
        assert k / 4 <= int(optimizer.metrics()["nnz"]) <= k


# ---- what is sent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["bucket", "tensor", "model"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sent_and_kept_add_up(momentum: float, dtype: torch.dtype, scope: str) -> None:
    compressor = TopK(0.01, selection="sidco", scope=scope)
    memory = MomentumCorrection() if momentum else Residual()
    weight, optimizer, exchange = stepper((300, 70), compressor, memory, momentum, state_dtype=dtype)
    accumulated: list[Tensor] = []
    refine = exchange._refine
    exchange._refine = lambda: (accumulated.append(exchange.residual.float().clone()), refine())  # type: ignore[method-assign, func-returns-value]
    for _ in range(5):
        weight.grad = torch.randn(300, 70)
        optimizer.step()
        sent, kept = sent_by(exchange), exchange.residual.float()
        assert torch.equal(sent + kept, accumulated[-1])
        assert not (sent * kept).any()
        assert 0 < int((sent != 0).sum()) <= count_at(0.01, 300 * 70)


def _resumed(rank: int, world: int) -> bytes:
    """Nothing is remembered between steps, so a resume has nothing to restore."""
    model, again = net(), net(1)
    make = {"lr": 0.05, "momentum": 0.9, "compressor": TopK(0.02, selection="sidco", warmup_steps=8)}
    optimizer, resumed = fusedcomp.SGD(model.parameters(), **make), fusedcomp.SGD(again.parameters(), **make)
    for number in range(14):
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


def test_replicas_and_resume_are_bit_exact() -> None:
    assert len(set(run(_resumed, 2))) == 1


def _virtual_iterate(rank: int, world: int) -> None:
    """Over ranks whose gradients differ nothing is lost: bit for bit, on whole numbers."""
    weight = nn.Parameter(torch.zeros(60, 70))
    optimizer = fusedcomp.SGD([weight], lr=0.5, compressor=TopK(0.02, selection="sidco"), memory=Residual())
    generator, total = torch.Generator().manual_seed(0), torch.zeros(60, 70)
    for _ in range(20):
        gradients = (torch.randn(world, 60, 70, generator=generator) * 8).round()
        gradients[1:] *= 0.25
        weight.grad = gradients[rank].clone()
        total += gradients.mean(0)
        optimizer.step()
        mean = optimizer.state[weight]["residual"].clone()
        dist.all_reduce(mean)
        assert torch.equal(weight.detach() - 0.5 * mean / world, -0.5 * total)


def test_nothing_is_lost_over_ranks() -> None:
    run(_virtual_iterate, 4)

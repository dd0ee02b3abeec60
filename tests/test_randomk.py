"""RandomK: which entries are drawn, that nothing is lost, that the expectation is the gradient, what travels."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fusedcomp
from fusedcomp import MomentumCorrection, NoMemory, RandomK, Residual, TopK
from fusedcomp.buffers import strata_table
from fusedcomp.kernels.reference.keys import tie_hash
from fusedcomp.kernels.segments import Segments
from fusedcomp.randomk import RandomExchange
from fusedcomp.sizing import count_at
from kernel_cases import POISON, build
from kernel_runs import DEVICE, KERNELS, TWINS, TYPES, i32, same
from ranks import digest, loss_of, message_of, net, run

seeds = st.integers(0, 2**31 - 1)


def drawn_at(strata: torch.Tensor, step: int) -> torch.Tensor:
    return strata[:, 0] + tie_hash(strata[:, 0], torch.tensor([step])) % strata[:, 1]


# ---- what is drawn -------------------------------------------------------------------------------------------------


@given(numels=st.lists(st.integers(1, 5000), min_size=1, max_size=4), density=st.floats(1e-3, 1.0), step=seeds)
def test_draws_are_distinct_and_of_every_tensor_its_share(numels: list[int], density: float, step: int) -> None:
    segments = Segments.build(numels, torch.device("cpu"))
    strata = strata_table(density, segments)
    index = drawn_at(strata, step)
    assert len(index.unique()) == len(index) == sum(count_at(density, n) for n in numels)
    for where, numel in zip(segments.slices, numels, strict=True):
        mine = strata[(strata[:, 0] >= where.start) & (strata[:, 0] < where.stop)]
        assert int(mine[:, 1].sum()) == numel  # every element is in one part
        assert int(mine[:, 1].max() - mine[:, 1].min()) <= 1
        assert int(((index >= where.start) & (index < where.stop)).sum()) == count_at(density, numel)


def test_every_element_has_its_chance() -> None:
    """Over 4000 steps each of 300 elements in parts of 10 comes up about 400 times: 19 is a deviation."""
    strata = strata_table(0.1, Segments.build([300], torch.device("cpu")))
    counts = Counter(int(i) for step in range(4000) for i in drawn_at(strata, step))
    assert len(counts) == 300
    assert max(abs(count - 400) for count in counts.values()) < 5 * 19


@pytest.mark.parametrize("density", [0.1, 0.3, 0.6])
def test_what_is_expected_to_stay(density: float) -> None:
    """E|x - C(x)|^2: of every part all but one. With equal parts it is 1 - k/n of the whole."""
    strata, steps = strata_table(density, Segments.build([3200], torch.device("cpu"))), 2000
    sizes = torch.repeat_interleave(strata[:, 1], strata[:, 1]).double()
    squares = torch.randn(3200, generator=torch.Generator().manual_seed(0)).double().square()
    left = torch.full((3200,), float(steps), dtype=torch.float64)
    for step in range(steps):
        left[drawn_at(strata, step)] -= 1.0
    stays, expected = float((left / steps * squares).sum()), float(((1 - 1 / sizes) * squares).sum())
    assert stays == pytest.approx(expected, rel=0.02)
    assert expected <= (1 - 1 / math.ceil(3200 / len(strata))) * float(squares.sum()) * (1 + 1e-12)
    if density == 0.1:
        assert expected == pytest.approx((1 - density) * float(squares.sum()), rel=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parity", [None, 0, 1])
def test_taking(parity: int | None, state_dtype: torch.dtype, masked: bool, unbiased: bool) -> None:
    case, results = build((1, 2049, 5, 70001), device=DEVICE, missing=(1,), state_dtype=state_dtype), []
    strata = strata_table(0.03, case.segments)
    for modules in (KERNELS, TWINS):
        mine = case.copy()
        halves = [s if parity is None else torch.cat([s, s]) for s in (mine.velocity, mine.residual)]
        values, flag = torch.full((len(strata),), POISON, device=DEVICE), i32(0)
        modules["draws"].take_drawn(
            mine.segments, mine.operands(), strata, halves[0] if masked else None, halves[1], mine.seed,
            None if parity is None else i32(parity), flag, values, unbiased=unbiased,
        )  # fmt: skip
        results.append({"velocity": halves[0], "residual": halves[1], "values": values, "flag": flag})
    same(*results)
    values, absent = results[0]["values"], strata[:, 0].ge(2048) & strata[:, 0].lt(2048 + 2049)
    assert not values[absent].any()
    assert (values != 0).sum() == (~absent).sum()


@pytest.mark.parametrize("broken", ["nan", "inf"])
def test_what_is_not_finite_is_told(broken: str) -> None:
    case = build((2049,), device=DEVICE)
    case.residual[:] = float(broken)
    strata = strata_table(0.03, case.segments)
    for modules in (KERNELS, TWINS):
        values, flag, mine = torch.zeros(len(strata), device=DEVICE), i32(0), case.copy()
        modules["draws"].take_drawn(
            mine.segments, mine.operands(), strata, None, mine.residual, mine.seed, None, flag, values, unbiased=False
        )
        assert int(flag) == 1


@pytest.mark.parametrize("dtype", TYPES)
def test_putting(dtype: torch.dtype) -> None:
    case, results = build((1, 2049, 5, 70001), device=DEVICE, dtype=dtype, shift=1), []
    strata, present = strata_table(0.03, case.segments), i32(1, 0, 1, 1)
    values = torch.randn(len(strata), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    lr = torch.tensor([0.3], device=DEVICE)
    for modules in (KERNELS, TWINS):
        mine = case.copy()
        modules["draws"].put_drawn(
            mine.segments, mine.operands(), strata, mine.seed, present, lr, values, inverse_world=0.25
        )
        results.append({f"p{i}": p for i, p in enumerate(mine.params)})
    same(*results)
    assert torch.equal(results[0]["p1"], case.params[1])  # absent everywhere
    changed = (results[0]["p3"] != case.params[3]).sum()
    assert 0 < changed <= count_at(0.03, 70001)


# ---- what a step does ----------------------------------------------------------------------------------------------


def stepper(density: float, memory: Any, momentum: float = 0.0, lr: float = 1.0) -> tuple[nn.Parameter, Any]:
    weight = nn.Parameter(torch.zeros(64, 50))
    return weight, fusedcomp.SGD([weight], lr=lr, momentum=momentum, compressor=RandomK(density), memory=memory)


@given(density=st.floats(1e-3, 1.0), seed=seeds, momentum=st.sampled_from([0.0, 0.5]))
def test_nothing_is_lost(density: float, seed: int, momentum: float) -> None:
    """Dyadic data, bit for bit: what went in is in the weights or still in the residual."""
    generator = torch.Generator().manual_seed(seed)
    memory = MomentumCorrection(masking=False) if momentum else Residual()
    weight, optimizer = stepper(density, memory, momentum)
    total, velocity = torch.zeros(64, 50), torch.zeros(64, 50)
    for _ in range(6):
        weight.grad = torch.randint(-8, 9, weight.shape, generator=generator).float()
        velocity = velocity * momentum + weight.grad
        total += velocity
        optimizer.step()
    assert torch.equal(optimizer.state[weight]["residual"] - weight.detach(), total)


def test_without_memory_the_expectation_is_the_gradient() -> None:
    """E[c] = g and E|c|^2 = |g|^2 n / k, over 3000 steps: 5 deviations of the mean."""
    weight, optimizer = stepper(0.1, NoMemory())
    gradient, steps = torch.randn(64, 50), 3000
    squares, before = 0.0, weight.detach().clone()
    for _ in range(steps):
        weight.grad = gradient.clone()
        optimizer.step()
        squares += float((weight.detach() - before).double().square().sum())
        before = weight.detach().clone()
    deviation = gradient.abs() * (9 / steps) ** 0.5
    assert ((-weight.detach() / steps - gradient).abs() <= 5 * deviation + 1e-4).all()
    assert squares / steps == pytest.approx(10 * float(gradient.square().sum()), rel=0.02)


def test_momentum_behind_the_exchange_is_dense() -> None:
    """With everything drawn it is torch's SGD."""
    weight, optimizer = stepper(1.0, Residual(), 0.9, lr=0.1)
    reference = nn.Parameter(torch.zeros(64, 50))
    plain = torch.optim.SGD([reference], lr=0.1, momentum=0.9)
    for _ in range(5):
        weight.grad = torch.randn(64, 50)
        reference.grad = weight.grad.clone()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(weight, reference)


# ---- ranks ---------------------------------------------------------------------------------------------------------


def _mean_of_ranks(rank: int, world: int) -> int:
    """All ranks draw the same entries, and what is applied is their mean; 4 bytes an entry travel."""
    weight, optimizer = stepper(0.1, Residual())
    (exchange,) = optimizer._exchanges
    assert isinstance(exchange, RandomExchange)
    generator = torch.Generator().manual_seed(0)
    residuals = torch.zeros(world, 64 * 50)
    expected = torch.zeros(64 * 50)
    for step in range(12):
        gradients = torch.randint(-8, 9, (world, 64 * 50), generator=generator).float()
        weight.grad = gradients[rank].view(64, 50).clone()
        optimizer.step()
        residuals += gradients
        index = drawn_at(exchange.strata, step)
        expected[index] -= residuals[:, index].mean(0)
        residuals[:, index] = 0.0
        assert torch.equal(weight.detach().view(-1), expected)
    everyone = [b""] * world
    dist.all_gather_object(everyone, weight.detach().numpy().tobytes())
    assert len(set(everyone)) == 1
    return int(optimizer.metrics()["bytes_sent"])


def test_ranks_draw_the_same_and_send_values_alone() -> None:
    sent = run(_mean_of_ranks, 2)
    assert sent == [4 * (320 + 1 + 6)] * 2  # and a word a tensor, and six


def _resume(rank: int, world: int) -> bytes:
    model, again = net(), net(1)
    make = {"lr": 0.05, "momentum": 0.9, "compressor": RandomK(0.1)}
    optimizer, resumed = fusedcomp.SGD(model.parameters(), **make), fusedcomp.SGD(again.parameters(), **make)
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


def test_replicas_and_resume_are_bit_exact() -> None:
    assert len(set(run(_resume, 2))) == 1


def test_lars_takes_norms_along() -> None:
    """The same trust ratios as with TopK at density 1: both exchange the norms of whole gradients."""
    weights = [nn.Parameter(torch.ones(64, 50)) for _ in range(2)]
    optimizers = [
        fusedcomp.LARS([weight], lr=1.0, momentum=0.0, compressor=compressor, memory=Residual())
        for weight, compressor in zip(weights, (RandomK(0.05), TopK(0.05)), strict=True)
    ]
    for _ in range(3):
        gradient = torch.randn(64, 50)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    norms = [optimizer._exchanges[0].bucket.norms for optimizer in optimizers]
    torch.testing.assert_close(norms[0][0], norms[1][0], rtol=1e-5, atol=0.0)


def test_bad_arguments() -> None:
    for density in (0.0, 1.5, True, None):
        message = message_of(lambda density=density: RandomK(density))
        assert message == f"ValueError: RandomK: density must be in (0, 1], got {density!r}"

"""CAT with variant="sparse_quantized": the choice, kernels against twins, sent and kept exactly, ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from cat_oracle import AFFINE, BOUND, KINDS, PACKETS, betas, chosen, costs_of, seeds, values_of
from fusedcomp import CAT, AffineCost, LinkCost, MomentumCorrection, NoMemory, PacketCost, Residual
from fusedcomp.costs import Terms
from fusedcomp.ddp import CompressionState
from fusedcomp.kernels.segments import BLOCK, SIGNED_PAGE
from fusedcomp.kernels.tune import COUNTERS, MAGNITUDES
from kernel_cases import SIZES, build
from kernel_runs import DEVICE, KERNELS, TWINS, TYPES, both, i32, i64, same, whole_pass
from ranks import digest, message_of, run
from sameness import hook_and_optimizer, run_and_resumed, train
from steppers import sent_by, stepper
from test_cat import room_for_all, shapes


def quantized(cost: Any, **more: Any) -> CAT:
    return CAT(cost, variant="sparse_quantized", **more)


# ---- the choice ----------------------------------------------------------------------------------------------------


@given(kind=KINDS, numel=st.integers(1, 3 * BLOCK), seed=seeds, terms=AFFINE | PACKETS)
def test_the_rate_is_within_the_bound_of_the_best(kind: str, numel: int, seed: int, terms: Terms) -> None:
    """Invariant 8: against all T by brute force, in float64."""
    values = values_of(kind, numel, seed)
    found = chosen(values, terms, scale=torch.zeros(1))
    if not values.any():
        assert found == 0
        return
    rates = betas(values) / costs_of(terms, np.arange(1, numel + 1))
    assert rates[found - 1] >= BOUND * rates.max() * (1 - 1e-9)


@given(few=st.integers(1, 40), many=st.integers(1, 3000), ratio=st.floats(1.0, 1e4), terms=AFFINE | PACKETS)
@example(few=1, many=10_000, ratio=100.0, terms=Terms(0.0, 1.0))
def test_two_maxima(few: int, many: int, ratio: float, terms: Terms) -> None:
    """The rate of two groups of magnitudes has a maximum at the end of each; the higher one is found."""
    values = torch.cat([torch.full((few,), ratio), torch.ones(many)])
    rates = betas(values) / costs_of(terms, np.arange(1, len(values) + 1))
    assert rates[chosen(values, terms, scale=torch.zeros(1)) - 1] >= BOUND * rates.max() * (1 - 1e-9)


@given(kind=KINDS, numel=st.integers(1, 2 * BLOCK), seed=seeds, terms=AFFINE | PACKETS, power=st.integers(-60, 60))
def test_scale_sign_and_order_do_not_matter(kind: str, numel: int, seed: int, terms: Terms, power: int) -> None:
    """Invariant 2; to the bit for powers of two, by which the scale grows."""
    values, one, other = values_of(kind, numel, seed), torch.zeros(1), torch.zeros(1)
    found = chosen(values, terms, scale=one)
    assert chosen(-values * 2.0**power, terms, scale=other) == found
    assert torch.equal(other, one * 2.0**power)
    mixed = values[torch.randperm(numel, generator=torch.Generator().manual_seed(seed))]
    assert chosen(mixed, terms, scale=other) == found
    assert torch.equal(other, one)


@given(kind=KINDS, numel=st.integers(1, 2 * BLOCK), seed=seeds)
def test_a_message_that_costs_nothing_but_its_entries_has_one(kind: str, numel: int, seed: int) -> None:
    """Invariant 3; but for what the counts take for equal."""
    values = values_of(kind, numel, seed)
    assert chosen(values, Terms(1.0, 0.0), scale=torch.zeros(1)) == min(int((values != 0).sum()), 1)


@given(kind=KINDS, numel=st.integers(1, 3 * BLOCK), seed=seeds, terms=PACKETS)
@example(kind="one", numel=2000, seed=0, terms=Terms(1.0, 0.0, 400, 0))
def test_packets_are_full_or_end_a_bin(kind: str, numel: int, seed: int, terms: Terms) -> None:
    """beta may fall inside a packet, so that entries end where magnitudes fall to the next bin; not elsewhere."""
    magnitudes = values_of(kind, numel, seed).abs().sort(descending=True).values
    found = chosen(magnitudes, terms, scale=torch.zeros(1))
    bins = magnitudes.view(torch.int32) >> 20
    assert (found + terms.lead) % terms.whole == 0 or found == numel or not found or bins[found - 1] > bins[found]


def test_one_that_is_far_larger_fills_no_packet() -> None:
    values = values_of("one", 2000, 0)
    assert chosen(values, Terms(1.0, 0.0, 400, 0)) == 400
    assert chosen(values, Terms(1.0, 0.0, 400, 0), scale=torch.zeros(1)) == 1


@given(kind=KINDS, numel=st.integers(1, 3 * BLOCK), seed=seeds, terms=AFFINE | PACKETS, room=st.integers(1, 4 * BLOCK))
def test_the_scale_is_the_mean(kind: str, numel: int, seed: int, terms: Terms, room: int) -> None:
    """Of what is sent: as near as bins and 5 bits come, but at most twice the smallest; 0 where nothing is."""
    values, scale = values_of(kind, numel, seed), torch.zeros(1)
    sent = min(max(chosen(values, terms, room, scale), 1), room)
    magnitudes = values.abs().sort(descending=True).values[:sent].double()
    if not values.any():
        assert float(scale) == 0.0
        return
    mean, least = float(magnitudes.mean()), float(magnitudes[-1])
    assert float(scale) <= min(mean * (1 + 1 / 16) * (1 + 1 / 32), 2 * least)
    assert float(scale) >= min(mean / (1 + 1 / 16) / (1 + 1 / 32), 2 * least * 8 / 9)
    fraction, _ = np.frexp(float(scale))
    assert fraction * 32 % 1 == 0


# ---- sent and kept add up ------------------------------------------------------------------------------------------


@given(
    numel=st.integers(1, 3 * BLOCK),
    seed=seeds,
    spread=st.floats(0.0, 40.0),
    giants=st.integers(0, 3),
    power=st.integers(-140, 100),
    fixed=st.floats(0.0, 1e7),
    room=st.integers(1, 4 * BLOCK),
)
def test_what_is_kept_is_exact(
    numel: int, seed: int, spread: float, giants: int, power: int, fixed: float, room: int
) -> None:
    """In fp32 as in float64, for magnitudes of any spread, and as many as are sent of as many as are wanted."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=draw) * 2.0 ** (spread * torch.rand(numel, generator=draw) - spread)
    values[:giants] *= 2.0**20
    values = values * 2.0**power
    scale = torch.zeros(1)
    sent = min(max(chosen(values, Terms(1.0, fixed), room, scale), 1), room)
    largest = values[values.abs().sort(descending=True).indices[:sent]]
    assert (2 * largest.abs() >= scale).all()
    kept = largest - torch.where(largest < 0, -scale, scale)
    assert torch.equal(kept.double(), largest.double() - torch.where(largest < 0, -scale, scale).double())
    assert (kept.abs() <= largest.abs()).all()  # nothing grows by being sent


@given(shape=shapes, seed=seeds, fixed=st.floats(0.0, 1e5), momentum=st.sampled_from([0.0, 0.9]), kind=KINDS)
def test_sent_and_kept_add_up(shape: Any, seed: int, fixed: float, momentum: float, kind: str) -> None:
    memory = MomentumCorrection() if momentum else Residual()
    weight, optimizer, exchange = stepper(shape, quantized(AffineCost(fixed=fixed)), memory, momentum)
    accumulated: list[Tensor] = []
    refine = exchange._refine
    exchange._refine = lambda: (accumulated.append(exchange.residual.clone()), refine())  # type: ignore[method-assign, func-returns-value]
    for number in range(3):
        weight.grad = values_of(kind, weight.numel(), seed + number).view(shape)
        optimizer.step()
        sent = sent_by(exchange)
        assert torch.equal(sent.double() + exchange.residual.double(), accumulated[-1].double())
        assert sent.abs().unique().numel() <= 2  # one magnitude, and 0
        assert int(optimizer.metrics()["nnz"]) == min(max(int(exchange.wanted), 1), exchange.selection.k)


def test_candidates_that_found_no_place() -> None:
    """Where the largest are not listed, entries far below the scale take their places: they stay, and stay whole."""
    case = build((3000, 5000), device=DEVICE, values="clustered")
    out = both(case, 0.05, capacity=100, scale=1e4, with_trust=False)
    assert int(out["starts"][-1]) == 0
    assert torch.equal(out["residual"], out["residual_before_pack"])


@given(seed=seeds, fixed=st.floats(0.0, 1e4), packets=st.booleans())
def test_the_guaranteed_descent(seed: int, fixed: float, packets: bool) -> None:
    """Invariant 5: on quadratics, F(x - Q(g) / L) <= F(x) - beta(T) |g|^2 / (2 L), but for what the scale is off."""
    draw = torch.Generator().manual_seed(seed)
    factor = torch.randn(40, 40, generator=draw, dtype=torch.float64)
    hessian = factor @ factor.T
    smoothness = float(torch.linalg.eigvalsh(hessian)[-1])
    cost = PacketCost(60.0, 20.0, fixed) if packets else AffineCost(fixed=fixed)
    weight, optimizer, exchange = stepper((40,), quantized(cost), NoMemory(), 0.0, lr=1.0 / smoothness)
    with torch.no_grad():
        weight.copy_(torch.randn(40, generator=draw))

    def loss() -> float:
        return float(weight.detach().double() @ hessian @ weight.detach().double()) / 2

    for _ in range(5):
        before, gradient = loss(), (hessian @ weight.detach().double()).float()
        weight.grad = gradient.clone()
        optimizer.step()
        sent = int((sent_by(exchange)[:40] != 0).sum())
        square = float(gradient.double().square().sum())
        # A scale that is off by a factor 1 + d loses d^2 of the descent: bins and rounding come to 0.0957.
        gained = (1 - 0.0957**2) * betas(gradient)[sent - 1] * square / (2 * smoothness)
        assert loss() <= before - gained + 1e-5 * before


# ---- kernels and twins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [0, 1, 1000])
def test_choosing_from_any_counts(most: int, seed: int) -> None:
    """Empty bins, octaves far apart, all of fp32's, those of denormal and infinite numbers too; poisoned outputs."""
    draw, results = torch.Generator().manual_seed(seed), []
    counted = torch.randint(most + 1, (COUNTERS, MAGNITUDES), generator=draw, dtype=torch.int32)
    counted *= (torch.rand(MAGNITUDES, generator=draw) < 0.02 * seed).int()
    counted[:, 0] = 0
    counted[:, 2040 - 300 * (seed % 2) :] = 0
    counted[:, 8 * 20 * seed + 8 if seed % 3 else MAGNITUDES :] = 0
    for modules in (KERNELS, TWINS):
        counters, rank, wanted = counted.clone().to(DEVICE), i64(-7), i32(-7)
        scale = torch.full((1,), -7.0, device=DEVICE)
        modules["tune"].choose_entries(
            torch.tensor([0.37, 10.0 ** seed], dtype=torch.float64, device=DEVICE), i64(1 + 40 * (seed % 2), seed),
            counters, rank, wanted, i64(1 << 60), i32(-7), scale, room=100, numel=int(counted.sum()),
        )  # fmt: skip
        results.append({"rank": rank, "wanted": wanted, "scale": scale, "counters": counters})
    same(*results)
    assert not results[0]["counters"].any()
    assert bool(results[0]["scale"] > 0) == bool(counted.any())


@pytest.mark.parametrize("bin_", [1, 7, 8, 1000, 2039, 2040, 2043])
def test_a_scale_of_one_bin(bin_: int) -> None:
    """From denormal numbers to the largest; of what is not finite infinity."""
    for modules in (KERNELS, TWINS):
        counters = torch.zeros(COUNTERS, MAGNITUDES, dtype=torch.int32, device=DEVICE)
        scale = torch.zeros(1, device=DEVICE)
        counters[3, bin_] = 5
        modules["tune"].choose_entries(
            torch.tensor([0.0, 1.0], dtype=torch.float64, device=DEVICE), i64(1, 0), counters, i64(-7), i32(-7),
            i64(0), i32(-7), scale, room=100, numel=100,
        )  # fmt: skip
        edges = (torch.tensor([bin_, bin_ + 1]) << 20).int().view(torch.float32)
        if bin_ >= 2040:
            assert float(scale) == float("inf")
        elif bin_ >= 8:
            assert edges[0] < float(scale) < edges[1]
        else:
            assert edges[0] / 2 <= float(scale) <= 2 * edges[0]


@pytest.mark.parametrize("values", ["normal", "ties", "clustered", "nan", "inf"])
@pytest.mark.parametrize("name", ["one", "2047", "2049", "two_pages", "mixed"])
def test_packing_signs(name: str, values: str) -> None:
    """All that the twin leaves; and the twin against what went in."""
    case = build(SIZES[name], device=DEVICE, values=values, missing=(3,) if name == "mixed" else ())
    for parity in (None, 1):
        out = both(case, 0.02, scale=0.75, parity=parity)
    count, before = int(out["starts"][-1]), out["residual_before_pack"]
    page = torch.arange(case.segments.pages_of(SIGNED_PAGE), device=DEVICE)
    page = page.repeat_interleave(out["starts"].diff().long())
    word = out["out_indices"][:count].long()
    index = page * SIGNED_PAGE + (word & (SIGNED_PAGE - 1))
    assert torch.equal(index, index.unique())  # in order
    assert torch.equal((word & SIGNED_PAGE) != 0, before[index] < 0)
    assert (out["header"][0] & 0xFFFF) == 1 + 768
    assert not out["out_indices"][count:].any()
    if values not in ("nan", "inf"):
        sent = torch.zeros_like(before).index_add_(0, index, 0.75 * before[index].sign())
        assert torch.equal(sent + out["residual"], before)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("world", [1, 3])
def test_applying_signs(world: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has its own scale; pages crowded and not, against the twin and a float64 scatter."""
    case = build((70001, 3000, 2049), device=DEVICE, dtype=dtype)
    cases = [build((70001, 3000, 2049), device=DEVICE, shift=rank) for rank in range(world)]
    packed = [whole_pass(TWINS, mine.copy(), 0.05, scale=0.5 + rank) for rank, mine in enumerate(cases)]
    names = ("starts", "out_indices", "values", "header")
    starts, indices, values, headers = (torch.stack([p[k] for p in packed]) for k in names)
    sums = None if dtype == torch.float32 else torch.zeros(case.segments.padded_numel, device=DEVICE)
    for few_pages in (0, 2048):
        monkeypatch.setattr(KERNELS["apply"], "_FEW_PAGES", few_pages)
        results = []
        for modules in (KERNELS, TWINS):
            mine, status, present = case.copy(), i32(0, 0, 0), i32(-7, -7, -7)
            modules["apply"].apply_payloads(
                mine.segments, mine.operands(), starts, indices, values, torch.tensor([0.1], device=DEVICE), headers,
                status, None, present, sums, inverse_world=1.0 / world, signed=True,
            )  # fmt: skip
            assert status.tolist() == [0, 0, 0]
            results.append({f"param{i}": p for i, p in enumerate(mine.params)})
        same(*results)
    update = torch.zeros(case.segments.padded_numel, dtype=torch.float64, device=DEVICE)
    for rank, mine in enumerate(packed):
        gone = mine["residual_before_pack"].double() - mine["residual"].double()
        assert set(gone.abs().unique().tolist()) == {0.0, 0.5 + rank}
        update += gone
    for i, (param, where) in enumerate(zip(case.params, case.segments.slices, strict=True)):
        expected = param.double() - 0.1 / world * update[where]
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(results[0][f"param{i}"].double(), expected, rtol=2 * eps, atol=2 * eps)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter runs kernels on CPU tensors")
@pytest.mark.parametrize("guarded", [False, True])
def test_a_run_of_kernels_is_a_run_of_twins(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cost, found = PacketCost(60, 20) if guarded else AffineCost(fixed=100.0), set()
    for ops in ("kernels", "reference"):
        monkeypatch.setenv("FUSEDCOMP_OPS", ops)
        weight = nn.Parameter(torch.zeros(50, 60))
        optimizer = fusedcomp.SGD([weight], lr=0.1, momentum=0.9, compressor=quantized(cost), skip_nonfinite=guarded)
        generator, wanted = torch.Generator().manual_seed(0), []
        for _ in range(3):
            weight.grad = torch.randn(50, 60, generator=generator)
            optimizer.step()
            wanted.append(int(optimizer._exchanges[0].wanted))
        found.add((weight.detach().numpy().tobytes(), tuple(wanted)))
    assert len(found) == 1
    assert min(wanted) > 0


# ---- ranks, and what else a step may meet --------------------------------------------------------------------------


def test_what_is_not_finite_goes_whole() -> None:
    """To the parameters alone, as in DDP: an entry that is not finite; the others wait."""
    weight, optimizer, _ = stepper((64, 64), quantized(AffineCost(fixed=100.0)), Residual(), 0.0)
    weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight.grad[3, 5], weight.grad[7, 7] = float("nan"), -float("inf")
    gradient = weight.grad.clone()
    optimizer.step()
    broken = ~gradient.isfinite()
    assert torch.equal(~weight.isfinite(), broken)
    assert torch.equal(optimizer.state[weight]["residual"], gradient.where(~broken, torch.tensor(0.0)))
    assert int(optimizer.metrics()["nonfinite"]) == 1


def test_bytes() -> None:
    """Two an entry, as the cost has it."""
    weight, optimizer, exchange = stepper((256, 256), quantized(AffineCost()), Residual(), 0.0)
    weight.grad = torch.randn(256, 256)
    optimizer.step()
    head, entry, *_ = exchange._message()
    assert entry == 2
    assert head == 4 * (4 + 1 + 3 + 1) + 12  # header, presence, starts of two pages, the scale
    assert exchange.buffers.layout.nbytes == -(-(36 + 2 * exchange.selection.k) // 16) * 16


@room_for_all
def _resumed(rank: int, world: int) -> bytes:
    runs = run_and_resumed(rank, {"lr": 0.05, "momentum": 0.9, "compressor": quantized(AffineCost(fixed=100.0))})
    for number in range(12, 24):
        for each in runs:
            train(each, rank, number)
    (model, _), (again, _) = runs
    assert digest(model) == digest(again)
    return digest(model)


def test_resume_and_replicas_are_bit_exact() -> None:
    assert len(set(run(_resumed, 2))) == 1


@room_for_all
def _hook_and_optimizer(rank: int, world: int) -> None:
    hook_and_optimizer(rank, world, quantized(LinkCost(1e-4, 1e7), objective="time"))


def test_the_hook_sends_the_same() -> None:
    run(_hook_and_optimizer, 2)


def _other_variant(rank: int, world: int) -> str:
    compressor = CAT(AffineCost(), variant=["sparse", "sparse_quantized"][rank])
    return message_of(lambda: fusedcomp.SGD([nn.Parameter(torch.zeros(64, 64))], lr=0.1, compressor=compressor))


def test_variants_are_equal_on_all_ranks() -> None:
    for message in run(_other_variant, 2):
        assert "compressor of group 0" in message


def test_bad_arguments() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    for make, told in (
        (lambda: CAT(AffineCost(), variant="dense"), "ValueError: CAT: variant must be"),
        (
            lambda: quantized(AffineCost(), wire_dtype=torch.bfloat16),
            "ValueError: CAT: wire_dtype is of variant='sparse' alone, got torch.bfloat16",
        ),
        (
            lambda: fusedcomp.SGD([weight], lr=0.1, compressor=quantized(AffineCost()), state_dtype=torch.bfloat16),
            "ValueError: SGD: variant='sparse_quantized' needs state_dtype=torch.float32",
        ),
        (
            lambda: CompressionState(quantized(AffineCost()), state_dtype=torch.bfloat16),
            "ValueError: CompressionState: variant='sparse_quantized' needs state_dtype=torch.float32",
        ),
    ):
        assert message_of(make).startswith(told)

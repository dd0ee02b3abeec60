"""BlockTopK: the k largest of every block, nothing lost, replicas, what is refused."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fusedcomp
from fusedcomp import BlockTopK, MomentumCorrection, NoMemory, Residual, TopK
from fusedcomp.blocktopk import BlockExchange
from fusedcomp.buckets import is_large
from fusedcomp.buffers import places_of
from fusedcomp.ddp import CompressionState
from fusedcomp.kernels.headers import FAILED
from fusedcomp.kernels.reference.accumulate import ACCUMULATE as ACCUMULATE_TWIN
from fusedcomp.kernels.segments import BLOCK, Segments
from fusedcomp.sizing import count_of_blocks
from hooked import step, wrapped
from kernel_runs import (
    DEVICE,
)
from ranks import digest, loss_of, message_of, net, run
from sampled import train
from steppers import sent_by

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
seeds = st.integers(0, 2**31 - 1)

# ---- what a step does ----------------------------------------------------------------------------------------------


def stepper(
    shape: tuple[int, ...], compressor: Any, memory: Any, momentum: float = 0.0, **more: Any
) -> tuple[nn.Parameter, fusedcomp.SGD, BlockExchange]:
    """A weight of zeros that is always compressed, its optimizer and exchange."""
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = fusedcomp.SGD(
        [weight], lr=1.0, momentum=momentum, compressor=compressor, memory=memory, _always_sparse=True, **more
    )
    (exchange,) = optimizer._exchanges
    assert isinstance(exchange, BlockExchange)
    return weight, optimizer, exchange


shapes = st.tuples(st.integers(1, 90), st.integers(1, 90))
densities = st.floats(1 / 2048, 1.0)
wires = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(shape=shapes, density=densities, seed=seeds, nesterov=st.booleans(), wire=wires)
def test_nothing_is_lost_in_a_step(
    shape: tuple[int, int], density: float, seed: int, nesterov: bool, wire: torch.dtype
) -> None:
    """fl(residual + update) == sent + kept, bit for bit; masked exactly where sent; of every block its share."""
    generator = torch.Generator().manual_seed(seed)
    weight, optimizer, exchange = stepper(shape, BlockTopK(density, wire_dtype=wire), MomentumCorrection(), 0.9)
    optimizer.param_groups[0]["nesterov"] = nesterov
    k = round(density * 2048)
    for _ in range(3):
        velocity, residual = exchange.velocity.clone(), exchange.residual.clone()
        weight.grad = torch.randn(shape, generator=generator)
        grad = torch.zeros_like(residual)
        grad[: weight.numel()] = weight.grad.view(-1)
        optimizer.step()
        name = "nesterov" if nesterov else "momentum"
        new_velocity, accumulated = ACCUMULATE_TWIN[name](grad, velocity, residual, 0.9)
        sent, kept = sent_by(exchange), exchange.residual
        assert torch.equal(sent + kept, accumulated)
        assert torch.equal(exchange.velocity, torch.where(sent != 0, torch.zeros(()), new_velocity))
        chosen = (sent != 0).view(-1, BLOCK).sum(1)
        extents = [min(BLOCK, weight.numel() - start) for start in range(0, weight.numel(), BLOCK)]
        assert chosen.tolist() == [min(k, extent) for extent in extents]
        if wire == torch.float32:
            assert not (sent * kept).any()


@given(shape=shapes, density=densities, seed=seeds)
def test_a_step_contracts_every_block(shape: tuple[int, int], density: float, seed: int) -> None:
    """|after|^2 <= (1 - k / n) |before|^2 in every block of n elements, by float64; the roundings of a sum aside."""
    weight, optimizer, exchange = stepper(shape, BlockTopK(density), Residual())
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) ** 3
    before = torch.zeros_like(exchange.residual)
    before[: weight.numel()] = weight.grad.view(-1)
    optimizer.step()
    for block, (mine, kept) in enumerate(zip(before.split(BLOCK), exchange.residual.split(BLOCK), strict=True)):
        extent = min(BLOCK, weight.numel() - block * BLOCK)
        share = min(round(density * 2048), extent) / extent
        assert kept.double().square().sum() <= (1.0 - share) * mine.double().square().sum() * (1 + 1e-12)


@given(density=densities, seed=seeds, momentum=st.sampled_from([0.0, 0.5]))
def test_nothing_is_lost_over_a_run(density: float, seed: int, momentum: float) -> None:
    """Dyadic data, bit for bit: what went in is in the weights or still in the residual."""
    generator = torch.Generator().manual_seed(seed)
    memory = MomentumCorrection(masking=False) if momentum else Residual()
    weight, optimizer, _ = stepper((64, 50), BlockTopK(density), memory, momentum)
    total, velocity = torch.zeros(64, 50), torch.zeros(64, 50)
    for _ in range(6):
        weight.grad = torch.randint(-8, 9, weight.shape, generator=generator).float()
        velocity = velocity * momentum + weight.grad
        total += velocity
        optimizer.step()
    assert torch.equal(optimizer.state[weight]["residual"] - weight.detach(), total)


def test_without_memory_the_rest_is_dropped() -> None:
    weight, optimizer, _ = stepper((64, 64), BlockTopK(2 / 2048), NoMemory())
    weight.grad = torch.randn(64, 64)
    expected = torch.zeros(2, BLOCK)
    grad = weight.grad.view(2, BLOCK)
    index = grad.abs().topk(2).indices
    expected.scatter_(1, index, -grad.gather(1, index))
    optimizer.step()
    assert torch.equal(weight.detach().view(2, BLOCK), expected)


def test_momentum_behind_the_exchange_is_dense() -> None:
    """With everything sent it is torch's SGD, dense as it then is or as a payload."""
    for more in ({}, {"_always_sparse": True}):
        weight, reference = nn.Parameter(torch.zeros(64, 50)), nn.Parameter(torch.zeros(64, 50))
        options = {"lr": 0.1, "momentum": 0.9}
        optimizer = fusedcomp.SGD([weight], compressor=BlockTopK(1.0), memory=Residual(), **options, **more)
        plain = torch.optim.SGD([reference], **options)
        for _ in range(5):
            weight.grad = torch.randn(64, 50)
            reference.grad = weight.grad.clone()
            optimizer.step()
            plain.step()
        assert optimizer._exchanges[0].dense_step != bool(more)
        torch.testing.assert_close(weight, reference)


def test_the_warm_up_changes_what_a_block_sends() -> None:
    compressor = BlockTopK(2 / 2048, warmup_steps=4, warmup_densities=[1.0, 0.01])
    assert [compressor.per_block_at(step) for step in range(6)] == [2048, 2048, 20, 20, 2, 2]
    assert [BlockTopK(0.001, warmup_steps=4).per_block_at(step) for step in range(5)] == [514, 129, 32, 8, 2]
    weight = nn.Parameter(torch.zeros(3, BLOCK))
    optimizer = fusedcomp.SGD([weight], lr=1.0, compressor=compressor)
    sent = []
    for _ in range(6):
        weight.grad = torch.randn(3, BLOCK)
        optimizer.step()
        sent.append(int(optimizer.metrics()["nnz"]))
    assert sent == [3 * k for k in (2048, 2048, 20, 20, 2, 2)]


@given(numels=st.lists(st.integers(1, 9000), min_size=1, max_size=4), per_block=st.integers(1, 2048))
def test_places_are_those_of_the_count(numels: list[int], per_block: int) -> None:
    segments = Segments.build(numels, torch.device("cpu"))
    places = places_of(per_block, segments).tolist()
    assert places[0] == 0
    assert places[-1] == count_of_blocks(per_block, numels)
    extents = [min(BLOCK, n - start) for n in numels for start in range(0, n, BLOCK)]
    assert [b - a for a, b in pairwise(places)] == [min(per_block, extent) for extent in extents]


# ---- ranks ---------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "corrected": {"compressor": BlockTopK(0.01), "momentum": 0.9, "weight_decay": 1e-2},
    "nesterov": {"compressor": BlockTopK(0.02, wire_dtype=torch.float16), "momentum": 0.9, "nesterov": True},
    "behind": {"compressor": BlockTopK(0.01), "memory": Residual(), "momentum": 0.9},
    "half": {
        "compressor": BlockTopK(0.01, wire_dtype=torch.bfloat16), "momentum": 0.9, "state_dtype": torch.bfloat16
    },
    "lars": {"cls": fusedcomp.LARS, "compressor": BlockTopK(0.01), "momentum": 0.9},
    "guarded": {
        "compressor": BlockTopK(0.01), "momentum": 0.9, "max_grad_norm": 0.5, "clip_scope": "bucket",
        "skip_nonfinite": True,
    },
    "warm": {"compressor": BlockTopK(0.002, warmup_steps=6), "momentum": 0.9, "decay": "decoupled"},
}  # fmt: skip


def make(model: nn.Module, name: str) -> fusedcomp.SGD:
    options = {"lr": 0.05, "bucket_cap_mb": 0.05} | CONFIGS[name]
    return options.pop("cls", fusedcomp.SGD)(model.parameters(), **options)


def _resume(rank: int, world: int, name: str) -> list[bytes]:
    """Replicas agree after every step; a second run that starts from a checkpoint in the middle ends with the same."""
    model, again = net(), net(1)
    optimizer, resumed = make(model, name), make(again, name)
    assert any(isinstance(e, BlockExchange) for e in optimizer._exchanges)
    digests = []
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
        digests.append(digest(model))
    assert digest(model) == digest(again)
    return digests


@pytest.mark.parametrize("name", CONFIGS)
def test_replicas_and_resume_are_bit_exact(name: str) -> None:
    first, *others = run(_resume, 2, name)
    assert all(other == first for other in others)


def test_four_replicas() -> None:
    first, *others = run(_resume, 4, "corrected")
    assert all(other == first for other in others)


def _mean_of_ranks(rank: int, world: int) -> int:
    """Against a simulation of all ranks by torch.topk of every block, bit for bit on dyadic data."""
    weight, optimizer, _ = stepper((3, BLOCK), BlockTopK(3 / 2048), Residual())
    generator = torch.Generator().manual_seed(0)
    residuals, expected = torch.zeros(world, 3, BLOCK), torch.zeros(3, BLOCK)
    for _ in range(8):
        # Distinct magnitudes, whose means over 2 or 4 ranks are exact.
        order = torch.stack([torch.randperm(3 * BLOCK, generator=generator) for _ in range(world)])
        gradients = (order + 1.0).view(world, 3, BLOCK)
        weight.grad = gradients[rank].clone()
        optimizer.step()
        residuals += gradients
        index = residuals.abs().topk(3).indices
        for r in range(world):
            sent = torch.zeros(3, BLOCK).scatter_(1, index[r], residuals[r].gather(1, index[r]))
            expected -= sent / world
            residuals[r] -= sent
        assert torch.equal(weight.detach(), expected)
    everyone = [b""] * world
    dist.all_gather_object(everyone, weight.detach().numpy().tobytes())
    assert len(set(everyone)) == 1
    return int(optimizer.metrics()["bytes_sent"])


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_apply_the_mean_of_what_is_largest_in_every_block(world: int) -> None:
    assert run(_mean_of_ranks, world) == [-(-(4 * 4 + 4 + 4 * 2 + 6 * 9) // 16) * 16] * world


def _absent(rank: int, world: int) -> tuple[bytes, list[bytes]]:
    """Rank 1 has no gradient of one weight, nobody any of another: states there as if its gradient were 0, or as is."""
    weights = [nn.Parameter(torch.ones(50, 50)) for _ in range(3)]
    optimizer = fusedcomp.SGD(weights, lr=0.1, momentum=0.9, compressor=BlockTopK(0.01))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        for number, weight in enumerate(weights):
            weight.grad = None
            if number == 0 or (number == 1 and rank == 0):
                weight.grad = torch.randn(50, 50, generator=generator)
        optimizer.step()
    assert torch.equal(weights[2].detach(), torch.ones(50, 50))
    assert (weights[1] != 1).any()
    states = optimizer.state[weights[1]] if rank == 1 else {}
    assert not any(value.any() for value in states.values() if isinstance(value, Tensor))
    return b"".join(w.detach().numpy().tobytes() for w in weights), []


def test_segments_without_a_gradient() -> None:
    first, second = run(_absent, 2)
    assert first == second


def _a_rank_fails(rank: int, world: int, guarded: bool) -> tuple[list[str], bytes]:
    """In step 3 rank 1's backward raises half-way: of what was not launched it sends nothing, and the run goes on."""
    model = net()
    optimizer = make(model, "guarded" if guarded else "corrected")
    first = next(p for p in model.parameters() if is_large(p))
    (exchange,) = [e for e in optimizer._exchanges if any(p is first for p in e.bucket.params)]
    messages = []
    for number in range(7):
        optimizer.zero_grad()
        if number == 3 and rank == 1:
            handle = first.register_hook(_fail)
            message = message_of(lambda n=number: loss_of(model, rank, n).backward())
            assert "no gradient today" in message
            messages.append(message_of(optimizer.zero_grad))
            handle.remove()
            payload = exchange.buffers.payload
            assert int(payload.header[0, 2]) == FAILED.value
            assert not payload.values.any()
            assert int(payload.starts[0, -1]) == exchange.count > 0
            continue
        loss_of(model, rank, number).backward()
        messages.append(message_of(optimizer.step))
    return messages, digest(model)


def _in_the_hook(rank: int, world: int) -> bytes:
    """DDP's hook does what the optimizer does, with momentum corrected or none."""
    for config in ({}, {"momentum": 0.9, "skip_nonfinite": True}):
        mine, theirs = net(), net()
        state = CompressionState(BlockTopK(0.02), mine.named_parameters(), **config)
        hooked, optimizer = wrapped(mine, state), torch.optim.SGD(mine.parameters(), lr=0.05)
        reference = fusedcomp.SGD(theirs.named_parameters(), lr=0.05, compressor=BlockTopK(0.02), **config)
        for number in range(6):
            step(hooked, optimizer, rank, number)
            step(theirs, reference, rank, number)
            for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    return digest(mine)


def test_in_the_hook_of_ddp() -> None:
    first, second = run(_in_the_hook, 2)
    assert first == second


def _with_jointspar(rank: int, world: int) -> bytes:
    model = net()
    optimizer = fusedcomp.SGD(model.named_parameters(), lr=0.05, momentum=0.9, compressor=BlockTopK(0.05))
    train(model, fusedcomp.JointSpar(optimizer, 0.5), 8, rank=rank)
    return digest(model)


def test_with_layers_drawn_by_jointspar() -> None:
    first, second = run(_with_jointspar, 2)
    assert first == second


def _fail(grad: Tensor) -> Tensor:
    raise ValueError("no gradient today")


@pytest.mark.parametrize("guarded", [False, True])
def test_a_failing_rank(guarded: bool) -> None:
    innocent, guilty = run(_a_rank_fails, 2, guarded)
    assert innocent[1] == guilty[1]
    assert "another rank failed" in innocent[0][3]
    assert [m for n, m in enumerate(innocent[0]) if n != 3] == ["nothing was raised"] * 6
    assert [m for n, m in enumerate(guilty[0]) if n != 3] == ["nothing was raised"] * 6


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    for density in (0.0, 1 / 2049, 1.5, True, None, float("nan")):
        assert message_of(lambda density=density: BlockTopK(density)) == (
            f"ValueError: BlockTopK: density must be in [1/2048, 1], at least one entry of every block, got {density!r}"
        )
    assert "BlockTopK: warmup_steps must be an integer >= 0, got -1" in message_of(lambda: BlockTopK(0.01, -1))
    message = message_of(lambda: BlockTopK(0.01, 2, warmup_densities=[0.1, 0.0001]))
    assert "warmup_densities must be in [1/2048, 1], at least one entry of every block, got 0.0001" in message
    assert "BlockTopK: wire_dtype must be" in message_of(lambda: BlockTopK(0.01, wire_dtype=torch.int8))
    assert BlockTopK(1 / 2048).per_block_at(0) == 1


def test_fp16_on_the_wire_does_not_go_with_bf16_states() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    compressor = BlockTopK(0.01, wire_dtype=torch.float16)
    message = message_of(lambda: fusedcomp.SGD([weight], 0.1, compressor=compressor, state_dtype=torch.bfloat16))
    assert "wire_dtype=torch.float16 cannot go with state_dtype=torch.bfloat16" in message


def test_lars_takes_norms_along() -> None:
    """The same trust ratios as with TopK: both send the norms of whole gradients."""
    weights = [nn.Parameter(torch.ones(64, 50)) for _ in range(2)]
    optimizers = [
        fusedcomp.LARS([weight], lr=1.0, momentum=0.0, compressor=compressor, memory=Residual())
        for weight, compressor in zip(weights, (BlockTopK(0.05), TopK(0.05)), strict=True)
    ]
    for _ in range(3):
        gradient = torch.randn(64, 50)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    norms = [optimizer._exchanges[0].bucket.norms for optimizer in optimizers]
    torch.testing.assert_close(norms[0][0], norms[1][0], rtol=1e-5, atol=0.0)

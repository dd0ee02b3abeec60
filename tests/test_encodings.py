"""Payloads say how they are encoded and of which step they are; ranks that differ in it raise, all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomp
from fusedcomp import LARS, SGD, Identity, NoMemory, Residual, TopK, _dispatch
from fusedcomp.kernels.headers import TRAILER_WORDS
from fusedcomp.kernels.segments import Operands
from ranks import loss_of, message_of, net, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of what calls kernels and twins directly


def headers(*rows: tuple[int, int, int]) -> torch.Tensor:
    """A rank per row: version, flags, step; one parameter with a gradient."""
    return torch.tensor(
        [[version, 0, flags, step, 1] for version, flags, step in rows], dtype=torch.int32, device=DEVICE
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(1, 0, 7), (1, 0, 7), (1, 0, 7)], 0),
        ([(257, 0, 7), (257, 1, 7), (257, 0, 7)], 0),
        ([(257, 0, 7), (257, 0, 7), (513, 0, 7)], 2),
        ([(1, 0, 7), (1, 0, 8), (1, 0, 7)], 2),
        ([(257, 0, 7), (1, 2, 7), (257, 0, 7)], 1),  # a rank that failed has no encoding
        ([(1, 2, 7), (257, 0, 7), (257, 0, 7)], 1),
        ([(1, 2, 7), (257, 0, 7), (513, 0, 7)], 3),
        ([(1, 2, 7), (1, 2, 7), (1, 2, 7)], 1),
    ],
)
@pytest.mark.parametrize("kernels", [False, True], ids=["twin", "kernel"])
def test_headers_are_compared(rows: list[tuple[int, int, int]], said: int, kernels: bool) -> None:
    module = _dispatch._KERNELS if kernels else _dispatch._TWINS
    status, nonfinite, present = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (3, 1, 1))
    module.headers.read_headers(headers(*rows), status, nonfinite, present)
    broken = int(any(flags & 1 for _, flags, _ in rows))
    assert status.tolist() == [broken, said, 0]
    module.headers.read_headers(headers((1, 2, 9)), status, nonfinite, present)
    assert int(nonfinite) == broken
    assert status[1] == said | 1, "a bucket takes nothing back of what another has said"


@pytest.mark.parametrize("ops", ["reference", "kernels"])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
def test_the_version_word_names_the_encoding(wire: torch.dtype, ops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMP_OPS", ops)
    weight = torch.nn.Parameter(torch.zeros(64, 64, device=DEVICE))
    optimizer = SGD([weight], lr=0.1, compressor=TopK(0.1, wire_dtype=wire))
    weight.grad = torch.randn(64, 64, device=DEVICE)
    optimizer.step()
    codes = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
    assert int(optimizer._exchanges[0].buffers.payload.header[0, 0]) == 1 + 256 * codes[wire] + (410 << 16)


def loss_of_linear(model: torch.nn.Linear, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(8, model.in_features, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(inputs).square().mean()


def step_of(model: torch.nn.Module, optimizer: fusedcomp.SGD, rank: int, step: int) -> str:
    def one() -> None:
        optimizer.zero_grad()
        (loss_of_linear if isinstance(model, torch.nn.Linear) else loss_of)(model, rank, step).backward()
        optimizer.step()

    return message_of(one)


def differing(rank: int, world: int) -> list[list[str]]:
    results = []
    for make in (SGD, LARS):  # LARS reads headers before it applies
        model = net()
        optimizer = make(
            model.parameters(), lr=0.01, momentum=0.9, compressor=TopK(0.01, wire_dtype=torch.bfloat16),
            bucket_cap_mb=0.05,
        )  # fmt: skip
        messages = [step_of(model, optimizer, rank, 0)]
        saved = optimizer.state_dict()
        messages.append(step_of(model, optimizer, rank, 1))
        if rank == 1:
            optimizer.param_groups[0]["compressor"] = TopK(0.01, wire_dtype=torch.float16)  # as many bytes
        messages.append(step_of(model, optimizer, rank, 2))
        optimizer.param_groups[0]["compressor"] = TopK(0.01, wire_dtype=torch.bfloat16)
        messages.append(step_of(model, optimizer, rank, 3))
        if rank == 1:
            optimizer.load_state_dict(saved)
        messages.append(step_of(model, optimizer, rank, 4))
        optimizer.load_state_dict(saved)
        messages.append(step_of(model, optimizer, rank, 5))
        results.append(messages)
    return results


def test_ranks_that_encode_differently_or_are_at_different_steps_raise() -> None:
    """On every rank, in the step in which it happens, and in no other."""
    for of_rank in run(differing, 2):
        for messages in of_rank:
            raised = [m.startswith("RuntimeError: ranks encode their payloads differently") for m in messages]
            assert raised == [False, False, True, False, True, False], messages
            assert [m for m, it in zip(messages, raised, strict=True) if not it] == ["nothing was raised"] * 4


def of_densities(rank: int, world: int) -> list[str]:
    model = torch.nn.Linear(128, 128, bias=False)  # k is 820 and 821: payloads of the same size
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, compressor=TopK(0.05))
    messages = [step_of(model, optimizer, rank, 0)]
    optimizer.param_groups[0]["compressor"] = TopK(0.0501 if rank else 0.05)
    messages.append(step_of(model, optimizer, rank, 1))
    return messages


def of_dense_steps(rank: int, world: int) -> list[str]:
    results = []
    for compressor in (Identity(), TopK(1.0)):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, compressor=compressor)
        saved = optimizer.state_dict()
        results.append(step_of(model, optimizer, rank, 0))
        if rank == 1:
            optimizer.load_state_dict(saved)
        results.append(step_of(model, optimizer, rank, 1))
    return results


@pytest.mark.parametrize(("body", "raised"), [(of_densities, [False, True]), (of_dense_steps, [False, True] * 2)])
def test_numbers_of_values_and_dense_steps_are_compared(body: Any, raised: list[bool]) -> None:
    for messages in run(body, 2):
        assert [m.startswith("RuntimeError: ranks encode") for m in messages] == raised, messages


@pytest.mark.parametrize(
    "steps", [(0, 0, 0, 0), (7, 7, 7), (64, 0), (61, 0), (3904, 0), (5, 6, 5, 5), (1_000_000,) * 64]
)
@pytest.mark.parametrize("kernels", [False, True], ids=["twin", "kernel"])
def test_sums_tell_differing_steps(steps: tuple[int, ...], kernels: bool) -> None:
    """Unless steps differ by a multiple of 64 x 61."""
    module = _dispatch._KERNELS if kernels else _dispatch._TWINS
    operands = Operands([torch.zeros(3, device=DEVICE)])
    total = torch.zeros(1 + TRAILER_WORDS, device=DEVICE)
    for step in steps:
        own, flag = torch.full_like(total, -7.0), torch.zeros(1, dtype=torch.int32, device=DEVICE)
        seed = torch.full_like(flag, step)
        module.headers.write_trailer(operands, flag, seed, own, failed=False)
        assert int(seed) == step + 1
        total += own
    status, present = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (3, 1))
    module.headers.read_trailer(total, status, None, present, world=len(steps))
    assert status.tolist() == [0, 2 * (len({step % 3904 for step in steps}) > 1), 0]


def of_changed_memories(rank: int, world: int) -> list[bool]:
    equal = []
    for change in ({"compressor": Identity()}, {"memory": Residual()}, {"memory": NoMemory()}):
        model = torch.nn.Linear(64, 64)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.05))
        for step in range(6):
            if step == 3:
                optimizer.param_groups[0].update(change)
            assert step_of(model, optimizer, rank, step) == "nothing was raised"
        everyone = [torch.empty_like(model.weight) for _ in range(world)]
        dist.all_gather(everyone, model.weight.detach())
        equal.append(all(torch.equal(other, everyone[0]) for other in everyone))
    return equal


def test_replicas_stay_equal_through_a_change_of_memory() -> None:
    """A velocity is its rank's own: it does not become the momentum of all."""
    assert run(of_changed_memories, 2) == [[True] * 3] * 2

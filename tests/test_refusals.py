"""What is refused, and how: the argument, the rule and the value; a parameter by its name."""

import math
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fusedcomp import LARS, SGD, GradScaler, JointSpar, MomentumCorrection, Threshold, TopK
from fusedcomp.ddp import CompressionState
from ranks import digest, loss_of, message_of, net, run

REFUSED = {
    "lr": (ValueError, lambda p: SGD(p, lr=-1.0), "-1.0"),
    "momentum": (ValueError, lambda p: SGD(p, momentum=1.0), "1.0"),
    "weight_decay": (ValueError, lambda p: SGD(p, weight_decay=-0.5), "-0.5"),
    "lr inf": (ValueError, lambda p: SGD(p, lr=math.inf), "finite and >= 0, got inf"),
    "lr nan": (ValueError, lambda p: SGD(p, lr=torch.tensor(math.nan)), "finite and >= 0, got nan"),
    "lr tensor": (ValueError, lambda p: SGD(p, lr=torch.tensor(-1.0)), "finite and >= 0, got -1.0"),
    "momentum None": (ValueError, lambda p: SGD(p, momentum=None), "in [0, 1), got None"),
    "momentum x": (ValueError, lambda p: SGD([{"params": p, "momentum": "x"}], lr=0.1), "in [0, 1), got 'x'"),
    "weight_decay x": (ValueError, lambda p: SGD(p, weight_decay="x"), "finite and >= 0, got 'x'"),
    "weight_decay inf": (ValueError, lambda p: SGD(p, weight_decay=math.inf), "finite and >= 0, got inf"),
    "weight_decay True": (ValueError, lambda p: SGD(p, weight_decay=True), "finite and >= 0, got True"),
    "weight_decay array": (ValueError, lambda p: SGD(p, weight_decay=numpy.array([0.5])), "got array([0.5])"),
    "eps None": (ValueError, lambda p: LARS(p, eps=None), "finite and >= 0, got None"),
    "dampening tensor": (ValueError, lambda p: SGD(p, dampening=torch.zeros(2)), "dampening=tensor([0., 0.])"),
    "bucket_cap_mb huge": (ValueError, lambda p: SGD(p, bucket_cap_mb=10**400), "finite and > 0, got 1000"),
    "memory False": (TypeError, lambda p: CompressionState(TopK(0.1), memory=False), "NoMemory(), got False"),
    "memory []": (TypeError, lambda p: CompressionState(TopK(0.1), memory=[]), "NoMemory(), got []"),
    "params": (TypeError, lambda p: CompressionState(TopK(0.1), torch.zeros(2)), "pairs, got Tensor"),
    "params too": (TypeError, lambda p: CompressionState(TopK(0.1), 3), "pairs, got int"),
    "warmup_densities": (
        TypeError,
        lambda p: TopK(0.1, warmup_steps=3, warmup_densities=torch.tensor(0.5)),
        "got tensor(0.5000)",
    ),
    "device": (ValueError, lambda p: GradScaler("x"), "'cuda' or 'cpu', got 'x'"),
    "device too": (ValueError, lambda p: GradScaler(0), "'cuda' or 'cpu', got 0"),
    "budget": (ValueError, lambda p: JointSpar(SGD(p), 10**400), "in (0, 1], a share of the blocks, got 1000"),
    "density of Threshold": (
        ValueError,
        lambda p: SGD(p, compressor=Threshold.from_density(1e-300)),
        "1e-300 asks for a value of",
    ),
    "nesterov": (ValueError, lambda p: SGD(p, nesterov=True), "momentum > 0"),
    "dampening": (ValueError, lambda p: SGD(p, momentum=0.9, dampening=0.5), "0.5"),
    "foreach": (ValueError, lambda p: SGD(p, foreach=True), "True"),
    "fused": (ValueError, lambda p: SGD(p, fused=True), "True"),
    "differentiable": (ValueError, lambda p: SGD(p, differentiable=True), "True"),
    "capturable": (ValueError, lambda p: SGD(p, capturable=True), "True"),
    "colour": (TypeError, lambda p: SGD(p, colour=1), "unexpected keyword"),
    "compressor": (TypeError, lambda p: SGD(p, compressor="topk"), "'topk'"),
    "memory": (TypeError, lambda p: SGD(p, memory=3), "3"),
    "bucket_cap_mb": (ValueError, lambda p: SGD(p, bucket_cap_mb=0), "> 0, got 0"),
    "bucket_cap_mb inf": (ValueError, lambda p: SGD(p, bucket_cap_mb=float("inf")), "finite and > 0, got inf"),
    "maximize": (TypeError, lambda p: SGD(p, maximize=1), "True or False, got 1"),
    "nesterov too": (TypeError, lambda p: SGD(p, momentum=0.9, nesterov="yes"), "True or False, got 'yes'"),
    "overlap": (TypeError, lambda p: SGD(p, overlap=None), "True or False, got None"),
    "exclude_1d_from_trust": (TypeError, lambda p: LARS(p, exclude_1d_from_trust=0), "True or False, got 0"),
    "exclude_1d_from_decay": (TypeError, lambda p: LARS(p, exclude_1d_from_decay=[]), "True or False, got []"),
    "masking": (TypeError, lambda p: MomentumCorrection(masking=1), "True or False, got 1"),
    "trust_coefficient": (ValueError, lambda p: LARS(p, trust_coefficient=0.0), "0.0"),
    "eps": (ValueError, lambda p: LARS(p, eps=-1.0), "-1.0"),
    "density": (ValueError, lambda p: TopK(0.0), "0.0"),
    "density too": (ValueError, lambda p: TopK(1000), "1000"),
    "density True": (ValueError, lambda p: TopK(True), "True"),
    "warmup_steps": (ValueError, lambda p: TopK(0.1, warmup_steps=-1), "-1"),
    "selection": (ValueError, lambda p: TopK(0.1, selection="best"), "'best'"),
    "scope": (ValueError, lambda p: TopK(0.1, scope="layer"), "'layer'"),
    "process_group": (TypeError, lambda p: SGD(p, process_group="x"), "ProcessGroup or None, got 'x'"),
    "process_group too": (ValueError, lambda p: SGD(p, process_group=dist.ProcessGroup(0, 1)), "not initialised"),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_bad_arguments_fail_at_construction(argument: str) -> None:
    """With the argument, the rule and the value."""
    kind, build, value = REFUSED[argument]
    with pytest.raises(kind) as caught:
        build(net().parameters())
    assert argument.split()[0] in str(caught.value)
    assert value in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("process_group", None), ("overlap", False), ("bucket_cap_mb", 1.0), ("state_dtype", torch.bfloat16)],
)
def test_what_holds_for_all_groups_is_refused_in_one(argument: str, value: object) -> None:
    """It would be ignored; keys that others put there, such as a name, are theirs."""
    model = net()
    optimizer = SGD([{"params": model[0].parameters(), "name": "first", "lr_scale": 0.1}], lr=0.1)
    rest = {"params": model[2].parameters(), argument: value}
    for build in (lambda: SGD([rest], lr=0.1), lambda: optimizer.add_param_group(rest)):
        with pytest.raises(ValueError, match=argument) as caught:
            build()
        assert repr(value) in str(caught.value)
    assert len(optimizer.param_groups) == 1


LATER = [
    ("momentum", 2.0), ("momentum", None), ("lr", -1.0), ("lr", math.nan), ("lr", "x"), ("weight_decay", -1.0),
    ("weight_decay", "x"), ("nesterov", "x"), ("maximize", 2), ("dampening", 0.5), ("max_grad_norm", 1.0),
    ("memory", 3), ("compressor", "topk"), ("trust_coefficient", None), ("eps", -1.0),
]  # fmt: skip


def values_put_in_later(rank: int, world: int) -> tuple[list[tuple[str, bool]], bytes]:
    """On the last rank alone. What every rank then hears, whether the group is as it was; and the parameters."""
    model = net()
    optimizer = LARS(model.parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.1))
    heard = []
    for step, (argument, value) in enumerate(LATER):
        before = dict(optimizer.param_groups[0])
        optimizer.zero_grad()
        if rank == world - 1:
            optimizer.param_groups[0][argument] = value

        def update(step: int = step) -> None:
            loss_of(model, rank, step).backward()
            optimizer.step()

        heard.append((message_of(update), optimizer.param_groups[0] == before))
        optimizer.zero_grad()
        update()
    return heard, digest(model)


@pytest.mark.parametrize("world", [1, 2])
def test_bad_values_put_into_a_param_group_are_refused_on_all_ranks(world: int) -> None:
    """The group is as it was, the others hear of it, and training goes on, with the same parameters everywhere."""
    *others, (heard, bits) = run(values_put_in_later, world)
    for (argument, value), (message, restored) in zip(LATER, heard, strict=True):
        assert restored
        assert "param group 0 was changed to what it cannot be, and is again as it was: LARS" in message
        assert argument in message
        assert repr(value) in message
    for told, same in others:
        assert all("failed" in message and restored for message, restored in told), told
        assert same == bits


def rates_put_in_between(rank: int, world: int) -> tuple[list[str], bytes]:
    """On the last rank alone."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.1))
    heard = []
    for step, lr in enumerate(("x", math.nan, None, 0.1)):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if rank == world - 1:
            optimizer.param_groups[0]["lr"] = lr
        heard.append(message_of(optimizer.step))
    return heard, digest(model)


@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_rate_between_backward_and_step_leaves_the_step_whole(world: int) -> None:
    """What was sent is applied with the rate that was there; who put the other in hears why, and its peers that."""
    *others, (heard, bits) = run(rates_put_in_between, world)
    for lr, message in zip(("'x'", "nan", "None"), heard, strict=False):
        assert f"is again as it was: SGD: lr must be finite and >= 0, got {lr}" in message
    assert heard[3] == "nothing was raised"
    for told, same in others:
        assert all("What had been sent was applied on all ranks alike" in message for message in told[:3]), told
        assert told[3] == "nothing was raised"
        assert same == bits


NEUTRAL = {"foreach": None, "fused": False, "differentiable": False, "capturable": False}


def test_neutral_torch_arguments_are_accepted() -> None:
    SGD(net().parameters(), 0.1, 0.9, 0, 1e-4, True, **NEUTRAL)
    optimizer = SGD([{"params": net().parameters(), "dampening": 0, **NEUTRAL}], lr=0.1)
    flagged = torch.optim.SGD(net().parameters(), lr=0.3, foreach=True)  # how torch computes is no part of the state
    optimizer.load_state_dict(flagged.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.param_groups[0]["foreach"] is None


@pytest.mark.parametrize("argument", ["dampening", *NEUTRAL])
def test_torch_arguments_are_refused_in_a_param_group_too(argument: str) -> None:
    model = net()
    optimizer = SGD(model[0].parameters(), lr=0.1)
    rest = {"params": model[2].parameters(), argument: True}
    for build in (lambda: SGD([rest], lr=0.1), lambda: optimizer.add_param_group(rest)):
        with pytest.raises(ValueError, match=f"does not take {argument}=True"):
            build()
    assert len(optimizer.param_groups) == 1


def test_numpy_scalars_stand_for_numbers() -> None:
    """And are kept as Python's, so that ranks compare equal and checkpoints load with weights_only."""
    number, flag = numpy.float32(0.5), numpy.bool_(True)
    compressor = TopK(number, warmup_steps=numpy.int64(5))
    assert compressor == TopK(0.5, warmup_steps=5)
    assert repr(compressor) == repr(TopK(0.5, warmup_steps=5))
    optimizer = LARS(
        net().parameters(), lr=numpy.float32(0.5), momentum=number, weight_decay=numpy.int64(1), nesterov=flag,
        trust_coefficient=number, eps=number, exclude_1d_from_trust=flag, maximize=flag, overlap=flag,
        bucket_cap_mb=numpy.float64(7), compressor=compressor, memory=MomentumCorrection(masking=flag),
    )  # fmt: skip
    kinds = {type(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert kinds == {float, int, bool, TopK, MomentumCorrection}
    assert optimizer.param_groups[0]["memory"].masking is True


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(4, 4, dtype=torch.complex64), "complex64"),
        (lambda: torch.zeros(4, 4, dtype=torch.float64), "float64"),
        (lambda: torch.zeros(4, 4, device="meta"), "meta"),
        (lambda: torch.zeros(8, 8)[:, ::2], "gaps or overlaps"),
        (lambda: torch.zeros(4, 1).expand(4, 4), "gaps or overlaps"),
    ],
)
def test_unsupported_parameters_are_named(make: Callable[[], torch.Tensor], reason: str) -> None:
    named = [("ok", nn.Parameter(torch.zeros(3))), ("encoder.weight", nn.Parameter(make()))]
    with pytest.raises(NotImplementedError, match=r"encoder\.weight") as caught:
        SGD(named, lr=0.1)
    assert reason in str(caught.value)


def test_dtensors_are_refused_by_name() -> None:
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = nn.Parameter(distribute_tensor(torch.zeros(4, 4), DeviceMesh("cpu", [0])))
        with pytest.raises(NotImplementedError, match="'w' is a DTensor"):
            SGD([("w", sharded)], lr=0.1)
    finally:
        dist.destroy_process_group()


def test_sparse_gradients_are_refused_by_name() -> None:
    table = nn.Embedding(100, 64, sparse=True)
    optimizer = SGD(table.named_parameters(), lr=0.1, compressor=TopK(0.01))
    table(torch.tensor([3])).sum().backward()
    with pytest.raises(NotImplementedError, match=r"'weight' is sparse.*sparse=False"):
        optimizer.step()

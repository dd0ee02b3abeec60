"""Two levels: the oracle is the flat optimizer between nodes, fed with each node's mean gradient."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomp import LARS, SGD, Identity, NoMemory, Residual, TopK
from fusedcomp.collectives import Group
from fusedcomp.ddp import CompressionState, compress_hook
from fusedcomp.levels import Levels
from ranks import batch, digest, loss_of, message_of, net, run


def grid(rank: int, world: int, per_node: int = 2) -> tuple[Any, Any]:
    """(this node's ranks, the ranks of this place in all nodes)."""
    nodes = world // per_node
    intra = [dist.new_group(list(range(n * per_node, (n + 1) * per_node))) for n in range(nodes)]
    inter = [dist.new_group(list(range(place, world, per_node))) for place in range(per_node)]
    return intra[rank // per_node], inter[rank % per_node]


def node_mean(model: nn.Module, intra: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=intra)
            param.grad /= dist.get_world_size(intra)


TENSOR = TopK(0.05, scope="tensor")  # does not ask which parameters share a shard
CONFIGS: list[dict[str, Any]] = [
    {"compressor": TENSOR, "momentum": 0.9, "weight_decay": 1e-2},
    {"compressor": TENSOR, "momentum": 0.9, "nesterov": True, "maximize": True},
    {"compressor": TENSOR},
    {"compressor": TENSOR, "memory": NoMemory()},
    {"compressor": TopK(0.05, scope="tensor", warmup_steps=6), "momentum": 0.9},
    {"compressor": TopK(1.0), "momentum": 0.9},
    {"compressor": TENSOR, "momentum": 0.9, "skip_nonfinite": True},
    {"compressor": TopK(0.05, scope="tensor", wire_dtype=torch.bfloat16), "momentum": 0.9},
    {"cls": LARS, "compressor": TENSOR, "momentum": 0.9},
    {"compressor": Identity(), "momentum": 0.9, "weight_decay": 1e-2},
]
IDS = [f"{i}-{c.get('cls', SGD).__name__}" for i, c in enumerate(CONFIGS)]


def build(model: nn.Module, config: dict[str, Any], **more: Any) -> Any:
    options = {"lr": 0.05} | config | more
    return options.pop("cls", SGD)(model.named_parameters(), **options)


def _flat_between_nodes(rank: int, world: int, config: dict[str, Any]) -> tuple[bytes, int, int]:
    intra, inter = grid(rank, world)
    mine, theirs = net(), net()
    optimizer = build(mine, config, process_group=(intra, inter))
    reference = build(theirs, config, process_group=inter, overlap=False)
    for number in range(9):
        optimizer.zero_grad()
        loss_of(mine, rank, number).backward()
        optimizer.step()
        reference.zero_grad()
        loss_of(theirs, rank, number).backward()
        node_mean(theirs, intra)
        reference.step()
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            # Dense buckets are summed in another order; what rounds to another bf16 differs by 2 ** -8 of an entry.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4 if "bfloat16" in str(config) else 1e-6)
    held = sum(s["residual"].numel() for s in optimizer.state.values() if "residual" in s)
    sent = optimizer.metrics()
    assert (int(sent["bytes_intra"]) > 0) == (not isinstance(config["compressor"], Identity))
    return digest(mine), held, int(sent["bytes_sent"])


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_two_levels_are_the_flat_optimizer_between_nodes(config: dict[str, Any]) -> None:
    results = run(_flat_between_nodes, 4, config)
    assert len({digest for digest, _, _ in results}) == 1
    if isinstance(config["compressor"], TopK) and not isinstance(config.get("memory"), NoMemory):
        held = [held for _, held, _ in results]
        assert held[0] + held[1] == held[2] + held[3] == 16 * 32 * 9 + 64 * 512  # once a node
        assert min(held) > 0


def _other_grids(rank: int, world: int, per_node: int) -> bytes:
    """One node of all, and nodes of one."""
    model = net()
    optimizer = build(model, CONFIGS[0], process_group=grid(rank, world, per_node))
    reference = net()
    plain = build(reference, CONFIGS[0] | ({"process_group": None} if per_node == 1 else {}), overlap=False)
    for number in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        optimizer.step()
        if per_node == 1:  # the flat exchange itself
            plain.zero_grad()
            loss_of(reference, rank, number).backward()
            plain.step()
            assert digest(model) == digest(reference)
    return digest(model)


@pytest.mark.parametrize("per_node", [1, 2])
def test_degenerate_grids(per_node: int) -> None:
    assert len(set(run(_other_grids, 2, per_node))) == 1


def _mesh(rank: int, world: int) -> bytes:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "place"))
    model, other = net(), net()
    optimizer = build(model, CONFIGS[0], process_group=mesh)
    reference = build(other, CONFIGS[0], process_group=(mesh.get_group("place"), mesh.get_group("node")))
    for number in range(3):
        for m, o in ((model, optimizer), (other, reference)):
            o.zero_grad()
            loss_of(m, rank, number).backward()
            o.step()
    assert digest(model) == digest(other)
    return digest(model)


def test_a_device_mesh() -> None:
    assert len(set(run(_mesh, 4))) == 1


def _absent(rank: int, world: int) -> bytes:
    """Without a gradient: on one rank of a node, on a whole node, anywhere."""
    intra, inter = grid(rank, world)
    mine, theirs = net(), net()
    config = CONFIGS[0]
    optimizer = build(mine, config, process_group=(intra, inter), bucket_cap_mb=0.05)
    reference = build(theirs, config, process_group=inter, overlap=False)
    lacking = {1: [0], 2: [0, 1], 3: [0, 1, 2, 3], 4: [3]}  # step -> ranks whose large layer gets none
    for number in range(7):
        for model, o in ((mine, optimizer), (theirs, reference)):
            o.zero_grad()
            for param in model[6].parameters():
                param.requires_grad_(rank not in lacking.get(number, []))
            loss_of(model, rank, number).backward()
            for param in model[6].parameters():
                param.requires_grad_(True)
        there = torch.tensor([float(theirs[6].weight.grad is not None)])
        dist.all_reduce(there, group=intra)
        for param in theirs[6].parameters():  # a node's mean counts the missing one as zeros
            if there > 0 and param.grad is None:
                param.grad = torch.zeros_like(param)
        node_mean(theirs, intra)
        before = mine[6].weight.detach().clone()
        optimizer.step()
        reference.step()
        if number == 3:
            assert torch.equal(before, mine[6].weight)  # skipped, as torch does
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return digest(mine)


def test_parameters_without_gradients() -> None:
    assert len(set(run(_absent, 4))) == 1


def _void(rank: int, world: int) -> tuple[bytes, int]:
    """One rank of one node finds a NaN: the step is void on all of both, bit for bit."""
    model, unharmed = net(), net()
    groups = grid(rank, world)
    optimizer = build(model, CONFIGS[6], process_group=groups, bucket_cap_mb=0.05)
    reference = build(unharmed, CONFIGS[0] | {"weight_decay": 0.0}, process_group=groups, bucket_cap_mb=0.05)
    for number in range(8):
        bad = number in (1, 4, 5)
        before = digest(model)
        optimizer.zero_grad()
        (loss_of(model, rank, number) * (float("nan") if bad and rank == number % world else 1.0)).backward()
        optimizer.step()
        if bad:
            assert digest(model) == before
        else:
            reference.zero_grad()
            loss_of(unharmed, rank, number).backward()
            reference.step()
    assert digest(model) == digest(unharmed)
    return digest(model), optimizer.skipped


def test_void_steps() -> None:
    results = run(_void, 4)
    assert len(set(results)) == 1
    assert results[0][1] == 3


def _clipped(rank: int, world: int) -> bytes:
    """Clipped to max_grad_norm * sqrt(all ranks), before the node's mean."""
    intra, inter = grid(rank, world)
    mine, theirs = net(), net()
    optimizer = build(mine, CONFIGS[0], process_group=(intra, inter), max_grad_norm=0.1)
    reference = build(theirs, CONFIGS[0], process_group=inter, overlap=False)
    for number in range(4):
        optimizer.zero_grad()
        loss_of(mine, rank, number).backward()
        optimizer.step()
        reference.zero_grad()
        loss_of(theirs, rank, number).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1 * world**0.5)
        node_mean(theirs, intra)
        reference.step()
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    return digest(mine)


def test_clipping() -> None:
    assert len(set(run(_clipped, 4))) == 1


def _resume(rank: int, world: int) -> bytes:
    groups = grid(rank, world)
    config = CONFIGS[6]
    model = net()
    optimizer = build(model, config, process_group=groups)

    def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        for number in range(first, last):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()

    train(model, optimizer, 0, 5)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, 5, 10)
    other = net()
    other.load_state_dict(weights)
    resumed = build(other, config, process_group=groups)
    resumed.load_state_dict(saved)
    train(other, resumed, 5, 10)
    assert digest(model) == digest(other)
    return digest(model)


def test_resume_is_bit_exact() -> None:
    assert len(set(run(_resume, 4))) == 1


def _failure(rank: int, world: int) -> tuple[str, bytes]:
    """A rank breaks the contract: all ranks of both nodes are told, parameters stay equal, training goes on."""
    model = net()
    optimizer = build(model, CONFIGS[0], process_group=grid(rank, world), bucket_cap_mb=0.02)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        if number == 1 and rank == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        message = message_of(optimizer.step)
        if number == 1:
            told = message
        else:
            assert message == "nothing was raised"
    return told, digest(model)


def test_a_failure_reaches_all_ranks_of_all_nodes() -> None:
    results = run(_failure, 4)
    assert len({digest for _, digest in results}) == 1
    assert "was changed between backward" in results[2][0]
    for rank in (0, 1, 3):
        assert "another rank failed" in results[rank][0]


def _hook(rank: int, world: int) -> bytes:
    groups = grid(rank, world)
    mine, theirs = net(), net()
    state = CompressionState(TENSOR, mine.named_parameters(), process_group=groups, momentum=0.9)
    ddp = DistributedDataParallel(mine, bucket_cap_mb=0.02)
    ddp.register_comm_hook(state, compress_hook)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.05)
    reference = build(theirs, {"compressor": TENSOR, "momentum": 0.9}, process_group=groups)
    for number in range(6):
        for m, o in ((ddp, optimizer), (theirs, reference)):
            o.zero_grad()
            loss_of(m, rank, number).backward()
            o.step()
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert int(state.metrics()["bytes_intra"]) > int(state.metrics()["bytes_sent"])
    return digest(mine)


def test_the_ddp_hook_on_two_levels() -> None:
    assert len(set(run(_hook, 4))) == 1


def _changed(rank: int, world: int) -> str:
    optimizer = build(net(), {"compressor": TENSOR, "momentum": 0.9}, process_group=grid(rank, world))
    optimizer.param_groups[0]["memory"] = Residual()
    return message_of(optimizer.zero_grad)


def test_a_memory_that_is_refused_is_refused_later_too() -> None:
    assert all("MomentumCorrection()" in message for message in run(_changed, 4))


def _refused(rank: int, world: int) -> list[str]:
    intra, inter = grid(rank, world)
    crossed = grid(rank, world, 1)[1]  # all four
    return [
        message_of(lambda: build(net(), {"compressor": TENSOR, "memory": Residual(), "momentum": 0.9}, process_group=(intra, inter))),  # noqa: E501
        message_of(lambda: build(net().bfloat16(), {"compressor": TENSOR}, process_group=(intra, inter))),
        message_of(lambda: build(net(), CONFIGS[0], process_group=(crossed, inter))),
        message_of(lambda: build(net(), CONFIGS[0], process_group=(intra, inter, intra))),
    ]  # fmt: skip


def test_what_is_refused() -> None:
    for momentum, dtype, no_grid, three in run(_refused, 4):
        assert "MomentumCorrection()" in momentum
        assert "bfloat16" in dtype
        assert "grid" in no_grid
        assert "(intra_node, inter_node)" in three


def test_shards_are_dealt_by_size_and_stay() -> None:
    intra, params = Group(None), [torch.empty(n) for n in (5, 100, 7, 60, 50)]
    intra.world_size = 2
    levels = Levels(intra, Group(None))
    assert levels.deal(params) == [[0, 1, 2], [3, 4]]
    assert levels.deal([params[4], params[0]]) == [[1], [0]]
    assert levels.deal([torch.empty(1)]) == [[], [0]]  # the one that has less


def _more_ranks_than_parameters(rank: int, world: int) -> bytes:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, compressor=TopK(0.1), process_group=grid(rank, world))
    for number in range(3):
        optimizer.zero_grad()
        model(batch(rank, number)[0].flatten(1)).square().mean().backward()
        optimizer.step()
    return digest(model)


def test_a_rank_may_have_no_shard() -> None:
    assert len(set(run(_more_ranks_than_parameters, 4))) == 1


def _moved(rank: int, world: int) -> str:
    """A checkpoint of other places: a residual would be nobody's."""
    groups = grid(rank, world)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40))
    optimizer = SGD(model.parameters(), lr=0.1, compressor=TopK(0.1), process_group=groups)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    swapped = {0: 2, 2: 0, 1: 1, 3: 3}
    like = {k: torch.zeros_like(param) for k, param in enumerate(model.parameters())}
    saved["state"] = {swapped[k]: dict.fromkeys(fields, like[swapped[k]]) for k, fields in saved["state"].items()}
    return message_of(lambda: optimizer.load_state_dict(saved))


def test_a_checkpoint_of_other_places_is_refused() -> None:
    assert all("another rank of this node" in message for message in run(_moved, 4))

"""broadcast_buffers: every rank gets rank 0's, or their mean, in a collective per type; what it refuses.

And what docs/coming-from-ddp.md promises on several ranks, by its own script.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomp
import ranks
from ranks import message_of

TYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int16,
    torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


class Buffers(nn.Module):
    """Buffers of every type and layout, with other values on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.weight = nn.Parameter(torch.ones(3))
        for dtype in TYPES:
            values = torch.randint(0, 100, (2, 3), generator=generator).to(dtype)
            self.register_buffer(f"of_{dtype}".replace("torch.", ""), values)
        self.register_buffer("scalar", torch.tensor(float(rank)))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("absent", None)
        self.register_buffer("transposed", torch.randn(4, 5, generator=generator).t())
        self.register_buffer("strided", torch.randn(4, 6, generator=generator)[:, ::2])
        self.register_buffer("channels_last", torch.randn(2, 3, 4, 4, generator=generator).to(
            memory_format=torch.channels_last))  # fmt: skip
        self.register_buffer("expanded", torch.randn(1, 3, generator=generator).expand(5, 3))
        self.register_buffer("temporary", torch.randn(3, generator=generator), persistent=False)
        self.norm = nn.BatchNorm1d(4)
        self.norm(torch.randn(8, 4, generator=generator))
        self.same = nn.Sequential(self.norm)
        self.register_buffer("shared", self.norm.running_mean)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs) * self.weight.sum()


def bits(module: nn.Module) -> dict[str, bytes]:
    return {
        name: b.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, b in module.named_buffers()
    }


def counted(function: str) -> list[str]:
    """The types that a collective is called with from now on."""
    calls: list[str] = []
    real = getattr(dist, function)

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(str(tensor.dtype))
        return real(tensor, *args, **kwargs)

    setattr(dist, function, call)
    return calls


def of_rank_0(rank: int, world: int, wrapped: bool) -> tuple[bool, dict[str, Any], int, int]:
    module = Buffers(rank)
    strides = {name: b.stride() for name, b in module.named_buffers()}
    addresses = {name: b.data_ptr() for name, b in module.named_buffers()}
    broadcasts, sums = counted("broadcast"), counted("all_reduce")
    fusedcomp.broadcast_buffers(DistributedDataParallel(module, broadcast_buffers=False) if wrapped else module)
    in_place = strides == {name: b.stride() for name, b in module.named_buffers()}
    in_place &= addresses == {name: b.data_ptr() for name, b in module.named_buffers()}
    return in_place, bits(module), len(broadcasts), len(sums)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
def test_every_rank_has_the_buffers_of_rank_0(wrapped: bool) -> None:
    """In place, with one broadcast per type."""
    expected = bits(Buffers(0))
    for in_place, got, broadcasts, sums in ranks.run(of_rank_0, 2, wrapped):
        assert in_place
        assert got == expected
        assert (broadcasts, sums) == (len(TYPES), 0)


def mean(rank: int, world: int) -> tuple[dict[str, bytes], dict[str, bytes], int, int]:
    module, others = Buffers(rank), [Buffers(r) for r in range(world)]
    broadcasts, sums = counted("broadcast"), counted("all_reduce")
    fusedcomp.broadcast_buffers(module, average=True)
    expected = Buffers(0)
    each = [dict(other.named_buffers()) for other in others]
    for name, buffer in expected.named_buffers():
        if buffer.dtype.is_floating_point and name != "expanded":
            buffer.copy_((sum(other[name].double() for other in each) / world).to(buffer.dtype))
    expected.expanded = (sum(other["expanded"].double() for other in each) / world).float()
    module.expanded = module.expanded.contiguous()
    return bits(module), bits(expected), len(broadcasts), len(sums)


def test_floating_buffers_are_averaged() -> None:
    """Summed in fp64; everything else is rank 0's; all ranks have the same bits."""
    (got, expected, broadcasts, sums), *others = ranks.run(mean, 3)
    assert got == expected
    assert all(other[0] == got for other in others)
    floating = sum(dtype.is_floating_point for dtype in TYPES)
    assert (broadcasts, sums) == (len(TYPES) - floating, floating)


def mean_of_equals(rank: int, world: int) -> list[bool]:
    done = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        module = nn.Module()
        values = torch.cat([torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.tensor([-torch.inf])])
        module.register_buffer("table", values.to(dtype))
        fusedcomp.broadcast_buffers(module, average=True)
        done.append(torch.equal(module.table, values.to(dtype)))
    return done


def test_the_mean_of_equal_buffers_is_what_they_were() -> None:
    """On three ranks, where a sum in fp32 divided by 3 would not be; infinite masks too."""
    assert ranks.run(mean_of_equals, 3) == [[True] * 3] * 3


def nothing_to_send(rank: int, world: int) -> int:
    calls = counted("broadcast")
    fusedcomp.broadcast_buffers(nn.Linear(2, 2))
    fusedcomp.broadcast_buffers(nn.Sequential())
    return len(calls)


def test_a_module_without_buffers() -> None:
    assert ranks.run(nothing_to_send, 2) == [0, 0]


def in_a_subgroup(rank: int, world: int) -> tuple[float, str]:
    group = dist.new_group([1, 2])
    module = nn.Module()
    module.register_buffer("own", torch.tensor(float(rank)))
    said = message_of(lambda: fusedcomp.broadcast_buffers(module, group))
    return module.own.item(), said


def test_a_subgroup_has_the_buffers_of_its_first_rank() -> None:
    first, second, third = ranks.run(in_a_subgroup, 3)
    assert first == (0.0, "ValueError: this process is not a member of process_group")
    assert second == third == (1.0, "nothing was raised")


def test_one_process_changes_nothing() -> None:
    module = Buffers(3)
    before = bits(module)
    fusedcomp.broadcast_buffers(module)
    fusedcomp.broadcast_buffers(module, average=True)
    assert bits(module) == before


def lazy() -> nn.Module:
    return nn.LazyBatchNorm1d()


def sparse() -> nn.Module:
    module = nn.Module()
    module.register_buffer("graph", torch.eye(3).to_sparse())
    return module


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "module": (lambda: fusedcomp.broadcast_buffers([torch.ones(1)]), TypeError,
               "module must be a torch.nn.Module, got list"),
    "average": (lambda: fusedcomp.broadcast_buffers(nn.Linear(1, 1), average=1), TypeError,
                "average must be True or False, got 1"),
    "process_group": (lambda: fusedcomp.broadcast_buffers(nn.Linear(1, 1), "world"), TypeError,
                      "process_group must be a torch.distributed.ProcessGroup or None, got 'world'"),
    "lazy": (lambda: fusedcomp.broadcast_buffers(lazy()), ValueError, "buffer 'running_mean' has no values yet"),
    "meta": (lambda: fusedcomp.broadcast_buffers(nn.BatchNorm1d(2, device="meta")), ValueError,
             "buffer 'num_batches_tracked' has no values yet"),
    "sparse": (lambda: fusedcomp.broadcast_buffers(sparse()), NotImplementedError,
               "buffer 'graph' has layout torch.sparse_coo"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    action, kind, words = REFUSED[case]
    with pytest.raises(kind) as caught:
        action()
    assert words in str(caught.value)


def at_odds(rank: int, world: int) -> list[str]:
    """Ranks that were given something else; what each of them says, and whether they still work together."""
    torch.manual_seed(rank)
    norm = nn.BatchNorm1d(2 + rank)
    mine = nn.Sequential(nn.BatchNorm1d(2))
    if rank == 1:
        mine.register_buffer("extra", torch.ones(1))
    good = nn.Module()
    good.register_buffer("own", torch.tensor(float(rank)))
    said = [
        message_of(lambda: fusedcomp.broadcast_buffers(norm)),
        message_of(lambda: fusedcomp.broadcast_buffers(mine)),
        message_of(lambda: fusedcomp.broadcast_buffers(good, average=rank == 1)),
        message_of(lambda: fusedcomp.broadcast_buffers(good if rank == 0 else 3)),
    ]
    fusedcomp.broadcast_buffers(good)
    return [*said, str(good.own.item())]


def test_ranks_at_odds_all_raise() -> None:
    first, second = ranks.run(at_odds, 2)
    different = "ValueError: ranks were given different settings: "
    shape = "buffer 'running_mean' is torch.float32 (2,) on cpu on rank 0, torch.float32 (3,) on cpu on rank 1"
    extra = "buffer 'extra' is nothing on rank 0, torch.float32 (1,) on cpu on rank 1"
    average = "average is False on rank 0, True on rank 1"
    assert first[:3] == second[:3] == [different + shape, different + extra, different + average]
    assert first[3] == "ValueError: rank 1 refused its arguments; its own error says why"
    assert second[3] == "TypeError: module must be a torch.nn.Module, got int"
    assert first[4] == second[4] == "0.0"


# ---- docs/coming-from-ddp.md -----------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming-from-ddp.md"


def run_the_script(rank: int, world: int, script: str, folder: str) -> dict[str, Any]:
    """In the process group that is there; notes the buffers that the script has when it broadcasts them."""
    os.chdir(folder)
    before: list[dict[str, bytes]] = []
    broadcast_buffers = fusedcomp.broadcast_buffers

    def noting(module: nn.Module) -> None:
        before.append(bits(module))
        broadcast_buffers(module)

    names: dict[str, Any] = {}
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(fusedcomp, "broadcast_buffers", noting),
    ):
        exec(script, names)
    return {
        "parameters": ranks.digest(names["model"]),
        "before": before[-1],
        "buffers": bits(names["model"]),
        "images": len(names["sampler"]),
        "last batch": len(names["inputs"]),
    }


def test_replicas_end_equal_under_batchnorm_and_uneven_data(tmp_path: Path) -> None:
    """1003 images on two ranks, small last batches: parameters equal by themselves, statistics when broadcast."""
    (script,) = re.findall(r"^```python\n(# train\.py: .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    first, second = ranks.run(run_the_script, 2, script, str(tmp_path))
    assert first["parameters"] == second["parameters"]
    assert first["before"] != second["before"]
    assert first["buffers"] == second["buffers"] == first["before"]
    assert first["images"] == second["images"] == 502
    assert first["last batch"] == second["last batch"] == 502 % 32
    saved = [torch.load(tmp_path / f"optimizer-rank{rank}.pt", weights_only=True) for rank in range(2)]
    one, other = [next(s["residual"] for s in file["state"].values() if "residual" in s) for file in saved]
    assert not torch.equal(one, other)
    kept = torch.load(tmp_path / "model.pt", weights_only=True)
    assert kept["1.running_mean"].numpy().tobytes() == first["buffers"]["1.running_mean"]


def join_with_the_hook(rank: int, world: int) -> bytes:
    model = DistributedDataParallel(ranks.net())
    model.register_comm_hook(fusedcomp.ddp.CompressionState(fusedcomp.TopK(0.01)), fusedcomp.ddp.compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            ranks.loss_of(model, rank, step).backward()
            optimizer.step()
    return ranks.digest(model)


def test_the_hook_works_under_join() -> None:
    """When it ends, all ranks have the parameters of those that trained longest."""
    first, second = ranks.run(join_with_the_hook, 2)
    assert first == second


def clipped(rank: int, world: int, agree: bool) -> float:
    """The norm of an update, lr 1, where every rank's gradient is far longer than max_grad_norm, which is 1."""
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = fusedcomp.SGD([param], lr=1.0, max_grad_norm=1.0)
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(0 if agree else rank))
    (param * 100 * gradient).sum().backward()
    optimizer.step()
    return param.norm().item()


@pytest.mark.parametrize(("agree", "norm"), [(True, 2**0.5), (False, 1.0)], ids=["agree", "noise"])
def test_how_max_grad_norm_compares_to_clipping_the_mean(agree: bool, norm: float) -> None:
    for got in ranks.run(clipped, 2, agree):
        assert got == pytest.approx(norm, rel=0.02)

"""On a GPU: void steps in replayed graphs, the DDP hook's streams; two GPUs: hook and two levels over NCCL."""

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomp
from fusedcomp import CAT, SGD, BlockTopK, GradScaler, Identity, PacketCost, TopK
from fusedcomp.ddp import CompressionState, compress_hook
from gpu_nets import LinearLoss, wide_net

pytestmark = pytest.mark.gpu


def data(seed: int, steps: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    inputs = torch.randn(steps, 64, 512, device="cuda", generator=generator)
    return inputs, torch.randint(10, (steps, 64), device="cuda", generator=generator)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def replayed(captured: bool, voids: set[int], leave_out: bool) -> tuple[list[Tensor], int, float]:
    """60 steps with a loss scale; those in ``voids`` get an inf, or do not happen."""
    model = wide_net()
    scaler = GradScaler(init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, compressor=TopK(0.01), grad_scaler=scaler)
    inputs, targets = data(3, 60)
    x, y, poison = inputs[0].clone(), targets[0].clone(), torch.ones((), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y) * poison).backward()
        scaler.step(optimizer)
        scaler.update()

    def feed(number: int) -> None:
        x.copy_(inputs[number])
        y.copy_(targets[number])
        poison.fill_(float("inf") if number in voids else 1.0)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(10):
            feed(number)
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            step()
    for number in range(10, 60):
        if number in voids and leave_out:
            continue
        feed(number)
        graph.replay() if captured else step()
    torch.cuda.synchronize()
    return [p.detach().clone() for p in model.parameters()], optimizer.skipped, scaler.get_scale()


def test_void_steps_in_replayed_graphs() -> None:
    """Where the host is not asked: the verdict, the halves, the scale and the count are the device's."""
    voids = {11, 17, 18, 40, 59}
    without, none, _ = replayed(False, voids, leave_out=True)
    plain, skipped, scale = replayed(False, voids, leave_out=False)
    graph, skipped_too, scale_too = replayed(True, voids, leave_out=False)
    assert skipped == skipped_too == 5
    assert none == 0
    assert scale == scale_too == 1024.0 / 2**5
    assert same(plain, graph)
    assert same(plain, without)  # scales are powers of two
    assert all(p.isfinite().all() for p in plain)


LR = 2.0**-7  # products with it are exact: torch's SGD may fuse its multiply and add or not


def hooked(rank: int, config: dict[str, Any] | None, sleep: bool = False, **ddp: Any) -> list[Tensor]:
    """Parameters after training with the hook, or by plain DDP."""
    model = LinearLoss()
    wrapped = DistributedDataParallel(model, device_ids=[rank], **({"bucket_cap_mb": 1} | ddp))
    state = None if config is None else CompressionState(**config)
    if state is not None:
        wrapped.register_comm_hook(state, compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = wrapped(STEPS * rank + step)
        if sleep:
            torch.cuda._sleep(int(torch.randint(10**6, (1,), generator=generator)))
            if state is not None and state._exchanges is not None:
                with torch.cuda.stream(state._side):
                    torch.cuda._sleep(int(torch.randint(10**6, (1,), generator=generator)))
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def optimized(rank: int, config: dict[str, Any], **more: Any) -> list[Tensor]:
    model = LinearLoss()
    optimizer = SGD(model.parameters(), lr=LR, **config, **more)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(STEPS * rank + step).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def close(a: list[Tensor], b: list[Tensor]) -> None:
    """Up to the rounding of momentum, and of an update by each rank's entries in turn instead of by their sum."""
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


TENSOR = {"compressor": TopK(0.01, scope="tensor")}
STEPS = 12


def fronts(rank: int, world: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results = {
        "hook": hooked(rank, TENSOR),
        "view": hooked(rank, TENSOR, gradient_as_bucket_view=True),
        "static": hooked(rank, TENSOR, static_graph=True),
        "guarded": hooked(rank, TENSOR | {"skip_nonfinite": True, "max_grad_norm": 0.5}),
        "momentum": hooked(rank, TENSOR | {"momentum": 0.9}),
    }
    calm = results["hook"]
    assert same(calm, hooked(rank, TENSOR, sleep=True)), "streams"
    assert same(calm, results["view"])
    assert same(calm, results["static"])
    close(calm, optimized(rank, TENSOR))
    close(results["momentum"], optimized(rank, TENSOR | {"momentum": 0.9}))
    identity = hooked(rank, {"compressor": Identity()})
    close(identity, hooked(rank, None))
    if world == 2:
        assert same(identity, hooked(rank, None)), "a sum of two numbers has one order"
        both, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(2)][rank]
        momentum = TENSOR | {"momentum": 0.9}
        results["one node"] = optimized(rank, momentum, process_group=(both, alone))
        results["two nodes"] = optimized(rank, momentum, process_group=(alone, both))
        results["levels, guarded"] = optimized(rank, momentum, process_group=(both, alone), skip_nonfinite=True)
        close(results["two nodes"], optimized(rank, momentum))
        assert same(results["one node"], results["levels, guarded"])
        for collective in ("tree", "split"):
            results[collective] = optimized(rank, {"compressor": TopK(0.01, collective=collective), "momentum": 0.9})
        results["model"] = optimized(rank, {"compressor": TopK(0.01, scope="model"), "bucket_cap_mb": 1.0})
        results["blocks"] = optimized(rank, {"compressor": BlockTopK(0.01), "momentum": 0.9})
        results["tuned"] = optimized(rank, {"compressor": CAT(PacketCost())})
        results["narrow"] = optimized(rank, TENSOR, dense_dtype=torch.bfloat16)
    # No host synchronisation in a hook or an optimizer that may skip.
    model = wide_net()
    wrapped = DistributedDataParallel(model, device_ids=[rank])
    wrapped.register_comm_hook(CompressionState(TopK(0.01), skip_nonfinite=True), compress_hook)
    inputs, targets = data(rank, 8)
    for number, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        if number == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        model.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
    torch.cuda.set_sync_debug_mode("default")
    torch.save({name: [p.cpu() for p in params] for name, params in results.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.multigpu)])
def test_fronts_over_nccl(world: int) -> None:
    """Hook and optimizers agree, whatever DDP's options and the streams; replicas are the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(fronts, (world, folder), nprocs=world)
        every = [torch.load(f"{folder}/{rank}.pt") for rank in range(world)]
    for name, params in every[0].items():
        assert all(p.isfinite().all() for p in params), name
        assert all(same(params, other[name]) for other in every), name


def test_fp16_with_a_scaler() -> None:
    """A scale that overflows falls until it does not; the loss falls too."""
    model = wide_net()
    scaler = GradScaler(init_scale=2.0**40)
    optimizer = fusedcomp.SGD(model.parameters(), lr=0.05, momentum=0.9, compressor=TopK(0.05), grad_scaler=scaler)
    inputs, targets = data(0, 1)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(inputs[0]), targets[0])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert optimizer.skipped >= 10
    assert losses[-1] < 0.5 * losses[0]

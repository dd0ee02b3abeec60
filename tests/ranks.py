"""Run a function on several ranks (gloo processes) and collect what each returns; the first error wins."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Importing torch anew costs 5 s a job; a fork server that already holds it costs 0.5 s.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "fusedcomp"])


def _main(rank: int, world: int, store: str, out: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)
    warnings.filterwarnings("error", message="An output with one or more elements was resized")
    try:
        timeout = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
        out.put((rank, pickle.dumps(fn(rank, world, *args)), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        out.put((rank, None, traceback.format_exc()))
        out.close()
        out.join_thread()  # the message has left before the process does, without waiting for its peers
        os._exit(1)


def run(fn: Callable[..., Any], world: int, *args: Any, seconds: float = 120) -> list[Any]:
    """``fn(rank, world, *args)`` on ``world`` gloo ranks; their results by rank.

    Results come as bytes: a queue would pass a tensor's memory on, which is gone if its rank ends first.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = _CONTEXT.Queue()
        store = os.path.join(folder, "store")
        processes = [_CONTEXT.Process(target=_main, args=(r, world, store, out, fn, args)) for r in range(world)]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        try:
            while len(results) < world:
                rank, result, error = out.get(timeout=seconds)
                assert error is None, f"rank {rank}:\n{error}"
                results[rank] = pickle.loads(result)
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
    return [results[rank] for rank in range(world)]


def net(seed: int = 0) -> nn.Sequential:
    """Some layers large enough to be compressed, biases, a norm layer; smooth, so that a rounding stays a rounding."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )


def batch(rank: int, step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7919 * step + rank)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.cross_entropy(model(inputs), targets)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Some steps in one process, on the data of rank 0."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.step()


def average_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def digest(model: nn.Module) -> bytes:
    """The bits of all parameters."""
    return b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())


def message_of(action: Callable[[], Any]) -> str:
    """The type and text of the exception that ``action`` raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"

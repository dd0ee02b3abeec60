"""Many small trainings at once: teams of processes, each a process group of its own that trains one job at a time.

On one GPU all ranks of all teams share it, and exchange through gloo; where every rank of a team can have one, through
NCCL. Start the GPU's process server (nvidia-cuda-mps-control -d) first, or they take turns. Seconds are therefore no
measure of speed.

A job is whatever a script's own ``train(job)`` takes; ``prepare(device)``, called once in every process, returns it.
"""

import argparse
import contextlib
import hashlib
import math
import multiprocessing
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

TEAMS = 9  # of each GPU
_TIMEOUT = timedelta(seconds=120)

Prepare = Callable[[torch.device], Callable[[Any], Any]]


# ---- processes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """Sent in place of an outcome."""

    text: str


class Team:
    """The processes of one group. Given a job it trains; rank 0 sends the outcome, whoever fails its traceback."""

    def __init__(self, context: Any, world: int, device: str, store: str, prepare: Prepare) -> None:
        self.processes, self.connections = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            self.processes.append(
                context.Process(target=_rank, args=(rank, world, device, store, prepare, theirs), daemon=True)
            )
            self.processes[-1].start()
            theirs.close()
            self.connections.append(ours)
        self.job: Any = None

    def give(self, job: Any) -> None:
        self.job = job
        for connection in self.connections:
            connection.send(job)

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def _rank(rank: int, world: int, device: str, store: str, prepare: Prepare, connection: Connection) -> None:
    try:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high")
        own = torch.device(device)
        if device == "cuda":
            own = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(own)
        backend = backend_of(device, world)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=_TIMEOUT,
            device_id=own if backend == "nccl" else None,
        )  # fmt: skip
        train = prepare(own)
        while True:
            outcome = train(connection.recv())
            if rank == 0:
                connection.send(outcome)
    except EOFError:
        pass
    except BaseException:
        connection.send(Failure(f"rank {rank} failed\n{traceback.format_exc()}"))


def backend_of(device: str, world: int) -> str:
    return "nccl" if device == "cuda" and torch.cuda.device_count() >= world else "gloo"


@contextlib.contextmanager
def running(count: int, world: int, device: str, prepare: Prepare) -> Iterator[list[Team]]:
    """``count`` teams of ``world`` ranks. ``prepare`` and jobs are pickled: both come from the top of a module."""
    context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "fusedcomp"])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        teams = []
        for i in range(count):
            teams.append(Team(context, world, device, str(Path(folder) / f"store{i}"), prepare))
            ends.callback(teams[-1].end)
        yield teams


def train_all(teams: Sequence[Team], jobs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Every job on the next team that is free, with its outcome, in the order in which they end."""
    left = list(jobs)
    for team in teams[: len(left)]:
        team.give(left.pop(0))
    busy = {connection: team for team in teams if team.job for connection in team.connections}
    while busy:
        for connection in wait(list(busy)):
            team = busy.get(connection)
            if team is None or team.job is None:
                continue
            message = connection.recv()  # EOFError: a rank died without a word
            if isinstance(message, Failure):
                raise RuntimeError(f"{team.job}: {message.text}")
            job, team.job = team.job, None
            if left:
                team.give(left.pop(0))
            else:
                busy = {c: t for c, t in busy.items() if t is not team}
            yield job, message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=2, help="of every run; default: %(default)s")
    parser.add_argument("--teams", type=int, help=f"runs at a time; default: {TEAMS} for each GPU, 1 on the CPU")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a smoke test; its records do not count")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, ``teams`` filled in."""
    options = parser.parse_args()
    options.teams = options.teams or max(1, 0 if options.quick else TEAMS * torch.cuda.device_count())
    return options


# ---- in a training -------------------------------------------------------------------------------------------------


def graphed(model: nn.Module, sample: Tensor) -> nn.Module:
    """On CUDA, forward and backward in training as CUDA graphs of the sample's shape: a thousand launches become two.

    Evaluation, in whatever shape, is as before.
    """
    # The graphs write every batch where their sample was: not into the data that it is a view of.
    return torch.cuda.make_graphed_callables(model, (sample.clone(),)) if sample.is_cuda else model


def lr_factor(step: int, steps: int, warmup_steps: int, final: float = 0.1) -> float:
    """A linear rise, then a cosine to ``final``."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def equal_on_all_ranks(model: nn.Module) -> bool:
    """Are parameters and buffers the same, bit for bit?"""
    bits = hashlib.sha256()
    for tensor in model.state_dict().values():
        bits.update(tensor.cpu().numpy().tobytes())
    everyone = [b""] * dist.get_world_size()
    dist.all_gather_object(everyone, bits.digest())
    return len(set(everyone)) == 1


# ---- learning rates ------------------------------------------------------------------------------------------------


def best_rate(errors: Mapping[float, Sequence[float]]) -> float:
    """The learning rate with the lowest mean error on the validation split; one that diverged once has none."""
    return min(errors, key=lambda lr: statistics.fmean(e if math.isfinite(e) else math.inf for e in errors[lr]))


def is_at_edge(lr: float, grid: Sequence[float]) -> bool:
    return len(grid) > 1 and lr in (grid[0], grid[-1])

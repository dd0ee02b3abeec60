"""Local processes that exchange through torch.distributed, report to this one, and fail together.

gloo on the CPU; NCCL with a GPU for each rank where there are enough of them.
"""

import math
import multiprocessing
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusedcomp.demo import DemoError

# The fork server imports these once, instead of every rank; torch imports torch._dynamo when an optimizer is built.
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "fusedcomp.demo.train"]
# After a failure the other ranks get this long to report theirs: the earliest is the cause, the rest its consequences.
_GRACE_SECONDS = 2.0


class RankFailed(DemoError):
    """A rank raised, with its traceback as the message, or died."""


class _Failure(NamedTuple):
    when: float  # on the monotonic clock, which is one for all processes
    text: str


def backend(world_size: int) -> str:
    """``"nccl"`` where every rank can have a GPU, else ``"gloo"``."""
    return "nccl" if torch.cuda.device_count() >= world_size else "gloo"


def launch(work: Callable[..., None], *args: Any, world_size: int = 2) -> Iterator[Any]:
    """Run ``work(device, send, *args)`` on every rank; yield what the ranks ``send``, as it arrives.

    ``work`` is a module's function, since it is pickled; the process group is ready when it is called. Closing the
    iterator early ends the ranks.

    Raises:
        RankFailed: a rank raised or died. All ranks have been ended by then.
    """
    # Forked ranks start in a tenth of the time, but CUDA does not survive a fork once an import has touched it.
    context: Any = multiprocessing.get_context("forkserver" if backend(world_size) == "gloo" else "spawn")
    context.set_forkserver_preload(_PRELOAD)
    processes: list[Any] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                settings = (rank, world_size, str(Path(folder) / "store"), theirs, work, args)
                processes.append(context.Process(target=_rank, args=settings, daemon=True))
                connections.append(ours)
                processes[-1].start()
                theirs.close()  # the rank's is the only one left, so that its end is the end of the pipe
            yield from _receive(connections, processes)
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _receive(connections: Sequence[Connection], processes: Sequence[Any]) -> Iterator[Any]:
    """What the ranks send, until all have ended or one has failed."""
    failures: dict[Connection, _Failure] = {}
    running = dict(zip(connections, processes, strict=True))
    while running:
        ready = wait(list(running), timeout=_GRACE_SECONDS if failures else None)
        if not ready:
            break
        for connection in connections:
            if connection not in ready:
                continue
            try:
                message = connection.recv()
            except EOFError:
                code = _exit_code(running.pop(connection))
                if code != 0 and connection not in failures:  # it could not say why
                    text = f"rank {connections.index(connection)} died with exit code {code}"
                    failures[connection] = _Failure(-math.inf, text)
                continue
            if isinstance(message, _Failure):
                failures[connection] = message
            elif not failures:
                yield message
    if failures:
        raise RankFailed(min(failures.values()).text)


def _exit_code(process: Any) -> int:
    process.join()
    return process.exitcode


def _rank(
    rank: int, world_size: int, store: str, connection: Connection, work: Callable[..., None], args: Sequence[Any]
) -> None:
    """What a process does: the group, the work; its failure becomes a message before its sockets close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C also reaches the parent, which ends the ranks
    try:
        device = _join(rank, world_size, store)
        work(device, connection.send, *args)
        dist.destroy_process_group()
    except BaseException:
        connection.send(_Failure(time.monotonic(), f"rank {rank} failed\n{traceback.format_exc()}"))


def _join(rank: int, world_size: int, store: str) -> torch.device:
    """Initialise the process group; the device of this rank."""
    torch.set_num_threads(1)  # ranks share the cores, and one thread gives one order of summation
    chosen = backend(world_size)
    device = torch.device("cuda", rank) if chosen == "nccl" else torch.device("cpu")
    if chosen == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(chosen, init_method=f"file://{store}", rank=rank, world_size=world_size)
    return device

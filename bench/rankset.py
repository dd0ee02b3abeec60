"""The processes of a benchmark, one per GPU, and the line the parent talks to them on.

Commands and answers go through pipes: they cross no network, shaped or not, and need no namespace.
"""

import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from nodes import ROOT, Network, free_port

_GRACE = 10.0  # seconds for the peers of a rank that raised: either they raise too, or they wait for it for ever
# How NCCL says that two ranks talk, in the order of what to quote; it looks for sockets even where it then uses none.
_PROOF = ("via NET/", "via P2P", "via SHM", "NET/Socket")


class CellError(Exception):
    """All ranks answered, some with an error; they can be asked for the next thing."""


class Unavailable(Exception):
    """The ranks cannot do what was asked, and said so without having begun."""


class Hung(Exception):
    """A rank died or did not answer in time; all ranks have been killed."""


class RankSet:
    """``network.count`` nodes of ``per_node`` ranks, each running ``netlab_rank.py``."""

    def __init__(self, network: Network, per_node: int, device: str, quick: bool) -> None:
        self.world_size = network.count * per_node
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        port = free_port() if not network.is_shaped else 29511  # in a node's own namespace every port is free
        for rank in range(self.world_size):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(per_node),
                "MASTER_ADDR": network.address,
                "MASTER_PORT": str(port),
                "NCCL_DEBUG": "INFO",
                "NCCL_DEBUG_FILE": f"{self._folder.name}/nccl.%p",
                **network.environment(rank // per_node),
            }
            self._start(environment, device, quick)

    def _start(self, environment: dict[str, str], device: str, quick: bool) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, str(ROOT / "bench" / "netlab_rank.py"), str(theirs.fileno()), device]
        command += ["--quick"] if quick else []
        inherited, environment = [theirs.fileno()], os.environ | environment
        process = subprocess.Popen(command, env=environment, pass_fds=inherited, stdin=subprocess.DEVNULL)
        self._processes.append(process)
        theirs.close()  # so that a rank that dies is noticed
        self._connections.append(ours)

    def ask(self, do: str, seconds: float, **arguments: Any) -> list[Any]:
        """Let all ranks do something; what each of them answers, by rank.

        Raises:
            Unavailable: it is not possible here.
            CellError: it raised; the message is the first rank's traceback.
            Hung: a rank is gone, or had not answered after ``seconds``.
        """
        try:
            for connection in self._connections:
                connection.send((do, arguments))
        except OSError as error:
            self.kill()
            raise Hung(f"a rank was gone before {do}") from error
        answers = self._collect(do, time.monotonic() + seconds)
        for kind, exception in (("error", CellError), ("unavailable", Unavailable)):
            for rank, answer in sorted(answers.items()):
                if kind in answer:
                    raise exception(f"{do}, rank {rank}: {answer[kind]}")
        return [answers[rank]["result"] for rank in range(self.world_size)]

    def _collect(self, do: str, deadline: float) -> dict[int, dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.world_size:
            waiting = [c for rank, c in enumerate(self._connections) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    answers[rank] = {"error": "the process died"}
                    ready = []
            if not ready:
                self.kill()
                errors = [f"rank {rank}: {a['error']}" for rank, a in sorted(answers.items()) if "error" in a]
                raise Hung("\n".join([f"{do}: {len(answers)} of {self.world_size} ranks answered in time", *errors]))
            if any("error" in answer for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def transport(self) -> str | None:
        """The line of NCCL's log that proves how it connects ranks."""
        lines = [line for file in sorted(Path(self._folder.name).iterdir()) for line in file.read_text().splitlines()]
        for proof in _PROOF:
            for line in lines:
                if proof in line:
                    return line.partition("NCCL INFO ")[2] or line
        return None

    def kill(self) -> None:
        """End the ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """End the ranks; they have nothing to finish."""
        for connection in self._connections:
            connection.close()
        self.kill()
        self._folder.cleanup()

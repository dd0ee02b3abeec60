"""One rank of the end-to-end benchmark; started by rankset.py, told what to do through a pipe.

    python bench/netlab_rank.py PIPE DEVICE [--quick]

A command is the name of a method of ``Rank`` and its arguments. What it returns is the answer; so is its traceback if
it raises. The process ends when the parent closes the pipe.
"""

import argparse
import contextlib
import math
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import nodes

_TIMEOUT = timedelta(seconds=90)  # the parent kills earlier; this ends ranks whose parent is gone


def serve(connection: Connection, do: Callable[[str], Callable[..., Any]]) -> None:
    """Answer commands until the pipe is closed."""
    from rankset import Unavailable

    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = {"result": do(command)(**arguments)}
        except Unavailable as reason:
            answer = {"unavailable": str(reason)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        connection.send(answer)


class Rank:
    """A training, the row that exchanges its gradients at present, and what is measured of it."""

    replay: Callable[[], Any] | None = None

    def __init__(self, device: str, quick: bool) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.quick = int(os.environ["RANK"]), quick
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT)

    def load(self, model: str) -> dict[str, Any]:
        """Make the training and run it once, which compiles; what to note about it in records."""
        import torch

        import models

        world, gpus = int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
        if self.device.type == "cuda" and world > gpus:
            raise RuntimeError(f"a training needs a GPU for every rank: {world} ranks, {gpus} GPUs")
        self.training = models.TRAININGS[model](self.device, self.quick, self.rank)
        state = self.training.model.state_dict()
        self.initial = {name: value.clone() for name, value in state.items()}
        self.prepare("nocomm")
        self.release()
        peak = models.matmul_tflops(self.device, self.quick)
        return self.training.facts | {"flops": self.training.flops, "peak_tflops": peak}

    def probe(self) -> dict[str, float]:
        """See linkgate.py."""
        import linkgate

        return linkgate.probe(self.device, self.quick)

    # ---- a row -------------------------------------------------------------------------------------------------

    def prepare(self, row: str) -> None:
        """Start from the initial weights, with this way of exchanging, and settle."""
        import exchanges

        self.replay = None
        self.training.model.load_state_dict(self.initial)
        self.exchange = exchanges.EXCHANGES[row](self.training.model)
        self.steps = 0
        self.loss_first = self.step()
        for _ in range(exchanges.SETTLING_STEPS - 1):
            self.step()
        self._synchronise()
        if self.exchange.captured:
            self._capture()

    def _capture(self) -> None:
        """From here on a step is a replay, of the batch that comes next."""
        import torch

        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # autograd's nodes of parameters belong to the stream of their first use
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self._synchronise()
        # NCCL's watchdog asks for events while we capture: only this thread's calls are to be safe.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            loss = self.step()
        self.replay = lambda: (graph.replay(), loss)[1]

    def step(self) -> Any:
        """One training step; the loss."""
        if self.replay is not None:
            self.loss_last = self.replay()
            return self.loss_last
        from torch.profiler import record_function

        self.exchange.optimizer.zero_grad(set_to_none=True)
        with record_function("forward"):
            loss = self.training.loss(self.exchange.module, self.steps)
        with record_function("backward"):
            loss.backward()
        with record_function("step"):
            self.exchange.optimizer.step()
        self.steps += 1
        self.loss_last = loss.detach()
        return self.loss_last

    def stretch(self, steps: int) -> float:
        """Milliseconds per step, of the wall clock."""
        self._synchronise()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._synchronise()
        return (time.perf_counter() - begin) * 1e3 / steps

    def stretches(self, steps: int, count: int) -> list[float]:
        """``stretch`` several times."""
        return [self.stretch(steps) for _ in range(count)]

    def trace(self) -> dict[str, Any] | None:
        """The summary of a profiled step, on rank 0; see timeline.py."""
        import timeline

        return timeline.record(self.step, self.device, profiled=self.rank == 0)

    def check(self) -> dict[str, Any]:
        """What must hold for the row to count, and what its optimizer reports."""
        import exchanges

        return {
            "identical": exchanges.identical(list(self.training.model.parameters())),
            "loss_first": self.loss_first.item(),
            "loss_last": self.loss_last.item(),
            "sent": self.exchange.sent(),
        }

    def release(self) -> None:
        """Make the model free for the next row; also after a failure at any point."""
        self.replay = None
        if hasattr(self, "exchange"):
            self.exchange.release()
            del self.exchange

    def _synchronise(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- without a model ---------------------------------------------------------------------------------------

    def flat(self) -> dict[str, Any]:
        """See flat.py. Plain calls of all rows first: a failed capture can spoil everything after it."""
        import flat

        self.flats = flat.Flat(self.device, self.quick, flat.NVLINK, flat.NVLINK_SHAPE)
        return {name: self.flats.plain(name) for name in flat.NVLINK}

    def flat_graphs(self) -> dict[str, Any]:
        """After ``flat``."""
        return {name: self.flats.graph(name) for name in reversed(self.flats.contestants)}

    def links(self) -> dict[str, int]:
        """Before ``settle`` and ``travel``; what to note in records."""
        import torch

        import flat

        self.flats = flat.Flat(self.device, self.quick, flat.LINKS, flat.LINK_SHAPE)
        return {"elements": math.prod(self.flats.shape), "gpus": torch.cuda.device_count()}

    def settle(self, row: str) -> None:
        """Make a row of ``flat.LINKS``, while nothing is shaped."""
        self.flats.settle(row)

    def travel(self, row: str) -> dict[str, Any]:
        """Milliseconds of it, as the links are."""
        return self.flats.plain(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pipe", type=int)
    parser.add_argument("device", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    nodes.enter()  # before torch is imported, which is why nothing above imports it
    import harness  # noqa: F401 - makes the checkout importable

    connection = Connection(arguments.pipe)
    with contextlib.suppress(BrokenPipeError):  # the parent has gone, and with it whoever wants an answer
        serve(connection, Commands(arguments.device, arguments.quick))
    os._exit(0)  # communicators of several rows need not be taken down one by one


class Commands:
    """Looks up commands; ``start`` makes the rank, so that a failure to start is an answer, too."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.rank: Rank | None = None

    def __call__(self, name: str) -> Callable[..., Any]:
        return self.start if self.rank is None else getattr(self.rank, name)

    def start(self) -> None:
        self.rank = Rank(self.device, self.quick)


if __name__ == "__main__":
    main()

"""How everything in bench/ is timed, and the parameter lists of the cases.

    repeat  =  put inputs back -> flush L2 -> mark, run, mark -> synchronise
    figure  =  median, p20 and p80 of at least 30 repeats, taken in rounds: A A A B B B C C C, A A A B B B ...

"events" times the plain calls: what the host needs longer for than the device is in the figure, as in training.
"graph" replays the same calls from a CUDA graph: the device's time, without gaps between launches; the headline.

Importing this module makes the checkout importable, installed or not: import it before ``fusedcomp``.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_FLUSH_BYTES = 256 * 2**20  # five times the L2 of an H100
_COPY_BYTES = 2**30
_CYCLES_PER_SECOND = 2.0e9  # a little above the card's fastest clock, so that a hold is never too short
_LONGEST_HOLD = 0.1  # seconds
_FIRST_CALL_SECONDS = 45  # of a variant: torch.compile may take its time, but not everybody's


_BEGIN = time.perf_counter()


def log(message: str) -> None:
    """A line of progress, with the seconds since this process began."""
    print(f"[{time.perf_counter() - _BEGIN:6.1f} s] {message}", flush=True)


# ---- clocks --------------------------------------------------------------------------------------------------------


class CudaClock:
    """Marks on the current stream of a CUDA device."""

    warmup_seconds = 0.03

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._sink: Tensor | None = None

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Milliseconds; both marks must have passed."""
        return start.elapsed_time(end)

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.device)

    def flush(self, how: str) -> None:
        """Fill L2 with other data.

        After "write" it holds up to 50 MB that are yet to be written back, while the timed kernels run: about 17
        microseconds on an H100 that belong to no kernel. After "read" there are none.
        """
        if how == "write":
            self._buffer.zero_()
        else:
            self._sink = self._buffer.sum()

    def hold(self, seconds: float) -> None:
        """Keep the device busy, so that the host has queued what follows before it starts."""
        torch.cuda._sleep(int(min(seconds, _LONGEST_HOLD) * _CYCLES_PER_SECOND))

    def graph(self, run: Callable[[], Any], reset: Callable[[], Any]) -> Callable[[], Any]:
        """Capture ``run``, which must have run before (lazy compilation); the replay keeps the graph alive."""
        reset()
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()
        current.wait_stream(side)
        self.synchronise()
        reset()
        self.synchronise()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own stream behind as the current one
        return graph.replay


class HostClock:
    """The same interface without a GPU: finds errors in the scripts, its figures mean nothing."""

    warmup_seconds = 0.0

    def __init__(self, device: torch.device) -> None:
        torch.set_num_threads(1)
        self.device = device

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def synchronise(self) -> None:
        pass

    def flush(self, how: str) -> None:
        pass

    def hold(self, seconds: float) -> None:
        pass

    def graph(self, run: Callable[[], Any], reset: Callable[[], Any]) -> Callable[[], Any]:
        reset()
        run()
        return run


Clock = CudaClock | HostClock


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock(device)


# ---- measuring -----------------------------------------------------------------------------------------------------


def nothing() -> None:
    """The reset of what changes none of its inputs."""


@dataclass(frozen=True, eq=False)
class Variant:
    """Something to time. ``reset`` puts its inputs back before every repeat, outside the timed stretch."""

    name: str
    run: Callable[[], Any]
    reset: Callable[[], Any] = nothing
    timing: str = "events"  # or "graph"
    flush: str = "write"  # or "read"


@dataclass(frozen=True)
class Figure:
    """The repeats of one variant, in milliseconds."""

    device_ms: tuple[float, ...]
    host_ms: tuple[float, ...]  # until the call returned

    def quantile(self, q: float) -> float:
        return quantile(self.device_ms, q)

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def host_median(self) -> float:
        return quantile(self.host_ms, 0.5)


def quantile(values: Sequence[float], q: float) -> float:
    return torch.quantile(torch.tensor(values, dtype=torch.float64), q).item()


def ready(clock: Clock, variants: Sequence[Variant]) -> list[Variant]:
    """Variants that ran once, captured where they are to be; what fails is reported and left out."""
    kept = []
    for variant in variants:
        try:
            variant.reset()
            run = variant.run
            with time_limit(_FIRST_CALL_SECONDS):
                run()
            if variant.timing == "graph":
                run = clock.graph(run, variant.reset)
            clock.synchronise()
            kept.append(replace(variant, run=run))
        except Exception as error:
            log(f"left out: {variant.name} ({variant.timing}): {type(error).__name__}: {str(error)[:500]}")
    return kept


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the block takes longer."""

    def expired(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measure(clock: Clock, variants: Sequence[Variant], repeats: int, rounds: int) -> list[Figure]:
    """Time variants that are ``ready``, interleaved, so that drifts of the card hit all of them alike."""
    device: list[list[float]] = [[] for _ in variants]
    host: list[list[float]] = [[] for _ in variants]
    for variant in variants:
        _warm_up(clock, variant)
    for _ in range(rounds):
        for index, variant in enumerate(variants):
            for _ in range(-(-repeats // rounds)):
                on_device, on_host = _repeat(clock, variant)
                device[index].append(on_device)
                host[index].append(on_host)
    return [Figure(tuple(d), tuple(h)) for d, h in zip(device, host, strict=True)]


def _warm_up(clock: Clock, variant: Variant) -> None:
    """By time, not by count: short kernels need many repeats before the clocks of the card have settled."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < clock.warmup_seconds:
        _repeat(clock, variant)


def _repeat(clock: Clock, variant: Variant) -> tuple[float, float]:
    variant.reset()
    clock.flush(variant.flush)
    start, begin = clock.mark(), time.perf_counter()
    variant.run()
    returned, end = time.perf_counter(), clock.mark()
    clock.synchronise()
    return clock.between(start, end), (returned - begin) * 1e3


def copy_rate(clock: Clock, repeats: int) -> Figure:
    """Times of a device copy; ``copy_bytes`` are read and written."""
    source = torch.randn(copy_bytes(clock) // 8, device=clock.device)
    target = torch.empty_like(source)
    return measure(clock, [Variant("copy", lambda: target.copy_(source))], repeats, 1)[0]


def copy_bytes(clock: Clock) -> int:
    return 2 * (_COPY_BYTES if clock.device.type == "cuda" else 2**20)


def gb_per_s(nbytes: float, ms: float) -> float:
    return nbytes / ms / 1e6


# ---- the cases -----------------------------------------------------------------------------------------------------


def resnet50_shapes(blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> list[torch.Size]:
    """torchvision's resnet50 in its order: 161 tensors, 25.6 M elements."""
    shapes: list[tuple[int, ...]] = [(width, 3, 7, 7), (width,), (width,)]
    channels = width
    for stage, count in enumerate(blocks):
        inner, outer = width << stage, 4 * width << stage
        for block in range(count):
            for shape in ((inner, channels, 1, 1), (inner, inner, 3, 3), (outer, inner, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if block == 0:
                shapes += [(outer, channels, 1, 1), (outer,), (outer,)]
            channels = outer
    return [torch.Size(s) for s in [*shapes, (classes, channels), (classes,)]]


def gpt2_shapes(vocabulary: int = 50257, context: int = 1024, width: int = 768, layers: int = 12) -> list[torch.Size]:
    """GPT-2 small without the last norm's two vectors: 146 tensors, 124 M elements."""
    layer = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,),
        (width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [torch.Size(s) for s in [(vocabulary, width), (context, width), *layer * layers]]


def flat340m_shapes() -> list[torch.Size]:
    """One tensor; of two dimensions, because vectors are never compressed."""
    return [torch.Size((85_000, 4_000))]


SHAPES: dict[str, Callable[[], list[torch.Size]]] = {
    "resnet50": resnet50_shapes,
    "gpt2": gpt2_shapes,
    "flat340m": flat340m_shapes,
}

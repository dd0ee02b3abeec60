"""How fast is the network between the ranks of a group? Measured with the collectives that training uses.

    latency    a small all-gather takes (W - 1) of it: seconds a hop
    all-reduce 2 (W - 1) / W n bytes leave a rank and as many arrive; its rate is these bytes over the time
    all-gather (W - 1) n bytes

Before every measurement ranks meet in a barrier; figures are medians of repeats, of the slowest rank. Larger messages
are measured while they fit in what is left of the time, which is the same on all ranks: they take the same turns.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

SIZES = (2**16, 2**20, 2**23, 2**26)  # bytes: of an all-reduced tensor; of what an all-gather brings together
SECONDS = 20.0  # after which no larger message is tried
TIMEOUT = timedelta(seconds=60)  # of a group that is made for this: a rank that is gone does not hold up the others
_SMALL = 8  # bytes
_REPEATS, _SMALL_REPEATS = 5, 20


@dataclass(frozen=True)
class Rate:
    """What a collective reached.

    Args:
        collective: ``"all_reduce"`` or ``"all_gather"``.
        nbytes: of the whole message, bytes.
        seconds: it took, median of the slowest rank.
        bytes_per_s: that left a rank, and arrived there, per second, as in a ring.
    """

    collective: str
    nbytes: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True)
class Link:
    """What the network between the ranks of a group does.

    Args:
        latency_s: of a hop: a small all-gather takes ``world_size - 1`` of it, seconds.
        bandwidth_bytes_per_s: per rank and direction, of the largest all-reduce that was measured, bytes per second.
        world_size: ranks.
        rates: everything that was measured.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    world_size: int
    rates: tuple[Rate, ...] = ()


def measure_link(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    *,
    seconds: float = SECONDS,
) -> Link:
    """Measure the network between the ranks of a group; all of them must call it. The same figures on all ranks.

    Args:
        group: the ranks; None: the default group.
        device: where the messages are; None: the current CUDA device for NCCL, otherwise the CPU.
        seconds: after which no larger message is tried.

    Raises:
        RuntimeError: torch.distributed is not initialised, or has one rank.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("measure_link() needs torch.distributed.init_process_group()")
    world = dist.get_world_size(group)
    if world == 1:
        raise RuntimeError("measure_link() needs two ranks or more, got 1")
    meter = _Meter(group, world, _device(group, device))
    end = meter.now() + seconds
    latency = meter.seconds(lambda: meter.gather(_SMALL * world), _SMALL_REPEATS) / (world - 1)
    rates: list[Rate] = []
    for nbytes in SIZES:
        # As if time grew with the bytes: too much where latency counts, which errs on the safe side.
        expected = sum(rate.seconds for rate in rates[-2:]) * nbytes / rates[-1].nbytes if rates else 0.0
        if rates and meter.now() + expected * (_REPEATS + 1) > end:
            break
        rates += [meter.rate("all_reduce", nbytes), meter.rate("all_gather", nbytes)]
    return Link(latency, rates[-2].bytes_per_s, world, tuple(rates))


def _device(group: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _Meter:
    """Collectives of a group and how long they take."""

    def __init__(self, group: dist.ProcessGroup | None, world: int, device: torch.device) -> None:
        self.group, self.world, self.device = group, world, device

    def now(self) -> float:
        """A time that all ranks agree on: rank 0's, seconds."""
        return self._largest(time.monotonic() if dist.get_rank(self.group) == 0 else 0.0)

    def gather(self, nbytes: int) -> Callable[[], None]:
        """Bring together ``nbytes`` of all ranks."""
        # torch 2.13 calls it all_gather_single and deprecates the old name; 2.11 has only that.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        own = torch.zeros(max(1, nbytes // self.world), dtype=torch.uint8, device=self.device)
        everyone = torch.empty(self.world * len(own), dtype=torch.uint8, device=self.device)
        return lambda: gather(everyone, own, group=self.group)

    def reduce(self, nbytes: int) -> Callable[[], None]:
        """Sum ``nbytes`` of fp32 over ranks."""
        own = torch.zeros(nbytes // 4, device=self.device)
        return lambda: dist.all_reduce(own, group=self.group)

    def rate(self, collective: str, nbytes: int) -> Rate:
        """What a collective reaches."""
        make = self.reduce if collective == "all_reduce" else self.gather
        seconds = self.seconds(lambda: make(nbytes), _REPEATS)
        shares = 2 if collective == "all_reduce" else 1
        crossing = shares * (self.world - 1) / self.world * nbytes
        return Rate(collective, nbytes, seconds, crossing / seconds)

    def seconds(self, make: Callable[[], Callable[[], None]], repeats: int) -> float:
        """The median over repeats, of the slowest rank; the first run, which connects, does not count."""
        run, samples = make(), []
        for _ in range(repeats + 1):
            dist.barrier(self.group)
            self._synchronise()
            start = time.perf_counter()
            run()
            self._synchronise()
            samples.append(time.perf_counter() - start)
        return self._largest(statistics.median(samples[1:]))

    def _largest(self, value: float) -> float:
        tensor: Tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.item()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

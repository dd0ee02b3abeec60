"""What a sequence of calls runs on the device, from torch.profiler's trace: how many kernels, how long each takes."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import harness


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or fill on the device."""

    name: str
    us: float

    @property
    def is_kernel(self) -> bool:
        return not self.name.lower().startswith(("memcpy", "memset"))


def trace(clock: harness.Clock, reset: Callable[[], Any], run: Callable[[], Any]) -> list[Activity]:
    """Everything that ``run`` makes the device do, in order, from cold L2; empty where nothing can be traced."""
    if clock.device.type != "cuda":
        return []
    reset()
    clock.flush("write")
    clock.synchronise()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        clock.synchronise()
    on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [Activity(e.name, e.time_range.elapsed_us()) for e in sorted(on_device, key=lambda e: e.time_range.start)]


def durations(
    clock: harness.Clock, reset: Callable[[], Any], run: Callable[[], Any], repeats: int
) -> list[tuple[str, float]]:
    """(place and name, median microseconds) of every activity; empty if repeats did different things."""
    traces = [trace(clock, reset, run) for _ in range(repeats)]
    names = [[activity.name for activity in one] for one in traces]
    if any(other != names[0] for other in names):
        harness.log("the launches of repeats differ: not recorded one by one")
        return []
    return [
        (f"{place:02d} {_short(same[0].name)}", statistics.median(activity.us for activity in same))
        for place, same in enumerate(zip(*traces, strict=True), 1)
    ]


def _short(name: str) -> str:
    """Without return type, arguments, most of the template and namespaces that say nothing."""
    return name.removeprefix("void ").replace("at::native::", "").partition("(")[0][:60]

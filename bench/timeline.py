"""One training step as torch.profiler saw it: every kernel with its stream, start and duration, small enough to draw.

    kind      nccl, fusedcomp (our kernels), copy (memcpy, memset), model (all others)
    phase     forward, backward, step: where in the training loop the kernel was launched, on whatever thread
    exposed   time in which NCCL kernels were the only ones running

Without a GPU the operators of the host stand in for kernels, and threads for streams.
"""

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

PHASES = ("forward", "backward", "step")
_WARMUP = 2
_LONGEST_NAME = 48
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]


def record(step: Callable[[], Any], device: torch.device, profiled: bool) -> dict[str, Any] | None:
    """Run a few steps; the summary of the last one where ``profiled``. All ranks must call this alike."""
    if not profiled:
        for _ in range(_WARMUP + 1):
            _whole(step, device)
        return None
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    plan = schedule(wait=0, warmup=_WARMUP, active=1, repeat=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=activities, schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(path))
        ) as profiler:
            for _ in range(_WARMUP + 1):
                _whole(step, device)
                profiler.step()
        return summary(json.loads(path.read_text())["traceEvents"])


def _whole(step: Callable[[], Any], device: torch.device) -> None:
    """A step whose kernels have all run when it returns."""
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Of a Chrome trace: rows of [name, kind, phase, stream, start us, duration us] by start, and what they add to."""
    events = [e for e in events if e.get("ph") == "X"]
    categories = _DEVICE if any(e.get("cat") == "kernel" for e in events) else ("cpu_op",)
    ours = sorted((e for e in events if e.get("cat") in categories), key=lambda e: e["ts"])
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    phases = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in PHASES]
    begin = min((e["ts"] for e in [*ours, *phases]), default=0.0)
    rows = []
    for event in ours:
        arguments = event.get("args", {})
        launched = launches.get(arguments.get("correlation"), event["ts"])
        stream = arguments.get("stream", event.get("tid"))
        start, duration = round(event["ts"] - begin, 1), round(event["dur"], 1)
        name, category = event["name"], event["cat"]
        rows.append([shortened(name), kind(name, category), _phase(launched, phases), stream, start, duration])
    return {"columns": ["name", "kind", "phase", "stream", "start_us", "duration_us"], "events": rows} | _sums(rows)


def kind(name: str, category: str) -> str:
    if "nccl" in name.lower():
        return "nccl"
    if category in ("gpu_memcpy", "gpu_memset"):
        return "copy"
    return "fusedcomp" if re.fullmatch(r"_[a-z]\w*_kernel", name) else "model"  # how kernels/ names its kernels


def shortened(name: str) -> str:
    """A kernel's name without return type, namespaces and template arguments."""
    plain = name.removeprefix("void ").partition("<")[0].partition("(")[0]
    return plain.rpartition("::")[2][:_LONGEST_NAME]


def _phase(moment: float, phases: Sequence[Event]) -> str | None:
    for event in phases:
        if event["ts"] <= moment <= event["ts"] + event["dur"]:
            return event["name"]
    return None


def _sums(rows: Sequence[list[Any]]) -> dict[str, Any]:
    spans = {k: [(r[4], r[4] + r[5]) for r in rows if r[1] == k] for k in ("model", "fusedcomp", "copy", "nccl")}
    computing = [span for k in ("model", "fusedcomp", "copy") for span in spans[k]]
    return {
        "busy_ms": {k: covered(s) / 1e3 for k, s in spans.items()},
        "exposed_ms": (covered(computing + spans["nccl"]) - covered(computing)) / 1e3,
        "step_ms": max((r[4] + r[5] for r in rows), default=0.0) / 1e3,
    }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total

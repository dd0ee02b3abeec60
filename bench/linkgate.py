"""The gate before any row: does the shaped network carry what its nominal rate says, in short bursts and in bulk?

    all_gather of 0.2 and 0.6 MB a rank after 20 ms of idleness    at most 1.05 of nominal
    all_reduce of 100 MB                                           0.85 to 1.00 of nominal; at 25 Gbit/s from 0.75

Short messages are held to the upper bound alone: no burst may cross unshaped. How far they stay below it is latency of
this host's network stack (docs/decisions/0012-link-gate.md), which a row of short messages suffers and a row of long
ones does not; it stands in the record.

A rate is bytes that cross a node's link in one direction, over time. How many cross depends on NCCL's algorithm: a
ring moves (W - 1) x bytes or 2 (W - 1) / W x bytes over every link; the fewest that any algorithm could do with, N
nodes of W / N ranks, are (W - W / N) x bytes or 2 (N - 1) / N x bytes. With one rank a node they are the same. The
ring's must not be too slow, the fewest not too fast.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_IDLE = 0.020
_SPIN = 0.001  # seconds; sleeping is not exact

# Label -> (bytes a rank, repeats)
GATHERS = {"gather_0.2mb": (200_000, 15), "gather_0.6mb": (600_000, 15)}
BULK = "reduce_100mb"
REDUCES = {BULK: (100_000_000, 3)}


def bounds(label: str, rate_mbit: int) -> tuple[float, float]:
    """Shares of the nominal rate, which sockets on one host hardly fill at 25 Gbit/s."""
    return (0.0, 1.05) if label in GATHERS else (0.85 if rate_mbit <= 10_000 else 0.75, 1.00)


def probe(device: torch.device, quick: bool) -> dict[str, float]:
    """On every rank: its own bytes over the time until it has everybody's, in Gbit/s, median of the repeats."""
    gbps = {}
    for label, (nbytes, repeats) in {**GATHERS, **REDUCES}.items():
        nbytes, repeats = (min(nbytes, 8_000_000), 3) if quick else (nbytes, repeats)
        own = torch.ones(nbytes // 4, device=device)
        if label in GATHERS:
            everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            seconds = _timed(lambda e=everyone, o=own: dist.all_gather(e, o), device, repeats)
        else:
            seconds = _timed(lambda o=own: dist.all_reduce(o), device, repeats)
        gbps[label] = nbytes * 8e-9 / seconds
    return gbps


def _timed(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds. On a GPU by its own clock, from the start of the transfer's kernel to its end: launching it and noticing
    its end after 20 ms of idleness take the host half a millisecond, which is no property of the link."""
    samples = []
    for repeat in range(repeats + 1):
        start = _common_start(device)
        if device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            run()
            marks[1].record()
            torch.cuda.synchronize(device)
            seconds = marks[0].elapsed_time(marks[1]) * 1e-3
        else:
            run()
            seconds = time.perf_counter() - start
        if repeat > 0:  # the first one connects
            samples.append(seconds)
    return sorted(samples)[len(samples) // 2]


def _common_start(device: torch.device) -> float:
    """Wait idly for a moment that all ranks have agreed on: they share a host, and so its monotonic clock."""
    start = torch.tensor(time.perf_counter() + _IDLE, dtype=torch.float64, device=device)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    moment = start.item()
    time.sleep(max(0.0, moment - _SPIN - time.perf_counter()))
    while time.perf_counter() < moment:
        pass
    return moment


def judge(probes: Sequence[dict[str, float]], nodes: int, rate_mbit: int | None) -> dict[str, Any]:
    """The figures of all ranks' probes, in Gbit/s (the median rank's), and whether they pass; None: not judged."""
    world = len(probes)
    gate: dict[str, Any] = {"rate_mbit": rate_mbit, "ranks": world, "nodes": nodes}
    judged = rate_mbit is not None and nodes > 1
    faults = []
    for label in (*GATHERS, *REDUCES):
        own = sorted(p[label] for p in probes)[(world - 1) // 2]
        ring, fewest = crossing(label, world, nodes)
        slow, fast = ring * own, fewest * own
        gate[f"{label}_gbps"] = slow
        if fewest != ring and nodes > 1:
            gate[f"{label}_least_gbps"] = fast
        if judged:
            low, high = (bound * rate_mbit / 1000 for bound in bounds(label, rate_mbit))
            if slow < low or fast > high:
                faults.append(label)
    return gate | {"faults": faults, "passed": not faults if judged else None}


def crossing(label: str, world: int, nodes: int) -> tuple[float, float]:
    """Multiples of a rank's bytes that cross a link one way: in a ring, and at the least."""
    if label in GATHERS:
        return world - 1, world - world // nodes
    return 2 * (world - 1) / world, 2 * (nodes - 1) / nodes


def keeps_up(gate: dict[str, Any] | None) -> bool:
    """Did bulk reach what it must? For records of gates that did not judge it; true where there was no link."""
    if not gate or gate.get("rate_mbit") is None or f"{BULK}_gbps" not in gate:
        return True
    return gate[f"{BULK}_gbps"] >= bounds(BULK, gate["rate_mbit"])[0] * gate["rate_mbit"] / 1000


def worst(gate: dict[str, Any]) -> float:
    """The figure of a failed gate that is furthest from nominal, as a share of it."""
    shares = [gate[f"{label}_gbps"] / (gate["rate_mbit"] / 1000) for label in gate["faults"]]
    return max(shares, key=lambda share: abs(share - 1))

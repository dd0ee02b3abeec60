"""End to end: a training step on several GPUs against the rate of the links between them.

    python bench/netlab.py                          all of it on 4 GPUs, under 9 minutes; needs root and pyroute2
    python bench/netlab.py --quick --device cpu     two gloo ranks without namespaces: a smoke test

Every GPU, or two of them, is a node of its own behind a shaped link (nodes.py); plain NVLink is the third layout. One
set of processes per model and layout; the rate is changed under them and rows (exchanges.py) are swapped inside.

    cell  =  prepare the row unshaped -> set the rate -> warm up -> stretches of steps -> check -> record

A figure is the wall time of a step on rank 0, the median over stretches. No row is recorded whose losses are not finite
or whose parameters are not the same on all ranks, bit for bit; no cell at a rate that the network does not keep to
(linkgate.py). Records are written as cells finish. A rank that hangs is killed with its set, what is left of the set
goes on in new processes once, and the exit status is 1.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import harness
import linkgate
import models
import records
from exchanges import ALONE, EXCHANGES
from harness import log, quantile
from nodes import HostNetwork, Network, Nodes
from rankset import CellError, Hung, RankSet, Unavailable

FEW = ("nocomm", "in_step", "ddp_bf16", "powersgd1", "topk0.001", "hook0.001", "nocomm_graph", "topk0.001_graph")
ON_NVLINK = ("nocomm", "in_step", "ddp", "ddp_bf16", "powersgd1", "topk0.001", "nocomm_graph", "topk0.001_graph")
ON_2X2 = ("nocomm", "ddp", "ddp_bf16", "topk0.001", "topk0.001_2level", "hook0.001")
ALL_ROWS_AT = 10_000  # Mbit/s
# A profiler slows the host, which plain calls wait for.
TRACED = {"cuda": ("resnet50", "topk0.001_graph", ALL_ROWS_AT), "cpu": ("resnet50", "topk0.001", ALL_ROWS_AT)}

START_SECONDS, LOAD_SECONDS, PREPARE_SECONDS, CELL_SECONDS = 90, 150, 90, 40
LEAST_LEFT = {"set": 40.0, "cell": 12.0}  # seconds of the budget without which none is begun
TIMED_SECONDS = 2.2  # per cell, where steps are short enough


@dataclass(frozen=True)
class Layout:
    """How the ranks are spread, and what is measured there."""

    name: str  # "4x1": nodes x ranks; "nvlink": one host
    nodes: int
    per_node: int
    plan: tuple[tuple[int | None, tuple[str, ...]], ...]  # (Mbit/s, rows)

    def case(self, model: str, rate: int | None) -> str:
        if rate is None:
            return f"{model}@nvlink/{self.ranks}x1"
        return f"{model}@{rate / 1000:g}gbps/{self.nodes}x{self.per_node}"

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def plan_layout(name: str, world: int, rates: Sequence[int], rows: Sequence[str]) -> Layout:
    """What is measured on a layout, of what was asked for."""

    def chosen(these: Sequence[str]) -> tuple[str, ...]:
        return tuple(row for row in these if row in rows)

    if name == "nvlink":
        return Layout(name, 1, world, ((None, chosen(ON_NVLINK)),))
    nodes, per_node = map(int, name.split("x"))
    if per_node > 1:
        cells = [(r, chosen(ON_2X2)) for r in rates if r == ALL_ROWS_AT]
    else:
        cells = [(r, chosen(tuple(EXCHANGES) if r == ALL_ROWS_AT else FEW)) for r in rates]
    return Layout(name, nodes, per_node, tuple((rate, these) for rate, these in cells if these))


def steps_per_stretch(ms: float, quick: bool) -> tuple[int, int]:
    """(steps, stretches) for a step of about ``ms``; few of both where a step takes a second."""
    if quick:
        return 2, 2
    stretches = 5 if ms < 1000 else 3
    return max(1, min(200, round(TIMED_SECONDS * 1e3 / stretches / ms))), stretches


@dataclass
class Bench:
    """The run: arguments, what has been measured so far, what went wrong."""

    arguments: argparse.Namespace
    deadline: float
    nocomm_ms: dict[str, float] = field(default_factory=dict)  # by case
    failures: list[str] = field(default_factory=list)
    flat_done: bool = False

    def has_time_for(self, what: str) -> bool:
        return self.arguments.quick or self.deadline - time.monotonic() > LEAST_LEFT[what]

    def seconds(self, cap: float) -> float:
        """A cap, or what is left of the budget."""
        return cap if self.arguments.quick else max(2.0, min(cap, self.deadline - time.monotonic()))

    def failed(self, message: str) -> None:
        log(f"FAILED: {message}")
        self.failures.append(message)

    def record(self, **fields: Any) -> None:
        records.append(self.arguments.output, quick=self.arguments.quick, device=self.arguments.device, **fields)


class Set:
    """One model on one layout: its processes, and the cells that are left to measure."""

    helpers = True  # see nodes.py

    def __init__(self, bench: Bench, layout: Layout, model: str) -> None:
        self.bench, self.layout, self.model = bench, layout, model
        self.left = [(rate, list(rows)) for rate, rows in layout.plan]
        self.network: Network = HostNetwork()
        self.ranks: RankSet | None = None
        self.facts: dict[str, Any] = {}

    def run(self) -> None:
        """All cells; processes that hang are replaced once."""
        for _ in range(2):
            try:
                self._start()
                self._measure()
                return
            except Hung as error:
                self.bench.failed(f"{self.model} on {self.layout.name}: {error}")
            except CellError as error:  # outside a cell: nothing that follows would work
                self.bench.failed(f"{self.model} on {self.layout.name}: {error}")
                return
            finally:
                self._stop()
            if not any(rows for _, rows in self.left) or not self.bench.has_time_for("set"):
                return

    def _start(self) -> None:
        log(f"{self.model} on {self.layout.name}")
        arguments, layout = self.bench.arguments, self.layout
        shaped = layout.name != "nvlink" and arguments.network == "netns"
        try:
            self.network = Nodes(layout.nodes, helpers=self.helpers) if shaped else HostNetwork(layout.nodes)
        except Exception as error:
            raise CellError(f"cannot make nodes (root and pyroute2?): {type(error).__name__}: {error}") from error
        self.ranks = RankSet(self.network, layout.per_node, arguments.device, arguments.quick)
        self._ask("start", START_SECONDS)
        self._load()

    def _load(self) -> None:
        self.facts = self._ask("load", LOAD_SECONDS, model=self.model)[0]
        log(f"  loaded; matrix product {self.facts['peak_tflops']:.0f} TFLOP/s")

    def _stop(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        self.network.close()

    def _ask(self, do: str, seconds: float = CELL_SECONDS, **arguments: Any) -> list[Any]:
        return self.ranks.ask(do, self.bench.seconds(seconds), **arguments)

    def _measure(self) -> None:
        for rate, rows in self.left:
            gate = self._gate(rate) if rows else {"passed": False}
            if gate["passed"] is False:
                rows.clear()
            while rows:
                row = rows.pop(0)  # before it runs: a row that hangs is not tried again
                if self.bench.has_time_for("cell"):
                    self._cell(rate, row, gate)
                else:
                    self.bench.failed(f"out of time: {self.layout.case(self.model, rate)} {row} left out")
        if self.layout.name == "nvlink" and not self.bench.flat_done:
            self._flat()

    # ---- gate ----------------------------------------------------------------------------------------------------

    def _gate(self, rate: int | None) -> dict[str, Any]:
        """Measured twice if need be: a burst of half a millisecond is easily disturbed."""
        case = self.layout.case(self.model, rate)
        self.network.set_rate(rate or 0)
        nodes = self.layout.nodes if self.network.is_shaped else 1
        for attempt in (1, 2):
            gate = linkgate.judge(self._ask("probe"), nodes, rate) | {"attempts": attempt}
            log(f"  gate {case}: " + json.dumps({k: v for k, v in gate.items() if k.endswith("gbps")}))
            if gate["passed"] is not False:
                break
        else:
            self.bench.failed(f"{case}: the network does not keep to its rate ({', '.join(gate['faults'])})")
            more = {"world": self.layout.ranks, "gate": gate, "nccl": self.ranks.transport()}
            value = linkgate.worst(gate)
            self.bench.record(bench="netlab", case=case, provider="gate", metric="gate_failed", value=value, **more)
        self.network.set_rate(0)
        log(f"  NCCL: {self.ranks.transport()}")
        return gate

    # ---- cells ---------------------------------------------------------------------------------------------------

    def _cell(self, rate: int | None, row: str, gate: dict[str, Any]) -> None:
        case = self.layout.case(self.model, rate)
        try:
            timed, check, trace = self._time(rate, row)
        except Unavailable as reason:
            log(f"  {case} {row}: skipped: {reason}")
        except CellError as error:
            self.bench.failed(f"{case} {row}: {error}")
        else:
            refusal = refused(row, check)
            if refusal:
                self.bench.failed(f"{case} {row}: {refusal}")
            else:
                self._record(case, row, timed, check, gate)
            if trace:
                self._write_trace(trace, case, row)
        self.network.set_rate(0)
        self._ask("release")

    def _time(self, rate: int | None, row: str) -> tuple[list[list[float]], list[dict[str, Any]], Any]:
        """The stretches and checks of all ranks, and rank 0's trace if this is the traced cell."""
        self._ask("prepare", PREPARE_SECONDS, row=row)  # unshaped: a dense step at 1 Gbit/s takes seconds
        self.network.set_rate(rate or 0)
        for _ in range(2):
            ms = max(self._ask("stretch", steps=1))
            if ms > 1000:
                break
        steps, stretches = steps_per_stretch(ms, self.bench.arguments.quick)
        timed = self._ask("stretches", steps=steps, count=stretches)
        wanted = (self.model, row, rate) == TRACED[self.bench.arguments.device] and self.layout.per_node == 1
        trace = self._ask("trace")[0] if wanted else None
        self.network.set_rate(0)
        return timed, self._ask("check"), trace

    def _record(
        self, case: str, row: str, timed: list[list[float]], check: list[dict[str, Any]], gate: dict[str, Any]
    ) -> None:
        ms = quantile(timed[0], 0.5)
        graph = "_graph" if row.endswith("_graph") else ""
        if row == f"nocomm{graph}":
            self.bench.nocomm_ms[case + graph] = ms
        alone = self.bench.nocomm_ms.get(case + graph)  # eager rows against eager, replays against replays
        facts, first = self.facts, check[0]
        self.bench.record(
            bench="netlab",
            case=case,
            provider=row,
            metric="ms",
            **spread(timed),
            exposed_ms=None if alone is None else ms - alone,
            stretches_ms=timed[0],
            world=self.layout.ranks,
            gate=gate,
            nccl=self.ranks.transport(),
            loss_first=first["loss_first"],
            loss_last=first["loss_last"],
            identical=None if row in ALONE else first["identical"],
            **first["sent"],
            **facts,
            mfu=models.utilisation(facts["flops"], ms, facts["peak_tflops"]) if facts["flops"] else None,
        )
        exposed = "" if alone is None else f", {ms / alone:.2f}x of no communication"
        log(f"  {case} {row}: {ms:.1f} ms{exposed}")

    def _write_trace(self, trace: dict[str, Any], case: str, row: str) -> None:
        path = self.bench.arguments.trace
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"case": case, "provider": row, "world": self.layout.ranks} | records.environment()
        path.write_text(json.dumps(about | trace, separators=(",", ":")) + "\n")
        log(f"  trace of {case} {row}: {trace['exposed_ms']:.2f} of {trace['step_ms']:.2f} ms exposed -> {path.name}")

    # ---- nothing overlapped ----------------------------------------------------------------------------------------

    def _flat(self) -> None:
        """See flat.py. Two questions, so that a capture that hangs leaves the plain figures."""
        case = f"flat100m@nvlink/{self.layout.ranks}x1"
        plain = self._ask("flat", PREPARE_SECONDS)
        self.bench.flat_done = True
        for name, own in plain[0].items():
            if not own["identical"]:
                self.bench.failed(f"{case} {name}: parameters differ between ranks")
                continue
            self._record_flat(case, name, "ms", [rank[name]["ms"] for rank in plain])
        graphs = self._ask("flat_graphs")
        for name in graphs[0]:
            reasons = [rank[name]["reason"] for rank in graphs if "reason" in rank[name]]
            if reasons:
                log(f"  {case} {name}: no graph: {reasons[0]}")
            else:
                self._record_flat(case, name, "graph_ms", [rank[name]["ms"] for rank in graphs])

    def _record_flat(self, case: str, name: str, metric: str, times: list[list[float]]) -> None:
        figures = spread(times)
        self.bench.record(
            bench="step", case=case, provider=name, metric=metric, world=self.layout.ranks,
            nccl=self.ranks.transport(), **figures,
        )  # fmt: skip
        log(f"  {case} {name}: {metric} {figures['value']:.3f}")


def spread(times: Sequence[Sequence[float]]) -> dict[str, float]:
    """The median, p20 and p80 of rank 0, and the slowest rank's median."""
    first = times[0]
    value, p20, p80 = (quantile(first, share) for share in (0.5, 0.2, 0.8))
    return {"value": value, "p20": p20, "p80": p80, "max_ms": max(quantile(t, 0.5) for t in times)}


def refused(row: str, check: Sequence[dict[str, Any]]) -> str | None:
    """Why a row must not be recorded; None where nothing is wrong."""
    losses = [rank[name] for rank in check for name in ("loss_first", "loss_last")]
    if not all(map(math.isfinite, losses)):
        return f"losses are not finite: {losses}"
    if row not in ALONE and not all(rank["identical"] for rank in check):
        return "parameters differ between ranks"
    return None


def main() -> None:
    arguments = _arguments()
    bench = Bench(arguments, time.monotonic() + arguments.budget)
    for name in arguments.layouts:
        layout = plan_layout(name, arguments.world, arguments.rates, arguments.rows)
        for model in arguments.models:
            if bench.has_time_for("set"):
                Set(bench, layout, model).run()
            else:
                bench.failed(f"out of time: {model} on {name} left out")
    finish(bench)


def finish(bench: Bench) -> None:
    """Say where the records are; exit status 1 if anything failed."""
    log(f"records: {bench.arguments.output}")
    if bench.failures:
        sys.exit("\n".join(["failed:", *map(_in_short, bench.failures)]))


def _in_short(message: str) -> str:
    """The first and the last line: of a traceback, where and why."""
    lines = message.strip().splitlines()
    return " ... ".join(lines[:: max(1, len(lines) - 1)][:2])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--models", choices=models.TRAININGS, default=list(models.TRAININGS), **several)
    parser.add_argument("--rows", choices=EXCHANGES, default=list(EXCHANGES), **several)
    parser.add_argument("--rates", type=int, nargs="+", default=[10_000, 25_000, 1_000], help="Mbit/s")
    parser.add_argument("--layouts", nargs="+", help="NODESxRANKS, nvlink; default: 4x1 nvlink 2x2, on CPU 2x1 nvlink")
    parser.add_argument("--budget", type=float, default=515.0, help="seconds after which nothing new is begun")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models, few steps; records go to a new file")
    parser.add_argument("--network", choices=["netns", "host"], help="host: no namespaces, no shaping; default on CPU")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--trace", type=Path, help="where the summary of a profiled step goes")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) if arguments.quick else harness.ROOT / "bench" / "results"
    arguments.output = arguments.output or folder / "netlab.jsonl"
    arguments.trace = arguments.trace or folder / "trace_resnet50.json"
    on_cpu = arguments.device == "cpu"
    arguments.network = arguments.network or ("host" if on_cpu else "netns")
    arguments.layouts = arguments.layouts or (["2x1", "nvlink"] if on_cpu else ["4x1", "nvlink", "2x2"])
    arguments.world = 2 if on_cpu else min(4, torch.cuda.device_count())
    return arguments


if __name__ == "__main__":
    main()

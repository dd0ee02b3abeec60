"""One compressed step on one GPU, against torch's optimizers, eager DGC and what the memory allows.

    python bench/step.py                          all cases, under 4 minutes on an H100
    python bench/step.py --quick                  small sizes, a smoke test
    python bench/step.py --quick --device cpu     the same without a GPU: twins, and figures that mean nothing

For every case: train 200 steps, so that velocity and residual are what training leaves behind, and keep the last 8
payloads as those of 8 ranks. Freeze. Check kernels against twins on this very input, bit for bit, or give up. Then time
everything in one interleaved run (harness.py).

Timed calls write their states in place, as the product does. So that no repeat sees the states another one left, all
that a call changes (velocity, residual, step counters, momentum buffers, parameters) is copied back from frozen copies
before every repeat, outside the timed stretch and before L2 is flushed. torch.optim runs with lr=0 instead: the same
work, unchanged parameters. Graphs and plain calls are treated alike.

Each case runs in a process of its own: a crash or a hang of one leaves the others' records alone.
"""

import argparse
import dataclasses
import functools
import gc
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import bandwidth
import harness
import launches
import records
import workloads
from frozen import DENSITY, MOMENTUM, RANKS, Frozen, copy_all, gate, runs_kernels, train
from fusedcomp.kernels.compress import STAGE
from fusedcomp.pipeline import Exchange
from harness import Clock, Figure, Variant, log

DECAY = 1e-4
DEFAULT_RESULTS = harness.ROOT / "bench" / "results" / "step.jsonl"
CASE_SECONDS = 170

# A prototype's figures on an H100 (torch 2.11, triton 3.6) with random data, weight decay included. Milliseconds.
PROTOTYPE = {
    ("resnet50", "step", "torch_sgd_foreach"): 0.744,
    ("resnet50", "step", "torch_sgd_fused"): 0.322,
    ("resnet50", "compress", "eager"): 1.22,
    ("resnet50", "compress", "fusedcomp_fp32_wd"): 0.241,
    ("resnet50", "apply", "fusedcomp_fp32"): 0.042,
    ("gpt2", "step", "torch_sgd_foreach"): 2.06,
    ("gpt2", "step", "torch_sgd_fused"): 0.943,
    ("gpt2", "compress", "eager"): 5.23,
    ("gpt2", "compress", "fusedcomp_fp32_wd"): 1.086,
    ("gpt2", "apply", "fusedcomp_fp32"): 0.178,
    ("flat340m", "step", "torch_sgd_foreach"): 5.59,
    ("flat340m", "step", "torch_sgd_fused"): 2.51,
    ("flat340m", "compress", "eager"): 13.9,
    ("flat340m", "compress", "fusedcomp_fp32_wd"): 2.84,
    ("flat340m", "apply", "fusedcomp_fp32"): 0.39,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to do."""

    steps: int
    repeats: int
    rounds: int
    default_cap_mb: float  # of the buckets called "25mb"

    @staticmethod
    def build(quick: bool) -> "Plan":
        return Plan(steps=10, repeats=4, rounds=2, default_cap_mb=0.1) if quick else Plan(200, 40, 4, 25.0)


# ---- what is timed -------------------------------------------------------------------------------------------------


class Passes:
    """Only the launch of ``compress``, and its bandwidth twin, per sparse bucket; in place, thresholds as sampled."""

    def __init__(self, frozen: Frozen, weight_decay: float) -> None:
        self.frozen, self.decay = frozen, weight_decay
        self.calls: list[Callable[[], Any]] = []
        self.thresholds: list[Tensor] = []
        frozen.reset()
        with ExitStack() as stack:
            for exchange in frozen.sparse:
                stack.enter_context(patch.object(exchange, "ops", self._noting(exchange)))
            frozen.launch(weight_decay)
        self.live_thresholds = [e.thresholds for e in frozen.sparse]

    def _noting(self, exchange: Exchange) -> SimpleNamespace:
        """The exchange's launchers, of which ``compress`` notes its arguments and the thresholds it is given."""
        real = exchange.ops.compress

        def compress(*args: Any, **numbers: Any) -> None:
            self.calls.append(functools.partial(real.compress, *args, **numbers))
            self.thresholds.append(exchange.thresholds.clone())
            self.calls[-1]()

        noting = SimpleNamespace(**(vars(real) | {"compress": compress}))
        return SimpleNamespace(**(vars(exchange.ops) | {"compress": noting}))

    def reset(self) -> None:
        """The candidates' own selection has overwritten the thresholds since they were sampled."""
        self.frozen.reset_states()
        copy_all(self.live_thresholds, self.thresholds)

    def compress(self) -> None:
        for call in self.calls:
            call()

    def twin(self) -> None:
        for e in self.frozen.sparse:
            bandwidth.bandwidth_twin(
                e.bucket.segments, e.bucket.operands, e.velocity, e.residual, e.counts,
                with_decay=self.decay != 0.0,
            )  # fmt: skip


class EagerDGC:
    """Deep Gradient Compression in eager torch, at its best: one flat vector, no padding, gradients flat already."""

    def __init__(self, frozen: Frozen) -> None:
        frozen.reset()
        exchanges = frozen.sparse
        self.k = frozen.k
        self.frozen_states = [
            torch.cat([getattr(e, name)[w] for e in exchanges for w in e.bucket.segments.slices])
            for name in ("velocity", "residual")
        ]
        self.states = [t.clone() for t in self.frozen_states]
        by_bucket = [g for e, g in zip(frozen.exchanges, frozen.grads, strict=True) if e in exchanges]
        self.grad = torch.cat([g.detach().as_strided((g.numel(),), (1,)) for grads in by_bucket for g in grads])
        velocity, residual = self.frozen_states
        self.magnitude = (residual + (velocity * MOMENTUM + self.grad)).abs()  # what selection ranks
        self.values = self.run()

    def reset(self) -> None:
        copy_all(self.states, self.frozen_states)

    def run(self) -> Tensor:
        velocity, residual = self.states
        velocity.mul_(MOMENTUM).add_(self.grad)
        residual.add_(velocity)
        index = residual.abs().topk(self.k, sorted=False).indices
        values = residual[index]
        residual.index_fill_(0, index, 0.0)
        velocity.index_fill_(0, index, 0.0)
        return values

    def top_k(self) -> Any:
        return self.magnitude.topk(self.k, sorted=False)


def torch_sgd(frozen: Frozen, **kind: bool) -> Callable[[], Any]:
    """``step`` of torch.optim.SGD on the same parameters and gradients, with a momentum buffer that exists already."""
    params = [p for e in frozen.exchanges for p in e.bucket.params]
    optimizer = torch.optim.SGD(params, lr=0.0, momentum=MOMENTUM, **kind)
    return optimizer.step


@dataclasses.dataclass(frozen=True)
class Row:
    """What the records say about a variant. ``nbytes``: the least traffic it can have."""

    bench: str
    provider: str
    metric: str  # ms; pass_ms: one launch of it; optimizer_ms: optimizer.step()
    nbytes: float

    @property
    def in_graph(self) -> bool:
        return self.metric != "optimizer_ms"


def rows_and_variants(frozen: Frozen, clock: Clock, with_eager: bool) -> list[tuple[Row, Variant]]:
    """Everything that is timed side by side; what cannot be built is reported and left out."""
    sparse, dense = frozen.numel_sparse, frozen.numel_dense
    pack, update = 8 * dense, 20 * dense  # bytes of the buckets that are never compressed
    applied = RANKS * frozen.k * (6 + 8) + update
    has_kernels = runs_kernels(clock.device)
    pairs: list[tuple[Row, Variant]] = []

    def add(bench: str, provider: str, nbytes: float, run: Any, reset: Any, metric: str = "ms", **more: Any) -> None:
        row = Row(bench, provider, metric, nbytes)
        pairs.append((row, Variant(f"{bench}/{provider}/{metric}", run, reset, **more)))

    def section(build: Callable[[], None]) -> None:
        try:
            build()
        except Exception as error:
            log(f"left out: {build.__name__}: {type(error).__name__}: {error}")

    def torch_optimizers() -> None:
        for kind in ("fused", "foreach"):
            add("step", f"torch_sgd_{kind}", 20 * (sparse + dense), torch_sgd(frozen, **{kind: True}), harness.nothing)

    def fused_step() -> None:
        for suffix, decay in (("", 0.0), ("_wd", DECAY)):
            moved, provider = (24 if decay else 20) * sparse, f"fusedcomp_fp32{suffix}"
            whole, both = (lambda d=decay: frozen.launch(d)), (lambda d=decay: frozen.whole_step(d))
            add("compress", provider, moved + pack, whole, frozen.reset_states)
            add("step", provider, moved + pack + applied, both, frozen.reset)
        add("apply", "fusedcomp_fp32", applied, frozen.apply, frozen.reset)
        whole = 20 * sparse + pack + applied
        add("step", "fusedcomp_fp32", whole, frozen.optimizer_step, frozen.reset, "optimizer_ms")

    def passes() -> None:
        for suffix, decay in (("", 0.0), ("_wd", DECAY)):
            moved, one = (24 if decay else 20) * sparse, Passes(frozen, decay)
            reset = one.reset
            add("compress", f"fusedcomp_fp32{suffix}", moved, one.compress, reset, "pass_ms")
            if has_kernels:
                add("compress", f"bandwidth_twin{suffix}", moved, one.twin, reset)
            if not decay:  # the same from an L2 without lines to write back: see harness.CudaClock.flush
                add("compress", "fusedcomp_fp32", moved, one.compress, reset, "pass_ms", flush="read")
                if has_kernels:
                    add("compress", "bandwidth_twin", moved, one.twin, reset, flush="read")

    def eager() -> None:
        dgc = EagerDGC(frozen)
        add("compress", "eager", 20 * sparse, dgc.run, dgc.reset)
        add("compress", "torch_topk", 4 * sparse, dgc.top_k, harness.nothing)

    for build in (torch_optimizers, fused_step, passes, *([eager] if with_eager else [])):
        section(build)
    return pairs


# ---- one case ------------------------------------------------------------------------------------------------------


class Case:
    """Measures one case and appends its records."""

    def __init__(self, name: str, device: torch.device, quick: bool, results: Path) -> None:
        self.name, self.device, self.quick, self.results = name, device, quick, results
        self.plan = Plan.build(quick)
        self.clock = harness.clock_for(device)
        self.copy_gb_per_s = 0.0
        # What a reader would type, not this process's own arguments.
        self.command = f"python bench/step.py --cases {name}" + (" --quick" if quick else "")

    def append(self, bench: str, provider: str, metric: str, value: float, **more: Any) -> None:
        common = {"density": DENSITY, "train_steps": self.plan.steps, "quick": self.quick, "command": self.command}
        records.append(
            self.results, bench=bench, case=more.pop("case", self.name), provider=provider, metric=metric,
            value=value, **(common | more),
        )  # fmt: skip

    def run(self) -> bool:
        """Measure with one bucket and with the default ones; False if something failed."""
        self.measure_copy()
        caps = {"one": 1e6, "25mb": self.plan.default_cap_mb}
        if self.name == "flat340m":
            del caps["25mb"]  # one tensor is one bucket
        done = True
        for buckets, cap_mb in caps.items():
            try:
                self.measure_buckets(buckets, cap_mb)
            except Exception:
                done = False
                log(f"{self.name}, buckets {buckets}: FAILED\n{traceback.format_exc()}")
            gc.collect()  # optimizer, hooks and views refer to each other
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return done

    def measure_copy(self) -> None:
        figure = harness.copy_rate(self.clock, self.plan.repeats)
        nbytes = harness.copy_bytes(self.clock)
        self.copy_gb_per_s = harness.gb_per_s(nbytes, figure.median)
        self.append(
            "step", "copy", "gb_per_s", self.copy_gb_per_s, case="device", bytes=nbytes, timing="events",
            p20=harness.gb_per_s(nbytes, figure.quantile(0.8)), p80=harness.gb_per_s(nbytes, figure.quantile(0.2)),
        )  # fmt: skip
        log(f"{self.name}: device copy {self.copy_gb_per_s:.0f} GB/s")

    def measure_buckets(self, buckets: str, cap_mb: float) -> None:
        torch.manual_seed(0)
        workload = workloads.WORKLOADS[self.name](self.device, self.quick)
        if not self.quick:
            workloads.check_shapes(self.name, workload.params)
        optimizer, payloads = train(workload, workloads.LEARNING_RATES[self.name], cap_mb, self.plan.steps)
        if isinstance(workload, workloads.HeavyTailed):
            workload.release()
        with torch.no_grad():
            frozen = Frozen(optimizer, payloads)
            log(f"{self.name}, buckets {buckets}: frozen, {len(frozen.sparse)} sparse + {len(frozen.dense)} dense")
            for decay in (0.0, DECAY):
                gate(frozen, decay)
            log("kernels equal twins" if runs_kernels(self.device) else "twins equal twins")
            parts = (self.record_counts, self.time_variants, self.time_single_launches)
            done = [self._attempt(part, frozen, buckets) for part in parts]
            if not all(done):
                raise RuntimeError("some parts failed: see above")

    def _attempt(self, part: Callable[[Frozen, str], None], frozen: Frozen, buckets: str) -> bool:
        """Run a part; what fails does not keep the others from running."""
        try:
            part(frozen, buckets)
        except Exception:
            log(f"{part.__name__} FAILED\n{traceback.format_exc()}")
            return False
        return True

    def record_counts(self, frozen: Frozen, buckets: str) -> None:
        """What the selection did with this input; and whether eager top-k sends the same magnitudes."""
        frozen.reset()
        frozen.launch()
        candidates = sum(int(e.offsets[-1]) for e in frozen.sparse)
        overflow = sum(max(0, int(e.offsets[-1]) - e.buffers.keys.numel()) for e in frozen.sparse)
        crowded = sum(int((e.counts > STAGE).sum()) for e in frozen.sparse)
        blocks = sum(e.bucket.segments.num_blocks for e in frozen.sparse)
        counts = {
            "nnz": sum(int(e.winners[1, -1]) for e in frozen.sparse),
            "candidates_per_k": candidates / frozen.k,
            "overflow": overflow,
            "crowded_blocks_share": crowded / blocks,
            "payload_bytes": sum(e.buffers.layout.nbytes for e in frozen.sparse),
            "dense_bytes": 4 * (frozen.numel_sparse + frozen.numel_dense),
        }
        if len(frozen.sparse) == 1:
            sent = frozen.sparse[0].buffers.layout.views(frozen.sparse[0].buffers.own.view(1, -1)).values[0].abs()
            counts["equals_topk"] = int(torch.equal(sent.sort().values, EagerDGC(frozen).values.abs().sort().values))
        frozen.reset()
        for metric, value in counts.items():
            self.append("compress", "fusedcomp_fp32", metric, value, buckets=buckets)
        log(", ".join(f"{metric} {value:.4g}" for metric, value in counts.items()))

    def time_variants(self, frozen: Frozen, buckets: str) -> None:
        pairs = rows_and_variants(frozen, self.clock, with_eager=buckets == "one")
        rows = {variant.name: row for row, variant in pairs}
        graphs = [dataclasses.replace(variant, timing="graph") for row, variant in pairs if row.in_graph]
        variants = harness.ready(self.clock, [*(variant for _, variant in pairs), *graphs])
        log(f"timing {len(variants)} variants")
        figures = harness.measure(self.clock, variants, self.plan.repeats, self.plan.rounds)
        fused = {v.timing: f.median for v, f in zip(variants, figures, strict=True) if "torch_sgd_fused" in v.name}
        for variant, figure in zip(variants, figures, strict=True):
            self.append_figure(rows[variant.name], variant, figure, buckets, fused.get(variant.timing))
        log("timed")

    def append_figure(self, row: Row, variant: Variant, figure: Figure, buckets: str, fused: float | None) -> None:
        rate = harness.gb_per_s(row.nbytes, figure.median)
        common = {"buckets": buckets, "flush": variant.flush, "repeats": len(figure.device_ms), "ranks": RANKS}
        self.append(
            row.bench, row.provider, row.metric, figure.median, timing=variant.timing, p20=figure.quantile(0.2),
            p80=figure.quantile(0.8), bytes=row.nbytes, gb_per_s=rate, copy_ratio=rate / self.copy_gb_per_s,
            sgd_ratio=figure.median / fused if fused else None, **common,
        )  # fmt: skip
        if variant.timing == "events":
            metric = row.metric.replace("ms", "host_ms")
            self.append(row.bench, row.provider, metric, figure.host_median, timing="host", **common)

    def time_single_launches(self, frozen: Frozen, buckets: str) -> None:
        """The launches of compress and apply, one by one. Twins launch nothing that could be told apart."""
        if not runs_kernels(self.device):
            log("single launches: skipped, this run uses the twins")
            return
        sides = {
            "compress": lambda e, grads: e.launch(grads, frozen.hyper(e, 0.0), frozen.optimizer._step),
            "apply": lambda e, grads: e.apply(frozen.hyper(e, 0.0)),
        }
        for bench, run in sides.items():
            frozen.reset()
            noted = launches.record_launches(frozen.exchanges, frozen.grads, run)
            self.append(bench, "fusedcomp_fp32", "launches", len(noted), buckets=buckets)
            figures = launches.time_launches(self.clock, frozen.reset, noted, self.plan.repeats)
            for label, figure in figures.items():
                self.append(
                    bench, "fusedcomp_fp32", "launch_ms", figure.median, launch=label, buckets=buckets,
                    timing="events", flush="write", p20=figure.quantile(0.2), p80=figure.quantile(0.8),
                )  # fmt: skip
        log("single launches timed")


# ---- tables --------------------------------------------------------------------------------------------------------


SUFFIX = {"ms": "", "pass_ms": " pass", "optimizer_ms": " optimizer.step()"}
COLUMNS = ("bench", "provider", "graph", "p20", "p80", "events", "host", "GB/s", "copy", "sgd", "prototype")


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Both tables, from the records alone."""
    timed = [(t, _timed_line(t, _host(rows, t))) for t in _by_variant(rows)]
    _print_table(
        "One step, ms. graph: device time, p20 and p80 beside it. events: plain calls; host: until they returned.\n"
        "GB/s, share of the copy rate, and multiple of torch.optim.SGD(fused=True): of graph, where there is one.\n"
        "prototype: figures measured before this project began (random data, weight decay included).",
        COLUMNS,
        [("{case}, buckets {buckets}".format(**next(iter(t.values()))), line) for t, line in timed],
    )
    single = [r for r in rows if r["metric"] == "launch_ms"]
    buckets = list(dict.fromkeys(r["buckets"] for r in single))
    places = list(dict.fromkeys((r["case"], r["bench"], r["launch"]) for r in single))
    us = {(r["case"], r["bench"], r["launch"], r["buckets"]): f"{1e3 * r['value']:.1f}" for r in single}
    _print_table(
        "Every launch where it stands in the sequence, us; no weight decay; sums over the buckets.",
        ["launch", *buckets],
        [(f"{case}, {bench}", [launch, *(us.get((case, bench, launch, b), "") for b in buckets)])
         for case, bench, launch in places],
    )  # fmt: skip


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("case", "buckets", "bench", "provider"))


def _by_variant(rows: Sequence[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """The timed records as {timing: record}, one per variant."""
    variants: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["metric"] in SUFFIX:
            variants.setdefault((*_place(row), row["metric"], row["flush"]), {})[row["timing"]] = row
    return list(variants.values())


def _host(rows: Sequence[dict[str, Any]], timings: dict[str, dict[str, Any]]) -> float | None:
    row = next(iter(timings.values()))
    metric = row["metric"].replace("ms", "host_ms")
    same = (r for r in rows if r["metric"] == metric and _place(r) == _place(row) and r["flush"] == row["flush"])
    return next((r["value"] for r in same), None)


def _timed_line(timings: dict[str, dict[str, Any]], host: float | None) -> list[str]:
    graph, events = timings.get("graph", {}), timings.get("events", {})
    row = graph or events
    name = row["provider"] + SUFFIX[row["metric"]]
    name += ", clean L2" if row["flush"] == "read" else ""
    whole = row["metric"] == "ms" and row["flush"] == "write" and not row["quick"]
    known = PROTOTYPE.get((row["case"], row["bench"], row["provider"])) if whole else None
    times = [graph.get("value"), graph.get("p20"), graph.get("p80"), events.get("value"), host]
    ratios = [row["copy_ratio"], row["sgd_ratio"]]
    shown = [*map(_number(3), times), _number(0)(row["gb_per_s"]), *map(_number(2), ratios), _number(3)(known)]
    return [row["bench"], name, *shown]


def _number(digits: int) -> Callable[[float | None], str]:
    return lambda value: "" if value is None else f"{value:.{digits}f}"


def _print_table(title: str, columns: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Lines under a heading each time theirs is new."""
    widths = [max(map(len, column)) for column in zip(columns, *(line for _, line in lines), strict=True)]
    print(f"\n{title}")
    heading = ""
    for above, line in (("", columns), *lines):
        if above != heading:
            print(f"{above}:")
            heading = above
        print(" ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    sys.stdout.flush()


# ---- command line --------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats; records go to a new file")
    parser.add_argument("--cases", default="resnet50,gpt2,flat340m", help="comma-separated")
    parser.add_argument("--results", type=Path, help="JSON lines to append to")
    parser.add_argument("--case", choices=tuple(workloads.WORKLOADS), help="measure this one, in this process")
    args = parser.parse_args()
    if args.results is None:
        args.results = Path(tempfile.mkdtemp()) / "step.jsonl" if args.quick else DEFAULT_RESULTS
    return args


def run_case_apart(case: str, args: argparse.Namespace) -> bool:
    """One case in a process of its own, which prints as it goes."""
    command = [sys.executable, str(Path(__file__)), "--case", case, "--device", args.device, "--results", args.results]
    command += ["--quick"] if args.quick else []
    try:
        return subprocess.run([str(c) for c in command], timeout=CASE_SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        log(f"{case}: given up after {CASE_SECONDS} s")
        return False


def _records(path: Path) -> list[dict[str, Any]]:
    return list(records.read(path)) if path.exists() else []


def main() -> int:
    args = arguments()
    if args.case:
        return 0 if Case(args.case, torch.device(args.device), args.quick, args.results).run() else 1
    before = len(_records(args.results))
    failed = [case for case in args.cases.split(",") if not run_case_apart(case, args)]
    print_tables(_records(args.results)[before:])
    print(f"\nrecords: {args.results}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

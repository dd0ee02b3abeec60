"""One case: a workload trained once, then every optimizer that is measured on it, frozen, checked and timed.

A bench is a module with ``USES``, the names of the configurations below that it wants, and ``measure(case, frozen)``.
``main`` runs benches over cases, each case in a process of its own: a crash or a hang leaves the others' records alone.

Timed calls write their states in place, as the product does. So that no repeat sees the states another one left, all
that a call changes is copied back from frozen copies before every repeat, outside the timed stretch and before L2 is
flushed. Graphs and plain calls are treated alike.
"""

import argparse
import dataclasses
import gc
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

import harness
import records
import tables
import workloads
from frozen import DECAYS, RANKS, Frozen, gate, runs_kernels
from harness import Figure, Variant, log
from trained import DENSITY, Config, Trained

CONFIGS = (
    Config("fp32", keep=64),
    Config("bf16", half=True),
    Config("block", blocks=True),
    Config("fp32_guarded", guarded=True),
    Config("fp32_d0.01", density=0.01),
    Config("fp32_25mb", buckets="25mb"),
    Config("lars_fp32", kind="LARS"),
)
MOST_RANKS = {"resnet50": 64, "gpt2": 16, "flat340m": 8}
CASE_SECONDS = 200


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to do."""

    steps: int
    repeats: int
    rounds: int
    small_cap_mb: float  # of the buckets called "25mb"

    @staticmethod
    def build(quick: bool) -> "Plan":
        return Plan(steps=6, repeats=2, rounds=1, small_cap_mb=0.1) if quick else Plan(192, 40, 4, 25.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Timed:
    """Something to time, and what its record says. ``nbytes``: the least traffic it can have."""

    provider: str
    run: Callable[[], Any]
    reset: Callable[[], Any] = harness.nothing
    nbytes: float = 0.0
    metric: str = "ms"
    timings: tuple[str, ...] = ("events", "graph")  # or ("events",)
    label: str = ""  # tells variants of one provider and metric apart
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.provider}/{self.metric}" + (f"/{self.label}" if self.label else "")


class Figures(dict[tuple[str, str], Figure]):
    """(key of a Timed, timing) -> Figure."""

    def ratios(self, above: str, below: str) -> dict[str, float]:
        """timing -> quotient of medians, for every timing that both have."""
        timings = [timing for key, timing in self if key == above and (below, timing) in self]
        return {timing: self[above, timing].median / self[below, timing].median for timing in timings}


class Bench(Protocol):
    """A module of benches. ``trace`` may be missing; it comes last, because a profiler slows down what follows it."""

    __file__: str
    USES: tuple[str, ...]

    def measure(self, case: "Case", frozen: Frozen) -> None: ...


class Case:
    """Measures one case and appends its records."""

    def __init__(self, name: str, device: torch.device, quick: bool, results: Path, script: str) -> None:
        self.name, self.device, self.quick, self.results = name, device, quick, results
        self.plan = Plan.build(quick)
        self.clock = harness.clock_for(device)
        self.copy_gb_per_s = 0.0
        self.common: dict[str, Any] = {
            "density": DENSITY,
            "buckets": "one",
            "flush": "write",
            "train_steps": self.plan.steps,
            "quick": quick,
            # What a reader would type, not this process's own arguments.
            "command": f"python bench/{script} --cases {name}" + (" --quick" if quick else ""),
        }

    def append(self, bench: str, provider: str, metric: str, value: float, **more: Any) -> None:
        records.append(
            self.results, bench=bench, case=more.pop("case", self.name), provider=provider, metric=metric,
            value=value, **(self.common | more),
        )  # fmt: skip

    # ---- running ---------------------------------------------------------------------------------------------------

    def run(self, benches: Sequence[Bench]) -> bool:
        """Train, then measure every configuration that a bench wants; False if something failed."""
        self._measure_copy()
        torch.manual_seed(0)
        workload = workloads.WORKLOADS[self.name](self.device, self.quick)
        if not self.quick:
            workloads.check_shapes(self.name, workload.params)
        trained = Trained(workload, workloads.LEARNING_RATES[self.name], self.plan.steps)
        done = True
        for phase in ("measure", "trace"):
            for config in CONFIGS:
                wanting = [bench for bench in benches if config.name in bench.USES and hasattr(bench, phase)]
                if wanting and not (self.name == "flat340m" and config.buckets != "one"):  # one tensor is one bucket
                    done = self._run_config(trained, config, phase, wanting) and done
        return done

    def _run_config(self, trained: Trained, config: Config, phase: str, benches: Sequence[Bench]) -> bool:
        done = True
        if config.keep > RANKS:
            most = RANKS if self.quick or phase == "trace" else MOST_RANKS[self.name]
            config = dataclasses.replace(config, keep=most)
        try:
            frozen = self._freeze(trained, config)
        except Exception:
            log(f"{self.name}, {config.name}: FAILED, nothing is timed\n{traceback.format_exc()}")
            return False
        for bench in benches:
            try:
                with torch.no_grad():
                    getattr(bench, phase)(self, frozen)
            except Exception:
                done = False
                log(
                    f"{self.name}, {config.name}, {Path(bench.__file__).stem} {phase}: FAILED\n{traceback.format_exc()}"
                )
        del frozen
        gc.collect()  # optimizer, hooks and views refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return done

    def _freeze(self, trained: Trained, config: Config) -> Frozen:
        """Correctness first: nothing of a configuration is timed whose kernels and twins disagree."""
        cap_mb = self.plan.small_cap_mb if config.buckets == "25mb" else 1e6
        optimizer, payloads = trained.continue_with(config, cap_mb)
        steps = self.plan.steps + config.keep
        self.common |= {"density": config.density, "buckets": config.buckets, "train_steps": steps}
        with torch.no_grad():
            frozen = Frozen(config, optimizer, payloads)
            for decay in DECAYS:
                gate(frozen, decay)
        equal = "kernels equal twins" if runs_kernels(self.device) else "twins equal twins"
        log(f"{self.name}, {config.name}: {len(frozen.sparse)} sparse + {len(frozen.dense)} dense buckets; {equal}")
        return frozen

    def _measure_copy(self) -> None:
        figure, nbytes = harness.copy_rate(self.clock, self.plan.repeats), harness.copy_bytes(self.clock)
        self.copy_gb_per_s = harness.gb_per_s(nbytes, figure.median)
        self.append(
            "step", "copy", "gb_per_s", self.copy_gb_per_s, case="device", bytes=nbytes, timing="events",
            p20=harness.gb_per_s(nbytes, figure.quantile(0.8)), p80=harness.gb_per_s(nbytes, figure.quantile(0.2)),
        )  # fmt: skip
        log(f"{self.name}: device copy {self.copy_gb_per_s:.0f} GB/s")

    # ---- timing ----------------------------------------------------------------------------------------------------

    def time(self, bench: str, timed: Sequence[Timed]) -> Figures:
        """Time all of it interleaved, append the records; what does not run is reported and left out."""
        by_key = {one.key: one for one in timed}
        variants = harness.ready(self.clock, [Variant(one.key, one.run, one.reset) for one in timed])
        graphs = [
            dataclasses.replace(variant, timing="graph") for variant in variants
            if "graph" in by_key[variant.name].timings
        ]  # fmt: skip
        variants += harness.ready(self.clock, graphs)
        log(f"{bench}: timing {len(variants)} variants")
        measured = harness.measure(self.clock, variants, self.plan.repeats, self.plan.rounds)
        figures = Figures({(v.name, v.timing): f for v, f in zip(variants, measured, strict=True)})
        for (key, timing), figure in figures.items():
            self._append_figure(bench, by_key[key], timing, figure)
        return figures

    def _append_figure(self, bench: str, timed: Timed, timing: str, figure: Figure) -> None:
        rate = harness.gb_per_s(timed.nbytes, figure.median)
        self.append(
            bench, timed.provider, timed.metric, figure.median, timing=timing, p20=figure.quantile(0.2),
            p80=figure.quantile(0.8), repeats=len(figure.device_ms), bytes=timed.nbytes, gb_per_s=rate,
            copy_ratio=rate / self.copy_gb_per_s, **timed.fields,
        )  # fmt: skip

    def append_ratios(
        self, bench: str, provider: str, metric: str, figures: Figures, above: str, below: str, **more: Any
    ) -> None:
        """A quotient of two medians of one interleaved run as a record of its own, per timing."""
        for timing, value in figures.ratios(above, below).items():
            self.append(bench, provider, metric, value, timing=timing, against=below.partition("/")[0], **more)


# ---- command line --------------------------------------------------------------------------------------------------


def parser(doc: str, results: str) -> argparse.ArgumentParser:
    """The options that all benches have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    made.add_argument("--quick", action="store_true", help="small sizes and few repeats; records go to a new file")
    made.add_argument("--results", type=Path, help=f"JSON lines to append to; default: bench/results/{results}")
    made.set_defaults(default_results=results)
    return made


def parser_of_cases(doc: str) -> argparse.ArgumentParser:
    made = parser(doc, "step.jsonl")
    made.add_argument("--cases", default="resnet50,gpt2,flat340m", help="comma-separated")
    made.add_argument("--case", choices=tuple(workloads.WORKLOADS), help="measure this one, in this process")
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    args = made.parse_args()
    if args.results is None:
        folder = Path(tempfile.mkdtemp()) if args.quick else records.RESULTS
        args.results = folder / args.default_results
    return args


def apart(script: str, args: argparse.Namespace, *more: str, seconds: float, gpu: int | None = None) -> bool:
    """A script of this folder with the same options, in a process of its own, which prints as it goes."""
    environment = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    command = [sys.executable, str(Path(__file__).with_name(script)), "--device", args.device, *more]
    command += ["--quick"] if args.quick else []
    try:
        return subprocess.run(command, timeout=seconds, check=False, env=environment).returncode == 0
    except subprocess.TimeoutExpired:
        log(f"{script} {' '.join(more)}: given up after {seconds:.0f} s")
        return False


def case_apart(
    script: str, args: argparse.Namespace, case: str, seconds: float = CASE_SECONDS, gpu: int | None = None
) -> bool:
    return apart(script, args, "--case", case, "--results", str(args.results), seconds=seconds, gpu=gpu)


def run_case(script: str, args: argparse.Namespace, benches: Sequence[Any]) -> int:
    case = Case(args.case, torch.device(args.device), args.quick, args.results, script)
    return 0 if case.run(benches) else 1


def main(script: str, doc: str, benches: Sequence[Any]) -> int:
    """The command line of a bench over cases."""
    args = parse(parser_of_cases(doc))
    if args.case:
        return run_case(script, args, benches)
    before = tables.count(args.results)
    failed = [case for case in args.cases.split(",") if not case_apart(script, args, case)]
    tables.show(args.results, before)
    print(f"\nrecords: {args.results}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0

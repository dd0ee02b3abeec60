"""What JointSpar saves: time and FLOPs of forward and backward against the budget.

python bench/jointspar.py                          ResNet-50 and GPT-2 small, budgets from 0.3 to 1
python bench/jointspar.py --quick --device cpu     small sizes: finds errors, its times mean nothing

Every budget is measured over draws of its own, with all blocks equally likely, as at the start of a run; "dense" is
the same model without a sampler. Draws differ, so figures are means, with quantiles over draws. draw() and step() are
not in the times. flops_of_dense is what ms_of_dense would be if all FLOPs took equally long and nothing else took time.

The rest is that of models.py, but GPT-2 is not compiled: every active set would be compiled anew.
"""

import dataclasses
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

import cases
import harness  # makes the checkout importable: before fusedcomp
import models
import records
import tables
from fusedcomp.jointspar import JointSpar
from harness import log

BUDGETS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_METRICS = ("ms", "forward_ms", "backward_ms", "flops")


def _text(device: torch.device, quick: bool, rank: int) -> models.Text:
    with mock.patch.object(models.GPT2, "compile_regions"):
        return models.Text(device, quick, rank)


CASES: dict[str, Callable[[torch.device, bool, int], models.Images | models.Text]] = {
    "resnet50": models.Images,
    "gpt2": _text,
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """One step under one active set."""

    forward_ms: float
    backward_ms: float
    flops: float
    active_share: float  # of the bytes of gradients

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms


@contextmanager
def sampling(optimizer: torch.optim.Optimizer, budget: float | None, seed: int) -> Iterator[JointSpar | None]:
    """A sampler for as long as it lasts; without a budget none."""
    sampler = None if budget is None else JointSpar(optimizer, budget, seed=seed)
    try:
        yield sampler
    finally:
        if sampler is not None:
            sampler.remove()


class Case:
    """A model, and one step of it measured in two runs: one for the clock, one for the count."""

    def __init__(self, name: str, device: torch.device, quick: bool) -> None:
        self.clock = harness.clock_for(device)
        self.workload = CASES[name](device, quick, 0)
        self.optimizer = torch.optim.SGD(self.workload.model.parameters(), lr=0.0)

    def measure(self, sampler: JointSpar | None, step: int) -> Draw:
        self._prepare(sampler)
        self.clock.synchronise()
        start = self.clock.mark()
        loss = self.workload.loss(self.workload.model, step)
        between = self.clock.mark()
        loss.backward()
        end = self.clock.mark()
        self.clock.synchronise()
        self.optimizer.zero_grad()
        with FlopCounterMode(display=False) as counter:
            self.workload.loss(self.workload.model, step).backward()
        share = 1.0 if sampler is None else sampler.metrics()["active_share"].item()
        times = self.clock.between(start, between), self.clock.between(between, end)
        return Draw(*times, counter.get_total_flops(), share)

    def _prepare(self, sampler: JointSpar | None) -> None:
        if sampler is None:
            self.optimizer.zero_grad()
        else:
            sampler.draw()


def measure(name: str, device: torch.device, quick: bool) -> dict[float | None, list[Draw]]:
    """Draws by budget, None for dense; budgets take turns, so that drifts of the card hit all of them alike."""
    rounds, draws = (2, 2) if quick else (2, 12)
    case = Case(name, device, quick)
    found: dict[float | None, list[Draw]] = {budget: [] for budget in (None, *BUDGETS)}
    for round_ in range(-1, rounds):  # the first warms up
        for budget, into in found.items():
            with sampling(case.optimizer, budget, seed=round_ + 1) as sampler:
                measured = [case.measure(sampler, step) for step in range(draws if round_ >= 0 else 2)]
            into += measured if round_ >= 0 else []
    return found


def append(results: Any, name: str, found: dict[float | None, list[Draw]], **more: Any) -> None:
    dense = {metric: statistics.mean(getattr(d, metric) for d in found[None]) for metric in _METRICS}
    for budget, draws in found.items():
        share = statistics.mean(d.active_share for d in draws)
        fields = more | {"budget": budget, "draws": len(draws), "active_share": share}
        provider = "dense" if budget is None else f"jointspar{budget}"
        for metric in _METRICS:
            values = [float(getattr(d, metric)) for d in draws]
            spread = {"p20": harness.quantile(values, 0.2), "p80": harness.quantile(values, 0.8)}
            mean = statistics.mean(values)
            records.append(
                results, bench="jointspar", case=name, provider=provider, metric=metric, value=mean, **spread, **fields
            )
            if budget is not None:
                records.append(
                    results, bench="jointspar", case=name, provider=provider, metric=f"{metric}_of_dense",
                    value=mean / dense[metric], **fields,
                )  # fmt: skip


def main() -> int:
    parser = cases.parser(__doc__, "jointspar.jsonl")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    args = cases.parse(parser)
    before, failed = tables.count(args.results), []
    for name in args.cases.split(","):
        try:
            found = measure(name, torch.device(args.device), args.quick)
        except Exception:
            failed.append(name)
            log(f"{name}: FAILED\n{traceback.format_exc()}")
            continue
        append(args.results, name, found, quick=args.quick)
        log(f"{name}: {len(found)} budgets, {len(found[None])} draws each")
    tables.show(args.results, before)
    print(f"\nrecords: {args.results}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Does a hard threshold leave less behind than Top-k at equal bytes? Sahu et al., NeurIPS 2021, on a small scale.

Two problems, for several gloo ranks that train with ``fusedcomp.SGD`` and ``Residual()``:

logreg             multinomial logistic regression with l2 on scikit-learn's digits: pixels and their products, centred.
                   Images are sorted by label, so that a rank has two or three of the ten digits. No momentum, the
                   authors' step 1 / (L + l2) and l2 = L / 1e4, zero initial weights, all images of a rank in a step:
                   nothing is random
logreg_shuffled    the same with images in random order, so that ranks are alike
digits_threshold   a perceptron on the same images in random order, momentum 0.9 behind the exchange. Every method
                   trains at every learning rate of one grid with every seed; its own rate is the one with the highest
                   mean validation accuracy, the lower one of equals. Test accuracy is reported there only

Methods: dense; TopK of several densities; Threshold by the authors' rule for the same densities; Threshold of every
value on a ladder. Against TopK(density) stands the lowest threshold whose runs sent at most as much, mean over seeds,
at the same learning rate, after two rounds of further runs between the ladder's values. As much of two things:

bytes     metrics()["bytes_sent"] of all steps: what is handed to the collectives. A payload has room for what the rank
          with most asks for and more, eight steps behind (sizing.py), and all ranks send as much.
entries   metrics()["nnz"] of all steps, mean over ranks: what the authors' theorem is about

accumulated error   sum over steps of the mean over ranks of |residual|^2, in units of the gradient
suboptimality       f - f*, of all images; f* from L-BFGS in float64, to |grad f|^2 / (2 l2)

    python bench/threshold.py
    python bench/threshold.py --quick      a smoke test
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import harness
import records
import tables
from fusedcomp import SGD, Identity, Residual, Threshold, TopK
from fusedcomp.buckets import is_large
from fusedcomp.compressors import Compressor
from fusedcomp.demo import ranks
from threshold_problems import Logreg, Problem, logreg, perceptron

BUDGETS = {"bytes_sent": "bytes", "entries": "entries"}  # by which a threshold and TopK are compared
_CLOSE = 0.95  # of TopK's bytes or entries
_ROUNDS = 2  # of runs that come closer
_CURVE_POINTS = 12


# ---- methods -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Method:
    provider: str
    title: str
    compressor: Compressor

    @property
    def value(self) -> float | None:
        """Of a threshold that is given as such."""
        return self.compressor.value if isinstance(self.compressor, Threshold) else None


DENSE = Method("dense", "dense", Identity())


def topk(density: float) -> Method:
    return Method(f"topk{density:g}", f"TopK({density:g})", TopK(density))


def rule(density: float) -> Method:
    """The authors' threshold for as many entries as TopK(density) sends."""
    return Method(f"threshold_rule{density:g}", f"Threshold.from_density({density:g})", Threshold.from_density(density))


def rung(value: float) -> Method:
    """A threshold; four digits are enough, and make names."""
    return Method(f"threshold{value:.4g}", f"Threshold({value:.4g})", Threshold(float(f"{value:.4g}")))


@dataclasses.dataclass(frozen=True)
class Plan:
    """All runs of one case."""

    world: int
    densities: tuple[float, ...]
    values: tuple[float, ...]  # of the ladder, ascending
    rates: tuple[float, ...]
    seeds: int

    @property
    def choose_rate(self) -> bool:
        """By validation images; else it is given by the problem."""
        return len(self.rates) > 1

    @property
    def methods(self) -> list[Method]:
        compared = [make(density) for density in self.densities for make in (topk, rule)]
        return [DENSE, *compared, *map(rung, self.values)]

    @property
    def jobs(self) -> "list[Job]":
        return list(itertools.starmap(Job, itertools.product(self.methods, self.rates, range(self.seeds))))


def ladder(lowest: float, rungs: int, ratio: float) -> tuple[float, ...]:
    return tuple(lowest * ratio**i for i in range(rungs))


# ---- a run ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    method: Method
    lr: float
    seed: int


class Outcome(NamedTuple):
    """What rank 0 tells of a run."""

    job: int
    scores: dict[str, float]
    accumulated_error: float
    entries: float  # sent by a rank in all steps, mean over ranks; in a dense step all there are
    overflow: float  # that reached the threshold and found no room, summed over steps, mean over ranks
    bytes_sent: int  # handed to collectives by one rank, in all steps
    bytes_dense: int
    second_half: dict[str, float]  # error, entries and bytes of the second half of the steps
    threshold: float | None
    curve: list[tuple[int, float]]  # bytes so far, suboptimality; of logistic regression
    seconds: float


def work(device: torch.device, send: Callable[[object], None], problem: Problem, jobs: Sequence[Job]) -> None:
    """What every rank does: all jobs, one after the other."""
    for index, job in enumerate(jobs):
        outcome = train(index, job, problem)
        if dist.get_rank() == 0:
            send(outcome)


def train(index: int, job: Job, problem: Problem) -> Outcome:
    began = time.monotonic()
    model = problem.model(job.seed)
    compressor = job.method.compressor
    optimizer = SGD(model.parameters(), job.lr, problem.momentum, compressor=compressor, memory=Residual())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, problem.lr_factor)
    names = ("squared_residual", "nnz", "overflow", "bytes_sent", "bytes_dense")
    sums = torch.zeros(2, len(names), dtype=torch.float64)  # of either half of the steps
    looked, curve = _curve_steps(problem), []
    for step, loss in enumerate(problem.losses(model, job.seed), start=1):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        metrics = optimizer.metrics()
        metrics["squared_residual"] = metrics["residual_norm"].double().square()
        sums[int(2 * step > problem.steps)] += torch.stack([metrics[name].double() for name in names])
        if step in looked:
            curve.append((int(sums[:, names.index("bytes_sent")].sum()), problem.scores(model)["suboptimality"]))
    dist.all_reduce(sums)
    first, second = (dict(zip(names, half.tolist(), strict=True)) for half in sums / dist.get_world_size())
    whole = {name: first[name] + second[name] for name in names}
    compressed = sum(p.numel() for p in model.parameters() if is_large(p))
    return Outcome(
        index,
        problem.scores(model),
        accumulated_error=whole["squared_residual"],
        entries=whole["nnz"],
        overflow=whole["overflow"],
        bytes_sent=round(whole["bytes_sent"]),
        bytes_dense=round(whole["bytes_dense"]),
        second_half={"error": second["squared_residual"], "entries": second["nnz"], "bytes": second["bytes_sent"]},
        threshold=compressor.value_for(compressed) if isinstance(compressor, Threshold) else None,
        curve=curve,
        seconds=time.monotonic() - began,
    )


def _curve_steps(problem: Problem) -> set[int]:
    """Evenly on a logarithmic axis, from the first step to the last."""
    if not isinstance(problem, Logreg):
        return set()
    return {round(problem.steps ** (i / (_CURVE_POINTS - 1))) for i in range(_CURVE_POINTS)}


# ---- all runs ------------------------------------------------------------------------------------------------------


class Runs:
    """The outcomes of a case."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outcomes: dict[Job, Outcome] = {}

    def of(self, method: Method, lr: float) -> list[Outcome]:
        """A method's outcomes at a learning rate, by seed."""
        return [self.outcomes[Job(method, lr, seed)] for seed in range(self.plan.seeds)]

    def mean(self, method: Method, lr: float, name: str) -> float:
        return mean_of(self.of(method, lr), name)

    def rungs(self, lr: float) -> list[Method]:
        """The thresholds that ran at a learning rate, the lowest first."""
        found = {job.method for job in self.outcomes if job.lr == lr and job.method.value is not None}
        return sorted(found, key=lambda method: method.value or 0.0)

    def opponent(self, density: float, lr: float, what: str) -> Method | None:
        """The lowest threshold that sent at most as much as TopK(density)."""
        most = self.mean(topk(density), lr, what)
        return next((m for m in self.rungs(lr) if self.mean(m, lr, what) <= most), None)

    def closer(self) -> list[Job]:
        """Runs of thresholds that come closer to what TopK sends, where none is close yet."""
        found = {}
        for density, lr, what in itertools.product(self.plan.densities, self.plan.rates, BUDGETS):
            value = self._interpolated(self.mean(topk(density), lr, what), lr, what)
            if value is not None:
                found |= {Job(rung(value), lr, seed): None for seed in range(self.plan.seeds)}
        return [job for job in found if job not in self.outcomes]

    def _interpolated(self, most: float, lr: float, what: str) -> float | None:
        """The threshold that would send a little less than ``most``, linear between logarithms; None: there is one."""
        sent = {method.value or 0.0: self.mean(method, lr, what) for method in self.rungs(lr)}
        below = next((value for value, amount in sent.items() if amount <= most), None)
        above = max((value for value in sent if below is None or value < below), default=None)
        if below is None or above is None or sent[below] > _CLOSE * most:
            return None
        share = math.log(0.5 * (1.0 + _CLOSE) * most / sent[above]) / math.log(sent[below] / sent[above])
        return above * (below / above) ** share

    def best(self, method_at: Callable[[float], Method | None]) -> tuple[Method, float] | None:
        """A method, which may be another at each learning rate, at the rate that validation images choose."""
        found = [(method, lr) for lr in self.plan.rates if (method := method_at(lr)) is not None]
        if not self.plan.choose_rate:
            return found[0] if found else None
        return max(found, key=lambda one: self.mean(*one, "validation_accuracy"), default=None)

    def compared(self) -> "list[tuple[str, str, Method, float]]":
        """Rows of the table: provider, title, method, learning rate."""
        rows: list[tuple[str, str, Callable[[float], Method | None]]] = [
            (DENSE.provider, DENSE.title, lambda lr: DENSE)
        ]
        for density in self.plan.densities:
            for method in (topk(density), rule(density)):
                rows.append((method.provider, method.title, lambda lr, method=method: method))
            for what, words in BUDGETS.items():
                rows.append((
                    f"threshold_{words}_of_topk{density:g}", f"Threshold, TopK({density:g})'s {words}",
                    lambda lr, density=density, what=what: self.opponent(density, lr, what),
                ))  # fmt: skip
        picked = [(provider, title, self.best(method_at)) for provider, title, method_at in rows]
        return [(provider, title, *one) for provider, title, one in picked if one is not None]


def mean_of(outcomes: Sequence[Outcome], name: str) -> float:
    """Mean over seeds of a figure or a score."""
    return statistics.fmean(o.scores[name] if name in o.scores else getattr(o, name) for o in outcomes)


def cases(quick: bool) -> Iterator[tuple[str, Plan, Callable[[], Problem]]]:
    """Name, runs, problem."""
    if quick:
        yield "logreg_shuffled", Plan(2, (0.02,), ladder(0.02, 4, 2.0), (), 1), lambda: logreg(2, 100, False, 200)
        plan = Plan(2, (0.02,), ladder(0.02, 3, 2.0), (0.1, 0.2), 1)
        yield "digits_threshold", plan, lambda: perceptron(2, 3, 64)
        return
    plan = Plan(8, (0.01, 0.03), ladder(0.016, 6, 2.0), (), 1)
    yield "logreg", plan, lambda: logreg(8, 300, True)
    yield "logreg_shuffled", plan, lambda: logreg(8, 300, False)
    plan = Plan(4, (0.02,), ladder(0.016, 3, 2.5), (0.1, 0.2), 3)
    yield "digits_threshold", plan, lambda: perceptron(4, 40, 32)


def main() -> None:
    options = _arguments()
    for case, plan, make in cases(options.quick):
        if case not in options.cases:
            continue
        problem = make()
        if isinstance(problem, Logreg):
            plan = dataclasses.replace(plan, rates=(1.0 / (problem.smoothness + problem.l2),))
        runs, jobs = Runs(plan), plan.jobs
        for _ in range(1 + _ROUNDS):
            for outcome in ranks.launch(work, problem, jobs, world_size=plan.world):
                job = jobs[outcome.job]
                runs.outcomes[job] = outcome
                harness.log(
                    f"{case} {job.method.provider} lr {job.lr:.3g} seed {job.seed}: {outcome.bytes_sent / 1e6:.3f} MB, "
                    f"error {outcome.accumulated_error:.4g}, {outcome.scores}, {outcome.seconds:.1f} s"
                )
            jobs = runs.closer()
            if not jobs:
                break
        _record_all(options, case, problem, runs)
        _print_summary(case, runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case for case, _, _ in cases(False)]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--quick", action="store_true", help="a smoke test; its records do not count")
    parser.add_argument("--results", type=Path, default=records.RESULTS / "threshold.jsonl")
    return parser.parse_args()


def _record_all(options: argparse.Namespace, case: str, problem: Problem, runs: Runs) -> None:
    """Of every run what chooses its learning rate, if anything does; of those that are compared what counts."""
    chosen = runs.plan.choose_rate
    counts = ["accumulated_error", "accuracy" if chosen else "suboptimality"]
    for job, outcome in runs.outcomes.items():
        metrics = ["validation_accuracy"] if chosen else counts
        _record(options, case, problem, runs.plan, job.method.provider, job, outcome, metrics)
    for provider, _, method, lr in runs.compared():
        if chosen or provider != method.provider:  # else it is there already
            for seed, outcome in enumerate(runs.of(method, lr)):
                _record(options, case, problem, runs.plan, provider, Job(method, lr, seed), outcome, counts)


def _record(
    options: argparse.Namespace, case: str, problem: Problem, plan: Plan, provider: str, job: Job, outcome: Outcome,
    metrics: Sequence[str],
) -> None:  # fmt: skip
    figures = {**outcome.scores, "accumulated_error": outcome.accumulated_error}
    for metric in metrics:
        records.append(
            options.results,
            bench="training",
            case=case,
            provider=provider,
            metric=metric,
            value=figures[metric],
            dataset="digits",
            **problem.facts,
            optimizer="SGD",
            memory="Residual()",
            momentum=problem.momentum,
            lr=job.lr,
            lr_grid=plan.rates,
            compressor=repr(job.method.compressor),
            threshold=outcome.threshold,
            thresholds=plan.values,
            seed=job.seed,
            steps=problem.steps,
            world_size=plan.world,
            backend=ranks.backend(plan.world),
            accumulated_error=outcome.accumulated_error,
            entries=outcome.entries,
            overflow=outcome.overflow,
            bytes_sent=outcome.bytes_sent,
            bytes_dense=outcome.bytes_dense,
            **{f"{name}_second_half": value for name, value in outcome.second_half.items()},
            curve=outcome.curve,
            seconds=round(outcome.seconds, 3),
            quick=options.quick,
        )


def _print_summary(case: str, runs: Runs) -> None:
    score, digits = ("accuracy", 4) if runs.plan.choose_rate else ("suboptimality", 5)
    rows = [
        [
            title,
            repr(method.compressor).partition("(")[0] if method is DENSE else _knob(own[0], method),
            f"{lr:.3g}",
            f"{mean_of(own, 'bytes_sent') / 1e6:.3f}",
            f"{mean_of(own, 'entries') / 1e3:.1f}",
            f"{mean_of(own, 'overflow') / 1e3:.1f}",
            f"{mean_of(own, 'accumulated_error'):.4g}",
            f"{mean_of(own, score):.{digits}f}",
        ]
        for _, title, method, lr in runs.compared()
        for own in [runs.of(method, lr)]
    ]
    header = ("", "sends", "lr", "MB", "k entries", "k no room", "error", score)
    tables.print_table(f"{case}: a rank, whole run, mean over seeds", header, rows)


def _knob(outcome: Outcome, method: Method) -> str:
    return method.title if outcome.threshold is None else f">= {outcome.threshold:.3g}"


if __name__ == "__main__":
    main()

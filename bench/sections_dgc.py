"""Tables of dense training beside the recipe, and of the ablation; None where there are no records."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from book import Book, Key, Record, markdown, origin, run_of


class Pair(NamedTuple):
    """A task, dense and compressed."""

    words: str
    case: str
    metric: str
    bench: str = "ablation"
    ours: str = "topk"
    words_of_ours: str = "TopK(0.001)"
    lengths: tuple[int, ...] = ()  # of trainings, in steps; the newest one's where there are none
    final_lr: float = 0.1  # share of the learning rate that is left at the end


PAIRS = (
    Pair("ResNet-20 of twice the width, Fashion-MNIST, SGD", "resnet", "test_accuracy"),
    Pair("LSTM, characters, SGD, local clipping", "lstm", "test_loss", lengths=(2500, 8000)),
    Pair(
        "GPT, characters, AdamW, DDP hook", "shakespeare", "test_loss", "training", "topk0.01_ranked",
        "TopK(0.01), ranked by Adam's scale",
    ),
    Pair(
        "GPT, the same, learning rate to 0", "shakespeare", "test_loss", "training", "topk0.001_ranked",
        "TopK(0.001), ranked by Adam's scale", final_lr=0.0,
    ),
)  # fmt: skip
LEAST_SEEDS = 2
ORDER = (
    "dense", "lars_dense", "topk", "topk_residual", "topk_no_masking", "topk_no_warmup", "topk_dense_warmup",
    "topk_tensor", "topk_sampled", "topk_own_momentum", "topk_decoupled", "topk_bf16", "topk_lars", "threshold",
    "jointspar0.7", "jointspar0.6", "jointspar0.5", "jointspar0.7_most", "jointspar0.6_early", "jointspar_lars0.6",
    "jointspar_lars0.5", "jointspar_lars0.6_most", "jointspar_lars0.6_early", "jointspar_lars0.5_early",
)  # fmt: skip


def runs(book: Book, pair: Pair, provider: str, steps: int, beside: Sequence[Record] = ()) -> list[Record]:
    """One for each seed, of trainings of so many steps; of several learning rates the one that validation prefers.

    beside: take those of the same command, if there are any: they had as much of the machine.
    """

    def series(*fields: tuple[str, Any]) -> list[Record]:
        fields = (("steps", steps), ("final_lr", pair.final_lr), *fields)
        return book.series(pair.case, Key(pair.bench, provider, pair.metric, fields), "seed")

    if beside and (same := series(("command", beside[0]["command"]))):
        return same

    newest = series()
    if not newest or newest[0].get("validation") is None:
        return newest
    rates = {row["lr"] for row in rows_of(book, pair) if row["provider"] == provider and row["steps"] == steps}
    tried = [rows for lr in sorted(rates) if (rows := series(("lr", lr))) and run_of(rows[0]) == run_of(newest[0])]
    whole = [rows for rows in tried if len(rows) == len(newest)]
    best = max if pair.metric == "test_accuracy" else min
    return best(whole, key=lambda rows: mean(rows, "validation"), default=newest)


def rows_of(book: Book, pair: Pair) -> list[Record]:
    return [
        row for row in book.rows if (row["bench"], row["case"], row["metric"]) == (pair.bench, pair.case, pair.metric)
    ]


def newest(book: Book, pair: Pair) -> list[int]:
    """The length of the training that was last, if there was one."""
    return [row["steps"] for row in rows_of(book, pair) if row["provider"] == pair.ours][-1:]


def dgc(book: Book) -> str | None:
    """Quality and bytes of dense training and of the recipe."""
    lines, used = [], []
    for pair, steps in [(each, steps) for each in PAIRS for steps in each.lengths or newest(book, each)]:
        ours = runs(book, pair, pair.ours, steps)
        dense = runs(book, pair, "dense", steps, ours)
        if min(len(dense), len(ours)) < LEAST_SEEDS:
            continue
        used += dense + ours
        for words, rows in (("dense", dense), (pair.words_of_ours, ours)):
            lines.append([
                f"{pair.words}, {steps} steps" if rows is dense else "", words, quality(rows), str(len(rows)),
                f"{mean(rows, 'bytes_last_step') / 1e6:.3f} MB", f"{ratio_at_end(rows):.0f}x",
                f"{mean(rows, 'bytes_sent') / 1e6:.0f} MB", f"{ratio(rows):.0f}x", f"{mean(rows, 'seconds'):.0f} s",
            ])  # fmt: skip
    if not lines:
        return None
    header = [
        "", "gradients", "test accuracy, or loss in nats per character", "seeds", "sent per step", "fewer bytes",
        "in all steps", "fewer bytes", "time",
    ]  # fmt: skip
    note = (
        "Mean and standard deviation over seeds. Bytes are those that one rank hands to collectives, of the whole "
        "model, uncompressed parameters included: per step at the end, and over the run with its warm-up. Times are of "
        "runs that share their GPUs with others: no measure of speed. "
        f"{origin(used)}"
    )
    return markdown(header, lines, words=2) + "\n\n" + note


def ablation(book: Book) -> str | None:
    """Every row of the ablation, a table for each task."""
    return "\n\n".join(table for pair in PAIRS[:2] if (table := _ablation(book, pair))) or None


def _ablation(book: Book, pair: Pair) -> str | None:
    providers: dict[int, dict[str, None]] = {}  # in the length that most methods were trained for
    for row in rows_of(book, pair):
        providers.setdefault(row["steps"], {})[row["provider"]] = None
    steps = max(providers, key=lambda steps: len(providers[steps]), default=0)
    found = {p: rows for p in providers.get(steps, ()) if (rows := runs(book, pair, p, steps))}
    if pair.ours not in found:
        return None
    sign = 100.0 if pair.metric == "test_accuracy" else 1.0
    lines = []
    shorter = [rows for each in sorted(providers) if each < steps and (rows := runs(book, pair, "dense", each))]
    for rows in [*sorted(found.values(), key=lambda rows: ORDER.index(rows[0]["provider"])), *shorter]:
        behind = sign * (mean(rows, "value") - mean(found[pair.ours], "value"))
        lines.append([
            rows[0]["title"] + ("" if rows[0]["steps"] == steps else f", {rows[0]['steps']} steps"),
            f"{rows[0]['lr']:g}", quality(rows), f"{behind:+.2f}" if sign > 1 else f"{behind:+.3f}",
            f"{ratio(rows):.0f}x", f"{ratio_at_end(rows):.0f}x",
        ])  # fmt: skip
    used = [row for rows in (*found.values(), *shorter) for row in rows]
    one = found[pair.ours][0]
    clipped = f", clipped to {one['max_grad_norm']:g}" if one["max_grad_norm"] else ""
    note = (
        f"{one['dataset']}, {one['model']}, {one['parameters'] / 1e6:.2f} M parameters; {one['steps']} steps, "
        f"{one['world_size']} ranks of {one['batch_per_rank']}{clipped}; {len({r['seed'] for r in used})} seeds, mean "
        f"and standard deviation. Each method's lr from a grid, by validation, in trials of {one['trial_steps']} "
        f"steps. {origin(used)}"
    )
    header = ["", "lr", pair.metric.replace("_", " "), "against the recipe", "fewer bytes", "at the end"]
    return markdown(header, lines) + "\n\n" + note


def mean(rows: Sequence[Record], field: str) -> float:
    return statistics.mean(row[field] for row in rows)


def quality(rows: Sequence[Record]) -> str:
    """Mean and standard deviation of accuracies in per cent, of losses as they are."""
    factor, digits, unit = (100.0, 2, " %") if rows[0]["metric"] == "test_accuracy" else (1.0, 3, "")
    values = [factor * row["value"] for row in rows]
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}{unit}"


def ratio(rows: Sequence[Record]) -> float:
    return mean(rows, "bytes_dense") / mean(rows, "bytes_sent")


def ratio_at_end(rows: Sequence[Record]) -> float:
    return mean(rows, "bytes_dense") / rows[0]["steps"] / mean(rows, "bytes_last_step")

"""Tables of what several ranks show: links, training steps over them, accuracy; None where there are no records."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from book import CASES, Book, Key, Record, markdown, origin, title
from sections import Cell, column, grid, number

FLAT = {
    "fusedcomp_fp32": "fusedcomp, TopK(0.001)",
    "fusedcomp_fp32_wd": "the same with weight decay",
    "nccl_fp32": "NCCL all-reduce, fp32, and torch's fused SGD",
    "nccl_bf16": "NCCL all-reduce, bf16, and torch's fused SGD",
}


def nvlink(book: Book) -> str | None:
    """Exchange and update of 100 M elements with nothing to hide behind."""
    lines, used = [], []
    for case in book.cases("step"):
        if not case.startswith("flat100m@"):
            continue
        for provider, words in FLAT.items():
            rows = [book.ms("step", case, provider, metric) for metric in ("ms", "graph_ms")]
            if any(rows):
                used += rows
                lines.append([words, *map(number, rows)])
    if not lines:
        return None
    return markdown(["ms", "plain calls", "replayed CUDA graph"], lines) + "\n\n" + origin(used)


ROWS = {
    "nocomm": "no communication",
    "in_step": "ranks in step, one number sent",
    "ddp": "DDP",
    "ddp_bf16": "DDP, bf16 hook",
    "ddp_fp16": "DDP, fp16 hook",
    "powersgd1": "PowerSGD hook, rank 1",
    "powersgd4": "PowerSGD hook, rank 4",
    "topk0.01": "fusedcomp, TopK(0.01)",
    "topk0.001": "fusedcomp, TopK(0.001)",
    "topk0.001_bf16": "the same, bf16 on the wire",
    "threshold0.001": "Threshold.from_density(0.001)",
    "block_topk0.001": "BlockTopK(0.001)",
    "topk0.001_tree": "TopK(0.001), merged along a tree",
    "topk0.001_split": "TopK(0.001), split and reduced",
    "random0.01": "RandomK(0.01)",
    "topk0.001_2level": "TopK(0.001), two levels",
    "hook0.001": "DDP, TopK(0.001) hook",
    "nocomm_graph": "no communication, CUDA graph",
    "topk0.001_graph": "TopK(0.001), CUDA graph",
}


def netlab(book: Book) -> str | None:
    """A training step against the rate of the links: a row per model and link, a column per way to exchange."""
    cases = [case for case in netlab_cases(book) if book.ms("netlab", case, "nocomm")]
    columns = {words: column(book, "netlab", provider) for provider, words in ROWS.items()}
    table = grid(book, "ms", columns, cases, "A training step, median over stretches of steps.", digits=1)
    return None if table is None else table + "\n\n" + exposed(book, cases)


HEADLINE = ("nocomm", "in_step", "ddp", "ddp_bf16", "powersgd1", "topk0.001", "nocomm_graph", "topk0.001_graph")


def headline(book: Book) -> str | None:
    """The same of one GPU per node, and of what a reader would choose between."""
    cases = [case for case in netlab_cases(book) if case.endswith("x1") and book.ms("netlab", case, "nocomm")]
    columns = {ROWS[provider]: column(book, "netlab", provider) for provider in HEADLINE}
    return grid(book, "ms", columns, cases, "Median over stretches of steps.", digits=1)


def exposed(book: Book, cases: Sequence[str]) -> str:
    """Communication that is not hidden, in the same layout."""
    exchanging = {provider: words for provider, words in ROWS.items() if not provider.startswith("nocomm")}
    found = [[book.ms("netlab", case, provider) for provider in exchanging] for case in cases]
    words = list(exchanging.values())
    kept = [i for i in range(len(words)) if any(row[i] for row in found)]
    lines = [
        [title(case), *(_exposed(row[i]) for i in kept)] for case, row in zip(cases, found, strict=True)
    ]  # fmt: skip
    note = f"The same steps, less the step without communication. {origin(r for row in found for r in row)}"
    return markdown(["exposed ms", *(words[i] for i in kept)], lines) + "\n\n" + note


def _exposed(row: Cell) -> str:
    return "-" if row is None or row.get("exposed_ms") is None else f"{row['exposed_ms']:.1f}"


def netlab_cases(book: Book) -> list[str]:
    """By model, then layout, then rate; NVLink last."""

    def order(case: str) -> tuple[Any, ...]:
        model, _, where = case.partition("@")
        layout = where.partition("/")[2]
        return list(CASES).index(model) if model in CASES else len(CASES), -int(layout.partition("x")[0]), rate_of(case)

    return sorted(book.cases("netlab"), key=order)


NVLINK_GBPS = 3600.0  # 450 GB/s in each direction, an H100's nominal rate


def rate_of(case: str) -> float:
    """Gbit/s of a netlab case's links."""
    link = case.partition("@")[2].partition("/")[0]
    return NVLINK_GBPS if link == "nvlink" else float(link.removesuffix("gbps"))


def curves(book: Book, model: str) -> dict[str, dict[float, Record]]:
    """Provider -> Gbit/s -> record: one GPU per node, of every rate the layout with most nodes; and NVLink."""
    cases = [case for case in netlab_cases(book) if case.startswith(f"{model}@") and case.endswith("x1")]
    largest = {rate_of(case): case for case in reversed(cases)}
    found: dict[str, dict[float, Record]] = {}
    for rate, case in largest.items():
        for provider in ROWS:
            row = book.ms("netlab", case, provider)
            if row is not None:
                found.setdefault(provider, {})[rate] = row
    return {provider: found[provider] for provider in ROWS if provider in found}


def break_even(book: Book, model: str, ours: str = "topk0.001", dense: str = "ddp_bf16") -> str | None:
    """The rate at which a dense bf16 all-reduce takes as long, between measured points linear in 1 / rate."""
    found = curves(book, model)
    if ours not in found or dense not in found:
        return None
    rates = sorted(found[ours].keys() & found[dense].keys())
    gains = [found[dense][rate]["value"] - found[ours][rate]["value"] for rate in rates]
    name = title(model)
    for (low, gain), (high, next_gain) in pairwise(zip(rates, gains, strict=True)):
        if gain > 0 >= next_gain:
            share = gain / (gain - next_gain)
            rate = 1.0 / (1.0 / low + share * (1.0 / high - 1.0 / low))
            return (
                f"{name}: dense bf16 all-reduce and TopK(0.001) break even at about {rate:.0f} Gbit/s, interpolated "
                f"linearly in 1 / rate between the measurements at {_link(low)} and {_link(high)}. Above it dense bf16 "
                "is faster."
            )
    if not rates:
        return None
    if gains[-1] > 0:
        return f"{name}: TopK(0.001) beats a dense bf16 all-reduce at every measured rate, up to {_link(rates[-1])}."
    return f"{name}: a dense bf16 all-reduce beats TopK(0.001) at every measured rate, from {_link(rates[0])}."


def _link(rate: float) -> str:
    return f"NVLink (nominally {rate:.0f} Gbit/s)" if rate == NVLINK_GBPS else f"{rate:g} Gbit/s"


# ---- training ------------------------------------------------------------------------------------------------------

METHODS = {
    "dense": "dense SGD",
    "topk0.01": "SGD + TopK(0.01)",
    "topk0.01_bf16": "the same, bf16 states and wire",
    "topk0.01_decoupled": "the same, decoupled weight decay",
    "topk0.01_sampled": "the same, sampled selection",
    "topk0.01_sidco": "the same, SIDCo's threshold",
    "topk0.01_tree": "the same, merged in a tree",
    "topk0.01_split": "the same, split and reduced",
    "lars_topk0.01": "LARS + TopK(0.01)",
    "threshold0.01": "SGD + Threshold.from_density(0.01), momentum behind",
    "block_topk0.01": "SGD + BlockTopK(0.01)",
    "cat_affine": "SGD + CAT(AffineCost(fixed=5000))",
    "cat_packets": "SGD + CAT(PacketCost()), momentum behind",
    "cat_quantized": "SGD + CAT(AffineCost(fixed=40000)), signs, momentum behind",
    "cat_stochastic": "SGD + CAT(AffineCost()), drawn",
    "random0.05": "SGD + RandomK(0.05)",
    "random0.25_unbiased": "SGD + RandomK(0.25), unbiased",
    "jointspar0.7": "dense SGD, JointSpar at 0.7",
}


def training_runs(book: Book, case: str) -> dict[str, list[Record]]:
    """Method in words -> the test accuracies of its seeds."""
    providers = dict.fromkeys(
        row["provider"] for row in book.rows if row["bench"] == "training" and row["case"] == case
    )
    names = {**METHODS, **{provider: provider for provider in providers if provider not in METHODS}}
    runs = {n: book.series(case, Key("training", p, "test_accuracy"), "seed") for p, n in names.items()}
    return {name: rows for name, rows in runs.items() if rows}


def accuracy(rows: Sequence[Record]) -> tuple[float, float]:
    """Mean and standard deviation over seeds, in per cent."""
    values = [100 * row["value"] for row in rows]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def training(book: Book) -> str | None:
    """Test accuracy over seeds."""
    tables = [_training(book, case) for case in book.cases("training")]
    return "\n\n".join(table for table in tables if table) or None


def _training(book: Book, case: str) -> str | None:
    runs = training_runs(book, case)
    if not runs:
        return None
    lines = []
    for name, rows in runs.items():
        (mean, deviation), first = accuracy(rows), rows[0]
        lines.append([
            name,
            f"{first['lr']:g}",
            f"{mean:.2f} ± {deviation:.2f} %" if len(rows) > 1 else f"{mean:.2f} %",
            _against(rows, runs.get(METHODS["dense"], [])),
            f"{first['bytes_sent'] / 1e6:.2f} MB",
            f"{first['bytes_dense'] / first['bytes_sent']:.1f}x",
        ])  # fmt: skip
    used = [row for rows in runs.values() for row in rows]
    one = used[0]
    note = (
        f"{one['dataset']}, a CNN of {one['parameters']} parameters, {one['epochs']} epochs, {one['world_size']} ranks "
        f"of {one['batch_per_rank']} images; {len({r['seed'] for r in used})} seeds, mean and standard deviation. "
        f"Against dense: the mean over seeds, in points, and its standard error. {origin(used)}"
    )
    header = ["", "lr", "test accuracy", "against dense", "sent per rank", "ratio, whole model"]
    return markdown(header, lines) + "\n\n" + note


def _against(rows: Sequence[Record], dense: Sequence[Record]) -> str:
    """Seed by seed: a seed's initial weights and order of images are the same for both."""
    other = {row["seed"]: row["value"] for row in dense}
    differences = [100 * (row["value"] - other[row["seed"]]) for row in rows if row["seed"] in other]
    if rows is dense or len(differences) < 2:
        return "-"
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.mean(differences):+.2f} ± {error:.2f}"


LANGUAGE = {
    "dense": "dense",
    "topk0.01_warmup": "TopK(0.01) hook, 5 % density warm-up",
    "topk0.01": "TopK(0.01) hook",
    "topk0.01_advised": "TopK(0.01) hook, warm-up, betas and clipping as advised",
    "topk0.01_ranked": "TopK(0.01) hook, as advised and ranked by Adam's scale",
    "topk0.001_ranked": "TopK(0.001) hook, as advised and ranked by Adam's scale",
    "powersgd4": "PowerSGD hook, rank 4",
}


def language(book: Book) -> str | None:
    """Test loss of the character model over seeds: AdamW with the DDP hook. A table for each schedule of training."""
    tables = []
    for case in book.cases("training"):
        rows = [row for p in LANGUAGE for row in book.all(case, Key("training", p, "test_loss"))]
        schedules = {(row["steps"], row.get("final_lr", 0.1)) for row in rows}
        tables += [_language(book, case, *schedule) for schedule in sorted(schedules, reverse=True)]
    return "\n\n".join(tables) or None


def _language(book: Book, case: str, steps: int, final_lr: float) -> str:
    schedule = (("steps", steps), ("final_lr", final_lr))
    runs = {w: book.series(case, Key("training", p, "test_loss", schedule), "seed") for p, w in LANGUAGE.items()}
    runs = {words: rows for words, rows in runs.items() if rows}
    dense = [row["value"] for row in runs.get(LANGUAGE["dense"], [])]
    lines = []
    for words, rows in runs.items():
        values, first = [row["value"] for row in rows], rows[0]
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        behind = statistics.mean(values) - statistics.mean(dense) if dense else None
        lines.append([
            words,
            f"{first['lr']:g}",
            "{:g}, {:g}".format(*first["betas"]),
            f"{statistics.mean(values):.3f}{spread}",
            "-" if behind is None else f"{behind:+.3f}",
            f"{statistics.mean(row['train_loss'] for row in rows):.3f}",
            f"{first['bytes_dense'] / first['bytes_sent']:.1f}x",
        ])  # fmt: skip
    used = [row for rows in runs.values() for row in rows]
    one, chosen = used[0], "; or ".join(dict.fromkeys(row["lr_chosen_by"] for row in used))
    dropout = f", dropout {one['dropout']:g}" if one.get("dropout") else ""
    note = (
        f"AdamW, a GPT of {one['parameters'] / 1e6:.2f} M parameters on {one['case'].title()}'s plays, character by "
        f"character; {one['steps']} steps, at the end of which the rate is {final_lr:g} of what it was, "
        f"{one['world_size']} ranks of {one['batch_per_rank']} windows of {one['context']}{dropout}; "
        f"{len({r['seed'] for r in used})} seeds, mean and standard deviation; training loss of the last tenth; bytes "
        f"of the whole run. Learning rate: {chosen}. {origin(used)}"
    )
    header = ["", "lr", "betas", "test loss, nats per character", "against dense", "training loss", "fewer bytes"]
    return markdown(header, lines) + "\n\n" + note

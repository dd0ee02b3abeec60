"""Write the tables of README.md from the records in bench/results.

python bench/report.py            rewrite what stands between <!-- begin NAME --> and <!-- end NAME -->
python bench/report.py --check    exit 1 if a table is not what the records say
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import records

README = records.ROOT / "README.md"
Record = dict[str, Any]


def latest(rows: Iterable[Record]) -> list[Record]:
    """The rows of the newest commit that was measured; an older run is history."""
    rows = list(rows)
    newest = max(rows, key=lambda row: row["date"])["commit"]
    return [row for row in rows if row["commit"] == newest]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def origin(row: Record) -> str:
    """Where the figures of a table come from, in one line."""
    driver = f", driver {row['driver']}" if row["driver"] else ""
    return (
        f"{row['card']}, torch {row['torch']}, triton {row['triton']}{driver}; commit {row['commit'][:10]}, "
        f"{row['date'][:10]}, `{row['command'].partition(' --')[0]}`."
    )


CASES = {
    "resnet50": "ResNet-50, 161 tensors, 25.6 M",
    "gpt2": "GPT-2 small, 124 M",
    "flat340m": "one tensor, 340 M",
}
# Column -> (bench, provider, metric).
STEP_COLUMNS = {
    "torch SGD, foreach (default)": ("step", "torch_sgd_foreach", "ms"),
    "torch SGD, fused": ("step", "torch_sgd_fused", "ms"),
    "eager DGC, compress only": ("compress", "eager", "ms"),
    "ours: compress": ("compress", "fusedcomp_fp32", "ms"),
    "ours: apply, 8 ranks": ("apply", "fusedcomp_fp32", "ms"),
    "ours: whole step": ("step", "fusedcomp_fp32", "ms"),
    "with weight decay": ("step", "fusedcomp_fp32_wd", "ms"),
}


def step_table() -> str:
    """Milliseconds of one step, replayed from a CUDA graph, all parameters in one bucket."""
    rows = latest(records.read(records.RESULTS / "step.jsonl"))
    figures = {
        (row["case"], row["bench"], row["provider"], row["metric"]): row["value"]
        for row in rows
        if row.get("timing") == "graph" and row.get("flush") == "write" and row.get("buckets") == "one"
    }
    payload = {
        row["case"]: row["value"] for row in rows if row["metric"] == "payload_bytes" and row.get("buckets") == "one"
    }
    dense = {
        row["case"]: row["value"] for row in rows if row["metric"] == "dense_bytes" and row.get("buckets") == "one"
    }
    table = []
    for case, title in CASES.items():
        cells = [figures.get((case, *column)) for column in STEP_COLUMNS.values()]
        sent = f"{payload[case] / 1e6:.2f} of {dense[case] / 1e6:.0f} MB" if case in payload else "-"
        table.append([title, *("-" if cell is None else f"{cell:.3f}" for cell in cells), sent])
    note = (
        f"Density {rows[0]['density']}, fp32, states after {rows[0]['train_steps']} training steps. Eager DGC "
        f"is the same algorithm as a chain of torch operations on one flat vector. {origin(rows[0])}"
    )
    return markdown(["ms", *STEP_COLUMNS, "bytes sent per rank"], table) + "\n\n" + note


METHODS = {"dense": "dense SGD", "topk0.01": "SGD + TopK(0.01)", "lars_topk0.01": "LARS + TopK(0.01)"}


def training_table() -> str:
    """Test accuracy over seeds."""
    rows = [r for r in latest(records.read(records.RESULTS / "training.jsonl")) if r["metric"] == "test_accuracy"]
    table = []
    for provider, title in METHODS.items():
        runs = [row for row in rows if row["provider"] == provider]
        accuracy = [100 * row["value"] for row in runs]
        first = runs[0]
        table.append([
            title,
            f"{first['lr']:g}",
            f"{statistics.mean(accuracy):.2f} ± {statistics.stdev(accuracy):.2f} %",
            f"{first['bytes_sent'] / 1e6:.2f} MB",
            f"{first['bytes_dense'] / first['bytes_sent']:.1f}x",
        ])  # fmt: skip
    one = rows[0]
    note = (
        f"{one['dataset']}, a CNN of {one['parameters']} parameters, {one['epochs']} epochs, {one['world_size']} ranks "
        f"of {one['batch_per_rank']} images; {len({r['seed'] for r in rows})} seeds, mean and standard deviation. "
        f"{origin(one)}"
    )
    return markdown(["", "lr", "test accuracy", "sent per rank", "ratio, whole model"], table) + "\n\n" + note


TABLES: dict[str, Callable[[], str]] = {"step": step_table, "training": training_table}


def render(text: str) -> str:
    """README with every table anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        if not tail:
            raise SystemExit(f"README.md has no place for the table {name!r}: {begin} ... {end}")
        text = f"{head}{begin}\n{table()}\n{end}{tail}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = README.read_text()
    new = render(text)
    if arguments.check:
        sys.exit(0 if new == text else "README.md differs from the records: run python bench/report.py")
    README.write_text(new)


if __name__ == "__main__":
    main()

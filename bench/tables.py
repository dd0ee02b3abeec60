"""Tables of the records that a run has just written, for the terminal."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import records

Record = dict[str, Any]


def count(path: Path) -> int:
    """Records there so far."""
    return sum(1 for _ in records.read(path)) if path.exists() else 0


def show(path: Path, skip: int) -> None:
    """Times, then everything else, of the records after the first ``skip``."""
    rows = list(records.read(path))[skip:] if path.exists() else []
    times = [r for r in rows if r["metric"].endswith("ms")]
    show_times(times)
    others = [r for r in rows if r not in times]
    print_table(
        "Everything else: quotients of medians, counts, bytes; us for host and single launches.",
        ("where", "provider", "metric", "value", ""),
        [(_place(r), r["provider"], r["metric"], number(r["value"], 4), _notes(r)) for r in others],
    )


def show_times(rows: Sequence[Record]) -> None:
    merged: dict[tuple[Any, ...], dict[str, Record]] = {}
    for row in rows:
        key = (_place(row), row["provider"], row["metric"], row.get("ranks"))
        merged.setdefault(key, {})[row.get("timing", "events")] = row
    print_table(
        "Milliseconds. graph: device time of a replayed graph, with p20 and p80. events: plain calls.\n"
        "GB/s and share of the copy rate: the least traffic over the first time given.",
        ("where", "provider", "graph", "p20", "p80", "events", "GB/s", "copy"),
        [_time_line(key, timings) for key, timings in merged.items()],
    )


def _time_line(key: tuple[Any, ...], timings: dict[str, Record]) -> list[str]:
    place, provider, metric, ranks = key
    graph, events = timings.get("graph", {}), timings.get("events", {})
    row = graph or events or next(iter(timings.values()))
    name = provider + ("" if metric == "ms" else f" {metric}") + (f" W={ranks}" if ranks else "")
    shown = [number(v) for v in (graph.get("value"), graph.get("p20"), graph.get("p80"), events.get("value"))]
    return [place, name, *shown, number(row.get("gb_per_s") or None, 0), number(row.get("copy_ratio") or None, 2)]


def _place(row: Record) -> str:
    buckets = row.get("buckets", "one")
    return f"{row['bench']} {row['case']}" + ("" if buckets == "one" else f" {buckets}")


def _notes(row: Record) -> str:
    keys = ("timing", "against", "launch", "buckets_sparse", "documented")
    return ", ".join(f"{key} {row[key]}" for key in keys if row.get(key) is not None)


def number(value: float | None, digits: int = 3) -> str:
    return (
        "" if value is None else f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits > 3 else f"{value:.{digits}f}"
    )


def print_table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Aligned; where the first cell is that of the line above it is left out."""
    lines = [list(line) for line in lines]
    if not lines:
        return
    widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
    print(f"\n{title}")
    above = ""
    for line in (list(columns), *lines):
        cells = ["" if line[0] == above else line[0], *line[1:]]
        above = line[0]
        print(" ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
    sys.stdout.flush()

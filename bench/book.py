"""The committed records, looked up by what they measure.

The newest record of a key counts, whatever else its run measured: an interrupted run does not hide what older runs
completed. Quotients are taken within one run only: same commit, card, versions and driver.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import linkgate
import records

Record = dict[str, Any]

_DEFAULTS = {"buckets": "one", "flush": "write"}  # a record without the field is one of these
_TIMINGS = ("graph", "events", "trace", "host")  # device time before the time of plain calls
_RUN = ("commit", "card", "torch", "triton", "driver")

CASES = {
    "resnet50": "ResNet-50, 161 tensors, 25.6 M",
    "gpt2": "GPT-2 small, 124 M",
    "flat340m": "one tensor, 340 M",
}
_SHORT = {"resnet50": "ResNet-50", "gpt2": "GPT-2 small", "flat340m": "340 M", "flat100m": "100 M"}


class Key(NamedTuple):
    """What a figure measures, but for the case."""

    bench: str
    provider: str
    metric: str = "ms"
    fields: tuple[tuple[str, Any], ...] = ()


class Quotient(NamedTuple):
    """A figure over another one of the same run."""

    value: float
    rows: tuple[Record, Record]


def _counts(row: Record) -> bool:
    """Not of a smoke test, nor of a link that did not keep to its rate."""
    return not row.get("quick") and linkgate.keeps_up(row.get("gate"))


class Book:
    """All records of a folder that count, oldest first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = [row for path in sorted(folder.glob("*.jsonl")) for row in records.read(path) if _counts(row)]
        self.rows = sorted(rows, key=lambda row: row["date"])
        self._by_key: dict[tuple[str, str, str, str], list[Record]] = {}
        for row in self.rows:
            key = (row["bench"], row["case"], row["provider"], row["metric"])
            self._by_key.setdefault(key, []).append(row)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def cases(self, bench: str) -> list[str]:
        """The cases that a bench has records of: known ones first, in their order."""
        found = list(dict.fromkeys(row["case"] for row in self.rows if row["bench"] == bench))
        return [case for case in CASES if case in found] + [case for case in found if case not in CASES]

    def all(self, case: str, key: Key) -> Iterator[Record]:
        """The records of a key, newest first; of equal age, device time first."""
        wanted = _DEFAULTS | dict(key.fields)
        rows = self._by_key.get((key.bench, case, key.provider, key.metric), [])
        newest_first = sorted(rows, key=lambda row: row["date"], reverse=True)
        kept = [row for row in newest_first if all(row.get(name, value) == value for name, value in wanted.items())]
        for run in dict.fromkeys(map(run_of, kept)):
            yield from sorted((row for row in kept if run_of(row) == run), key=_timing)

    def find(self, case: str, key: Key) -> Record | None:
        """The newest record of a key."""
        return next(self.all(case, key), None)

    def ms(self, bench: str, case: str, provider: str, metric: str = "ms", **fields: Any) -> Record | None:
        """``find``, spelled out."""
        return self.find(case, Key(bench, provider, metric, tuple(fields.items())))

    def series(self, case: str, key: Key, by: str) -> list[Record]:
        """One record for each value of the field ``by``, of the newest commit that has any, in order of appearance."""
        rows = list(self.all(case, key))
        if not rows:
            return []
        newest = {row.get(by): row for row in reversed(rows) if run_of(row) == run_of(rows[0])}
        order = dict.fromkeys(row.get(by) for row in self.rows if row["metric"] == key.metric)
        return [newest[value] for value in order if value in newest]

    def quotient(self, case: str, above: Sequence[Key], below: Sequence[Key]) -> Quotient | None:
        """The newest run's smallest figure of ``above`` over its smallest of ``below``, timed the same way.

        Device time where both sides have it. A side of several keys stands for the best of them.
        """
        rows = {side: [row for key in keys for row in self.all(case, key)] for side, keys in ((0, above), (1, below))}
        runs = sorted({run_of(row): row["date"] for row in reversed(rows[0])}.items(), key=lambda item: item[1])
        for run, _ in reversed(runs):
            for timing in (*_TIMINGS, None):
                sides = [[r for r in rows[s] if run_of(r) == run and r.get("timing") == timing] for s in (0, 1)]
                if all(sides):
                    top, bottom = (min(newest_by_provider(side), key=lambda r: r["value"]) for side in sides)
                    return Quotient(top["value"] / bottom["value"], (top, bottom))
        return None


def newest_by_provider(rows: Iterable[Record]) -> list[Record]:
    newest: dict[str, Record] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        newest[row["provider"]] = row
    return list(newest.values())


def run_of(row: Record) -> tuple[Any, ...]:
    return tuple(row[name] for name in _RUN)


def _timing(row: Record) -> int:
    timing = row.get("timing")
    return _TIMINGS.index(timing) if timing in _TIMINGS else len(_TIMINGS)


# ---- words ---------------------------------------------------------------------------------------------------------


def origin(rows: Iterable[Record | None]) -> str:
    """Where figures come from, a sentence for every run: card, versions, driver, commit, dates, commands."""
    runs: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        if row is not None:
            runs.setdefault((*run_of(row), bool(row.get("dirty"))), []).append(row)
    by_age = sorted(runs.values(), key=lambda group: max(row.get("date", "") for row in group), reverse=True)
    return " ".join(map(_origin_of_run, by_age))


def _origin_of_run(rows: Sequence[Record]) -> str:
    row = rows[0]
    driver = f", driver {row['driver']}" if row["driver"] else ""
    changed = " with uncommitted changes" if row.get("dirty") else ""
    dates = sorted({row["date"][:10] for row in rows if row.get("date")})
    when = " to ".join(dict.fromkeys((*dates[:1], *dates[-1:])))
    commands = dict.fromkeys(f"`{row['command'].partition(' --')[0]}`" for row in rows)
    return (
        f"{row['card']}, torch {row['torch']}, triton {row['triton']}{driver}; commit {row['commit'][:10]}{changed}, "
        f"{when + ', ' if when else ''}{', '.join(commands)}."
    )


def title(case: str) -> str:
    """A case in words: ``resnet50@10gbps/4x1`` is "ResNet-50, 10 Gbit/s, 4 nodes of 1 GPU"."""
    model, _, where = case.partition("@")
    words = [_SHORT.get(model, model)]
    if where:
        link, _, layout = where.partition("/")
        nodes, _, per_node = layout.partition("x")
        gpus = "GPU" if per_node == "1" else "GPUs"
        if link == "nvlink":
            words.append(f"NVLink, {int(nodes) * int(per_node)} GPUs")
        else:
            words.append(f"{link.removesuffix('gbps')} Gbit/s, {nodes} nodes of {per_node} {gpus}")
    return ", ".join(words)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table; all but the first ``words`` columns are figures, to the right."""
    align = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, align, *rows])

"""Tables of how payloads travel and what merging them takes; None where there are no records."""

from collections.abc import Sequence

import flat
from book import Book, Key, Record, markdown, origin
from fusedcomp.kernels.segments import PAGE
from fusedcomp.plan.calibration import Bucket, load
from fusedcomp.plan.cost import COLLECTIVES, Cluster, Method, exchange_ms
from sections_ranks import rate_of

_TENSORS = flat.LINK_SHAPE[0]


def travel(book: Book) -> str | None:
    """A step of one bucket with each collective, beside what `plan` expects."""
    lines, used = [], []
    for case in sorted(book.cases("collectives"), key=lambda case: (nodes_of(case), -rate_of(case))):
        for density in flat.DENSITIES:
            rows = {way: runs(book, case, f"{way}{density:g}") for way in ("alone", *COLLECTIVES)}
            if not all(rows.values()):
                continue
            used += [row for found in rows.values() for row in found]
            expected = [expected_ms(rows["alone"][0], density, way) for way in COLLECTIVES]
            lines.append([f"{nodes_of(case)}, {rate_of(case):g} Gbit/s", f"{density:g}", *map(_medians, rows.values())])
            lines[-1] += ["dense" if ms is None else f"{ms:.2f}" for ms in expected]
    if not lines:
        return None
    header = ["nodes", "density", "alone", *COLLECTIVES, *(f"{way}, expected" for way in COLLECTIVES)]
    gpus = {row["gpus"] for row in used}
    note = (
        "Milliseconds: medians, the newest run first. Alone: the same without an exchange. Expected: alone, and "
        "what `plan` says of links and merges, which take turns on a GPU that nodes share. Nodes shared "
        f"{' or '.join(map(str, sorted(gpus)))} GPU{'' if gpus == {1} else 's'}. {origin(used)}"
    )
    return markdown(header, lines, words=2) + "\n\n" + note


def runs(book: Book, case: str, provider: str) -> list[Record]:
    """One record of each run, newest first."""
    return list({row["commit"]: row for row in book.all(case, Key("collectives", provider))}.values())


def nodes_of(case: str) -> int:
    return int(case.rpartition("/")[2].partition("x")[0])


def _medians(rows: Sequence[Record]) -> str:
    return "; ".join(f"{row['value']:.2f}" for row in rows)


def expected_ms(row: Record, density: float, way: str) -> float | None:
    """From the constants of `plan`, on top of the step ``row`` without an exchange; None: it goes dense."""
    case = row["case"]
    bucket = Bucket(row["elements"], 1.0, _TENSORS, -(-row["elements"] // PAGE), sparse=True)
    cluster = Cluster(nodes_of(case), 1, rate_of(case) * 1e9 / 8)
    shared = -(-cluster.world_size // row["gpus"])
    found = exchange_ms(bucket, Method("topk", density, collective=way), cluster, load(), shared)
    return None if found is None else row["value"] + found


def merging(book: Book) -> str | None:
    """A merge on the GPU beside taking the same payloads in."""
    keys = {(row["case"], row["density"], row["ranks"]): row for row in book.rows if row["bench"] == "merging"}
    lines, used = [], []
    for (case, density, ranks), one in sorted(keys.items(), key=lambda item: item[1]["ranks"] * item[1]["k"]):
        fields = (("density", density), ("ranks", ranks), ("timing", "graph"))
        merge, apply = (book.find(case, Key("merging", name, fields=fields)) for name in ("merge", "apply"))
        if merge is None or apply is None:
            continue
        used += [merge, apply]
        size = f"{one['elements'] / 1e6:.3g} M"
        lines.append([size, f"{density:g}", f"{ranks} x {one['k']}", f"{merge['value']:.3f}", f"{apply['value']:.3f}"])
    if not lines:
        return None
    header = ["elements", "density", "entries", "merged, ms", "taken in, ms"]
    return markdown(header, lines, words=3) + "\n\n" + origin(used)

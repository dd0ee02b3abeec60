"""Tables of what one GPU shows, every figure from a record; None where there are no records.

A table ends with a line that says where its figures come from.
"""

from collections.abc import Callable, Iterable
from typing import Any

from book import CASES, Book, Key, Record, markdown, origin, title

Cell = Record | None


def number(row: Cell, digits: int = 3, scale: float = 1.0) -> str:
    return "-" if row is None else f"{scale * row['value']:.{digits}f}"


def grid(
    book: Book, corner: str, columns: dict[str, Callable[[str], Cell]], cases: Iterable[str], note: str = "",
    digits: int = 3, name: Callable[[str], str] = title,
) -> str | None:  # fmt: skip
    """A row per case, a column per kind of figure; rows and columns without a figure are left out."""
    cells = {case: [find(case) for find in columns.values()] for case in cases}
    cells = {case: row for case, row in cells.items() if any(row)}
    if not cells:
        return None
    kept = [i for i in range(len(columns)) if any(row[i] for row in cells.values())]
    header = [corner, *(list(columns)[i] for i in kept)]
    lines = [[name(case), *(number(row[i], digits) for i in kept)] for case, row in cells.items()]
    told = [note] if note else []
    return markdown(header, lines) + "\n\n" + " ".join([*told, origin(r for row in cells.values() for r in row)])


def column(book: Book, bench: str, *providers: str, metric: str = "ms", **fields: Any) -> Callable[[str], Cell]:
    """The newest figure of the first provider that has one."""
    keys = [Key(bench, provider, metric, tuple(fields.items())) for provider in providers]
    return lambda case: next((row for key in keys if (row := book.find(case, key)) is not None), None)


def _known(row: dict[str, Any], name: str, default: Any) -> Any:
    return default if row.get(name) is None else row[name]


def step(book: Book) -> str | None:
    """Milliseconds of one step, replayed from a CUDA graph, all parameters in one bucket."""
    columns = {
        "torch SGD, foreach (default)": column(book, "step", "torch_sgd_foreach", timing="graph"),
        "torch SGD, fused": column(book, "step", "torch_sgd_fused", timing="graph"),
        "eager DGC, compress only": column(book, "compress", "eager", timing="graph"),
        "ours: compress": column(book, "compress", "fusedcomp_fp32", timing="graph"),
        "ours: apply, 8 ranks": column(book, "apply", "fusedcomp_fp32", timing="graph", ranks=8),
        "ours: whole step": column(book, "step", "fusedcomp_fp32", timing="graph"),
        "with weight decay": column(book, "step", "fusedcomp_fp32_wd", timing="graph"),
        "with skip_nonfinite": column(book, "step", "fusedcomp_fp32_guarded", timing="graph"),
        "with bf16 states": column(book, "step", "fusedcomp_bf16", timing="graph"),
    }
    rows = {case: [find(case) for find in columns.values()] for case in CASES}
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows.values())]
    found = [row for line in rows.values() for row in line if row is not None]
    if not found:
        return None
    lines = []
    for case, name in CASES.items():
        if any(rows[case]):
            sent, dense = (book.ms("compress", case, "fusedcomp_fp32", f"{what}_bytes") for what in ("sent", "dense"))
            traffic = f"{number(sent, 2, 1e-6)} of {number(dense, 0, 1e-6)} MB" if sent and dense else "-"
            lines.append([name, *(number(rows[case][i]) for i in kept), traffic])
    header = ["ms", *(list(columns)[i] for i in kept), "sent by a rank, of its gradients"]
    note = (
        f"Density {found[0]['density']}, fp32, states after {found[0]['train_steps']} training steps. Eager DGC "
        f"is the same algorithm as a chain of torch operations on one flat vector. {origin(found)}"
    )
    return markdown(header, lines) + "\n\n" + note


PASSES = (
    ("fp32 states", ("fusedcomp_fp32",), ("bandwidth_twin_fp32", "bandwidth_twin")),
    ("fp32 states, weight decay", ("fusedcomp_fp32_wd",), ("bandwidth_twin_fp32_wd", "bandwidth_twin_wd")),
    ("bf16 states", ("fusedcomp_bf16",), ("bandwidth_twin_bf16",)),
    ("bf16 states, weight decay", ("fusedcomp_bf16_wd",), ("bandwidth_twin_bf16_wd",)),
)


def one_pass(book: Book) -> str | None:
    """The pass alone beside the same reads and writes without arithmetic, both of one run."""
    lines, used = [], []
    for case in CASES:
        for words, ours, twins in PASSES:
            above = [Key("compress", name) for name in twins]
            quotient = book.quotient(case, above, [Key("compress", name, "pass_ms") for name in ours])
            if quotient is None:
                continue
            twin, one = quotient.rows
            used += [one, twin]
            speed = [f"{one['gb_per_s']:.0f}", f"{one['copy_ratio']:.2f}"]
            lines.append([title(case), words, number(one), number(twin), f"{quotient.value:.3f}", *speed])
    if not lines:
        return None
    header = ["case", "", "pass, ms", "bandwidth twin, ms", "share of the twin", "GB/s", "share of the copy rate"]
    return markdown(header, lines, words=2) + "\n\n" + origin(used)


def selection(book: Book) -> str | None:
    """Everything of the compress side, over the pass that selects nothing; and selections by others."""
    columns = {
        "pass without selection": column(book, "compress", "accumulate_fp32"),
        "compress, density 0.001": column(book, "compress", "fusedcomp_fp32"),
        "compress, density 0.01": column(book, "compress", "fusedcomp_fp32_d0.01"),
        "torch.topk alone": column(book, "compress", "torch_topk"),
        "CUB DeviceTopK alone": column(book, "compress", "cub_topk"),
    }
    return grid(book, "ms", columns, CASES)


def eager(book: Book) -> str | None:
    """The same algorithm in plain torch."""
    columns = {
        "one pass": column(book, "compress", "fusedcomp_fp32"),
        "eager, one flat vector": column(book, "compress", "eager"),
        "torch.compile of it": column(book, "compress", "compiled"),
        "eager, tensor by tensor": column(book, "compress", "eager_per_tensor"),
    }
    return grid(book, "ms", columns, CASES)


def lars(book: Book) -> str | None:
    """LARS against every dense LARS."""
    columns = {
        "ours: whole step": column(book, "step", "fusedcomp_lars_fp32"),
        "dense, foreach": column(book, "step", "lars_foreach"),
        "dense, foreach and torch's fused SGD": column(book, "step", "lars_foreach_fused"),
        "dense, torch.compile": column(book, "step", "lars_compiled"),
        "dense, timm": column(book, "step", "lars_timm"),
    }
    return grid(book, "ms", columns, CASES, "With weight decay.")


def launches(book: Book) -> str | None:
    """Microseconds of every launch of one compressed step."""
    parts = {case: launch_rows(book, case) for case in CASES}
    parts = {case: rows for case, rows in parts.items() if rows}
    if not parts:
        return None
    labels = dict.fromkeys(label for rows in parts.values() for label in rows)
    lines = [[f"`{label}`", *(_microseconds(rows.get(label)) for rows in parts.values())] for label in labels]
    used = [row for rows in parts.values() for row in rows.values()]
    return markdown(["us", *map(title, parts)], lines) + "\n\n" + origin(used)


def launch_rows(book: Book, case: str) -> dict[str, Record]:
    """Label -> record, in the order of the step; of the newest run that timed launches."""
    keys = [Key("step", "fusedcomp_fp32", "launch_us"), Key("compress", "fusedcomp_fp32", "launch_ms")]
    for key in keys:
        rows = book.series(case, key, "launch")
        if rows and key.metric == "launch_ms":
            rows += book.series(case, key._replace(bench="apply"), "launch")
            return {f"{row['bench']}, {row['launch']}": row for row in rows}
        if rows:
            return {row["launch"]: row for row in sorted(rows, key=lambda row: row["launch"])}
    return {}


def microseconds(row: Record) -> float:
    return row["value"] * (1.0 if row["metric"].endswith("_us") else 1e3)


def _microseconds(row: Cell) -> str:
    return "" if row is None else f"{microseconds(row):.1f}"


def apply(book: Book) -> str | None:
    """Time of applying what W ranks sent, against W."""
    curves = apply_curves(book)
    if not curves:
        return None
    worlds = sorted({world for curve in curves.values() for world in curve})
    lines = [[title(case), *(number(curve.get(world)) for world in worlds)] for case, curve in curves.items()]
    used = [row for curve in curves.values() for row in curve.values()]
    return markdown(["ms", *(f"W = {world}" for world in worlds)], lines) + "\n\n" + origin(used)


def apply_curves(book: Book) -> dict[str, dict[int, Record]]:
    """Case -> number of ranks -> record; cases that were measured at several numbers of ranks."""
    curves = {}
    for case in CASES:
        rows = book.series(case, Key("apply", "fusedcomp_fp32", "ms", (("timing", "graph"),)), "ranks")
        rows = rows or book.series(case, Key("apply", "fusedcomp_fp32"), "ranks")
        curve = {row["ranks"]: row for row in rows if row.get("ranks")}
        if len(curve) > 1:
            curves[case] = dict(sorted(curve.items()))
    return curves


def host(book: Book) -> str | None:
    """Host time and kernels of ``optimizer.step()``."""
    columns = {
        "optimizer.step(), us": column(book, "step", "fusedcomp_fp32", metric="host_us"),
        "the same as a CUDA graph, us": column(book, "step", "fusedcomp_fp32", metric="graph_host_us"),
        "torch SGD, fused, us": column(book, "step", "torch_sgd_fused", metric="host_us"),
        "torch SGD, foreach, us": column(book, "step", "torch_sgd_foreach", metric="host_us"),
        "kernels per bucket": column(book, "step", "fusedcomp_fp32", metric="kernels_per_bucket"),
    }
    return grid(book, "", columns, CASES, digits=0)


def overlap(book: Book) -> str | None:
    """Training steps with the compression inside backward, behind it, and without."""
    columns = {
        "forward and backward": column(book, "overlap", "backward_only"),
        "with torch's fused SGD": column(book, "overlap", "torch_sgd_fused"),
        "compressed during backward": column(book, "overlap", "fusedcomp_overlap"),
        "compressed in step()": column(book, "overlap", "fusedcomp_serial"),
        "compress alone": column(book, "overlap", "fusedcomp_serial", metric="compress_ms"),
        "not hidden / compress alone": column(book, "overlap", "fusedcomp_overlap", metric="exposed_ratio"),
    }
    note = "Whole training steps on one GPU. Not hidden: compressed during backward, less forward and backward."
    return grid(book, "ms", columns, CASES, note, digits=2)


def memory(book: Book) -> str | None:
    """State bytes per parameter, measured and documented."""
    names = {"fp32": "SGD", "bf16": "SGD, bf16 states", "lars_fp32": "LARS", "lars_bf16": "LARS, bf16 states"}
    lines, used = [], []
    for suffix, words in names.items():
        cells = [book.ms("memory", case, f"fusedcomp_{suffix}", "bytes_per_param") for case in CASES]
        if any(cells):
            used += cells
            documented = [_known(row, "documented", row.get("expected")) for row in cells if row is not None]
            shown = [f"{number(row, 2)}" if row is not None else "-" for row in cells]
            lines.append([words, *shown, f"{min(documented):.2f}"])
    if not lines:
        return None
    header = ["bytes per parameter", *map(title, CASES), "documented, every parameter compressed"]
    return markdown(header, lines) + "\n\n" + origin(used)

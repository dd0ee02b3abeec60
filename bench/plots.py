"""The plots of docs/benchmarks.md, from the same records as its tables.

A plot is a pair: what it shows (``None`` where there are no records; needs no matplotlib), and how it is drawn. Drawn
again from the same records by the same matplotlib, a file is the same, byte for byte.
"""

import itertools
import json
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sections
import sections_ranks as ranks
from book import CASES, Book, Record, origin, title

# Okabe and Ito's colours, which readers with any kind of colour vision can tell apart.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#7F7F7F"
TRACE = "trace_resnet50.json"  # beside the records
_STYLE = {
    "svg.hashsalt": "fusedcomp",
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
}


class Plot(NamedTuple):
    """``data`` of a book, None where there is nothing to show; ``draw(figure, data)``."""

    file: str
    alternative: str
    size: tuple[float, float]  # inches
    data: Callable[[Book], Any]
    draw: Callable[[Any, Any], None]


def save(plot: Plot, book: Book, folder: Path) -> bool:
    """Draw and write a plot; False where its records are missing."""
    import matplotlib
    from matplotlib.figure import Figure

    data = plot.data(book)
    if not data:
        return False
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=plot.size, layout="constrained")
        plot.draw(figure, data)
        folder.mkdir(parents=True, exist_ok=True)
        silent = {"Date": None, "Creator": None} if plot.file.endswith(".svg") else {"Software": None}
        figure.savefig(folder / plot.file, dpi=150, metadata=silent)
    return True


def _sign(figure: Any, rows: Sequence[Record]) -> None:
    """Below the axes: where the figures come from."""
    sentences = origin(rows).replace("`", "").replace(". ", ".\n").splitlines()
    letters = int(16 * figure.get_figwidth())
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, letters)]
    figure.supxlabel("\n".join(lines), fontsize=6.5, color=GREY)


# ---- (a) bytes against time ----------------------------------------------------------------------------------------


class Mark(NamedTuple):
    bench: str
    providers: tuple[str, ...]
    metric: str
    words: str
    colour: str
    marker: str
    hollow: bool = False  # larger than the others, so that what lies at the same place is seen inside


MARKS = (
    Mark("compress", ("bandwidth_twin_fp32", "bandwidth_twin"), "ms", "pass without arithmetic", GREY, "o", True),
    Mark("compress", ("fusedcomp_fp32",), "pass_ms", "pass", BLUE, "o"),
    Mark("compress", ("fusedcomp_fp32_wd",), "pass_ms", "pass, weight decay", BLUE, "s"),
    Mark("compress", ("fusedcomp_bf16",), "pass_ms", "pass, bf16 states", BLUE, "^"),
    Mark("compress", ("fusedcomp_fp32",), "ms", "compress", GREEN, "o"),
    Mark("compress", ("fusedcomp_bf16",), "ms", "compress, bf16 states", GREEN, "^"),
    Mark("step", ("fusedcomp_fp32",), "ms", "whole step", RED, "o"),
    Mark("step", ("fusedcomp_fp32_wd",), "ms", "whole step, weight decay", RED, "s"),
    Mark("step", ("fusedcomp_bf16",), "ms", "whole step, bf16 states", RED, "^"),
    Mark("step", ("torch_sgd_fused",), "ms", "torch SGD, fused", BLACK, "D", True),
    Mark("step", ("torch_sgd_foreach",), "ms", "torch SGD, foreach", BLACK, "X"),
)


def traffic(book: Book) -> dict[str, Any] | None:
    """Case -> (mark, record) pairs; and the copy rate in GB/s."""
    copy = book.ms("step", "device", "copy", "gb_per_s")
    panels = {}
    for case in CASES:
        found = [(m, sections.column(book, m.bench, *m.providers, metric=m.metric)(case)) for m in MARKS]
        points = [(mark, row) for mark, row in found if row is not None and row.get("bytes")]
        if points:
            panels[case] = points
    return {"panels": panels, "copy": copy} if panels and copy is not None else None


def draw_traffic(figure: Any, data: dict[str, Any]) -> None:
    panels, rate = data["panels"], data["copy"]["value"]
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axes, (case, points) in zip(every, panels.items(), strict=True):
        right, top = 1.12 * max(r["bytes"] for _, r in points) / 1e9, 1.1 * max(r["value"] for _, r in points)
        (line,) = axes.plot([0, right], [0, 1e3 * right / rate], color=GREY, linewidth=1.2, zorder=1)
        handles[f"copy rate, {rate / 1e3:.2f} TB/s"] = line
        for mark, row in points:
            (handles[mark.words],) = axes.plot(
                row["bytes"] / 1e9, row["value"], mark.marker, markersize=11 if mark.hollow else 6,
                markerfacecolor="none" if mark.hollow else mark.colour, linestyle="none",
                markeredgecolor=mark.colour if mark.hollow else "white", markeredgewidth=1.1 if mark.hollow else 0.5,
            )  # fmt: skip
        axes.set(title=title(case), xlabel="least traffic, GB", xlim=(0, right), ylim=(0, top))
    every[0].set_ylabel("ms")
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4)
    _sign(figure, [data["copy"], *(row for points in panels.values() for _, row in points)])


# ---- (b) step time against link rate -------------------------------------------------------------------------------

LINES = {
    "nocomm": (GREY, "--", ""),
    "ddp": (BLACK, "-", "o"),
    "ddp_bf16": (BLUE, "-", "s"),
    "powersgd1": (PURPLE, "-", "v"),
    "powersgd4": (PURPLE, ":", "^"),
    "topk0.01": (ORANGE, "-", "D"),
    "topk0.001": (RED, "-", "o"),
    "topk0.001_bf16": (RED, ":", "P"),
    "hook0.001": (PURPLE, "-", "X"),
    "nocomm_graph": (GREY, ":", ""),
    "topk0.001_graph": (GREEN, "-", "X"),
}


def link_rates(book: Book) -> dict[str, Any] | None:
    models = dict.fromkeys(case.partition("@")[0] for case in ranks.netlab_cases(book))
    panels = {model: ranks.curves(book, model) for model in models}
    return {model: lines for model, lines in panels.items() if any(len(line) > 1 for line in lines.values())} or None


def draw_link_rates(figure: Any, data: dict[str, Any]) -> None:
    every = figure.subplots(1, len(data), squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axes, (model, lines) in zip(every, data.items(), strict=True):
        for provider, line in lines.items():
            if provider in LINES:
                colour, dashes, marker = LINES[provider]
                (handles[ranks.ROWS[provider]],) = axes.plot(
                    line.keys(), [row["value"] for row in line.values()], dashes, marker=marker, color=colour,
                    markersize=5, linewidth=1.3,
                )  # fmt: skip
        rates = sorted({rate for line in lines.values() for rate in line})
        axes.set(xscale="log", yscale="log", title=title(model), xlabel="rate of a node's link, Gbit/s")
        axes.set_xticks(rates, ["NVLink" if rate == ranks.NVLINK_GBPS else f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        values = [row["value"] for line in lines.values() for row in line.values()]
        ticks = [t for t in _steps() if min(values) / 1.6 <= t <= max(values) * 1.6]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    every[0].set_ylabel("ms per training step")
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4)
    _sign(figure, [row for lines in data.values() for line in lines.values() for row in line.values()])


def _steps() -> list[float]:
    return [digit * 10.0**exponent for exponent in range(-2, 5) for digit in (1, 2, 5)]


# ---- (c) where the time of a compressed step goes ------------------------------------------------------------------

STAGES = {
    "sample and threshold": SKY,
    "the pass": BLUE,
    "refine and pack": GREEN,
    "apply, 8 ranks": RED,
    "parameters that are not compressed": YELLOW,
}


def split(book: Book) -> dict[str, Any] | None:
    """Case -> (stage -> microseconds, records)."""
    found = {case: sections.launch_rows(book, case) for case in CASES}
    return {case: (_stages(rows), list(rows.values())) for case, rows in found.items() if rows} or None


def _stages(rows: dict[str, Record]) -> dict[str, float]:
    """By what a launch is called and where it stands: before the pass, after it, after the exchange."""
    sums, stage = dict.fromkeys(STAGES, 0.0), "sample and threshold"
    for label, row in rows.items():
        if "_compress_kernel" in label or "compress_sparse" in label:
            stage, own = "refine and pack", "the pass"
        elif any(word in label for word in ("dense", "trailer")):
            own = "parameters that are not compressed"
        else:
            if "apply" in label or "read_headers" in label:
                stage = "apply, 8 ranks"
            own = stage
        sums[own] += sections.microseconds(row)
    return sums


def draw_split(figure: Any, data: dict[str, Any]) -> None:
    axes = figure.subplots()
    names = [f"{title(case)}\n{sum(stages.values()) / 1e3:.2f} ms" for case, (stages, _) in data.items()]
    left = [0.0] * len(data)
    for stage, colour in STAGES.items():
        shares = [100 * stages[stage] / sum(stages.values()) for stages, _ in data.values()]
        bars = axes.barh(names, shares, left=left, color=colour, edgecolor="white", linewidth=0.8, label=stage)
        for bar, share in zip(bars, shares, strict=True):
            if share >= 4:
                dark = colour in (BLUE, GREEN, RED)
                axes.text(
                    bar.get_x() + bar.get_width() / 2, bar.get_y() + bar.get_height() / 2, f"{share:.0f} %",
                    ha="center", va="center", fontsize=8, color="white" if dark else "black",
                )  # fmt: skip
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.grid(False)
    axes.set(xlim=(0, 100), xlabel="share of the launches' time, %")
    figure.legend(loc="outside upper center", ncols=3)
    _sign(figure, [row for _, rows in data.values() for row in rows])


# ---- (d) one step on a time line -----------------------------------------------------------------------------------

KINDS = {
    "forward and backward": BLUE,
    "forward": SKY,
    "backward": BLUE,
    "optimizer and other": BLACK,
    "compress and apply": GREEN,
    "copies and fills": GREY,
    "NCCL": RED,
}


def timeline(book: Book) -> dict[str, Any] | None:
    """The profiler's summary of a step (timeline.py); as rows of (kind, stream, start ms, duration ms)."""
    if not (book.folder / TRACE).exists():
        return None
    told = json.loads((book.folder / TRACE).read_text())
    told = {"events": told} if isinstance(told, list) else told
    columns = told.get("columns", ["name", "kind", "phase", "stream", "start_us", "duration_us"])
    events = [e if isinstance(e, dict) else dict(zip(columns, e, strict=True)) for e in told["events"]]
    phased = any(e.get("phase") in ("forward", "backward") for e in events)  # unknown of a replayed graph
    spans = [
        (_kind(e, phased), e.get("stream"), e["start_us"] / 1e3, e.get("duration_us", e.get("dur_us", 0.0)) / 1e3)
        for e in events
    ]
    return {**told, "spans": spans} if spans else None


def _kind(event: dict[str, Any], phased: bool) -> str:
    kind, name = event.get("kind"), event["name"].lower()
    if kind == "nccl" or "nccl" in name:
        return "NCCL"
    if kind == "copy" or name.startswith(("memcpy", "memset")):
        return "copies and fills"
    if kind == "fusedcomp":
        return "compress and apply"
    if not phased:
        return "forward and backward"
    phase = event.get("phase") or kind
    return phase if phase in ("forward", "backward") else "optimizer and other"


def draw_timeline(figure: Any, data: dict[str, Any]) -> None:
    axes = figure.subplots()
    spans = data["spans"]
    busy: dict[Any, float] = {}
    for _, stream, _, duration in spans:
        busy[stream] = busy.get(stream, 0.0) + duration
    # The stream of the model first, the one of NCCL last.
    nccl = {stream for kind, stream, _, _ in spans if kind == "NCCL"}
    streams = sorted(busy, key=lambda s: (s in nccl, -busy[s]))
    for kind, colour in KINDS.items():
        for place, stream in enumerate(streams):
            own = [(start, duration) for k, s, start, duration in spans if k == kind and s == stream]
            if own:
                axes.broken_barh(own, (place - 0.38, 0.76), facecolor=colour, linewidth=0, label=kind)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set(xlabel="ms", xlim=(0, max(start + duration for _, _, start, duration in spans) * 1.01))
    if "case" in data:
        exposed = (
            f"; NCCL alone for {data['exposed_ms']:.2f} of {data['step_ms']:.2f} ms" if "exposed_ms" in data else ""
        )
        provider = ranks.ROWS.get(data["provider"], data["provider"])
        axes.set_title(f"{title(data['case'])}, {provider}, rank 0{exposed}", fontsize=9)
    figure.legend([unique[k] for k in KINDS if k in unique], [k for k in KINDS if k in unique],
                  loc="outside upper center", ncols=6)  # fmt: skip
    if "commit" in data:
        _sign(figure, [data])


# ---- (e) apply, (f) accuracy ---------------------------------------------------------------------------------------


def draw_apply(figure: Any, data: dict[str, dict[int, Record]]) -> None:
    axes = figure.subplots()
    for (case, curve), colour, marker in zip(data.items(), (RED, BLUE, GREEN), "osD", strict=False):
        worlds, values = list(curve), [row["value"] for row in curve.values()]
        axes.plot(worlds, values, color=colour, marker=marker, markersize=5, linewidth=1.3, label=title(case))
    worlds = sorted({world for curve in data.values() for world in curve})
    axes.set(xscale="log", yscale="log", xlabel="ranks whose payloads are applied", ylabel="ms")
    axes.set_xticks(worlds, map(str, worlds))
    values = [row["value"] for curve in data.values() for row in curve.values()]
    ticks = [t for t in _steps() if min(values) / 1.5 <= t <= max(values) * 1.5]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.legend()
    _sign(figure, [row for curve in data.values() for row in curve.values()])


def accuracies(book: Book) -> dict[str, dict[str, list[Record]]] | None:
    found = {case: ranks.training_runs(book, case) for case in book.cases("training")}
    return {case: runs for case, runs in found.items() if runs} or None


_FAR_BELOW = 5.0  # points of accuracy


def side_by_side(values: dict[str, float]) -> dict[str, float]:
    """Where to draw what would hide one another: 3.5 % apart, around the middle of those less than that apart."""
    step, groups = 1.035, list[list[str]]()
    for name in sorted(values, key=lambda name: values[name]):
        if not groups or values[name] > step * values[groups[-1][-1]]:
            groups.append([])
        groups[-1].append(name)
    return {
        name: statistics.geometric_mean(values[each] for each in group) * step ** (place - (len(group) - 1) / 2)
        for group in groups
        for place, name in enumerate(group)
    }


def draw_accuracies(figure: Any, data: dict[str, dict[str, list[Record]]]) -> None:
    every = figure.subplots(1, len(data), squeeze=False)[0]
    for axes, runs in zip(every, data.values(), strict=True):
        places = side_by_side({name: rows[0]["bytes_sent"] / 1e6 for name, rows in runs.items()})
        best = max(ranks.accuracy(rows)[0] for rows in runs.values())
        styles = zip(itertools.cycle((BLACK, RED, BLUE, GREEN, ORANGE, PURPLE, GREY)), itertools.cycle("DosvP^X<*"))
        for (name, rows), (colour, marker) in zip(runs.items(), styles, strict=False):
            mean, deviation = ranks.accuracy(rows)
            sent, label = places[name], name
            if mean < best - _FAR_BELOW:  # the others would lie on one line
                sent, label = math.nan, f"{name}: {mean:.1f} %, below"
            axes.errorbar(
                sent, mean if sent == sent else math.nan, yerr=deviation, color=colour, marker=marker, markersize=6,
                capsize=2.5, elinewidth=1.2, linestyle="none", label=label,
            )  # fmt: skip
        sent = sorted(rows[0]["bytes_sent"] / 1e6 for rows in runs.values())
        ticks = [t for t in _steps() if sent[0] / 1.6 <= t <= sent[-1] * 1.6]
        axes.set(xscale="log", title=next(iter(runs.values()))[0]["dataset"], xlim=(sent[0] / 1.6, sent[-1] * 1.6))
        axes.set_xlabel("MB sent per rank, whole training; those that send alike stand side by side")
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    every[0].set_ylabel("test accuracy, %")
    _sign(figure, [row for runs in data.values() for rows in runs.values() for row in rows])


TRAFFIC = Plot("traffic.svg", "Time against the least traffic, with the copy rate as the roof", (9.0, 4.0), traffic,
               draw_traffic)  # fmt: skip
SPLIT = Plot("split.svg", "Where the time of one compressed step goes", (8.0, 3.0), split, draw_split)
APPLY = Plot("apply.svg", "Time to apply what all ranks sent, against their number", (6.0, 3.6), sections.apply_curves,
             draw_apply)  # fmt: skip
RATES = Plot("link_rate.svg", "Time of a training step against the rate of the links", (9.0, 4.4), link_rates,
             draw_link_rates)  # fmt: skip
TIMELINE = Plot("timeline.png", "Kernels of one training step, by stream", (9.0, 2.8), timeline, draw_timeline)
ACCURACY = Plot("accuracy.svg", "Test accuracy against bytes sent", (10.5, 4.2), accuracies, draw_accuracies)
PLOTS = (TRAFFIC, SPLIT, APPLY, RATES, TIMELINE, ACCURACY)

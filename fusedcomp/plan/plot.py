"""The picture of ``python -m fusedcomp plan``: predicted steps against the rate of a node's link."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from fusedcomp.plan.command import DENSITIES, gbits, heading
from fusedcomp.plan.cost import Cluster, Method, Planner

_POINTS = 160
_GREY = "#777777"
_STYLES = {  # method -> colour, dashes
    "ddp": ("#000000", "-"),
    "ddp_bf16": ("#0072B2", "-"),
}
_OURS, _OTHERS = "#D55E00", ("#E69F00", "#CC79A7", "#009E73")


def draw(planner: Planner, cluster: Cluster, density: float, path: Path) -> None:
    """Write the picture, in the format of the file's suffix."""
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
                                "svg.hashsalt": "fusedcomp"}):  # fmt: skip
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        _fill(figure, planner, cluster, density)
        figure.savefig(path, dpi=150)


def _fill(figure: Figure, planner: Planner, cluster: Cluster, density: float) -> None:
    axes = figure.subplots()
    ours = Method("topk", density)
    found = planner.break_even(ours, cluster)
    rates = _rates([r for r in (found, cluster.bandwidth_bytes_per_s) if r is not None and cluster.nodes > 1])
    gbit = [rate * 8e-9 for rate in rates]

    def steps(method: Method, at: Sequence[float]) -> list[float]:
        return [planner.predict(method, replace(cluster, bandwidth_bytes_per_s=rate)).step_ms for rate in at]

    longest = planner.alone_ms
    for method, colour, dashes, width in _lines(density):
        above, values = 3 if method == ours else 2, steps(method, rates)
        axes.plot(gbit, values, dashes, color=colour, linewidth=width, label=method.title, zorder=above)
        longest = max(longest, *values)
    axes.axhline(planner.alone_ms, color=_GREY, linewidth=1.0, linestyle=":", label="no communication")
    low, high = 0.75 * planner.alone_ms, 1.25 * longest
    axes.set(xscale="log", yscale="log", xlim=(gbit[0], gbit[-1]), ylim=(low, high))
    axes.set(xlabel="rate of a node's link, Gbit/s", ylabel="predicted ms per training step")
    _tick(axes.xaxis, gbit[0], gbit[-1], (1,))
    _tick(axes.yaxis, low, high, (1, 2, 5) if high / low < 1e3 else (1,))
    axes.grid(True, color="#dddddd", linewidth=0.6)
    if cluster.nodes > 1:
        _mark(axes, cluster.bandwidth_bytes_per_s, f"this link, {gbits(cluster.bandwidth_bytes_per_s)}", _GREY)
    if found is not None:
        _mark(axes, found, f"break-even, {gbits(found)}: dense is faster from here on", _OURS)
        axes.plot(found * 8e-9, steps(ours, [found])[0], "o", color=_OURS, markersize=7, zorder=4)
    axes.set_title(_title(planner, cluster), fontsize=9)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _title(planner: Planner, cluster: Cluster) -> str:
    if cluster.nodes == 1:
        return heading(planner, cluster)
    gpus = "GPU" if cluster.gpus_per_node == 1 else "GPUs"
    return f"{planner.workload.name}, {cluster.nodes} nodes of {cluster.gpus_per_node} {gpus}, {planner.card.name}"


def _lines(density: float) -> list[tuple[Method, str, str, float]]:
    dense = [(Method(name), colour, dashes, 1.4) for name, (colour, dashes) in _STYLES.items()]
    ours = [
        (Method("topk", density), _OURS, "-", 2.0),
        (Method("topk", density, torch.bfloat16), _OURS, "--", 1.2),
    ]
    others = [other for other in DENSITIES if other != density]
    return dense + ours + [(Method("topk", d), c, "-", 1.2) for d, c in zip(others, _OTHERS, strict=False)]


def _rates(inside: Sequence[float]) -> list[float]:
    """Bytes per second: 0.1 to 1000 Gbit/s, or further where a mark lies outside."""
    low, high = (min([1e8 / 8, *(r / 2 for r in inside)]), max([1e12 / 8, *(r * 2 for r in inside)]))
    return [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]


def _tick(axis: Any, low: float, high: float, digits: Sequence[int]) -> None:
    ticks = [t for e in range(-6, 9) for d in digits if low <= (t := d * 10.0**e) <= high]
    axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_ticks([], minor=True)


def _mark(axes: Any, rate: float, words: str, colour: str) -> None:
    """An upright line with words along its right side, from the top down: there the curves are low."""
    axes.axvline(rate * 8e-9, color=colour, linewidth=1.0, linestyle="--", zorder=1)
    axes.annotate(
        words, (rate * 8e-9, 0.99), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points",
        color=colour, fontsize=8, va="top", ha="left", rotation=90,
    )  # fmt: skip

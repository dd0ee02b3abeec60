"""What the user sees: progress, the table, the picture."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fusedcomp.demo import DemoError
from fusedcomp.demo.train import Job, Outcome
from fusedcomp.demo.train import Progress as Step


class _Style(NamedTuple):
    """How a curve looks; told apart by colour-blind readers, and in grey."""

    colour: str
    line: str
    label: tuple[int, int]  # where it is, in points from the end of the curve; beside it or centred below


STYLES = (_Style("#4d4d4d", "-", (0, -16)), _Style("#0072b2", "-", (10, 6)), _Style("#d55e00", "--", (10, -24)))


def follow(messages: Iterable[object], jobs: Sequence[Job], dataset: str) -> list[Outcome]:
    """Show a bar per job while the messages arrive; the outcomes."""
    outcomes = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bars:
        bars.console.print(f"{dataset}: {_epochs(jobs)} per method, 2 processes")
        tasks = [bars.add_task(job.method.title, start=False, total=None) for job in jobs]
        for message in messages:
            if isinstance(message, Step):
                bars.start_task(tasks[message.job])
                bars.update(tasks[message.job], completed=message.step, total=message.steps)
            elif isinstance(message, Outcome):
                outcomes.append(message)
    return outcomes


def print_table(jobs: Sequence[Job], outcomes: Sequence[Outcome], backend: str) -> None:
    """Print a row per method, and how to read it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)  # narrow enough for 80 columns
    table.add_column("method", no_wrap=True)
    for heading in ("lr", "test accuracy", "MB sent per rank", "ratio", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for job, outcome in zip(jobs, outcomes, strict=True):
        table.add_row(
            job.method.title,
            f"{job.method.lr:g}",
            f"{outcome.test_accuracy:.1%}",
            f"{outcome.bytes_sent / 1e6:.2f}",
            f"{outcome.compression_ratio:.1f}x",
            f"{outcome.seconds:.1f}",
        )
    console = Console()
    console.print(table)
    where = (
        "the links between two GPUs of one machine"
        if backend == "nccl"
        else "the loopback of one machine, where bytes cost next to nothing, and without a GPU the compressor is plain "
        "torch instead of a kernel"
    )
    console.print(
        f"Ratio is that of the whole model: what an fp32 all-reduce of all {outcomes[0].parameters:,} parameters is "
        "handed, divided by what this optimizer handed to the collectives. Seconds say nothing about a network: the "
        f"two processes talk over {where}.",
        highlight=False,
    )


def draw(jobs: Sequence[Job], outcomes: Sequence[Outcome], dataset: str, path: Path) -> None:
    """Draw test accuracy against megabytes sent, a labelled curve per method.

    Raises:
        DemoError: the file cannot be written.
    """
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    for job, outcome, style in zip(jobs, outcomes, STYLES, strict=True):
        _curve(axes, job.method.title, outcome, style)
    axes.set_xscale("log")
    axes.set_xmargin(0.1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 103)
    axes.set_xlabel("megabytes sent by each rank (log scale)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"Test accuracy against bytes sent: {dataset}, {_epochs(jobs)}, 2 processes", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise DemoError(f"the picture could not be written: {error}") from error
    Console().print(f"Test accuracy against megabytes sent: {path}", highlight=False, soft_wrap=True)


def _curve(axes: Axes, title: str, outcome: Outcome, style: _Style) -> None:
    megabytes = [point.bytes_sent / 1e6 for point in outcome.curve]
    accuracy = [100 * point.accuracy for point in outcome.curve]
    axes.plot(megabytes, accuracy, color=style.colour, linestyle=style.line, linewidth=2)
    axes.plot(megabytes[-1], accuracy[-1], "o", color=style.colour)
    # The compressed curves end at about the same place: each style puts its label where the others' are not.
    axes.annotate(
        f"{title}\n{accuracy[-1]:.1f} %, {megabytes[-1]:.3g} MB",
        (megabytes[-1], accuracy[-1]),
        xytext=style.label,
        textcoords="offset points",
        color=style.colour,
        ha="left" if style.label[0] else "center",
        va="top",
    )


def _epochs(jobs: Sequence[Job]) -> str:
    return f"{jobs[0].epochs} epoch{'s' if jobs[0].epochs > 1 else ''}"

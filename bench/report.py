"""Write what the records in bench/results say: the tables of README.md, docs/benchmarks.md and its plots, and the
constants of `python -m fusedcomp plan` (calibrate.py).

python bench/report.py            rewrite docs/benchmarks.md, the plots in docs/img, and everywhere else in README.md
                                  and docs/ what stands between <!-- begin NAME --> and <!-- end NAME -->
python bench/report.py --check    exit 1 if a text is not what the records say (plots are not compared)

Plots need matplotlib: pip install -e '.[bench]'.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import calibrate
import goals
import plots
import records
import sections
import sections_collectives
import sections_dgc
import sections_methods
import sections_ranks as ranks
import sections_threshold
from book import Book
from plots import Plot

README = records.ROOT / "README.md"
DOCS = records.ROOT / "docs"
PAGE = DOCS / "benchmarks.md"

Table = Callable[[Book], str | None]

# What may stand between markers.
TABLES: dict[str, Table] = {
    "step": sections.step,
    "one_pass": sections.one_pass,
    "eager": sections.eager,
    "apply": sections.apply,
    "overlap": sections.overlap,
    "memory": sections.memory,
    "netlab": ranks.netlab,
    "headline": ranks.headline,
    "training": ranks.training,
    "dgc": sections_dgc.dgc,
    "goals": goals.table,
    "plan": calibrate.table,
}


@dataclass(frozen=True)
class Section:
    """A part of docs/benchmarks.md: left out where none of its records are there."""

    heading: str
    text: str
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...] = ()


def break_evens(book: Book) -> str | None:
    """A sentence per model."""
    models = dict.fromkeys(case.partition("@")[0] for case in ranks.netlab_cases(book))
    lines = [line for model in models if (line := ranks.break_even(book, model))]
    return "\n".join(f"* {line}" for line in lines) or None


SECTIONS = (
    Section(
        "Goals met and missed",
        "What this project set out to reach. Quotients are taken within one run.",
        (goals.table,),
    ),
    Section(
        "One step on one GPU",
        "All that one rank computes for a step, outside the network and beside forward and backward: milliseconds of "
        "the device, replayed from a CUDA graph, median, cold L2. Compressed optimizers apply the payloads of 8 "
        "ranks; `torch.optim.SGD` has one gradient.",
        (sections.step,),
        (plots.TRAFFIC, plots.SPLIT),
    ),
    Section(
        "The pass against the memory's speed",
        "The bandwidth twin makes the same reads and writes and computes nothing: what the pass takes longer is "
        "arithmetic. The copy rate is that of a device copy of 1 GiB in the same run.",
        (sections.one_pass,),
    ),
    Section(
        "Exact selection",
        "The whole compress side beside the same pass without selection, and beside top-k functions that do nothing "
        "but select among values that lie ready.",
        (sections.selection,),
    ),
    Section(
        "Every method",
        "The compress side, from gradients to payload, of SGD with momentum correction: milliseconds of the device, "
        "least traffic of an element (gradient read, two fp32 states read and written; of what is drawn, which has no "
        "memory, one scratch written); and the time against the pass that selects nothing.",
        (sections_methods.table,),
    ),
    Section(
        "Against plain torch",
        "Deep Gradient Compression as a user would write it, from the same gradients and states. The flat vector is "
        "given its gradients flat; tensor by tensor is the authors' own way, with a sampled threshold.",
        (sections.eager,),
    ),
    Section("LARS", "Against the dense LARS implementations there are.", (sections.lars,)),
    Section(
        "Launches",
        "Every launch of one compressed step, where it stands in the sequence.",
        (sections.launches,),
    ),
    Section(
        "Applying what W ranks sent",
        "Work grows with the number of entries, not with the model. The payloads are those of the last W training "
        "steps.",
        (sections.apply,),
        (plots.APPLY,),
    ),
    Section(
        "Host",
        "How long `optimizer.step()` keeps the host, and the number of kernels per compressed bucket.",
        (sections.host,),
    ),
    Section(
        "JointSpar",
        "A step in which only what was drawn is computed, against the budget and what the blocks are: expectations "
        "with all blocks equally likely, bf16 autocast, plain calls (`bench/jointspar.py`, which explains the blocks).",
        (sections_methods.jointspar,),
    ),
    Section(
        "Overlap with backward", "How much of the compression hides behind backward.", (sections.overlap,)
    ),
    Section(
        "Memory",
        "State bytes per parameter by the allocator's figures: states, tables, payloads and scratch.",
        (sections.memory,),
    ),
    Section(
        "NVLink",
        "100 M elements, exchange and update with nothing to hide behind: where links are fast, compression has "
        "little to gain.",
        (ranks.nvlink,),
    ),
    Section(
        "Training steps over real links",
        "Several GPUs of one host as separate nodes: a network namespace each, links shaped to the nominal rate, NCCL "
        "over TCP. The rate is probed before any row, and the probe stands in every record; latency is that of the "
        "host. The optimizer is SGD with momentum in every row; DDP has `gradient_as_bucket_view` and broadcasts no "
        "buffers.",
        (ranks.netlab, break_evens),
        (plots.RATES, plots.TIMELINE),
    ),
    Section(
        "Ways for payloads to travel",
        "`TopK`'s payloads gathered, [merged along a tree, or split and reduced](algorithms/sparse-collectives.md): a "
        "step of one bucket of 6.5 M elements with nothing to hide behind, over shaped links as above "
        "(`bench/collectives.py`). Eight nodes are more than that host's 16 cores serve evenly: their runs differ. "
        "Below, what merging takes on the GPU (`bench/merging.py`).",
        (sections_collectives.travel, sections_collectives.merging),
    ),
    Section(
        "Dense beside compressed",
        "What is sent of the whole model, and what it costs in quality.",
        (sections_dgc.dgc,),
    ),
    Section(
        "What each part is worth",
        "An ablation (`bench/ablation.py`): every row changes one thing of the recipe, SGD with momentum 0.9, momentum "
        "correction with masking, TopK(0.001) over the bucket, a density warm-up over 5 % of the steps.",
        (sections_dgc.ablation,),
    ),
    Section(
        "Does a threshold leave less behind than Top-k?",
        "Sahu et al. (NeurIPS 2021) on a small scale (`bench/threshold.py`): the accumulated error is the sum over "
        "steps of what ranks left behind, squared, for as many bytes, and for as many entries. Bytes are those of the "
        "room that payloads have, used or not.",
        (sections_threshold.table,),
    ),
    Section(
        "Does it learn?",
        "Each method at the learning rate that is best on a validation split; test images have no say in it.",
        (ranks.training,),
        (plots.ACCURACY,),
    ),
    Section(
        "Does the DDP hook learn with Adam?",
        "A character model under DistributedDataParallel and AdamW (`bench/charlm.py`). Tables "
        "differ in length and in settings: [Adam and the learning rate](ddp.md#adam-and-the-learning-rate) says what "
        "helped.",
        (ranks.language,),
    ),
)  # fmt: skip

HEAD = """\
<!-- Written by `python bench/report.py` from the records in bench/results; do not edit. -->

# Benchmarks

Every figure on this page comes from a record in `bench/results/`, which names the card, versions, driver, commit and
command behind it. `python bench/report.py` writes the page anew; `python bench/report.py --check` compares.

Kernels are checked against their plain-torch twins before anything is timed. States are those of real training steps.
Figures are medians of interleaved repeats, with L2 flushed before each.
"""


def page(book: Book) -> str:
    """docs/benchmarks.md."""
    parts = [HEAD]
    for section in SECTIONS:
        body = [table for build in section.tables if (table := build(book))]
        shown = [plot for plot in section.plots if plot.data(book)]
        if body or shown:
            pictures = [f"![{plot.alternative}](img/{plot.file})" for plot in shown]
            parts += [f"## {section.heading}\n", f"{section.text}\n", *(f"{p}\n" for p in [*body, *pictures])]
    return "\n".join(parts)


_BLOCK = re.compile(r"<!-- begin (\w+) -->\n(.*?)<!-- end (\w+) -->", re.DOTALL)


def render(name: str, text: str, book: Book) -> str:
    """A text with every table between markers anew."""

    def fill(match: re.Match[str]) -> str:
        begin, _, end = match.groups()
        if begin != end or begin not in TABLES:
            raise SystemExit(
                f"{name}: <!-- begin {begin} --> ... <!-- end {end} --> is no table; {', '.join(TABLES)} are"
            )
        table = TABLES[begin](book)
        return f"<!-- begin {begin} -->\n" + (f"{table}\n" if table else "") + f"<!-- end {begin} -->"

    new = _BLOCK.sub(fill, text)
    if len(_BLOCK.findall(text)) != len(re.findall(r"<!-- (?:begin|end) \w+ -->", text)) / 2:
        raise SystemExit(f"{name}: a table's marker is without its counterpart")
    return new


def texts(book: Book) -> Iterator[tuple[Path, str]]:
    """Every file that records go into, and what it has to be."""
    for path in (README, *sorted(DOCS.glob("*.md"))):
        if path != PAGE:
            yield path, render(path.name, path.read_text(), book)
    yield PAGE, page(book)
    constants = calibrate.text(book)
    if constants is not None and calibrate.PATH.parent.is_dir():  # a copy of bench/ and docs/ alone has no package
        yield calibrate.PATH, constants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    book = Book(records.RESULTS)
    differing = [(path, new) for path, new in texts(book) if not path.exists() or path.read_text() != new]
    if arguments.check:
        names = ", ".join(str(path.relative_to(records.ROOT)) for path, _ in differing)
        sys.exit(f"{names} differs from the records: run python bench/report.py" if differing else 0)
    for path, new in differing:
        path.write_text(new)
    for plot in plots.PLOTS:
        plots.save(plot, book, DOCS / "img")


if __name__ == "__main__":
    main()

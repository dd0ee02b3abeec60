"""What this project set out to reach, as numbers, beside what the records say.

quantity    a figure, or the quotient of two figures of one run
limits      case -> the number that it may not exceed, or must reach
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from book import Book, Key, Record, markdown, origin, title

Limit = float | Callable[[Record], float]


@dataclass(frozen=True)
class Goal:
    """A row per case of ``limits``. ``below``: divide by it; several keys on a side stand for the best of them.

    why: where it is missed, what stands in the way and what was tried. No figures: those are in the tables.
    """

    text: str
    limits: dict[str, Limit]
    above: tuple[Key, ...]
    below: tuple[Key, ...] = ()
    at_least: bool = False
    within: bool = False  # the limit is the largest distance from 1
    unit: str = "x"
    digits: int = 2
    why: str = ""


def _step(provider: str) -> tuple[Key, ...]:
    return (Key("step", provider),)


def _all(limit: float) -> dict[str, Limit]:
    return {"resnet50": limit, "gpt2": limit, "flat340m": limit}


def _large(limit: float) -> dict[str, Limit]:
    return {"gpt2": limit, "flat340m": limit}


def _of_pass(suffix: str) -> tuple[Key, ...]:
    return (Key("compress", f"fusedcomp_{suffix}", "pass_ms"),)


def _compress(provider: str) -> tuple[Key, ...]:
    return (Key("compress", provider),)


def _rows(*providers: str) -> tuple[Key, ...]:
    return tuple(Key("netlab", provider) for provider in providers)


def _host_limit(row: Record) -> float:
    return 500.0 + 150.0 * (row["buckets_sparse"] + row["buckets_dense"])


FUSED, FOREACH = _step("torch_sgd_fused"), _step("torch_sgd_foreach")
DENSE_LARS = tuple(Key("step", f"lars_{kind}") for kind in ("foreach", "foreach_fused", "compiled", "timm"))
HOOKS = _rows("ddp_bf16", "powersgd1", "powersgd4")
AT_10 = {f"{model}@10gbps/4x1": model for model in ("resnet50", "gpt2")}
AT_10_LIMIT = dict.fromkeys(AT_10, 1.10)
MFU = {"gpt2@10gbps/4x1": 0.35, "gpt2@nvlink/4x1": 0.35}
SHARE = {"at_least": True, "unit": ""}

FIXED = (
    "The pass moves what fused SGD moves. What comes on top, sample to pack and apply (Launches), waits for memory, or "
    "for each other, whatever the size. Between plain calls, where SGD's own launches count too, the quotients are "
    "smaller. Tried: fewer launches (decision 0009), less work in them (0015)."
)
SELECTING = (
    "Sampling, counting and packing wait for loads that depend on each other: beside the pass of a small bucket, or "
    "with ten times the entries, that shows. Tried: wider digits, more samples (fewer candidates, slower sampling), "
    "listing within the look-back (decisions 0009, 0015)."
)
HOST = (
    "A figure of the machine's CPU, which the other benches of the same run keep busy: torch's optimizers, too, take a "
    "large part of it (Host). A replayed graph needs none of it."
)
SYNCHRONOUS = (
    "Plain calls keep the host about as busy as the GPU, and ranks that exchange anything wait for the slowest of "
    "them: the row in which one number is sent costs as much. CUDA graphs leave the host out."
)

# The quotient of a twin's time and the pass's is the share of the bandwidth that the pass reaches.
GOALS = (
    Goal("pass, share of its bandwidth twin", {"resnet50": 0.90, **_large(0.95)},
         _compress("bandwidth_twin_fp32") + _compress("bandwidth_twin"), _of_pass("fp32"), **SHARE),
    Goal("the same with bf16 states", _all(0.90), _compress("bandwidth_twin_bf16"), _of_pass("bf16"), **SHARE),
    Goal("whole step / torch's fused SGD", {"resnet50": 0.90, **_large(1.10)}, _step("fusedcomp_fp32"), FUSED,
         why=FIXED),
    Goal("whole step with weight decay / torch's fused SGD", _large(1.30), _step("fusedcomp_fp32_wd"), FUSED,
         why=FIXED),
    Goal("whole step with bf16 states / torch's fused SGD", _all(0.95), _step("fusedcomp_bf16"), FUSED, why=FIXED),
    Goal("whole step / torch's foreach SGD", _all(0.65), _step("fusedcomp_fp32"), FOREACH,
         why=FIXED),
    Goal("LARS step / the fastest dense LARS", {"resnet50": 0.90, **_large(1.30)},
         _step("fusedcomp_lars_fp32"), DENSE_LARS),
    Goal("exact selection, density 0.001 / pass without selection", {"resnet50": 1.25, **_large(1.05)},
         _compress("fusedcomp_fp32"), _compress("accumulate_fp32"), why=SELECTING),
    Goal("exact selection, density 0.01 / pass without selection", _large(1.15),
         _compress("fusedcomp_fp32_d0.01"), _compress("accumulate_fp32_d0.01"), why=SELECTING),
    Goal("eager DGC on one flat vector / compress", _all(4.0),
         _compress("eager"), _compress("fusedcomp_fp32"), at_least=True),
    Goal("eager DGC tensor by tensor / compress", _all(10.0),
         _compress("eager_per_tensor"), _compress("fusedcomp_fp32"), at_least=True,
         why="One tensor has no loop over tensors, and a threshold that is only sampled leaves out the exact top-k."),
    Goal("apply what 64 ranks sent", {"resnet50": 0.5},
         (Key("apply", "fusedcomp_fp32", "ms", (("ranks", 64),)),), unit=" ms"),
    Goal("exchange and update over NVLink, nothing overlapped", {"flat100m@nvlink/4x1": 1.0},
         _step("fusedcomp_fp32"), unit=" ms"),
    Goal("kernels per bucket", _all(8), (Key("step", "fusedcomp_fp32", "kernels_per_bucket"),), unit="", digits=0),
    Goal("host time of optimizer.step()", dict.fromkeys(_all(0), _host_limit),
         (Key("step", "fusedcomp_fp32", "host_us"),), unit=" us", digits=0, why=HOST),
    Goal("host time of its replayed CUDA graph", _all(30.0),
         (Key("step", "fusedcomp_fp32", "graph_host_us"),), unit=" us", digits=1),
    Goal("(step with overlap - step without compression) / compress alone", {"resnet50": 0.6, "gpt2": 0.6},
         (Key("overlap", "fusedcomp_overlap", "exposed_ratio"),),
         why="The update is in it, which nothing can hide, and the last bucket, complete when backward is over: for "
             "GPT-2 the embedding, a third of the model; for ResNet-50 a tenth, whose launches take a third of the "
             "compress side (decision 0016)."),
    *(Goal(f"state bytes per parameter / documented, {words}", _all(0.07),
           (Key("memory", f"fusedcomp_{name}", "of_documented"),), within=True, digits=3)
      for name, words in (("fp32", "SGD"), ("bf16", "SGD, bf16 states"), ("lars_fp32", "LARS"),
                          ("lars_bf16", "LARS, bf16 states"))),
    Goal("training step, TopK(0.001) / no communication", AT_10_LIMIT | {"resnet50@1gbps/4x1": 1.40},
         _rows("topk0.001"), _rows("nocomm"), why=SYNCHRONOUS),
    Goal("training step as a CUDA graph, TopK(0.001) / no communication", AT_10_LIMIT | {"resnet50@1gbps/4x1": 1.40},
         _rows("topk0.001_graph"), _rows("nocomm_graph")),
    Goal("training step, DDP / TopK(0.001)", dict.fromkeys(AT_10, 4.0), _rows("ddp"), _rows("topk0.001"),
         at_least=True),
    Goal("training step, the best of torch's hooks / TopK(0.001)", {"resnet50@10gbps/4x1": 1.8},
         HOOKS, _rows("topk0.001"), at_least=True, why=SYNCHRONOUS),
    Goal("share of the peak that GPT-2 computes at", MFU, (Key("netlab", "nocomm", "mfu"),), **SHARE,
         why="The host, whose launches the GPU waits for. In a CUDA graph, which leaves it out, see the next line."),
    Goal("the same as a CUDA graph", MFU, (Key("netlab", "nocomm_graph", "mfu"),), **SHARE),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A goal in one case, and what was measured."""

    goal: Goal
    case: str
    limit: float
    value: float
    rows: Sequence[Record]

    @property
    def missed_by(self) -> float:
        """As a share of the limit; 0 where the goal is met."""
        if self.goal.within:
            return max(0.0, abs(self.value - 1.0) - self.limit)
        over = self.value / self.limit - 1.0
        return max(0.0, -over if self.goal.at_least else over)

    @property
    def limit_text(self) -> str:
        if self.goal.within:
            return f"1 ± {self.limit:g}"
        return f"{'>=' if self.goal.at_least else '<='} {self.limit:g}{self.goal.unit}"

    @property
    def verdict(self) -> str:
        by = self.missed_by
        return "met" if by == 0 else f"missed by {100 * by:.{0 if by >= 0.1 else 1}f} %"


def outcomes(book: Book) -> list[Outcome]:
    """Every goal whose records are there."""
    found = []
    for goal in GOALS:
        for case, limit in goal.limits.items():
            measured = _measure(book, goal, case)
            if measured is not None:
                value, rows = measured
                found.append(Outcome(goal, case, limit(rows[0]) if callable(limit) else limit, value, rows))
    return found


def _measure(book: Book, goal: Goal, case: str) -> tuple[float, Sequence[Record]] | None:
    if goal.below:
        quotient = book.quotient(case, goal.above, goal.below)
        return None if quotient is None else (quotient.value, quotient.rows)
    row = book.find(case, goal.above[0]) or _field(book, case, goal.above[0])
    return None if row is None else (row["value"], (row,))


def _field(book: Book, case: str, key: Key) -> dict[str, Any] | None:
    """A figure that is a field of a record of milliseconds."""
    row = book.find(case, key._replace(metric="ms"))
    value = None if row is None else row.get(key.metric)
    return None if row is None or value is None else row | {"value": value}


def table(book: Book) -> str | None:
    """Goal, case, limit, measured, met or missed by how much."""
    found = outcomes(book)
    if not found:
        return None
    lines, above = [], ""
    for one in found:
        text, above = ("" if one.goal.text == above else one.goal.text), one.goal.text
        measured = f"{one.value:.{one.goal.digits}f}{one.goal.unit}"
        lines.append([text, title(one.case), one.limit_text, measured, one.verdict])
    met = sum(one.missed_by == 0 for one in found)
    note = f"{met} of {len(found)} met. {origin(row for one in found for row in one.rows)}"
    parts = (markdown(["goal", "case", "limit", "measured", ""], lines, words=2), note, *_reasons(found))
    return "\n\n".join(parts)


def _reasons(found: Sequence[Outcome]) -> list[str]:
    """A list of what stands in the way of goals that are missed, if any is."""
    missed: dict[str, dict[str, None]] = {}
    for one in found:
        if one.missed_by and one.goal.why:
            missed.setdefault(one.goal.why, {})[one.goal.text] = None
    return ["\n".join(f"* **{'; '.join(texts)}.** {why}" for why, texts in missed.items())] if missed else []

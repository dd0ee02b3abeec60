"""The constants of `python -m fusedcomp plan`, from records and from the models themselves; and how well they predict.

bench/report.py writes fusedcomp/plan/calibration.json and the table of docs/plan.md with it.

    compute     median of steps without communication as CUDA graphs, per model: what the GPU needs
    host        median of the same without graphs: what Python needs to launch it; and per method, how much longer a
                step is, median over rows of which GPU and link need less than the host does without communication
    efficiency  median over gates of (all-reduce of 100 MB / nominal rate), one GPU per node
    latency     median over gates of (gather of 0.2 MB a rank - its transfer at the bulk's rate) / (W - 1)
    ring_share  least squares over all-reduce steps on several GPUs per node
    compress    ms = a + b * elements + c * entries sent, least squares of relative errors, per card
    merge       ms = a + b * elements + c * entries that come together, likewise
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

import harness
import linkgate
import models
import records
import workloads
from book import Book, Record, markdown, origin, title
from fusedcomp.buckets import Treatment, is_large, plan_buckets
from fusedcomp.plan.calibration import Calibration, parse
from fusedcomp.plan.cost import Cluster, Method, Planner
from fusedcomp.sizing import count_at

PATH = records.ROOT / "fusedcomp" / "plan" / "calibration.json"
CARDS = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}
METHODS = {
    "ddp": Method("ddp"),
    "ddp_bf16": Method("ddp_bf16"),
    "powersgd1": Method("powersgd1"),
    "topk0.001": Method("topk", 0.001),
    "topk0.001_graph": Method("topk", 0.001),
}
_CAP_MB = 100  # bucket_cap_mb of fusedcomp.SGD
_DDP_CAPS = (2**20, 25 * 2**20)  # bytes: torch's first bucket, and the others
_GATHER = "gather_0.2mb"


def text(book: Book) -> str | None:
    """calibration.json; None where records are missing."""
    found = constants(book)
    return None if found is None else json.dumps(found, indent=1) + "\n"


def constants(book: Book) -> dict[str, Any] | None:
    """What calibration.json holds; None where records are missing."""
    steps = _steps(book)
    pairs = [(row, alone) for row in steps if (alone := _alone(row, steps)) is not None]
    if not steps or not any(_link(row) == "nvlink" for row in steps):
        return None
    shaped = [row for row, _ in pairs if _link(row) != "nvlink" and _layout(row)[1] == 1]
    found: dict[str, Any] = {
        "about": "Written by `python bench/report.py` from bench/results; do not edit.",
        "measured_on": steps[-1]["card"],
        "cards": {key: _card(book, name) for key, name in CARDS.items()},
        "models": {name: _model(name, steps) for name in MODELS},
        "host_ms": {method.name: {"value": 0.0} for method in METHODS.values()},
        "merge": _merge(book, steps[-1]["card"]),
        "constants": {
            "efficiency": _over_gates(shaped, _bulk_share),
            "latency_s": _over_gates(shaped, _hop_seconds),
            "nvlink_bytes_per_s": _over_gates([r for r in steps if _link(r) == "nvlink"], _bulk),
            "ring_share": {"value": 1.0},
            "mean_error": {"value": 0.0},
        },
    }
    found["constants"]["ring_share"] = _ring_share(parse(found), steps)
    found["host_ms"] = _host(parse(found), pairs)
    told = [Outcome(row, predicted(parse(found), row)) for row in steps if row["provider"] in METHODS]
    found["constants"]["mean_error"] = _constant(mean_error(told), [one.row for one in told])
    return found


# ---- records ---------------------------------------------------------------------------------------------------------


def _steps(book: Book) -> list[Record]:
    """Training steps over links."""
    return [row for row in book.rows if row["bench"] == "netlab" and row["metric"] == "ms" and row.get("gate")]


def _link(row: Record) -> str:
    return row["case"].partition("@")[2].partition("/")[0]


def _layout(row: Record) -> tuple[int, int]:
    nodes, _, per_node = row["case"].partition("/")[2].partition("x")
    return (1, int(nodes)) if _link(row) == "nvlink" else (int(nodes), int(per_node))


def _alone(row: Record, steps: Sequence[Record]) -> Record | None:
    """The step without communication of the same case and run."""
    same = [r for r in steps if r["provider"] == "nocomm" and r["case"] == row["case"] and r["commit"] == row["commit"]]
    return same[-1] if same else None


def _sources(rows: Sequence[Record]) -> list[dict[str, Any]]:
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = (row["card"], row["commit"][:10], row["command"].partition(" --")[0])
        counts[key] = counts.get(key, 0) + 1
    return [
        {"card": card, "commit": commit, "command": command, "records": count}
        for (card, commit, command), count in counts.items()
    ]


def _rounded(value: float) -> float:
    """To six digits: the same on every machine."""
    return float(f"{value:.6g}")


def _constant(value: float, rows: Sequence[Record]) -> dict[str, Any]:
    return {"value": _rounded(value), "from": _sources(rows)}


def _over_gates(rows: Sequence[Record], figure: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
    """The median over gates; rows of one gate count once."""
    gates = {json.dumps(row["gate"], sort_keys=True): row for row in rows}
    return _constant(statistics.median(figure(row["gate"]) for row in gates.values()), list(gates.values()))


def _bulk(gate: dict[str, Any]) -> float:
    """Bytes per second."""
    return gate[f"{linkgate.BULK}_gbps"] * 1e9 / 8


def _bulk_share(gate: dict[str, Any]) -> float:
    return _bulk(gate) / (gate["rate_mbit"] * 1e6 / 8)


def _hop_seconds(gate: dict[str, Any]) -> float:
    nbytes, others = linkgate.GATHERS[_GATHER][0], gate["ranks"] - 1
    crossing = others * nbytes
    return (crossing / (gate[f"{_GATHER}_gbps"] * 1e9 / 8) - crossing / _bulk(gate)) / others


# ---- cards -----------------------------------------------------------------------------------------------------------


def _card(book: Book, name: str) -> dict[str, Any]:
    numels = {case: sum(s.numel() for s in shapes()) for case, shapes in harness.SHAPES.items()}

    def rows(bench: str, *providers: str) -> Iterator[tuple[str, Record]]:
        """The newest of every case, provider and number of ranks."""
        newest = {}
        for row in book.rows:
            counts = row["bench"] == bench and row["metric"] == "ms" and row.get("timing") == "graph"
            if counts and row["card"] == name and row["provider"] in providers and row.get("buckets", "one") == "one":
                newest[row["case"], row["provider"], row.get("ranks") if bench == "apply" else None] = row
        yield from ((case, row) for (case, *_), row in newest.items() if case in numels)

    def entries(case: str, row: Record) -> int:
        return count_at(row["density"], numels[case])

    compress = list(rows("compress", "fusedcomp_fp32", "fusedcomp_fp32_d0.01"))
    apply, fused = list(rows("apply", "fusedcomp_fp32")), list(rows("step", "torch_sgd_fused"))
    return {
        "name": name,
        "compress": _fit([[1.0, numels[case], entries(case, row)] for case, row in compress], compress),
        "apply": _fit([[1.0, entries(case, row) * row["ranks"]] for case, row in apply], apply),
        "fused_sgd": _fit([[1.0, numels[case]] for case, _ in fused], fused),
    }


def _merge(book: Book, card: str) -> dict[str, Any]:
    """Of the newest record of every case."""
    newest = {}
    for row in book.rows:
        counts = row["bench"] == "merging" and row["provider"] == "merge" and row.get("timing") == "graph"
        if counts and row["card"] == card:
            newest[row["case"], row["density"], row["ranks"]] = row
    rows = list(newest.values())
    return _fit([[1.0, row["elements"], row["ranks"] * row["k"]] for row in rows], [(r["case"], r) for r in rows])


def _fit(terms: Sequence[Sequence[float]], found: Sequence[tuple[str, Record]]) -> dict[str, Any]:
    """Coefficients of a linear fit to milliseconds, least squares of relative errors; and the mean of these errors."""
    values = torch.tensor([row["value"] for _, row in found], dtype=torch.float64)
    matrix = torch.tensor(terms, dtype=torch.float64)
    scale = matrix.abs().amax(0)
    solution = torch.linalg.lstsq(matrix / scale / values[:, None], torch.ones_like(values)[:, None]).solution[:, 0]
    error = (matrix / scale @ solution / values - 1).abs().mean().item()
    return {
        "coefficients": [_rounded(c) for c in (solution / scale).tolist()],
        "mean_error": float(f"{error:.2g}"),
        "from": _sources([row for _, row in found]),
    }


# ---- models ----------------------------------------------------------------------------------------------------------


def _resnet50() -> nn.Module:
    return workloads._ResNet((3, 4, 6, 3), 64, 1000)


def _gpt2() -> nn.Module:
    return models.GPT2(50304, 1024, 768, 12, 12)


# Name -> what builds it, and the shapes of its inputs: real ones, but for the size of the batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...], torch.dtype]] = {
    "resnet50": (_resnet50, ((1, 3, 224, 224),), torch.float32),
    "gpt2": (_gpt2, ((1, 1024), (1, 1024)), torch.int64),
}


def _model(name: str, steps: Sequence[Record]) -> dict[str, Any]:
    build, shapes, dtype = MODELS[name]
    with torch.device("meta"):
        model = build()
        ready = _ready(model, [torch.zeros(shape, dtype=dtype) for shape in shapes])
    params = list(model.parameters())
    own = [row for row in steps if row["case"].startswith(f"{name}@")]
    alone, graph = ([row for row in own if row["provider"] == p] for p in ("nocomm", "nocomm_graph"))
    numel = sum(p.numel() for p in params)
    if any(row["parameters"] != numel for row in alone):
        raise SystemExit(f"{name}: records are of another network than bench/calibrate.py builds")
    return {
        "parameters": numel,
        "compute_ms": _constant(statistics.median(row["value"] for row in graph), graph),
        "host_ms": _constant(statistics.median(row["value"] for row in alone), alone),
        "buckets": list(_buckets(params, ready)),
        "ddp_buckets": list(_ddp_buckets(params, ready)),
    }


def _ready(model: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[int, float]:
    """Per parameter (its id), the share of backward's multiplications that are done when its gradient is there."""
    calls: list[tuple[nn.Module, int]] = []

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Embedding) or weight is None or weight.ndim < 2:
            calls.append((module, 0))
        else:
            places = output[:, 0] if isinstance(module, nn.Conv2d) else inputs[0][..., 0]
            calls.append((module, places.numel() * weight.numel()))

    for module in model.modules():
        if module._parameters:
            module.register_forward_hook(note)
    model(*inputs)
    done, total, shares = 0, sum(work for _, work in calls), {id(p): 1.0 for p in model.parameters()}
    for module, work in reversed(calls):
        done += work
        shares.update((id(p), _rounded(done / total)) for p in module.parameters(recurse=False))
    return shares


def _buckets(params: Sequence[nn.Parameter], ready: dict[int, float]) -> Iterator[dict[str, Any]]:
    """As fusedcomp.SGD cuts them."""
    treatments = [Treatment(0, is_large(p), False, "gradient", p.dtype) for p in params]
    for bucket in plan_buckets(list(zip(params, treatments, strict=True)), _CAP_MB * 2**20, [False]):
        segments = bucket.segments
        yield {
            "numel": segments.numel,
            "ready": max(ready[id(p)] for p in bucket.params),
            "segments": len(segments.numels),
            "pages": segments.num_pages,
            "sparse": bucket.treatment.sparse,
        }


def _ddp_buckets(params: Sequence[nn.Parameter], ready: dict[int, float]) -> Iterator[dict[str, Any]]:
    """As DistributedDataParallel does from its second step on: closed as soon as the limit is reached."""
    count, members = 0, []
    for param in reversed(params):
        members.append(param)
        if sum(p.nbytes for p in members) >= _DDP_CAPS[min(count, 1)] or param is params[0]:
            numel, sent = sum(p.numel() for p in members), sum(map(_powersgd_numel, members))
            yield {"numel": numel, "ready": max(ready[id(p)] for p in members), "powersgd_numel": sent}
            count, members = count + 1, []


def _powersgd_numel(param: nn.Parameter) -> int:
    """What torch's hook of rank 1 sends of a tensor: two factors, where they are half of it or less."""
    if param.ndim > 1:
        rows, columns = param.shape[0], param.numel() // param.shape[0]
        if 2 * (rows + columns) < rows * columns:
            return rows + columns
    return param.numel()


# ---- predictions -----------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """A record and what plan says of it."""

    row: Record
    ms: float


def outcomes(book: Book) -> list[Outcome]:
    """Every record of the methods that plan knows."""
    found = constants(book)
    if found is None:
        return []
    known = parse(found)
    return [Outcome(row, predicted(known, row)) for row in _steps(book) if row["provider"] in METHODS]


def mean_error(told: Sequence[Outcome]) -> float:
    """Mean of |predicted / measured - 1|."""
    return statistics.mean(abs(one.ms / one.row["value"] - 1) for one in told)


def predicted(known: Calibration, row: Record) -> float:
    """Milliseconds, at the link's nominal rate."""
    nodes, per_node = _layout(row)
    rate = 1.0 if _link(row) == "nvlink" else float(_link(row).removesuffix("gbps")) * 1e9 / 8
    workload = known.workload(row["case"].partition("@")[0])
    planner = Planner(workload, known, "h200", workload.compute_ms if row["provider"].endswith("_graph") else None)
    return planner.predict(METHODS[row["provider"]], Cluster(nodes, per_node, rate)).step_ms


def _ring_share(known: Calibration, steps: Sequence[Record]) -> dict[str, Any]:
    """The share with the least squares of relative errors, to a hundredth."""
    rows = [r for r in steps if r["provider"] in ("ddp", "ddp_bf16") and min(_layout(r)) > 1]

    def error(share: float) -> float:
        there = replace(known, ring_share=share)
        return sum(math.log(predicted(there, row) / row["value"]) ** 2 for row in rows)

    return _constant(min((i / 100 for i in range(101)), key=error) if rows else 1.0, rows)


def _host(known: Calibration, pairs: Sequence[tuple[Record, Record]]) -> dict[str, Any]:
    """Per method; ``known`` has zeros there, and a model's host time is left out."""
    gpu_alone = replace(known, models={n: replace(m, host_ms=None) for n, m in known.models.items()})
    found = {}
    for provider, method in METHODS.items():
        if not provider.endswith("_graph"):
            own = [(row, alone) for row, alone in pairs if row["provider"] == provider]
            kept = [(row, alone) for row, alone in own if predicted(gpu_alone, row) < alone["value"]]
            value = statistics.median(row["value"] - alone["value"] for row, alone in kept)
            found[method.name] = _constant(value, [row for row, _ in kept])
    return found


# ---- docs/plan.md ----------------------------------------------------------------------------------------------------

_WORDS = {
    "ddp": "DDP",
    "ddp_bf16": "DDP, bf16 hook",
    "powersgd1": "PowerSGD hook, rank 1",
    "topk0.001": "TopK(0.001)",
    "topk0.001_graph": "TopK(0.001), CUDA graph",
}


def table(book: Book) -> str | None:
    """Predicted against measured, a row per record; and the mean errors."""
    told = outcomes(book)
    if not told:
        return None
    lines = [
        [title(one.row["case"]), _WORDS[one.row["provider"]], f"{one.row['value']:.1f}", f"{one.ms:.1f}",
         f"{100 * (one.ms / one.row['value'] - 1):+.0f} %"]
        for one in sorted(told, key=lambda one: (one.row["case"], list(METHODS).index(one.row["provider"])))
    ]  # fmt: skip
    means = [
        f"{words} {100 * mean_error(own):.1f} % ({len(own)})"
        for provider, words in _WORDS.items()
        if (own := [one for one in told if one.row["provider"] == provider])
    ]
    sentences = (
        f"Mean absolute error over {len(told)} records: {100 * mean_error(told):.1f} %; {'; '.join(means)}.",
        f"The worst: {max(abs(100 * (one.ms / one.row['value'] - 1)) for one in told):.0f} %. {_repeats(told)}",
        origin(one.row for one in told),
    )
    header = ["", "", "measured, ms", "predicted, ms", "error"]
    return "\n\n".join([markdown(header, lines, words=2), *sentences])


def _repeats(told: Sequence[Outcome]) -> str:
    """How far apart measurements of one thing are: no model can be closer to all of them than half of that."""
    values: dict[tuple[str, str], list[float]] = {}
    for one in told:
        values.setdefault((one.row["case"], one.row["provider"]), []).append(one.row["value"])
    spreads = [max(own) / min(own) - 1 for own in values.values() if len(own) > 1]
    if not spreads:
        return ""
    return (
        f"The {len(spreads)} cells that were measured in several runs differ between them by "
        f"{100 * statistics.mean(spreads):.0f} % in the mean and {100 * max(spreads):.0f} % at most."
    )

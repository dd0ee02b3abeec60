"""``python -m fusedcomp plan``: arguments, and what is said. The arithmetic is in cost.py."""

import argparse
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch

from fusedcomp.plan.calibration import Workload, load
from fusedcomp.plan.cost import COLLECTIVES, DENSE, Cluster, Method, Planner, Prediction

SUMMARY = "predict the step time of a model on a cluster, dense and compressed, and say which is faster"
DENSITIES = (0.01, 0.001, 0.0001)
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_PARAMETERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)"
_SUFFIXES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    known = load()
    parser.add_argument(
        "--model", type=model, required=True, metavar="MODEL", help="resnet50, gpt2, or a number of parameters: 124M"
    )
    parser.add_argument("--nodes", type=_count, required=True, metavar="W", help="machines")
    parser.add_argument("--gpus-per-node", type=_count, default=1, metavar="G", help="default: %(default)s")
    parser.add_argument(
        "--link", type=rate, metavar="RATE",
        help="of a node's link: 10gbps, 10Gbit/s, 1.25GB/s; a bare number is Gbit/s below a million, else bit/s",
    )  # fmt: skip
    parser.add_argument("--latency-us", type=_not_negative, metavar="US", help="of a hop; default: as measured")
    parser.add_argument("--measured", action="store_true", help="the rate is what collectives reach, not nominal")
    parser.add_argument("--density", type=_density, default=0.001, help="default: %(default)s")
    parser.add_argument(
        "--compute", type=_positive, metavar="MS",
        help="what the GPU needs for a step without communication; default: as measured",
    )  # fmt: skip
    parser.add_argument("--card", choices=sorted(known.cards), default="h200", help="default: %(default)s")
    parser.add_argument("--plot", type=_picture, metavar="FILE", help=f"a picture: {', '.join(_SUFFIXES)}")
    parser.set_defaults(refuse=parser.error)


# ---- arguments -----------------------------------------------------------------------------------------------------


def rate(text: str) -> float:
    """Bytes per second of ``10gbps``, ``10Gbit/s``, ``1.25GB/s``; bare: Gbit/s below a million, bit/s from there on."""
    match = re.fullmatch(rf"{_NUMBER}\s*([kKmMgGtT]?)(bps|[bB]it/s|[bB]it|b/s|Bps|B/s|)", text.strip())
    value = float(match[1]) if match else 0.0
    if match is None or not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a rate > 0 such as 10gbps, 10Gbit/s, 1.25GB/s or 1e9 (bit/s), got {text!r}"
        )
    prefix, unit = match[2].lower(), match[3]
    if not prefix and not unit:
        return value * (1e9 if value < 1e6 else 1.0) / 8
    return value * _BITS[prefix] / (1 if unit in ("Bps", "B/s") else 8)


def model(text: str) -> str | int:
    """A measured model's name, or a number of parameters: ``124M``, ``340e6``, ``7B``."""
    names = load().models
    if text.lower() in names:
        return text.lower()
    match = re.fullmatch(rf"{_NUMBER}([kKmMbBgG]?)", text.strip())
    value = float(match[1]) * _PARAMETERS[match[2].lower()] if match else 0.0
    if not 1.0 <= value <= 1e13:
        raise argparse.ArgumentTypeError(
            f"must be {', '.join(names)}, or a number of parameters from 1 to 1e13 such as 124M, got {text!r}"
        )
    return round(value)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _positive(text: str) -> float:
    if not 0.0 < _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return float(text)


def _not_negative(text: str) -> float:
    if not 0.0 <= _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text!r}")
    return float(text)


def _density(text: str) -> float:
    if not 0.0 < _number(text) <= 1.0:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text!r}")
    return float(text)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in _SUFFIXES:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(_SUFFIXES)}, got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


# ---- the command ---------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Print the predictions, perhaps draw them; the exit status."""
    known = load()
    workload = known.workload(arguments.model)
    if arguments.link is None and arguments.nodes > 1:
        arguments.refuse("argument --link: required where there are several nodes, got none")
    if arguments.compute is None and workload.compute_ms is None:
        arguments.refuse(f"argument --compute: required for models other than {', '.join(known.models)}, got none")
    latency = None if arguments.latency_us is None else arguments.latency_us * 1e-6
    cluster = Cluster(arguments.nodes, arguments.gpus_per_node, arguments.link or 1.0, latency, arguments.measured)
    planner = Planner(workload, known, arguments.card, arguments.compute)
    print(report(planner, cluster, arguments.density))
    if arguments.plot is None:
        return 0
    try:
        from fusedcomp.plan import plot
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print("error: --plot needs matplotlib: pip install 'fusedcomp[plan]'", file=sys.stderr)
        return 1
    plot.draw(planner, cluster, arguments.density, arguments.plot)
    print(f"\n{arguments.plot}: the same against the rate of the link")
    return 0


def methods(planner: Planner, density: float) -> list[Method]:
    """What is compared: dense ways, PowerSGD where it was measured, TopK at ``density`` and at others."""
    found = list(DENSE)
    if planner.host_ms is not None:  # what it costs was measured with a host that is slower than the GPU
        found.append(Method("powersgd1"))
    found += [Method("topk", density), Method("topk", density, torch.bfloat16)]
    return found + [Method("topk", other) for other in DENSITIES if other != density]


def report(planner: Planner, cluster: Cluster, density: float) -> str:
    """All that the command says."""
    predictions = [planner.predict(method, cluster) for method in methods(planner, density)]
    ways = collectives(planner, cluster, Method("topk", density))
    ours = min(ways, key=lambda p: (round(p.step_ms, 1), p.method.collective != "gather"))
    lines = [heading(planner, cluster), "", *_table(predictions), ""]
    lines += _gone_dense(predictions, cluster)
    lines += [*_fastest(ways, ours, cluster), verdict(planner, cluster, ours)]
    if _is_compressed(planner, ours):
        lines.append(break_even(planner, cluster, ours.method))
    lines += _notes(planner, cluster)
    if ours.method.collective == "split":
        lines.append(
            "On four and eight nodes splits of large payloads were slower than predicted (docs/benchmarks.md): measure."
        )
    return "\n".join(lines)


def heading(planner: Planner, cluster: Cluster) -> str:
    """What is predicted for."""
    workload, known = planner.workload, planner.calibration
    words = [_model_words(workload), f"{cluster.nodes} {_plural(cluster.nodes, 'node')} of {cluster.gpus_per_node} GPU"]
    words[1] += "" if cluster.gpus_per_node == 1 else "s"
    if cluster.nodes > 1:
        latency = known.latency_s if cluster.latency_s is None else cluster.latency_s
        kind = "measured" if cluster.measured else f"nominal, of which {100 * known.efficiency:.0f} % are reached"
        words += [f"{gbits(cluster.bandwidth_bytes_per_s)} {kind}", f"{latency * 1e6:.0f} us a hop"]
    words.append(planner.card.name)
    return ", ".join(words)


def _model_words(workload: Workload) -> str:
    return workload.name if workload.host_ms is None else f"{workload.name}, {workload.numel / 1e6:.1f} M parameters"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def gbits(bytes_per_s: float) -> str:
    """A rate in words."""
    bits = bytes_per_s * 8
    for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= scale:
            return f"{float(f'{bits / scale:.3g}'):g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def _table(predictions: list[Prediction]) -> list[str]:
    header = ["", "ms per step", "exposed", "waits for", "MB sent by a rank"]
    cells = [header] + [
        [p.method.title, f"{p.step_ms:.1f}", f"{p.exposed_ms:.1f}", p.limit, f"{p.nbytes / 1e6:.2f}"]
        for p in predictions
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(_aligned(row, widths)).rstrip() for row in cells]


def _aligned(row: list[str], widths: list[int]) -> list[str]:
    return [cell.ljust(width) if place in (0, 3) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip


def _gone_dense(predictions: list[Prediction], cluster: Cluster) -> list[str]:
    gone = [p.method.title for p in predictions if p.dense_buckets and cluster.world_size > 1]
    if not gone:
        return []
    why = f"payloads of {cluster.world_size} ranks would move as much as dense, so buckets travel dense, in fp32"
    return [f"{'; '.join(gone)}: {why}."]


def verdict(planner: Planner, cluster: Cluster, ours: Prediction) -> str:
    """Which is faster, in a sentence."""
    dense, error = planner.dense(cluster), planner.calibration.mean_error
    if cluster.world_size == 1:
        return "With one GPU nothing is exchanged: dense is faster here. Use torch.optim."
    times = f"{dense.method.title} {dense.step_ms:.1f} ms, {ours.method.title} {ours.step_ms:.1f} ms"
    quotient = dense.step_ms / ours.step_ms
    if not _is_compressed(planner, ours):
        return f"Nothing would be compressed here, for payloads would move as much: {times}. Use DDP, or Identity()."
    close = abs(math.log(quotient)) < math.log1p(error)
    doubt = f" Closer than the model's mean error of {100 * error:.0f} %: measure, or stay dense." if close else ""
    if quotient <= 1.0:
        return f"Dense is faster here: {times}.{doubt}"
    return f"Compressed is faster here, {quotient:.2f} times: {times}.{doubt}"


def _is_compressed(planner: Planner, ours: Prediction) -> bool:
    """Not where all buckets travel dense, nor of a model that has nothing to compress."""
    return ours.nbytes < 4 * planner.workload.numel


def break_even(planner: Planner, cluster: Cluster, method: Method) -> str:
    """At which rate that turns, in a sentence."""
    if cluster.nodes == 1:
        return "One node: there is no link to compress for."
    found = planner.break_even(method, cluster)
    if found is not None:
        there = Cluster(cluster.nodes, cluster.gpus_per_node, found, cluster.latency_s, cluster.measured)
        dense = planner.dense(there).method.title
        return f"Break-even at {gbits(found)}: above it {dense} is faster than {method.title}."
    there = Cluster(cluster.nodes, cluster.gpus_per_node, 1e10, cluster.latency_s, cluster.measured)
    faster = planner.predict(method, there).step_ms < planner.dense(there).step_ms
    return f"No break-even: {method.title if faster else 'dense'} is faster at every rate."


def collectives(planner: Planner, cluster: Cluster, method: Method) -> list[Prediction]:
    """The ways that payloads can travel."""
    return [planner.predict(replace(method, collective=name), cluster) for name in COLLECTIVES]


def _fastest(ways: list[Prediction], best: Prediction, cluster: Cluster) -> list[str]:
    """Which of them is the fastest, in a sentence; where it makes no difference, a gather."""
    if cluster.nodes == 1:
        return []
    told = [
        f"{p.method.collective} {p.step_ms:.1f} ms{' (buckets that go dense)' if p.dense_buckets else ''}" for p in ways
    ]
    return [f'collective="{best.method.collective}" is the one to use here: {", ".join(told)}.']


def _notes(planner: Planner, cluster: Cluster) -> list[str]:
    known, notes = planner.calibration, []
    if planner.host_ms is None:
        notes.append("The step given is taken for the GPU's own: the host, running ahead, is left out.")
    else:
        notes.append(f"Compute and host as measured on {known.measured_on}; --compute MS is for yours.")
    if cluster.nodes > 1 and cluster.latency_s is None:
        notes.append("Latency as measured with NCCL over TCP; --latency-us is for yours, such as RDMA.")
    if planner.workload.name not in known.models:
        notes.append("Tensors are taken to be as GPT-2's: the share that is never compressed depends on them.")
    return [*notes, "A lower density needs more steps to the same accuracy: nothing here says how many more."]

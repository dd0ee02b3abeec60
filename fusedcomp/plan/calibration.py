"""The measured constants of the cost model: read from calibration.json, which ``python bench/report.py`` writes.

Every constant there stands beside the records it comes from: card, commit, command.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("calibration.json")
_DDP_CAPS = (2**20, 25 * 2**20)  # bytes: torch's first bucket, and the others
_CAP = 100 * 2**20  # bytes: bucket_cap_mb of fusedcomp.SGD
_PAGE = 65536  # elements that share a start offset on the wire


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together.

    Args:
        numel: elements.
        ready: share of the model's gradients that are there when the bucket's are.
        segments: parameters in it.
        pages: pages of the wire format.
        sparse: compressed, or all-reduced.
        powersgd_numel: elements that PowerSGD of rank 1 sends of it; None: unknown.
    """

    numel: int
    ready: float
    segments: int = 1
    pages: int = 1
    sparse: bool = False
    powersgd_numel: int | None = None


@dataclass(frozen=True)
class Workload:
    """A model, as far as its exchange goes.

    Args:
        name: what it is called.
        numel: its parameters.
        buckets: those of fusedcomp, in the order in which they are sent.
        ddp_buckets: those of DistributedDataParallel.
        compute_ms: what the GPU needs for a training step without communication, milliseconds; None: not measured.
        host_ms: the same step where Python launches every kernel, milliseconds; None: not measured.
    """

    name: str
    numel: int
    buckets: tuple[Bucket, ...]
    ddp_buckets: tuple[Bucket, ...]
    compute_ms: float | None
    host_ms: float | None


@dataclass(frozen=True)
class Card:
    """What a GPU takes for a step's optimizer, milliseconds: fits over models of several sizes."""

    name: str
    compress: tuple[float, float, float]  # ms; ms per element; ms per entry sent
    apply: tuple[float, float]  # ms; ms per entry received, of all ranks
    fused_sgd: tuple[float, float]  # ms; ms per element

    def compress_ms(self, numel: int, k: int) -> float:
        """The one pass and the packing of ``k`` entries."""
        fixed, per_element, per_entry = self.compress
        return fixed + per_element * numel + per_entry * k

    def apply_ms(self, entries: int) -> float:
        """Applying ``entries`` that all ranks together sent."""
        return self.apply[0] + self.apply[1] * entries

    def fused_sgd_ms(self, numel: int) -> float:
        """``torch.optim.SGD(fused=True)`` with momentum."""
        return self.fused_sgd[0] + self.fused_sgd[1] * numel


@dataclass(frozen=True)
class Calibration:
    """All constants.

    Args:
        cards: GPUs by short name.
        models: measured models by name.
        measured_on: full name of the GPU whose steps were measured.
        host_ms: per method, what a step takes longer than without communication where the host is the slowest,
            milliseconds.
        merge: of payloads on the measured GPU: ms; ms per element of what is merged; ms per entry that comes together.
        efficiency: share of a link's nominal rate that a large all-reduce reaches.
        latency_s: of a message to the next node, seconds.
        ring_share: 1: an all-reduce over several GPUs a node crosses links as a ring's does; 0: as little as possible.
        nvlink_bytes_per_s: rate of a large all-reduce inside a node, bytes per second.
        mean_error: mean of |predicted / measured - 1| over the records.
    """

    cards: Mapping[str, Card]
    models: Mapping[str, Workload]
    measured_on: str
    host_ms: Mapping[str, float]
    merge: tuple[float, float, float]
    efficiency: float
    latency_s: float
    ring_share: float
    nvlink_bytes_per_s: float
    mean_error: float

    def merge_ms(self, numel: int, entries: int) -> float:
        """Merging payloads with so many entries, each of so many elements."""
        fixed, per_element, per_entry = self.merge
        return fixed + per_element * numel + per_entry * entries

    def workload(self, model: str | int) -> Workload:
        """A measured model by name, or one of so many parameters with the tensors of GPT-2.

        Raises:
            ValueError: a name that was not measured, or a number below 1.
        """
        if isinstance(model, str):
            if model not in self.models:
                raise ValueError(f"model must be one of {', '.join(self.models)} or a number, got {model!r}")
            return self.models[model]
        if model < 1:
            raise ValueError(f"a model has at least 1 parameter, got {model!r}")
        return like(self.models["gpt2"], model)


def like(known: Workload, numel: int) -> Workload:
    """A model of ``numel`` parameters with the share of vectors and the mean tensor of a known one."""
    vectors = sum(b.numel for b in known.buckets if not b.sparse)
    tensors = sum(b.segments for b in known.buckets if b.sparse)
    mean = (known.numel - vectors) / tensors
    dense = round(numel * vectors / known.numel)
    sparse = numel - dense
    tail = min(sparse, _CAP // 10 // 4) if 2 * 4 * sparse > _CAP else 0
    buckets = [
        Bucket(part, ready, max(1, round(part / mean)), -(-part // _PAGE), sparse=True)
        for part, ready in _cut(sparse - tail, [_CAP], sparse)
    ]
    if tail:
        buckets.append(Bucket(tail, 1.0, max(1, round(tail / mean)), -(-tail // _PAGE), sparse=True))
    if dense:
        segments = round(dense / vectors * sum(b.segments for b in known.buckets if not b.sparse))
        buckets.append(Bucket(dense, 1.0, max(1, segments)))
    ddp = tuple(Bucket(part, ready) for part, ready in _cut(numel, [*_DDP_CAPS], numel))
    return replace(known, name=f"{numel / 1e6:g} M parameters", numel=numel, buckets=tuple(buckets), ddp_buckets=ddp,
                   compute_ms=None, host_ms=None)  # fmt: skip


def _cut(numel: int, caps: list[int], total: int) -> list[tuple[int, float]]:
    """(elements, share of ``total`` so far) of fp32 buckets of these caps in bytes, the last one repeated."""
    parts: list[tuple[int, float]] = []
    done = 0
    while done < numel:
        cap = caps[min(len(parts), len(caps) - 1)] // 4
        part = min(cap, numel - done)
        done += part
        parts.append((part, done / total))
    return parts


def parse(told: Mapping[str, Any]) -> Calibration:
    """The constants in calibration.json's contents."""

    def value(name: str) -> float:
        return float(told["constants"][name]["value"])

    cards = {
        key: Card(card["name"], *(tuple(card[fit]["coefficients"]) for fit in ("compress", "apply", "fused_sgd")))
        for key, card in told["cards"].items()
    }
    models = {
        name: Workload(
            name, model["parameters"],
            tuple(Bucket(**bucket) for bucket in model["buckets"]),
            tuple(Bucket(**bucket) for bucket in model["ddp_buckets"]),
            model["compute_ms"]["value"],
            model["host_ms"]["value"],
        )
        for name, model in told["models"].items()
    }  # fmt: skip
    return Calibration(
        cards=cards,
        models=models,
        measured_on=told["measured_on"],
        host_ms={method: fit["value"] for method, fit in told["host_ms"].items()},
        merge=tuple(told["merge"]["coefficients"]),
        efficiency=value("efficiency"),
        latency_s=value("latency_s"),
        ring_share=value("ring_share"),
        nvlink_bytes_per_s=value("nvlink_bytes_per_s"),
        mean_error=value("mean_error"),
    )


@functools.cache
def load() -> Calibration:
    """The committed constants."""
    return parse(json.loads(PATH.read_text()))

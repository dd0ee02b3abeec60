"""What a training step takes with dense and with compressed exchanges, from measured constants (calibration.json).

    ready(b)   = compute * (1/3 + 2/3 * share of backward that is done when bucket b is full)
    arrived(b) = max(ready(b), arrived(b - 1)) + hops * latency + crossing / (efficiency * rate) + merges * merge
    device     = max(compute, arrived(last bucket)) + optimizer
    step       = max(device, host)

compute    what the GPU needs for a step without communication; forward is a third of it
optimizer  what compress and apply take longer than torch's fused SGD: linear in elements, entries and ranks
host       what Python needs to launch a step, and to wait for the slowest rank; it runs ahead of the GPU, so that the
           longer of both counts. Left out where the time of a step is given, which is taken for the GPU's
crossing   bytes that cross a node's link in one direction, of a payload of n bytes, W ranks on N nodes:
               all-gather  (W - 1) n                  (a ring)
               all-reduce  2 (W - 1) / W n            (a ring); with several GPUs a node between that and the least,
                                                      2 (N - 1) / N n, as NCCL was measured to choose
               tree        n for every rank of a node whose partner of a round is elsewhere, round by round
               split       a node's ranks send a piece to every owner elsewhere; then an all-gather of shares
hops       all-gather N - 1 (a ring), all-reduce 2 ceil(log2 N) (a tree, which NCCL may choose), per message; of a tree
           the rounds in which any partner is elsewhere, of a split 1 and those of the all-gather
merges     of a tree one a round, of 2 k entries each; of a split one, of what W ranks send to the owner of a range;
           merge is linear in elements and entries

All GPUs are as fast as each other, the network is shared with nobody, a link carries its rate in both directions.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch

from fusedcomp.plan.calibration import Bucket, Calibration, Workload
from fusedcomp.sizing import count_at
from fusedcomp.tree import Tree
from fusedcomp.wire import (
    PayloadLayout,
    dense_is_cheaper,
    dense_numel,
    payloads_received,
    split_is_dearer,
    split_layouts,
)

FORWARD = 1 / 3  # of a step without communication
_RATES = (1e6 / 8, 1e13 / 8)  # bytes/s between which a break-even is looked for
_STEPS = 140


@dataclass(frozen=True)
class Cluster:
    """Nodes and the links between them.

    Args:
        nodes: machines; 1: everything stays inside, where the measured rate of NVLink counts.
        gpus_per_node: ranks on each.
        bandwidth_bytes_per_s: of a node's link, in each direction, bytes per second.
        latency_s: of a message from one node to the next, seconds; None: as measured.
        measured: the bandwidth is what collectives reach; otherwise it is nominal, and they reach a share of it.
    """

    nodes: int
    gpus_per_node: int
    bandwidth_bytes_per_s: float
    latency_s: float | None = None
    measured: bool = False

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)!r}")
        if not 0.0 < self.bandwidth_bytes_per_s < math.inf:
            raise ValueError(f"bandwidth_bytes_per_s must be > 0 and finite, got {self.bandwidth_bytes_per_s!r}")
        if self.latency_s is not None and not 0.0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s must be >= 0 and finite, got {self.latency_s!r}")

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients: ``"ddp"``, ``"ddp_bf16"``, ``"powersgd1"``, or ``"topk"`` with its choices."""

    name: str
    density: float = 1.0
    wire_dtype: torch.dtype = torch.float32
    collective: str = "gather"  # as TopK's

    @property
    def title(self) -> str:
        """In words."""
        if self.name == "topk":
            how = "" if self.collective == "gather" else f", {self.collective}"
            return f"TopK({self.density:g}), {'fp32' if self.wire_dtype == torch.float32 else 'bf16'} wire{how}"
        return {"ddp": "DDP, fp32", "ddp_bf16": "DDP, bf16 hook", "powersgd1": "DDP, PowerSGD hook, rank 1"}[self.name]


DENSE = (Method("ddp"), Method("ddp_bf16"))
COLLECTIVES = ("gather", "tree", "split")  # TopK's


@dataclass(frozen=True)
class Prediction:
    """A predicted training step; times in milliseconds.

    Args:
        method: how gradients are exchanged.
        step_ms: the whole step.
        compute_ms: of the GPU, without communication.
        exposed_ms: communication that is not hidden behind backward.
        optimizer_ms: compress and apply, less torch's fused SGD.
        host_ms: of Python for the step; 0: left out.
        nbytes: bytes that a rank hands to the collectives.
        dense_buckets: compressed buckets that travel dense, as their payloads would move no fewer bytes.
    """

    method: Method
    step_ms: float
    compute_ms: float
    exposed_ms: float
    optimizer_ms: float
    host_ms: float
    nbytes: int
    dense_buckets: int = 0

    @property
    def limit(self) -> str:
        """What the step waits for: ``"host"``, ``"link"`` or ``"GPU"``."""
        if self.step_ms == self.host_ms:
            return "host"
        return "link" if self.exposed_ms > 0.1 * self.step_ms else "GPU"


@dataclass(frozen=True)
class _Message:
    """One exchange of a bucket."""

    nbytes: int  # that a rank hands to the collectives at a time; of a split, its share of the sums
    kind: str  # "all-reduce", or TopK's collective
    ready: float  # share of all gradients that are there when it starts
    collectives: int = 1
    piece: int = 0  # bytes for every owner, of a split
    owners: int = 0
    merges: int = 0  # one after another, on the GPU
    merged: tuple[int, int] = (0, 0)  # elements of what is merged, entries that come together

    def sent(self, world: int) -> int:
        """Bytes that the rank that sends most hands to the collectives."""
        times = payloads_received("tree", world) if self.kind == "tree" else 1
        return self.nbytes * times + self.piece * self.owners


class Planner:
    """Predicts steps of one model on one card.

    Args:
        workload: the model.
        calibration: measured constants.
        card: key of ``calibration.cards``.
        compute_ms: what the GPU needs for a training step without communication, optimizer included, milliseconds;
            None: as measured, and so is the host's time.

    Raises:
        ValueError: a card that was not measured, or no compute time.
    """

    def __init__(
        self, workload: Workload, calibration: Calibration, card: str, compute_ms: float | None = None
    ) -> None:
        if card not in calibration.cards:
            raise ValueError(f"card must be one of {', '.join(calibration.cards)}, got {card!r}")
        compute = workload.compute_ms if compute_ms is None else compute_ms
        if compute is None or not 0.0 < compute < math.inf:
            raise ValueError(f"compute_ms must be > 0 and finite, got {compute!r}")
        self.workload, self.calibration, self.compute_ms = workload, calibration, compute
        self.host_ms = workload.host_ms if compute_ms is None else None
        self.card = calibration.cards[card]

    def predict(self, method: Method, cluster: Cluster) -> Prediction:
        """The step of a method on a cluster.

        Raises:
            ValueError: PowerSGD for a model whose tensors are not known.
        """
        world, compute = cluster.world_size, self.compute_ms
        messages, entries, dense_buckets = self._messages(method, world)
        arrived = 0.0
        for message in messages if world > 1 else []:
            ready = compute * (FORWARD + (1.0 - FORWARD) * message.ready)
            arrived = max(arrived, ready) + _message_ms(message, cluster, self.calibration)
        exposed, optimizer = max(0.0, arrived - compute), self._optimizer_ms(method, entries, world)
        host = self.host_ms or 0.0
        if host and world > 1:
            host += self.calibration.host_ms[method.name]
        return Prediction(
            method=method,
            step_ms=max(compute + exposed + optimizer, host),
            compute_ms=compute,
            exposed_ms=exposed,
            optimizer_ms=optimizer,
            host_ms=host,
            nbytes=sum(message.sent(world) for message in messages) if world > 1 else 0,
            dense_buckets=dense_buckets,
        )

    @property
    def alone_ms(self) -> float:
        """A step without communication, milliseconds."""
        return max(self.compute_ms, self.host_ms or 0.0)

    def dense(self, cluster: Cluster) -> Prediction:
        """The faster of the dense ways."""
        return min((self.predict(method, cluster) for method in DENSE), key=lambda p: p.step_ms)

    def break_even(self, method: Method, cluster: Cluster) -> float | None:
        """Rate of a node's link above which a dense exchange is faster than ``method``, bytes per second.

        None where there is none: ``method`` is faster or slower at every rate (0.1 MB/s to 1 TB/s), or there is
        one node.
        """

        def lead(rate: float) -> float:
            there = replace(cluster, bandwidth_bytes_per_s=rate)
            return self.dense(there).step_ms - self.predict(method, there).step_ms

        low, high = map(math.log, _RATES)
        rates = [math.exp(low + (high - low) * i / _STEPS) for i in range(_STEPS + 1)]
        leads = [lead(rate) for rate in rates]
        crossings = [i for i in range(_STEPS) if leads[i] > 0.0 >= leads[i + 1]]
        if cluster.nodes == 1 or not crossings:
            return None
        below, above = rates[crossings[-1]], rates[crossings[-1] + 1]
        for _ in range(60):
            middle = math.sqrt(below * above)
            below, above = (middle, above) if lead(middle) > 0.0 else (below, middle)
        return math.sqrt(below * above)

    # ---- what is sent ------------------------------------------------------------------------------------------

    def _messages(self, method: Method, world: int) -> tuple[list[_Message], int, int]:
        """The messages; the entries in a rank's payloads; compressed buckets that travel dense."""
        if method.name == "topk":
            return self._compressed(method, world)
        buckets, size = self.workload.ddp_buckets, 2 if method.name == "ddp_bf16" else 4
        if method.name != "powersgd1":
            return [_Message(size * b.numel, "all-reduce", b.ready) for b in buckets], 0, 0
        if any(b.powersgd_numel is None for b in buckets):
            raise ValueError(f"what PowerSGD sends depends on the tensors, unknown of {self.workload.name}")
        return [_Message(4 * (b.powersgd_numel or 0), "all-reduce", b.ready, collectives=3) for b in buckets], 0, 0

    def _compressed(self, method: Method, world: int) -> tuple[list[_Message], int, int]:
        messages, entries, dense = [], 0, 0
        for bucket in self.workload.buckets:
            message = _sparse(bucket, method, world) if bucket.sparse else None
            if message is None:
                dense += bucket.sparse
                nbytes = 4 * dense_numel(bucket.segments, bucket.numel, with_norms=False)
                message = _Message(nbytes, "all-reduce", bucket.ready)
            else:
                entries += count_at(method.density, bucket.numel)
            messages.append(message)
        return messages, entries, dense

    # ---- milliseconds ------------------------------------------------------------------------------------------

    def _optimizer_ms(self, method: Method, entries: int, world: int) -> float:
        if method.name != "topk":
            return 0.0
        numel = self.workload.numel
        applied = entries * (world if method.collective == "gather" else 1)
        ours = self.card.compress_ms(numel, entries) + self.card.apply_ms(applied)
        return ours - self.card.fused_sgd_ms(numel)


def _message_ms(message: _Message, cluster: Cluster, known: Calibration, ranks_per_gpu: int = 1) -> float:
    merging = ranks_per_gpu * message.merges * known.merge_ms(*message.merged)
    return _links_ms(message, cluster, known) + merging


def _links_ms(message: _Message, cluster: Cluster, known: Calibration) -> float:
    world, nodes = cluster.world_size, cluster.nodes
    ring, least = 2 * (world - 1) / world, 2 * (nodes - 1) / nodes
    reduced = ring if nodes == 1 else known.ring_share * ring + (1 - known.ring_share) * least
    crossing, hops = message.nbytes * reduced, 2 * math.ceil(math.log2(nodes))
    if message.kind == "gather":
        crossing, hops = message.nbytes * (world - 1), nodes - 1
    elif message.kind == "tree":
        crossings, hops = tree_crossings(nodes, cluster.gpus_per_node)
        crossing = message.nbytes * (crossings if nodes > 1 else payloads_received("tree", world))
    elif message.kind == "split":
        leaving = cluster.gpus_per_node * message.owners * (nodes - 1) / nodes if nodes > 1 else message.owners
        crossing, hops = message.piece * leaving + message.nbytes * (world - 1), nodes
    if nodes == 1:
        return 1e3 * crossing / known.nvlink_bytes_per_s
    rate = cluster.bandwidth_bytes_per_s * (1.0 if cluster.measured else known.efficiency)
    latency = known.latency_s if cluster.latency_s is None else cluster.latency_s
    return 1e3 * (message.collectives * hops * latency + crossing / rate)


def exchange_ms(
    bucket: Bucket, method: Method, cluster: Cluster, calibration: Calibration, ranks_per_gpu: int = 1
) -> float | None:
    """What a compressed bucket takes on the links and to be merged, milliseconds; None: it goes dense.

    ``ranks_per_gpu``: that share a GPU, whose merges take turns.
    """
    message = _sparse(bucket, method, cluster.world_size)
    return None if message is None else _message_ms(message, cluster, calibration, ranks_per_gpu)


def _sparse(bucket: Bucket, method: Method, world: int) -> _Message | None:
    """A compressed bucket's exchange; None: it goes dense."""
    raw, payload = 4 * bucket.numel, payload_nbytes(bucket, method)
    k = count_at(method.density, bucket.numel)
    if method.collective == "split" and world > 1:
        split, piece, share = split_layouts(bucket.segments, bucket.pages, k, method.wire_dtype, False, world)
        if split_is_dearer(split, piece.nbytes, share.nbytes, raw, world):
            return None
        merged = bucket.numel // split.owners, world * k // split.owners
        return _Message(
            share.nbytes, "split", bucket.ready, piece=piece.nbytes, owners=split.owners, merges=1, merged=merged
        )  # fmt: skip
    if dense_is_cheaper(payload, raw, world, "tree" if method.collective == "tree" else "gather"):
        return None
    if method.collective != "tree":
        return _Message(payload, "gather", bucket.ready)
    nbytes, rounds = payload + 4 * dense_numel(bucket.segments, 0, with_norms=False), len(Tree.of(0, world).rounds)
    return _Message(nbytes, "tree", bucket.ready, merges=rounds, merged=(bucket.numel, 2 * k))


@functools.cache
def tree_crossings(nodes: int, gpus_per_node: int) -> tuple[int, int]:
    """Payloads that leave the busiest node, and rounds in which any does; ranks are numbered node by node."""
    world = nodes * gpus_per_node
    leaving: dict[int, dict[int, int]] = {}
    for rank in range(world):
        node, tree = rank // gpus_per_node, Tree.of(rank, world)
        peers = {part.number: part.peer for part in tree.rounds}
        if tree.tells is not None:
            peers[world.bit_length()] = tree.tells  # the last of all
        for number, peer in peers.items():
            if peer // gpus_per_node != node:
                by_node = leaving.setdefault(number, {})
                by_node[node] = by_node.get(node, 0) + 1
    return sum(max(by_node.values()) for by_node in leaving.values()), len(leaving)


def payload_nbytes(bucket: Bucket, method: Method) -> int:
    """Bytes of one rank's payload of a compressed bucket."""
    layout = PayloadLayout(
        segments=bucket.segments, pages=bucket.pages, k=count_at(method.density, bucket.numel), with_norms=False,
        wire_dtype=method.wire_dtype,
    )  # fmt: skip
    return layout.nbytes

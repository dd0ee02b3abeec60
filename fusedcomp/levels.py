"""Two levels of a network: fast links inside a node, slow ones between nodes.

    gradients -> rows, one a local rank -> reduce_scatter inside the node: the node's mean of this rank's shard
    shard     -> the pipeline (pipeline.py) between the nodes' ranks of the same shard: payloads of N nodes
    payloads  -> all_gather inside the node: payloads of all shards -> parameters

A shard is whole parameters of a bucket, dealt out by size. States exist once a node: a rank keeps its shard's alone.
Ranks tell each other twice: in a trailer behind every row, which the node sums, and in the payloads' headers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fusedcomp.buckets import Bucket, build_bucket
from fusedcomp.collectives import Group
from fusedcomp.compressors import TopK
from fusedcomp.exchange import Exchange, Hyper, Shared
from fusedcomp.gathered import layout_of
from fusedcomp.kernels.headers import TRAILER_WORDS
from fusedcomp.kernels.segments import Operands
from fusedcomp.sizing import plan_selection
from fusedcomp.sparse import SparseExchange
from fusedcomp.wire import Payload, dense_is_cheaper, dense_numel


@dataclass(frozen=True)
class Levels:
    """The ranks of this node, and the nodes' ranks of the same place."""

    intra: Group
    inter: Group
    # Parameter -> the place in a node whose rank keeps its states: for good, whatever bucket it comes into.
    places: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary, compare=False, repr=False)

    def private(self, device: torch.device | None) -> "Levels":
        """The same with communicators of their own."""
        return Levels(self.intra.private(device), self.inter.private(device), self.places)

    def deal(self, params: Sequence[Tensor]) -> list[list[int]]:
        """Positions in a bucket for every place, in order: the largest first, each to the place that has least so far.

        What has a place keeps it. All ranks see the same buckets in the same order, and deal alike.
        """
        dealt: list[list[int]] = [[] for _ in range(self.intra.world_size)]
        loads = [[0, sum(p.numel() for p, at in self.places.items() if at == place)] for place in range(len(dealt))]
        for position in sorted(range(len(params)), key=lambda i: (params[i] not in self.places, -params[i].numel(), i)):
            param = params[position]
            place = self.places.setdefault(param, loads.index(min(loads)))
            dealt[place].append(position)
            loads[place][0] += param.numel()
        return [sorted(positions) for positions in dealt]


@dataclass
class _Shard:
    """What is known of one local rank's share, on every rank of the node."""

    bucket: Bucket
    positions: list[int]  # in the whole bucket
    present: Tensor  # i32 (segments,): had any rank of any node a gradient
    seed: Tensor  # i32 (1,): the exchange's own, or nobody's
    payload: Payload | None = None  # of N nodes
    rows: Tensor | None = None  # f32, of a dense step: the sum over nodes
    grads: Operands | None = None


class ShardedExchange(Exchange):
    """A compressed bucket over two levels.

    Args:
        bucket: all of it; its states are the shard's.
        shared: of the front; its group is all ranks.
        seed: the step, kept by the device.
        levels: the two groups.
        compressor: what is sent between nodes.
        always_sparse: never go dense.
        make: builds the exchange between nodes, of a shard.
    """

    def __init__(
        self,
        bucket: Bucket,
        shared: Shared,
        seed: Tensor,
        levels: Levels,
        compressor: TopK,
        always_sparse: bool,
        make: Callable[[Bucket, Shared, Tensor], SparseExchange],
    ) -> None:
        super().__init__(bucket, shared, seed)
        self.levels, self.compressor, self.always_sparse = levels, compressor, always_sparse
        self.density = 0.0
        between = dataclasses.replace(shared, group=levels.inter, clip=None, has_loss_scale=False, squares=None)
        # By place in the node; a bucket of few parameters leaves some without a shard.
        self.shards = {place: self._shard(p) for place, p in enumerate(levels.deal(bucket.params)) if p}
        self.own, self.inner = self.shards.get(levels.intra.rank), None
        self.kept = Bucket(bucket.treatment, [], bucket.segments, bucket.operands)
        if self.own is not None:
            self.inner = make(self.own.bucket, between, seed.clone())
            self.own.present, self.own.seed = self.inner.present, self.inner.seed
            self.kept = self.inner.bucket
        self._lay_out_rows()
        self.room = self.gathered = torch.zeros(0, dtype=torch.uint8, device=bucket.device)
        self.summing: Any = None
        self.hyper: Hyper

    def _shard(self, positions: list[int]) -> _Shard:
        params = [self.bucket.params[i] for i in positions]
        bucket = build_bucket(self.bucket.treatment, params, self.bucket.segments.per_tensor)
        device = self.bucket.device
        present = torch.zeros(len(params), dtype=torch.int32, device=device)
        return _Shard(bucket, positions, present, torch.zeros(1, dtype=torch.int32, device=device))

    def _lay_out_rows(self) -> None:
        """A row a shard: its gradients one after another, room up to the longest, the trailer of the whole bucket."""
        segments, device = self.bucket.segments, self.bucket.device
        longest, count = max(shard.bucket.segments.numel for shard in self.shards.values()), len(segments.numels)
        width = longest + count + TRAILER_WORDS
        starts = [0] * count
        for place, shard in self.shards.items():
            for position, where in zip(shard.positions, shard.bucket.segments.compact_slices, strict=True):
                starts[position] = place * width + where.start
        self.in_rows = dataclasses.replace(
            segments,
            start_table=torch.tensor(starts, dtype=torch.int64, device=device),
            compact_slices=tuple(slice(s, s + n) for s, n in zip(starts, segments.numels, strict=True)),
        )
        self.rows = torch.zeros((self.levels.intra.world_size, width), dtype=torch.float32, device=device)
        self.row = torch.zeros(width, dtype=torch.float32, device=device)
        self.trailers, self.trailer = self.rows[:, longest:], self.row[longest:]
        self.row_grads, positions = [], []
        if self.own is not None:
            self.row_grads = [self.row[where] for where in self.own.bucket.segments.compact_slices]
            positions = self.own.positions
        self.own_positions = torch.tensor(positions, dtype=torch.int64, device=device)

    # ---- launch ------------------------------------------------------------------------------------------------

    def launch(self, grads: Sequence[Tensor | None], hyper: Hyper, step: int) -> None:
        """Start the exchange of these gradients, on the current stream."""
        self.bucket.operands.update(grads)
        self.scale()
        sign = (-1.0 if hyper.maximize else 1.0) / self.levels.intra.world_size
        self.ops.dense.pack_dense(
            self.in_rows, self.bucket.operands, self.scales, self.rows.view(-1), self.flag, grad_scale=sign
        )
        self._exchange(hyper, step, failed=False)

    def launch_nothing(self, hyper: Hyper, step: int) -> None:
        """Take part as a rank that failed: without gradients of its own, for those of its node."""
        self.bucket.operands.update([None] * len(self.bucket.params))
        self.rows.zero_()
        self._exchange(hyper, step, failed=True)

    def _exchange(self, hyper: Hyper, step: int, failed: bool) -> None:
        self._prepare(step)
        self.ops.headers.write_trailer(self.bucket.operands, self.flag, self.seed, self.trailers[0], failed=failed)
        self.trailers[1:] = self.trailers[0]
        self.hyper, self.summing = hyper, self.levels.intra.reduce_scatter(self.row, self.rows)
        if self.row.is_cuda:
            self._go_between()

    def _go_between(self) -> None:
        """From the node's sum on. On CPU, where waiting stops the host, and with it backward, in ``step()``."""
        if self.summing is not None:
            self.summing.wait()
            self.summing = None
        verdict = self.shared.verdict
        self.ops.headers.read_trailer(
            self.trailer, self.status, None if verdict is None else verdict.nonfinite, self.present,
            world=self.levels.intra.world_size,
        )  # fmt: skip
        for shard in self.shards.values():  # where the parameters are by now
            shard.bucket.operands.params = [self.bucket.operands.params[i] for i in shard.positions]
        if self.own is None or self.inner is None:
            return
        operands = self.own.bucket.operands
        operands.update(self.row_grads)
        operands.keep_present(self.present[self.own_positions])
        # A rank that failed may have no shard: its node says so for it.
        anybody = (self.trailer[len(self.present) + 1] > 0.0).to(torch.int32)
        self.inner.start(dataclasses.replace(self.hyper, maximize=False), anybody)
        self.nbytes = self.inner.nbytes

    def _prepare(self, step: int) -> None:
        """Room for what all shards send: as the density has it, the same on all ranks."""
        density = self.compressor.density_at(step)
        if density == self.density:
            return
        self.density = density
        nodes, trust, shards = self.levels.inter.world_size, self.trust is not None, list(self.shards.values())
        selections = {
            place: plan_selection(self.compressor, shard.bucket.segments.scope_numels, density)
            for place, shard in self.shards.items()
        }
        layouts = [
            layout_of(self.compressor, shard.bucket.segments, trust, selections[place].k)
            for place, shard in self.shards.items()
        ]
        numels = [shard.bucket.segments.numel for shard in shards]
        dense = not self.always_sparse and any(
            dense_is_cheaper(layout.nbytes, 4 * numel, nodes) for layout, numel in zip(layouts, numels, strict=True)
        )
        if dense:
            sizes = [4 * dense_numel(len(s.positions), n, trust) for s, n in zip(shards, numels, strict=True)]
        else:
            sizes = [nodes * layout.nbytes for layout in layouts]
        nbytes = -(-max(sizes) // 16) * 16
        device = self.bucket.device
        self.gathered = torch.zeros((self.levels.intra.world_size, nbytes), dtype=torch.uint8, device=device)
        self.room = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        if self.inner is not None:
            self.inner.prepare(selections[self.levels.intra.rank], dense, self.room)
        for place, shard, layout, size in zip(self.shards, shards, layouts, sizes, strict=True):
            received = self.gathered[place, :size]
            shard.payload = shard.rows = None
            if not dense:
                shard.payload = layout.views(received.view(nodes, -1))
                continue
            shard.rows = received.view(torch.float32)
            views = [shard.rows[where] for where in shard.bucket.segments.compact_slices]
            shard.grads = Operands(shard.bucket.params, shard.bucket.treatment.dtype)
            shard.grads.update(views)
        self.nbytes_intra = self.rows.nbytes + nbytes

    # ---- step --------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the exchange between nodes; gather inside the node what all its ranks received."""
        if not self.row.is_cuda:
            self._go_between()
        if self.inner is not None:
            self.inner.wait()
            if self.inner.dense_step and self.inner.reduced is not None:
                whole = self.inner.reduced.whole.view(torch.uint8)
                self.room[: whole.numel()] = whole
        work = self.levels.intra.all_gather(self.gathered, self.room)
        if work is None:
            self.gathered[0] = self.room
        else:
            work.wait()

    def read(self) -> None:
        """Take in the headers of all shards."""
        verdict, nodes = self.shared.verdict, self.levels.inter.world_size
        nonfinite = None if verdict is None else verdict.nonfinite
        for shard in self.shards.values():
            if shard.payload is not None:
                self.ops.headers.read_headers(shard.payload.header, self.status, nonfinite, shard.present)
            elif shard.rows is not None:
                segments = shard.bucket.segments
                trailer = shard.rows[segments.numel : segments.numel + len(segments.numels) + TRAILER_WORDS]
                self.ops.headers.read_trailer(trailer, self.status, nonfinite, shard.present, world=nodes)

    def annul(self) -> None:
        """If the step was skipped: it was none, and nobody had a gradient."""
        super().annul()
        for shard in self.shards.values():
            self.ops.verdict.annul(self.shared.found_inf, shard.seed, shard.present)

    def apply(self, hyper: Hyper) -> None:
        """Update the parameters of all shards."""
        if self.shared.verdict is None:
            self.read()
        if self.inner is not None:
            self.inner.settle(hyper, self._norms(self.inner))
        for shard in self.shards.values():
            if shard.payload is not None:
                self._apply_payloads(shard, shard.payload, hyper)
            else:
                self._apply_rows(shard, hyper)

    def _norms(self, inner: SparseExchange) -> Tensor:
        """What nodes said of the norms in this rank's shard."""
        if inner.dense_step and inner.reduced is not None:
            return inner.reduced.norms.view(1, -1)
        return inner.buffers.payloads.norms

    def _apply_payloads(self, shard: _Shard, payload: Payload, hyper: Hyper) -> None:
        if shard is not self.own:
            shard.bucket.operands.update([None] * len(shard.positions))
        self.ops.apply.apply_payloads(
            shard.bucket.segments, shard.bucket.operands, payload.starts, payload.indices, payload.values, hyper.lr,
            None, self.status, self.shared.found_inf, shard.present, None,
            inverse_world=1.0 / self.levels.inter.world_size,
        )  # fmt: skip

    def _apply_rows(self, shard: _Shard, hyper: Hyper) -> None:
        operands = shard.grads
        assert operands is not None
        operands.params = shard.bucket.operands.params
        operands.update(operands.grads)
        self.ops.dense.update_dense(
            shard.bucket.segments, operands, shard.present, None, hyper.lr, None,
            inverse_world=1.0 / self.levels.inter.world_size, weight_decay=0.0, momentum=hyper.momentum,
            nesterov=hyper.nesterov,
        )  # fmt: skip

    def metrics(self) -> dict[str, Tensor]:
        """Of this rank's shard."""
        return {} if self.inner is None else self.inner.metrics()


def resolve(process_group: Any) -> tuple[Group, Levels | None]:
    """The ranks that a front exchanges with, and the two levels if there are two.

    Args:
        process_group: a group, None, ``(intra_node, inter_node)``, or a 2-D DeviceMesh (nodes, ranks of a node).

    Raises:
        ValueError: the two groups are not those of a grid of ranks.
    """
    if hasattr(process_group, "mesh_dim_names") and hasattr(process_group, "get_group"):
        if process_group.ndim != 2:
            raise ValueError(f"process_group: a DeviceMesh must have two dimensions, got {process_group}")
        process_group = (process_group.get_group(1), process_group.get_group(0))
    if not isinstance(process_group, (tuple, list)):
        return Group(process_group), None
    if len(process_group) != 2:
        raise ValueError(f"process_group must be one group or (intra_node, inter_node), got {process_group!r}")
    intra, inter = (Group(group) for group in process_group)
    return Group.of_grid(intra, inter), Levels(intra, inter)

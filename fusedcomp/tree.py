"""gTop-k: payloads are merged along a tree instead of gathered; what a rank receives grows with log2 of the ranks.

launch:  [sample -> compress -> refine] -> payload, trailer
         every round:  swap them with a partner -> add up -> the k largest are the next payload
                       what the k largest leave -> residual of one of the ranks that have merged it
apply:   trailer -> the last payload, the same on all ranks -> parameters
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomp.buffers import Summed
from fusedcomp.kernels.headers import ENCODING, NON_FINITE
from fusedcomp.kernels.refine import PACK
from fusedcomp.sizing import Selection
from fusedcomp.sparse import SparseExchange, layout_of
from fusedcomp.wire import Payload, PayloadLayout, dense_numel

_FROM_ZERO = 55  # bits of a digit when candidates begin at key 0: 256 digits are all exponents (kernels/digits.py)


class Round(NamedTuple):
    """One merge that a rank takes part in."""

    number: int  # among all ranks' rounds: ties are broken anew in every one
    peer: int
    side: int  # the row of the pair that is this rank's: the lower rank's comes first
    place: int  # of ``places``: which indices' rest this rank keeps
    places: int  # ranks that merge the same


class Tree(NamedTuple):
    """A rank's part in merging the payloads of all."""

    rounds: tuple[Round, ...]
    told_by: int | None = None  # the rank that has the outcome; None: this one has
    tells: int | None = None

    @staticmethod
    def of(rank: int, world: int) -> "Tree":
        """Recursive doubling among the first 2**p ranks; the others fold theirs in before, and are told afterwards."""
        depth = world.bit_length() - 1
        power = 1 << depth
        if rank >= power:
            return Tree((Round(0, rank - power, 1, 1, 2),), told_by=rank - power)
        partner = rank + power if rank + power < world else None
        folded = () if partner is None else (Round(0, partner, 0, 0, 2),)
        doubled = tuple(Round(r + 1, rank ^ (1 << r), rank >> r & 1, rank % (2 << r), 2 << r) for r in range(depth))
        return Tree(folded + doubled, tells=partner)

    @property
    def sends(self) -> int:
        """Payloads that this rank hands to others."""
        return len(self.rounds) + (self.tells is not None)


class _Row(NamedTuple):
    """What travels in one piece: a payload and its trailer."""

    whole: Tensor  # u8 (nbytes,)
    payload: Payload  # views of it, of one rank
    summed: Summed  # trailer and norms, also views


@dataclass
class _Merges:
    """What a bucket's merges work in; made anew when k changes."""

    sign: int  # says how payloads are encoded and how many entries were asked for
    pairs: list[Payload]  # of every round both payloads, the lower rank's first
    rows: list[_Row]  # this rank's of every round, then the outcome
    theirs: list[_Row]
    keys: Tensor  # i64 (2 k,)
    indices: Tensor  # i64 (2 k,)
    near: Tensor  # i64 (2 k,)
    packed: Tensor  # i64 (1 + 2 programs of pack_payload,)


class TreeExchange(SparseExchange):
    """The entries that ``TopK`` selects, and of their sums the largest."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tree = Tree.of(self.group.rank, self.group.world_size)
        self.peers = 1
        # Velocities are masked where something is applied, which is known at the end.
        self.masked_at_last, self.masked = self.masked, None
        segments, device = self.bucket.segments, self.bucket.device
        if self.shared.vector is None or self.shared.vector.numel() < segments.padded_numel:
            self.shared.vector = torch.zeros(segments.padded_numel, dtype=torch.float32, device=device)
        self.merged_least = torch.zeros_like(self.thresholds)
        self.merged_widths = torch.full_like(self.widths, _FROM_ZERO)
        self.merged_offsets = torch.zeros_like(self.offsets)
        self.merged_seed, self.merged_flag = torch.zeros_like(self.seed), torch.zeros_like(self.flag)
        self.merges: _Merges
        self.swapping: list[Any] = []

    def _layout(self, k: int) -> PayloadLayout:
        """Norms are summed: they travel with the trailer."""
        return layout_of(self.compressor, self.bucket.segments, False, k)

    def prepare(self, selection: Selection, dense: bool, room: Tensor | None) -> None:
        """Buffers for this selection; the pass packs into this rank's row of the first pair."""
        if not dense:
            self.merges = self._allocate(selection)
            room = self.merges.rows[0].whole
        super().prepare(selection, dense, room)

    def _allocate(self, selection: Selection) -> _Merges:
        layout, device, rounds = self._layout(selection.k), self.bucket.device, self.tree.rounds
        count, with_norms = len(self.bucket.segments.numels), self.trust is not None
        trailer = 4 * dense_numel(count, 0, with_norms)
        width = -(-(layout.nbytes + trailer) // 16) * 16
        buffer = torch.zeros((2 * len(rounds) + 1, width), dtype=torch.uint8, device=device)

        def row(number: int) -> _Row:
            whole = buffer[number]
            summed = Summed.within(
                whole[layout.nbytes : layout.nbytes + trailer].view(torch.float32), count, with_norms
            )
            return _Row(whole, layout.views(whole[: layout.nbytes].view(1, -1)), summed)

        def zeros(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=torch.int64, device=device)

        room = 2 * selection.k
        return _Merges(
            ENCODING[layout.wire_dtype] + ((selection.k & 0x7FFF) << 16),
            [layout.views(buffer[2 * n : 2 * n + 2]) for n in range(len(rounds))],
            [*(row(2 * n + part.side) for n, part in enumerate(rounds)), row(2 * len(rounds))],
            [row(2 * n + 1 - part.side) for n, part in enumerate(rounds)],
            zeros(room), zeros(room), zeros(room), zeros(1 + 2 * -(-room // PACK)),
        )  # fmt: skip

    # ---- launch --------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        self._tell(failed=False)
        self._travel()

    def _send_nothing(self) -> None:
        self.merges.rows[0].whole.zero_()
        self.seed.add_(1)
        self._tell(failed=True)
        self._travel()

    def _tell(self, failed: bool) -> None:
        """Fill in the trailer, once the payload is packed."""
        row = self.merges.rows[0]
        self.merged_flag.copy_(row.payload.header[0, 2:3])
        torch.add(self.seed, self.merges.sign, out=self.merged_seed)
        self.ops.headers.write_trailer(
            self.bucket.operands, self.merged_flag, self.merged_seed, row.summed.trailer, failed=failed
        )
        if not failed:
            self._sum_norms(row.summed)

    def _travel(self) -> None:
        self.nbytes = max(self.tree.sends, 1) * self.merges.rows[0].whole.numel()
        self._swap(0)
        if self.seed.is_cuda:  # on CPU waiting stops the host, and with it backward: in ``wait``
            self._merge_all()

    def _swap(self, number: int) -> None:
        if number < len(self.tree.rounds):
            own, theirs = self.merges.rows[number].whole, self.merges.theirs[number].whole
            self.swapping = self.group.swap(own, theirs, self.tree.rounds[number].peer)

    def _wait_for_swap(self) -> None:
        for work in self.swapping:
            work.wait()
        self.swapping = []

    def _merge_all(self) -> None:
        merges = self.merges
        for number, part in enumerate(self.tree.rounds):
            self._wait_for_swap()
            self._merge(part, merges.pairs[number], merges.rows[number + 1].payload)
            own, theirs = merges.rows[number].summed.whole, merges.theirs[number].summed.whole
            torch.add(own, theirs, out=merges.rows[number + 1].summed.whole)
            self._swap(number + 1)
        last = merges.rows[-1]
        if self.tree.tells is not None:
            self.swapping = self.group.swap(last.whole, None, self.tree.tells)
        if self.tree.told_by is not None:
            self.swapping = self.group.swap(None, last.whole, self.tree.told_by)
        self._wait_for_swap()
        if self.masked_at_last is not None:
            own_payload = self.buffers.payload
            self.ops.merge.mask_winners(
                self.bucket.segments, last.payload.starts[0], last.payload.indices[0], own_payload.starts[0],
                own_payload.indices[0], self.shared.parity, self._vector(), self.masked_at_last,
            )  # fmt: skip
        # A sum of finite values that is infinite wins every merge after it.
        last.summed.trailer[len(self.present)] += last.payload.header[0, 2] & NON_FINITE.value

    def _vector(self) -> Tensor:
        vector = self.shared.vector
        assert vector is not None
        return vector[: self.bucket.segments.padded_numel]

    def _merge(self, part: Round, pair: Payload, out: Payload) -> None:
        """The k largest of the sum of two payloads, the same on all ranks that merge them; the rest is kept by one."""
        segments, merges, refine, vector = self.bucket.segments, self.merges, self.ops.refine, self._vector()
        torch.add(self.seed, part.number, out=self.merged_seed)
        self.merged_least.zero_()
        self.ops.merge.sum_payloads(segments, pair.starts, pair.indices, pair.values, vector, self.counts, self.marks)
        refine.list_candidates(segments, self.counts, self.marks, self.scanned, self.merged_offsets, merges.indices)
        refine.select_candidates(
            segments, self.merged_offsets, merges.indices, vector, self.merged_seed, None, self.buffers.ranks,
            self.merged_widths, self.histograms, self.bounds, merges.near, self.near_counts, self.tickets,
            self.merged_least, merges.keys, self.merged_flag,
        )  # fmt: skip
        refine.pack_payload(
            segments, self.bucket.operands, merges.keys, merges.indices, self.merged_offsets, self.merged_least, None,
            vector, self.merged_flag, self.merged_seed, None, merges.packed,
            out.starts[0], out.indices[0], out.values[0], out.header[0],
        )  # fmt: skip
        self.ops.merge.keep_rest(
            segments, pair.starts, pair.indices, self.shared.parity, vector, self.residual, place=part.place,
            places=part.places,
        )  # fmt: skip

    # ---- step ----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Make the current stream wait for the exchange; on CPU, merge."""
        if not self.dense_step and not self.seed.is_cuda:
            self._merge_all()
        super().wait()

    def _read_sent(self) -> None:
        self.read_trailer(self.merges.rows[-1].summed)

    def _arrived(self) -> Payload:
        last = self.merges.rows[-1]
        return last.payload._replace(norms=last.summed.norms.view(1, -1))

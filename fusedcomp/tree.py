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
from fusedcomp.gathered import layout_of
from fusedcomp.kernels.headers import ENCODING, NON_FINITE
from fusedcomp.merging import Merger, make_vector, mask
from fusedcomp.sizing import Selection
from fusedcomp.sparse import SparseExchange
from fusedcomp.wire import Payload, PayloadLayout, dense_is_cheaper, dense_numel


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
    merger: Merger


class TreeExchange(SparseExchange):
    """The entries that ``TopK`` selects, and of their sums the largest."""

    _follows_draws = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tree = Tree.of(self.group.rank, self.group.world_size)
        self.peers = 1
        # Velocities are masked where something is applied, which is known at the end.
        self.masked_at_last, self.masked = self.masked, None
        make_vector(self.shared, self.bucket.segments.padded_numel, self.bucket.device)
        self.told_seed, self.told_flag = torch.zeros_like(self.seed), torch.zeros_like(self.flag)
        self.merges: _Merges
        self.swapping: list[Any] = []

    def _layout(self, k: int) -> PayloadLayout:
        """Norms are summed: they travel with the trailer."""
        return layout_of(self.compressor, self.bucket.segments, False, k)

    def _goes_dense(self, k: int) -> bool:
        nbytes, raw = self._layout(k).nbytes, 4 * self.bucket.segments.numel
        return dense_is_cheaper(nbytes, raw, self.group.world_size, "tree") and not self.always_sparse

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

        return _Merges(
            ENCODING[layout.wire_dtype] + ((selection.k & 0x7FFF) << 16),
            [layout.views(buffer[2 * n : 2 * n + 2]) for n in range(len(rounds))],
            [*(row(2 * n + part.side) for n, part in enumerate(rounds)), row(2 * len(rounds))],
            [row(2 * n + 1 - part.side) for n, part in enumerate(rounds)],
            Merger(self, self.bucket.segments, selection.ks, 2 * selection.k),
        )

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
        self.told_flag.copy_(row.payload.header[0, 2:3])
        torch.add(self.seed, self.merges.sign, out=self.told_seed)
        self.ops.headers.write_trailer(
            self.bucket.operands, self.told_flag, self.told_seed, row.summed.trailer, failed=failed
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
            merges.merger.merge(
                merges.pairs[number], merges.rows[number + 1].payload, part.number, self._residuals, part.place,
                part.places,
            )  # fmt: skip
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
            mask(self, last.payload, self.buffers.payload, self.masked_at_last)
        # A sum of finite values that is infinite wins every merge after it.
        last.summed.trailer[len(self.present)] += last.payload.header[0, 2] & NON_FINITE.value

    @property
    def _residuals(self) -> Tensor:
        return self.residual.view(-1, self.bucket.segments.padded_numel)

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

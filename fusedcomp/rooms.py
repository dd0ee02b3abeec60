"""Rooms of payloads whose entries nobody can count before the pass: by what ranks asked for some steps ago.

Every rank sees the same headers, so that all come to the same room without a word more on the wire.

Waiting   a threshold with a memory: what finds no room waits, and room is for what arrives
Anew      CAT, and whatever has no memory: room is for what was wanted
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomp.sizing import Scheduled, Selection

LAG = 8  # steps after which headers are looked at


class Waiting:
    """Entries wait in the residual: a room that is always full sends most for its bytes.

    Of every step a rank tells what it asked for; what found no room then is known too, so that what arrived from step
    to step follows. The room is somewhat less than arrives at the rank that needs most, and a share of those that are
    expected to wait there by now, so that a few always do. (A room in proportion to what was asked for swings: it acts
    eight steps late.)
    """

    _ARRIVING = 0.9
    _PATIENCE = 16  # steps in which those that wait are to be sent
    WASTE = 1.1  # more room than so many times what is needed becomes less

    def __init__(self) -> None:
        self._arrived: deque[list[int]] = deque(maxlen=LAG)  # of every rank
        self._waiting: list[int] = []  # after the last step that is known

    def see(self, asked: Sequence[int], room: int) -> None:
        """What ranks asked for in the next step."""
        before = self._waiting or [0] * len(asked)
        self._arrived.append([one - had for one, had in zip(asked, before, strict=True)])
        self._waiting = [max(0, one - room) for one in asked]

    def sent_all(self) -> None:
        """The next step was dense."""
        self._waiting = [0] * len(self._waiting)

    def needed(self, rooms: Iterable[int]) -> int:
        """Entries to have room for, after steps with these rooms of which nothing is known yet."""
        between = list(rooms)
        ranks = zip(self._waiting, *self._arrived, strict=True)
        return max((self._needed(waiting, arrived, between) for waiting, *arrived in ranks), default=0)

    def _needed(self, waiting: float, arrived: Sequence[int], between: Sequence[int]) -> int:
        """By one rank."""
        arriving = max(0.0, sum(arrived) / len(arrived))
        for room in between:
            waiting = max(0.0, waiting + arriving - room)
        return math.ceil(self._ARRIVING * arriving + waiting / self._PATIENCE)

    def room_for(self, needed: int) -> int:
        """The room to make where there is too little, or too much."""
        return needed

    def state(self) -> dict[str, Any]:
        """Plain data."""
        return {"arrived": list(self._arrived), "waiting": list(self._waiting)}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._arrived, self._waiting = deque(kept["arrived"], maxlen=LAG), list(kept["waiting"])


class Anew:
    """What is wanted is chosen anew in every step, as CAT does, or lost if it finds no room.

    Room is for somewhat more than any rank wanted in eight steps.
    """

    _SLACK, _MORE = 1.15, 16
    WASTE = 1.4

    def __init__(self) -> None:
        self._most: deque[int] = deque(maxlen=LAG)

    def see(self, asked: Sequence[int], room: int) -> None:
        """What ranks asked for in the next step."""
        self._most.append(max(asked))

    def sent_all(self) -> None:
        """Nothing is known of it."""

    def needed(self, rooms: Iterable[int]) -> int:
        """Entries to have room for."""
        return max(self._most, default=0)

    def room_for(self, needed: int) -> int:
        """The room to make where there is too little, or too much."""
        return math.ceil(self._SLACK * needed) + self._MORE

    def state(self) -> dict[str, Any]:
        """Plain data."""
        return {"most": list(self._most)}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._most = deque(kept["most"], maxlen=LAG)


class Adaptive:
    """By what ranks asked for exactly ``LAG`` steps before; waits for the copy of their headers if it must.

    In a CUDA graph the size stays what it was.

    Args:
        numel: elements of the bucket.
        with_room: the selection with room for so many entries.
        goes_dense: would a payload with room for so many entries be sent densely?
        world_size: ranks whose headers there are.
        device: where they are.
        demand: what there is to be room for.
    """

    _FIRST = 32  # at first there is room for numel / 32 entries
    _SETTLING = 2 * LAG  # steps for which that is the least: residuals begin at zero, and so does what they ask for
    _FLOOR = 64  # entries: a burst after a quiet time sends some at least

    def __init__(
        self,
        numel: int,
        with_room: Callable[[int], Selection],
        goes_dense: Callable[[int], bool],
        world_size: int,
        device: torch.device,
        demand: Waiting | Anew,
    ) -> None:
        self._with_room = with_room
        self.everything = with_room(numel)
        self.limit = with_room(_most(numel, goes_dense))
        self.selection = self._fitting(max(self._FLOOR, numel // self._FIRST))
        self.demand = demand
        pinned = device.type == "cuda"
        self._asked = torch.zeros((LAG, world_size, 2), dtype=torch.int32, pin_memory=pinned)  # and flags
        self._copied = [torch.cuda.Event() for _ in range(LAG)] if pinned else []
        self._steps = [-1] * LAG  # whose headers the rows are
        self._rooms = [0] * LAG  # that they had
        self._step, self._settled = -1, self._SETTLING

    def at(self, step: int) -> Selection:
        """The selection of this step."""
        if self._is_capturing():
            return self.selection
        self._step = step
        self._settled -= 1
        row, before = step % LAG, step - LAG
        if before >= 0 and self._steps[row] == before:
            self.selection = self._after(row)
        # Of a dense step there will be no header.
        self._steps[row], self._rooms[row] = step, self.selection.k
        return self.selection

    def note(self, headers: Tensor) -> None:
        """Take in the headers of all ranks, of the step whose selection was the last: i32 (world, words)."""
        if self._is_capturing():
            return
        row = self._step % LAG
        self._asked[row].copy_(headers[:, 1:3], non_blocking=True)
        if self._copied:
            self._copied[row].record()

    def _after(self, row: int) -> Selection:
        if self._rooms[row] > self.limit.k:  # dense, nobody was asked: see what a payload can take
            self.demand.sent_all()
            return self.limit if self.selection is self.everything else self.selection
        asked, is_flagged = self._found(row)
        if is_flagged:  # not finite, or a rank failed
            return self.selection
        self.demand.see(asked, self._rooms[row])
        if max(asked) > self.limit.k:
            return self.everything
        needed, room = self.demand.needed(self._since(row)), self.selection.k
        target = max(self._FLOOR, self.demand.room_for(needed))
        wasteful = room > self.demand.WASTE * target and self._settled < 0
        if min(needed, self.limit.k) > room or wasteful or self.selection is self.everything:
            return self._fitting(target)
        return self.selection

    def _since(self, row: int) -> list[int]:
        """The rooms of the steps after that of a row."""
        rows = [(row + after) % LAG for after in range(1, LAG)]
        return [self._rooms[each] for each in rows if self._steps[each] > self._steps[row]]

    def state(self) -> dict[str, Any]:
        """Plain data, the same on all ranks. Waits for copies that are on their way."""
        steps = [[step, self._rooms[row], *self._found(row)] for row, step in enumerate(self._steps) if step >= 0]
        return {
            "of": self._identity(), "room": self.selection.k, "settled": self._settled, "steps": steps,
            "demand": self.demand.state(),
        }  # fmt: skip

    def _identity(self) -> list[Any]:
        """What a state must be of: the same bucket, as many ranks, the same kind of demand."""
        return [self.limit.k, self.everything.k, self._asked.shape[1], type(self.demand).__name__]

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from there, if it is of such a bucket among as many ranks; else rooms begin anew."""
        if kept.get("of") != self._identity():
            return
        room = kept["room"]
        self.selection = self.everything if room > self.limit.k else self._fitting(room)
        self._settled = kept["settled"]
        self.demand.restore(kept["demand"])
        for step, room, asked, is_flagged in kept["steps"]:
            row = step % LAG
            self._steps[row], self._rooms[row] = step, room
            self._asked[row, :, 0] = torch.tensor(asked)
            self._asked[row, :, 1] = int(is_flagged)

    def _found(self, row: int) -> tuple[list[int], bool]:
        """What every rank asked for, and whether it is no measure of what is to come."""
        if self._copied and not self._copied[row].query():
            self._copied[row].synchronize()
        return self._asked[row, :, 0].tolist(), bool(self._asked[row, :, 1].any())

    def _fitting(self, entries: int) -> Selection:
        """Room for at least so many, if that is a payload at all."""
        return self.limit if entries >= self.limit.k else self._with_room(entries)

    def _is_capturing(self) -> bool:
        return bool(self._copied) and torch.cuda.is_current_stream_capturing()


def _most(numel: int, goes_dense: Callable[[int], bool]) -> int:
    """The most entries that are not sent densely; all, if none are."""
    if goes_dense(1):
        return numel
    low, high = 1, numel + 1  # the first is a payload, the last too large
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if goes_dense(middle) else (middle, high)
    return low


Sizing = Scheduled | Adaptive

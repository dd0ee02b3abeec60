"""Rooms of payloads: how they follow what ranks ask for."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedcomp.rooms import LAG, Adaptive, Anew, Waiting
from fusedcomp.sizing import Selection

NUMEL = 100_000
LIMIT = 20_000  # entries; more are sent densely
MAKES = (Waiting, Anew)

Step = tuple[int, list[int], int]  # the room, what ranks send, what waits in all


def rooms(demand: Waiting | Anew | None = None, world: int = 2) -> Adaptive:
    return Adaptive(
        NUMEL, lambda entries: Selection((entries,), (0,), (0,), entries), lambda entries: entries > LIMIT, world,
        torch.device("cpu"), demand or Waiting(),
    )  # fmt: skip


def played(adaptive: Adaptive, arriving: Callable[[int], Sequence[int]], steps: int) -> list[Step]:
    """Steps of ranks with so many new entries in each."""
    waiting, is_kept = [0] * len(arriving(0)), isinstance(adaptive.demand, Waiting)
    taken = []
    for step in range(steps):
        room = adaptive.at(step).k
        asked = [had + new for had, new in zip(waiting, arriving(step), strict=True)]
        if room <= LIMIT:
            adaptive.note(torch.tensor([[0, one, 0] for one in asked], dtype=torch.int32))
        sent = [min(one, room) for one in asked]
        waiting = [one - gone for one, gone in zip(asked, sent, strict=True)] if is_kept else [0] * len(asked)
        taken.append((room, sent, sum(waiting)))
    return taken


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 1.5), (0.0, 2.0)])
def test_rooms_are_full_and_few_wait(scales: tuple[float, float]) -> None:
    """Of a room in proportion to what is asked for a third is empty: it swings, as it acts eight steps late."""
    draw = random.Random(0)
    taken = played(rooms(), lambda step: [round(1000 * scale * draw.lognormvariate(0, 0.3)) for scale in scales], 400)
    settled = taken[50:]
    space = sum(2 * room for room, _, _ in settled)
    used = sum(sum(sent) for _, sent, _ in settled)
    assert used > 0.9 * space * sum(scales) / (2 * max(scales))  # all have the room of the one that needs most
    assert used == pytest.approx(2 * 1000 * 1.046 * len(settled), rel=0.1)
    assert max(waiting for _, _, waiting in settled) < 8 * 2000
    sizes = [room for room, _, _ in settled]
    assert max(sizes) < 2.5 * min(sizes)  # in proportion to what is asked for: 10


def test_a_burst_is_sent_in_a_while() -> None:
    taken = played(rooms(), lambda step: [4000 if 100 <= step < 110 else 500] * 2, 260)
    before, late = taken[99], taken[-1]
    assert max(room for room, _, _ in taken[108:130]) > 3 * before[0]
    assert taken[109][2] > 20 * before[2]
    assert late[2] < 2 * before[2]
    assert late[0] == pytest.approx(before[0], rel=0.15)


def test_nothing_asked_for() -> None:
    """What is left is a floor, for what may come."""
    taken = played(rooms(), lambda step: [0, 0], 40)
    assert taken[0][0] == NUMEL // 32
    assert taken[-1][0] == 64


def test_what_is_chosen_anew_has_room_for_the_most() -> None:
    draw = random.Random(0)
    taken = played(rooms(Anew()), lambda step: [draw.randint(900, 1000), draw.randint(10, 20)], 60)
    assert all(sent[0] < room for room, sent, _ in taken)
    assert taken[-1][0] < 1.4 * (1.15 * 1000 + 16)


@pytest.mark.parametrize("make", MAKES)
def test_more_than_a_payload_takes_goes_dense_and_comes_back(make: Callable[[], Waiting | Anew]) -> None:
    taken = played(rooms(make()), lambda step: [50_000 if step < 60 else 300] * 2, 140)
    assert taken[30][0] == NUMEL or taken[45][0] == NUMEL
    assert taken[-1][0] < 1000
    assert {room for room, _, _ in taken if room > LIMIT} == {NUMEL}


@given(
    st.lists(st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL), st.booleans()), min_size=1, max_size=60),
    st.sampled_from(MAKES),
    st.integers(0, 59),
)
def test_a_restored_one_goes_on_alike(asked: list[tuple[int, int, bool]], make: Any, saved: int) -> None:
    """Whatever was asked for and flagged; rooms lie between the floor and what a payload takes, or are everything."""
    first = rooms(make())
    other = None
    for step, (one, two, flag) in enumerate(asked):
        room = first.at(step).k
        assert 64 <= room <= LIMIT or room == NUMEL
        if other is not None:
            assert other.at(step).k == room
        for each in [first] if other is None else [first, other]:
            if room <= LIMIT:
                each.note(torch.tensor([[0, one, int(flag)], [0, two, 0]], dtype=torch.int32))
        if step == saved:
            other = rooms(make())
            other.restore(first.state())


def test_a_state_of_other_ranks_begins_anew() -> None:
    first = rooms()
    for step in range(3 * LAG):
        first.at(step)
        first.note(torch.tensor([[0, 5000, 0], [0, 5000, 0]], dtype=torch.int32))
    for other in (rooms(Anew()), rooms(world=3)):
        other.restore(first.state())
        assert other.selection.k == NUMEL // 32

"""Kernels that cut and join payloads against their twins; without a GPU interpreted."""

import pytest
import torch
from torch import Tensor

from fusedcomp.kernels.reference.merge import _entries
from kernel_cases import POISON, Case, build
from kernel_runs import DEVICE, KERNELS, TWINS, TYPES, halved, i32, same, unread, whole_pass, written

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

BOTH = (KERNELS, TWINS)
NUMELS = (1, 2049, 5, 330_001)  # six pages
NAMES = ("starts", "out_indices", "values")


def payload(wire: torch.dtype, fraction: float = 0.01) -> tuple[Case, list[Tensor]]:
    case = build(NUMELS, device=DEVICE)
    out = whole_pass(TWINS, case.copy(), fraction, wire=wire)
    return case, [out[name] for name in NAMES]


def as_dense(case: Case, starts: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    vector = torch.zeros(case.segments.padded_numel, device=DEVICE)
    at, index = _entries(case.segments, starts, indices)
    vector[index] = values[at].float()
    return vector


@pytest.mark.parametrize("wire", TYPES)
@pytest.mark.parametrize("parity", [None, 0, 1])
@pytest.mark.parametrize(("owners", "each", "room"), [(6, 1, 90), (3, 2, 4000), (2, 4, 1000), (1, 6, 17), (1, 7, 9000)])
def test_cutting_and_joining(owners: int, each: int, room: int, parity: int | None, wire: torch.dtype) -> None:
    """What is sent and what goes back add up to what was there; pieces in order are one payload again."""
    case, (starts, indices, values) = payload(wire)
    results = []
    for modules in BOTH:
        residual = halved(torch.zeros_like(case.residual), None if parity is None else 1 - parity)
        cut_starts = torch.full((owners, each + 1), -7, dtype=torch.int32, device=DEVICE)
        cut_indices = torch.full((owners, room), -7, dtype=torch.int16, device=DEVICE)
        cut_values = torch.full((owners, room), POISON, dtype=wire, device=DEVICE)
        modules["pieces"].cut_payload(
            case.segments, starts, indices, values, case.seed, None if parity is None else i32(parity), residual,
            cut_starts, cut_indices, cut_values,
        )  # fmt: skip
        unread(torch.full_like(case.residual, POISON), residual, parity)
        joined_starts = torch.full_like(starts, -7)
        joined_indices = torch.zeros(owners * room, dtype=torch.int16, device=DEVICE)
        joined_values = torch.zeros(owners * room, dtype=wire, device=DEVICE)
        modules["pieces"].join_pieces(
            case.segments, cut_starts, cut_indices, cut_values, joined_starts, joined_indices, joined_values
        )
        results.append(
            {"residual": written(residual, parity), "starts": cut_starts, "indices": cut_indices, "values": cut_values,
             "joined_starts": joined_starts, "joined_indices": joined_indices, "joined_values": joined_values}
        )  # fmt: skip
    same(*results)
    out = results[0]
    sent = as_dense(case, out["joined_starts"], out["joined_indices"], out["joined_values"])
    before = as_dense(case, starts, indices, values)
    assert torch.equal(sent + out["residual"], before)
    assert not (sent * out["residual"]).any()
    in_range = starts[torch.arange(0, owners + 1, device=DEVICE).mul(each).clamp(max=6)].diff().tolist()
    assert out["starts"][:, -1].tolist() == [min(count, room) for count in in_range]
    assert (out["residual"] != 0).any() == any(count > room for count in in_range)
    assert out["joined_starts"][-1] == sum(min(count, room) for count in in_range)


def test_another_run_is_left_out_in_every_step() -> None:
    """Over 200 steps each of some 600 entries finds room about as often as another."""
    case, (starts, indices, values) = payload(torch.float32, 0.002)
    total = int(starts[-1])
    times = torch.zeros(case.segments.padded_numel, device=DEVICE)
    for step in range(200):
        residual = torch.zeros_like(case.residual)
        TWINS["pieces"].cut_payload(
            case.segments, starts, indices, values, i32(step), None, residual,
            torch.zeros(1, 7, dtype=torch.int32, device=DEVICE),
            torch.zeros(1, total // 2, dtype=torch.int16, device=DEVICE), torch.zeros(1, total // 2, device=DEVICE),
        )  # fmt: skip
        times += residual != 0
    _, index = _entries(case.segments, starts, indices)
    assert times[index].min() > 50
    assert times[index].max() < 150


def test_joining_hostile_pieces_stays_inside() -> None:
    """Starts are a peer's: no load past a piece, no store past the room of all."""
    case, (starts, _, _) = payload(torch.float32)
    hostile = torch.tensor([[-5, 1 << 30, 7, 2], [9, -3, 1 << 20, 1 << 30]], dtype=torch.int32, device=DEVICE)
    indices = torch.ones(2, 50, dtype=torch.int16, device=DEVICE)
    box = torch.zeros(2 * 50 + 1000, dtype=torch.int16, device=DEVICE)
    out_values = torch.zeros(2 * 50 + 1000, device=DEVICE)
    for modules in BOTH:
        modules["pieces"].join_pieces(
            case.segments, hostile, indices, torch.ones(2, 50, device=DEVICE), torch.zeros_like(starts), box[:100],
            out_values[:100],
        )  # fmt: skip
        assert not box[100:].any()
        assert not out_values[100:].any()

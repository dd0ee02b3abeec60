"""Kernels that merge payloads against their twins; without a GPU interpreted."""

import pytest
import torch
from torch import Tensor

from fusedcomp.kernels.segments import BLOCK, WORDS
from kernel_cases import POISON, SIZES, Case, build, scratch
from kernel_runs import DEVICE, KERNELS, TWINS, TYPES, halved, i32, i64, same, unread, whole_pass, written

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

BOTH = (KERNELS, TWINS)
NAMES = ("starts", "out_indices", "values")


def payloads(
    numels: tuple[int, ...], rows: int, wire: torch.dtype = torch.float32, fraction: float = 0.03
) -> list[Tensor]:
    """Starts, indices and values of as many ranks, whose entries partly coincide."""
    packed = []
    for rank in range(rows):
        case = build(numels, device=DEVICE, shift=rank)
        case.residual[: BLOCK // 2] *= 50.0
        packed.append(whole_pass(TWINS, case, fraction, wire=wire))
    return [torch.stack([p[name] for p in packed]) for name in NAMES]


def dense(case: Case, starts: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """A row as a padded vector of float64."""
    vector = torch.zeros(case.segments.padded_numel, dtype=torch.float64, device=DEVICE)
    for page in range(case.segments.num_pages):
        at = slice(int(starts[page]), int(starts[page + 1]))
        vector[page * 65536 + (indices[at].long() & 0xFFFF)] = values[at].double()
    return vector


def candidates(case: Case, counts: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets and indices of what is marked, with room for more."""
    segments, marked = case.segments, int(counts.sum())
    offsets, indices = i64(*[-7] * (segments.num_blocks + 1)), i64(*[-(1 << 50)] * (marked + 700))
    scanned = i64(*[0] * (1 + 2 * segments.num_blocks))
    TWINS["refine"].list_candidates(segments, counts, marks.view(-1, WORDS), scanned, offsets, indices)
    return offsets, indices


@pytest.mark.parametrize("wire", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("size", ["one", "2047", "2049", "mixed", "two_pages"])
def test_sums_and_marks(size: str, rows: int, wire: torch.dtype) -> None:
    case, results = build(SIZES[size], device=DEVICE), []
    entries, segments = payloads(SIZES[size], rows, wire), case.segments
    for modules in BOTH:
        vector = torch.zeros(segments.padded_numel, device=DEVICE)
        counts = torch.full((segments.num_blocks,), -7, dtype=torch.int32, device=DEVICE)
        marks = torch.full((segments.num_blocks, WORDS), -7, dtype=torch.int32, device=DEVICE)
        modules["merge"].sum_payloads(segments, *entries, vector, counts, marks)
        results.append({"vector": vector, "counts": counts, "marks": marks})
    same(*results)
    expected = torch.zeros(segments.padded_numel, device=DEVICE)
    for row in range(rows):  # in this order, each addition rounded
        expected += dense(case, *(part[row] for part in entries)).float()
    assert torch.equal(results[0]["vector"], expected)
    bits = (results[0]["marks"].view(-1, 1) >> torch.arange(32, device=DEVICE) & 1).view(-1)
    assert int(bits.sum()) == int(results[0]["counts"].sum()) >= int((expected != 0).sum())


def test_a_crowded_page() -> None:
    """Thousands of entries in one page, in several chunks, of rows that have nearly the same."""
    numels, results = (70001,), []
    case, entries = build(numels, device=DEVICE), payloads(numels, 2, fraction=0.2)
    for modules in BOTH:
        vector = torch.zeros(case.segments.padded_numel, device=DEVICE)
        counts, marks = torch.zeros_like(case.segments.block_table[:, 0]), i32(*[-7] * case.segments.num_blocks * WORDS)
        modules["merge"].sum_payloads(case.segments, *entries, vector, counts, marks.view(-1, WORDS))
        results.append({"vector": vector, "counts": counts, "marks": marks})
    same(*results)


@pytest.mark.parametrize("parity", [None, 0, 1])
@pytest.mark.parametrize(("place", "places"), [(0, 2), (1, 2), (5, 8)])
def test_the_rest_is_kept_by_one(place: int, places: int, parity: int | None) -> None:
    numels = (1, 2049, 5, 70001)
    case, results = build(numels, device=DEVICE), []
    starts, indices, values = payloads(numels, 2)
    segments = case.segments
    rest = torch.zeros(segments.padded_numel, device=DEVICE)
    counts, marks = i32(*[0] * segments.num_blocks), i32(*[0] * segments.num_blocks * WORDS).view(-1, WORDS)
    TWINS["merge"].sum_payloads(segments, starts, indices, values, rest, counts, marks)
    offsets, listed = candidates(case, counts, marks)
    rest[torch.arange(len(rest), device=DEVICE) % 3 == 0] = 0.0  # as if these had won
    for modules in BOTH:
        vector, residual = rest.clone(), halved(case.residual.clone(), None if parity is None else 1 - parity)
        modules["merge"].keep_rest(
            offsets, listed, None if parity is None else i32(parity), vector,
            residual.view(-1, segments.padded_numel), place=place, places=places,
        )  # fmt: skip
        assert not vector.any()
        unread(torch.full_like(case.residual, POISON), residual, parity)
        results.append({"residual": written(residual, parity)})
    same(*results)
    mine = torch.arange(len(rest), device=DEVICE) % places == place
    assert torch.equal(results[0]["residual"], torch.where(mine, case.residual + rest, case.residual))
    assert (rest[mine] != 0.0).any()


@pytest.mark.parametrize("parity", [None, 0, 1])
def test_velocities_of_winners_are_masked(parity: int | None) -> None:
    numels = (1, 2049, 5, 70001)
    case, results = build(numels, device=DEVICE), []
    starts, indices, _ = payloads(numels, 2)
    for modules in BOTH:
        velocity = halved(case.velocity.clone(), None if parity is None else 1 - parity)
        vector = torch.zeros(case.segments.padded_numel, device=DEVICE)
        modules["merge"].mask_winners(
            case.segments, starts[0], indices[0], starts[1], indices[1], None if parity is None else i32(parity),
            vector, velocity,
        )  # fmt: skip
        assert not vector.any()
        unread(torch.full_like(case.velocity, POISON), velocity, parity)
        results.append({"velocity": written(velocity, parity)})
    same(*results)
    ones = torch.ones(indices.shape, device=DEVICE)
    both = dense(case, starts[0], indices[0], ones[0]) * dense(case, starts[1], indices[1], ones[1]) != 0
    assert both.any()
    assert torch.equal(results[0]["velocity"], torch.where(both, 0.0, case.velocity))


def test_hostile_payloads_stay_inside() -> None:
    """Starts and indices are a peer's: no store outside the vector."""
    case = build((3000, 2049), device=DEVICE)
    padded = case.segments.padded_numel
    starts = torch.tensor([[-50, 1 << 30], [5, 2]], dtype=torch.int32, device=DEVICE)
    indices = torch.arange(-32768, 32768, 257, device=DEVICE).to(torch.int16).expand(2, -1).contiguous()
    results = []
    for modules in BOTH:
        box = torch.zeros(padded + 70000, device=DEVICE)
        residual = torch.zeros(padded + 70000, device=DEVICE)
        counts, marks = i32(*[0] * case.segments.num_blocks), i32(*[0] * case.segments.num_blocks * WORDS)
        modules["merge"].sum_payloads(
            case.segments, starts, indices, torch.ones(indices.shape, device=DEVICE), box[:padded], counts,
            marks.view(-1, WORDS),
        )  # fmt: skip
        summed = box.clone()
        modules["merge"].keep_rest(
            *candidates(case, counts, marks), None, box[:padded], residual[None, :padded], place=0, places=1
        )
        results.append({"vector": summed, "residual": residual, "counts": counts, "marks": marks})
        assert not box.any()
        assert summed.any()
        assert not summed[padded:].any()
        assert not residual[padded:].any()
    same(*results)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_merging(per_tensor: bool, coarse: bool) -> None:
    """sum -> list -> select -> pack -> keep: the k largest of the sum, and the rest; what was there is conserved."""
    numels = SIZES["mixed"]
    case = build(numels, device=DEVICE, per_tensor=per_tensor)
    packed = [whole_pass(TWINS, build(numels, device=DEVICE, shift=s, per_tensor=per_tensor), 0.05) for s in range(2)]
    starts, indices, values = (torch.stack([p[name] for p in packed]) for name in NAMES)
    results, k = [], values.shape[1]
    segments = case.segments.parted(100 * k)  # as if candidates were many
    assert segments.part_table.shape[0] > case.segments.part_table.shape[0]
    ks = [max(1, round(n * 0.05)) for n in segments.scope_numels]
    for modules in BOTH:
        mine, out = case.copy(), scratch(case, 2 * k, k)
        vector, thresholds = torch.zeros(segments.padded_numel, device=DEVICE), i64(*[0] * len(ks))
        mine.residual.zero_()
        modules["merge"].sum_payloads(segments, starts, indices, values, vector, out["counts"], out["marks"])
        total = vector.clone()
        modules["refine"].list_candidates(
            segments, out["counts"], out["marks"], out["scanned"], out["offsets"], out["indices"]
        )
        near, bounds = torch.full_like(out["keys"], -7), i64(*[(-7, -7, -7, -7)] * len(ks))
        modules["refine"].select_candidates(
            segments, out["offsets"], out["indices"], vector, None, mine.seed, None, i64(*ks),
            torch.full((len(ks),), 55, dtype=torch.int32, device=DEVICE), out["histograms"],
            bounds, near, torch.zeros(len(ks), dtype=torch.int32, device=DEVICE),
            out["tickets"], thresholds, out["keys"], out["flag"], coarse=coarse,
        )  # fmt: skip
        if modules is KERNELS and not per_tensor:  # how many the last program looks at, one by one
            keys = out["keys"][: int(out["offsets"][-1])]
            close = int(((keys >= bounds[0, 0]) & (keys < bounds[0, 1])).sum())
            assert (close <= len(keys) // 50) == coarse
        modules["pack"].pack_payload(
            segments, mine.operands(), out["keys"], out["indices"], out["offsets"], thresholds, None, vector,
            out["flag"], mine.seed, None, out["packed"], out["starts"], out["out_indices"], out["values"],
            out["header"],
        )  # fmt: skip
        modules["merge"].keep_rest(out["offsets"], out["indices"], None, vector, mine.residual[None], place=0, places=1)
        sent = dense(case, out["starts"], out["out_indices"], out["values"])
        assert torch.equal(sent + mine.residual.double(), total.double())
        assert not (sent * mine.residual).any()
        results.append({"residual": mine.residual, "thresholds": thresholds} | {name: out[name] for name in NAMES})
    same(*results)

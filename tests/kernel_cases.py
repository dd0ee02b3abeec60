"""Buckets to run kernels and twins on: odd sizes, unaligned addresses, clustered winners, broken gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedcomp.kernels.digits import BINS
from fusedcomp.kernels.headers import HEADER_WORDS
from fusedcomp.kernels.pack import PACK
from fusedcomp.kernels.refine import SCAN
from fusedcomp.kernels.segments import BLOCK, WORDS, Operands, Segments

POISON = -12345.0

# One element; one short of, exactly, and one past a block; five blocks and a bit; two pages; several of each.
SIZES = {
    "one": (1,),
    "2047": (2047,),
    "2048": (2048,),
    "2049": (2049,),
    "10243": (10243,),
    "two_pages": (70001,),
    "mixed": (1, 2048, 7, 10243, 2049, 33, 4096),
}


@dataclass
class Case:
    """One bucket with everything a step reads and writes; ``copy()`` gives a second one with tensors of its own."""

    segments: Segments
    params: list[Tensor]
    grads: list[Tensor | None]
    velocity: Tensor
    residual: Tensor
    weights: Tensor
    trust: Tensor
    scales: Tensor
    seed: Tensor

    def copy(self) -> "Case":
        return Case(
            self.segments,
            [clone_at(p) for p in self.params],
            [None if g is None else clone_at(g) for g in self.grads],
            self.velocity.clone(),
            self.residual.clone(),
            self.weights.clone(),
            self.trust.clone(),
            self.scales.clone(),
            self.seed.clone(),
        )

    def operands(self) -> Operands:
        operands = Operands(self.params)
        operands.update(self.grads)
        return operands


def clone_at(tensor: Tensor) -> Tensor:
    """A copy with the same offset from a 16-byte boundary."""
    return placed(tensor, tensor.data_ptr() % 16 // tensor.itemsize, tensor.device)


def placed(tensor: Tensor, shift: int, device: torch.device | str) -> Tensor:
    """A copy that starts ``shift`` elements past a 16-byte boundary."""
    storage = torch.empty(tensor.numel() + 8, dtype=tensor.dtype, device=device)
    return storage[shift : shift + tensor.numel()].copy_(tensor)


def build(
    numels: tuple[int, ...],
    *,
    device: str = "cpu",
    per_tensor: bool = False,
    shift: int = 0,
    missing: tuple[int, ...] = (),
    values: str = "normal",
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
) -> Case:
    """``values``: normal, ties (few distinct magnitudes), clustered (one hot block), or nan / inf in one gradient."""
    generator = torch.Generator().manual_seed(sum(numels) + shift)
    segments = Segments.build(numels, torch.device(device), per_tensor=per_tensor)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=generator)

    params = [normal(n) for n in numels]
    grads: list[Tensor | None] = [normal(n) for n in numels]
    velocity, residual = torch.zeros(segments.padded_numel), torch.zeros(segments.padded_numel)
    for numel, where in zip(numels, segments.slices, strict=True):
        velocity[where], residual[where] = normal(numel), normal(numel)
    if values == "ties":
        grads = [g.round() for g in grads if g is not None]
        velocity, residual = velocity.zero_(), residual.round_()
    if values == "clustered":
        residual[:BLOCK] *= 100.0 * (torch.arange(BLOCK) < numels[0])
    if values in ("nan", "inf"):
        broken = grads[-1]
        assert broken is not None
        broken[numels[-1] // 2] = float(values)
    weights = torch.rand(segments.padded_numel, generator=generator).pow_(8.0).clamp_(min=1e-30)
    for segment in missing:
        grads[segment] = None
    return Case(
        segments,
        [placed(p.to(dtype), shift, device) for p in params],
        [None if g is None else placed(g.to(dtype), (2 * shift) % 4, device) for g in grads],
        velocity.to(state_dtype).to(device),
        residual.to(state_dtype).to(device),
        weights.to(device),
        torch.rand(len(numels), generator=generator).add_(0.5).to(device),
        torch.rand(len(numels), generator=generator).add_(0.25).to(device),
        torch.tensor([7], dtype=torch.int32, device=device),
    )


def scratch(case: Case, capacity: int, k: int, wire: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Output buffers, poisoned: what a launcher does not write stays visible. Scratch as the launchers expect it."""
    segments, device = case.segments, case.residual.device
    scopes = len(segments.scope_numels)

    def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, -7, dtype=dtype, device=device)

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return {
        "counts": ints(segments.num_blocks, dtype=torch.int32),
        "marks": ints(segments.num_blocks, WORDS, dtype=torch.int32),
        "partials": torch.full((segments.num_blocks, 2), POISON, device=device),
        "flag": torch.zeros(1, dtype=torch.int32, device=device),
        "offsets": ints(segments.num_blocks + 1),
        "keys": ints(capacity),
        "indices": ints(capacity),
        "histograms": zeros(scopes, BINS, dtype=torch.int32),
        "tickets": zeros(scopes, dtype=torch.int32),
        "scanned": zeros(1 + 2 * -(-segments.num_blocks // SCAN), dtype=torch.int64),
        "packed": zeros(1 + 2 * -(-capacity // PACK), dtype=torch.int64),
        "starts": ints(segments.num_pages + 1, dtype=torch.int32),
        "out_indices": ints(k, dtype=torch.int16),
        "values": torch.full((k,), POISON, dtype=wire, device=device),
        "header": ints(HEADER_WORDS + -(-len(segments.numels) // 32), dtype=torch.int32),
    }

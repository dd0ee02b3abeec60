"""Twin of ``kernels/pack.py``."""

import torch
from torch import Tensor

from fusedcomp.kernels.headers import ENCODING, SIGNED
from fusedcomp.kernels.keys import DRAW_UNIT
from fusedcomp.kernels.reference.elements import half_of, narrow_clamped
from fusedcomp.kernels.reference.headers import end_payload
from fusedcomp.kernels.reference.keys import magnitude_bits
from fusedcomp.kernels.segments import BLOCK, PAGE, SIGNED_PAGE, Operands, Segments


def pack_payload(
    segments: Segments,
    operands: Operands,
    keys: Tensor,
    indices: Tensor,
    offsets: Tensor,
    thresholds: Tensor,
    velocity: Tensor | None,
    residual: Tensor,
    flag: Tensor,
    seed: Tensor,
    parity: Tensor | None,
    shared: Tensor,
    starts: Tensor,
    out_indices: Tensor,
    values: Tensor,
    header: Tensor,
    *,
    signed: bool = False,
    drawn: bool = False,
) -> None:
    page = SIGNED_PAGE if signed else PAGE
    velocity, residual = half_of(velocity, parity, 1), half_of(residual, parity, 1)
    total = min(int(offsets[-1]), keys.numel())
    keys, indices = keys[:total], indices[:total]
    scope = segments.block_table[indices // BLOCK, 0].long() if segments.per_tensor else torch.zeros_like(indices)
    reached = keys >= thresholds[scope]
    if signed:
        reached &= (keys >> 32) >= magnitude_bits(0.5 * values)
    if drawn:
        reached &= keys > thresholds[0]
    won = indices[reached]
    starts[0] = 0
    torch.cumsum(torch.bincount(won // page, minlength=segments.pages_of(page)), 0, dtype=torch.int32, out=starts[1:])
    value = residual[won].float()
    out_indices.zero_()
    # Unsigned 16 bits in an int16: 32768.. wrap to the negative numbers with the same bits.
    inside = won % page + (page * (value < 0.0) if signed else 0)
    out_indices[: won.numel()] = ((inside + 32768) % PAGE - 32768).to(torch.int16)
    if signed:
        kept = value - torch.where(value < 0.0, -values, values)
    else:
        if drawn:
            least = (thresholds[:1] >> 32).int().view(torch.float32) / DRAW_UNIT.value
            value = torch.where(value.abs() < least, torch.where(value < 0.0, -least, least), value)
        values.zero_()
        sent = values[: won.numel()] = narrow_clamped(value, values.dtype)
        kept = value - sent.float() if residual.itemsize == 4 else torch.zeros_like(value)
    residual[won] = torch.where(value.isfinite(), kept, 0.0).to(residual.dtype)
    if velocity is not None:
        velocity[won] = 0.0
    version = SIGNED if signed else ENCODING[values.dtype]
    end_payload(operands, flag, seed, header, offsets[-1], out_indices.numel(), version)

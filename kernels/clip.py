"""What the gradient is multiplied by before all else: a sampler's factor, the inverse loss scale, clipping of its norm.

    norm_l  = |factor_l g_l| / loss_scale                        per tensor
    norm    = sqrt(sum over l of |factor_l g_l|^2) / loss_scale  else
    scale_l = factor_l / loss_scale * min(1, max_norm / (norm + 1e-6))

A factor is the inverse of the chance with which a gradient was computed at all (JointSpar); 1 without a sampler.

torch.nn.utils.clip_grad_norm_'s arithmetic. Clipping is of a rank's own gradient, before it is accumulated: Lin et al.,
"Deep gradient compression" (2018), section 3.3. A NaN norm gives NaN, an infinite one 0, which makes NaN of infinite
elements: what was not finite is found out behind either.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch
from fusedcomp.kernels.elements import load_block
from fusedcomp.kernels.segments import BLOCK, Operands, Segments

_CHUNK = 256


@triton.jit
def _gradient_squares_kernel(
    block_table_ptr, address_ptr, numel_ptr,  # in
    partials_ptr,  # out
    ELEMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
    grad_address = tl.load(address_ptr + segment)
    remaining = tl.where(grad_address != 0, tl.load(numel_ptr + segment) - start, 0)
    grad = load_block(grad_address, start, remaining, ELEMENT, BLOCK)
    tl.store(partials_ptr + block, tl.sum(grad * grad))


@triton.jit
def _sum_squares_kernel(
    partials_ptr, first_block_ptr, factor_ptr,  # in
    squares_ptr,  # out
    HAS_FACTORS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    end = tl.load(first_block_ptr + segment + 1)
    square = tl.zeros((CHUNK,), tl.float32)
    for chunk in range(tl.load(first_block_ptr + segment), end, CHUNK):
        block = chunk + tl.arange(0, CHUNK)
        square += tl.load(partials_ptr + block, mask=block < end, other=0.0)
    square = tl.sum(square)
    if HAS_FACTORS:
        factor = tl.load(factor_ptr + segment)
        square = square * (factor * factor)
    tl.store(squares_ptr + segment, square)


@triton.jit
def _gradient_scales_kernel(
    squares_ptr, loss_scale_ptr, factor_ptr,  # in
    scale_ptr,  # out
    max_norm, count, num_segments,
    HAS_SQUARES: tl.constexpr, HAS_LOSS_SCALE: tl.constexpr, HAS_FACTORS: tl.constexpr, PER_TENSOR: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = segment < num_segments
    one = tl.full((CHUNK,), 1.0, tl.float32)
    scale = one
    if HAS_LOSS_SCALE:
        scale = tl.div_rn(one, tl.load(loss_scale_ptr))
    if HAS_SQUARES:
        square = tl.zeros((CHUNK,), tl.float32)
        if PER_TENSOR:
            square += tl.load(squares_ptr + segment, mask=mask, other=0.0)
        else:
            for chunk in range(0, count, CHUNK):
                at = chunk + tl.arange(0, CHUNK)
                square += tl.load(squares_ptr + at, mask=at < count, other=0.0)
            square = tl.zeros((CHUNK,), tl.float32) + tl.sum(square)
        norm = tl.sqrt_rn(square) * scale
        clip = tl.div_rn(one * max_norm, norm + 1e-6)
        scale = scale * tl.where(clip > 1.0, 1.0, clip)  # tl.minimum would lose NaN
    if HAS_FACTORS:
        scale = scale * tl.load(factor_ptr + segment, mask=mask, other=1.0)
    tl.store(scale_ptr + segment, scale, mask=mask)


def gradient_squares(
    segments: Segments,
    operands: Operands,
    factors: Tensor | None,  # f32 (segments,); None: all are 1
    partials: Tensor,  # scratch: f32 (blocks,)
    squares: Tensor,  # out: f32 (segments,): squared norm of every gradient times its factor, 0 where there is none
) -> None:
    """One read of the gradients; the blocks of every segment are added up by one program each, in a fixed order."""
    launch(
        _gradient_squares_kernel, segments.num_blocks, partials,
        segments.block_table, operands.addresses, segments.numel_table,
        partials,
        ELEMENT=ELEMENT[operands.dtype], BLOCK=BLOCK,
    )  # fmt: skip
    launch(
        _sum_squares_kernel, len(segments.numels), squares,
        partials, segments.first_blocks, factors,
        squares,
        HAS_FACTORS=factors is not None, CHUNK=_CHUNK, shape="small",
    )  # fmt: skip


def gradient_scales(
    squares: Tensor | None,  # f32 (n,): of the segments if per tensor, else of all that is clipped; None: no clipping
    loss_scale: Tensor | None,  # f32 (1,)
    factors: Tensor | None,  # f32 (segments,): that ``squares`` have in them; None: all are 1
    scales: Tensor,  # out: f32 (segments,)
    *,
    max_norm: float,
    per_tensor: bool,
) -> None:
    """What to multiply the gradients of a bucket by."""
    launch(
        _gradient_scales_kernel, -(-scales.numel() // _CHUNK), scales,
        squares, loss_scale, factors,
        scales,
        max_norm, 0 if squares is None else squares.numel(), scales.numel(),
        HAS_SQUARES=squares is not None, HAS_LOSS_SCALE=loss_scale is not None, HAS_FACTORS=factors is not None,
        PER_TENSOR=squares is not None and per_tensor, CHUNK=_CHUNK, shape="small",
    )  # fmt: skip

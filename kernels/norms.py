"""Per-parameter norms in a fixed order, and LARS's trust ratio from them.

    |x_l|^2 = sum over the blocks of l, in order, of the sum inside the block
    trust_l = trust_coefficient * |w_l| / (|g_l| + weight_decay * |w_l| + eps),  1 where a norm is 0

You, Gitman, Ginsburg, "Large batch training of convolutional networks" (2017), eq. 6.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch
from fusedcomp.kernels.elements import load_block
from fusedcomp.kernels.segments import BLOCK, Operands, Segments

_CHUNK = 256


@triton.jit
def _block_norms_kernel(
    block_table_ptr, address_ptr, numel_ptr,  # in
    partials_ptr,  # out
    num_segments,
    ELEMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
    remaining = tl.load(numel_ptr + segment) - start
    grad = load_block(tl.load(address_ptr + segment), start, remaining, tl.float32, BLOCK)
    param = load_block(tl.load(address_ptr + num_segments + segment), start, remaining, ELEMENT, BLOCK)
    tl.store(partials_ptr + 2 * block, tl.sum(grad * grad))
    tl.store(partials_ptr + 2 * block + 1, tl.sum(param * param))


@triton.jit
def _reduce_norms_kernel(
    partials_ptr, first_block_ptr,  # in
    norms_ptr,  # out
    num_segments,
    CHUNK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    end = tl.load(first_block_ptr + segment + 1)
    grad = tl.zeros((CHUNK,), tl.float32)
    param = tl.zeros((CHUNK,), tl.float32)
    for chunk in range(tl.load(first_block_ptr + segment), end, CHUNK):
        block = chunk + tl.arange(0, CHUNK)
        grad += tl.load(partials_ptr + 2 * block, mask=block < end, other=0.0)
        param += tl.load(partials_ptr + 2 * block + 1, mask=block < end, other=0.0)
    tl.store(norms_ptr + segment, tl.sum(grad))
    tl.store(norms_ptr + num_segments + segment, tl.sum(param))


@triton.jit
def _trust_ratios_kernel(
    address_ptr, numel_ptr, norms_ptr, scale_ptr,  # in
    trust_ptr,  # out
    coefficient, weight_decay, eps, num_segments,
    HAS_FALLBACK: tl.constexpr, HAS_SCALES: tl.constexpr, ELEMENT: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    grad = tl.load(norms_ptr + segment)
    param = tl.load(norms_ptr + num_segments + segment)
    if HAS_FALLBACK:  # noqa: SIM102  a constant decides what is compiled, a value what runs
        if grad <= 0.0:
            param = 0.0
            numel = tl.load(numel_ptr + segment)
            grad_address = tl.load(address_ptr + segment)
            param_address = tl.load(address_ptr + num_segments + segment)
            for start in range(0, numel, STRETCH):
                remaining = tl.where(grad_address != 0, numel - start, 0)
                values = load_block(grad_address, start, remaining, ELEMENT, STRETCH)
                if HAS_SCALES:
                    values = values * tl.load(scale_ptr + segment)
                grad += tl.sum(values * values)
                values = load_block(param_address, start, numel - start, ELEMENT, STRETCH)
                param += tl.sum(values * values)
    grad = tl.sqrt_rn(grad)
    param = tl.sqrt_rn(param)
    trust = tl.div_rn(coefficient * param, grad + weight_decay * param + eps)
    tl.store(trust_ptr + segment, tl.where((grad > 0.0) & (param > 0.0), trust, 1.0))


@triton.jit
def _commit_norms_kernel(
    received_ptr, present_ptr,  # in
    norms_ptr,  # in-out
    inverse_world, world, stride, num_segments,
    CHUNK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = segment < num_segments
    grad = tl.zeros((CHUNK,), tl.float32)
    for rank in range(world):
        grad += tl.load(received_ptr + tl.cast(rank, tl.int64) * stride + segment, mask=mask, other=0.0)
    grad = grad * inverse_world
    param = tl.load(received_ptr + num_segments + segment, mask=mask, other=0.0)
    seen = mask & (tl.load(present_ptr + segment, mask=mask, other=0) != 0)
    usable = seen & (grad > 0.0) & (grad < float("inf")) & (param < float("inf"))
    least = tl.load(norms_ptr + segment, mask=usable, other=0.0) * 0.81  # of squares: nine tenths of the norm
    tl.store(norms_ptr + segment, tl.maximum(grad, least), mask=usable)
    tl.store(norms_ptr + num_segments + segment, param, mask=usable)


def block_norms(
    segments: Segments,
    operands: Operands,  # its gradients are fp32
    partials: Tensor,  # out: f32 (blocks, 2): sums of squares of gradient and parameter
) -> None:
    """The sums of squares of every block: a read of gradients and parameters."""
    launch(
        _block_norms_kernel, segments.num_blocks, partials,
        segments.block_table, operands.addresses, segments.numel_table,
        partials,
        len(segments.numels),
        ELEMENT=ELEMENT[operands.dtype], BLOCK=BLOCK,
    )  # fmt: skip


def reduce_norms(
    segments: Segments,
    partials: Tensor,  # f32 (blocks, 2)
    norms: Tensor,  # out: f32 (2, segments): squared norms of gradient and parameter
) -> None:
    """Add up the blocks of every segment, one program each, in a fixed order."""
    launch(
        _reduce_norms_kernel, len(segments.numels), partials,
        partials, segments.first_blocks,
        norms,
        len(segments.numels),
        CHUNK=_CHUNK, shape="small",
    )  # fmt: skip


def trust_ratios(
    segments: Segments,
    operands: Operands,
    norms: Tensor,  # f32 (2, segments): squared norms of gradient and parameter
    scales: Tensor | None,  # f32 (segments,): the fallback's gradients are multiplied by it first
    trust: Tensor,  # out: f32 (segments,)
    *,
    coefficient: float,
    weight_decay: float,
    eps: float,
    fallback: bool,
) -> None:
    """LARS's local learning rate of every segment.

    ``fallback``: a segment without a positive gradient norm takes those of its operands, read by one program. That is
    a parameter's first step, and no other unless its gradient is all zeros.
    """
    launch(
        _trust_ratios_kernel, len(segments.numels), trust,
        operands.addresses, segments.numel_table, norms, scales,
        trust,
        coefficient, weight_decay, eps, len(segments.numels),
        HAS_FALLBACK=fallback, HAS_SCALES=fallback and scales is not None, ELEMENT=ELEMENT[operands.dtype],
        STRETCH=4 * BLOCK, shape="stretch",
    )  # fmt: skip


def commit_norms(
    received: Tensor,  # f32 (world, 2 * segments), rows may be strided
    present: Tensor,  # i32 (segments,)
    norms: Tensor,  # in-out: f32 (2, segments)
    *,
    inverse_world: float,
) -> None:
    """Keep the mean over ranks, in rank order, of |g|^2 and rank 0's |w|^2, where positive and finite.

    |g| falls by at most a tenth in a step (docs/decisions/0014-falling-norms.md).
    """
    segments = norms.shape[1]
    launch(
        _commit_norms_kernel, -(-segments // _CHUNK), norms,
        received, present,
        norms,
        inverse_world, received.shape[0], received.stride(0), segments,
        CHUNK=_CHUNK, shape="small",
    )  # fmt: skip

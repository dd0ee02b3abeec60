"""Dense buckets: pack gradients for an all-reduce, and the fused update that follows it.

    update:  gradient <- trust * (mean gradient + weight_decay * param)
             momentum_buffer <- momentum * momentum_buffer + gradient
             param <- param - lr * momentum_buffer        Nesterov: lr * (gradient + momentum * momentum_buffer)

torch.optim.SGD's arithmetic, in fp32: parameters of 16 bits are rounded once, at the end. Parameters that no rank had a
gradient for are skipped, as torch skips them.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch
from fusedcomp.kernels.elements import load_block, store_block
from fusedcomp.kernels.keys import INFINITE, magnitude_bits
from fusedcomp.kernels.segments import BLOCK, Operands, Segments


@triton.jit
def _pack_dense_kernel(
    block_table_ptr, address_ptr, numel_ptr, start_ptr, scale_ptr,  # in
    flat_ptr, flag_ptr,  # out
    grad_scale,
    HAS_SCALES: tl.constexpr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
    remaining = tl.load(numel_ptr + segment) - start
    grad_address = tl.load(address_ptr + segment)
    grad = load_block(grad_address, start, tl.where(grad_address != 0, remaining, 0), ELEMENT, BLOCK) * grad_scale
    if HAS_SCALES:  # of a gradient that is there: zeros times NaN would be NaN
        grad = grad * tl.load(scale_ptr + segment, mask=grad_address != 0, other=1.0)
    if tl.max(magnitude_bits(grad)) >= INFINITE:
        tl.atomic_or(flag_ptr, 1)
    store_block(flat_ptr.to(tl.int64) + tl.load(start_ptr + segment) * 4, start, remaining, grad, tl.float32, BLOCK)


@triton.jit
def _update_dense_kernel(
    block_table_ptr, address_ptr, numel_ptr, present_ptr, trust_ptr, lr_ptr,  # in
    momentum_ptr,  # in-out
    inverse_world, weight_decay, momentum, num_segments,
    HAS_MOMENTUM: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_TRUST: tl.constexpr, NESTEROV: tl.constexpr,
    ELEMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    if tl.load(present_ptr + segment) != 0:
        start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
        remaining = tl.load(numel_ptr + segment) - start
        param_address = tl.load(address_ptr + num_segments + segment)
        grad = load_block(tl.load(address_ptr + segment), start, remaining, tl.float32, BLOCK) * inverse_world
        param = load_block(param_address, start, remaining, ELEMENT, BLOCK)
        if HAS_DECAY:
            grad = grad + weight_decay * param
        if HAS_TRUST:
            grad = tl.load(trust_ptr + segment) * grad
        update = grad
        if HAS_MOMENTUM:
            index = block * BLOCK + tl.arange(0, BLOCK)
            update = momentum * tl.load(momentum_ptr + index) + grad
            tl.store(momentum_ptr + index, update)
            if NESTEROV:
                update = grad + momentum * update
        store_block(param_address, start, remaining, param - tl.load(lr_ptr) * update, ELEMENT, BLOCK)


def pack_dense(
    segments: Segments,
    operands: Operands,
    scales: Tensor | None,  # f32 (segments,): the gradient is multiplied by it first
    flat: Tensor,  # out: f32 (numel,), compact
    flag: Tensor,  # in-out: i32 (1,): set to 1 if a gradient is not finite
    *,
    grad_scale: float,
) -> None:
    """Copy the gradients, scaled, into one flat buffer; zeros where there is none."""
    launch(
        _pack_dense_kernel, segments.num_blocks, flat,
        segments.block_table, operands.addresses, segments.numel_table, segments.start_table, scales,
        flat, flag,
        grad_scale,
        HAS_SCALES=scales is not None, ELEMENT=ELEMENT[operands.dtype], BLOCK=BLOCK,
    )  # fmt: skip


def update_dense(
    segments: Segments,
    operands: Operands,  # in-out: the parameters; its gradients are fp32, summed over ranks
    present: Tensor,  # i32 (segments,): 0 where no rank had a gradient
    trust: Tensor | None,  # f32 (segments,)
    lr: Tensor,  # f32 (1,)
    momentum_buffer: Tensor | None,  # in-out: f32 (padded,)
    *,
    inverse_world: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """One pass of SGD over summed gradients; with ``trust`` it is LARS."""
    launch(
        _update_dense_kernel, segments.num_blocks, lr,
        segments.block_table, operands.addresses, segments.numel_table, present, trust, lr,
        momentum_buffer,
        inverse_world, weight_decay, momentum, len(segments.numels),
        HAS_MOMENTUM=momentum_buffer is not None, HAS_DECAY=weight_decay != 0.0, HAS_TRUST=trust is not None,
        NESTEROV=nesterov, ELEMENT=ELEMENT[operands.dtype], BLOCK=BLOCK,
    )  # fmt: skip

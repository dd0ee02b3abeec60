"""Weight decay that stays on its rank: beside the gradient, neither compressed nor clipped nor masked.

    decoupled      param  <- param - lr * weight_decay * param                   Loshchilov and Hutter, ICLR 2019, eq. 9
    own momentum   buffer <- momentum * buffer + weight_decay * param            as DGC's own optimizer has it
                   param  <- param - lr * buffer                                 Nesterov: weight_decay * param
                                                                                 + momentum * buffer in its place

Parameters are the same on all ranks, so what is done to them here is too. Before the update, of parameters that some
rank had a gradient for.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import launch
from fusedcomp.kernels.elements import load_block, store_block
from fusedcomp.kernels.segments import BLOCK, Operands, Segments


@triton.jit
def _decay_params_kernel(
    block_table_ptr, address_ptr, numel_ptr, present_ptr, lr_ptr,  # in
    buffer_ptr,  # in-out
    weight_decay, momentum, num_segments,
    HAS_BUFFER: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment = tl.load(block_table_ptr + 2 * block)
    if tl.load(present_ptr + segment) != 0:
        start = tl.load(block_table_ptr + 2 * block + 1).to(tl.int64) * BLOCK
        remaining = tl.load(numel_ptr + segment) - start
        address = tl.load(address_ptr + num_segments + segment)
        param = load_block(address, start, remaining, tl.float32, BLOCK)
        decay = weight_decay * param
        update = decay
        if HAS_BUFFER:
            index = block * BLOCK + tl.arange(0, BLOCK)
            update = momentum * tl.load(buffer_ptr + index) + decay
            tl.store(buffer_ptr + index, update)
            if NESTEROV:
                update = decay + momentum * update
        store_block(address, start, remaining, param - tl.load(lr_ptr) * update, tl.float32, BLOCK)


def decay_params(
    segments: Segments,
    operands: Operands,  # in-out: the parameters, f32
    present: Tensor,  # i32 (segments,): 0 where no rank had a gradient
    lr: Tensor,  # f32 (1,)
    buffer: Tensor | None,  # in-out: f32 (padded,): the decay's own momentum
    *,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Decay the parameters of a bucket."""
    launch(
        _decay_params_kernel, segments.num_blocks, lr,
        segments.block_table, operands.addresses, segments.numel_table, present, lr,
        buffer,
        weight_decay, momentum, len(segments.numels),
        HAS_BUFFER=buffer is not None, NESTEROV=nesterov, BLOCK=BLOCK,
    )  # fmt: skip

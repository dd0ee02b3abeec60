"""Twin of ``kernels/decay.py``."""

from torch import Tensor

from fusedcomp.kernels.segments import Operands, Segments, memory_order


def decay_params(
    segments: Segments,
    operands: Operands,
    present: Tensor,
    lr: Tensor,
    buffer: Tensor | None,
    *,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    for segment, where in enumerate(segments.slices):
        if present[segment] == 0:
            continue
        param = memory_order(operands.params[segment])
        update = decay = param * weight_decay
        if buffer is not None:
            buffer[where] = update = buffer[where] * momentum + decay
            if nesterov:
                update = decay + update * momentum
        param.copy_(param - lr * update)

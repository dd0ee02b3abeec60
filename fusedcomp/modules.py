"""What a replica holds besides its parameters: buffers, BatchNorm's running statistics for one."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedcomp import checks
from fusedcomp.collectives import Group


def broadcast_buffers(module: nn.Module, process_group: dist.ProcessGroup | None = None, average: bool = False) -> None:
    """Give every rank the buffers of rank 0, in place: before evaluating, or before saving the model.

    Training does without: running statistics have no part in gradients. One collective per type of buffers, whatever
    their number, shapes and memory layouts, persistent or not. All ranks must call it alike; in one process nothing
    happens.

    Args:
        module: the model, in DistributedDataParallel or not.
        process_group: the ranks that take part, all of which call this; values come from its first rank. None: the
            default group.
        average: give floating-point buffers their mean over ranks instead, summed in fp64 and rounded once, so that
            what was equal on all ranks stays as it is. All others (counters, masks, complex ones) come from rank 0.

    Raises:
        TypeError: an argument of another type.
        ValueError: a buffer without values (on ``meta``, or of a lazy module), buffers that differ between ranks in
            name, type, shape or device, or a process outside the group. Nothing has been changed then.
        NotImplementedError: a sparse or sharded buffer.
    """
    group = Group(process_group)
    with group.refusing():
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        checks.flag("average", average)
        buffers = dict(sorted(module.named_buffers()))  # a shared one once; in one order on all ranks
        for name, buffer in buffers.items():
            _check(name, buffer)
            buffers[name] = _without_repeats(buffer.detach())
    if group.world_size == 1:
        return
    _agree(group, buffers, average)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for buffer in buffers.values():
        if buffer.numel() > 0:
            alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    for (_, dtype), tensors in alike.items():
        flat = torch.cat([_bytes(tensor) for tensor in tensors])
        if average and dtype.is_floating_point:
            flat = _bytes(_mean(flat.view(dtype), group))
        else:
            group.broadcast([flat])  # as bytes: gloo and NCCL do not know every type
        lengths = [tensor.numel() for tensor in tensors]
        for tensor, values in zip(tensors, flat.view(dtype).split(lengths), strict=True):
            tensor.copy_(values.view(tensor.shape))


def _check(name: str, buffer: Tensor) -> None:
    if nn.parameter.is_lazy(buffer) or buffer.is_meta:
        raise ValueError(f"buffer {name!r} has no values yet: materialise the module, or run a forward pass first")
    if hasattr(buffer, "device_mesh"):
        raise NotImplementedError(f"buffer {name!r} is a DTensor; sharded buffers are not supported")
    if buffer.layout != torch.strided:
        raise NotImplementedError(f"buffer {name!r} has layout {buffer.layout}; only strided buffers are supported")


def _without_repeats(buffer: Tensor) -> Tensor:
    """Every element once: an expanded buffer repeats them, and cannot be written."""
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if stride == 0 and size > 1:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer


def _agree(group: Group, buffers: Mapping[str, Tensor], average: bool) -> None:
    mine = {"average": str(bool(average))}
    mine |= {f"buffer {name!r}": f"{b.dtype} {tuple(b.shape)} on {b.device.type}" for name, b in buffers.items()}
    device = next((buffer.device for buffer in buffers.values()), None)
    group.agree(mine, device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _mean(flat: Tensor, group: Group) -> Tensor:
    total = flat.double()
    group.all_reduce(total).wait()
    return (total / group.world_size).to(flat.dtype)

"""The rows of the end-to-end benchmark: ways of exchanging gradients around one model and one SGD with momentum.

nocomm         none: every rank trains for itself; what a step costs without communication
in_step        the same, but one number is all-reduced in every step: ranks wait for the slowest, whatever they send
ddp            DistributedDataParallel
ddp_bf16       with torch's bf16_compress_hook
powersgd1      with torch's powerSGD_hook of approximation rank 1
powersgd4      of approximation rank 4
topk0.001      fusedcomp.SGD with TopK(0.001), no wrapper; momentum correction and error feedback
topk0.01       TopK(0.01)
topk0.001_bf16 TopK(0.001) with bf16 values on the wire
threshold0.001 Threshold.from_density(0.001), momentum behind the exchange; what it sends depends on the gradients
block_topk0.001 BlockTopK(0.001): two entries of every 2048, selected by the pass itself
topk0.001_tree, topk0.001_split: payloads merged along a tree, or range by range, instead of gathered
random0.01     RandomK(0.01): an all-reduce of values alone
topk0.001_2level TopK(0.001) over two levels: dense inside the node, compressed between nodes
hook0.001      DistributedDataParallel with fusedcomp's hook, TopK(0.001) and error feedback, and the SGD of the others;
               buckets of 100 MB, as its documentation advises
..._graph      nocomm and topk0.001 as replays of a CUDA graph of the whole step: without the host, which in eager mode
               needs about as long for a step as the GPU

DDP gets what makes it faster: gradients that are views of its buckets, and no broadcast of batch-norm statistics
before every forward (fusedcomp does not send them either).
"""

import gc
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import harness  # noqa: F401 - makes the checkout importable: before fusedcomp
from fusedcomp import SGD, BlockTopK, RandomK, Residual, Threshold, TopK
from fusedcomp.compressors import Compressor
from fusedcomp.ddp import CompressionState, compress_hook
from fusedcomp.memories import Memory
from rankset import Unavailable

LR = 0.01
MOMENTUM = 0.9
ITERATION_OF_POWERSGD = 2  # the least it takes with error feedback: DDP still changes its buckets in iteration 1
_HOOK_CAP_MB = 100
SETTLING_STEPS = 5  # past that iteration, DDP's rebuilt buckets and the first compilation of every kernel


class Exchange:
    """What a training step needs: a module to call, an optimizer to step; perhaps to be replayed from a graph."""

    captured = False

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state: CompressionState | None = None
    ) -> None:
        self.module, self.optimizer, self.state = module, optimizer, state

    def sent(self) -> dict[str, int]:
        """Bytes a step hands to the collectives, where the optimizer knows."""
        source = self.optimizer if isinstance(self.optimizer, SGD) else self.state
        if source is None:
            return {}
        metrics = source.metrics()
        return {name: int(metrics[name]) for name in ("bytes_sent", "bytes_intra", "bytes_dense")}

    def release(self) -> None:
        """Let go of wrapper and optimizer, and with them of their hooks, before the next row takes the model."""
        for param in self.module.parameters():
            param.grad = None  # a view of DDP's buckets
        del self.module, self.optimizer, self.state
        gc.collect()


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)


def _nocomm(model: nn.Module) -> Exchange:
    return Exchange(model, _sgd(model))


def _in_step(model: nn.Module) -> Exchange:
    one = torch.zeros(1, device=next(model.parameters()).device)
    optimizer = _sgd(model)
    optimizer.register_step_pre_hook(lambda *_: dist.all_reduce(one))
    return Exchange(model, optimizer)


def _graph(build: Callable[[nn.Module], Exchange]) -> Callable[[nn.Module], Exchange]:
    def captured(model: nn.Module) -> Exchange:
        if dist.get_backend() != "nccl":
            raise Unavailable("CUDA graphs need a GPU")
        exchange = build(model)
        exchange.captured = True
        return exchange

    return captured


def _ddp(register: Callable[[DistributedDataParallel], None]) -> Callable[[nn.Module], Exchange]:
    def build(model: nn.Module) -> Exchange:
        wrapped = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        register(wrapped)
        return Exchange(wrapped, _sgd(model))

    return build


def _plain(wrapped: DistributedDataParallel) -> None:
    pass


def _bf16(wrapped: DistributedDataParallel) -> None:
    if dist.get_backend() != "nccl":
        raise Unavailable("torch allows its bf16 hook with NCCL only")
    wrapped.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook)


def _powersgd(approximation_rank: int) -> Callable[[DistributedDataParallel], None]:
    def register(wrapped: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(
            process_group=dist.group.WORLD,
            matrix_approximation_rank=approximation_rank,
            start_powerSGD_iter=ITERATION_OF_POWERSGD,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def _ours(compressor: Compressor, memory: Memory | None = None) -> Callable[[nn.Module], Exchange]:
    def build(model: nn.Module) -> Exchange:
        return Exchange(model, SGD(model.parameters(), lr=LR, momentum=MOMENTUM, compressor=compressor, memory=memory))

    return build


def _hook(density: float) -> Callable[[nn.Module], Exchange]:
    def build(model: nn.Module) -> Exchange:
        state = CompressionState(TopK(density))
        wrapped = DistributedDataParallel(
            model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=_HOOK_CAP_MB
        )
        wrapped.register_comm_hook(state, compress_hook)
        return Exchange(wrapped, _sgd(model), state)

    return build


def _two_levels(density: float) -> Callable[[nn.Module], Exchange]:
    def build(model: nn.Module) -> Exchange:
        world, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
        if not 1 < per_node < world:
            raise Unavailable("two levels need several nodes of several ranks")
        device = next(model.parameters()).device.type
        mesh = dist.device_mesh.init_device_mesh(device, (world // per_node, per_node))
        optimizer = SGD(model.parameters(), lr=LR, momentum=MOMENTUM, compressor=TopK(density), process_group=mesh)
        return Exchange(model, optimizer)

    return build


EXCHANGES: dict[str, Callable[[nn.Module], Exchange]] = {
    "nocomm": _nocomm,
    "in_step": _in_step,
    "ddp": _ddp(_plain),
    "ddp_bf16": _ddp(_bf16),
    "powersgd1": _ddp(_powersgd(1)),
    "powersgd4": _ddp(_powersgd(4)),
    "topk0.001": _ours(TopK(0.001)),
    "topk0.01": _ours(TopK(0.01)),
    "topk0.001_bf16": _ours(TopK(0.001, wire_dtype=torch.bfloat16)),
    "threshold0.001": _ours(Threshold.from_density(0.001), Residual()),
    "block_topk0.001": _ours(BlockTopK(0.001)),
    "topk0.001_tree": _ours(TopK(0.001, collective="tree")),
    "topk0.001_split": _ours(TopK(0.001, collective="split")),
    "random0.01": _ours(RandomK(0.01)),
    "topk0.001_2level": _two_levels(0.001),
    "hook0.001": _hook(0.001),
    "nocomm_graph": _graph(_nocomm),
    "topk0.001_graph": _graph(_ours(TopK(0.001))),
}
ALONE = {"nocomm", "in_step", "nocomm_graph"}  # every rank has parameters of its own


def bits(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The sum of every parameter's bits, read as integers: i64 (parameters,)."""
    return torch.stack([p.detach().view(torch.int32).sum(dtype=torch.int64) for p in parameters])


def identical(parameters: list[nn.Parameter]) -> bool:
    """Are the parameters those of rank 0, bit for bit? The same answer on all ranks."""
    own = bits(parameters)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return all(torch.equal(other, everyone[0]) for other in everyone)

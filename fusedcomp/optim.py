"""The optimizers: SGD and LARS with the gradient exchange inside. No DistributedDataParallel wrapper.

optimizer = fusedcomp.SGD(model.parameters(), lr=0.1, momentum=0.9, compressor=fusedcomp.TopK(density=0.001))
loss.backward()     # buckets are compressed and sent while backward runs
optimizer.step()    # wait, then apply what all ranks sent
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomp.amp import GradScaler
from fusedcomp.compressors import Compressor
from fusedcomp.memories import Memory
from fusedcomp.optimizer import CompressedOptimizer
from fusedcomp.settings import Settings


class SGD(CompressedOptimizer):
    """torch.optim.SGD whose gradients are compressed and averaged over ranks while backward runs.

    With ``TopK`` and momentum it is Deep Gradient Compression (Lin et al., ICLR 2018, algorithm 1): per rank and
    parameter

        gradient <- gradient + weight_decay * param
        velocity <- momentum * velocity + gradient
        residual <- residual + velocity
        send the k largest |residual|; residual, velocity <- 0 there
        param    <- param - lr * mean over ranks of what was sent

    With ``Identity`` (the default) it is torch.optim.SGD on averaged gradients. Vectors, and parameters of
    fewer than 2048 elements, are never compressed.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of param groups; fp32, bf16 or fp16, dense, on one
            device. All arithmetic and the sums over ranks are fp32; a parameter of 16 bits is rounded once a step.
        lr: learning rate, a float or a tensor.
        momentum: momentum factor, in [0, 1).
        weight_decay: >= 0; ``decay`` says of what kind.
        decay: ``"gradient"`` (default): an L2 penalty, as torch.optim.SGD's, compressed with the gradient.
            ``"decoupled"``: parameters shrink by lr * weight_decay of themselves (Loshchilov and Hutter, ICLR 2019).
            ``"own_momentum"``: an L2 penalty with a momentum of its own (DGC's code), 4 more bytes per parameter. The
            last two are no part of what is sent, clipped or masked; they take another pass over parameters.
        nesterov: Nesterov momentum; needs momentum > 0.
        maximize: maximise the objective.
        compressor: what is sent: ``TopK``, ``Threshold``, ``BlockTopK``, ``RandomK``, ``CAT`` or ``Identity``. May
            differ between param groups.
        memory: what is kept of the rest: ``MomentumCorrection()`` where momentum > 0, else ``Residual()``;
            ``NoMemory()``.
        process_group: the ranks that exchange; None: the default group, or this process alone. The optimizer makes a
            communicator of its own over them, so that other collectives cannot mix with its own.
        overlap: exchange during backward. Off, everything happens in ``step()``, and gradients may be changed before.
        bucket_cap_mb: megabytes of parameters per bucket. A bucket costs eight launches whatever its size, so it
            pays to have few (docs/decisions/0007-bucket-size.md). Where they take more than half of this, those whose
            gradients come last are a bucket of up to a tenth: what hides behind no backward is small (0016).
        state_dtype: of velocity and residual: ``torch.float32``, 8 bytes per compressed parameter, or
            ``torch.bfloat16``, 4 bytes and 40 % less traffic in the pass, rounded stochastically. The selection takes
            another 0.3 bytes per parameter at density 0.001.
        dense_dtype: how the gradients of what is never compressed travel: ``torch.float32`` in an all-reduce, or
            ``torch.bfloat16`` in a gather, with error feedback, 4 more bytes of state per such parameter. Where the
            gather would move no fewer bytes, that is on more than three ranks, they travel in fp32 whatever this says.
        max_grad_norm: what a rank adds to the average, its gradient divided by the number of ranks, is clipped to
            max_grad_norm / sqrt(ranks) before it accumulates (DGC, section 3.3): gradients that agree in nothing but
            size then average to max_grad_norm at most. On one rank it is ``clip_grad_norm_``. None: no clipping. It
            takes one more read of the gradient.
        clip_scope: whose norm that is: of the whole ``"model"``, which must then wait for the end of backward (nothing
            overlaps), of a ``"bucket"``, or of a ``"tensor"``.
        skip_nonfinite: a NaN or inf in a gradient of any rank (or what would overflow the states later: 1e34, after
            weight decay and trust ratio) makes the step void on all: parameters, states and counters stay as they are,
            bit for bit. 8 more bytes per compressed parameter (4 with bf16 states). The default passes them on, as DDP
            does.
        grad_scaler: a ``fusedcomp.GradScaler`` that scales the losses, for fp16; such steps are then void as well.

    Raises:
        ValueError: an argument is out of range, or differs between ranks (the message names the field).
        NotImplementedError: parameters of a kind that is not supported (the message names the parameter).
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        decay: str = "gradient",
        compressor: Compressor | None = None,
        memory: Memory | None = None,
        process_group: dist.ProcessGroup | None = None,
        overlap: bool = True,
        bucket_cap_mb: float = 100.0,
        state_dtype: torch.dtype = torch.float32,
        dense_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        clip_scope: str = "model",
        skip_nonfinite: bool = False,
        grad_scaler: GradScaler | None = None,
        _always_sparse: bool = False,
        **torch_only: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "decay": decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "compressor": compressor,
            "memory": memory,
        }
        settings = Settings(
            process_group, overlap, bucket_cap_mb, state_dtype, max_grad_norm, clip_scope, skip_nonfinite,
            grad_scaler, _always_sparse, dense_dtype,
        )  # fmt: skip
        super().__init__(params, defaults, settings, {"dampening": dampening, **torch_only})


class LARS(CompressedOptimizer):
    """SGD with layer-wise trust ratios (You, Gitman, Ginsburg 2017, eq. 6), compressed as ``SGD`` is.

        trust    = trust_coefficient * |param| / (|gradient| + weight_decay * |param| + eps),  1 where a norm is 0
        gradient <- trust * (gradient + weight_decay * param)
        velocity <- momentum * velocity + gradient;  param <- param - lr * velocity

    Uncompressed parameters use the norm of the mean gradient, as published. Compressed ones have the ratio inside the
    one pass, from the last step's norms: the root mean square over ranks of the local gradient norms, which is 1.2 to
    3 times the norm of the mean at 4 to 64 ranks. The trust coefficient is therefore relative to the batch per rank.
    A parameter without a norm yet uses its own rank's norm of that step. A known gradient norm falls by at most a tenth
    in a step, so that after one tiny gradient the next update is about a usual one.

    Args:
        params: as for ``SGD``.
        lr: learning rate.
        momentum: momentum factor, in [0, 1).
        weight_decay: inside the trust ratio, as published.
        nesterov: Nesterov momentum.
        trust_coefficient: LARS's eta, > 0.
        eps: added to the denominator, >= 0.
        exclude_1d_from_trust: biases and norm layers keep a ratio of 1.
        exclude_1d_from_decay: biases and norm layers do not decay.
        maximize: maximise the objective.
        compressor: as for ``SGD``.
        memory: as for ``SGD``.
        process_group: as for ``SGD``.
        overlap: as for ``SGD``.
        bucket_cap_mb: as for ``SGD``.
        state_dtype: as for ``SGD``.
        dense_dtype: as for ``SGD``.
        max_grad_norm: as for ``SGD``.
        clip_scope: as for ``SGD``.
        skip_nonfinite: as for ``SGD``.
        grad_scaler: as for ``SGD``.

    Raises:
        ValueError: an argument is out of range, or differs between ranks (the message names the field).
        NotImplementedError: parameters of a kind that is not supported (the message names the parameter).
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        exclude_1d_from_trust: bool = True,
        exclude_1d_from_decay: bool = True,
        maximize: bool = False,
        compressor: Compressor | None = None,
        memory: Memory | None = None,
        process_group: dist.ProcessGroup | None = None,
        overlap: bool = True,
        bucket_cap_mb: float = 100.0,
        state_dtype: torch.dtype = torch.float32,
        dense_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        clip_scope: str = "model",
        skip_nonfinite: bool = False,
        grad_scaler: GradScaler | None = None,
        _always_sparse: bool = False,
        **torch_only: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "exclude_1d_from_trust": exclude_1d_from_trust,
            "exclude_1d_from_decay": exclude_1d_from_decay,
            "maximize": maximize,
            "compressor": compressor,
            "memory": memory,
        }
        settings = Settings(
            process_group, overlap, bucket_cap_mb, state_dtype, max_grad_norm, clip_scope, skip_nonfinite,
            grad_scaler, _always_sparse, dense_dtype,
        )  # fmt: skip
        super().__init__(params, defaults, settings, {"dampening": dampening, **torch_only})

"""Dense LARS in torch, as fast as torch lets it be: what a user of LARS would otherwise run.

    trust    = coefficient * |param| / (|gradient| + weight_decay * |param| + eps),  1 where a norm is 0
    gradient <- trust * (gradient + weight_decay * param)
    momentum <- m * momentum + gradient;  param <- param - lr * momentum        vectors: torch's SGD, nothing else

foreach   _foreach operations for both halves; gradients in place, so that nothing is allocated
fused     the same up to the gradient, then torch's fused SGD kernel
compiled  torch.compile of ``plain``, which computes out of place and leaves the fusing to the compiler
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eager import compile_for

COEFFICIENT, EPS = 1e-3, 1e-8


class DenseLARS:
    """``grads`` are put back by ``reset``; lr is 0, so that parameters stay as they are."""

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor], momentum: float, weight_decay: float) -> None:
        self.momentum, self.decay, self.lr = momentum, weight_decay, 0.0
        matrices = [i for i, p in enumerate(params) if p.ndim > 1]
        vectors = [i for i, p in enumerate(params) if p.ndim <= 1]
        self.params, self.vectors = [params[i] for i in matrices], [params[i] for i in vectors]
        self.frozen = [grads[i] for i in (*matrices, *vectors)]
        self.all_grads = [g.clone() for g in self.frozen]
        self.grads, self.vector_grads = self.all_grads[: len(matrices)], self.all_grads[len(matrices) :]
        self.buffers = [torch.zeros_like(p) for p in self.params]
        self.vector_buffers = [torch.zeros_like(p) for p in self.vectors]
        self._compiled: Any = None

    def reset(self) -> None:
        torch._foreach_copy_(self.all_grads, self.frozen)

    def _trust_gradients(self) -> None:
        trust = trust_ratios(self.params, self.grads, self.decay)
        torch._foreach_add_(self.grads, self.params, alpha=self.decay)
        torch._foreach_mul_(self.grads, trust)

    def foreach(self) -> None:
        self._trust_gradients()
        torch._foreach_mul_(self.buffers, self.momentum)
        torch._foreach_add_(self.buffers, self.grads)
        torch._foreach_add_(self.params, self.buffers, alpha=-self.lr)
        if self.vectors:
            torch._foreach_mul_(self.vector_buffers, self.momentum)
            torch._foreach_add_(self.vector_buffers, self.vector_grads)
            torch._foreach_add_(self.vectors, self.vector_buffers, alpha=-self.lr)

    def fused(self) -> None:
        self._trust_gradients()
        torch._fused_sgd_(
            self.params + self.vectors, self.grads + self.vector_grads, self.buffers + self.vector_buffers,
            weight_decay=0.0, momentum=self.momentum, lr=self.lr, dampening=0.0, nesterov=False, maximize=False,
            is_first_step=False,
        )  # fmt: skip

    def compiled(self) -> None:
        if self._compiled is None:
            self._compiled = compile_for(self.params[0].device, plain)
        plain_arguments = (self.params, self.grads, self.buffers, self.vectors, self.vector_grads, self.vector_buffers)
        self._compiled(*plain_arguments, self.momentum, self.decay, self.lr)


def trust_ratios(params: Sequence[Tensor], grads: Sequence[Tensor], decay: float) -> list[Tensor]:
    w, g = torch.stack(torch._foreach_norm(params)), torch.stack(torch._foreach_norm(grads))
    trust = COEFFICIENT * w / (g + decay * w + EPS)
    return list(torch.where((w > 0) & (g > 0), trust, torch.ones_like(trust)).unbind())


def plain(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor],
    vectors: Sequence[Tensor], vector_grads: Sequence[Tensor], vector_buffers: Sequence[Tensor],
    momentum: float, decay: float, lr: float,
) -> None:  # fmt: skip
    trust = trust_ratios(params, grads, decay)
    update = torch._foreach_mul(torch._foreach_add(grads, params, alpha=decay), trust)
    torch._foreach_copy_(buffers, torch._foreach_add(torch._foreach_mul(buffers, momentum), update))
    torch._foreach_copy_(params, torch._foreach_add(params, buffers, alpha=-lr))
    if vectors:
        torch._foreach_copy_(
            vector_buffers, torch._foreach_add(torch._foreach_mul(vector_buffers, momentum), vector_grads)
        )
        torch._foreach_copy_(vectors, torch._foreach_add(vectors, vector_buffers, alpha=-lr))

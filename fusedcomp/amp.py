"""Loss scaling for fp16: the verdict and the scale are the device's, the same on all ranks, without a synchronisation.

scaler = fusedcomp.GradScaler()
optimizer = fusedcomp.SGD(..., grad_scaler=scaler)
scaler.scale(loss).backward()
scaler.step(optimizer)          # or optimizer.step()
scaler.update()
"""

import math
from typing import Any

import torch

from fusedcomp.values import is_count, is_flag, is_number


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for gradients that are sent during backward, before a host could unscale them.

    The optimizer divides by the scale inside its pass. A gradient that is not finite on any rank makes the step void on
    all: parameters and states stay as they are, bit for bit, and the scale falls everywhere alike. Follows Micikevicius
    et al., "Mixed precision training" (ICLR 2018), section 3.2. Checkpoints are torch's.

    Args:
        device: where the loss is, ``"cuda"`` or ``"cpu"``; None: CUDA where there is a GPU.
        init_scale: scale of the first loss, > 0.
        growth_factor: after ``growth_interval`` good steps the scale is multiplied by this, > 1.
        backoff_factor: after a skipped step the scale is multiplied by this, in (0, 1).
        growth_interval: number of steps, >= 1.
        enabled: off, losses and gradients stay as they are.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if not is_number(init_scale) or not 0.0 < init_scale < math.inf:
            raise ValueError(f"GradScaler: init_scale must be finite and > 0, got {init_scale!r}")
        if not is_number(growth_factor) or not 1.0 < growth_factor < math.inf:
            raise ValueError(f"GradScaler: growth_factor must be finite and > 1, got {growth_factor!r}")
        if not is_number(backoff_factor) or not 0.0 < backoff_factor < 1.0:
            raise ValueError(f"GradScaler: backoff_factor must be in (0, 1), got {backoff_factor!r}")
        if not is_count(growth_interval) or growth_interval < 1:
            raise ValueError(f"GradScaler: growth_interval must be an integer >= 1, got {growth_interval!r}")
        if not is_flag(enabled):
            raise TypeError(f"GradScaler: enabled must be True or False, got {enabled!r}")
        if not isinstance(device, str | torch.device) or str(device).partition(":")[0] not in ("cuda", "cpu"):
            raise ValueError(f"GradScaler: device must be 'cuda' or 'cpu', got {device!r}")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._judged: list[torch.Tensor] = []  # what optimizers said since the last update: f32 (1,)

    def judge(self, found_inf: torch.Tensor) -> None:
        """For optimizers: 1.0 where their step was skipped."""
        if self.is_enabled() and not any(found_inf is known for known in self._judged):
            self._judged.append(found_inf)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Refused.

        Raises:
            RuntimeError: always: gradients are unscaled inside the pass.
        """
        raise RuntimeError(
            "fusedcomp.GradScaler has no unscale_(): the optimizer unscales gradients itself while it compresses them. "
            "To clip them, build it with max_grad_norm="
        )

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)``.

        Raises:
            TypeError: the optimizer was not built with ``grad_scaler=`` this scaler.
        """
        if self.is_enabled() and getattr(optimizer, "grad_scaler", None) is not self:
            raise TypeError(
                f"this scaler can only step an optimizer that was built with grad_scaler= it, got "
                f"{type(optimizer).__name__}; for torch's own optimizers use torch.amp.GradScaler"
            )
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Let the scale grow or fall by what the steps since the last update found; or set it.

        Raises:
            RuntimeError: no optimizer of this scaler took a step since the last update.
        """
        if not self.is_enabled():
            return
        judged, self._judged = self._judged, []
        if new_scale is not None:
            super().update(new_scale)
            return
        if not judged:
            raise RuntimeError(
                "GradScaler.update() needs a step first: build the optimizer with grad_scaler= this scaler, and call "
                "its step() before"
            )
        found_inf = judged[0] if len(judged) == 1 else torch.stack(judged).amax(0)
        scale, tracker = self._check_scale_growth_tracker("update")
        torch._amp_update_scale_(
            scale, tracker, found_inf, self._growth_factor, self._backoff_factor, self._growth_interval
        )


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """The scale of the last loss, f32, one number on its device; None before the first."""
    return scaler._scale

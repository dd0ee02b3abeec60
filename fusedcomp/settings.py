"""What an optimizer is built with besides its param groups."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedcomp.amp import GradScaler
from fusedcomp.exchange import Clip


@dataclass(frozen=True)
class Settings:
    """Checked by ``checks.settings``; as ``SGD`` documents them."""

    process_group: dist.ProcessGroup | None
    overlap: bool
    bucket_cap_mb: float
    state_dtype: torch.dtype  # of velocity and residual
    max_grad_norm: float | None
    clip_scope: str
    skip_nonfinite: bool
    grad_scaler: GradScaler | None
    always_sparse: bool  # tests: compress every parameter, and never go dense
    dense_dtype: torch.dtype = torch.float32  # of what is never compressed, as it travels

    @property
    def clip(self) -> Clip | None:
        """What gradients are clipped to."""
        return None if self.max_grad_norm is None else Clip(self.max_grad_norm, self.clip_scope)

    @property
    def has_loss_scale(self) -> bool:
        """Do gradients come scaled?"""
        return self.grad_scaler is not None and self.grad_scaler.is_enabled()

    @property
    def may_skip(self) -> bool:
        """Can a step be void?"""
        return self.skip_nonfinite or self.has_loss_scale

    def plain(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return {
            **dataclasses.asdict(dataclasses.replace(self, process_group=None, grad_scaler=None)),
            "grad_scaler": self.has_loss_scale,
        }

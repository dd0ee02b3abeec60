"""What moves weights most under Adam: entries are ranked by |residual| in units of the optimizer's own scale.

    v      = exp_avg_sq of the optimizer, which divides an update by sqrt(v)
    weight = (v + floor) ** (-POWER / 2) * least ** (POWER / 2)        floor = 1e-3 of the tensor's mean v, + least

so that no weight exceeds 1, and weights of all tensors compare: the factor is the same everywhere. v changes slowly, so
it is looked at every ``INTERVAL`` steps. What is sent and kept is the residual itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fusedcomp.buckets import RANK_WEIGHTS, Bucket
from fusedcomp.compressors import TopK

INTERVAL = 32  # steps
_POWER = 0.75  # of sqrt(v) (docs/decisions/0030-rank-by-adam.md)
_FLOOR = 1e-3  # of the tensor's mean v: what hardly ever had a gradient weighs at most 13 times as much as the mean
_LEAST = 1e-30  # v, and weight
_MOMENT = "exp_avg_sq"


class Ranking:
    """Weights by an optimizer's second moments.

    Args:
        optimizer: a torch optimizer with ``exp_avg_sq`` in its state of a parameter.
        compressor: what is to be ranked.
        two_levels: are there two levels of process groups?

    Raises:
        TypeError: it is no such optimizer.
        ValueError: the compressor ranks nothing.
        NotImplementedError: there are two levels, payloads are merged, or selection is ``"sidco"``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, compressor: Any, two_levels: bool) -> None:
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
        if not groups or any("betas" not in group for group in groups):
            raise TypeError(
                "CompressionState: rank_by must be a torch optimizer with betas and exp_avg_sq, such as AdamW, got "
                f"{type(optimizer).__name__}"
            )
        if not isinstance(compressor, TopK):
            raise ValueError(f"CompressionState: rank_by needs TopK(...), which ranks entries, got {compressor!r}")
        if compressor.collective != "gather":
            raise NotImplementedError(
                "CompressionState: rank_by takes collective='gather' alone, for merged payloads are ranked by "
                f"magnitude, got {compressor.collective!r}"
            )
        if compressor.selection == "sidco":
            raise NotImplementedError(
                "CompressionState: rank_by takes selection='exact' or 'sampled' alone, for what 'sidco' fits are "
                "magnitudes, got 'sidco'"
            )
        if two_levels:
            raise NotImplementedError(
                "process_group=(intra_node, inter_node) does not take rank_by: weights are kept for whole buckets"
            )
        self.optimizer = optimizer

    def __str__(self) -> str:
        """What ranks are to agree on."""
        return type(self.optimizer).__name__

    def check(self, params: Iterable[Tensor], name_of: Callable[[Tensor], str]) -> None:
        """Refuse parameters that the optimizer does not step, or not as an Adam does."""
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for param in params:
            if id(param) not in known:
                raise ValueError(f"rank_by: parameter {name_of(param)} is in no param group of {self}")
            if self.optimizer.state.get(param):
                self._moment(param, name_of)

    def prepare(self, bucket: Bucket, step: int, name_of: Callable[[Tensor], str]) -> None:
        """What comes before a bucket is compressed: new weights when it is time, a look at the optimizer's first step.

        Raises:
            TypeError: a parameter's second moments are not where they should be.
            RuntimeError: the optimizer has not stepped so far.
        """
        if step % INTERVAL == 0:
            self.refresh(bucket, step, name_of)
        elif step == 1:
            self.check(bucket.params, name_of)

    @torch.no_grad()
    def refresh(self, bucket: Bucket, step: int, name_of: Callable[[Tensor], str]) -> None:
        """New weights of a bucket, on the current stream; 1 before the optimizer has stepped. Raises as ``prepare``."""
        weights = bucket.states[RANK_WEIGHTS]
        if not any(self.optimizer.state.values()):
            if step > 0:
                raise RuntimeError(
                    f"rank_by: {self} has no state in step {step}: give the optimizer that steps this model, and "
                    "load its checkpoint before the next backward"
                )
            weights.fill_(1.0)
            return
        moments = [self._moment(param, name_of) for param in bucket.params]
        weights.zero_()
        torch._foreach_copy_([bucket.views(i)[RANK_WEIGHTS] for i in range(len(moments))], moments)
        weights.nan_to_num_(0.0, 0.0, 0.0)
        parts = [weights[where] for where in bucket.segments.slices]
        floors = torch._foreach_norm(parts, 1)
        torch._foreach_mul_(floors, [_FLOOR / part.numel() for part in parts])
        torch._foreach_add_(floors, _LEAST)
        torch._foreach_add_(parts, floors)
        # The padding, 0 so far, becomes infinity and then 1: it must be a number, for a residual of 0 to stay 0.
        weights.pow_(-0.5 * _POWER).mul_(_LEAST ** (0.5 * _POWER)).clamp_(_LEAST, 1.0)

    def _moment(self, param: Tensor, name_of: Callable[[Tensor], str]) -> Tensor:
        state = self.optimizer.state.get(param, {})
        moment = state.get(_MOMENT)
        if not isinstance(moment, Tensor) or (moment.shape, moment.device) != (param.shape, param.device):
            raise TypeError(
                f"rank_by: {self} has no {_MOMENT} of parameter {name_of(param)}, in its shape and on its device; "
                f"its state is {sorted(map(str, state))}. It must have had a gradient, and no other rank its state"
            )
        return moment

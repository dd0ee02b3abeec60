"""Buckets: which parameters travel together, and the flat state each group of them keeps.

A bucket holds parameters of one param group and one treatment. Buckets fill and launch from the last parameter to the
first, the order in which backward produces gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomp.kernels.segments import BLOCK, Operands, Segments

# The selection key has 32 bits for the index inside a bucket.
_MOST_ELEMENTS = 1 << 32

RANK_WEIGHTS = "rank_weights"  # a state: f32, what |residual| is multiplied with to rank it


class Treatment(NamedTuple):
    """What happens to a parameter; parameters of different treatment never share a bucket."""

    group: int  # index of its param group
    sparse: bool  # compressed, or all-reduced
    trust: bool  # LARS's trust ratio applies
    decay: str  # where weight decay goes: "gradient", "decoupled", "own_momentum"; "none"
    dtype: torch.dtype  # of parameter and gradient


def is_large(param: Tensor) -> bool:
    """Is a parameter worth compressing? Vectors and what has fewer than 2048 elements never are."""
    return param.ndim > 1 and param.numel() >= BLOCK


@dataclass(eq=False)
class Bucket:
    """Parameters that are exchanged together, their segments and their flat, padded states."""

    treatment: Treatment
    params: list[Tensor]
    segments: Segments
    operands: Operands
    states: dict[str, Tensor] = field(default_factory=dict)  # (padded,), f32 or bf16; what is kept per element
    norms: Tensor | None = None  # (2, segments) f32: LARS's last norms
    layouts: list[tuple[torch.Size, tuple[int, ...]]] = field(default_factory=list)  # shapes and strides when built

    @property
    def device(self) -> torch.device:
        """Where the parameters were when the bucket was built."""
        return self.operands.addresses.device

    def add_state(self, name: str, dtype: torch.dtype = torch.float32, halves: int = 1) -> Tensor:
        """A new flat state of zeros; of two halves where a step may be undone."""
        self.states[name] = torch.zeros(halves * self.segments.padded_numel, dtype=dtype, device=self.device)
        return self.states[name]

    def halves(self) -> list[Tensor]:
        """The states that have two halves, as (2, padded)."""
        padded = self.segments.padded_numel
        return [flat.view(2, -1) for flat in self.states.values() if flat.numel() > padded]

    def views(self, position: int, half: int = 0) -> dict[str, Tensor]:
        """The states of one parameter: views in its shape and layout into the flat buffers, or one of their halves."""
        param, start = self.params[position], self.segments.slices[position].start
        padded = self.segments.padded_numel
        views = {
            name: flat.as_strided(param.shape, param.stride(), start + half * (flat.numel() - padded))
            for name, flat in self.states.items()
        }
        if self.norms is not None:
            views["grad_square_norm"] = self.norms[0, position]
            views["param_square_norm"] = self.norms[1, position]
        return views


def is_dense_layout(tensor: Tensor) -> bool:
    """Do the elements fill one stretch of memory without gaps or overlap, in whatever order?"""
    expected = 1
    for stride, size in sorted((st, sz) for sz, st in zip(tensor.shape, tensor.stride(), strict=True) if sz > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Same shape and strides, strides of size-1 dimensions aside?"""
    return a.shape == b.shape and all(
        sa == sb for size, sa, sb in zip(a.shape, a.stride(), b.stride(), strict=True) if size > 1
    )


def plan_buckets(
    params: Sequence[tuple[Tensor, Treatment]], cap_bytes: int, per_tensor: Sequence[bool]
) -> list[Bucket]:
    """Split parameters, in registration order, into buckets of up to ``cap_bytes``, in launch order.

    Where they fill more than half a bucket, those whose gradients come last are one of their own, of up to a tenth of
    ``cap_bytes``: the exchange of all others then runs beside their backward (docs/decisions/0016).
    ``per_tensor[group]``: whether selection in that param group ranks inside each tensor. Zero-size parameters belong
    to no bucket: there is nothing to do for them.
    """
    tails = _tails(params, cap_bytes)
    open_buckets: dict[Treatment, list[int]] = {}
    closed: list[tuple[Treatment, list[int]]] = []
    for index in reversed(range(len(params))):
        param, treatment = params[index]
        if param.numel() == 0:
            continue
        members = open_buckets.setdefault(treatment, [])
        full = sum(params[i][0].nbytes for i in members) + param.nbytes > cap_bytes
        if members and (full or index <= tails[treatment] < members[-1]):
            closed.append((treatment, open_buckets.pop(treatment)))
            members = open_buckets.setdefault(treatment, [])
        members.append(index)
    closed += open_buckets.items()
    # A bucket is complete when its earliest parameter has its gradient: launch in the order in which that happens.
    closed.sort(key=lambda bucket: -min(bucket[1]))
    return [
        build_bucket(treatment, [params[i][0] for i in members], per_tensor[treatment.group])
        for treatment, members in closed
    ]


def _tails(params: Sequence[tuple[Tensor, Treatment]], cap_bytes: int) -> dict[Treatment, int]:
    """The last index of every treatment's tail; -1 where there is none."""
    sizes: dict[Treatment, list[tuple[int, int]]] = {}
    for index, (param, treatment) in enumerate(params):
        sizes.setdefault(treatment, []).append((index, param.nbytes))
    tails = dict.fromkeys(sizes, -1)
    for treatment, members in sizes.items():
        if 2 * sum(nbytes for _, nbytes in members) <= cap_bytes:
            continue
        so_far = 0
        for index, nbytes in members:
            so_far += nbytes
            if 10 * so_far > cap_bytes:
                break
            tails[treatment] = index
    return tails


def build_bucket(treatment: Treatment, params: list[Tensor], per_tensor: bool) -> Bucket:
    """A bucket of these parameters, in this order, without states yet."""
    numels = [p.numel() for p in params]
    segments = Segments.build(numels, params[0].device, per_tensor=treatment.sparse and per_tensor)
    if segments.padded_numel >= _MOST_ELEMENTS:
        raise NotImplementedError(f"a bucket holds at most 2**32 elements, padded to {BLOCK}; got {sum(numels)}")
    operands = Operands(params, treatment.dtype)
    return Bucket(treatment, params, segments, operands, layouts=[(p.shape, p.stride()) for p in params])


def positions(buckets: Sequence[Bucket]) -> Iterator[tuple[Tensor, Bucket, int]]:
    """Every parameter with its bucket and its position there."""
    for bucket in buckets:
        for position, param in enumerate(bucket.params):
            yield param, bucket, position


def copy_states(buckets: Sequence[Bucket], kept: dict[Tensor, dict[str, Any]]) -> None:
    """Take over states kept per parameter, whatever buckets they came from; what is missing stays zero."""
    for param, bucket, position in positions(buckets):
        for half in (0, 1):
            for name, view in bucket.views(position, half).items():
                value = kept.get(param, {}).get(name)
                if value is not None:
                    view.copy_(value)

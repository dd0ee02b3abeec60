"""Parts of JointSpar: the rules it was built with, blocks of parameters, norms on their way to the host."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fusedcomp.bandit import Bandit
from fusedcomp.checks import positive
from fusedcomp.values import is_count, is_number, plain

Block = nn.Module | Tensor | Iterable[Tensor]

# Parameters that a sampler freezes now and then.
SAMPLED = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Rules:
    """How blocks are drawn; as ``JointSpar`` documents them."""

    budget: float
    min_probability: Any  # a number once it was checked
    learning_rate: float
    loss: str
    redraw_every: int
    sampling: str
    lag: int
    seed: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        if not is_number(self.budget) or not 0.0 < self.budget <= 1.0:
            raise ValueError(f"JointSpar: budget must be in (0, 1], a share of the blocks, got {self.budget!r}")
        if not is_number(self.min_probability) or not 0.0 < self.min_probability <= self.budget:
            raise ValueError(
                f"JointSpar: min_probability must be in (0, budget], got {self.min_probability!r} with budget "
                f"{self.budget!r}"
            )
        positive("JointSpar: learning_rate", self.learning_rate)
        for name, choices in (("loss", ("gain", "shifted")), ("sampling", ("shared", "per_rank"))):
            if getattr(self, name) not in choices:
                listed = " or ".join(map(repr, choices))
                raise ValueError(f"JointSpar: {name} must be {listed}, got {getattr(self, name)!r}")
        for name, least in (("redraw_every", 1), ("lag", 0), ("seed", 0)):
            value = getattr(self, name)
            if not is_count(value) or value < least:
                raise ValueError(f"JointSpar: {name} must be an integer >= {least}, got {value!r}")

    def check_blocks(self, number: int, may_be_empty: bool) -> None:
        """Refuse what cannot be drawn from."""
        if number == 0:
            raise ValueError(
                "JointSpar: there is no block to draw: neither blocks= nor, without it, the optimizer's parameters of "
                "two dimensions have one that requires grad and is not excluded"
            )
        if self.budget * number < 1.0 - 1e-9 and not may_be_empty:
            raise ValueError(
                f"JointSpar: budget must be at least one of the {number} blocks, {1 / number:.3g}, got {self.budget!r}"
            )

    def bandit(self, number: int) -> Bandit:
        """Of that many blocks."""
        total, shifted = self.budget * number, self.loss == "shifted"
        return Bandit(number, total, self.min_probability, self.learning_rate, shifted)


def already() -> None:
    """Nothing to wait for."""


@dataclass(frozen=True)
class Observed:
    """The norms of one step, on their way to the host."""

    active: list[bool]  # the blocks drawn
    inclusion: list[float]  # their chances
    squares: Tensor  # (ranks, params) on the host: |g / p|^2
    ready: Callable[[], Any]  # waits until they are there

    def square_norms(self, blocks: Sequence[Sequence[Tensor]]) -> list[float | None]:
        """|g|^2 of every active block, mean over ranks; None where it is not finite, or not active."""
        self.ready()
        sums = iter([math.fsum(column) for column in zip(*self.squares.tolist(), strict=True)])
        found: list[float | None] = []
        for block, active, chance in zip(blocks, self.active, self.inclusion, strict=True):
            square = math.fsum(next(sums) for _ in block) / len(self.squares) * chance**2
            found.append(square if active and math.isfinite(square) else None)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors."""
        self.ready()
        inclusion = torch.tensor(self.inclusion, dtype=torch.float64)
        return {"active": list(self.active), "inclusion": inclusion, "squares": self.squares.clone()}

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> "Observed":
        """From ``state_dict()``."""
        return cls(list(saved["active"]), saved["inclusion"].tolist(), saved["squares"].cpu().clone(), already)


# ---- blocks --------------------------------------------------------------------------------------------------------


def blocks_of(
    optimizer: torch.optim.Optimizer, blocks: Sequence[Block] | None, exclude: Sequence[nn.Module | Tensor]
) -> list[list[Tensor]]:
    """The parameters of every block that are the optimizer's, require grad and are not excluded; checked."""
    for argument, items in (("blocks", () if blocks is None else blocks), ("exclude", exclude)):
        if isinstance(items, (nn.Module, Tensor)) or not isinstance(items, Iterable):
            raise TypeError(f"JointSpar: {argument} must be a list, got {type(items).__name__}")
    named = dict(_named(optimizer))
    given = _default_blocks(optimizer) if blocks is None else [_parameters(item, "blocks") for item in blocks]
    always = {param for item in exclude for param in _parameters(item, "exclude")}
    taken = next((p for block in given for p in block if p in SAMPLED), None)
    if taken is not None:
        raise ValueError(f"JointSpar: parameter {named.get(taken)} has a sampler already; remove() that one first")
    chosen = [[p for p in block if p.requires_grad and p.numel() > 0 and p not in always] for block in given]
    seen: dict[Tensor, int] = {}
    for index, block in enumerate(chosen):
        for param in block:
            if param not in named:
                raise ValueError(
                    f"JointSpar: a parameter of shape {tuple(param.shape)} in block {index} is not the optimizer's"
                )
            if param in seen:
                raise ValueError(
                    f"JointSpar: parameter {named[param]} is in blocks {seen[param]} and {index}; where modules share "
                    "one, give lists of parameters, and it to one of them"
                )
            seen[param] = index
            if hasattr(param, "device_mesh"):
                raise NotImplementedError(
                    f"JointSpar: parameter {named[param]} is a DTensor; sharded parameters are not supported"
                )
            first = next(iter(seen))
            if param.device != first.device:
                raise NotImplementedError(
                    f"JointSpar: parameter {named[param]} is on {param.device}, {named[first]} on {first.device}; the "
                    "blocks of a sampler are on one device"
                )
    return [block for block in chosen if block]


def _default_blocks(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """A matrix (or more dimensions) and the vectors that follow it; vectors that lead a param group are in none."""
    blocks: list[list[Tensor]] = []
    for group in optimizer.param_groups:
        leading = True
        for param in group["params"]:
            if param.ndim >= 2:
                blocks.append([param])
                leading = False
            elif not leading:
                blocks[-1].append(param)
    return blocks


def _parameters(item: Any, argument: str) -> list[Tensor]:
    if isinstance(item, nn.Module):
        return list(item.parameters())
    params = [item] if isinstance(item, Tensor) else list(item) if isinstance(item, Iterable) else [item]
    for param in params:
        if not isinstance(param, Tensor):
            raise TypeError(f"JointSpar: {argument} must be modules or parameters, got {type(param).__name__}")
    return params


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str]]:
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")
        for i, param in enumerate(group["params"]):
            yield param, repr(names[i]) if names else f"{i} of group {g} {tuple(param.shape)}"

"""Checkpoints: optimizer state as plain data and tensors, and what a rank may take from another rank's file."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomp.buckets import RANK_WEIGHTS
from fusedcomp.checks import TORCH_ONLY
from fusedcomp.collectives import Group
from fusedcomp.compressors import CAT, BlockTopK, Identity, RandomK, Threshold, TopK
from fusedcomp.compressors import encode as encode_record
from fusedcomp.costs import COSTS
from fusedcomp.memories import MomentumCorrection, NoMemory, Residual
from fusedcomp.values import is_count

CHECKPOINT_VERSION = 1


class Steps(NamedTuple):
    """How far a run is: schedules go by the sum, what is drawn at random by those that counted."""

    taken: int = 0
    skipped: int = 0  # void steps


_MOST_STEPS = (1 << 31) - 1  # the device counts in 32 bits
_REQUIRED = ("lr", "momentum", "weight_decay", "nesterov", "maximize")  # torch.optim.SGD's groups have them too
_PER_ELEMENT = {"velocity", "residual", "momentum_buffer", "decay_buffer"}
_OF_HOOK = _PER_ELEMENT | {RANK_WEIGHTS}
_STATES = _PER_ELEMENT | {"grad_square_norm", "param_square_norm"}
_RECORDS = {
    record.__name__: record
    for record in (TopK, Threshold, BlockTopK, RandomK, CAT, *COSTS, Identity, MomentumCorrection, Residual, NoMemory)
}


def encode(
    state_dict: dict[str, Any], group: Group, steps: Steps, sizes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Records become dicts; rank, world size and steps are noted in every param group, sizes in the first."""
    for packed in state_dict["param_groups"]:
        packed["compressor"] = encode_record(packed["compressor"])
        packed["memory"] = encode_record(packed["memory"])
        packed["fusedcomp"] = _origin(group, steps)
    if sizes:
        state_dict["param_groups"][0]["fusedcomp"]["sizes"] = list(sizes)
    return state_dict


def sizes_of(state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What payloads had for sizes, where steps before decide about them."""
    return [sizes for packed in state_dict["param_groups"] for sizes in packed.get("fusedcomp", {}).get("sizes", ())]


def decode(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], group: Group
) -> tuple[dict[str, Any], Steps, bool]:
    """Back to what torch loads; the steps; and whether the residual in the file is this rank's own.

    A checkpoint without our marks is a torch.optim one: what it lacks is taken from the current param groups.
    """
    foreign = {key for state in state_dict["state"].values() for key in state} - _STATES
    if foreign:
        raise ValueError(f"the checkpoint is not one of SGD or LARS: it holds {sorted(foreign)}")
    saved = [dict(packed) for packed in state_dict["param_groups"]]
    missing = [key for packed in saved for key in _REQUIRED if key not in packed]
    if missing:
        raise ValueError(f"the checkpoint is not one of SGD or LARS: a param group has no {missing[0]!r}")
    if len(saved) != len(groups):
        raise ValueError(f"the checkpoint has {len(saved)} param groups, this optimizer {len(groups)}")
    origins = [packed.pop("fusedcomp", None) for packed in saved]
    for packed, current in zip(saved, groups, strict=True):
        if packed.get("dampening"):
            raise ValueError(f"the checkpoint has dampening={packed['dampening']!r}, which is not supported")
        for key in TORCH_ONLY:
            packed.pop(key, None)
        for key, value in current.items():
            if key not in ("params", "param_names"):
                packed.setdefault(key, value)
        for key in ("compressor", "memory"):
            packed[key] = _record(packed[key])
        for key in set(packed) - set(current) - {"params", "param_names"}:
            del packed[key]
    origin = origins[0] if origins and origins[0] else None
    if origin is None:
        return {**state_dict, "param_groups": saved}, Steps(), True
    own = _check_origin(origin, group, "optimizer")
    return {**state_dict, "param_groups": saved}, _steps(origin), own


def _origin(group: Group, steps: Steps) -> dict[str, Any]:
    place = {"version": CHECKPOINT_VERSION, "rank": group.rank, "world_size": group.world_size}
    return {**place, "step": steps.taken, "skipped": steps.skipped}


def _steps(origin: Mapping[str, Any]) -> Steps:
    return Steps(int(origin["step"]), int(origin["skipped"]))


def _check_origin(origin: Mapping[str, Any], group: Group, what: str) -> bool:
    """Is it this rank's own file? Refuses what was not written by this version or an earlier one."""
    for field in ("version", "rank", "world_size", "step", "skipped"):
        if not is_count(origin.get(field)) or origin[field] > _MOST_STEPS:
            raise ValueError(f"the checkpoint's {field} must be an integer in [0, 2**31), got {origin.get(field)!r}")
    if origin["version"] > CHECKPOINT_VERSION:
        raise ValueError(
            f"the checkpoint has format version {origin['version']}, this fusedcomp reads up to {CHECKPOINT_VERSION}"
        )
    own = (origin["rank"], origin["world_size"]) == (group.rank, group.world_size)
    if not own:
        warnings.warn(
            f"this state_dict was saved by rank {origin['rank']} of {origin['world_size']}, and this is rank "
            f"{group.rank} of {group.world_size}: its residual (gradient not sent yet) is not this rank's and is "
            f"zeroed here. Save and load on every rank: torch.save({what}.state_dict(), "
            f"f'{what}-rank{{dist.get_rank()}}.pt')",
            stacklevel=4,
        )
    return own


# ---- of the DDP hook -------------------------------------------------------------------------------------------


def encode_hook(states: Mapping[str, Mapping[str, Tensor]], group: Group, steps: Steps) -> dict[str, Any]:
    """What a CompressionState keeps, by parameter name."""
    return {"fusedcomp": _origin(group, steps), "state": {name: dict(kept) for name, kept in states.items()}}


def gather(mine: dict[str, Any], group: Group) -> dict[str, Any]:
    """On rank 0 all ranks' dicts, elsewhere one's own; tensors come over the host."""
    on_host = {**mine, "state": {n: {k: v.cpu() for k, v in kept.items()} for n, kept in mine["state"].items()}}
    everyone = group.gather_to_first(on_host)
    return on_host if everyone is None else {"ranks": dict(enumerate(everyone))}


def decode_hook(
    state_dict: Mapping[str, Any], params: Mapping[str, Tensor], group: Group
) -> tuple[dict[str, dict[str, Tensor]], Steps]:
    """States by name, and the steps."""
    ranks = state_dict.get("ranks") if isinstance(state_dict, Mapping) else None
    if isinstance(ranks, Mapping) and ranks:
        state_dict = ranks.get(group.rank, next(iter(ranks.values())))
    known = state_dict if isinstance(state_dict, Mapping) else {}
    origin, states = known.get("fusedcomp"), known.get("state")
    if not isinstance(origin, Mapping) or not isinstance(states, Mapping):
        keys = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"the checkpoint is not one of a CompressionState: its keys are {keys}")
    for name, kept in states.items():
        if name not in params:
            raise ValueError(f"the checkpoint has states of a parameter {name!r}, which this model lacks")
        for field, value in kept.items():
            right = isinstance(value, Tensor) and value.is_floating_point() and value.shape == params[name].shape
            if field not in _OF_HOOK or not right:
                given = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"the checkpoint's {field} of parameter {name!r} must be one of {sorted(_OF_HOOK)}, floating, "
                    f"of shape {tuple(params[name].shape)}, got {given}"
                )
    own = _check_origin(origin, group, "state")
    kept = {
        name: {field: value for field, value in fields.items() if own or field != "residual"}
        for name, fields in states.items()
    }
    return kept, _steps(origin)


def check_states(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], name: Callable[[Tensor], str]
) -> None:
    """Refuse states that are not of their parameter's shape: copying would broadcast them, or fail half-way."""
    for packed, group in zip(state_dict["param_groups"], groups, strict=True):
        for key, param in zip(packed["params"], group["params"], strict=False):  # torch compares the lengths
            for field, value in state_dict["state"].get(key, {}).items():
                shape = tuple(param.shape) if field in _PER_ELEMENT else ()
                if value is None:  # torch's SGD has it where momentum is 0
                    continue
                if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                    given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                    raise ValueError(
                        f"the checkpoint's {field} of parameter {name(param)} must be a tensor of shape {shape}, got "
                        f"{given}"
                    )


def check_places(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    held: Mapping[Tensor, Mapping[str, Any]],
    name: Callable[[Tensor], str],
) -> None:
    """Of two levels: refuse a residual that another rank of the node keeps by now, which would be lost."""
    for packed, group in zip(state_dict["param_groups"], groups, strict=True):
        for key, param in zip(packed["params"], group["params"], strict=False):
            if "residual" in state_dict["state"].get(key, {}) and "residual" not in held.get(param, {}):
                raise ValueError(
                    f"the checkpoint has the residual of parameter {name(param)}, which another rank of this node "
                    "keeps: build the optimizer with the groups, bucket_cap_mb and parameters it was saved with"
                )


def _record(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    fields = dict(value)
    name = fields.pop("name", None)
    if name not in _RECORDS:
        raise ValueError(f"the checkpoint names an unknown record {name!r}; known are {sorted(_RECORDS)}")
    if "wire_dtype" in fields:
        fields["wire_dtype"] = getattr(torch, fields["wire_dtype"].removeprefix("torch."))
    if "cost" in fields:
        fields["cost"] = _record(fields["cost"])
    return _RECORDS[name](**fields)


def adopt(loaded: Mapping[Tensor, Mapping[str, Any]], keep_residual: bool) -> dict[Tensor, dict[str, Any]]:
    """Loaded per-parameter states as this optimizer keeps them.

    torch's momentum_buffer stands in for our velocity: averaged over ranks it means the same. Not the other way round:
    a velocity is its rank's own, and momenta that differ would let replicas drift apart. They start anew.
    """
    kept = {}
    for param, state in loaded.items():
        states = {name: value for name, value in state.items() if keep_residual or name != "residual"}
        if states.get("momentum_buffer") is not None:
            states.setdefault("velocity", states["momentum_buffer"])
        kept[param] = states
    return kept

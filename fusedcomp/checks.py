"""Checks at construction: the argument, the rule, the value; and what must be equal on all ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomp.amp import GradScaler
from fusedcomp.buckets import is_dense_layout
from fusedcomp.compressors import CAT, SPARSIFIERS, Identity, Threshold, TopK
from fusedcomp.costs import LinkCost
from fusedcomp.kernels.headers import FORMAT_VERSION
from fusedcomp.memories import MomentumCorrection, NoMemory, Residual
from fusedcomp.values import is_flag, is_number, plain

# Arguments of torch's optimizers that have no meaning here, with the values that ask for nothing.
TORCH_ONLY = {
    "dampening": (0, 0.0, "it is not part of momentum correction"),
    "foreach": (None, False, "every bucket is already one launch"),
    "fused": (None, False, "the step is always fused"),
    "differentiable": (None, False, "the step is not recorded by autograd"),
    "capturable": (None, False, "every step can be captured in a CUDA graph"),
}

# What holds for the whole optimizer: in a param group it would be ignored.
_CONSTRUCTOR_ONLY = (
    "process_group", "overlap", "bucket_cap_mb", "state_dtype", "max_grad_norm", "clip_scope", "skip_nonfinite",
    "grad_scaler", "always_sparse", "dense_dtype",
)  # fmt: skip
_FLAGS = ("nesterov", "maximize", "exclude_1d_from_trust", "exclude_1d_from_decay")


def torch_only(given: Mapping[str, Any], name: str) -> None:
    """Refuse arguments of torch's optimizers that cannot be honoured."""
    for argument, value in given.items():
        if argument not in TORCH_ONLY:
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
        *neutral, reason = TORCH_ONLY[argument]
        if not isinstance(plain(value), int | float | None) or value not in neutral:
            raise ValueError(f"{name} does not take {argument}={value!r}: {reason}; leave it out")


def positive(argument: str, value: Any) -> None:
    """Refuse what is not a finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{argument} must be finite and > 0, got {value!r}")


def not_negative(argument: str, value: Any) -> None:
    """Refuse what is not a finite number of 0 or more."""
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{argument} must be finite and >= 0, got {value!r}")


def flag(argument: str, value: Any) -> None:
    """Refuse what is not a bool."""
    if not is_flag(value):
        raise TypeError(f"{argument} must be True or False, got {value!r}")


def state_dtype(value: Any) -> None:
    """Refuse what states cannot be kept in."""
    if value not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16, got {value!r}")


def clip(max_grad_norm: Any, clip_scope: Any) -> None:
    """Refuse what gradients cannot be clipped to."""
    if max_grad_norm is not None:
        positive("max_grad_norm", max_grad_norm)
    if clip_scope not in ("model", "bucket", "tensor"):
        raise ValueError(f"clip_scope must be 'model', 'bucket' or 'tensor', got {clip_scope!r}")


def memory_goes_with(name: str, compressor: Any, memory: Any, states: torch.dtype) -> None:
    """Check the records, and that states hold what is sent."""
    if not isinstance(compressor, (*SPARSIFIERS, Identity)):
        raise TypeError(
            f"{name}: compressor must be TopK(...), Threshold(...), BlockTopK(...), RandomK(...), CAT(...) or "
            f"Identity(), got {compressor!r}"
        )
    if states == torch.bfloat16 and getattr(compressor, "wire_dtype", None) == torch.float16:
        raise ValueError(
            f"{name}: wire_dtype=torch.float16 cannot go with state_dtype=torch.bfloat16, whose range it does not "
            "hold; use wire_dtype=torch.bfloat16, which sends such states exactly"
        )
    if states == torch.bfloat16 and getattr(compressor, "variant", None) == "sparse_quantized":
        raise ValueError(
            f"{name}: variant='sparse_quantized' needs state_dtype=torch.float32: what an entry differs from what it "
            "is sent as would be rounded"
        )
    if not isinstance(memory, (MomentumCorrection, Residual, NoMemory)):
        raise TypeError(f"{name}: memory must be MomentumCorrection(), Residual() or NoMemory(), got {memory!r}")
    if getattr(compressor, "variant", None) == "stochastic" and not isinstance(memory, NoMemory):
        raise ValueError(
            f"{name}: variant='stochastic' needs memory=NoMemory(), its default: what is sent is the gradient on "
            f"average, and what differs is no error to make up for, got {memory!r}"
        )
    collective = getattr(compressor, "collective", "gather")
    if collective != "gather":
        _takes_back(f"{name}: collective={collective!r}", memory, states)


def _takes_back(name: str, memory: Any, states: torch.dtype) -> None:
    """Refuse what would lose entries that merged payloads have no room for."""
    if isinstance(memory, NoMemory):
        raise ValueError(
            f"{name} needs Residual() or MomentumCorrection(), which keep what merged payloads have no room for, got "
            f"{memory!r}"
        )
    if states != torch.float32:
        raise ValueError(f"{name} needs state_dtype=torch.float32, for what comes back would be rounded, got {states}")


def knows_size(compressor: Any, names: Mapping[Tensor, str]) -> None:
    """What is reckoned from all of the model's elements: the hook's state must know the parameters."""
    by_density = isinstance(compressor, Threshold) and compressor.density is not None
    by_share = isinstance(compressor, CAT) and isinstance(compressor.cost, LinkCost) and compressor.cost.compute > 0.0
    if (by_density or by_share) and not names:
        raise ValueError(
            f"CompressionState: {compressor!r} depends on the size of the model: pass params=model.named_parameters()"
        )


def momenta(name: str, momentum: Any, nesterov: Any) -> None:
    """Refuse what is no momentum."""
    if not is_number(momentum) or not 0.0 <= momentum < 1.0:
        raise ValueError(f"{name}: momentum must be in [0, 1), got {momentum!r}")
    if nesterov and momentum <= 0:
        raise ValueError(f"{name}: nesterov=True needs momentum > 0, got {momentum!r}")


def hook(given: Mapping[str, Any], max_grad_norm: Any, clip_scope: Any, skip_nonfinite: Any) -> None:
    """Check what a CompressionState is built with."""
    name = "CompressionState"
    flag(f"{name}: nesterov", given["nesterov"])
    momenta(name, given["momentum"], given["nesterov"])
    state_dtype(given["state_dtype"])
    memory_goes_with(name, given["compressor"], given["memory"], given["state_dtype"])
    if isinstance(given["memory"], MomentumCorrection) and not given["momentum"] > 0:
        raise ValueError(f"{name}: MomentumCorrection() needs momentum > 0, got {given['momentum']!r}")
    if getattr(given["compressor"], "scope", None) == "model":
        raise NotImplementedError(
            f"{name} takes scope='bucket' or 'tensor' alone, got 'model': DDP hands over its buckets one by one, and "
            "the first is sent before the others are known"
        )
    clip(max_grad_norm, clip_scope)
    flag("skip_nonfinite", skip_nonfinite)
    scaler = given["grad_scaler"]
    if scaler is not None and (not isinstance(scaler, torch.amp.GradScaler) or isinstance(scaler, GradScaler)):
        raise TypeError(
            f"{name}: grad_scaler must be the torch.amp.GradScaler that steps the optimizer, got "
            f"{type(scaler).__module__}.{type(scaler).__name__}"
        )


def gradient_dtype(dtype: torch.dtype, two_levels: bool) -> None:
    """Refuse gradients that the kernels cannot take."""
    supported = (torch.float32,) if two_levels else (torch.float32, torch.bfloat16, torch.float16)
    if dtype not in supported:
        names = ", ".join(map(str, supported))
        where = " between two levels of process groups" if two_levels else ""
        raise NotImplementedError(f"gradients are {dtype}; supported{where}: {names}")


def settings(given: Mapping[str, Any]) -> None:
    """Check what holds for a whole optimizer."""
    flag("overlap", given["overlap"])
    positive("bucket_cap_mb", given["bucket_cap_mb"])
    state_dtype(given["state_dtype"])
    if given["dense_dtype"] not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dense_dtype must be torch.float32 or torch.bfloat16, got {given['dense_dtype']!r}")
    clip(given["max_grad_norm"], given["clip_scope"])
    flag("skip_nonfinite", given["skip_nonfinite"])
    scaler = given["grad_scaler"]
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(
            f"grad_scaler must be a fusedcomp.GradScaler, got {type(scaler).__name__}: torch's sets its scale after "
            "gradients were sent, and judges them rank by rank"
        )


def group(group: Mapping[str, Any], name: str, states: torch.dtype, *, is_new: bool) -> None:
    """Check the numbers and records of one param group; of one in use a schedule may have taken the momentum to 0."""
    for argument in _CONSTRUCTOR_ONLY:
        if argument in group:
            raise ValueError(
                f"{name}: {argument} is the constructor's, for all param groups alike; one of them has "
                f"{argument}={group[argument]!r}"
            )
    torch_only({key: value for key, value in group.items() if key in TORCH_ONLY}, name)
    for argument in _FLAGS:
        flag(f"{name}: {argument}", group.get(argument, False))
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{name}: a tensor lr must have one element, got shape {tuple(lr.shape)}")
    if not (isinstance(lr, Tensor) and lr.is_cuda):  # what is on a device is the device's: to look would wait for it
        not_negative(f"{name}: lr", lr.item() if isinstance(lr, Tensor) else lr)
    momenta(name, group["momentum"], group["nesterov"] and is_new)
    for argument in ("weight_decay", "eps"):
        not_negative(f"{name}: {argument}", group.get(argument, 0.0))
    if "trust_coefficient" in group:
        positive(f"{name}: trust_coefficient", group["trust_coefficient"])
    memory_goes_with(name, group["compressor"], group["memory"], states)


def parameters(params: Sequence[Tensor], name: Callable[[Tensor], str]) -> None:
    """Refuse parameters that the kernels cannot take, by name."""
    seen: set[Tensor] = set()
    for param in params:
        which = f"parameter {name(param)}"
        if param in seen:
            raise ValueError(f"{which} was given twice")
        seen.add(param)
        if hasattr(param, "device_mesh"):
            raise NotImplementedError(f"{which} is a DTensor; sharded parameters are not supported")
        if param.layout != torch.strided:
            raise NotImplementedError(f"{which} has layout {param.layout}; only strided parameters are supported")
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotImplementedError(
                f"{which} is {param.dtype}; only torch.float32, torch.bfloat16 and torch.float16 are supported"
            )
        if param.device.type not in ("cuda", "cpu"):
            raise NotImplementedError(f"{which} is on {param.device}; only cuda and cpu are supported")
        if param.device != params[0].device:
            raise NotImplementedError(
                f"{which} is on {param.device}, parameter {name(params[0])} on {params[0].device}; one optimizer "
                "serves one device: build one for each"
            )
        if not is_dense_layout(param):
            raise NotImplementedError(
                f"{which} has gaps or overlaps in memory (shape {tuple(param.shape)}, stride {param.stride()}); use "
                "param.contiguous()"
            )


def levels(group: Mapping[str, Any], name: Callable[[Tensor], str]) -> None:
    """Refuse what two levels of process groups cannot do."""
    if isinstance(group["compressor"], Identity):
        return
    if not isinstance(group["compressor"], TopK):
        raise NotImplementedError(
            f"process_group=(intra_node, inter_node) compresses with TopK(...) alone, got {group['compressor']!r}"
        )
    if group["compressor"].collective != "gather":
        raise NotImplementedError(
            "process_group=(intra_node, inter_node) takes collective='gather' alone, got "
            f"{group['compressor'].collective!r}"
        )
    if group["compressor"].scope == "model":
        raise NotImplementedError(
            "process_group=(intra_node, inter_node) takes scope='bucket' or 'tensor' alone, got 'model': a rank knows "
            "the headers of its own shards"
        )
    if group["momentum"] > 0 and not isinstance(group["memory"], MomentumCorrection):
        raise NotImplementedError(
            "process_group=(intra_node, inter_node) keeps momentum on the shard: it needs MomentumCorrection(), got "
            f"{group['memory']!r} with momentum {group['momentum']!r}"
        )
    for param in group["params"]:
        if param.dtype != torch.float32:
            raise NotImplementedError(
                f"parameter {name(param)} is {param.dtype}; process_group=(intra_node, inter_node) compresses "
                "torch.float32 parameters alone: gradients are summed inside the node in fp32"
            )


def decay(group: Mapping[str, Any], name: Callable[[Tensor], str], two_levels: bool) -> None:
    """Refuse a weight decay in a place that there is not."""
    where = group.get("decay", "gradient")
    if where not in ("gradient", "decoupled", "own_momentum"):
        raise ValueError(f"decay must be 'gradient', 'decoupled' or 'own_momentum', got {where!r}")
    if where == "gradient":
        return
    if two_levels:
        raise NotImplementedError(f"process_group=(intra_node, inter_node) takes decay='gradient' alone, got {where!r}")
    for param in group["params"]:
        if param.dtype != torch.float32:
            raise NotImplementedError(
                f"parameter {name(param)} is {param.dtype}, decay={where!r}: what it takes from a 16-bit parameter "
                "in a step would be rounded away; use decay='gradient'"
            )


def fingerprint(
    optimizer: str, groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], first: int
) -> dict[str, str]:
    """Everything that must be equal on all ranks, by field name; ``first``: the index of the first param group."""
    fields = {"optimizer": optimizer, "format version": str(FORMAT_VERSION)}
    fields |= {key: str(value) for key, value in settings.items()}
    fields["number of param groups"] = str(first + len(groups))
    for g, group in enumerate(groups, first):
        fields[f"number of parameters of group {g}"] = str(len(group["params"]))
        for key, value in group.items():
            if key not in ("params", "param_names"):
                fields[f"{key} of group {g}"] = str(float(value)) if isinstance(value, Tensor) else repr(value)
        names = group.get("param_names") or [None] * len(group["params"])
        for i, (param, name) in enumerate(zip(group["params"], names, strict=True)):
            strides = [s for s, n in zip(param.stride(), param.shape, strict=True) if n > 1]
            named = f"{name!r}, " if name else ""
            layout = f"{named}{param.dtype} {tuple(param.shape)}, strides {strides}"
            fields[f"parameter {i} of group {g}"] = layout
    return fields

"""Optimizers of every kind and their steps, for the tests of what guards a step."""

from typing import Any

import torch
from torch import Tensor, nn

import fusedcomp
from fusedcomp import CAT, LARS, SGD, AffineCost, BlockTopK, Identity, NoMemory, RandomK, Residual, Threshold, TopK
from ranks import loss_of

CONFIGS: list[dict[str, Any]] = [
    {"compressor": TopK(0.05), "momentum": 0.9, "weight_decay": 1e-2},
    {"compressor": TopK(0.05), "memory": Residual(), "momentum": 0.9, "nesterov": True},
    {"compressor": TopK(0.05), "memory": NoMemory()},
    {"compressor": TopK(0.05, wire_dtype=torch.bfloat16), "momentum": 0.9, "state_dtype": torch.bfloat16},
    {"compressor": TopK(0.05, scope="tensor", selection="sampled"), "momentum": 0.9},
    {"compressor": TopK(0.05, collective="tree"), "momentum": 0.9},
    {"compressor": TopK(0.05, collective="split"), "momentum": 0.9},
    {"compressor": TopK(1.0), "momentum": 0.9},
    {"compressor": RandomK(0.2), "momentum": 0.9},
    {"compressor": BlockTopK(0.05), "momentum": 0.9, "weight_decay": 1e-2},
    {"compressor": Threshold(0.2), "momentum": 0.9, "memory": Residual()},
    {"compressor": CAT(AffineCost(fixed=30.0)), "momentum": 0.9},
    {"compressor": CAT(AffineCost(fixed=30.0), variant="sparse_quantized"), "momentum": 0.9},
    {"compressor": Identity(), "momentum": 0.9, "weight_decay": 1e-2},
    {"cls": LARS, "compressor": TopK(0.05), "momentum": 0.9},
    {"cls": LARS, "momentum": 0.9},
]
IDS = [f"{i}-{c.get('cls', SGD).__name__}-{type(c.get('compressor')).__name__}" for i, c in enumerate(CONFIGS)]


def build(model: nn.Module, config: dict[str, Any], **more: Any) -> fusedcomp.SGD:
    options = {"lr": 0.05, "bucket_cap_mb": 0.05} | config | more
    return options.pop("cls", SGD)(model.named_parameters(), **options)


def step(model: nn.Module, optimizer: Any, rank: int, number: int, factor: float | Tensor = 1.0) -> None:
    optimizer.zero_grad()
    (loss_of(model, rank, number) * factor).backward()
    optimizer.step()


def flat_state(optimizer: Any) -> list[Tensor]:
    """All that a step may change, as a checkpoint has it, but for the step itself."""
    state = optimizer.state_dict()["state"]
    return [t.clone() for key in sorted(state) for _, t in sorted(state[key].items()) if isinstance(t, Tensor)]

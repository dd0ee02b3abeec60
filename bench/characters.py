"""The character model of charlm.py, and the text that it and ablation.py learn.

Not models.py's GPT-2, which has a tied embedding and gives only its loss: here logits of any stretch are wanted.
"""

import dataclasses
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

WARM_UP = 0.05  # share of the steps: of lr, of the density, and PowerSGD's dense start
PERIOD = 20  # of 20 stretches of the text, one is for validation and one for the test


@dataclasses.dataclass(frozen=True)
class Plan:
    """The model, and how long it trains."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int  # per rank
    steps: int
    dropout: float = 0.2

    @property
    def name(self) -> str:
        return f"gpt_{self.layers}x{self.width}"

    @property
    def warmup_steps(self) -> int:
        return max(2, round(WARM_UP * self.steps))


FULL = Plan(layers=6, width=256, heads=4, context=256, batch=16, steps=10_000)
QUICK = Plan(layers=2, width=64, heads=2, context=32, batch=4, steps=20)


class Block(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.heads = plan.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(plan.width), nn.LayerNorm(plan.width)
        self.attend = nn.Linear(plan.width, 3 * plan.width, bias=False)
        self.join = nn.Linear(plan.width, plan.width, bias=False)
        self.widen = nn.Linear(plan.width, 4 * plan.width, bias=False)
        self.narrow = nn.Linear(4 * plan.width, plan.width, bias=False)
        self.drop = nn.Dropout(plan.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        split = self.attend(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.drop.p if self.training else 0.0
        attended = functional.scaled_dot_product_attention(*split.unbind(0), dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.join(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.narrow(functional.gelu(self.widen(self.before_mlp(x)))))


class GPT(nn.Module):
    def __init__(self, plan: Plan, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, plan.width)
        self.positions = nn.Embedding(plan.context, plan.width)
        self.blocks = nn.Sequential(*(Block(plan) for _ in range(plan.layers)))
        self.norm, self.drop = nn.LayerNorm(plan.width), nn.Dropout(plan.dropout)
        self.head = nn.Linear(plan.width, vocabulary, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                onto_residual = name.endswith(("join.weight", "narrow.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * plan.layers) if onto_residual else 0.02)

    def forward(self, characters: Tensor) -> Tensor:  # i64 (batch, time) -> logits (batch, time, vocabulary)
        x = self.drop(self.characters(characters) + self.positions.weight[: characters.shape[1]])
        return self.head(self.norm(self.blocks(x)))


# ---- the text ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Characters as numbers, in three splits."""

    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: int

    @staticmethod
    def read(path: Path, device: torch.device) -> "Text":
        text = path.read_text()
        number = {character: i for i, character in enumerate(sorted(set(text)))}
        whole = torch.tensor([number[character] for character in text])
        stretches = whole.tensor_split(5 * PERIOD)
        held = {PERIOD // 2: "validation", PERIOD - 1: "test"}
        splits: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": []}
        for i, stretch in enumerate(stretches):
            splits[held.get(i % PERIOD, "train")].append(stretch)
        return Text(**{name: torch.cat(parts).to(device) for name, parts in splits.items()}, vocabulary=len(number))


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    taken = text[starts[:, None] + torch.arange(context + 1, device=text.device)]
    return taken[:, :-1], taken[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all that the model tells a class of: an image, or every character of a window."""
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, context: int, batch: int) -> float:
    """Nats per character over the whole split, in windows side by side, ``batch`` at a time."""
    starts = torch.arange(0, len(text) - context, context, device=text.device)
    return sum(loss_of(model, *windows(text, s, context)).item() * len(s) for s in starts.split(batch)) / len(starts)

"""What ablation.py trains: Fashion-MNIST with a residual network, Shakespeare's characters with an LSTM.

Both have the same methods: ``network``; ``order``, the numbers of the examples of every step on this rank; ``batch``,
the examples of such numbers; ``held_out``, the metric on a split. A seed sets the order.
"""

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from characters import Text, held_out_loss, windows
from nets import CharacterLSTM, ResNet, share_right

_VALIDATION = 5000  # of 60,000 training images; the files are in random order
_CLASSES = 10
_CHUNK = 1000  # images, and half as many windows, evaluated at a time


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A task's own settings, and which of its numbers is compared."""

    model: str  # in words
    metric: str  # "accuracy", or "loss" in nats per character
    lr: float  # the middle of every method's grid
    weight_decay: float
    trust_coefficient: float  # of LARS
    max_grad_norm: float | None  # DGC's local clipping, of dense training too
    batch: int  # images or windows, per rank
    context: int | None = None  # characters of a window

    def error(self, value: float) -> float:
        """The metric, turned so that less is better."""
        return -value if self.metric == "accuracy" else value


# LARS moves a layer as SGD does at the same lr where trust_coefficient * |w| / |g| is 1. In dense training |g| / |w| of
# the compressed weights has a median of 0.053 in the first 30 steps and 0.009 in the first 150 (resnet, lr 0.1), of
# 0.010 in the first 24 and 0.004 in the first 120 (lstm, lr 2). The gradient of the lstm has a norm of 0.22, a median
# again, and of 0.55 in one step of 20, on one rank of 16 windows; max_grad_norm is that of DGC's language model.
RECIPES = {
    "resnet": Recipe("ResNet-20, twice as wide", "accuracy", 0.1, 5e-4, 0.02, None, batch=64),
    "lstm": Recipe("LSTM of 512", "loss", 2.0, 1e-5, 0.005, 0.25, batch=64, context=64),
}


def recipes(quick: bool) -> dict[str, Recipe]:
    """By name. For a smoke test with little to compute."""
    if not quick:
        return RECIPES
    return {name: dataclasses.replace(r, batch=8, context=r.context and 16) for name, r in RECIPES.items()}


# ---- images --------------------------------------------------------------------------------------------------------


class Images:
    """Fashion-MNIST from the four files of its authors, ``*-ubyte.gz``, on a device."""

    def __init__(self, folder: Path, quick: bool, device: torch.device) -> None:
        self.quick, self.recipe = quick, recipes(quick)["resnet"]
        images, labels = _idx(folder / "train-images-idx3-ubyte.gz"), _idx(folder / "train-labels-idx1-ubyte.gz")
        test = _idx(folder / "t10k-images-idx3-ubyte.gz"), _idx(folder / "t10k-labels-idx1-ubyte.gz")
        first = len(labels) - min(_VALIDATION, len(labels) // 2)
        splits = {
            "train": (images[:first], labels[:first]), "validation": (images[first:], labels[first:]), "test": test,
        }  # fmt: skip
        most = 200 if quick else None
        self.splits = {
            name: (_pixels(x[:most]).to(device), torch.from_numpy(y[:most].astype(np.int64)).to(device))
            for name, (x, y) in splits.items()
        }

    def network(self) -> nn.Module:
        return ResNet(8, 1, _CLASSES) if self.quick else ResNet(32, 3, _CLASSES)

    def order(self, seed: int, steps: int) -> Tensor:
        """Every epoch a permutation that all ranks draw alike, each taking its part of a batch: i64 (steps, batch)."""
        rank, world = dist.get_rank(), dist.get_world_size()
        batch, count = self.recipe.batch, len(self.splits["train"][1])
        per_epoch = count // (batch * world)
        draw = torch.Generator().manual_seed(seed)
        epochs = [torch.randperm(count, generator=draw) for _ in range(-(-steps // per_epoch))]
        whole = torch.cat([epoch[: per_epoch * batch * world] for epoch in epochs])
        return whole.view(-1, world, batch)[:steps, rank]

    def batch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self.splits["train"]
        return images[numbers], labels[numbers]

    def held_out(self, model: nn.Module, split: str) -> float:
        return share_right(model, *self.splits[split], batch=_CHUNK)


def _idx(path: Path) -> np.ndarray:
    """The bytes of an IDX file in their shape, which its header says."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _pixels(images: np.ndarray) -> Tensor:
    """f32 (count, 1, side, side) in [0, 1]."""
    return torch.from_numpy(images.astype(np.float32) / 255).unsqueeze(1)


# ---- characters ----------------------------------------------------------------------------------------------------


class Characters:
    """A text on a device, in windows that begin anywhere."""

    def __init__(self, text: Path, quick: bool, device: torch.device) -> None:
        self.quick, self.recipe, self.text = quick, recipes(quick)["lstm"], Text.read(text, device)

    def network(self) -> nn.Module:
        return CharacterLSTM(32 if self.quick else 512, self.text.vocabulary)

    def order(self, seed: int, steps: int) -> Tensor:
        """Where windows begin, every rank's its own: i64 (steps, batch)."""
        draw = torch.Generator().manual_seed(1_000_003 * seed + dist.get_rank())
        return torch.randint(len(self.text.train) - self.recipe.context, (steps, self.recipe.batch), generator=draw)

    def batch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return windows(self.text.train, numbers, self.recipe.context)

    def held_out(self, model: nn.Module, split: str) -> float:
        return held_out_loss(model, getattr(self.text, split), self.recipe.context, _CHUNK // 2)


Task = Images | Characters

"""What threshold.py trains on scikit-learn's digits: logistic regression, solved beforehand, and a perceptron."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import harness  # noqa: F401 - makes the checkout importable: before fusedcomp
from fusedcomp.demo import data

CLASSES = 10
MOMENTUM = 0.9  # of the perceptron
HIDDEN = 128
_CONDITION = 1e4  # L / l2

Array = NDArray[np.generic]


class Examples(NamedTuple):
    """Rows of features, and the class of each."""

    features: Array
    labels: Array

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.features).to(dtype), torch.from_numpy(self.labels)

    def of_rank(self) -> "Examples":
        """This rank's, of as many equal stretches as there are ranks."""
        count = len(self.labels) // dist.get_world_size()
        own = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
        return Examples(self.features[own], self.labels[own])


@dataclasses.dataclass(frozen=True, eq=False)
class Logreg:
    """f(W) = mean cross-entropy of W a + l2 / 2 |W|^2; a step takes all images of a rank."""

    examples: Examples  # of all ranks, one after the other
    order: str  # "sorted by label" or "random"
    smoothness: float  # L: a bound on the largest eigenvalue of the cross-entropy's Hessian
    optimum: float
    optimum_error: float  # by which f* may be too high, at most
    steps: int
    momentum = 0.0

    @property
    def l2(self) -> float:
        return self.smoothness / _CONDITION

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "model": "softmax regression", "parameters": CLASSES * self.examples.features.shape[1], "l2": self.l2,
            "smoothness": self.smoothness, "optimum": self.optimum, "optimum_error": self.optimum_error,
            "examples": len(self.examples.labels), "order": self.order,
        }  # fmt: skip

    def model(self, seed: int) -> nn.Module:
        model = nn.Linear(self.examples.features.shape[1], CLASSES, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def losses(self, model: nn.Module, seed: int) -> Iterator[Tensor]:
        """This rank's loss in every step."""
        features, labels = self.examples.of_rank().tensors()
        for _ in range(self.steps):
            yield objective(model.weight, features, labels, self.l2)

    def lr_factor(self, step: int) -> float:
        return 1.0

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        value = objective(model.weight.double(), *self.examples.of_rank().tensors(torch.float64), self.l2)
        dist.all_reduce(value)
        return {"suboptimality": value.item() / dist.get_world_size() - self.optimum}


def objective(weight: Tensor, features: Tensor, labels: Tensor, l2: float) -> Tensor:
    return functional.cross_entropy(features @ weight.T, labels) + 0.5 * l2 * weight.square().sum()


def logreg(world: int, steps: int, is_sorted: bool, images: int | None = None) -> Logreg:
    """The problem, solved. Of all images, or of so many."""
    examples = _polynomial(world, is_sorted, images)
    features, labels = examples.tensors(torch.float64)
    gram = features @ features.T / len(labels)
    smoothness = 0.5 * float(torch.linalg.eigvalsh(gram)[-1])  # Boehning's bound: 1/2 of the covariance's
    optimum, error = solve(features, labels, smoothness / _CONDITION)
    return Logreg(examples, "sorted by label" if is_sorted else "random", smoothness, optimum, error, steps)


def _polynomial(world: int, is_sorted: bool, images: int | None) -> Examples:
    """Pixels in [0, 1] and all products of two, centred; as many images for each rank as for any other."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = digits.data / digits.data.max()
    first, second = np.triu_indices(pixels.shape[1])
    features = np.concatenate([pixels, pixels[:, first] * pixels[:, second]], axis=1)
    count = (images or len(features)) // world * world
    kept = np.random.RandomState(0).permutation(len(features))[:count]
    if is_sorted:
        kept = kept[np.argsort(digits.target[kept], kind="stable")]
    return Examples(features[kept] - features[kept].mean(0), digits.target[kept].astype(np.int64))


def solve(features: Tensor, labels: Tensor, l2: float) -> tuple[float, float]:
    """f*, and by how much it may be too high: f is l2-strongly convex, so f(W) - f* <= |grad f(W)|^2 / (2 l2)."""
    weight = torch.zeros(CLASSES, features.shape[1], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight], max_iter=2000, history_size=20, tolerance_grad=1e-10, tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        solver.zero_grad()
        value = objective(weight, features, labels, l2)
        value.backward()
        return value

    solver.step(closure)
    value = closure()
    assert weight.grad is not None
    return value.item(), weight.grad.square().sum().item() / (2 * l2)


@dataclasses.dataclass(frozen=True, eq=False)
class Perceptron:
    """Classify images by two hidden layers."""

    train: Examples
    validation: Examples
    test: Examples
    epochs: int
    batch: int  # images per rank and step
    world: int
    momentum = MOMENTUM

    @property
    def steps(self) -> int:
        return self.epochs * (len(self.train.labels) // (self.batch * self.world))

    @property
    def facts(self) -> dict[str, Any]:
        sizes = (self.train.features.shape[1], HIDDEN, HIDDEN, CLASSES)
        parameters = sum((a + 1) * b for a, b in itertools.pairwise(sizes))
        return {"model": "perceptron", "parameters": parameters, "epochs": self.epochs, "split": "random"}

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        inputs = self.train.features.shape[1]
        return nn.Sequential(
            nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )  # fmt: skip

    def losses(self, model: nn.Module, seed: int) -> Iterator[Tensor]:
        """This rank's loss in every step: every rank draws the same order and takes its part of each batch."""
        features, labels = self.train.tensors()
        generator, whole = torch.Generator().manual_seed(seed), self.batch * self.world
        for _ in range(self.epochs):
            order = torch.randperm(len(labels), generator=generator)
            for first in range(0, len(labels) - whole + 1, whole):
                which = order[first + dist.get_rank() : first + whole : self.world]
                yield functional.cross_entropy(model(features[which]), labels[which])

    def lr_factor(self, step: int) -> float:
        """Linear rise over a tenth, then half a cosine down to zero."""
        return min(1.0, (step + 1) / (0.1 * self.steps)) * (1.0 + math.cos(math.pi * step / self.steps)) / 2

    @torch.no_grad()
    def scores(self, model: nn.Module) -> dict[str, float]:
        return {"validation_accuracy": _accuracy(model, self.validation), "accuracy": _accuracy(model, self.test)}


def _accuracy(model: nn.Module, examples: Examples) -> float:
    features, labels = examples.tensors()
    return (model(features).argmax(1) == labels).double().mean().item()


def perceptron(world: int, epochs: int, batch: int) -> Perceptron:
    images = data.load("digits")
    parts = [Examples(s.images.reshape(len(s.labels), -1).astype(np.float32) / 255, s.labels) for s in images]
    return Perceptron(*parts, epochs, batch, world)


Problem = Logreg | Perceptron

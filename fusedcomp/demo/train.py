"""The training loop of the demo, on one rank, and the methods it compares."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import fusedcomp
from fusedcomp.compressors import Compressor
from fusedcomp.demo import model as network
from fusedcomp.demo.data import Images, Split
from fusedcomp.memories import Memory

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
# LARS moves a layer as SGD does where trust_coefficient * |w| / |g| is 1. In the first half of dense runs on digits at
# lr 0.1 the weights' |g| / |w| has a median of 0.05 (5 % to 95 %: 0.008 to 0.29), so the same learning rates suit both.
TRUST_COEFFICIENT = 0.05
_WARMUP = 0.1  # share of the steps over which lr rises
_CURVE_POINTS = 24
_CURVE_IMAGES = 2000  # of the test images, for the points before the last
_CHUNK = 1000  # images per forward pass without gradients


@dataclass(frozen=True)
class Method:
    """One way to train: the optimizer and its learning rate."""

    provider: str  # its name in records
    title: str
    lr: float  # the best of bench/training.py
    compressor: Compressor
    lars: bool = False
    state_dtype: torch.dtype = torch.float32
    memory: Memory | None = None
    decay: str = "gradient"  # SGD's
    budget: float = 1.0  # JointSpar's; 1 is none

    def optimizer(self, model: nn.Module) -> fusedcomp.SGD | fusedcomp.LARS:
        """The only thing that differs between the methods."""
        common: dict[str, Any] = {
            "lr": self.lr,
            "momentum": MOMENTUM,
            "weight_decay": WEIGHT_DECAY,
            "compressor": self.compressor,
            "state_dtype": self.state_dtype,
            "memory": self.memory,
        }
        if self.lars:
            return fusedcomp.LARS(model.parameters(), trust_coefficient=TRUST_COEFFICIENT, **common)
        return fusedcomp.SGD(model.parameters(), decay=self.decay, **common)

    def before_forward(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """What begins a step."""
        return optimizer.zero_grad if self.budget == 1.0 else fusedcomp.JointSpar(optimizer, self.budget).draw


METHODS = (
    Method("dense", "dense SGD", 0.05, fusedcomp.Identity()),
    Method("topk0.01", "SGD + TopK(0.01)", 0.1, fusedcomp.TopK(density=0.01)),
    Method("lars_topk0.01", "LARS + TopK(0.01)", 0.4, fusedcomp.TopK(density=0.01), lars=True),
)


@dataclass(frozen=True)
class Job:
    """One run."""

    method: Method
    epochs: int
    batch: int  # images per rank and step
    seed: int  # of the initial weights and of the order of the images


class Point(NamedTuple):
    """The model on its way."""

    bytes_sent: int  # so far, by one rank
    accuracy: float  # on test images


class Progress(NamedTuple):
    """Sent by rank 0 after every step."""

    job: int
    step: int
    steps: int


class Outcome(NamedTuple):
    """Sent by rank 0 after every run."""

    job: int
    curve: list[Point]
    test_accuracy: float
    validation_accuracy: float
    bytes_sent: int  # by one rank
    bytes_dense: int  # what an fp32 all-reduce of every parameter would have been handed
    seconds: float  # without evaluation
    steps: int
    parameters: int

    @property
    def compression_ratio(self) -> float:
        """Of the whole model, uncompressed parameters included."""
        return self.bytes_dense / self.bytes_sent


def work(device: torch.device, send: Callable[[object], None], images: Images, jobs: Sequence[Job]) -> None:
    """What every rank does: all jobs, one after the other. Rank 0 sends ``Progress`` and ``Outcome``."""
    parts = [_Part(split, device) for split in images]
    silent = dist.get_rank() != 0
    for index, job in enumerate(jobs):
        for message in _train(index, job, images.side, *parts):
            if not silent:
                send(message)


class _Part:
    """A split on this rank's device."""

    def __init__(self, split: Split, device: torch.device) -> None:
        self.pixels = torch.from_numpy(split.images).to(device)
        self.labels = torch.from_numpy(split.labels).to(device)

    def batch(self, which: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Images as the network takes them, in [0, 1], and labels."""
        return self.pixels[which].unsqueeze(1).float() / 255, self.labels[which]


def _train(
    index: int, job: Job, side: int, train: _Part, validation: _Part, test: _Part
) -> Iterator[Progress | Outcome]:
    device = train.labels.device
    model = network.build(side, job.seed).to(device)
    optimizer = job.method.optimizer(model)
    begin = job.method.before_forward(optimizer)
    batches = _batches(job, len(train.labels))
    steps = len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, steps))
    measured, curve = _curve_steps(steps), []
    totals = torch.zeros(2, dtype=torch.int64, device=device)  # bytes sent, bytes of a dense exchange
    seconds, started = 0.0, _now(device)
    for step, which in enumerate(batches, start=1):
        pixels, labels = train.batch(which.to(device))
        begin()
        functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
        schedule.step()
        metrics = optimizer.metrics()
        totals += torch.stack([metrics["bytes_sent"], metrics["bytes_dense"]])
        if step in measured:
            seconds += _now(device) - started
            curve.append(Point(int(totals[0]), _accuracy(model, test, None if step == steps else _CURVE_IMAGES)))
            started = _now(device)
        yield Progress(index, step, steps)
    validated = _accuracy(model, validation)
    sent, dense = totals.tolist()
    parameters = sum(p.numel() for p in model.parameters())
    yield Outcome(index, curve, curve[-1].accuracy, validated, sent, dense, seconds, steps, parameters)


def _batches(job: Job, count: int) -> list[Tensor]:
    """This rank's image numbers for every step: every rank draws the same order and takes its part of each batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = job.batch * world_size
    generator = torch.Generator().manual_seed(job.seed)
    epochs = (torch.randperm(count, generator=generator) for _ in range(job.epochs))
    return [
        order[first + rank : first + whole : world_size]
        for order in epochs
        for first in range(0, count - whole + 1, whole)
    ]


def _lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    return min(1.0, (step + 1) / (_WARMUP * steps)) * (1.0 + math.cos(math.pi * step / steps)) / 2


def _curve_steps(steps: int) -> set[int]:
    """Where to look at the test images: evenly on a logarithmic axis, from the first step to the last."""
    return {round(steps ** (i / (_CURVE_POINTS - 1))) for i in range(_CURVE_POINTS)}


@torch.no_grad()
def _accuracy(model: nn.Module, part: _Part, most: int | None = None) -> float:
    """Share of the (first ``most``) images that are classified correctly; every rank looks at its part of them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = min(len(part.labels), most or len(part.labels))
    correct = torch.zeros((), dtype=torch.int64, device=part.labels.device)
    for first in range(rank, count, _CHUNK * world_size):
        pixels, labels = part.batch(slice(first, min(count, first + _CHUNK * world_size), world_size))
        correct += (model(pixels).argmax(1) == labels).sum()
    dist.all_reduce(correct)
    return int(correct) / count


def _now(device: torch.device) -> float:
    """Seconds, after what the device has been given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

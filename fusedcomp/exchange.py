"""What every exchange of a bucket has: its share of what a front's buckets have in common, presence, scales, the work.

gradient <- factor * gradient / loss scale * clip   scales: a number a segment, made on the device (kernels/clip.py)
headers of all ranks -> verdict                     a step is applied by all ranks or undone by all (kernels/verdict.py)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedcomp._dispatch import ops
from fusedcomp.buckets import Bucket
from fusedcomp.buffers import Summed
from fusedcomp.collectives import Group


@dataclass(frozen=True)
class Hyper:
    """The numbers of a param group at this step."""

    lr: Tensor  # f32 (1,) on the device
    momentum: float
    nesterov: bool
    weight_decay: float
    maximize: bool
    trust_coefficient: float = 0.0
    eps: float = 0.0


@dataclass(frozen=True)
class Clip:
    """Local gradient clipping (Lin et al., ICLR 2018, section 3.3): to max_grad_norm * sqrt(world size) on every rank.

    scope: whose norm it is, ``"tensor"``, ``"bucket"`` or ``"model"``.
    """

    max_grad_norm: float
    scope: str

    def at(self, world_size: int) -> float:
        """The norm that a rank clips its own gradient to.

        The paper clips what a rank adds to the average, its gradient divided by N, to max_grad_norm / sqrt(N).
        """
        return self.max_grad_norm * math.sqrt(world_size)


class Verdict:
    """Whether this step counts: the device's, the same on all ranks, and the half of the states that holds."""

    def __init__(self, device: torch.device) -> None:
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=device)  # of this step, so far
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=device)  # of the last concluded step
        self.parity = torch.zeros(1, dtype=torch.int32, device=device)


@dataclass
class Shared:
    """What all buckets of a front have in common."""

    group: Group
    status: Tensor  # i32 (3,): see kernels/headers.py
    clip: Clip | None = None
    verdict: Verdict | None = None  # where steps that are not finite are skipped
    has_loss_scale: bool = False
    loss_scale: Tensor | None = None  # f32, one number: of this step
    squares: Tensor | None = field(default=None, repr=False)  # f32: of all buckets' segments, where all are looked at
    vector: Tensor | None = field(default=None, repr=False)  # f32 zeros: where one bucket after another merges payloads

    @property
    def parity(self) -> Tensor | None:
        """Which half of the states holds; None: there is one."""
        return None if self.verdict is None else self.verdict.parity

    @property
    def found_inf(self) -> Tensor | None:
        """1 where the concluded step is not to be applied; None: all are."""
        return None if self.verdict is None else self.verdict.found_inf


class Exchange(ABC):
    """What sparse and dense buckets share: the summed buffer, presence, scales, trust ratios, the pending work."""

    def __init__(self, bucket: Bucket, shared: Shared, seed: Tensor) -> None:
        self.bucket, self.shared, self.group = bucket, shared, shared.group
        self.status = shared.status
        self.seed = seed  # i32 (1,): the step, kept by the device; those that were skipped do not count
        self.ops = ops(bucket.device)
        count, device = len(bucket.segments.numels), bucket.device
        self.present = torch.zeros(count, dtype=torch.int32, device=device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.trust = self.partials = None
        if bucket.treatment.trust:
            self.trust = torch.ones(count, dtype=torch.float32, device=device)
            self.partials = torch.zeros((bucket.segments.num_blocks, 2), dtype=torch.float32, device=device)
        self.scales: Tensor | None = None
        self.squares: Tensor | None = None
        self._block_squares: Tensor | None = None
        if shared.clip is not None or shared.has_loss_scale:
            self.scales = torch.ones(count, dtype=torch.float32, device=device)
        if shared.clip is not None:
            self.squares = torch.zeros(count, dtype=torch.float32, device=device)
        self.factors: Tensor | None = None  # f32 (segments,): a sampler's
        self.observed = False  # does a sampler want to know the norms of this step?
        self.asleep: list[Tensor] = []  # parameters of which no rank is to have a gradient in this step
        self.decays_apart = bucket.treatment.decay in ("decoupled", "own_momentum")
        if bucket.treatment.decay == "own_momentum":
            bucket.add_state("decay_buffer")
        self.kept = bucket  # the one that holds the states
        self.work: Any = None
        self.nbytes = 0  # handed to the collective in this step
        self.nbytes_intra = 0  # besides, where there are two levels: inside the node

    @abstractmethod
    def launch(self, grads: Sequence[Tensor | None], hyper: Hyper, step: int) -> None:
        """Start the exchange of these gradients, on the current stream."""

    @abstractmethod
    def launch_nothing(self, hyper: Hyper, step: int) -> None:
        """Take part in the exchange as a rank that failed: nothing is sent, states stay as they are."""

    @abstractmethod
    def read(self) -> None:
        """Take in the headers of all ranks."""

    @abstractmethod
    def apply(self, hyper: Hyper) -> None:
        """Take in what arrived: headers, unless they have been read for the verdict, then parameters."""

    def metrics(self) -> dict[str, Tensor]:
        """This bucket's share of ``CompressedOptimizer.metrics``; of what is never compressed there is none."""
        return {}

    def sample(self, factors: Tensor | None) -> None:
        """Multiply gradients by a sampler's factors before all else, from the next launch on; None: no more."""
        self.factors = factors
        if self.shared.clip is None and not self.shared.has_loss_scale:
            self.scales = factors

    def arrange(self, active: Sequence[bool] | None) -> None:
        """Of which parameters there will be gradients, the same on all ranks, from the next launch on; None: of any."""
        params = self.bucket.params
        self.asleep = [] if active is None else [p for p, on in zip(params, active, strict=True) if not on]

    def measure(self) -> None:
        """Squared norms of this rank's gradients: one more read of them."""
        if self._block_squares is None:
            blocks = self.bucket.segments.num_blocks
            self._block_squares = torch.zeros(blocks, dtype=torch.float32, device=self.bucket.device)
        self.ops.clip.gradient_squares(
            self.bucket.segments, self.bucket.operands, self.factors, self._block_squares, self.squares
        )  # fmt: skip

    def scale(self) -> None:
        """What this step multiplies the gradients with."""
        shared, clip = self.shared, self.shared.clip
        of_model = clip is not None and clip.scope == "model"  # measured before any bucket was launched
        if (clip is not None or self.observed) and not of_model:
            self.measure()
        if clip is None and not shared.has_loss_scale:
            return
        squares = None if clip is None else shared.squares if of_model else self.squares
        self.ops.clip.gradient_scales(
            squares, shared.loss_scale, self.factors, self.scales,
            max_norm=0.0 if clip is None else clip.at(self.group.world_size),
            per_tensor=clip is not None and clip.scope == "tensor",
        )  # fmt: skip

    def reduce(self, reduced: Summed, failed: bool | Tensor) -> None:
        """Fill in the trailer and start the sum over ranks. ``failed`` may be the device's: i32, 1 or 0."""
        known = failed is True
        self.ops.headers.write_trailer(self.bucket.operands, self.flag, self.seed, reduced.trailer, failed=known)
        if isinstance(failed, Tensor):
            reduced.trailer[len(self.present) + 1] = failed
        self.work = self.group.all_reduce(reduced.whole)
        self.nbytes = reduced.whole.nbytes

    def read_trailer(self, reduced: Summed) -> None:
        """Who had a gradient, and what ranks say of failures, from a summed buffer."""
        verdict = self.shared.verdict
        self.ops.headers.read_trailer(
            reduced.trailer, self.status, None if verdict is None else verdict.nonfinite, self.present,
            world=self.group.world_size,
        )  # fmt: skip

    def annul(self) -> None:
        """If the step was skipped: it was none, and nobody had a gradient."""
        self.ops.verdict.annul(self.shared.found_inf, self.seed, self.present)

    def wait(self) -> None:
        """Make the current stream (on CPU: the host) wait for the exchange."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def weight_decay(self, hyper: Hyper) -> float:
        """What goes into the gradient: the group's, or 0."""
        return hyper.weight_decay if self.bucket.treatment.decay == "gradient" else 0.0

    def decay(self, hyper: Hyper) -> None:
        """The decay that is no part of the gradient; headers have been read."""
        if self.decays_apart and hyper.weight_decay != 0.0:
            self.ops.decay.decay_params(
                self.bucket.segments, self.bucket.operands, self.present, hyper.lr,
                self.bucket.states.get("decay_buffer"), weight_decay=hyper.weight_decay, momentum=hyper.momentum,
                nesterov=hyper.nesterov,
            )  # fmt: skip

"""What JointSpar saves: time and FLOPs of training steps, against the budget and against what the blocks are.

python bench/jointspar.py                          ResNet-50 on 256 images, GPT-2 small on 16 x 1024 tokens
python bench/jointspar.py --quick --device cpu     small sizes: finds errors, its times mean nothing

A step is draw(), forward, backward and step() of SGD with momentum; steps follow each other without waiting, as in
training. Batches fill the card: what is not computed is then time that is not spent. Blocks:

layers   every matrix and the vectors that follow it: JointSpar's default
stages   the four stages of ResNet-50, the first with the stem; the thirds of GPT-2's layers, the first with the
         embeddings. The head (of GPT-2 the last norm; its matrix is the embedding) is always active
most     two of them: all stages but the last, and the last
early    one: all stages but the last, which is always active

A block that is not computed saves its weights' gradients, and where nothing active lies before it, its inputs' too: the
fewer blocks there are in front, the more often backward ends early.

Figures are expectations under equal probabilities, as at the start of a run: of few blocks every active set is measured
and weighted, of many some that were drawn. "dense" is the same model and optimizer without a sampler; providers that
end in "_torch" have torch's SGD. flops_of_dense is what ms_of_dense would be if all FLOPs took equally long and nothing
else took time.

The rest is that of models.py, but GPT-2 is not compiled: every active set would be compiled anew.
"""

import functools
import itertools
import math
import random
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import cases
import harness  # makes the checkout importable: before fusedcomp
import models
import records
import tables
from fusedcomp import SGD, JointSpar, jointspar
from fusedcomp.bandit import draw
from harness import log

BUDGETS = (0.3, 0.5, 0.6, 0.7, 0.8)
_FEW = 4  # blocks of which all sets are measured
_DRAWS = 8  # active sets of many blocks for each budget
_REPEATS, _LEAST = 2, 12  # steps of each set in a round; of all sets that there are together
_METRICS = ("ms", "forward_ms", "backward_ms", "update_ms")
_STILL = 1e-12  # a learning rate under which probabilities stay

Training = models.Images | models.Text
Blocks = Sequence[Sequence[Tensor]]
Active = tuple[bool, ...]

CASES: dict[str, Callable[[torch.device, bool], Training]] = {
    "resnet50_256": lambda device, quick: models.Images(device, quick, 0, batch=256),
    "gpt2_16": lambda device, quick: models.Text(device, quick, 0, batch=16, regions=False),
    "resnet50": lambda device, quick: models.Images(device, quick, 0),
}
_DEFAULT_CASES = ("resnet50_256", "gpt2_16")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"": SGD, "_torch": torch.optim.SGD}


# ---- blocks --------------------------------------------------------------------------------------------------------


def stages(model: nn.Module) -> list[list[Tensor]]:
    """Of a network its consecutive parts, but for its head."""
    if isinstance(model, models.GPT2):
        parts = [list(model.blocks)[len(model.blocks) * i // 3 : len(model.blocks) * (i + 1) // 3] for i in range(3)]
        parts[0] = [model.embedding, model.position, *parts[0]]
    elif hasattr(model, "layer1"):  # torchvision's
        parts = [[model.conv1, model.bn1, model.layer1], [model.layer2], [model.layer3], [model.layer4]]
    else:  # ours: a stage begins where there is a projection beside a unit
        parts = []
        for unit in model.layers:
            if not isinstance(unit.downsample, nn.Identity):
                parts.append([])
            parts[-1].append(unit)
        parts[0] = [model.conv1, model.bn1, *parts[0]]
    return [[p for module in part for p in module.parameters()] for part in parts]


def _joined(parts: Blocks) -> list[Tensor]:
    return list(itertools.chain(*parts))


CHOICES: dict[str, Callable[[nn.Module], Blocks | None]] = {
    "layers": lambda model: None,
    "stages": stages,
    "most": lambda model: [_joined(stages(model)[:-1]), stages(model)[-1]],
    "early": lambda model: [_joined(stages(model)[:-1])],
}


# ---- active sets ---------------------------------------------------------------------------------------------------


def sets_of(blocks: int, budget: float) -> dict[Active, float]:
    """Active sets and their weights, which add up to 1: all there are, or of many blocks some, equally likely."""
    if blocks <= _FEW:
        everything = itertools.product((False, True), repeat=blocks)
        return {active: math.prod(budget if on else 1.0 - budget for on in active) for active in everything}
    rng = random.Random(f"{blocks}/{budget}")
    found: dict[Active, float] = {}
    for _ in range(_DRAWS):
        active = tuple(draw([budget] * blocks, rng))
        found[active] = found.get(active, 0.0) + 1.0 / _DRAWS
    return found


class Step(NamedTuple):
    """One step under an active set, in milliseconds."""

    forward_ms: float
    backward_ms: float
    update_ms: float  # draw() and step()

    @property
    def ms(self) -> float:
        return sum(self)


class Case:
    """A model with one optimizer, and runs of steps of it."""

    def __init__(self, name: str, optimizer: str, device: torch.device, quick: bool) -> None:
        self.clock = harness.clock_for(device)
        self.workload = CASES[name](device, quick)
        self.model = self.workload.model
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr=0.0, momentum=0.9)
        self.flops = functools.cache(self._flops)

    @contextmanager
    def sampling(self, choice: str, budget: float) -> Iterator[JointSpar]:
        blocks = CHOICES[choice](self.model)
        sampler = JointSpar(self.optimizer, budget, blocks=blocks, learning_rate=_STILL)
        try:
            yield sampler
        finally:
            sampler.remove()

    def run(self, sampler: JointSpar | None, sets: Sequence[Active]) -> list[Step]:
        """A step of each set, one after the other, and one before that does not count."""
        marks = []
        with mock.patch.object(jointspar, "draw", mock.Mock(side_effect=[sets[0], *sets])):
            for number in range(-1, len(sets)):
                if number == 0:
                    self.clock.synchronise()
                marks.append(self._step(sampler))
        self.clock.synchronise()
        taken = []
        for begin, drawn, between, backward, end in marks[1:]:
            gap = self.clock.between
            taken.append(Step(gap(drawn, between), gap(between, backward), gap(begin, drawn) + gap(backward, end)))
        return taken

    def _step(self, sampler: JointSpar | None) -> list[Any]:
        marks = [self.clock.mark()]
        (self.optimizer.zero_grad if sampler is None else sampler.draw)()
        marks.append(self.clock.mark())
        loss = self.workload.loss(self.model, 0)
        marks.append(self.clock.mark())
        loss.backward()
        marks.append(self.clock.mark())
        self.optimizer.step()
        return [*marks, self.clock.mark()]

    def _flops(self, choice: str, active: Active) -> int:
        """Of forward and backward."""
        with (
            self.sampling(choice, 0.5) as sampler,
            mock.patch.object(jointspar, "draw", return_value=active),
            FlopCounterMode(display=False) as counter,
        ):
            sampler.draw()
            self.workload.loss(self.model, 0).backward()
            self.optimizer.step()
        return counter.get_total_flops()

    def num_blocks(self, choice: str) -> int:
        with self.sampling(choice, 0.5) as sampler:
            return len(sampler.blocks)

    def active_share(self, choice: str, active: Active) -> float:
        """Of the bytes of gradients."""
        with self.sampling(choice, 0.5) as sampler:
            sizes = [sum(p.nbytes for p in block) for block in sampler.blocks]
        idle = sum(size for size, on in zip(sizes, active, strict=True) if not on)
        return 1.0 - idle / sum(p.nbytes for p in self.model.parameters())


# ---- measuring -----------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of figures. Without blocks: dense; a budget of 1: all active."""

    blocks: str | None
    budget: float

    def provider(self, optimizer: str) -> str:
        if self.blocks is None:
            return f"dense{optimizer}"
        return f"jointspar{self.budget}" + ("" if self.blocks == "layers" else f"_{self.blocks}") + optimizer


def rows_of(optimizer: str) -> list[Row]:
    """torch's SGD for comparison only."""
    dense, whole = Row(None, 1.0), Row("layers", 1.0)
    if optimizer:
        return [dense, whole, Row("layers", 0.7)]
    return [dense, whole, *(Row(choice, budget) for choice in CHOICES for budget in BUDGETS)]


Steps = dict[Active, list[Step]]


def measure(case: Case, rows: Iterable[Row], rounds: int) -> dict[Row, tuple[dict[Active, float], Steps]]:
    """Weights of active sets, and their steps; rows take turns, so that drifts of the card hit all of them alike."""
    weights = {row: {(): 1.0} if row.blocks is None else _weights(case, row) for row in rows}
    # Sets of equal blocks are measured once, whatever their weights; gradients of a budget of 1 are not scaled.
    runs: dict[tuple[str | None, bool], Steps] = {}
    for row, sets in weights.items():
        runs.setdefault((row.blocks, row.budget == 1.0), {}).update({active: [] for active in sets})
    for round_ in range(-1, rounds):  # the first warms up
        for (choice, whole), into in runs.items():
            sets = max(_REPEATS, _LEAST // len(into)) * list(into)
            random.Random(round_).shuffle(sets)
            taken = _run(case, choice, whole, sets if round_ >= 0 else sets[:2])
            for active, step in zip(sets, taken, strict=round_ >= 0):
                if round_ >= 0:
                    into[active].append(step)
    return {row: (sets, runs[row.blocks, row.budget == 1.0]) for row, sets in weights.items()}


def _weights(case: Case, row: Row) -> dict[Active, float]:
    count = case.num_blocks(row.blocks or "layers")
    return {(True,) * count: 1.0} if row.budget == 1.0 else sets_of(count, row.budget)


def _run(case: Case, choice: str | None, whole: bool, sets: Sequence[Active]) -> list[Step]:
    if choice is None:
        return case.run(None, sets)
    with case.sampling(choice, 1.0 if whole else 0.5) as sampler:
        return case.run(sampler, sets)


def expected(weights: Mapping[Active, float], value: Callable[[Active], float]) -> float:
    return math.fsum(weight * value(active) for active, weight in weights.items())


def _mean(steps: Steps, metric: str, active: Active) -> float:
    return statistics.mean(getattr(step, metric) for step in steps[active])


def append(results: Any, name: str, optimizer: str, case: Case, found: Any, **more: Any) -> None:
    dense: dict[str, float] = {}
    whole = (True,) * case.num_blocks("layers")
    for row, (weights, steps) in found.items():
        choice = row.blocks or "layers"
        sets = {active or whole: weight for active, weight in weights.items()}
        values = {metric: expected(weights, functools.partial(_mean, steps, metric)) for metric in _METRICS}
        values["flops"] = expected(sets, functools.partial(case.flops, choice))
        dense = dense or values
        fields = more | {
            "budget": None if row.blocks is None else row.budget, "blocks": row.blocks, "sets": len(weights),
            "steps": sum(len(steps[active]) for active in weights),
            "active_share": expected(sets, functools.partial(case.active_share, choice)),
        }  # fmt: skip
        fields |= case.workload.facts
        provider = row.provider(optimizer)
        for metric, value in values.items():
            records.append(
                results, bench="jointspar", case=name, provider=provider, metric=metric, value=value, **fields
            )
            if row.blocks is not None:
                records.append(
                    results, bench="jointspar", case=name, provider=provider, metric=f"{metric}_of_dense",
                    value=value / dense[metric], **fields,
                )  # fmt: skip


def main() -> int:
    parser = cases.parser(__doc__, "jointspar.jsonl")
    parser.add_argument("--cases", default=",".join(_DEFAULT_CASES), help="comma-separated; default: %(default)s")
    args = cases.parse(parser)
    before, failed = tables.count(args.results), []
    for name, optimizer in itertools.product(args.cases.split(","), OPTIMIZERS):
        try:
            case = Case(name, optimizer, torch.device(args.device), args.quick)
            found = measure(case, rows_of(optimizer), rounds=1 if args.quick else 2)
            append(args.results, name, optimizer, case, found, quick=args.quick)
        except Exception:
            failed.append(name + optimizer)
            log(f"{name}{optimizer}: FAILED\n{traceback.format_exc()}")
            continue
        log(f"{name}{optimizer}: {len(found)} rows")
    tables.show(args.results, before)
    print(f"\nrecords: {args.results}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

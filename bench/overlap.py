"""How much of the compression hides behind backward: whole training steps on one GPU, ResNet-50 and GPT-2.

python bench/overlap.py                          both models
python bench/overlap.py --quick --device cpu     small sizes, figures that mean nothing

backward_only        forward and backward
torch_sgd_fused      the same and torch.optim.SGD(fused=True)
fusedcomp_overlap    fusedcomp.SGD, compressing during backward;  fusedcomp_serial: in step()
compress_ms          the compress side alone, of a frozen step;  optimizer_ms: optimizer.step() alone, both sides
exposed_ratio        (fusedcomp_overlap - backward_only) / compress_ms:  0 is free, 1 hides nothing of the compress side
                     (the update is in the numerator too)

A batch is made once. Every way to step has a model of its own from the same seed. A repeat is several steps without a
pause, as in training: the host runs ahead as far as it can. Timed as plain calls and as replays of a CUDA graph. Where
the host needs longer for a step than the GPU does (ResNet-50, by some milliseconds), plain calls say how busy the host
is; what is hidden of the GPU's work is told by the replays.
"""

import argparse
import gc
import math
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cases
import harness
import records
import tables
import workloads
from frozen import Frozen, gate
from fusedcomp import SGD, TopK
from harness import Variant, log
from trained import DENSITY, MOMENTUM, Config, Trained

BATCH: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 64, "channels_last": True},
    "gpt2": {"batch": 8, "length": 1024},
}
CASES = tuple(BATCH)
STEPS = 5  # in a repeat
# Of the learning rate: hundreds of steps on one batch, which no rate needs to learn; at the full one torch's own SGD
# swung between losses of 8 and 17 on GPT-2 and once left the finite numbers.
SLOWER = 0.1


def build(name: str, device: torch.device, quick: bool) -> Any:
    torch.manual_seed(0)
    return workloads.WORKLOADS[name](device, quick, **BATCH[name])


class Training:
    """One model and one way to step; ``run`` takes several steps on the same batch."""

    def __init__(self, workload: Any, optimizer: Any) -> None:
        self.workload, self.optimizer = workload, optimizer
        self.batch = workload.sample()
        self.losses: list[Tensor] = []

    def run(self) -> None:
        for _ in range(STEPS):
            (self.optimizer or self.workload.model).zero_grad()
            loss = self.workload.backward(self.batch)
            if self.optimizer is not None:
                self.optimizer.step()
        self.losses.append(loss)


def trainings(name: str, device: torch.device, quick: bool) -> dict[str, Training]:
    """provider -> a model that steps this way."""
    lr = SLOWER * workloads.LEARNING_RATES[name]

    def fused(params: Any) -> Any:
        return torch.optim.SGD(params, lr=lr, momentum=MOMENTUM, fused=True)

    def ours(overlap: bool) -> Callable[[Any], Any]:
        return lambda params: SGD(
            params, lr=lr, momentum=MOMENTUM, compressor=TopK(density=DENSITY), overlap=overlap
        )  # fmt: skip

    makers: dict[str, Callable[[Any], Any]] = {
        "backward_only": lambda params: None,
        "torch_sgd_fused": fused,
        "fusedcomp_overlap": ours(True),
        "fusedcomp_serial": ours(False),
    }
    made = {}
    for provider, maker in makers.items():
        workload = build(name, device, quick)
        made[provider] = Training(workload, maker(workload.params))
    return made


def alone(name: str, clock: harness.Clock, quick: bool, repeats: int, rounds: int) -> dict[str, harness.Figure]:
    """The compress side and all of ``optimizer.step()`` by themselves, after the gate, with the default buckets."""
    trained = Trained(build(name, clock.device, quick), workloads.LEARNING_RATES[name], 5 if quick else 199)
    optimizer, payloads = trained.continue_with(Config("fp32", keep=1), cap_mb=100.0)
    with torch.no_grad():
        frozen = Frozen(Config("fp32", keep=1), optimizer, payloads)
        gate(frozen, 0.0)
        variants = [
            Variant("compress_ms", frozen.launch, frozen.reset, "graph"),
            Variant("optimizer_ms", frozen.optimizer_step, frozen.reset, "graph"),
        ]
        kept = harness.ready(clock, variants)
        figures = harness.measure(clock, kept, repeats, rounds)
    return {v.name: f for v, f in zip(kept, figures, strict=True)}


class Model:
    """Measures one model and appends its records."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.clock = harness.clock_for(torch.device(args.device))
        self.repeats, self.rounds = (2, 1) if args.quick else (12, 4)

    def append(self, provider: str, metric: str, value: float, **more: Any) -> None:
        batch = {} if self.args.quick else BATCH[self.name]
        records.append(
            self.args.results, bench="overlap", case=self.name, provider=provider, metric=metric, value=value,
            density=DENSITY, quick=self.args.quick, autocast="bfloat16", **(batch | more),
        )  # fmt: skip

    def append_figure(self, provider: str, metric: str, figure: harness.Figure, steps: int, **more: Any) -> float:
        p20, median, p80 = (figure.quantile(q) / steps for q in (0.2, 0.5, 0.8))
        self.append(provider, metric, median, p20=p20, p80=p80, repeats=len(figure.device_ms), **more)
        return median

    def run(self) -> None:
        single = alone(self.name, self.clock, self.args.quick, 4 * self.repeats, self.rounds)
        ours = {
            metric: self.append_figure("fusedcomp_serial", metric, figure, 1, timing="graph")
            for metric, figure in single.items()
        }
        gc.collect()
        made = trainings(self.name, self.clock.device, self.args.quick)
        for training in made.values():
            training.run()
            training.run()
        for timing in ("events", "graph"):
            self._compare(made, timing, ours)

    def _compare(self, made: dict[str, Training], timing: str, ours: dict[str, float]) -> None:
        variants = [Variant(provider, training.run, timing=timing) for provider, training in made.items()]
        variants = harness.ready(self.clock, variants)
        figures = harness.measure(self.clock, variants, self.repeats, self.rounds)
        ms = {
            variant.name: self.append_figure(
                variant.name, "ms", figure, STEPS, timing=timing, host_ms=figure.host_median / STEPS
            )
            for variant, figure in zip(variants, figures, strict=True)
        }
        losses = {provider: float(training.losses[-1].detach()) for provider, training in made.items()}
        if not all(map(math.isfinite, losses.values())):
            raise RuntimeError(f"a model diverged: {losses}")
        exposed = {provider: ms[provider] - ms["backward_only"] for provider in ms if provider != "backward_only"}
        for provider, value in exposed.items():
            self.append(provider, "exposed_ms", value, timing=timing)
        for provider in ("fusedcomp_overlap", "fusedcomp_serial"):
            if provider in exposed:
                self.append(provider, "exposed_ratio", exposed[provider] / ours["compress_ms"], timing=timing, **ours)
        log(f"{self.name}, {timing}: " + ", ".join(f"{provider} {value:.2f} ms" for provider, value in ms.items()))


def main() -> int:
    parser = cases.parser(__doc__, "overlap.jsonl")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    args = cases.parse(parser)
    before, failed = tables.count(args.results), []
    torch.backends.cudnn.benchmark = True
    for name in args.cases.split(","):
        try:
            Model(name, args).run()
        except Exception:
            failed.append(name)
            log(f"{name}: FAILED\n{traceback.format_exc()}")
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    tables.show(args.results, before)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

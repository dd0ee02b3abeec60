"""Bytes and time an element of every method: its whole compress side, on the shapes of a model.

python bench/methods.py                          ResNet-50 and GPT-2
python bench/methods.py --quick --device cpu     small sizes, twins, figures that mean nothing

ms               pass, selection and packing of all that is compressed, in a world of one; replayed from a graph, and
                 called plainly. Against ``accumulate``, the pass that selects nothing, it is ``of_pass``
kernels          launches of one compressed bucket, by the profiler's trace
payload_bytes    what a rank hands to the collective

Gradients are normal noise, of another scale in every tensor; states are those of some steps with them. Every method is
SGD with momentum correction, but for what is drawn, which has no memory. Thresholds are the one that TopK has come to.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bandwidth
import cases
import harness
import launches
import records
import tables
from frozen import copy_all, on_twins, runs_kernels, small_tensors
from fusedcomp import CAT, SGD, BlockTopK, PacketCost, RandomK, Threshold, TopK
from fusedcomp.compressors import Compressor
from fusedcomp.pipeline import CompressedExchange
from fusedcomp.randomk import RandomExchange
from harness import Figure, Variant, log
from trained import DENSITY, MOMENTUM

CASES = ("resnet50", "gpt2")
STEPS, QUICK_STEPS = 40, 10
SECONDS = 280  # of a case

# What TopK's threshold is, to what is measured.
METHODS: dict[str, Callable[[float], Compressor]] = {
    "topk": lambda _: TopK(DENSITY),
    "topk_sampled": lambda _: TopK(DENSITY, selection="sampled"),
    "topk_sidco": lambda _: TopK(DENSITY, selection="sidco"),
    "topk_tensor": lambda _: TopK(DENSITY, scope="tensor"),
    "block_topk": lambda _: BlockTopK(DENSITY),
    "cat": lambda _: CAT(PacketCost()),
    "cat_quantized": lambda _: CAT(PacketCost(), variant="sparse_quantized"),
    "cat_stochastic": lambda _: CAT(PacketCost(), variant="stochastic"),
    "threshold": lambda threshold: Threshold(threshold),
    "randomk": lambda _: RandomK(DENSITY),
}


class Held:
    """An optimizer whose compress side can be run again and again from the same states."""

    def __init__(self, compressor: Compressor, params: list[Tensor], steps: int) -> None:
        self.compressor = compressor
        self.optimizer = SGD(
            params, lr=1e-4, momentum=MOMENTUM, compressor=compressor, overlap=False, bucket_cap_mb=1e6
        )
        noise = torch.Generator(params[0].device).manual_seed(0)
        for _ in range(steps):
            for i, param in enumerate(params):
                param.grad = torch.randn(param.shape, generator=noise, device=param.device) * 10 ** (i % 7 / 7)
            self.optimizer.step()
        self.exchanges = [e for e in self.optimizer._exchanges if isinstance(e, CompressedExchange)]
        self.grads = [[p.grad for p in e.bucket.params] for e in self.exchanges]
        self.numel = sum(e.bucket.segments.numel for e in self.exchanges)
        held = [t for e in self.exchanges for t in (*e.bucket.states.values(), *small_tensors(e))]
        self.live, self.copies = held, [t.clone() for t in held]

    @property
    def threshold(self) -> float:
        return max(e.metrics()["threshold"].max().item() for e in self.exchanges)

    @property
    def pass_bytes(self) -> int:
        """The least traffic: the gradient read, two fp32 states read and written; without memory one written."""
        return (20 if self.has_memory else 8) * self.numel

    @property
    def has_memory(self) -> bool:
        return all(exchange.velocity is not None for exchange in self.exchanges)

    @property
    def payload_bytes(self) -> int:
        return sum(e.nbytes for e in self.exchanges)

    def reset(self) -> None:
        for exchange, grads in zip(self.exchanges, self.grads, strict=True):
            exchange.bucket.operands.update(grads)  # a step lets go of them
        copy_all(self.live, self.copies)

    def compress(self) -> None:
        for exchange, grads in zip(self.exchanges, self.grads, strict=True):
            hyper = self.optimizer._hyper(exchange.bucket.treatment.group)
            exchange.launch(grads, hyper, self.optimizer._exchanges.step)

    def accumulate(self) -> None:
        """The pass alone, which selects nothing."""
        for exchange in self.exchanges:
            bandwidth.move(
                exchange.bucket.segments, exchange.bucket.operands, exchange.velocity, exchange.residual,
                exchange.counts, exchange.marks, momentum=MOMENTUM, weight_decay=0.0,
            )  # fmt: skip

    def outcome(self) -> list[Tensor]:
        """States, and what is on the wire."""
        return [
            tensor.clone()
            for exchange in self.exchanges
            for tensor in (*exchange.bucket.states.values(), _on_the_wire(exchange))
        ]

    def check(self) -> None:
        """Kernels and twins do the same to this input.

        Raises:
            RuntimeError: they do not; nothing is timed.
        """
        self.reset()
        self.compress()
        fast = self.outcome()
        self.reset()
        with on_twins(self.exchanges):
            self.compress()
        if not all(map(torch.equal, fast, self.outcome())):
            raise RuntimeError(f"kernels differ from twins: {self.exchanges[0].__class__.__name__}")
        self.reset()


@dataclasses.dataclass(frozen=True)
class Case:
    """The shapes that are measured, and where records go."""

    name: str
    device: torch.device
    quick: bool
    results: Path

    def run(self) -> bool:
        clock, shapes = harness.clock_for(self.device), harness.SHAPES[self.name]()
        if self.quick:
            shapes = [torch.Size((300, 100)), torch.Size((100,)), torch.Size((61, 57))]
        params = [torch.nn.Parameter(torch.randn(shape, device=self.device)) for shape in shapes]
        threshold, done = 1.0, True
        for name, method in METHODS.items():
            try:
                with torch.no_grad():
                    held = Held(method(threshold), params, QUICK_STEPS if self.quick else STEPS)
                    held.check()
                    if name == "topk":
                        threshold = held.threshold
                    self._measure(clock, name, held)
            except Exception as error:
                log(f"{self.name}, {name}: FAILED: {type(error).__name__}: {error}")
                done = False
            finally:
                for param in params:
                    param.grad = None
        return done

    def _measure(self, clock: harness.Clock, name: str, held: Held) -> None:
        plain = [Variant("ms", held.compress, held.reset), Variant("accumulate", held.accumulate, held.reset)]
        variants = harness.ready(clock, plain)
        variants += harness.ready(clock, [dataclasses.replace(one, timing="graph") for one in plain])
        figures = harness.measure(clock, variants, *((2, 1) if self.quick else (40, 4)))
        by_name = {(v.name, v.timing): figure for v, figure in zip(variants, figures, strict=True)}
        more: dict[str, Any] = {
            "compressor": repr(held.compressor), "elements": held.numel, "bytes": held.pass_bytes,
            "payload_bytes": held.payload_bytes,
        }  # fmt: skip
        for timing in ("graph", "events"):
            ours, alone = by_name.get(("ms", timing)), by_name.get(("accumulate", timing))
            if ours is None or alone is None:
                continue
            self._append(name, "ms", ours.median, timing=timing, **_spread(ours), **more)
            self._append(name, "of_pass", ours.median / alone.median, timing=timing)
            log(f"{self.name}, {name}, {timing}: {ours.median:.4f} ms, {ours.median / alone.median:.2f} of the pass")
        if traced := launches.trace(clock, held.reset, held.compress):
            kernels = sum(activity.is_kernel for activity in traced) / len(held.exchanges)
            self._append(name, "kernels", kernels, timing="trace")

    def _append(self, provider: str, metric: str, value: float, **more: Any) -> None:
        records.append(
            self.results, bench="methods", case=self.name, provider=provider, metric=metric, value=value,
            quick=self.quick, command=f"python bench/methods.py --cases {self.name}", **more,
        )  # fmt: skip


def _on_the_wire(exchange: CompressedExchange) -> Tensor:
    return exchange.summed.whole if isinstance(exchange, RandomExchange) else exchange.buffers.own


def _spread(figure: Figure) -> dict[str, Any]:
    return {"p20": figure.quantile(0.2), "p80": figure.quantile(0.8), "repeats": len(figure.device_ms)}


def main() -> int:
    made = cases.parser(__doc__, "methods.jsonl")
    made.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    made.add_argument("--case", choices=CASES, help="measure this one, in this process")
    args = cases.parse(made)
    if args.case:
        device = torch.device(args.device)
        log(f"{args.case}: {'kernels' if runs_kernels(device) else 'twins'}")
        return 0 if Case(args.case, device, args.quick, args.results).run() else 1
    before = tables.count(args.results)
    failed = [case for case in args.cases.split(",") if not cases.case_apart("methods.py", args, case, SECONDS)]
    tables.show(args.results, before)
    print(f"\nrecords: {args.results}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

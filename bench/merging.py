"""What merging payloads takes on the GPU: W payloads of one bucket into one, by elements, density and W.

python bench/merging.py                          under a minute
python bench/merging.py --quick --device cpu     small sizes, twins, figures that mean nothing

merge    sum, list, select, pack, and the rest back into the residual: one merge, replayed from a graph and called
         plainly; its kernels one by one, by the profiler's trace. W is 2 in a tree; in a split an owner merges W pieces
apply    taking the same W payloads in as they are, as a gather does: what merging is against

Payloads are those of W optimizers in a world of one with TopK, after some steps of cubed normal noise.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

import cases
import harness
import launches
import records
from frozen import on_twins
from fusedcomp import SGD, TopK
from fusedcomp.merging import Merger, make_vector
from fusedcomp.sparse import SparseExchange
from harness import Variant, log
from trained import MOMENTUM

# Tensors of 327,680 elements, density, payloads; the last is an owner's range of the second on 8 ranks.
SIZES = ((20, 0.001, 2), (20, 0.05, 2), (80, 0.01, 2), (80, 0.05, 2), (3, 0.05, 8))
STEPS = 10
_TENSOR, _QUICK_TENSOR = (512, 640), (60, 50)


class Held:
    """Payloads of one bucket, and what merges them or takes them in."""

    def __init__(self, device: torch.device, tensors: int, shape: tuple[int, int], density: float, rows: int) -> None:
        params = [torch.nn.Parameter(torch.zeros(shape, device=device)) for _ in range(tensors)]
        self.optimizer = SGD(
            params, lr=1e-4, momentum=MOMENTUM, compressor=TopK(density), overlap=False, bucket_cap_mb=1e6
        )
        self.exchange: SparseExchange = next(iter(self.optimizer._exchanges))
        noise, packed = torch.Generator(device).manual_seed(0), []
        for _ in range(rows):
            for state in self.exchange.bucket.states.values():
                state.zero_()
            for _ in range(STEPS):
                for param in params:
                    param.grad = torch.randn(param.shape, generator=noise, device=device) ** 3
                self.optimizer.step()
            packed.append(self.exchange.buffers.own.clone())
        layout, selection = self.exchange.buffers.layout, self.exchange.selection
        segments = self.exchange.bucket.segments
        self.rows, self.k = layout.views(torch.stack(packed)), layout.k
        self.out = layout.views(torch.zeros_like(packed[0]).view(1, -1))
        make_vector(self.exchange.shared, segments.padded_numel, device)
        self.merger = Merger(self.exchange, segments, selection.ks, min(rows * layout.k, segments.numel))
        self.residuals = self.exchange.residual.view(1, -1)
        self.kept, self.lr = self.residuals.clone(), torch.full((1,), 1e-4, device=device)

    def reset(self) -> None:
        self.residuals.copy_(self.kept)

    def merge(self) -> None:
        self.merger.merge(self.rows, self.out, 1, self.residuals, 0, 1)

    def apply(self) -> None:
        exchange, rows = self.exchange, self.rows
        exchange.ops.apply.apply_payloads(
            exchange.bucket.segments, exchange.bucket.operands, rows.starts, rows.indices, rows.values, self.lr,
            None, exchange.shared.status, None, exchange.present, None, inverse_world=1.0 / rows.values.shape[0],
        )  # fmt: skip

    def check(self) -> None:
        """Kernels and twins merge this alike.

        Raises:
            RuntimeError: they do not; nothing is timed.
        """
        outcomes = []
        for run in (self.merge, self._merge_on_twins):
            self.reset()
            run()
            outcomes.append([t.clone() for t in (self.residuals, *self.out)])
        if not all(map(torch.equal, *outcomes)):
            raise RuntimeError("kernels differ from twins")
        self.reset()

    def _merge_on_twins(self) -> None:
        with on_twins([self.exchange]):
            self.merge()


def measure(device: torch.device, quick: bool, size: tuple[int, float, int], results: Path) -> None:
    (tensors, density, rows), clock = size, harness.clock_for(device)
    tensors, shape = (min(tensors, 4), _QUICK_TENSOR) if quick else (tensors, _TENSOR)
    with torch.no_grad():
        held = Held(device, tensors, shape, density, rows)
        held.check()
        plain = [Variant("merge", held.merge, held.reset), Variant("apply", held.apply)]
        variants = harness.ready(clock, plain)
        variants += harness.ready(clock, [dataclasses.replace(one, timing="graph") for one in plain])
        figures = harness.measure(clock, variants, *((2, 1) if quick else (40, 4)))
        kernels = launches.durations(clock, held.reset, held.merge, 5)
    elements = held.exchange.bucket.segments.numel
    case, more = f"flat{elements / 1e6:.3g}m", {"elements": elements, "density": density, "k": held.k, "ranks": rows}

    def append(provider: str, metric: str, value: float, **fields: Any) -> None:
        records.append(
            results, bench="merging", case=case, provider=provider, metric=metric, value=value, quick=quick,
            command="python bench/merging.py", **fields, **more,
        )  # fmt: skip

    for variant, figure in zip(variants, figures, strict=True):
        spread = {"p20": figure.quantile(0.2), "p80": figure.quantile(0.8), "repeats": len(figure.device_ms)}
        append(variant.name, "ms", figure.median, timing=variant.timing, **spread)
        log(f"{case}, {density:g}, {rows} payloads: {variant.name}, {variant.timing}: {figure.median:.4f} ms")
    for name, us in kernels:
        append(name, "us", us, timing="trace")
        log(f"  {us:8.1f} us  {name}")


def main() -> None:
    args = cases.parse(cases.parser(__doc__, "merging.jsonl"))
    for size in SIZES:
        measure(torch.device(args.device), args.quick, size, args.results)
    print(f"\nrecords: {args.results}")


if __name__ == "__main__":
    main()

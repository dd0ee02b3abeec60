"""Fused kernels against eager torch on your GPU: one table.

python bench/compare_eager.py                        ResNet-50
python bench/compare_eager.py --model gpt2           GPT-2 small (124 M)
python bench/compare_eager.py --model 50e6           one tensor of 50 million elements
python bench/compare_eager.py --density 0.01
python bench/compare_eager.py --device cpu --quick   a smoke test without a GPU; its figures mean nothing

A model is trained for some steps, so that velocity and residual look as they do in training. Then the same step is
taken by this package's kernels, by eager torch (one flat vector and torch.topk: kinder to torch than a loop over
tensors), and by torch.compile of that. Before anything is timed, the kernels' results are compared with those of their
plain-torch twins, bit for bit. Times are medians from cold L2, device time of a replayed CUDA graph where there can be
one ("*": plain calls, because it asks the device for numbers in between). GB/s: the least traffic the fused row can
have over its time; the last line is what a device copy reaches.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import harness
import tables
import workloads
from compress import flat_dgc, per_tensor_dgc
from eager import FlatApply
from frozen import RANKS, Frozen, gate, runs_kernels
from fusedcomp.kernels.segments import PAGE
from harness import Variant
from trained import MOMENTUM, Config, Trained


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of the table: the same work by three means."""

    what: str
    nbytes: float
    fused: Variant
    eager: Variant | None = None
    compiled: Variant | None = None


def both(*calls: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def entries(frozen: Frozen) -> list[tuple[Tensor, Tensor]]:
    """(values, positions in the compact flat order) of every rank's payload of the one sparse bucket."""
    exchange = frozen.sparse[0]
    segments, payloads = exchange.bucket.segments, exchange.buffers.payloads
    found = []
    for rank in range(frozen.ranks):
        starts = payloads.starts[rank].long()
        page = torch.repeat_interleave(torch.arange(segments.num_pages, device=starts.device), starts.diff())
        padded = page * PAGE + (payloads.indices[rank, : len(page)].long() & 0xFFFF)
        firsts = torch.tensor([w.start for w in segments.slices], device=starts.device)
        segment = torch.searchsorted(firsts, padded, right=True) - 1
        compact = torch.tensor([w.start for w in segments.compact_slices], device=starts.device)
        found.append((payloads.values[rank, : len(page)].float(), padded - firsts[segment] + compact[segment]))
    return found


def lines(frozen: Frozen) -> list[Line]:
    flat, by_tensor = flat_dgc(frozen), per_tensor_dgc(frozen)
    params = [p for e in frozen.sparse for p in e.bucket.params]
    param = torch.cat([p.detach().as_strided((p.numel(),), (1,)) for p in params])
    take = FlatApply(param, entries(frozen), torch.full((), 1e-3, device=param.device))
    fused_sgd = torch.optim.SGD(params, lr=0.0, momentum=MOMENTUM, fused=True)
    foreach_sgd = torch.optim.SGD(params, lr=0.0, momentum=MOMENTUM, foreach=True)
    moved, taken = frozen.pass_bytes(0.0), RANKS * frozen.k * 14
    apply = both(*(lambda e=e: e.apply(frozen.hyper(e, 0.0)) for e in frozen.sparse))
    step = Variant("step", frozen.sparse_step, frozen.reset)
    resets = both(flat.reset, take.reset)
    return [
        Line(
            "compress: momentum, residual, top-k, pack", moved,
            Variant("compress", frozen.compress, frozen.reset_states),
            Variant("eager compress", flat.run, flat.reset),
            Variant("compiled compress", flat.compiled, flat.reset),
        ),
        Line(
            "compress, eager as DGC's authors: per tensor", moved,
            Variant("compress again", frozen.compress, frozen.reset_states),
            Variant("eager per tensor", by_tensor.run, by_tensor.reset),
        ),
        Line(
            f"apply what {frozen.ranks} ranks sent", taken,
            Variant("apply", apply, frozen.reset),
            Variant("eager apply", take.run, take.reset),
            Variant("compiled apply", take.compiled, take.reset),
        ),
        Line(
            "whole step", moved + taken, step,
            Variant("eager step", both(flat.run, take.run), resets),
            Variant("compiled step", both(flat.compiled, take.compiled), resets),
        ),
        Line("for comparison: torch SGD, fused, dense", 20 * frozen.numel_sparse, Variant("sgd", fused_sgd.step)),
        Line("for comparison: torch SGD, foreach, dense", 20 * frozen.numel_sparse, Variant("sgd2", foreach_sgd.step)),
    ]  # fmt: skip


def measure(clock: harness.Clock, wanted: Sequence[Line], repeats: int, rounds: int) -> dict[str, tuple[float, str]]:
    """Median and mark of every variant; by graph where that works."""
    variants = [v for line in wanted for v in (line.fused, line.eager, line.compiled) if v is not None]
    plain = [v for v in variants if v.name == "eager per tensor"]
    kept = harness.ready(clock, [dataclasses.replace(v, timing="graph") for v in variants if v not in plain])
    missing = [v for v in variants if v.name not in {k.name for k in kept}]
    kept += harness.ready(clock, missing)
    figures = harness.measure(clock, kept, repeats, rounds)
    return {v.name: (f.median, "" if v.timing == "graph" else "*") for v, f in zip(kept, figures, strict=True)}


def table(wanted: Sequence[Line], measured: dict[str, tuple[float, str]]) -> list[list[str]]:
    """what, eager ms, torch.compile ms, fused ms, speed-up, GB/s."""
    rows = []
    for line in wanted:
        fused = measured.get(line.fused.name)
        eager, compiled = (measured.get(v.name) if v else None for v in (line.eager, line.compiled))
        cells = ["-" if t is None else f"{t[0]:.3f}{t[1]}" for t in (eager, compiled, fused)]
        speedup = f"{eager[0] / fused[0]:.1f}x" if eager and fused else "-"
        rate = f"{harness.gb_per_s(line.nbytes, fused[0]):.0f}" if fused else "-"
        rows.append([line.what, *cells, speedup, rate])
    return rows


def workload_of(model: str, device: torch.device, quick: bool) -> tuple[Any, float]:
    if model in ("resnet50", "gpt2"):
        return workloads.WORKLOADS[model](device, quick), workloads.LEARNING_RATES[model]
    numel = 300_000 if quick else int(float(model))
    return workloads.HeavyTailed(device, quick, numel), workloads.LEARNING_RATES["flat340m"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="resnet50, gpt2, or a number of elements")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    args = parser.parse_args()
    if args.model not in ("resnet50", "gpt2"):
        try:
            float(args.model)
        except ValueError:
            parser.error(f"--model: resnet50, gpt2 or a number of elements, got {args.model!r}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device found; --device cpu --quick is a smoke test without one")
    return args


def main() -> int:
    args = arguments()
    device, clock = torch.device(args.device), harness.clock_for(torch.device(args.device))
    torch.manual_seed(0)
    workload, lr = workload_of(args.model, device, args.quick)
    trained = Trained(workload, lr, 5 if args.quick else 100)
    config = Config("fp32", density=args.density, keep=RANKS)
    frozen = Frozen(config, *trained.continue_with(config, cap_mb=1e6))
    with torch.no_grad():
        gate(frozen, 0.0)
        checked = (
            "kernels equal their plain-torch twins" if runs_kernels(device) else "no GPU: twins against themselves"
        )
        print(f"correctness: {checked}, bit for bit, in states, payload and parameters")
        frozen.reset()
        wanted = lines(frozen)
        repeats, rounds = (2, 1) if args.quick else (30, 3)
        measured = measure(clock, wanted, repeats, rounds)
        copy = harness.gb_per_s(harness.copy_bytes(clock), harness.copy_rate(clock, repeats).median)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu, where twins stand in for the kernels"
    tables.print_table(
        f"{args.model}: {frozen.numel_sparse / 1e6:.1f} M elements compressed at density {args.density:g}, "
        f"{sum(len(e.bucket.params) for e in frozen.sparse)} tensors, fp32; {card}, torch {torch.__version__}",
        ("what", "eager ms", "torch.compile ms", "fused ms", "speed-up", "GB/s"),
        [*table(wanted, measured), ["device copy", "", "", "", "", f"{copy:.0f}"]],
    )
    if any(mark for _, mark in measured.values()):
        print("* plain calls, the host's time included: no CUDA graph can hold it")
    return 0


if __name__ == "__main__":
    sys.exit(main())

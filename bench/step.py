"""One whole compressed step, 8 ranks' payloads applied, against torch's optimizers.

python bench/step.py                          all cases
python bench/step.py --quick --device cpu     small sizes, twins, figures that mean nothing

ms                 the exchanges' own code, replayed from a graph and called plainly
optimizer_ms       optimizer.step(), and host_us, graph_host_us: until that call, or its graph's replay, returned
of_fused, ...      quotient of ms and torch.optim.SGD's; of_lars: and the fastest dense LARS's (lars.py)
kernels_per_bucket of the sparse buckets, by the profiler's trace; launch_us: one by one

torch.optim runs with lr=0: the same work, unchanged parameters.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

import cases
import launches
from cases import Case, Figures, Timed
from frozen import DECAY, DECAYS, RANKS, Frozen
from harness import log
from lars import COEFFICIENT, DenseLARS
from trained import MOMENTUM

USES = ("fp32", "fp32_guarded", "bf16", "fp32_25mb", "lars_fp32")
_TRACES = 5


def measure(case: Case, frozen: Frozen) -> None:
    """This configuration's step beside the dense optimizers it stands in for."""
    if frozen.config.kind == "LARS":
        measure_lars(case, frozen)
        return
    torchs = {kind: torch_sgd(frozen, kind) for kind in ("fused", "foreach")}
    figures = case.time("step", [*ours(frozen), *torchs.values(), front_door(frozen)])
    for decay in DECAYS:
        for kind in torchs:
            provider = frozen.provider(decay)
            case.append_ratios("step", provider, f"of_{kind}", figures, f"{provider}/ms", f"torch_sgd_{kind}/ms")
    record_host(case, frozen, figures)


def ours(frozen: Frozen) -> list[Timed]:
    dense = 28 * frozen.numel_dense  # packed 8, updated 20
    applied = frozen.ranks * frozen.k * (6 + 8)
    return [
        Timed(
            frozen.provider(decay), functools.partial(frozen.whole_step, decay), frozen.reset,
            frozen.pass_bytes(decay) + dense + applied, fields={"ranks": frozen.ranks},
        )
        for decay in DECAYS
    ]  # fmt: skip


def front_door(frozen: Frozen) -> Timed:
    return Timed(frozen.provider(0.0), frozen.optimizer_step, frozen.reset, metric="optimizer_ms")


def torch_sgd(frozen: Frozen, kind: str) -> Timed:
    """``step`` of torch.optim.SGD on the same parameters and gradients, with a momentum buffer that exists already."""
    params = [p for e in frozen.exchanges for p in e.bucket.params]
    optimizer = torch.optim.SGD(params, lr=0.0, momentum=MOMENTUM, **{kind: True})
    return Timed(f"torch_sgd_{kind}", optimizer.step, nbytes=20 * (frozen.numel_sparse + frozen.numel_dense))


# ---- LARS ----------------------------------------------------------------------------------------------------------


def measure_lars(case: Case, frozen: Frozen) -> None:
    """With weight decay, as LARS is used; against the fastest dense one."""
    provider = frozen.provider(0.0)
    step = next(one for one in ours(frozen) if one.provider == frozen.provider(DECAY))
    dense = dense_lars(frozen)
    figures = case.time("step", [dataclasses.replace(step, provider=provider), *dense, front_door(frozen)])
    for timing in ("events", "graph"):
        times = {one.provider: figures[one.key, timing].median for one in dense if (one.key, timing) in figures}
        if times and (f"{provider}/ms", timing) in figures:
            fastest = min(times, key=lambda name: times[name])
            value = figures[f"{provider}/ms", timing].median / times[fastest]
            case.append("step", provider, "of_lars", value, timing=timing, against=fastest)
    record_host(case, frozen, figures)


def dense_lars(frozen: Frozen) -> list[Timed]:
    grads = [g for of_bucket in frozen.grads for g in of_bucket]
    dense = DenseLARS(frozen.params, grads, MOMENTUM, DECAY)
    nbytes = 28 * (frozen.numel_sparse + frozen.numel_dense)
    kinds = {"foreach": dense.foreach, "foreach_fused": dense.fused, "compiled": dense.compiled}
    timed = [Timed(f"lars_{kind}", run, dense.reset, nbytes) for kind, run in kinds.items()]
    timm = timm_lars(frozen)
    return timed if timm is None else [*timed, Timed("lars_timm", timm[0], nbytes=nbytes, fields={"timm": timm[1]})]


def timm_lars(frozen: Frozen) -> tuple[Callable[[], Any], str] | None:
    try:
        import timm
        from timm.optim import Lars

        params = [p for e in frozen.exchanges for p in e.bucket.params]
        optimizer = Lars(params, lr=0.0, momentum=MOMENTUM, weight_decay=DECAY, trust_coeff=COEFFICIENT)
        return optimizer.step, timm.__version__
    except Exception as error:  # not installed, or built for another torch
        log(f"left out: lars_timm: {type(error).__name__}: {error}")
        return None


# ---- host and launches ---------------------------------------------------------------------------------------------


def record_host(case: Case, frozen: Frozen, figures: Figures) -> None:
    """How long ``optimizer.step()`` keeps the host: the device is idle or behind, so that nothing waits for it."""
    providers = {frozen.provider(0.0): "optimizer_ms", "torch_sgd_fused": "ms", "torch_sgd_foreach": "ms"}
    more = {"buckets_sparse": len(frozen.sparse), "buckets_dense": len(frozen.dense)}
    for timing, metric in (("events", "host_us"), ("graph", "graph_host_us")):
        for provider, measured in providers.items():
            figure = figures.get((f"{provider}/{measured}", timing))
            if figure is not None:
                case.append("step", provider, metric, 1e3 * figure.host_median, timing="host", **more)


def trace(case: Case, frozen: Frozen) -> None:
    """Kernels per sparse bucket, and what each launch of the whole step takes; nothing where nothing can be traced."""
    provider = frozen.provider(0.0)
    sparse = launches.trace(case.clock, frozen.reset, frozen.sparse_step)
    if not sparse:
        log("no trace: kernels are not counted")
        return
    kernels = sum(activity.is_kernel for activity in sparse)
    case.append(
        "step", provider, "kernels_per_bucket", kernels / len(frozen.sparse), kernels=kernels,
        copies_and_fills=len(sparse) - kernels, buckets_sparse=len(frozen.sparse),
    )  # fmt: skip
    for launch, us in launches.durations(case.clock, frozen.reset, frozen.whole_step, _TRACES):
        case.append("step", provider, "launch_us", us, launch=launch, timing="trace", ranks=RANKS)
    frozen.reset()


if __name__ == "__main__":
    sys.exit(cases.main("step.py", __doc__, [sys.modules[__name__]]))

"""The compress side of what is compressed: sample, pass, refine, pack.

python bench/compress.py                          all cases
python bench/compress.py --quick --device cpu     small sizes, twins, figures that mean nothing

"block" is BlockTopK, whose pass selects too; all others are TopK.

pass_ms          one launch of the pass; ``of_twin`` is the time of its bandwidth twin (bandwidth.py) over it, 1 at best
ms               everything; against ``accumulate``, the pass without selection, it is ``selection_ratio``
ms of the rest   eager, torch.compile'd and per-tensor DGC (eager.py); torch.topk and CUB's DeviceTopK of |residual|,
                 which are only the selection
speedup          how many times longer a baseline takes than ``ms``
"""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import bandwidth
import cases
import cub
from cases import Case, Timed
from eager import FlatDGC, PerTensorDGC
from frozen import DECAYS, Frozen, copy_all
from fusedcomp.exchange import Exchange
from harness import log
from trained import MOMENTUM

USES = ("fp32", "bf16", "fp32_d0.01", "block")


class Passes:
    """Only the launch of the pass per sparse bucket, in place, its arguments as the pipeline made them."""

    def __init__(self, frozen: Frozen, weight_decay: float) -> None:
        self.frozen, self.decay = frozen, weight_decay
        self.calls: list[tuple[Callable[[], Any], dict[str, Any]]] = []
        self.thresholds: list[Tensor] = []
        frozen.reset()
        with ExitStack() as stack:
            for exchange in frozen.sparse:
                stack.enter_context(patch.object(exchange, "ops", self._noting(exchange)))
            frozen.compress(weight_decay)

    def _noting(self, exchange: Exchange) -> SimpleNamespace:
        """The exchange's launchers, of which the pass notes its arguments and the thresholds it is given."""
        launcher = "compress_blocks" if self.frozen.config.blocks else "compress"
        real = getattr(exchange.ops.compress, launcher)

        def compress(*args: Any, **numbers: Any) -> None:
            call = functools.partial(real, *args, **numbers)
            named = {name: getattr(exchange, name) for name in ("thresholds", "counts", "marks")}
            named |= inspect.signature(real).bind(*args, **numbers).arguments
            self.calls.append((call, named))
            self.thresholds.append(named["thresholds"].clone())
            call()

        noting = SimpleNamespace(**(vars(exchange.ops.compress) | {launcher: compress}))
        return SimpleNamespace(**(vars(exchange.ops) | {"compress": noting}))

    def reset(self) -> None:
        """The candidates' own selection has overwritten the thresholds since they were sampled."""
        self.frozen.reset_states()
        copy_all([named["thresholds"] for _, named in self.calls], self.thresholds)

    def compress(self) -> None:
        for call, _ in self.calls:
            call()

    def move(self, momentum: float | None) -> None:
        for _, named in self.calls:
            bandwidth.move(
                named["segments"], named["operands"], named["velocity_out"], named["residual_out"],
                named["counts"], named["marks"], momentum=momentum, weight_decay=self.decay,
            )  # fmt: skip


def measure(case: Case, frozen: Frozen) -> None:
    """The pass and the whole, with and without weight decay; at density 0.001 and fp32 the baselines as well."""
    record_counts(case, frozen)
    timed = [one for decay in DECAYS for one in ours(frozen, decay)]
    if frozen.config.name == "fp32":
        timed += baselines(frozen)
    figures = case.time("compress", timed)
    for decay in DECAYS:
        provider, twin, without = frozen.provider(decay), _twin(frozen, decay), _accumulate(frozen, decay)
        for timing, ratio in figures.ratios(f"{twin}/ms", f"{provider}/pass_ms").items():
            case.append("compress", provider, "of_twin", ratio, timing=timing, against=twin)
        case.append_ratios("compress", provider, "selection_ratio", figures, f"{provider}/ms", f"{without}/ms")
    for baseline in ("eager", "eager_per_tensor", "compiled"):
        for timing, ratio in figures.ratios(f"{baseline}/ms", f"{frozen.provider(0.0)}/ms").items():
            case.append("compress", frozen.provider(0.0), "speedup", ratio, timing=timing, against=baseline)


def _twin(frozen: Frozen, decay: float) -> str:
    """Provider of the bandwidth twin: fp32 goes without saying."""
    return frozen.provider(decay).replace("fusedcomp", "bandwidth_twin").replace("_fp32", "")


def _accumulate(frozen: Frozen, decay: float) -> str:
    return frozen.provider(decay).replace("fusedcomp", "accumulate")


def ours(frozen: Frozen, decay: float) -> list[Timed]:
    provider, nbytes, passes = frozen.provider(decay), frozen.pass_bytes(decay), Passes(frozen, decay)
    return [
        Timed(provider, passes.compress, passes.reset, nbytes, "pass_ms"),
        Timed(_twin(frozen, decay), lambda: passes.move(None), passes.reset, nbytes),
        Timed(_accumulate(frozen, decay), lambda: passes.move(MOMENTUM), passes.reset, nbytes),
        Timed(provider, lambda: frozen.compress(decay), frozen.reset_states, nbytes),
    ]


def baselines(frozen: Frozen) -> list[Timed]:
    """In eager torch and CUB, of the same states and gradients."""
    frozen.reset()
    flat, by_tensor = flat_dgc(frozen), per_tensor_dgc(frozen)
    moved, ranked = frozen.pass_bytes(0.0), 4 * frozen.numel_sparse
    timed = [
        Timed("eager", flat.run, flat.reset, moved),
        Timed("compiled", flat.compiled, flat.reset, moved, fields={"compiler": "torch.compile"}),
        Timed(
            "eager_per_tensor", by_tensor.run, by_tensor.reset, moved, timings=("events",),
            fields={"source": "synxlin/deep-gradient-compression b929ca7"},
        ),
        Timed("torch_topk", flat.top_k, nbytes=ranked),
    ]  # fmt: skip
    try:
        call = cub.top_k(flat.magnitudes, frozen.k)
        check_cub(flat, call)
        timed.append(Timed("cub_topk", call, nbytes=ranked, fields={"cccl": cub.version()}))
    except cub.Unavailable as error:
        log(f"left out: cub_topk: {error}")
    return timed


def flat_dgc(frozen: Frozen) -> FlatDGC:
    velocity, residual, grad = (torch.cat(part) for part in zip(*frozen.flat_states(), strict=True))
    return FlatDGC(velocity, residual, grad, frozen.k, MOMENTUM)


def per_tensor_dgc(frozen: Frozen) -> PerTensorDGC:
    velocities, residuals, grads = zip(*frozen.flat_states(), strict=True)
    return PerTensorDGC(velocities, residuals, grads, frozen.config.density, MOMENTUM)


def check_cub(flat: FlatDGC, call: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """It finds what torch.topk finds; which of equal magnitudes it takes is left open."""
    values, indices = call()
    expected = flat.top_k().values
    if not torch.equal(values.sort().values, expected.sort().values):
        raise cub.Unavailable("its result differs from torch.topk's")
    if not torch.equal(flat.magnitudes[indices.long()], values):
        raise cub.Unavailable("its indices do not belong to its values")


def record_counts(case: Case, frozen: Frozen) -> None:
    """What the selection did with this input; and whether eager top-k sends the same magnitudes."""
    frozen.reset()
    frozen.compress()
    metrics = [e.metrics() for e in frozen.sparse]
    counts = {
        "nnz": sum(int(m["nnz"]) for m in metrics),
        "overflow": sum(int(m["overflow"]) for m in metrics),
        "payload_bytes": sum(e.buffers.layout.nbytes for e in frozen.sparse),
        "sent_bytes": sum(e.buffers.layout.nbytes for e in frozen.sparse)
        + sum(e.reduced.whole.nbytes for e in frozen.dense),
        "dense_bytes": 4 * (frozen.numel_sparse + frozen.numel_dense),
    }
    if all("candidates" in m for m in metrics):
        counts["candidates_per_k"] = sum(int(m["candidates"]) for m in metrics) / frozen.k
    if len(frozen.sparse) == 1 and not frozen.config.half and not frozen.config.blocks:
        sent = frozen.sparse[0].buffers.layout.views(frozen.sparse[0].buffers.own.view(1, -1)).values[0].abs()
        frozen.reset()
        values, _ = flat_dgc(frozen).run()
        counts["equals_topk"] = int(torch.equal(sent.sort().values, values.abs().sort().values))
    frozen.reset()
    for metric, value in counts.items():
        case.append("compress", frozen.provider(0.0), metric, value)
    log(", ".join(f"{metric} {value:.4g}" for metric, value in counts.items()))


if __name__ == "__main__":
    sys.exit(cases.main("compress.py", __doc__, [sys.modules[__name__]]))

"""Every launch of the step's sequence, noted as the pipeline makes it, and timed where it stands."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import harness
from fusedcomp.kernels import _launch, apply, compress, dense, headers, norms, refine
from fusedcomp.pipeline import Exchange, SparseExchange

LAUNCHING = (apply, compress, dense, headers, norms, refine)

Launches = list[tuple[str, Callable[[], Any]]]  # label, and the launch once more


def compiled_variants() -> int:
    """Kernels compiled or fetched from Triton's cache so far; 0 where Triton keeps its books differently."""
    jitted = {k for module in LAUNCHING for name, k in vars(module).items() if name.endswith("_kernel")}
    try:
        return sum(len(cache[0]) for kernel in jitted for cache in kernel.device_caches.values())
    except Exception:  # the books are Triton's own and differ between versions
        return 0


class LaunchRecorder(TorchDispatchMode):
    """Notes every launch of a sequence as it runs: Triton kernels at ``launch``, torch's own at the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, Callable[[], Any]]] = []
        self._inside = False
        self._patches = ExitStack()

    def __enter__(self) -> "LaunchRecorder":
        for module in LAUNCHING:
            self._patches.enter_context(patch.object(module, "launch", self._launch))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _launch(self, kernel: Any, programs: int, on: Tensor, *args: Any, **more: Any) -> None:
        def again() -> None:
            _launch.launch(kernel, programs, on, *args, **more)

        self._inside, before = True, self._inside
        try:
            again()
        finally:
            self._inside = before
        self.noted.append((getattr(kernel, "__name__", None) or kernel.fn.__name__, again))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside and (func._schema.is_mutable or not getattr(func, "is_view", True)):
            name = func._schema.name.removeprefix("aten::")
            self.noted.append((f"torch {name}", lambda: func(*args, **kwargs)))
        return func(*args, **kwargs)


def record_launches(
    exchanges: Sequence[Exchange], grads: Sequence[Any], run: Callable[[Exchange, Any], None]
) -> Launches:
    """The launches of ``run`` over all exchanges, labelled by their place in an exchange's sequence."""
    noted: Launches = []
    for exchange, own in zip(exchanges, grads, strict=True):
        with LaunchRecorder() as recorder:
            run(exchange, own)
        kind = "sparse" if isinstance(exchange, SparseExchange) else "dense"
        noted += [(f"{kind} {i:02d} {name}", again) for i, (name, again) in enumerate(recorder.noted, 1)]
    return noted


def time_launches(
    clock: harness.Clock, reset: Callable[[], None], launches: Launches, repeats: int
) -> dict[str, harness.Figure]:
    """Each launch where it stands in the sequence, with L2 as its predecessors left it: a mark between every two.

    Equal labels of several buckets are added up. A mark costs about a microsecond, so that the sum exceeds the graph's
    time. The device is held until the host has queued the whole sequence, or its slowness would be in the figures.
    """
    begin = time.perf_counter()
    _marked(clock, launches)
    host_seconds = time.perf_counter() - begin
    clock.synchronise()
    samples: dict[str, list[float]] = {label: [] for label, _ in launches}
    for _ in range(repeats):
        reset()
        clock.flush("write")
        clock.hold(1.5 * host_seconds)
        marks = _marked(clock, launches)
        clock.synchronise()
        sums = dict.fromkeys(samples, 0.0)
        for (label, _), start, end in zip(launches, marks, marks[1:], strict=False):
            sums[label] += clock.between(start, end)
        for label, total in sums.items():
            samples[label].append(total)
    return {label: harness.Figure(tuple(values), (0.0,)) for label, values in samples.items()}


def _marked(clock: harness.Clock, launches: Launches) -> list[Any]:
    marks = [clock.mark()]
    for _, again in launches:
        again()
        marks.append(clock.mark())
    return marks

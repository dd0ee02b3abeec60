"""The backward contract: when a bucket is launched, what must not be touched until ``step()``, and what if it is.

Between ``backward()`` and ``step()`` gradients and parameters belong to the optimizer. A hook on every parameter
notes its gradient and the stream it was written on; buckets launch strictly in order, the same on every rank, each
when all its parameters that require grad have fired. What did not fire is launched in ``step()``, and so is always the
last bucket: it completes with backward itself, so that waiting costs nothing, and it leaves a way to tell the peers.

A rank that breaks the contract does not leave its peers waiting: it takes part in the rest of the step with empty
payloads marked "failed", all ranks apply what was sent, and then every rank raises.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fusedcomp.buckets import Bucket, same_layout


class Owner(Protocol):
    """What the backward contract asks of an optimizer."""

    def admit(self, index: int) -> None:
        """Raise if bucket number ``index`` cannot be launched now."""

    def launch(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Start the exchange of bucket number ``index`` with these gradients."""

    def measure(self, grads: Sequence[Sequence[Tensor | None]]) -> None:
        """Look at all gradients at once, before the first bucket is launched in ``step()``."""

    def fail(self, message: str) -> None:
        """Finish the step on behalf of a rank that failed, then raise with the message."""

    def name_of(self, param: Tensor) -> str:
        """A parameter's name for messages."""


class Sampler(Protocol):
    """What draws the gradients that are computed in a step (jointspar.py)."""

    def admit(self) -> None:
        """Fail the step if it was not drawn for."""

    def end(self) -> None:
        """The step is over, on all ranks, however it went."""


# The hook of the newest optimizer of every parameter.
_HOOKS = WeakTensorKeyDictionary()


class _Watched:
    """What is known of one parameter: where it belongs, how it lay in memory, its hook and this step's gradient."""

    __slots__ = ("bucket", "dtype", "grad", "hook", "param", "shape", "stride", "version")

    def __init__(self, param: Tensor, bucket: int, layout: tuple[torch.Size, tuple[int, ...]]) -> None:
        self.param, self.bucket, self.dtype = param, bucket, param.dtype
        self.shape, self.stride = layout
        self.hook: Any = None
        self.grad: Tensor | None = None  # handed over in this step; held, so that its memory is not reused
        self.version = 0


class Backward:
    """Hooks, launch order and misuse of one optimizer.

    Args:
        buckets: in launch order.
        owner: the optimizer; held weakly, so that one its user has dropped is gone at once, and its hooks with it.
        overlap: launch during backward; off, everything is launched in ``step()``.
        measures: let the owner look at all gradients before the first launch; needs ``overlap`` off.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        owner: Owner,
        overlap: bool,
        measures: bool,
    ) -> None:
        self.buckets, self.overlap, self.measures = buckets, overlap, measures
        self._owner = weakref.ref(owner)
        # Lists and slots, no dicts of tensors: this is host time of every parameter in every step.
        self._watched = [
            [_Watched(p, i, layout) for p, layout in zip(bucket.params, bucket.layouts, strict=True)]
            for i, bucket in enumerate(buckets)
        ]
        self._paused = False
        device = buckets[0].device if buckets else torch.device("cpu")
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device_index = device.index if device.type == "cuda" else -1  # get_device() of a CPU tensor
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._fired: list[int] = []
        self._expected: list[int] = []
        self.next = 0  # number of buckets launched in this step
        self.reset()

    def reset(self) -> None:
        """Ready for the next backward."""
        self._streams.clear()
        self.next = 0
        self._fired = [0] * len(self.buckets)
        self._expected = [0] * len(self.buckets)
        for index, bucket in enumerate(self._watched):
            for watched in bucket:
                watched.grad = None
                if watched.param.requires_grad:
                    self._expected[index] += 1
                    if self.overlap and watched.hook is None:  # new, or frozen so far
                        self._take_over(watched)

    def _take_over(self, watched: _Watched) -> None:
        """Register our hook, in place of that of an earlier optimizer of the same parameter."""
        param = watched.param
        if param in _HOOKS:
            _HOOKS[param].remove()
        weak = weakref.WeakMethod(self._hook)

        def hook(_: Tensor) -> None:
            method = weak()
            if method is not None:
                method(watched)

        watched.hook = _HOOKS[param] = param.register_post_accumulate_grad_hook(hook)

    @property
    def owner(self) -> Owner:
        """The optimizer, which is there whenever one of its own methods or a live hook asks."""
        owner = self._owner()
        assert owner is not None
        return owner

    def remove_hooks(self) -> None:
        """Leave the parameters as they were before this optimizer."""
        for bucket in self._watched:
            for watched in bucket:
                if watched.hook is not None:
                    watched.hook.remove()
                    watched.hook = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients accumulate and are not sent."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _hook(self, watched: _Watched) -> None:
        if self.side is not None:  # the gradient's stream need not be the one backward was called on
            stream = torch._C._cuda_getCurrentRawStream(self._device_index)
            if stream not in self._streams:
                self._streams[stream] = torch.cuda.current_stream(self._device_index)
        if self._paused:
            return
        index = watched.bucket
        if index < self.next or self._is_complete(index):
            self.owner.fail(
                f"parameter {self.owner.name_of(watched.param)} received a gradient after its bucket was complete: a "
                "second backward() before step(), a layer used by several reentrant checkpoints, or a parameter "
                "unfrozen since zero_grad(). Accumulate, or keep gradients away that are not for this optimizer, "
                "inside optimizer.no_sync(); use checkpoint(use_reentrant=False); unfreeze before zero_grad(); or "
                "build the optimizer with overlap=False"
            )
        grad = watched.param.grad
        if grad is None:
            return
        if watched.grad is None:
            self._fired[index] += 1
        watched.grad, watched.version = grad, grad._version
        while self.next < len(self.buckets) - 1 and (self._is_complete(self.next) or self._is_idle(self.next)):
            self.launch_next()

    def _is_complete(self, index: int) -> bool:
        return self._fired[index] == self._expected[index] > 0

    def _is_idle(self, index: int) -> bool:
        """Does no parameter require grad, then as now?"""
        return self._expected[index] == 0 and not any(w.param.requires_grad for w in self._watched[index])

    @property
    def started(self) -> bool:
        """Has a gradient been handed over since the last step?"""
        return self.next > 0 or any(self._is_complete(index) for index in range(len(self.buckets)))

    @torch.no_grad()
    def launch_next(self) -> None:
        """Launch the next bucket in order, after everything queued on the streams that wrote gradients."""
        index = self.next
        self.owner.admit(index)  # before the side stream has anything to wait for
        self._refuse_changed(self._watched[index])
        with self._beside():
            self.owner.launch(index, [self._gradient(w) for w in self._watched[index]])
        self.next += 1  # not before: a launch that raised has sent nothing

    @torch.no_grad()
    def launch_rest(self) -> None:
        """Launch all that is left, in ``step()``."""
        if self.measures:
            for bucket in self._watched:
                self._refuse_changed(bucket)
            with self._beside():
                self.owner.measure([[self._gradient(w) for w in bucket] for bucket in self._watched])
        while self.next < len(self.buckets):
            self.launch_next()

    def _refuse_changed(self, bucket: Sequence[_Watched]) -> None:
        for watched in bucket:
            if (change := self._change(watched)) is not None:
                self.owner.fail(change)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the side stream, after everything queued on the streams that wrote gradients."""
        if self.side is None:
            yield
            return
        current = torch.cuda.current_stream(self._device_index)
        for stream in {**self._streams, current.cuda_stream: current}.values():
            self.side.wait_stream(stream)
        with torch.cuda.stream(self.side):
            yield

    def changed(self) -> str | None:
        """What became of the first parameter that is not as it was when the optimizer was built; None: all are."""
        return next((c for bucket in self._watched for w in bucket if (c := self._change(w)) is not None), None)

    def _change(self, watched: _Watched) -> str | None:
        param, grad = watched.param, watched.param.grad
        if param.shape != watched.shape or param.stride() != watched.stride:
            return (
                f"parameter {self.owner.name_of(param)} has shape {tuple(param.shape)} and stride {param.stride()}; "
                f"when the optimizer was built it had {tuple(watched.shape)} and {watched.stride}: build it after "
                "changing the model"
            )
        for tensor in (param, grad):
            if tensor is not None and (tensor.dtype is not watched.dtype or tensor.get_device() != self._device_index):
                return (
                    f"parameter {self.owner.name_of(param)} or its gradient is {tensor.dtype} on {tensor.device}; the "
                    f"optimizer was built for {watched.dtype} on {self.buckets[watched.bucket].device}: build it after "
                    "moving or converting the model"
                )
        return None

    def _gradient(self, watched: _Watched) -> Tensor | None:
        """The gradient in the parameter's memory order; one copy where autograd left another layout."""
        param = watched.param
        grad = param.grad
        if grad is None:
            return None
        if grad.layout != torch.strided:
            raise NotImplementedError(
                f"the gradient of parameter {self.owner.name_of(param)} is sparse; build the layer with sparse=False "
                "(the compressor sends only the rows that matter)"
            )
        if grad.stride() == watched.stride or same_layout(grad, param):
            return grad
        return torch.empty_like(param, requires_grad=False).copy_(grad)

    def check_untouched(self) -> None:
        """Gradients that were handed over must be what they were."""
        for bucket in self._watched:
            for watched in bucket:
                grad, param = watched.grad, watched.param
                if param.dtype is not watched.dtype or (
                    grad is not None and (param.grad is not grad or grad._version != watched.version)
                ):
                    self.owner.fail(
                        f"the gradient of parameter {self.owner.name_of(watched.param)} was changed between backward() "
                        "and step(), after it was sent. To clip gradients, build the optimizer with max_grad_norm=; "
                        "for fp16 use fusedcomp.GradScaler (grad_scaler=); other in-place changes need overlap=False; "
                        "a model in DistributedDataParallel: remove the DistributedDataParallel wrapper: this "
                        "optimizer exchanges gradients itself"
                    )

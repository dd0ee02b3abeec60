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

from fusedcomp.buckets import Bucket, positions, same_layout


class Owner(Protocol):
    """What the backward contract asks of an optimizer."""

    def launch(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Start the exchange of bucket number ``index`` with these gradients."""

    def fail(self, message: str) -> None:
        """Finish the step on behalf of a rank that failed, then raise with the message."""

    def name_of(self, param: Tensor) -> str:
        """A parameter's name for messages."""


# The hook of the newest optimizer of every parameter.
_HOOKS = WeakTensorKeyDictionary()


class Backward:
    """Hooks, launch order and misuse of one optimizer.

    Args:
        buckets: in launch order.
        owner: the optimizer; held weakly, so that one its user has dropped is gone at once, and its hooks with it.
        overlap: launch during backward; off, everything is launched in ``step()``.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        owner: Owner,
        overlap: bool,
    ) -> None:
        self.buckets, self.overlap = buckets, overlap
        self._owner = weakref.ref(owner)
        self._bucket_of = {param: index for index, bucket in enumerate(buckets) for param in bucket.params}
        self._hooks: dict[Tensor, Any] = {}
        self._paused = False
        device = buckets[0].device if buckets else torch.device("cpu")
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._streams: set[torch.cuda.Stream] = set()
        self._noted: dict[Tensor, tuple[Tensor, int]] = {}
        self._fired: list[int] = []
        self._expected: list[int] = []
        self.next = 0  # number of buckets launched in this step
        self.reset()

    def reset(self) -> None:
        """Ready for the next backward."""
        self._noted.clear()
        self._streams.clear()
        self.next = 0
        self._fired = [0] * len(self.buckets)
        self._expected = [sum(p.requires_grad for p in bucket.params) for bucket in self.buckets]
        if self.overlap:
            for param, _, _ in positions(self.buckets):  # parameters frozen so far may have been unfrozen
                if param.requires_grad and param not in self._hooks:
                    self._take_over(param)

    def _take_over(self, param: Tensor) -> None:
        """Register our hook, in place of that of an earlier optimizer of the same parameter."""
        if param in _HOOKS:
            _HOOKS[param].remove()
        weak = weakref.WeakMethod(self._hook)

        def hook(param: Tensor) -> None:
            method = weak()
            if method is not None:
                method(param)

        self._hooks[param] = _HOOKS[param] = param.register_post_accumulate_grad_hook(hook)

    @property
    def owner(self) -> Owner:
        """The optimizer, which is there whenever one of its own methods or a live hook asks."""
        owner = self._owner()
        assert owner is not None
        return owner

    def remove_hooks(self) -> None:
        """Leave the parameters as they were before this optimizer."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients accumulate and are not sent."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @torch.no_grad()
    def _hook(self, param: Tensor) -> None:
        if self.side is not None:
            self._streams.add(torch.cuda.current_stream(param.device))  # need not be the stream backward was called on
        if self._paused:
            return
        index = self._bucket_of[param]
        if index < self.next or self._is_complete(index):
            self.owner.fail(
                f"parameter {self.owner.name_of(param)} received a gradient after its bucket was complete: a second "
                "backward() before step(), or a layer used by several reentrant checkpoints. Accumulate, or keep "
                "gradients away that are not for this optimizer, inside optimizer.no_sync(); use "
                "checkpoint(use_reentrant=False); or build the optimizer with overlap=False"
            )
        grad = param.grad
        if grad is None:
            return
        if param not in self._noted:
            self._fired[index] += 1
        self._noted[param] = (grad, grad._version)
        while self.next < len(self.buckets) - 1 and self._is_complete(self.next):
            self.launch_next()

    def _is_complete(self, index: int) -> bool:
        return self._fired[index] == self._expected[index] > 0

    @property
    def started(self) -> bool:
        """Has a gradient been handed over since the last step?"""
        return self.next > 0 or any(self._is_complete(index) for index in range(len(self.buckets)))

    def launch_next(self) -> None:
        """Launch the next bucket in order, after everything queued on the streams that wrote gradients."""
        index = self.next
        bucket = self.buckets[index]
        for param, layout in zip(bucket.params, bucket.layouts, strict=True):
            self._check(param, layout, bucket)
        if self.side is None:
            self.owner.launch(index, [_in_layout(p) for p in bucket.params])
        else:
            for stream in self._streams | {torch.cuda.current_stream(bucket.device)}:
                self.side.wait_stream(stream)
            with torch.cuda.stream(self.side):
                self.owner.launch(index, [_in_layout(p) for p in bucket.params])
        self.next += 1  # not before: a launch that raised has sent nothing

    def _check(self, param: Tensor, layout: tuple[torch.Size, tuple[int, ...]], bucket: Bucket) -> None:
        if (param.shape, param.stride()) != layout:
            raise RuntimeError(
                f"parameter {self.owner.name_of(param)} has shape {tuple(param.shape)} and stride {param.stride()}; "
                f"when the optimizer was built it had {tuple(layout[0])} and {layout[1]}: build it after "
                "changing the model"
            )
        grad = param.grad
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise NotImplementedError(
                f"the gradient of parameter {self.owner.name_of(param)} is sparse; build the layer with sparse=False "
                "(the compressor sends only the rows that matter)"
            )
        if grad.dtype != torch.float32 or grad.device != param.device or param.device != bucket.device:
            raise RuntimeError(
                f"the gradient of parameter {self.owner.name_of(param)} is {grad.dtype} on {grad.device}; the "
                f"optimizer was built for torch.float32 on {bucket.device}: build it after moving or "
                "converting the model"
            )

    def check_untouched(self) -> None:
        """Gradients that were handed over must be what they were."""
        for param, (grad, version) in self._noted.items():
            if param.grad is not grad or grad._version != version:
                self.owner.fail(
                    f"the gradient of parameter {self.owner.name_of(param)} was changed between backward() and step(), "
                    "after it was sent. clip_grad_norm_, GradScaler.unscale_ and other in-place changes need an "
                    "optimizer built with overlap=False"
                )


def _in_layout(param: Tensor) -> Tensor | None:
    """The gradient in the parameter's memory order; one copy where autograd left another layout."""
    grad = param.grad
    if grad is None or same_layout(grad, param):
        return grad
    return torch.empty_like(param, requires_grad=False).copy_(grad)

"""The optimizers: SGD and LARS with the gradient exchange inside. No DistributedDataParallel wrapper.

optimizer = fusedcomp.SGD(model.parameters(), lr=0.1, momentum=0.9, compressor=fusedcomp.TopK(density=0.001))
loss.backward()     # buckets are compressed and sent while backward runs
optimizer.step()    # wait, then apply what all ranks sent
"""

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomp import checkpoint, checks
from fusedcomp.amp import GradScaler, scale_of
from fusedcomp.buckets import Bucket, Treatment, copy_states, is_large, plan_buckets, positions
from fusedcomp.checkpoint import Steps
from fusedcomp.compressors import SPARSIFIERS, Identity
from fusedcomp.exchange import Exchange, Hyper, Shared, Verdict
from fusedcomp.exchanges import Exchanges, Plan, status_on
from fusedcomp.levels import resolve
from fusedcomp.memories import default_memory
from fusedcomp.overlap import Backward, Sampler
from fusedcomp.settings import Settings
from fusedcomp.values import plain


class CompressedOptimizer(torch.optim.Optimizer):
    """What SGD and LARS share: param groups, buckets, the step, checkpoints."""

    _backward: Backward
    _exchanges: Exchanges
    _sampler: Callable[[], Sampler | None] | None = None  # a weak reference

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        settings: Settings,
        torch_only: Mapping[str, Any],
    ) -> None:
        self._ready = False
        self._group, self._levels = resolve(settings.process_group)
        with self._group.refusing():
            checks.torch_only(torch_only, type(self).__name__)
            checks.settings(vars(settings))
            self._settings = dataclasses.replace(
                settings, overlap=bool(settings.overlap), bucket_cap_mb=float(settings.bucket_cap_mb)
            )
            super().__init__(params, defaults)
        device = self._agree_and_broadcast(self.param_groups)
        self._group = self._group.private(device)
        self._levels = None if self._levels is None else self._levels.private(device)
        self._share(Steps())
        self._build({})
        self._ready = True

    # ---- construction ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; on several ranks all must call it alike. Their values are broadcast from rank 0."""
        if self._ready:
            self._refuse_if_launched("add_param_group()")
        known = len(self.param_groups)
        try:
            with self._group.refusing() if self._ready else contextlib.nullcontext():  # the constructor's own holds
                super().add_param_group(param_group)
                group = self.param_groups[-1]
                self._resolve(group)
                self._check(group, is_new=True)
                checks.parameters([p for g in self.param_groups for p in g["params"]], self.name_of)
            if self._ready:
                self._agree_and_broadcast([group])
        except Exception:
            del self.param_groups[known:]
            raise
        if self._ready:
            self._build(dict(self.state))

    def _check(self, group: Mapping[str, Any], *, is_new: bool = False) -> None:
        """Numbers and records of a param group; before ``checks.parameters``, which says what is no parameter."""
        checks.group(group, type(self).__name__, self._settings.state_dtype, is_new=is_new)
        checks.decay(group, self.name_of, self._levels is not None)
        if self._levels is not None:
            checks.levels(group, self.name_of)

    def _resolve(self, group: dict[str, Any]) -> None:
        """Fill in what depends on other choices; numpy's numbers and bools become Python's."""
        group.update({key: plain(group[key]) for key in self.defaults if key in group})
        if group["compressor"] is None:
            group["compressor"] = Identity()
        if group["memory"] is None:
            group["memory"] = default_memory(group["compressor"], group["momentum"])

    def _agree_and_broadcast(self, groups: Sequence[dict[str, Any]]) -> torch.device | None:
        """The device of the parameters, where there are any."""
        params = [p for group in groups for p in group["params"]]
        device = params[0].device if params else None
        settings = self._settings.plain()
        first = len(self.param_groups) - len(groups)
        self._group.agree(checks.fingerprint(type(self).__name__, groups, settings, first), device)
        self._group.broadcast([p.detach() for p in params if p.numel() > 0])
        return device

    def _treatment(self, index: int, param: Tensor) -> Treatment:
        group = self.param_groups[index]
        is_vector = param.ndim <= 1
        always = self._settings.always_sparse
        large_enough = always or is_large(param)
        return Treatment(
            group=index,
            sparse=isinstance(group["compressor"], SPARSIFIERS) and large_enough,
            trust="trust_coefficient" in group and not (is_vector and group["exclude_1d_from_trust"]),
            decay="none" if is_vector and group.get("exclude_1d_from_decay") else group.get("decay", "gradient"),
            dtype=param.dtype,
        )

    def _share(self, begun: Steps) -> None:
        """What outlives a plan of buckets: the group, what ranks say of failures, the verdict, the count of steps."""
        params = [p for group in self.param_groups for p in group["params"] if p.numel() > 0]
        device = params[0].device if params else torch.device("cpu")
        settings = self._settings
        shared = Shared(
            self._group, status_on(device), settings.clip, Verdict(device) if settings.may_skip else None,
            settings.has_loss_scale,
        )  # fmt: skip
        self._exchanges = Exchanges(shared, device, begun)

    def _build(self, kept: dict[Tensor, dict[str, Any]], sizes: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Plan the buckets anew, taking over per-parameter states and sizes; hooks, buffers and views follow."""
        sizes = self._exchanges.sizes() if sizes is None else sizes
        if hasattr(self, "_backward"):
            self._backward.remove_hooks()
        self._exchanges.normalise()  # ``kept`` may be views of it
        params = [(p, self._treatment(i, p)) for i, g in enumerate(self.param_groups) for p in g["params"]]
        scopes = [getattr(g["compressor"], "scope", "bucket") == "tensor" for g in self.param_groups]
        self._buckets = plan_buckets(params, int(self._settings.bucket_cap_mb * 2**20), scopes)
        device = self._buckets[0].device if self._buckets else torch.device("cpu")
        if device != self._exchanges.device:
            self._share(self._exchanges.steps())
        self._lr = [torch.zeros(1, dtype=torch.float32, device=device) for _ in self.param_groups]
        self._lr_sent: list[float | None] = [None] * len(self.param_groups)
        self._with_momentum = [group["momentum"] > 0 for group in self.param_groups]
        self._built_for = [_choices(group) for group in self.param_groups]
        self._checked = [dict(group) for group in self.param_groups]
        # Where the sums over ranks of 16-bit parameters are formed, one bucket after another.
        narrow = [b for b in self._buckets if b.treatment.sparse and b.treatment.dtype != torch.float32]
        numel = max((b.segments.padded_numel for b in narrow), default=0)
        sums = torch.zeros(numel, dtype=torch.float32, device=device)
        self._exchanges.plan([self._exchange(b, sums if b in narrow else None) for b in self._buckets])
        self._exchanges.restore(sizes)
        holders = [exchange.kept for exchange in self._exchanges]
        copy_states(holders, kept)
        self.state.clear()
        for param, bucket, position in positions(holders):
            self.state[param] = bucket.views(position)
        settings = self._settings
        measures = settings.clip is not None and settings.clip.scope == "model"
        self._backward = Backward(self._buckets, self, overlap=settings.overlap and not measures, measures=measures)

    def _exchange(self, bucket: Bucket, sums: Tensor | None) -> Exchange:
        index = bucket.treatment.group
        group, settings = self.param_groups[index], self._settings
        plan = Plan(
            group["compressor"], group["memory"], self._with_momentum[index], settings.state_dtype, self._levels,
            settings.always_sparse, sum(b.segments.numel for b in self._buckets if b.treatment.sparse),
            dense_dtype=settings.dense_dtype,
        )  # fmt: skip
        return plan.exchange(bucket, self._exchanges.shared, self._exchanges.new_seed(), sums)

    def __repr__(self) -> str:
        """As torch's, and the settings that all param groups share."""
        shown = ("state_dtype", "overlap", "bucket_cap_mb")
        lines = "".join(f"    {name}: {getattr(self._settings, name)}\n" for name in shown)
        return f"{super().__repr__().removesuffix(')')}\nAll Groups\n{lines})"

    def name_of(self, param: Tensor) -> str:
        """A parameter's name for messages."""
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p is param:
                    names = group.get("param_names")
                    return repr(names[i]) if names else f"{i} of group {g} {tuple(param.shape)}"
        return f"of shape {tuple(param.shape)}"

    # ---- the step ----------------------------------------------------------------------------------------------

    def _hyper(self, index: int) -> Hyper:
        group = self.param_groups[index]
        return Hyper(
            lr=self._lr[index],
            momentum=float(group["momentum"]),
            nesterov=group["nesterov"],
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
            trust_coefficient=group.get("trust_coefficient", 0.0),
            eps=group.get("eps", 0.0),
        )

    def _has_new_plan(self, index: int) -> bool:
        """Does a param group ask for other buffers than were built?"""
        group = self.param_groups[index]
        return _choices(group) != self._built_for[index] or (group["momentum"] > 0 and not self._with_momentum[index])

    def _check_changes(self, index: int) -> None:
        """Bad values put into a param group since the last step go, so that the step can end; then all ranks raise."""
        group, known = self.param_groups[index], self._checked[index]
        if len(group) == len(known) and all(map(operator.is_, group.values(), known.values())):
            return
        try:
            checks.group(group, type(self).__name__, self._settings.state_dtype, is_new=False)
        except (TypeError, ValueError, NotImplementedError) as error:
            group.clear()
            group.update(known)
            self.fail(f"param group {index} was changed to what it cannot be, and is again as it was: {error}")
        self._checked[index] = dict(group)

    def _mirror_lr(self) -> None:
        """Keep lr as the user gave it and its value in a device scalar; a host number travels as a launch argument."""
        for index, group in enumerate(self.param_groups):
            lr, mirror = group["lr"], self._lr[index]
            if isinstance(lr, Tensor) and lr.is_cuda:
                mirror.copy_(lr.reshape(1))
            elif self._lr_sent[index] != float(lr):
                self._lr_sent[index] = float(lr)
                mirror.fill_(float(lr))

    def admit(self, index: int) -> None:
        """For the backward contract (overlap.py): refuse to launch what was not built for, or cannot be replayed."""
        group = self._buckets[index].treatment.group
        self._check_changes(group)  # first: to fail takes numbers that are some
        sampler = None if self._sampler is None else self._sampler()
        if sampler is not None:
            sampler.admit()
        alive = next((param for param in self._exchanges[index].asleep if param.grad is not None), None)
        if alive is not None:
            self.fail(
                f"parameter {self.name_of(alive)} received a gradient, but its block is inactive in this step, which "
                "all ranks count on: requires_grad was switched on since the last draw() of JointSpar"
            )
        if self._has_new_plan(group):
            self.fail(
                f"compressor, memory or decay of group {group} was changed, or its momentum switched on; call "
                "optimizer.zero_grad() after such a change, before backward(): it plans the buckets anew"
            )
        scaler, shared = self._settings.grad_scaler, self._exchanges.shared
        if scaler is not None and shared.has_loss_scale:
            shared.loss_scale = scale_of(scaler)
            if shared.loss_scale is None:
                self.fail("this optimizer has a grad_scaler, which scaled no loss: scaler.scale(loss).backward()")
        compressor, step = self.param_groups[group]["compressor"], self._exchanges.step
        warmup = getattr(compressor, "warmup_steps", 0)
        if step < warmup and self._exchanges.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph was to be captured in step {step} of {type(compressor).__name__}'s {warmup} "
                "warmup_steps; its replays would keep this step's density: capture after the warm-up"
            )

    def launch(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """For the backward contract (overlap.py): start the exchange of one bucket."""
        exchange = self._exchanges[index]
        exchange.launch(grads, self._hyper(exchange.bucket.treatment.group), self._exchanges.step)

    def measure(self, grads: Sequence[Sequence[Tensor | None]]) -> None:
        """For the backward contract (overlap.py): the norm of the whole gradient, where it must be known first."""
        for exchange, mine in zip(self._exchanges, grads, strict=True):
            exchange.bucket.operands.update(mine)
            exchange.measure()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the exchange and update the parameters.

        Args:
            closure: reevaluates the model and returns the loss (runs with gradients enabled).

        Raises:
            RuntimeError: gradients were changed since backward (see ``overlap.py``), a param group was changed to what
                the constructor would have refused, another rank failed, or ranks encode their payloads differently.
        """
        self._exchanges.raise_if_peer_failed()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._backward.check_untouched()
        self._backward.launch_rest()
        for index in range(len(self.param_groups)):
            self._check_changes(index)
        self._finish()
        self._exchanges.raise_if_peer_failed()
        return loss

    def _finish(self, apply: bool = True) -> None:
        """Wait for all buckets, apply them, be ready for the next step."""
        self._mirror_lr()
        if self._backward.side is not None:
            torch.cuda.current_stream(self._backward.side.device).wait_stream(self._backward.side)
        self._exchanges.arrive(self.name_of)
        self._exchanges.apply((lambda bucket: self._hyper(bucket.treatment.group)) if apply else None)
        verdict = self._exchanges.shared.verdict
        if self._settings.grad_scaler is not None and verdict is not None:
            self._settings.grad_scaler.judge(verdict.found_inf)
        self._backward.reset()
        if self._sampler is not None and (sampler := self._sampler()) is not None:
            sampler.end()

    @torch.no_grad()
    def fail(self, message: str) -> None:
        """Finish the step with empty payloads for what was not launched, so that no peer waits; then raise."""
        for exchange in self._exchanges[self._backward.next :]:
            exchange.launch_nothing(self._hyper(exchange.bucket.treatment.group), self._exchanges.step)
        changed = self._backward.changed()
        self._finish(apply=changed is None)  # a kernel would write past a parameter that became smaller
        self._exchanges.forget_failure()  # the peers raise because of us; we raise here
        raise RuntimeError(changed or message)

    def _refuse_if_launched(self, what: str) -> None:
        if self._backward.started:
            self.fail(
                f"{what} was called between backward() and step(), when gradients had already been sent; call step() "
                "first. Gradients that this optimizer is not to apply (of another loss, of a saliency map) belong "
                "in a backward inside optimizer.no_sync()"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also takes in a compressor, memory or decay changed in a param group (on all ranks alike).

        Raises:
            RuntimeError: between backward and step, when gradients have already been sent.
        """
        if self._ready:
            self._refuse_if_launched("zero_grad()")
            if any(self._has_new_plan(index) for index in range(len(self.param_groups))):
                for group in self.param_groups:
                    self._check(group)
                self._build(checkpoint.adopt(dict(self.state), keep_residual=True))
            self._backward.reset()
        super().zero_grad(set_to_none)

    # torch's GradScaler hands an optimizer that says so its scale, instead of skipping steps by itself.
    _step_supports_amp_scaling = True

    @property
    def grad_scale(self) -> None:
        """Never set; see the setter."""
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, value: Any) -> None:
        """Refuse torch's GradScaler: it sets its scale after gradients were sent, and judges inf rank by rank."""
        self.fail(
            "torch.amp.GradScaler cannot drive this optimizer: gradients are sent during backward, before it would "
            "unscale_ them, and it would skip steps on one rank only. Use fusedcomp.GradScaler, which the optimizer is "
            "built with (grad_scaler=), or bfloat16 autocast, which needs no scaler"
        )

    @property
    def grad_scaler(self) -> GradScaler | None:
        """The scaler this optimizer was built with."""
        return self._settings.grad_scaler

    @property
    def skipped(self) -> int:
        """Steps that were void on all ranks so far, because a gradient was not finite on one of them.

        Of ``skip_nonfinite`` and ``grad_scaler`` alone; 0 otherwise. The same on all ranks, also the moment after
        ``step()``, in time for a scheduler of learning rates. On CUDA the first look after a step waits until the
        headers of that step have been read, which the device does before it updates; ``metrics()["skipped"]`` waits
        for nothing. After replays of a CUDA graph synchronise first.
        """
        return self._exchanges.skipped

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without sending them, for all but the last backward of a step."""
        with self._backward.paused():
            yield

    def metrics(self) -> dict[str, Tensor]:
        """What the last step did, as tensors on the parameters' device; asks the device for nothing.

        - ``bytes_dense``: what an all-reduce of the gradients, as DDP's, would be handed by this rank
        - ``bytes_sent``: what this optimizer handed to the collectives, of two levels to those between nodes: values,
          indices, headers, and what pads payloads to the room that all ranks share; between ``backward()`` and
          ``step()`` buckets that were launched already count with the new step
        - ``bytes_intra``: of two levels: what it handed to those inside the node
        - ``nnz``: entries packed by this rank
        - ``candidates``: entries the selection looked at
        - ``overflow``: candidates beyond the buffer, kept in the residual; without memory lost
        - ``threshold``: the magnitude an entry had to reach to be sent, per sparse bucket (and tensor); empty
          where nothing is compressed
        - ``residual_norm``: L2 norm of everything not sent yet on this rank; 0 without memory
        - ``nonfinite``: buckets that had a NaN or inf on any rank; a running count, over all steps so far
        - ``skipped``: steps that were void; a running count
        """
        return self._exchanges.metrics()

    # ---- checkpoints, copies -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's; plain data and tensors. Rank-local: save it on every rank.

        Residual and velocity of this rank are its own; the dict records rank, world size and steps. Nothing changes.
        """
        self._exchanges.normalise()
        return checkpoint.encode(super().state_dict(), self._group, self._exchanges.steps(), self._exchanges.sizes())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` of the same rank gave; also a torch.optim.SGD checkpoint.

        A file of another rank (a rank-0-only checkpoint) keeps everything but the residual, which is that rank's own
        unsent gradient: it is zeroed here, with a warning. As lr does, compressor and memory come from the file.

        Raises:
            ValueError: other param groups, states of another shape, a format this version does not know, or choices
                in the file that this optimizer would refuse at construction. Nothing has been loaded then.
        """
        self._refuse_if_launched("load_state_dict()")
        decoded, steps, own = checkpoint.decode(state_dict, self.param_groups, self._group)
        for packed in decoded["param_groups"]:
            self._resolve(packed)
            self._check({**packed, "params": []})
        checkpoint.check_states(decoded, self.param_groups, self.name_of)
        if own and self._levels is not None:
            checkpoint.check_places(decoded, self.param_groups, self.state, self.name_of)
        super().load_state_dict(decoded)
        self._share(steps)
        # Not self.state: torch has cast what it took to the type of the parameter.
        loaded = {
            param: decoded["state"].get(key, {})
            for packed, group in zip(decoded["param_groups"], self.param_groups, strict=True)
            for key, param in zip(packed["params"], group["params"], strict=True)
        }
        self._build(checkpoint.adopt(loaded, keep_residual=own), checkpoint.sizes_of(state_dict))

    def __getstate__(self) -> dict[str, Any]:
        self._exchanges.normalise()
        exchanges = self._exchanges
        return {
            **super().__getstate__(), "_settings": self._settings, "_steps": exchanges.steps(),
            "_sizes": exchanges.sizes(),
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_settings" not in state:  # load_state_dict(): it rebuilds by itself
            return
        self._ready = False
        # A copy goes on in its original's group; making one would need all ranks.
        self._group, self._levels = state.get("_ranks") or resolve(self._settings.process_group)
        self._share(self.__dict__.pop("_steps"))
        self._build(dict(self.state), self.__dict__.pop("_sizes", []))
        self._ready = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressedOptimizer":
        for shared in (self._settings.process_group, self._group, self._levels):
            memo[id(shared)] = shared
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy({**self.__getstate__(), "_ranks": (self._group, self._levels)}, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._settings.process_group is not None:
            raise TypeError(
                "an optimizer with a process_group of its own cannot be pickled; save its state_dict() instead"
            )
        return super().__reduce_ex__(protocol)


def _choices(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What buffers are built for."""
    return group["compressor"], group["memory"], group.get("decay", "gradient")

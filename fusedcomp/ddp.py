"""The hook of DistributedDataParallel: compressed, averaged gradients for any torch optimizer.

    state = fusedcomp.ddp.CompressionState(fusedcomp.TopK(density=0.01), model.named_parameters())
    model = DistributedDataParallel(model)
    model.register_comm_hook(state, fusedcomp.ddp.compress_hook)

The pipeline is the optimizers'. What differs: DDP makes the buckets, and what is applied is applied to their buffers,
as to parameters that are 0 and learn at a rate of -1: they become the averages. Where gradients come multiplied by a
loss scale, memory is kept without it and the rate is the scale's negative.

    launch   a bucket is compressed and sent, on a stream beside backward, as soon as DDP has filled it
    finish   with the last bucket of a backward: send what is never compressed, of all buckets at once; wait (the device
             does), judge, write averages, complete all futures

Memory belongs to the parameter: DDP arranges its buckets anew after the first step, and states move along.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fusedcomp import checkpoint, checks
from fusedcomp.amp import scale_of
from fusedcomp.buckets import RANK_WEIGHTS, Bucket, Treatment, build_bucket, copy_states, is_large
from fusedcomp.checkpoint import Steps
from fusedcomp.compressors import SPARSIFIERS, Compressor
from fusedcomp.ddp_parts import Entry, MomentumWatch, Part, named
from fusedcomp.exchange import Clip, Hyper, Shared, Verdict
from fusedcomp.exchanges import Exchanges, Plan, status_on
from fusedcomp.levels import resolve
from fusedcomp.memories import Memory, default_memory
from fusedcomp.ranking import Ranking
from fusedcomp.values import plain

GradBucket = Any  # torch.distributed.GradBucket, which stubs do not know


class CompressionState:
    """What ``compress_hook`` compresses with, and what it keeps: memory per parameter, the step, the ranks.

    Ranks must build it alike, before the first backward. With ``Identity()`` gradients are DDP's own: averages of all
    of them. Works from the first step on, under rebuilt buckets, ``gradient_as_bucket_view``, ``static_graph``,
    ``no_sync``, ``find_unused_parameters`` (with ``zero_grad(set_to_none=True)``, torch's default) and ``join``.

    Args:
        compressor: what is sent: ``TopK``, ``Threshold``, ``BlockTopK``, ``RandomK``, ``CAT`` or ``Identity``.
            Vectors, and parameters of fewer than 2048 elements, are never compressed. ``scope="bucket"`` ranks
            over what is compressed of one of DDP's buckets, so its ``bucket_cap_mb`` changes results;
            ``scope="tensor"`` does not depend on it, but for ties and for the noise that rounds bf16 states.
        params: the model's parameters or ``model.named_parameters()``; needed only to save and load.
        memory: ``Residual()`` (default): error feedback. ``MomentumCorrection()`` needs ``momentum``.
        momentum: of the hook, in [0, 1): what is handed to the optimizer is then a velocity. An optimizer with
            momentum (or betas) of its own applies it twice: there is a warning.
        nesterov: Nesterov momentum; needs momentum > 0.
        process_group: DDP's; None: the default group. The hook makes a communicator of its own over its ranks.
        state_dtype: of residual and velocity, ``torch.float32`` or ``torch.bfloat16``.
        max_grad_norm: as for ``SGD`` (DGC's local clipping).
        clip_scope: whose norm that is: ``"model"`` (then nothing overlaps), ``"bucket"`` (what is compressed of one of
            DDP's, and what is not) or ``"tensor"``.
        skip_nonfinite: a NaN or inf of any rank leaves memory as it was, bit for bit, and makes all gradients NaN on
            all ranks. ``found_inf`` says so to the optimizer. Two halves of the states, as for ``SGD``.
        grad_scaler: the ``torch.amp.GradScaler`` in use: memory is then kept in units of the loss whatever the scale,
            and the step that it skips leaves memory alone (skip_nonfinite). Scaled gradients come out as they came in.
        rank_by: the optimizer, of Adam's kind (``exp_avg_sq`` in its state of every parameter that is compressed), that
            steps the model; needs ``TopK``. Entries are then ranked by ``|residual| / sqrt(v)**0.75``: by what they
            move. ``v`` is looked at every 32 steps. What is sent is the same value. 4 bytes an element more.

    Raises:
        ValueError: an argument is out of range, or differs between ranks (the message names the field).
        TypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        compressor: Compressor,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | None = None,
        *,
        memory: Memory | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        process_group: dist.ProcessGroup | None = None,
        state_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        clip_scope: str = "model",
        skip_nonfinite: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        rank_by: torch.optim.Optimizer | None = None,
    ) -> None:
        self._group, self._levels = resolve(process_group)
        with self._group.refusing():
            checks.flag("CompressionState: nesterov", nesterov)
            checks.momenta("CompressionState", momentum, nesterov)
            self.momentum, self.nesterov = plain(momentum), nesterov
            self.memory = default_memory(compressor, momentum) if memory is None else memory
            self.compressor, self.state_dtype, self.grad_scaler = compressor, state_dtype, grad_scaler
            checks.hook(vars(self), max_grad_norm, clip_scope, skip_nonfinite)
            if self._levels is not None:
                checks.levels({**vars(self), "params": []}, self._name_of)
            if grad_scaler is not None and not grad_scaler.is_enabled():
                self.grad_scaler = None
            self._names = named(params)
            checks.knows_size(compressor, self._names)
            self._ranking = None if rank_by is None else Ranking(rank_by, compressor, self._levels is not None)
            if self._ranking is not None:
                self._ranking.check([p for p in self._names if p.requires_grad and is_large(p)], self._name_of)
        self._clip = None if max_grad_norm is None else Clip(max_grad_norm, clip_scope)
        self._may_skip = skip_nonfinite or self.grad_scaler is not None
        fields = ("compressor", "memory", "momentum", "nesterov", "state_dtype")
        settings = {name: repr(getattr(self, name)) for name in fields}
        settings |= {"names of params": " ".join(self._names.values())}
        settings |= {"front": "DDP hook", "clip": repr(self._clip), "skip_nonfinite": str(self._may_skip)}
        settings |= {"rank_by": str(self._ranking)}
        self._group.agree(settings, None)
        self._group = self._group.private(None)
        self._levels = None if self._levels is None else self._levels.private(None)
        self._steps = Steps()  # when what follows is made
        self._exchanges: Exchanges | None = None  # made with the first bucket, which says on which device
        self._verdict: Verdict | None = None  # outlives them: optimizers hold its found_inf
        self._entries: dict[tuple[int, ...], Entry] = {}
        self._rest: dict[torch.dtype, Part] = {}  # what is never compressed, of all of DDP's buckets
        self._order: dict[Tensor, int] = {}  # in which parameters were first seen
        self._pending: list[Entry] = []
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._watch = MomentumWatch(self) if self.momentum > 0 else None

    def __repr__(self) -> str:
        """What it was built with."""
        shown = ("compressor", "memory", "momentum", "nesterov", "state_dtype")
        fields = [f"{name}={getattr(self, name)!r}" for name in shown]
        fields += [f"clip={self._clip!r}", f"skip_nonfinite={self._may_skip}", f"rank_by={self._ranking}"]
        return f"CompressionState({', '.join(fields)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressionState":
        """Copies of a DDP wrapper, such as AveragedModel makes, share its state; they are not trained."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a CompressionState cannot be pickled: its process group is this process's; save state_dict()")

    # ---- a step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """What ``compress_hook`` does; DDP calls it for every bucket of a backward, in order."""
        if bucket.index() == 0:
            self._begin(bucket.buffer())
        assert self._exchanges is not None
        with self._beside():
            entry = self._entry(bucket)
            future = entry.take(bucket)
            self._pending.append(entry)
            if not self._measures:
                for part in entry.parts:
                    self._launch(part, self._exchanges.step)
            if bucket.is_last():
                self._finish(self._exchanges)
        if bucket.is_last():
            self._exchanges.raise_if_peer_failed()
        return future

    @property
    def _measures(self) -> bool:
        return self._clip is not None and self._clip.scope == "model"

    def _begin(self, buffer: Tensor) -> None:
        if self._pending:
            raise RuntimeError(
                "the last backward did not finish, so that what it sent was lost; reload model, optimizer and "
                "compression state from a checkpoint"
            )
        if self._watch is not None:
            self._watch.close()
        device = buffer.device
        if self._exchanges is None or self._exchanges.device != device:
            if self._exchanges is not None:
                raise RuntimeError(f"the model was moved from {self._exchanges.device} to {device}; build a new state")
            if self._may_skip and self._verdict is None:
                self._verdict = Verdict(device)
            shared = Shared(self._group, status_on(device), self._clip, self._verdict, self.grad_scaler is not None)
            self._exchanges = Exchanges(shared, device, self._steps)
            self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
            self._rate = torch.full((1,), -1.0, dtype=torch.float32, device=device)
            self._sums = torch.zeros(0, dtype=torch.float32, device=device)
        with self._beside():
            self._seed = self._exchanges.new_seed()
            if self.grad_scaler is not None:
                scale = scale_of(self.grad_scaler)
                if scale is None:
                    raise RuntimeError("the grad_scaler has scaled no loss: scaler.scale(loss).backward()")
                self._exchanges.shared.loss_scale = scale
                torch.neg(scale.view(1), out=self._rate)

    def _finish(self, exchanges: Exchanges) -> None:
        """All buckets of this backward are here."""
        pending, self._pending = self._pending, []
        self._gather_rest(pending)
        rest = list(self._rest.values())
        parts = [part for entry in pending for part in entry.parts] + rest
        members = [part.exchange for part in parts]
        if members != list(exchanges):
            exchanges.plan(members)
            used = set(map(id, pending))
            self._entries = {key: entry for key, entry in self._entries.items() if id(entry) in used}
        if self._measures:
            for part in parts:
                part.measure()
        for part in parts if self._measures else rest:
            self._launch(part, exchanges.step)
        exchanges.arrive(self._name_of)
        found_inf = exchanges.shared.found_inf
        for entry in pending:
            if found_inf is None:
                entry.buffer.zero_()
            else:  # no average was formed: 0 would let a momentum act
                entry.buffer.fill_(torch.where(found_inf[0] > 0, torch.nan, 0.0))
        exchanges.apply(lambda bucket: self._hyper())
        for entry in pending:
            entry.grads = []
            entry.future.set_result(entry.buffer)
        if self._loaded:
            names, self._loaded = sorted(self._loaded), {}
            warnings.warn(
                f"the checkpoint's states of {', '.join(names[:8])} are of no use here and were dropped: nothing keeps "
                "any for them, or of two levels another rank of this node does",
                stacklevel=2,
            )

    def _launch(self, part: Part, step: int) -> None:
        bucket = part.exchange.bucket
        if self._ranking is not None and RANK_WEIGHTS in bucket.states:
            self._ranking.prepare(bucket, step, self._name_of)
        part.launch(self._hyper(), step)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream beside backward, after what backward has queued so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            yield

    def _hyper(self) -> Hyper:
        return Hyper(self._rate, self.momentum, self.nesterov, weight_decay=0.0, maximize=False)

    # ---- buckets -----------------------------------------------------------------------------------------------

    def _entry(self, bucket: GradBucket) -> Entry:
        """What this bucket was compressed with last time; made, with the states of its parameters, if it is new."""
        params = bucket.parameters()
        key = tuple(map(id, params))
        if key not in self._entries:
            dtype = bucket.buffer().dtype
            compresses = isinstance(self.compressor, SPARSIFIERS)
            self._check(params, dtype, compresses and self._levels is not None)
            entry = Entry(params)
            large = [i for i, p in enumerate(params) if is_large(p)]
            # With Identity() nothing is small: a part of its own for every bucket, which leaves with it.
            at_once = large if compresses else list(range(len(params)))
            entry.rest = sorted(set(range(len(params))) - set(at_once))
            if at_once:
                entry.parts = [self._part(compresses, [(entry, i) for i in at_once], dtype)]
            self._entries[key] = entry
        return self._entries[key]

    def _check(self, params: Sequence[Tensor], dtype: torch.dtype, two_levels: bool) -> None:
        """Refuse parameters that the kernels cannot take, or that would be lost from checkpoints."""
        checks.gradient_dtype(dtype, two_levels)
        for param in params:
            self._order.setdefault(param, len(self._order))
            if param.is_complex():  # DDP hands over a real view
                raise NotImplementedError(f"parameter {self._name_of(param)} is {param.dtype}, which is not supported")
            if param.grad is not None and param.grad.layout != torch.strided:
                raise NotImplementedError(
                    f"the gradient of parameter {self._name_of(param)} is sparse; build the layer with sparse=False "
                    "(the compressor sends only the rows that matter)"
                )
            if self._names and param not in self._names:
                raise ValueError(
                    f"params lacks a parameter {self._name_of(param)} of the model in DistributedDataParallel: pass "
                    "model.named_parameters() of that very model"
                )
        if self._ranking is not None:
            self._ranking.check(filter(is_large, params), self._name_of)

    def _gather_rest(self, pending: Sequence[Entry]) -> None:
        """What is never compressed is small: one exchange for all of it instead of one for every bucket."""
        sources: dict[torch.dtype, list[tuple[Entry, int]]] = {}
        for entry in pending:
            sources.setdefault(entry.buffer.dtype, []).extend((entry, i) for i in entry.rest)
        for dtype, those in sources.items():
            those.sort(key=lambda source: self._order[source[0].params[source[1]]])  # sums round as they are ordered
            if those and (dtype not in self._rest or self._rest[dtype].sources != those):
                self._rest[dtype] = self._part(False, those, dtype)

    def _part(self, sparse: bool, sources: list[tuple[Entry, int]], dtype: torch.dtype) -> Part:
        assert self._exchanges is not None
        params = [entry.params[i] for entry, i in sources]
        treatment = Treatment(group=0, sparse=sparse, trust=False, decay="none", dtype=dtype)
        bucket = build_bucket(treatment, params, getattr(self.compressor, "scope", "bucket") == "tensor")
        compressed = sum(p.numel() for p in self._names if is_large(p))
        plan = Plan(
            self.compressor, self.memory, self.momentum > 0, self.state_dtype, self._levels, compressed=compressed,
            ranked=self._ranking is not None,
        )  # fmt: skip
        sums = None if dtype == torch.float32 else self._room(bucket.segments.padded_numel)
        exchange = plan.exchange(bucket, self._exchanges.shared, self._seed.clone(), sums)
        kept = {param: self._kept(param) for param in exchange.kept.params}
        copy_states([exchange.kept], kept)
        if self._ranking is not None and sparse and not all(RANK_WEIGHTS in states for states in kept.values()):
            self._ranking.refresh(bucket, self._exchanges.step, self._name_of)  # a file without, or none
        return Part(exchange, sources)

    def _room(self, numel: int) -> Tensor:
        """Where sums over ranks of 16-bit gradients are formed, one bucket after another."""
        if self._sums.numel() < numel:
            self._sums = torch.zeros(numel, dtype=torch.float32, device=self._sums.device)
        return self._sums

    def _kept(self, param: Tensor) -> dict[str, Tensor]:
        """The states of a parameter, from the bucket it was in or from a checkpoint."""
        for bucket, position in self._homes(param):
            first, second = bucket.views(position), bucket.views(position, half=1)
            parity = self._exchanges.shared.parity if self._exchanges is not None else None
            if parity is None:
                return first
            return {name: torch.where(parity[0] == 0, first[name], second[name]) for name in first}
        return self._loaded.pop(self._names.get(param, ""), {})

    def _homes(self, param: Tensor) -> Iterator[tuple[Bucket, int]]:
        parts = [part for entry in self._entries.values() for part in entry.parts]
        for part in [*parts, *self._rest.values()]:
            kept = part.exchange.kept
            for position, member in enumerate(kept.params):
                if member is param:
                    yield kept, position

    def _name_of(self, param: Tensor) -> str:
        return repr(self._names[param]) if param in self._names else f"of shape {tuple(param.shape)}"

    # ---- what is known of it -----------------------------------------------------------------------------------

    @property
    def found_inf(self) -> Tensor:
        """f32 (), on the device: 1 if the last step had a NaN or inf on any rank. Needs skip_nonfinite.

        torch's fused optimizers skip the step by themselves: ``optimizer.found_inf = state.found_inf``, once, after the
        first backward.

        Raises:
            RuntimeError: steps are not skipped, or there was no backward yet.
        """
        if self._verdict is None:
            raise RuntimeError("found_inf needs skip_nonfinite=True (or a grad_scaler), and a backward before")
        return self._verdict.found_inf.view(())

    @property
    def skipped(self) -> int:
        """Steps that were void so far; as ``SGD.skipped``."""
        return self._steps.skipped if self._exchanges is None else self._exchanges.skipped

    def metrics(self) -> dict[str, Tensor]:
        """What the last step did; as ``SGD.metrics``. With ``rank_by`` thresholds are of weight * |residual|.

        Raises:
            RuntimeError: there was no backward yet.
        """
        if self._exchanges is None:
            raise RuntimeError("metrics() needs a backward before: DDP's buckets are not known yet")
        return self._exchanges.metrics()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """Memory of this rank, by parameter; plain data and tensors, copied.

        Args:
            all_ranks: a collective: on rank 0 what all ranks hold, in one dict, for frameworks that save on one rank;
                on the others their own.

        Raises:
            ValueError: the state was built without ``params``, so that nothing has a name.
        """
        if not self._names:
            raise ValueError("state_dict() needs names: build CompressionState with params=model.named_parameters()")
        steps, states = self._steps, dict(self._loaded)
        if self._exchanges is not None:
            steps = self._exchanges.steps()
            self._exchanges.normalise()
        for param, name in self._names.items():
            for bucket, position in self._homes(param):
                states[name] = {key: view.detach().clone() for key, view in bucket.views(position).items()}
        mine = checkpoint.encode_hook(states, self._group, steps)
        if not all_ranks:
            return mine
        return checkpoint.gather(mine, self._group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take in what ``state_dict()`` gave, on every rank; also what one rank saved of all.

        A dict of another rank alone, or of another number of ranks, keeps everything but the residual, with a warning.

        Raises:
            ValueError: names or shapes are not this model's, or the format is unknown. Nothing has been loaded then.
        """
        if not self._names:
            raise ValueError(
                "load_state_dict() needs names: build CompressionState with params=model.named_parameters()"
            )
        states, steps = checkpoint.decode_hook(state_dict, {name: p for p, name in self._names.items()}, self._group)
        self._steps, self._loaded = steps, states
        # Made anew by the next backward, with first halves that hold.
        self._exchanges, self._entries, self._rest, self._pending = None, {}, {}, []
        if self._verdict is not None:
            self._verdict.parity.zero_()


def compress_hook(state: CompressionState, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Compressed averages in place of DDP's all-reduce: ``model.register_comm_hook(state, compress_hook)``.

    Args:
        state: a ``CompressionState``.
        bucket: DDP's; its gradients are fp32, bf16 or fp16.

    Returns:
        A future of the bucket's buffer, averaged over ranks; done with the last bucket of the backward.

    Raises:
        RuntimeError: another rank failed, or ranks encode their payloads differently.
    """
    return state.exchange(bucket)

"""An optimizer stopped between backward and step, its states real; and the check that kernels equal twins there."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import bandwidth
from fusedcomp import _dispatch
from fusedcomp.exchange import Exchange
from fusedcomp.gathered import GatheredExchange
from fusedcomp.pipeline import DenseExchange
from trained import Config, sparse_exchanges

DECAY = 1e-4
DECAYS = (0.0, DECAY)
RANKS = 8
_NORM_RTOL = 1e-4
_SMALL = 4096  # a tensor of fewer elements that an exchange holds is cheap to put back


class _RecordedRanks:
    """A group whose payloads lie there already, one's own as the first; the exchange itself takes no time."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def all_gather(self, out: Tensor, own: Tensor) -> None:
        pass

    def all_reduce(self, tensor: Tensor) -> None:
        pass


class Frozen:
    """An optimizer between backward and step: its gradients, and copies of all that a step changes."""

    def __init__(self, config: Config, optimizer: Any, payloads: Sequence[Tensor]) -> None:
        self.config, self.optimizer, self.received = config, optimizer, payloads
        self.exchanges: list[Exchange] = list(optimizer._exchanges)
        self.sparse = sparse_exchanges(optimizer)
        self.dense = [e for e in self.exchanges if isinstance(e, DenseExchange)]
        self.params = [p.detach() for e in self.exchanges for p in e.bucket.params]
        self.grads = [[_take_grad(p) for p in e.bucket.params] for e in self.exchanges]
        self.ranks = min(RANKS, *(len(received) for received in payloads))
        self.set_ranks(self.ranks)
        optimizer._mirror_lr()
        self.states = [t for e in self.exchanges for t in e.bucket.states.values()]
        self.counters = [t for e in self.exchanges for t in small_tensors(e)]
        self.copies = [[t.clone() for t in live] for live in (self.states, self.counters, self.params)]
        self.numel_sparse = sum(e.bucket.segments.numel for e in self.sparse)
        self.numel_dense = sum(e.bucket.segments.numel for e in self.dense)
        self.k = sum(e.buffers.layout.k for e in self.sparse)

    def provider(self, weight_decay: float) -> str:
        return f"fusedcomp_{self.config.name}{'_wd' if weight_decay else ''}"

    @property
    def state_bytes(self) -> int:
        """Of one element of one state."""
        return 2 if self.config.half else 4

    def pass_bytes(self, weight_decay: float) -> int:
        """The least traffic of the pass: gradient, two states read and written, with decay the parameter."""
        return (4 + 4 * self.state_bytes + (4 if weight_decay else 0)) * self.numel_sparse

    def set_ranks(self, ranks: int) -> None:
        """Let the payloads be those of this many ranks: the last steps'."""
        for exchange, received in zip(self.sparse, self.received, strict=True):
            buffers = exchange.buffers
            buffers.received, buffers.own = received[-ranks:], received[-ranks]
            buffers.payloads = buffers.layout.views(buffers.received)
            buffers.payload = buffers.layout.views(buffers.own.view(1, -1))
            buffers.payloads.header[:, 3] = exchange.seed  # the step, on which ranks agree
        for exchange in self.exchanges:
            # What ranks would have added to dense sums is not there: their trailers would contradict one another.
            exchange.group = _RecordedRanks(ranks if exchange in self.sparse else 1)  # type: ignore[assignment]

    def reset_states(self) -> None:
        """What the compress side changes."""
        for exchange, grads in zip(self.exchanges, self.grads, strict=True):
            exchange.bucket.operands.update(grads)  # ``optimizer.step()`` lets go of them; addresses stay the same
        for live, copies in zip((self.states, self.counters), self.copies, strict=False):
            copy_all(live, copies)

    def reset(self) -> None:
        """What a whole step changes."""
        self.reset_states()
        copy_all(self.params, self.copies[2])

    def hyper(self, exchange: Exchange, weight_decay: float) -> Any:
        hyper = self.optimizer._hyper(exchange.bucket.treatment.group)
        return dataclasses.replace(hyper, weight_decay=weight_decay)

    def launch(self, weight_decay: float = 0.0, only: Sequence[Exchange] | None = None) -> None:
        """The whole compress side, by the pipeline's own code: what runs during backward."""
        for exchange, grads in zip(self.exchanges, self.grads, strict=True):
            if only is None or exchange in only:
                exchange.launch(grads, self.hyper(exchange, weight_decay), self.optimizer._exchanges.step)

    def compress(self, weight_decay: float = 0.0) -> None:
        """The same of what is compressed alone: sample, pass, refine, pack."""
        self.launch(weight_decay, self.sparse)

    def apply(self, weight_decay: float = 0.0) -> None:
        """What runs in ``step()``, of all ranks' payloads."""
        for exchange in self.exchanges:
            exchange.apply(self.hyper(exchange, weight_decay))

    def whole_step(self, weight_decay: float = 0.0) -> None:
        self.launch(weight_decay)
        self.apply(weight_decay)

    def sparse_step(self) -> None:
        """Both sides of the sparse buckets alone."""
        self.compress()
        for exchange in self.sparse:
            exchange.apply(self.hyper(exchange, 0.0))

    def optimizer_step(self) -> None:
        """The same through the front door: ``optimizer.step()``, which compresses here because overlap is off."""
        self.optimizer.step()

    def outcome(self) -> dict[str, Tensor]:
        """Everything a step leaves behind that matters, but for LARS's norms; live tensors."""
        named = {f"bucket {i}: {name}": t for i, e in enumerate(self.exchanges) for name, t in e.bucket.states.items()}
        named |= {f"sparse bucket {i}: payload": _without_norms(e) for i, e in enumerate(self.sparse)}
        named |= {f"sparse bucket {i}: step": e.seed for i, e in enumerate(self.sparse)}
        named |= {f"dense bucket {i}: sums": e.reduced.whole for i, e in enumerate(self.dense)}
        return named | {f"parameter {i}": p for i, p in enumerate(self.params)}

    def norms(self) -> list[Tensor]:
        """LARS's squared norms as the compressed buckets send them."""
        return [e.buffers.payload.norms.clone() for e in self.sparse]

    def flat_states(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(velocity, residual, gradient) of every compressed parameter, flat, fp32, as frozen: for eager baselines."""
        tensors = []
        kept = {id(state): copy for state, copy in zip(self.states, self.copies[0], strict=True)}
        for exchange, grads in zip(self.exchanges, self.grads, strict=True):
            if exchange in self.sparse:
                live = [exchange.bucket.states[name] for name in ("velocity", "residual")]
                states = [bandwidth.values(kept[id(state)]).float() for state in live]
                for where, grad in zip(exchange.bucket.segments.slices, grads, strict=True):
                    flat = grad.detach().as_strided((grad.numel(),), (1,))
                    tensors.append((states[0][where], states[1][where], flat))
        return tensors


def _take_grad(param: Tensor) -> Tensor:
    """In the parameter's memory order, as the product takes it; torch.optim gets the same one."""
    grad = param.grad
    assert grad is not None
    if grad.stride() != param.stride():
        grad = param.grad = torch.empty_like(param, requires_grad=False).copy_(grad)
    return grad


def _without_norms(exchange: GatheredExchange) -> Tensor:
    own = exchange.buffers.own.clone()
    exchange.buffers.layout.views(own.view(1, -1)).norms.zero_()
    return own


def small_tensors(exchange: Exchange) -> list[Tensor]:
    """Step counters, flags, trust ratios, norms: whatever an exchange and its bucket keep beside the states."""
    held = [*vars(exchange).values(), exchange.bucket.norms]
    return [t for t in held if isinstance(t, Tensor) and t.numel() < _SMALL]


def copy_all(live: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    if live:
        torch._foreach_copy_(list(live), list(copies))


def runs_kernels(device: torch.device) -> bool:
    """Kernels, or the twins that are their own yardstick then? As ``_dispatch`` decides."""
    return _dispatch.ops(device) is _dispatch._KERNELS


# ---- correctness first ---------------------------------------------------------------------------------------------


@contextmanager
def on_twins(exchanges: Sequence[Exchange]) -> Iterator[None]:
    """Run the pipeline on the plain-torch twins.

    LARS's norms stay with the kernels: they are sums, whose last bits depend on the order of addition, and the trust
    ratios made of them would carry the difference into every element.
    """
    with ExitStack() as stack:
        for exchange in exchanges:
            twins = SimpleNamespace(**(vars(_dispatch._TWINS) | {"norms": exchange.ops.norms}))
            stack.enter_context(patch.object(exchange, "ops", twins))
        yield


def gate(frozen: Frozen, weight_decay: float) -> None:
    """Kernels and twins do the same to this very input, bit for bit; norms up to the order of their sums.

    Raises:
        RuntimeError: they do not; nothing of this case is worth timing.
    """
    frozen.reset()
    frozen.whole_step(weight_decay)
    fast, norms = {name: tensor.clone() for name, tensor in frozen.outcome().items()}, frozen.norms()
    frozen.reset()
    with on_twins(frozen.exchanges):
        frozen.whole_step(weight_decay)
    different = [name for name, tensor in frozen.outcome().items() if not torch.equal(tensor, fast[name])]
    close = all(torch.allclose(a, b, rtol=_NORM_RTOL) for a, b in zip(frozen.norms(), norms, strict=True))
    different += [] if close else ["norms"]
    frozen.reset()
    if different:
        raise RuntimeError(
            f"kernels differ from twins ({frozen.config.name}, {frozen.ranks} ranks, weight decay {weight_decay}) in: "
            f"{', '.join(different[:20])}"
        )
    if not all(bool(bandwidth.values(state).isfinite().all()) for state in frozen.states):
        raise RuntimeError("velocity or residual is not finite: the states are not realistic")

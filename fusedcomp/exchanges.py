"""The exchanges of a front's buckets: launched one by one as gradients come, finished together.

    launch  launch  launch ...  ->  arrive: wait for all, read headers, one verdict  ->  apply: all buckets

No bucket is applied before all are here. What a rank says of itself (it failed, a gradient was not finite) reaches the
host in pinned memory, which it reads without waiting.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedcomp import metrics
from fusedcomp._dispatch import ops
from fusedcomp.blocktopk import BlockExchange
from fusedcomp.buckets import Bucket
from fusedcomp.checkpoint import Steps
from fusedcomp.compressors import CAT, BlockTopK, Compressor, RandomK, Threshold, TopK
from fusedcomp.exchange import Exchange, Hyper, Shared
from fusedcomp.kernels.headers import RANKS_DIFFER
from fusedcomp.kernels.segments import Staging
from fusedcomp.levels import Levels, ShardedExchange
from fusedcomp.memories import Memory
from fusedcomp.narrow import NarrowExchange, is_narrow
from fusedcomp.pipeline import DenseExchange
from fusedcomp.randomk import RandomExchange
from fusedcomp.rooms import Adaptive
from fusedcomp.shares import Shares
from fusedcomp.sparse import SparseExchange
from fusedcomp.split import SplitExchange
from fusedcomp.tree import TreeExchange
from fusedcomp.tuned import TunedExchange

_BY_COLLECTIVE: dict[str, Callable[..., SparseExchange]] = {
    "gather": SparseExchange,
    "tree": TreeExchange,
    "split": SplitExchange,
}


def _kind(compressor: TopK | Threshold | CAT) -> Callable[..., SparseExchange]:
    """What makes an exchange of entries that are ranked."""
    if isinstance(compressor, CAT):
        return TunedExchange
    return _BY_COLLECTIVE[compressor.collective if isinstance(compressor, TopK) else "gather"]


@dataclass(frozen=True)
class Plan:
    """How a front's buckets are exchanged; those of one param group alike."""

    compressor: Compressor
    memory: Memory
    with_momentum: bool
    state_dtype: torch.dtype
    levels: Levels | None = None
    always_sparse: bool = False
    compressed: int = 0  # elements of all of the front's sparse buckets
    ranked: bool = False  # do entries have weights?
    dense_dtype: torch.dtype = torch.float32  # of what is never compressed, as it travels

    def exchange(self, bucket: Bucket, shared: Shared, seed: Tensor, sums: Tensor | None) -> Exchange:
        """The exchange of a bucket. ``sums``: room for the sums over ranks of 16-bit parameters."""
        if not bucket.treatment.sparse:
            segments = bucket.segments
            if is_narrow(segments.numel, len(segments.numels), self.dense_dtype, shared.group.world_size):
                return NarrowExchange(bucket, shared, seed, self.with_momentum, self.dense_dtype)
            return DenseExchange(bucket, shared, seed, self.with_momentum)

        if isinstance(self.compressor, RandomK):
            return RandomExchange(
                bucket, shared, seed, self.compressor, self.memory, self.with_momentum, self.state_dtype, sums
            )

        if isinstance(self.compressor, BlockTopK):
            return BlockExchange(
                bucket, shared, seed, self.compressor, self.memory, self.with_momentum, self.state_dtype,
                self.always_sparse, sums,
            )  # fmt: skip

        def make(bucket: Bucket, shared: Shared, seed: Tensor) -> SparseExchange:
            assert isinstance(self.compressor, (TopK, Threshold, CAT))
            return _kind(self.compressor)(
                bucket, shared, seed, self.compressor, self.memory, self.with_momentum, self.state_dtype,
                self.always_sparse, sums, self.compressed, self.ranked,
            )  # fmt: skip

        if self.levels is None or self.levels.intra.world_size == 1:
            return make(bucket, shared, seed)
        assert isinstance(self.compressor, TopK)
        return ShardedExchange(bucket, shared, seed, self.levels, self.compressor, self.always_sparse, make)


_STATUSES: list[Tensor] = []


def status_on(device: torch.device) -> Tensor:
    """Pinned, so that kernels write where the host reads, in the rare step in which there is something to write.

    Never given back: a kernel on its way when an optimizer is dropped would write into what somebody else got.
    """
    status = torch.zeros(3, dtype=torch.int32, pin_memory=device.type == "cuda")
    if device.type == "cuda":
        _STATUSES.append(status)
    return status


class _Sampling:
    """What a sampler says, on its way to the buckets."""

    def __init__(self, exchanges: Sequence[Exchange], device: torch.device) -> None:
        self._exchanges = exchanges
        counts = [len(exchange.bucket.segments.numels) for exchange in exchanges]
        self._factors = torch.ones(sum(counts), dtype=torch.float32, device=device)
        self._staging = Staging(self._factors.shape, torch.float32, device)
        self._told: list[float] = []
        self._active: list[bool] | None = None
        for exchange, part in zip(exchanges, self._factors.split(counts), strict=True):
            exchange.sample(part)

    def tell(self, factors: list[float], active: list[bool] | None) -> None:
        """These from now on."""
        if factors != self._told:
            self._told = factors
            self._staging.send(torch.tensor(factors, dtype=torch.float32), self._factors)
        if active != self._active:
            self._active = active
            start = 0
            for exchange in self._exchanges:
                end = start + len(exchange.bucket.params)
                exchange.arrange(None if active is None else active[start:end])
                start = end

    def end(self) -> None:
        """No more."""
        for exchange in self._exchanges:
            exchange.sample(None)
            exchange.arrange(None)
            exchange.observed = False


class Exchanges(Sequence[Exchange]):
    """All buckets of one front.

    Args:
        shared: what they have in common.
        device: where they are.
        begun: how far the run was.
    """

    def __init__(self, shared: Shared, device: torch.device, begun: Steps) -> None:
        self.shared, self.device, self._begun = shared, device, begun
        self.step = sum(begun)  # the number of the next one, as the host counts: replays of a graph it does not see
        # By address, for indexing a tensor takes 30 microseconds of every step.
        self._said = (ctypes.c_int32 * 3).from_address(shared.status.data_ptr())
        self._members: list[Exchange] = []
        self._shares: list[Shares] = []
        self._sampling: _Sampling | None = None
        self._concluded = torch.cuda.Event() if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # of an index or a slice, as a list
        return self._members[index]

    def __iter__(self) -> Iterator[Exchange]:
        return iter(self._members)

    def plan(self, exchanges: Iterable[Exchange]) -> None:
        """These are the buckets from now on."""
        self._members = list(exchanges)
        self._sampling = self.shared.squares = None
        clip = self.shared.clip
        if clip is not None and clip.scope == "model":
            self._lay_out_squares()
        self._shares = list(self._share_out())

    def _lay_out_squares(self) -> None:
        """One table of squared norms, of which every bucket fills in its part."""
        counts = [len(e.bucket.segments.numels) for e in self]
        self.shared.squares = torch.zeros(sum(counts), dtype=torch.float32, device=self.device)
        for exchange, part in zip(self, self.shared.squares.split(counts), strict=True):
            exchange.squares = part

    def _share_out(self) -> Iterator[Shares]:
        """Where selections rank over the whole model: one for the buckets of each compressor."""
        members: dict[TopK, list[SparseExchange]] = {}
        for exchange in self:
            if isinstance(exchange, SparseExchange):
                compressor = exchange.compressor
                if isinstance(compressor, TopK) and compressor.scope == "model":
                    members.setdefault(compressor, []).append(exchange)
        for compressor, those in members.items():
            limits = {exchange: limit for exchange in those if (limit := exchange.limit) > 0}
            if not limits:
                continue
            numels = [exchange.bucket.segments.numel for exchange in limits]
            shares = Shares(compressor, numels, list(limits.values()), self.shared.group.world_size, self.device)
            for number, exchange in enumerate(limits):
                exchange.join(shares, number)
            yield shares

    def new_seed(self) -> Tensor:
        """The device's own count of steps, for one bucket."""
        if self._members:
            return self._members[0].seed.clone()
        return torch.full((1,), self._begun.taken, dtype=torch.int32, device=self.device)

    # ---- a sampler ---------------------------------------------------------------------------------------------

    @property
    def is_sampled(self) -> bool:
        """Do these buckets know of a sampler?"""
        return self._sampling is not None

    def sample(self, factors: list[float], active: list[bool] | None, observed: bool) -> None:
        """From the next launch on multiply gradients by numbers, before all else.

        Args:
            factors: of the parameters of all buckets, in order.
            active: of the same, if there will be a gradient, as all ranks know; None: they do not.
            observed: leave the squares of the norms of the products in ``shared.squares``.
        """
        if self._sampling is None:
            self._sampling = _Sampling(self._members, self.device)
            if self.shared.squares is None:
                self._lay_out_squares()
        self._sampling.tell(factors, active)
        for exchange in self:
            exchange.observed = observed

    def end_sampling(self) -> None:
        """No more of ``sample``."""
        if self._sampling is not None:
            self._sampling.end()
            self._sampling = None

    # ---- a step ------------------------------------------------------------------------------------------------

    def arrive(self, name_of: Callable[[Tensor], str]) -> None:
        """Make the current stream (on CPU: the host) wait for all buckets; decide whether the step counts.

        Args:
            name_of: a parameter's name for messages.

        Raises:
            RuntimeError: an exchange failed; the message names parameters of its bucket.
        """
        for exchange in self:
            self._wait(exchange, name_of)
        verdict = self.shared.verdict
        if verdict is None:
            return
        for exchange in self:
            exchange.read()
        ops(self.device).verdict.conclude(verdict.nonfinite, verdict.found_inf, verdict.parity, self.shared.status)
        if self._concluded is not None and not torch.cuda.is_current_stream_capturing():
            self._concluded.record()
        for exchange in self:
            exchange.annul()

    def apply(self, hyper_of: Callable[[Bucket], Hyper] | None) -> None:
        """Update what the buckets' operands have as parameters; None: take in nothing. The step is over."""
        for exchange in self:
            if hyper_of is not None:
                exchange.apply(hyper_of(exchange.bucket))
            exchange.bucket.operands.release()
        for shares in self._shares:
            shares.meet(self.shared.found_inf)
        self.step += 1

    def _wait(self, exchange: Exchange, name_of: Callable[[Tensor], str]) -> None:
        try:
            exchange.wait()
        except RuntimeError as error:
            names = ", ".join(name_of(p) for p in exchange.bucket.params[:8])
            raise RuntimeError(
                f"the exchange of the bucket with parameters {names} failed in step {self.step}: a rank is gone, or "
                f"did not reach the end of its step within the process group's timeout ({error})"
            ) from error

    # ---- what ranks say of failures ----------------------------------------------------------------------------

    def forget_failure(self) -> None:
        """The caller knows."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what is on its way would say it once more
        self._said[1] = 0

    def raise_if_peer_failed(self) -> None:
        """On CPU at once; on CUDA as soon as the device has got there, without waiting for it.

        Raises:
            RuntimeError: another rank failed, or ranks encode their payloads differently.
        """
        said = self._said[1]
        if said == 0:
            return
        self.forget_failure()
        if said & RANKS_DIFFER.value:
            raise RuntimeError(
                "ranks encode their payloads differently, or are at different steps, so that what was sent may have "
                "been misread and parameters may differ between ranks. Give every rank the same compressors, and "
                "checkpoints of the same step; then reload model and optimizer from a checkpoint, as the present "
                "parameters cannot be trusted"
            )
        raise RuntimeError(
            "another rank failed during the exchange; its own error says why. What had been sent was applied on all "
            "ranks alike"
        )

    # ---- what is known of it -----------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """Steps skipped so far; waits until the last step's headers have been read, which precedes its update."""
        if self._concluded is not None:
            self._concluded.synchronize()
        return self._begun.skipped + self._said[2]

    def steps(self) -> Steps:
        """How far the run is, replays of a CUDA graph counted; asks the device."""
        taken = int(self._members[0].seed) if self._members else self.step - self._begun.skipped
        return Steps(taken, self.skipped)

    def sizes(self) -> list[dict[str, Any]]:
        """What steps so far decide of the sizes of payloads, as plain data; asks the device."""
        return [sized.state() for sized in self._sized()]

    def restore(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Go on with these sizes; of other buckets they are of no use."""
        for sized, state in zip(self._sized(), kept, strict=False):
            sized.restore(state)

    def _sized(self) -> list[Shares | Adaptive]:
        """What remembers sizes from one step to the next."""
        sizings = [exchange.sizing for exchange in self if isinstance(exchange, SparseExchange)]
        return [*self._shares, *(sizing for sizing in sizings if isinstance(sizing, Adaptive))]

    def normalise(self) -> None:
        """Let the first half of the states be the one that holds: for whoever looks at them from outside."""
        parity = self.shared.parity
        if parity is None:
            return
        for exchange in self:
            for first, second in exchange.kept.halves():
                torch.where(parity == 0, first, second, out=first)
        parity.zero_()

    def metrics(self) -> dict[str, Tensor]:
        """What ``CompressedOptimizer.metrics`` documents."""
        return metrics.of_step(self, self.shared.status, self._begun.skipped, self.device)

"""Collectives: how payloads travel. A group of ranks, of one where torch.distributed is not initialised."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _timeout(process_group: dist.ProcessGroup | None) -> timedelta | None:
    """How long a group's collectives may take; None where its backend does not tell."""
    group = dist.group.WORLD if process_group is None else process_group
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout  # type: ignore[union-attr]
        except (RuntimeError, AttributeError):
            continue
    return None


# Ranks of a group -> how many process groups were there when the last private one was named after that (below).
_LAST_NAMED: dict[tuple[int, ...], int] = {}


def _is_group(value: Any) -> bool:
    """None, a process group, or what torch gives to ranks outside one (refused with a message of its own)."""
    if value is None or not dist.is_available():
        return value is None
    outside = isinstance(value, int) and value == dist.GroupMember.NON_GROUP_MEMBER
    return outside or isinstance(value, dist.ProcessGroup)


@contextlib.contextmanager
def _same_count(ranks: list[int], gather: Callable[[int], list[int]]) -> Iterator[None]:
    """Let these ranks know equally many process groups, for as long as a new one is made.

    torch names a group that only its members make after their number, and finds peers by that name: ranks that
    take part in different subgroups would wait for each other under different names. (A group of the whole world
    is named after the calls that all ranks make alike.) The difference is made up by groups of this rank alone.
    ``gather``: what all of these ranks give.
    """
    known = dist.distributed_c10d._world.pg_names
    key = tuple(sorted(ranks))
    # Above the last one: where groups were destroyed, a name would be given twice.
    count = max(gather(max(len(known), _LAST_NAMED.get(key, 0) + 1)))
    _LAST_NAMED[key] = count
    alone = []
    try:
        while len(known) < count:
            alone.append(dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))
        yield
    finally:
        for group in alone:
            dist.destroy_process_group(group)


class Group:
    """The ranks that exchange: ``process_group``, the default group, or this process alone.

    A group of one moves nothing.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.distributed = dist.is_available() and dist.is_initialized()
        if not _is_group(process_group):
            # Told on the default group, where ranks that were given none are; those of a subgroup cannot be reached.
            with Group(None).refusing():
                raise TypeError(
                    f"process_group must be a torch.distributed.ProcessGroup or None, got {process_group!r}"
                )
        if process_group is not None and not self.distributed:
            raise ValueError("process_group was given, but torch.distributed is not initialised")
        self.world_size: int = dist.get_world_size(process_group) if self.distributed else 1
        self.rank: int = dist.get_rank(process_group) if self.distributed else 0
        if self.rank < 0:
            raise ValueError("this process is not a member of process_group")

    @staticmethod
    def of_grid(intra: "Group", inter: "Group") -> "Group":
        """All ranks of all nodes; every one of them must call this alike.

        Raises:
            ValueError: the ranks are no grid: nodes differ in size, or a rank has another place in its node than the
                ranks it is to exchange with have in theirs.
        """
        places = inter._gather_objects((intra.rank, intra.world_size), None)
        alike = all(place == (intra.rank, intra.world_size) for place in places)
        told = intra._gather_objects((alike, inter.ranks), None)
        if not all(there for there, _ in told) or len({len(ranks) for _, ranks in told}) > 1:
            raise ValueError(
                "process_group=(intra_node, inter_node): the ranks must be a grid, with nodes of one size, and the "
                f"inter_node group of a rank those that have its place in theirs; this is place {intra.rank} of "
                f"{intra.world_size}, its group between nodes has {places}"
            )
        ranks = sorted({rank for _, ranks in told for rank in ranks})
        if not intra.distributed or len(ranks) == dist.get_world_size():
            return Group(None)

        def gather(mine: Any) -> list[Any]:
            return inter._gather_objects(max(intra._gather_objects(mine, None)), None)

        with _same_count(ranks, gather):
            return Group(dist.new_group(ranks, use_local_synchronization=True))

    @property
    def ranks(self) -> list[int]:
        """Of this group, as the default group numbers them."""
        return dist.get_process_group_ranks(self.process_group or dist.group.WORLD) if self.distributed else [0]

    def private(self, device: torch.device | None) -> "Group":
        """The same ranks with a communicator of their own; all of them must call this alike.

        Collectives are matched by their order on a communicator. On a shared one, another optimizer's, or the user's
        all_reduce between backward() and step(), could be taken for ours on a rank where a bucket launches late.
        """
        if self.world_size == 1:
            return self
        ranks = self.ranks
        subset = len(ranks) < dist.get_world_size()
        own = copy.copy(self)
        gather = functools.partial(self._gather_objects, device=device)
        with _same_count(ranks, gather) if subset else contextlib.nullcontext():
            own.process_group = dist.new_group(
                ranks,
                backend=dist.get_backend(self.process_group),
                timeout=_timeout(self.process_group),
                use_local_synchronization=subset,  # ranks outside are not asked
            )
        return own

    def all_gather(self, out: Tensor, own: Tensor) -> Any:
        """Start gathering ``own`` (nbytes,) of all ranks into ``out`` (world, nbytes); the work, or None when done."""
        if self.world_size == 1:
            return None  # ``own`` is row 0 of ``out``
        # torch 2.13 calls it all_gather_single and deprecates the old name; 2.11 has only that.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(out.view(-1), own, group=self.process_group, async_op=True)

    def swap(self, own: Tensor | None, out: Tensor | None, peer: int) -> list[Any]:
        """Start sending ``own`` to a rank of this group and receiving ``out`` from it; the works."""
        moves = [(dist.isend, own), (dist.irecv, out)]
        group = self.process_group
        return dist.batch_isend_irecv(
            [dist.P2POp(move, tensor, group=group, group_peer=peer) for move, tensor in moves if tensor is not None]
        )

    def all_to_all(self, out: Tensor, own: Tensor, owners: int) -> Any:
        """Start sending row r of ``own`` (owners, nbytes) to rank r; an owner receives every rank's into ``out``."""
        send = [own.shape[1] * (rank < owners) for rank in range(self.world_size)]
        receive = [own.shape[1] * (self.rank < owners)] * self.world_size
        return dist.all_to_all_single(
            out.view(-1), own.view(-1), receive, send, group=self.process_group, async_op=True
        )  # fmt: skip

    def reduce_scatter(self, own: Tensor, rows: Tensor) -> Any:
        """Start summing ``rows`` (world, numel) over ranks, this rank's into ``own``; the work, or None when done."""
        if self.world_size == 1:
            own.copy_(rows[0])
            return None
        # As for all_gather: torch 2.13 has a new name, 2.11 only the old.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(own, rows.view(-1), group=self.process_group, async_op=True)

    def all_reduce(self, tensor: Tensor) -> Any:
        """Start summing ``tensor`` over ranks in place; the work, or None when done."""
        if self.world_size == 1:
            return None
        return dist.all_reduce(tensor, group=self.process_group, async_op=True)

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Give every rank the values of the group's rank 0."""
        if self.world_size == 1:
            return
        source = 0 if self.process_group is None else dist.get_global_rank(self.process_group, 0)
        for tensor in tensors:
            dist.broadcast(tensor, source, group=self.process_group)

    def _gather_objects(self, mine: Any, device: torch.device | None) -> list[Any]:
        """What every rank gave, by rank; NCCL gathers objects on the current device, unless another is named."""
        everyone = [mine] * self.world_size
        if self.world_size > 1:
            with torch.cuda.device(device if device is not None and device.type == "cuda" else -1):
                dist.all_gather_object(everyone, mine, group=self.process_group)
        return everyone

    def gather_to_first(self, mine: Any) -> list[Any] | None:
        """On the group's rank 0 what every rank gave, by rank; None on the others."""
        if self.world_size == 1:
            return [mine]
        everyone: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        first = 0 if self.process_group is None else dist.get_global_rank(self.process_group, 0)
        dist.gather_object(mine, everyone, dst=first, group=self.process_group)
        return everyone

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Checks ahead of ``agree``: where they raise, the peers that are in ``agree`` already are told, and raise."""
        try:
            yield
        except Exception:
            self._gather_objects(None, None)  # on the current device: parameters may be what is refused
            raise

    def agree(self, settings: Mapping[str, str], device: torch.device | None) -> None:
        """Compare ``settings`` over ranks; all ranks raise alike, naming the first field that differs.

        Raises:
            ValueError: a field differs between rank 0 and another rank, or a rank is in ``refusing``.
        """
        everyone = self._gather_objects(dict(settings), device)
        if None in everyone:
            raise ValueError(f"rank {everyone.index(None)} refused its arguments; its own error says why")
        for rank, other in enumerate(everyone):
            for field in [*everyone[0], *(f for f in other if f not in everyone[0])]:
                mine, theirs = everyone[0].get(field, "nothing"), other.get(field, "nothing")
                if mine != theirs:
                    raise ValueError(
                        f"ranks were given different settings: {field} is {mine} on rank 0, {theirs} on rank {rank}"
                    )

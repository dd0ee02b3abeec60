"""What a message costs, for ``CAT``: frozen records that check themselves.

AffineCost  per_byte * bytes + fixed
PacketCost  (payload + header) * packets + fixed
LinkCost    compute + (W - 1) (latency + bytes / bandwidth) seconds
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from fusedcomp.link import SECONDS, measure_link
from fusedcomp.values import is_number, plain

_LARGEST = 1e15  # whole bytes of a packet are counted in 64 bits


class Message(NamedTuple):
    """What a bucket sends for k entries: ``head + entry * k`` bytes, to so many ranks."""

    head: int
    entry: int
    world_size: int
    share: float  # the bucket's, of all that is compressed


class Terms(NamedTuple):
    """A cost as the device reckons it: ``each * ceil((entries + lead) / whole) + fixed``."""

    each: float
    fixed: float
    whole: int = 1
    lead: int = 0


@dataclass(frozen=True)
class AffineCost:
    """``per_byte * bytes + fixed`` for every message: a link with a price per byte, and one per message.

    Args:
        per_byte: of what a rank sends for a bucket, its header included. Only ``fixed / per_byte`` matters.
        fixed: of a message, whatever its length: handshake, framing, energy of a radio that wakes up.

    Raises:
        ValueError: an argument is out of range, or all messages cost nothing.
    """

    per_byte: float = 1.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "per_byte", "fixed")
        if self.per_byte == self.fixed == 0.0:
            raise ValueError("AffineCost: per_byte or fixed must be > 0, got 0.0 for both")

    def terms(self, message: Message) -> Terms:
        """Of one bucket's message."""
        return Terms(self.per_byte * message.entry, self.per_byte * message.head + self.fixed)


@dataclass(frozen=True)
class PacketCost:
    """``(payload + header) * packets + fixed`` for every message: what is cut into packets, each paid for in full.

    Args:
        payload: bytes of a message that a packet carries; 1460 is TCP's over Ethernet. Entries are not divided.
        header: bytes that a packet has besides.
        fixed: bytes of a message besides its packets, such as an acknowledgement.

    Raises:
        ValueError: an argument is out of range.
    """

    payload: float = 1460.0
    header: float = 78.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "payload", "header", "fixed")
        if self.payload < 6.0:
            raise ValueError(f"PacketCost: payload must be at least 6 bytes, an entry's, got {self.payload!r}")

    def terms(self, message: Message) -> Terms:
        """Of one bucket's message."""
        lead = math.ceil(message.head / message.entry)
        return Terms(self.payload + self.header, self.fixed, int(self.payload // message.entry), lead)


@dataclass(frozen=True)
class LinkCost:
    """Seconds of a step: ``compute + (W - 1) * (latency + bytes / bandwidth)``, an all-gather over W ranks in a ring.

    Of several buckets each has its share of ``compute``, by elements. One rank alone reckons as if there were two.

    Args:
        latency: of a hop, seconds.
        bandwidth: of a rank, in one direction, bytes per second.
        compute: seconds that a step takes besides, if nothing is sent.

    Raises:
        ValueError: an argument is out of range.
    """

    latency: float
    bandwidth: float
    compute: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "latency", "bandwidth", "compute")
        if self.bandwidth == 0.0:
            raise ValueError("LinkCost: bandwidth must be > 0, got 0.0")

    @classmethod
    def measure(
        cls, process_group: dist.ProcessGroup | None = None, compute: float = 0.0, *, seconds: float = SECONDS
    ) -> "LinkCost":
        """Of the network as it is now; all ranks must call it, and get the same.

        Args:
            process_group: the ranks; None: the default group.
            compute: as of the class; not measured.
            seconds: after which no larger message is tried.

        Raises:
            RuntimeError: torch.distributed is not initialised, or has one rank.
        """
        link = measure_link(process_group, seconds=seconds)
        return cls(link.latency_s, link.bandwidth_bytes_per_s, compute)

    def terms(self, message: Message) -> Terms:
        """Of one bucket's message."""
        hops = max(message.world_size - 1, 1)
        per_byte = hops / self.bandwidth
        fixed = self.compute * message.share + hops * self.latency
        return Terms(per_byte * message.entry, per_byte * message.head + fixed)


def _check(cost: Any, *names: str) -> None:
    for name in names:
        value = getattr(cost, name)
        if not is_number(value) or not 0.0 <= value <= _LARGEST:
            raise ValueError(f"{type(cost).__name__}: {name} must be a number from 0 to 1e15, got {value!r}")
        object.__setattr__(cost, name, float(plain(value)))


Cost = AffineCost | PacketCost | LinkCost
COSTS = (AffineCost, PacketCost, LinkCost)

"""What a message costs, for ``CAT``: frozen records that check themselves.

AffineCost  per_byte * bytes + fixed
PacketCost  (payload + header) * packets + fixed
LinkCost    seconds: the step's computing, a hop, and the bytes of the other ranks
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusedcomp.values import is_number, plain


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


def _check(cost: Any, *names: str) -> None:
    for name in names:
        value = getattr(cost, name)
        if not is_number(value) or not 0.0 <= value < math.inf:
            raise ValueError(f"{type(cost).__name__}: {name} must be finite and >= 0, got {value!r}")
        object.__setattr__(cost, name, float(plain(value)))


Cost = AffineCost | PacketCost
COSTS = (AffineCost, PacketCost)

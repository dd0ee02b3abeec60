"""Several nodes on one host: a network namespace each, a veth pair to a bridge, a token bucket at both ends of it.

NCCL_HOSTID differs per node, so that NCCL takes the nodes for separate hosts and every byte between them crosses the
shaped links as TCP. Latency is that of the host: netem, which would add some, is not in every kernel.

Needs root, Linux (VETH, BRIDGE, NET_NS, NET_SCH_TBF) and pyroute2; its wheel in .wheels/ is found without installing.
"""

import ctypes
import os
import socket
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NODE = "FUSEDCOMP_NODE"  # environment variable: the namespace of a rank

_HANDLE = 0x10000
_CLONE_NEWNET = 0x40000000


def enter() -> None:
    """Move this process to its node. Before torch is imported: threads that exist already would stay behind."""
    if NODE not in os.environ:
        return
    with open(f"/var/run/netns/{os.environ[NODE]}") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns is new in Python 3.12
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {os.environ[NODE]}")


def token_bucket(rate_mbit: int) -> dict[str, int]:
    """The arguments of a tbf qdisc.

    It holds at most 0.5 ms of line rate: a larger burst lets whole compressed steps cross unshaped. ``peak`` and
    ``mtu`` only bound the queue: pyroute2 0.9 does not pass a peak rate on to the kernel, so that a burst leaves at
    the speed of the host, which is what the gate (linkgate.py) is for.
    """
    rate = rate_mbit * 1_000_000 // 8
    return {
        "rate": rate,
        "burst": max(65536, min(262144, rate // 2000)),
        "latency": 100_000,
        "peak": rate * 21 // 20,
        "mtu": 65536 if rate_mbit <= 2500 else 131072,
    }


class HostNetwork:
    """No namespaces: all ranks on this host, over whatever NCCL or gloo finds."""

    address = "127.0.0.1"
    is_shaped = False

    def __init__(self, count: int = 1) -> None:
        self.count = count

    def set_rate(self, rate_mbit: int) -> None:
        """Nothing to shape."""

    def environment(self, node: int) -> dict[str, str]:
        """Nothing that differs between ranks."""
        return {}

    def close(self) -> None:
        """Nothing to take down."""


class Nodes:
    """``count`` namespaces on one bridge, unshaped until ``set_rate``; what has the same ``prefix`` is replaced.

    ``helpers``: two threads more in every rank and four connections to a peer, since one TCP stream does not fill
    25 Gbit/s. They take CPUs, which many nodes on one host are short of.
    """

    address = "10.77.0.1"
    is_shaped = True

    def __init__(self, count: int, prefix: str = "fcnode", helpers: bool = True) -> None:
        _find_pyroute2()
        from pyroute2 import IPRoute

        self.count, self.prefix, self.helpers, self.rate_mbit = count, prefix, helpers, 0
        self._host = IPRoute()
        self._ends: list[tuple[Any, int]] = []  # (netlink socket, interface index) of every end of a link
        self._remove()
        try:
            self._host.link("add", ifname=f"{prefix}-br", kind="bridge")
            bridge = self._host.link_lookup(ifname=f"{prefix}-br")[0]
            self._host.link("set", index=bridge, state="up")
            for node in range(count):
                self._add(node, bridge)
        except BaseException:
            self.close()
            raise

    def _add(self, node: int, bridge: int) -> None:
        from pyroute2 import NetNS, netns

        name = f"{self.prefix}{node}"
        netns.create(name)
        self._host.link("add", ifname=name, kind="veth", peer={"ifname": "eth0", "net_ns_fd": name})
        outer = self._host.link_lookup(ifname=name)[0]
        self._host.link("set", index=outer, master=bridge, state="up")
        inside = NetNS(name)
        inner = inside.link_lookup(ifname="eth0")[0]
        self._ends += [(self._host, outer), (inside, inner)]
        inside.addr("add", index=inner, address=f"10.77.0.{node + 1}", prefixlen=24)
        for index in (inner, inside.link_lookup(ifname="lo")[0]):
            inside.link("set", index=index, state="up")

    def set_rate(self, rate_mbit: int) -> None:
        """Shape all links, both ways, while they are in use; 0 takes the shaping away."""
        if rate_mbit == self.rate_mbit:
            return
        for end, index in self._ends:
            if rate_mbit:
                end.tc("replace", "tbf", index, _HANDLE, **token_bucket(rate_mbit))
            else:
                end.tc("del", index=index, handle=_HANDLE, root=True)
        self.rate_mbit = rate_mbit

    def environment(self, node: int) -> dict[str, str]:
        """What a rank on ``node`` needs to know."""
        helpers = {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"} if self.helpers else {}
        return helpers | {
            NODE: f"{self.prefix}{node}",
            "NCCL_HOSTID": f"{self.prefix}{node}",
            "NCCL_SOCKET_IFNAME": "eth0",
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_NVLS_ENABLE": "0",
        }

    def close(self) -> None:
        """Take everything down."""
        for end, _ in self._ends:
            if end is not self._host:
                end.close()
        self._ends.clear()
        self._remove()
        self._host.close()

    def _remove(self) -> None:
        """What this or an interrupted run has left; a veth pair goes with either of its ends."""
        from pyroute2 import netns

        for link in self._host.get_links():
            if link.get_attr("IFLA_IFNAME").startswith(self.prefix):
                self._host.link("del", index=link["index"])
        for name in netns.listnetns():
            if name.startswith(self.prefix):
                netns.remove(name)


Network = HostNetwork | Nodes


def _find_pyroute2() -> None:
    """A wheel carried along to a machine without a registry; pure Python is imported from the zip as it is."""
    sys.path[:0] = [str(wheel) for wheel in sorted((ROOT / ".wheels").glob("pyroute2-*.whl"))]


def free_port() -> int:
    """A TCP port nobody listens on, in this namespace."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]

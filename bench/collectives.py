"""How payloads travel over slow links: gathered, merged along a tree, split and reduced, on 2, 4 and 8 nodes.

    python bench/collectives.py                          about 4 minutes; needs root and pyroute2
    python bench/collectives.py --quick --device cpu     two gloo ranks without namespaces: a smoke test

Every rank is a node of its own behind a shaped link (nodes.py) and exchanges and updates 6.5 M elements with nothing to
hide behind (flat.py). Where there are fewer GPUs than nodes, nodes share them: start the GPU's process server first
(nvidia-cuda-mps-control -d), or their kernels take turns. What a rank computes is then slower than on a GPU of its own;
``alone``, the same without an exchange, says how long it takes there.

A figure is the median of rank 0. No row is recorded whose parameters are not the same on all ranks, bit for bit; none
at a rate that the network does not keep to (linkgate.py). Records are written as rows finish.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import flat
import harness
import netlab
from harness import log
from netlab import Bench, Layout
from rankset import CellError

SIZE = "flat6.5m"
NODES, RATES = (8, 4, 2), (10_000, 1_000)
SETTLE_SECONDS, TRAVEL_SECONDS = 90, 60


class Set(netlab.Set):
    """Nodes in one number: their processes, and the rows and rates that are left to measure."""

    helpers = False

    def _load(self) -> None:
        self.facts = self._ask("links", netlab.PREPARE_SECONDS)[0]

    def _cell(self, rate: int | None, row: str, gate: dict[str, Any]) -> None:
        case = self.layout.case(SIZE, rate)
        try:
            self._ask("settle", SETTLE_SECONDS, row=row)
            self.network.set_rate(rate or 0)
            found = self._ask("travel", TRAVEL_SECONDS, row=row)
        except CellError as error:
            self.bench.failed(f"{case} {row}: {error}")
        else:
            self._record_row(case, row, found, gate)
        self.network.set_rate(0)

    def _record_row(self, case: str, row: str, found: list[dict[str, Any]], gate: dict[str, Any]) -> None:
        if not row.startswith("alone") and not all(rank["identical"] for rank in found):
            self.bench.failed(f"{case} {row}: parameters differ between ranks")
            return
        figures = netlab.spread([rank["ms"] for rank in found])
        self.bench.record(
            bench="collectives", case=case, provider=row, metric="ms", **figures, world=self.layout.ranks,
            bytes_sent=found[0]["bytes_sent"], gate=gate, nccl=self.ranks.transport(), **self.facts,
        )  # fmt: skip
        log(f"  {case} {row}: {figures['value']:.3f} ms")


def main() -> None:
    arguments = _arguments()
    bench = Bench(arguments, time.monotonic() + arguments.budget)
    rows = tuple(row for row in flat.LINKS if row in arguments.rows)
    for nodes in arguments.nodes:
        layout = Layout(f"{nodes}x1", nodes, 1, tuple((rate, rows) for rate in arguments.rates))
        if bench.has_time_for("set"):
            Set(bench, layout, SIZE).run()
        else:
            bench.failed(f"out of time: {nodes} nodes left out")
    netlab.finish(bench)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=None, help="default: 8 4 2, on CPU 2")
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="Mbit/s")
    parser.add_argument("--rows", choices=flat.LINKS, default=list(flat.LINKS), nargs="+", metavar="NAME")
    parser.add_argument("--budget", type=float, default=515.0, help="seconds after which nothing new is begun")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny, few repeats; records go to a new file")
    parser.add_argument("--network", choices=["netns", "host"], help="host: no namespaces, no shaping; default on CPU")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    folder = Path(tempfile.mkdtemp()) if arguments.quick else harness.ROOT / "bench" / "results"
    arguments.output = arguments.output or folder / "collectives.jsonl"
    arguments.network = arguments.network or ("host" if on_cpu else "netns")
    arguments.nodes = arguments.nodes or ([2] if on_cpu else list(NODES))
    return arguments


if __name__ == "__main__":
    main()

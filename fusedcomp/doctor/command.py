"""``python -m fusedcomp doctor``: a table of checks; with ``--link``, under torchrun, the speed of the network."""

import argparse
import dataclasses
import json
import os
import sys
import textwrap

import torch
import torch.distributed as dist

from fusedcomp.doctor.checks import FAILED, OK, WARNING, Check, run_checks
from fusedcomp.link import TIMEOUT, Link, measure_link

SUMMARY = "check that everything is there, and (--link) how fast the network between ranks is"
_START = "torchrun --nproc_per_node=2 -m fusedcomp doctor --link"
_COLOURS = {OK: "green", WARNING: "yellow", FAILED: "red"}
_WIDTH = 100  # of the table without rich


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--link", action="store_true", help=f"measure the network between ranks: {_START}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Look, print; the exit status."""
    return link(arguments.json) if arguments.link else check(arguments.json)


# ---- checks --------------------------------------------------------------------------------------------------------


def check(as_json: bool) -> int:
    """Run all checks; 1 if one failed. Of several ranks the first prints, and those where something failed."""
    _take_own_gpu()
    checks = run_checks()
    failed = [c for c in checks if c.status == FAILED]
    if os.environ.get("RANK", "0") == "0" or failed:
        if as_json:
            print(json.dumps({"ok": not failed, "checks": [dataclasses.asdict(c) for c in checks]}, indent=1))
        else:
            show(checks)
    return 1 if failed else 0


def show(checks: list[Check]) -> None:
    """A table: coloured where rich is installed, plain text elsewhere."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        print("\n".join(plain_table(checks)))
    else:
        table = Table("check", "", "found", "what to do")
        for one in checks:
            table.add_row(one.name, Text(one.status, _COLOURS[one.status]), Text(one.found), Text(one.advice))
        Console().print(table)
    print(summary(checks))


def plain_table(checks: list[Check]) -> list[str]:
    """Lines of at most 100 columns; advice stands under what it is for."""
    name, status = (max(len(getattr(c, field)) for c in checks) for field in ("name", "status"))
    indent = " " * (name + status + 4)
    lines = []
    for one in checks:
        first = f"{one.name:<{name}}  {one.status:<{status}}  "
        advice = f"-> {one.advice}" if one.advice else ""
        for words, start in ((one.found, first), (advice, indent)):
            lines += textwrap.wrap(words, _WIDTH, initial_indent=start, subsequent_indent=indent)
    return lines


def summary(checks: list[Check]) -> str:
    """How many of each."""
    counts = {status: sum(c.status == status for c in checks) for status in (OK, WARNING, FAILED)}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


# ---- the network ---------------------------------------------------------------------------------------------------


def link(as_json: bool) -> int:
    """Measure between the ranks that torchrun started; 2 where there is only one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        print(f"doctor --link measures between ranks, and this is one process: {_START}", file=sys.stderr)
        return 2
    if _take_own_gpu() and dist.is_nccl_available():
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        found = measure_link()
        if dist.get_rank() == 0:
            print(json.dumps(dataclasses.asdict(found), indent=1) if as_json else describe(found, dist.get_backend()))
    finally:
        dist.destroy_process_group()
    return 0


def _take_own_gpu() -> bool:
    """Make this rank's GPU the current one; False where ranks would have to share."""
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")) or not torch.cuda.is_available():
        return False
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return True


def describe(found: Link, backend: str) -> str:
    """The figures, and the command to run next."""
    lines = [
        f"{found.world_size} ranks, {backend}; medians, of the slowest rank",
        f"latency of a hop      {found.latency_s * 1e6:8.1f} us   (a small all-gather takes {found.world_size - 1})",
    ]
    for rate in found.rates:
        words = f"{rate.collective} of {_size(rate.nbytes)}"
        lines.append(f"{words:<21} {_gbits(rate.bytes_per_s):>8} Gbit/s per rank, {rate.seconds * 1e3:.3g} ms")
    return "\n".join([*lines, "", "What that means for a model:", plan_line(found)])


def _gbits(bytes_per_s: float) -> str:
    """Three digits, without an exponent."""
    return f"{float(f'{bytes_per_s * 8e-9:.3g}'):.9f}".rstrip("0").rstrip(".")


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 2**20 else f"{nbytes >> 10} KiB"


def plan_line(found: Link) -> str:
    """The command that predicts training on this network; ranks of one machine are taken for nodes of their own."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = max(1, found.world_size // per_node)
    if nodes == 1:
        nodes, per_node = found.world_size, 1
    return (
        f"python -m fusedcomp plan --model gpt2 --nodes {nodes} --gpus-per-node {per_node} --measured "
        f"--link {_gbits(found.bandwidth_bytes_per_s)}gbps --latency-us {found.latency_s * 1e6:.0f}"
    )

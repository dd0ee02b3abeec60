"""Benchmark records: one JSON object per line, appended, never rewritten.

Every line says what was measured (bench, case, provider, metric, value), on what (card, driver, torch, triton) and with
which code (commit, dirty, date, command); the rest is the benchmark's own. Tables and plots are made from these lines.

On a machine that has the files but not the repository, FUSEDCOMP_COMMIT says which commit they are.

    import records
    records.append(path, bench="step", case="resnet50", provider="fusedcomp_fp32", metric="ms", value=0.283, p20=0.281)
"""

import datetime
import functools
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
_OUTPUTS = ("--results", "--output", "--trace")  # name a folder of the machine
RESULTS = ROOT / "bench" / "results"


def append(path: Path, *, bench: str, case: str, provider: str, metric: str, value: float, **more: Any) -> None:
    """Add a line to ``path``; ``more`` are further fields, or other values for those of ``environment``."""
    record = {"bench": bench, "case": case, "provider": provider, "metric": metric, "value": value}
    record |= environment() | {"date": _now()} | more
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")  # NaN is not JSON; a figure that is none is no figure


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records in ``path``, oldest first."""
    with path.open() as file:
        yield from map(json.loads, file)


@functools.cache
def environment() -> dict[str, Any]:
    """What a figure depends on besides the benchmark: card, versions, code, command."""
    head, told = _output("git", "rev-parse", "--verify", "--quiet", "HEAD"), os.environ.get("FUSEDCOMP_COMMIT")
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({_cpu()})",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "commit": told or head or "uncommitted",
        "dirty": _dirty() if head and not told else None,  # None: unknown
        "command": _command(),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _cpu() -> str:
    """The processor's model name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)  # importing triton would settle whether it interprets
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints; None where it does not exist, fails or prints nothing."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _dirty() -> bool:
    """Does the code differ from the commit? Records themselves do not count: the last benchmark may have added some."""
    return _output("git", "status", "--porcelain", "--", ".", ":!bench/results") is not None


def _command() -> str:
    """The command line as typed from the root of the repository, but for where records go."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word in _OUTPUTS:
            next(words, None)
        elif word.partition("=")[0] not in _OUTPUTS:
            kept.append(word)
    return shlex.join(["python", name, *kept])

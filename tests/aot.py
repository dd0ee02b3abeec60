"""Compiles every kernel for a GPU that need not be there: ``python tests/aot.py 90 [report.json]`` prints a table.

The launchers run as in the product, on CPU tensors. Triton itself works out what a launch would compile (types,
divisibility, which arguments become constants); that is taken down in place of compiling and launching.
"""

import contextlib
import inspect
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from aot_cases import CASES, MODULES, calls
from fusedcomp.kernels._launch import INTERPRET


@dataclass
class Specialisation:
    """What triton would compile for one launch."""

    kernel: str
    source: ASTSource
    options: dict[str, Any]

    @property
    def constants(self) -> dict[str, Any]:
        """By parameter name, including arguments that are None or 1; of a device function, its name."""
        names = self.source.fn.arg_names
        values = {names[path[0]]: getattr(value, "value", value) for path, value in self.source.constants.items()}
        values = {name: v.fn.__name__ if isinstance(v, JITFunction) else v for name, v in values.items()}
        return {name: str(v) if isinstance(v, triton.language.dtype) else v for name, v in values.items()}

    @property
    def label(self) -> str:
        """The flags that are set, and what the compiler knows of the integers; nothing that is the same for all."""
        words = []
        for index, (name, kind) in enumerate(self.source.signature.items()):
            value = self.constants.get(name)
            if name == "ACCUMULATE":
                words.append(value.removeprefix("accumulate_"))
            elif value is True:
                words.append(name.removeprefix("HAS_").lower())
            elif name in ("ELEMENT", "WIRE"):
                words.append(str(value))
            elif name == "PER_BLOCK":
                words += [f"{value} per block"] if value else []
            elif kind == "constexpr" and not name.isupper() and value is not None:
                words.append(f"{name}={value}")
            elif kind in ("i32", "i64"):
                words += [f"{name}%16"] if self.source.attrs.get((index,)) else []
                words += [f"{name}:i64"] if kind == "i64" else []
            elif kind.startswith("*") and not self.source.attrs.get((index,)):
                words.append(f"{name}!%16")
        return " ".join(words)


def specialisations(target: GPUTarget) -> list[Specialisation]:
    """All distinct ones, in the order of ``CASES``."""
    found: dict[Any, Specialisation] = {}

    def take_down(fn: JITFunction, key: str, signature: Any, device: int, constants: Any, options: Any, attrs: Any, *_):
        name, source = fn.fn.__name__, ASTSource(fn, signature, constants, attrs)
        found.setdefault((name, key), Specialisation(name, source, vars(options)))

    # A launch asks the driver which GPU it compiles for.
    driver = {"target": target, "device": 0, "stream": 0}
    triton.runtime.driver.set_active(
        SimpleNamespace(**{f"get_current_{name}": lambda *_, value=value: value for name, value in driver.items()})
    )
    # Without a binary nothing is launched. The public hook at this place, jit_cache_hook, fails in triton 3.6 if a
    # constant is a device function.
    with mock.patch.object(JITFunction, "_do_compile", take_down):
        for launcher, values in calls():
            launcher(**values)
    return list(found.values())


def compiled(specialisation: Specialisation, target: GPUTarget) -> dict[str, Any]:
    """A row: what was compiled, and either the error or the figures of ptxas and of the PTX."""
    row = {
        "kernel": specialisation.kernel,
        "label": specialisation.label,
        "target": f"sm_{target.arch}",
        "constants": specialisation.constants,
        "warps": specialisation.options["num_warps"],
    }
    knobs.nvidia.dump_ptxas_log = True  # of the very binary, with whatever flags this version of triton passes
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            binary = triton.compile(specialisation.source, target=target, options=specialisation.options)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"}

    [registers] = re.findall(r"Used (\d+) registers", log.getvalue())
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    assert spills, f"no figures in the log of ptxas: {log.getvalue()}"

    def wide(operation: str) -> int:
        """How many instructions move 128 bits a thread."""
        return len(re.findall(rf"\b{operation}\.global\S*\.(?:v4\.\w32|v2\.\w64)\b", binary.asm["ptx"]))

    return row | {
        "registers": int(registers),
        "spills": sum(map(int, spills)),
        "shared": binary.metadata.shared,
        "wide_loads": wide("ld"),
        "wide_stores": wide("st"),
    }


TODO: list[Specialisation] = []  # forked workers find it in their memory: what holds functions cannot be pickled


def _compiled(index: int, target: GPUTarget) -> dict[str, Any]:
    return compiled(TODO[index], target)


def compile_all(capability: int) -> list[dict[str, Any]]:
    """The rows of all specialisations, compiled from scratch."""
    assert not INTERPRET, "the interpreter replaces what is to be compiled: unset TRITON_INTERPRET"
    torch.set_num_threads(1)  # a fork copies no threads
    target = GPUTarget("cuda", capability, 32)
    TODO[:] = specialisations(target)
    with tempfile.TemporaryDirectory() as cache:  # what is found in a cache comes without the log of ptxas
        knobs.cache.dir = cache
        with multiprocessing.get_context("fork").Pool(min(8, len(os.sched_getaffinity(0)))) as pool:
            return pool.map(partial(_compiled, target=target), range(len(TODO)), chunksize=1)


COLUMNS = ("registers", "spills", "shared", "wide_loads", "wide_stores")


def table(rows: list[dict[str, Any]]) -> str:
    """One line a specialisation."""
    lines = [("kernel", *COLUMNS, "specialisation")]
    lines += [(row["kernel"], *(str(row.get(name, "-")) for name in COLUMNS), row["label"]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def defined() -> dict[str, list[str]]:
    """What the modules hold that needs a case."""
    own = [f for module in MODULES for f in vars(module).values() if getattr(f, "__module__", "") == module.__name__]
    return {
        "kernels": [f.fn.__name__ for f in own if isinstance(f, JITFunction) and f.fn.__name__.endswith("_kernel")],
        "launchers": [f.__name__ for f in own if inspect.isfunction(f) and _launches(f)],
    }


def _launches(function: Callable[..., None]) -> bool:
    """A public function that launches, itself or through a helper of its module."""
    called = function.__code__.co_names
    return not function.__name__.startswith("_") and any(name.lstrip("_").startswith("launch") for name in called)


def main() -> None:
    rows = compile_all(int(sys.argv[1]))
    print(table(rows))
    for row in rows:
        if "error" in row:
            print(f"{row['kernel']} {row['label']}: {row['error']}")
    for file in sys.argv[2:]:
        Path(file).write_text(json.dumps({"defined": defined(), "cases": list(CASES), "rows": rows}))


if __name__ == "__main__":
    main()

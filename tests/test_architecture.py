"""Imports point one way, only kernels/ knows triton, and every launcher has a plain-torch twin."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
REFERENCE = sorted((ROOT / "kernels" / "reference").glob("*.py"))
LINK = ROOT / "fusedcomp" / "kernels"
FRONT = sorted(path for path in (ROOT / "fusedcomp").rglob("*.py") if LINK not in path.parents)

# A module imports from its own layer and those above it in this list, from nothing below.
LAYERS = (
    {"kernels"},
    {"_dispatch", "wire", "buckets", "values", "amp", "link", "costs"},
    {"compressors", "memories", "collectives", "rules", "sizing", "rooms", "bandit", "shares"},
    {
        "checks",
        "checkpoint",
        "buffers",
        "exchange",
        "pipeline",
        "gathered",
        "sparse",
        "blocktopk",
        "randomk",
        "merging",
        "tree",
        "split",
        "tuned",
        "narrow",
        "levels",
    },
    {
        "metrics",
        "exchanges",
        "settings",
        "overlap",
        "optimizer",
        "optim",
        "ddp",
        "ddp_parts",
        "ranking",
        "modules",
        "jointspar",
        "jointspar_grads",
        "jointspar_parts",
    },
    {"__init__"},  # the public names
    {"demo", "doctor", "plan", "__main__"},
)
LAYER = {module: depth for depth, modules in enumerate(LAYERS) for module in modules}


def imported(path: Path) -> Iterator[str]:
    """Absolute dotted names of all that the file imports, wherever in it; `from a import b` yields `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: import absolutely"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_module(name: str) -> str | None:
    """The module of fusedcomp that a dotted name belongs to, or None for another package."""
    package, module, *_ = [*name.split("."), "", ""]
    if package != "fusedcomp":
        return None
    file = ROOT / "fusedcomp" / module
    return module if module and (file.is_dir() or file.with_suffix(".py").exists()) else "__init__"


def layer(module: str) -> int:
    assert module in LAYER, f"fusedcomp.{module} is in no layer: add it to LAYERS in tests/test_architecture.py"
    return LAYER[module]


@pytest.mark.parametrize("path", FRONT, ids=lambda path: str(path.relative_to(ROOT)))
def test_front_modules_import_only_from_their_layer_and_the_layers_before(path):
    own = layer(path.relative_to(ROOT / "fusedcomp").parts[0].removesuffix(".py"))
    below = {name for name in imported(path) if (to := own_module(name)) and layer(to) > own}
    assert not below, f"{path.name} reaches against the direction of imports: {sorted(below)}"


@pytest.mark.parametrize("path", FRONT + REFERENCE, ids=lambda path: str(path.relative_to(ROOT)))
def test_decisions_and_twins_do_not_import_triton(path):
    assert "triton" not in {name.partition(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_import_nothing_else_of_fusedcomp(path):
    strangers = {name for name in imported(path) if own_module(name) not in {None, "kernels"}}
    assert not strangers, f"kernels/ makes no decisions, so it needs nothing from {sorted(strangers)}"


def has_kernel(path: Path) -> bool:
    names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return any(name.startswith("_") and name.endswith("_kernel") for name in names)


WITH_KERNELS = [path.stem for path in KERNELS if has_kernel(path)]
TWINS = [path.stem for path in REFERENCE if not path.stem.startswith("_")]


def signatures(module: ModuleType) -> dict[str, inspect.Signature]:
    """Of the public plain functions a module defines; what @triton.jit returns is not one."""
    functions = inspect.getmembers(module, lambda f: inspect.isfunction(f) and f.__module__ == module.__name__)
    return {name: inspect.signature(function) for name, function in functions if not name.startswith("_")}


def device_functions(module: ModuleType) -> dict[str, list[str]]:
    """Names and parameters of the jitted functions a module defines, compiled or interpreted."""
    jitted = [value.fn for value in vars(module).values() if hasattr(value, "fn")]
    return {fn.__name__: [*inspect.signature(fn).parameters] for fn in jitted if fn.__module__ == module.__name__}


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_every_module_with_a_kernel_has_a_reference_module(name):
    assert (ROOT / "kernels" / "reference" / f"{name}.py").exists()


@pytest.mark.parametrize("name", TWINS)
def test_every_launcher_has_a_twin_of_the_same_signature(name):
    fast = importlib.import_module(f"fusedcomp.kernels.{name}")
    slow = importlib.import_module(f"fusedcomp.kernels.reference.{name}")
    twins, device = signatures(slow), device_functions(fast)
    launchers = signatures(fast)
    assert launchers == {name: twin for name, twin in twins.items() if name in launchers}
    # A device function needs no twin; one that has it takes the same arguments, though only the twin can type them.
    same = {name: [argument.lower() for argument in device[name]] for name in twins.keys() & device.keys()}
    assert same == {name: [*twins[name].parameters] for name in same}

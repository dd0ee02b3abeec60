"""Names and order of kernel parameters, read from the source: an interpreted kernel hides its own."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted((ROOT / "kernels").rglob("*.py"))}
MEMORY_OPS = {"load", "store", "atomic_add", "atomic_max", "atomic_min", "atomic_or", "atomic_and", "atomic_cas"}


def is_jit(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    return any(ast.unparse(decorator).partition("(")[0] == "triton.jit" for decorator in node.decorator_list)


KERNELS = [
    pytest.param(node, id=f"{file}:{node.name}")
    for file, tree in TREES.items()
    for node in tree.body
    if is_jit(node) and node.name.startswith("_") and node.name.endswith("_kernel")
]


def is_constexpr(parameter: ast.arg) -> bool:
    return parameter.annotation is not None and ast.unparse(parameter.annotation).endswith("constexpr")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_parameter_is_upper_case_if_and_only_if_constexpr(kernel):
    # A lower-case constexpr looks like a value, and every new value of it compiles the kernel again.
    wrong = [p.arg for p in kernel.args.args if p.arg.isupper() != is_constexpr(p)]
    assert not wrong


@pytest.mark.parametrize("kernel", KERNELS)
def test_pointers_come_first(kernel):
    pointers = [p.arg.endswith("_ptr") for p in kernel.args.args]
    assert pointers == sorted(pointers, reverse=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_pointers_are_named_as_pointers(kernel):
    used = set()
    for call in ast.walk(kernel):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in MEMORY_OPS:
            address = call.args[0]
            while isinstance(address, ast.BinOp):  # pointer + offsets
                address = address.left
            used |= {address.id} if isinstance(address, ast.Name) else set()
    parameters = {p.arg for p in kernel.args.args}
    assert not {name for name in used & parameters if not name.endswith("_ptr")}


@pytest.mark.parametrize("file", TREES)
def test_what_is_launched_is_named_as_a_kernel(file):
    # Otherwise it would escape the tests above.
    jitted = {node.name for node in TREES[file].body if is_jit(node)}
    launched = set()
    for call in ast.walk(TREES[file]):
        if isinstance(call, ast.Call):
            by_helper = ast.unparse(call.func) == "launch"
            target = call.args[0] if by_helper else call.func.value if isinstance(call.func, ast.Subscript) else None
            launched |= {ast.unparse(target)} if target else set()
    assert not {name for name in launched & jitted if not (name.startswith("_") and name.endswith("_kernel"))}


@pytest.mark.parametrize("file", TREES)
def test_a_module_opens_with_one_sentence(file):
    assert (ast.get_docstring(TREES[file]) or "").partition("\n")[0].endswith((".", ":"))

"""The Python in README.md and docs/ runs, the messages in docs/errors.md are those of the code, and the site builds."""

import ast
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("algorithms/*.md"))]
NEEDS_GPU = "# needs a GPU"  # the first line of a block that is only compiled


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line number, code) of every fenced block of Python."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n") + 1, match[1]) for match in found]


def what_pages_assume() -> dict[str, Any]:
    """The names that blocks use without saying where they come from."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    inputs, targets = torch.randn(32, 64), torch.randint(10, (32,))

    def loss_of(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs), targets)

    return {"model": model, "inputs": inputs, "targets": targets, "loss_of": loss_of, "__name__": "page"}


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another in one namespace, as rank 0 of 1, where a script asks for torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # one device for all that a page makes
    names = what_pages_assume()
    try:
        for line, code in python_blocks(page):
            tree = ast.parse(code, f"{page.name}")
            ast.increment_lineno(tree, line)  # tracebacks point into the page
            compiled = compile(tree, str(page), "exec")
            if not code.startswith(NEEDS_GPU):
                exec(compiled, names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def spoken(source: str) -> str:
    """Source text with adjacent string literals joined, as Python joins them."""
    return re.sub(r'"\s*\n\s*f?"', "", source)


def test_messages_are_quoted_as_they_are() -> None:
    said = " ".join(spoken(path.read_text()) for path in (ROOT / "fusedcomp").glob("*.py"))
    quoted = re.findall(r"^### (.+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert quoted
    missing = [words for words in quoted if words not in said]
    assert not missing, f"docs/errors.md quotes what fusedcomp does not say: {missing}"


def test_every_public_name_is_in_the_reference() -> None:
    import fusedcomp

    listed = set(re.findall(r"^::: fusedcomp\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert listed == set(fusedcomp.__all__)


def test_the_site_builds(tmp_path: Path) -> None:
    """No broken link, no page outside the navigation, no name that mkdocstrings cannot find."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    decisions = {path.stem for path in (ROOT / "docs" / "decisions").glob("*.md")}
    assert decisions <= {path.parent.name for path in (tmp_path / "decisions").glob("*/index.html")}
    assert "momentum_buffer" in (tmp_path / "checkpoints" / "index.html").read_text()

"""The wheel holds kernels/ as real files under fusedcomp, and works from there."""

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A user has no interpreter switched on; hiding the GPUs makes this the CPU-only user everywhere.
USER_ENV = {key: value for key, value in os.environ.items() if key not in {"TRITON_INTERPRET", "PYTHONPATH"}}
USER_ENV["CUDA_VISIBLE_DEVICES"] = ""


def python(*args: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=USER_ENV | env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy: setuptools leaves build/ behind and packs stale files found there."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore, dirs_exist_ok=True)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out]
    done = python("-m", "pip", "wheel", *options, source, cwd=out)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_kernels_are_real_files_under_fusedcomp(wheel):
    infos = {info.filename: info for info in wheel.infolist()}
    for path in (ROOT / "kernels").rglob("*.py"):
        info = infos[f"fusedcomp/{path.relative_to(ROOT)}"]
        assert not stat.S_ISLNK(info.external_attr >> 16)
        assert wheel.read(info) == path.read_bytes()


def test_nothing_is_installed_beside_fusedcomp(wheel):
    # A top-level `kernels` would shadow the unrelated package of that name.
    top = {name.partition("/")[0].partition("-")[0] for name in wheel.namelist()}
    assert top == {"fusedcomp"}
    assert not [name for name in wheel.namelist() if "test" in name or "bench" in name]


def test_type_information_and_licence_are_shipped(wheel):
    names = wheel.namelist()
    assert "fusedcomp/py.typed" in names
    assert [name for name in names if name.endswith("dist-info/licenses/LICENSE")]


def test_the_wheel_imports_on_a_machine_without_a_gpu(wheel, tmp_path):
    wheel.extractall(tmp_path)
    done = python("-c", "import fusedcomp; print(fusedcomp.__file__)", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "fusedcomp" / "__init__.py"


def test_the_folder_refuses_to_be_imported_as_kernels():
    done = python("-c", "import kernels", cwd=ROOT)
    assert done.returncode != 0
    assert "ImportError: this folder is the package `fusedcomp.kernels`" in done.stderr

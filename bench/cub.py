"""CUB's DeviceTopK as a baseline: compiled on the spot from the wheel nvidia-cuda-cccl, called through ctypes.

The wheel is looked for in .wheels/ in the root of the repository, because a GPU machine need not reach a registry:

    pip download nvidia-cuda-cccl --no-deps -d .wheels
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import harness

WHEELS = harness.ROOT / ".wheels"
SOURCE = Path(__file__).with_name("cub_topk.cu")


class Unavailable(RuntimeError):
    """No wheel, no compiler, or no agreement between them."""


def wheel() -> Path:
    """The newest one that lies there.

    Raises:
        Unavailable: there is none.
    """
    found = sorted(WHEELS.glob("nvidia_cuda_cccl-*.whl"))
    if not found:
        raise Unavailable("no nvidia_cuda_cccl wheel in .wheels: pip download nvidia-cuda-cccl --no-deps -d .wheels")
    return found[-1]


def version() -> str:
    return wheel().name.split("-")[1]


@functools.cache
def library() -> ctypes.CDLL:
    """``cub_topk.cu``, compiled into a temporary folder.

    Raises:
        Unavailable: no wheel or no nvcc, or it does not compile.
    """
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise Unavailable("no nvcc")
    folder = Path(tempfile.mkdtemp(prefix="cub_topk_"))
    with zipfile.ZipFile(wheel()) as archive:
        archive.extractall(folder)
    include = next(folder.rglob("cub/device/device_topk.cuh"), None)
    if include is None:
        raise Unavailable(f"{wheel().name} has no cub/device/device_topk.cuh")
    built = folder / "libcub_topk.so"
    capability = "".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else "90"
    options = ["-O3", "-std=c++17", f"-arch=sm_{capability}", "-shared", "-Xcompiler", "-fPIC"]
    command = [nvcc, *options, "-I", str(include.parents[2]), str(SOURCE), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"nvcc: {done.stderr[-500:]}")
    return ctypes.CDLL(str(built))


def top_k(magnitudes: Tensor, k: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that finds the k largest of a flat fp32 tensor on the current stream: (values, indices as i32 bits).

    Raises:
        Unavailable: see ``library``; or the tensor is not on a GPU.
    """
    if not magnitudes.is_cuda:
        raise Unavailable("it runs on CUDA devices only")
    function = library().cub_topk
    keys = torch.empty(k, device=magnitudes.device)
    indices = torch.empty(k, dtype=torch.int32, device=magnitudes.device)
    nbytes = ctypes.c_size_t(0)

    def run(workspace: Tensor | None) -> None:
        status = function(
            ctypes.c_void_p(workspace.data_ptr() if workspace is not None else None),
            ctypes.byref(nbytes),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (magnitudes, keys, indices)),
            *(ctypes.c_int64(number) for number in (magnitudes.numel(), k)),
            ctypes.c_void_p(torch.cuda.current_stream(magnitudes.device).cuda_stream),
        )
        if status != 0:
            raise Unavailable(f"cub::DeviceTopK: cudaError {status}")

    run(None)
    workspace = torch.empty(nbytes.value, dtype=torch.uint8, device=magnitudes.device)

    def call() -> tuple[Tensor, Tensor]:
        run(workspace)
        return keys, indices

    return call

"""What ``python -m fusedcomp doctor`` looks at. A check finds something out; it changes nothing."""

import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusedcomp.doctor import trial

OK, WARNING, FAILED = "ok", "warning", "failed"

# The floors of pyproject.toml; tests/test_doctor.py compares.
LEAST = {"torch": "2.11", "triton": "3.6", "einops": ""}
LEAST_PYTHON = (3, 10)
LEAST_CAPABILITY = (8, 0)  # Ampere: the oldest GPUs with bf16

# Variable -> (whether its value hurts, what it does, what to do).
_ON = re.compile(r"1|true|yes|on|y|t", re.IGNORECASE)
_HURTS: dict[str, tuple[Callable[[str], bool], str]] = {
    "FUSEDCOMP_OPS": (bool, "overrides the choice between kernels and twins, which is for tests: unset it"),
    "TRITON_INTERPRET": (
        lambda value: value == "1",
        "kernels run in Python, thousands of times slower: unset it for training",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        lambda value: value not in ("", "0"),
        "the host waits for every kernel, so nothing overlaps: unset it after debugging",
    ),
    "NCCL_P2P_DISABLE": (
        lambda value: value not in ("", "0"),
        "GPUs of one machine exchange through its memory instead of NVLink: unset it unless they hang otherwise",
    ),
    "NCCL_IB_DISABLE": (
        lambda value: value not in ("", "0"),
        "NCCL leaves InfiniBand and RoCE unused and takes TCP: unset it where the machines have them",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (
        lambda value: bool(_ON.fullmatch(value)),
        "step() would hold up the host until every exchange is done: unset it",
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        lambda value: value == "0",
        "when a rank is gone the others wait for ever: unset it",
    ),
    "TORCH_DISTRIBUTED_DEBUG": (
        lambda value: value.upper() == "DETAIL",
        "every collective is checked by another one first: unset it after debugging",
    ),
}


@dataclass(frozen=True)
class Check:
    """What was found.

    Args:
        name: of what was looked at.
        status: ``"ok"``, ``"warning"`` or ``"failed"``.
        found: in words.
        advice: what to do; empty where there is nothing.
    """

    name: str
    status: str
    found: str
    advice: str = ""


def run_checks() -> list[Check]:
    """Every check, in order; one that raises has failed."""
    found: list[Check] = []
    for name, check in CHECKS.items():
        try:
            found += check()
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            found.append(Check(name, FAILED, words[:300], "the check itself could not run: please report this"))
    return found


# ---- versions ------------------------------------------------------------------------------------------------------


def versions() -> Iterator[Check]:
    """Python and packages against what is supported."""
    least = ".".join(map(str, LEAST_PYTHON))
    good = sys.version_info[:2] >= LEAST_PYTHON
    advice = "" if good else f"use Python {least} or newer"
    yield Check("Python", OK if good else FAILED, f"{platform.python_version()} (from {least} on)", advice)
    for package, floor in LEAST.items():
        yield package_version(package, floor)


def package_version(package: str, floor: str) -> Check:
    """One package; an empty floor: any version."""
    supported = f"from {floor} on" if floor else "any version"
    ask = f"pip install '{package}>={floor}'" if floor else f"pip install {package}"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Check(package, FAILED, f"not installed ({supported})", ask)
    good = numbers(version) >= numbers(floor)
    return Check(package, OK if good else FAILED, f"{version} ({supported})", "" if good else ask)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.11.0+cu130`` is (2, 11, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


# ---- devices -------------------------------------------------------------------------------------------------------


def devices() -> Iterator[Check]:
    """GPUs and their driver."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = "" if built is None else "torch was built for CUDA and sees no GPU: look at nvidia-smi and the driver"
        words = "none: tensors on the CPU take the plain-torch twins of the kernels, which is fine for tests"
        yield Check("CUDA devices", OK if built is None else WARNING, words, advice)
        return
    yield Check("driver", OK, f"{_driver()}; torch is built for CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        it = torch.cuda.get_device_properties(index)
        good = (it.major, it.minor) >= LEAST_CAPABILITY
        words = f"{it.name}, capability {it.major}.{it.minor}, {it.total_memory / 2**30:.0f} GiB"
        advice = "" if good else "kernels need capability 8.0 (Ampere) or newer"
        yield Check(f"cuda:{index}", OK if good else FAILED, words, advice)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "driver of unknown version (no nvidia-smi)"
    return done.stdout.strip()


def kernels() -> Iterator[Check]:
    """Does a kernel compile, run, and do what its twin does?"""
    if not torch.cuda.is_available():
        words = "not tried without a GPU: tensors on the CPU take plain-torch twins, which is fine for tests"
        yield Check("kernels", OK, words)
        return
    start = time.perf_counter()
    same = trial.kernel_equals_twin(torch.device("cuda", torch.cuda.current_device()))
    seconds = time.perf_counter() - start
    if same:
        yield Check("kernels", OK, f"a kernel compiled and ran in {seconds:.1f} s and equals its twin bit for bit")
    else:
        yield Check("kernels", FAILED, "a kernel differs from its plain-torch twin", "please report GPU and triton")


# ---- torch.distributed ---------------------------------------------------------------------------------------------


def distributed() -> Iterator[Check]:
    """Backends, and whether this process is one of several."""
    if not dist.is_available():
        yield Check("torch.distributed", FAILED, "this torch is built without it", "install a torch that has it")
        return
    if dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "no GPU to use it"
        yield Check("NCCL", OK, f"available ({version})")
    elif torch.cuda.is_available():
        yield Check("NCCL", FAILED, "not in this torch", "GPUs exchange with NCCL: install a torch for CUDA")
    else:
        yield Check("NCCL", OK, "not in this torch; without a GPU it is not needed")
    gloo = dist.is_gloo_available()
    gloo_words = "available: exchanges tensors on the CPU" if gloo else "not in this torch"
    yield Check("gloo", OK if gloo else WARNING, gloo_words, "" if gloo else "tensors on the CPU cannot be exchanged")
    if dist.is_initialized():
        state = f"initialised: {dist.get_backend()}, rank {dist.get_rank()} of {dist.get_world_size()}"
    elif "WORLD_SIZE" in os.environ:
        state = f"rank {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']} by torchrun; not initialised yet"
    else:
        state = "one process; torchrun starts several"
    yield Check("process group", OK, state)


def environment() -> Iterator[Check]:
    """Variables that make training slow, or wrong."""
    hurting = [name for name, (hurts, _) in _HURTS.items() if hurts(os.environ.get(name, ""))]
    for name in hurting:
        yield Check(name, WARNING, f"is set to {os.environ[name]!r}", _HURTS[name][1])
    if not hurting:
        yield Check("environment", OK, f"none of {len(_HURTS)} variables that are known to hurt is set")


# ---- a step --------------------------------------------------------------------------------------------------------


def training() -> Iterator[Check]:
    """Two steps of fusedcomp.SGD with TopK on one process."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        wrong = trial.two_steps(device)
    except Exception as error:
        wrong = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if wrong is None:
        words = "sent + kept = accumulated, parameters as the twins', bit for bit"
        yield Check("self-test", OK, f"two steps of SGD with TopK on {device.type}: {words}")
    else:
        yield Check("self-test", FAILED, wrong, "unset FUSEDCOMP_OPS if it is set; else please report this")


CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "versions": versions,
    "CUDA devices": devices,
    "kernels": kernels,
    "torch.distributed": distributed,
    "environment": environment,
    "self-test": training,
}

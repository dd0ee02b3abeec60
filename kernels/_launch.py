"""Launching: one place for the device guard, the interpreter's lock and the launch figures."""

import contextlib
import os
import threading
from typing import Any

import torch
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# The interpreter patches triton.language for the length of a launch: two threads at once break each other.
_LOCK = threading.RLock()
_NOTHING = contextlib.nullcontext()

# Warps per program. Blocks of 2048 at 4 warps hold 16 elements a thread (docs/decisions/0002-blocks.md).
WARPS = {"block": 4, "gather": 1, "page": 4, "select": 16, "small": 1}


def launch(kernel: Any, programs: int, on: Tensor, *args: Any, warps: str = "block", **constants: Any) -> None:
    """Run ``programs`` copies of ``kernel`` on the device of the tensor ``on``; nothing to do is nothing launched.

    ``enable_fp_fusion=False``: a kernel rounds every operation as its twin does, so that they agree bit for bit.
    """
    if programs == 0:
        return
    foreign = on.is_cuda and on.get_device() != torch.cuda.current_device()
    guard = torch.cuda.device(on.device) if foreign else _NOTHING
    with guard, _LOCK if INTERPRET else _NOTHING:
        kernel[(programs,)](*args, **constants, num_warps=WARPS[warps], enable_fp_fusion=False)

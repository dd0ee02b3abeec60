"""Launching: one place for the device guard, the interpreter's lock, the launch figures and a short way to Triton."""

import contextlib
import os
import threading
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

# The interpreter patches triton.language for the length of a launch: two threads at once break each other.
_LOCK = threading.RLock()
_NOTHING = contextlib.nullcontext()

# Blocks of 2048 at 4 warps hold 16 elements a thread (docs/decisions/0002-blocks.md). With up to 128 registers four
# programs fit on a multiprocessor; left to itself ptxas spills two values of the pass to make room for a seventh. What
# waits for one load after another (pages, candidates) wants more programs beside it: six, with up to 80.
SHAPES = {
    "block": {"num_warps": 4, "maxnreg": 128},
    "page": {"num_warps": 4, "maxnreg": 80},
    "item": {"num_warps": 8},
    "stretch": {"num_warps": 16, "maxnreg": 128},
    "small": {"num_warps": 1},
}

ELEMENT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # for constants

# What Triton compiled for arguments of one kind: finding it again takes it some 25 microseconds of Python.
_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, programs: int, on: Tensor, *args: Any, shape: str = "block", **constants: Any) -> None:
    """Run ``programs`` copies of ``kernel`` on the device of the tensor ``on``; nothing to do is nothing launched.

    ``constants`` are the kernel's last parameters, in its order. bf16 tensors are passed as their bits (elements.py).
    ``enable_fp_fusion=False``: a kernel rounds every operation as its twin does, so that they agree bit for bit.
    """
    if programs == 0:
        return
    device = on.get_device()
    foreign = on.is_cuda and device != torch.cuda.current_device()
    with torch.cuda.device(device) if foreign else _NOTHING:
        # Triton specialises on the type of an argument, on integers' values and on pointers' divisibility by 16: a
        # key that tells at least these apart never finds a kernel that was compiled for other arguments.
        passed: list[Any] = []  # tensors as addresses: of those Triton asks the driver nothing
        key = [kernel, programs, device, shape, *constants.values()]
        for arg in args:
            if isinstance(arg, Tensor):
                address = arg.data_ptr()
                passed.append(address)
                key += (arg.dtype, address % 16 == 0)
            else:
                passed.append(arg)
                key.append(float if isinstance(arg, float) else arg)
        run = _COMPILED.get(signature := tuple(key))
        if run is not None:
            run(*passed, *constants.values(), stream=torch._C._cuda_getCurrentRawStream(device))
            return
        typed = [_bits(arg) if isinstance(arg, Tensor) else arg for arg in args]
        with _LOCK if INTERPRET else _NOTHING:
            compiled = kernel[(programs,)](*typed, **constants, **SHAPES[shape], enable_fp_fusion=False)
        if compiled is not None:  # the interpreter compiles nothing
            _COMPILED[signature] = compiled[(programs, 1, 1)]


def weighing(weights: Tensor | None) -> dict[str, Any]:
    """The constants of ``weighted`` (keys.py): i32 weights say who draws them."""
    is_drawn = weights is not None and weights.dtype == torch.int32
    return {"HAS_WEIGHTS": weights is not None and not is_drawn, "IS_DRAWN": is_drawn}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor

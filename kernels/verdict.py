"""The verdict on a step that may be undone: one rank's gradient that is not finite undoes the step of all.

    found_inf <- 1 if a header said so, else 0                  headers.py, of all buckets
    parity    <- parity,  skipped + 1    if found_inf           the half that the step has read stays in force
                 1 - parity              else                   the half that it has written is the next one's
    seed      <- seed - 1,  present <- 0 if found_inf           of every bucket: nobody had a gradient

What follows the verdict asks for it (apply.py), or for who is present (dense.py, ``compress.settle``, norms.py), so the
host need not know it, and a graph can be replayed.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import launch


@triton.jit
def _conclude_kernel(
    nonfinite_ptr, parity_ptr, status_ptr,  # in-out
    found_inf_ptr,  # out
):  # fmt: skip
    found = tl.load(nonfinite_ptr) != 0
    tl.store(nonfinite_ptr, 0)
    tl.store(found_inf_ptr, found.to(tl.float32))
    if found:
        tl.store(status_ptr + 2, tl.load(status_ptr + 2) + 1)  # the host's memory: left alone when all is well
    else:
        tl.store(parity_ptr, tl.load(parity_ptr) ^ 1)


@triton.jit
def _annul_kernel(
    found_inf_ptr,  # in
    seed_ptr, present_ptr,  # in-out
    num_segments,
    CHUNK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf_ptr) != 0.0:
        tl.store(seed_ptr, tl.load(seed_ptr) - 1)
        for chunk in range(0, num_segments, CHUNK):
            segment = chunk + tl.arange(0, CHUNK)
            tl.store(present_ptr + segment, tl.zeros((CHUNK,), tl.int32), mask=segment < num_segments)


def conclude(
    nonfinite: Tensor,  # in-out: i32 (1,): a gradient was not finite, on any rank in any bucket; reset
    found_inf: Tensor,  # out: f32 (1,): was one? 1.0 or 0.0, as torch.amp has it
    parity: Tensor,  # in-out: i32 (1,): the half of the states that is in force, toggled if none was
    status: Tensor,  # in-out: i32 (3,), as for ``headers.read_headers``: one more step skipped if one was
) -> None:
    """Pass the verdict, when all headers of a step have been read."""
    launch(
        _conclude_kernel, 1, found_inf,
        nonfinite, parity, status,
        found_inf,
        shape="small",
    )  # fmt: skip


def annul(
    found_inf: Tensor,  # f32 (1,)
    seed: Tensor,  # in-out: i32 (1,): the bucket's step
    present: Tensor,  # in-out: i32 (segments,)
) -> None:
    """If the step is undone, let its bucket's be the same step again, and nobody have had a gradient."""
    launch(
        _annul_kernel, 1, present,
        found_inf,
        seed, present,
        present.numel(),
        CHUNK=32, shape="small",
    )  # fmt: skip

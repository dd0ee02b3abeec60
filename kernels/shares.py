"""Shares of a model's buckets, where selection ranks over all of them: one key that all buckets count against.

    reached   = candidates of a bucket with key >= the model's key        in its header, in place of all candidates
    model key <- mean of the buckets' k-th keys, weighted by k            their magnitudes' bits: a geometric mean

The mean lies between the least and the greatest of them. So where they differ, the bucket with the greatest counts k at
least and that with the least fewer: shares that follow the counts stand still only where all k-th keys are equal, and
what was sent is then what ranking over the whole model would send.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import launch
from fusedcomp.kernels.order import last_arrival

_CHUNK = 1024
_MOST_PROGRAMS = 32  # a hundred thousand candidates: three rounds each


@triton.jit
def _count_reaching_kernel(
    offsets_ptr, keys_ptr, model_key_ptr,  # in
    count_ptr, ticket_ptr,  # scratch
    header_ptr,  # out
    capacity, num_blocks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    end = tl.minimum(tl.load(offsets_ptr + num_blocks), capacity)
    least = tl.load(model_key_ptr)
    reached = tl.zeros((CHUNK,), tl.int32)
    for chunk in range(tl.program_id(0).to(tl.int64) * CHUNK, end, tl.num_programs(0) * CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        key = tl.load(keys_ptr + at, mask=at < end, other=-1)
        reached += (key >= least).to(tl.int32)
    tl.atomic_add(count_ptr, tl.sum(reached), sem="relaxed")
    if last_arrival(ticket_ptr, tl.num_programs(0)):
        count = tl.load(count_ptr, cache_modifier=".cg")
        tl.debug_barrier()  # all have read the count
        tl.store(count_ptr, 0)
        tl.store(header_ptr + 1, count)


@triton.jit
def _meet_thresholds_kernel(
    threshold_ptr, asked_ptr, found_inf_ptr,  # in
    model_key_ptr,  # in-out
    count,
    HAS_VERDICT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    weighted = tl.zeros((CHUNK,), tl.int64)
    weights = tl.zeros((CHUNK,), tl.int64)
    for chunk in range(0, count, CHUNK):
        bucket = chunk + tl.arange(0, CHUNK)
        asked = tl.load(asked_ptr + bucket, mask=bucket < count, other=0)
        weighted += asked * (tl.load(threshold_ptr + bucket, mask=bucket < count, other=0) >> 32)
        weights += asked
    key = (tl.sum(weighted) // tl.sum(weights)) << 32
    if HAS_VERDICT:
        key = tl.where(tl.load(found_inf_ptr) != 0.0, tl.load(model_key_ptr), key)
    tl.store(model_key_ptr, key)


def count_reaching(
    offsets: Tensor,  # i64 (blocks + 1,): the last is the number of candidates
    keys: Tensor,  # i64 (capacity,)
    model_key: Tensor,  # i64 (1,)
    counts: Tensor,  # scratch: i32 (1,), zero before and after
    tickets: Tensor,  # scratch: i32 (1,), zero before and after
    header: Tensor,  # in-out: i32 (words,): the payload's, whose second word is replaced
) -> None:
    """Tell the ranks how many candidates reach the model's key, as far as there was room for them."""
    launch(
        _count_reaching_kernel, min(-(-keys.numel() // _CHUNK), _MOST_PROGRAMS), keys,
        offsets, keys, model_key,
        counts, tickets,
        header,
        keys.numel(), offsets.numel() - 1,
        CHUNK=_CHUNK, shape="item",
    )  # fmt: skip


def meet_thresholds(
    thresholds: Tensor,  # i64 (buckets,): k-th keys
    asked: Tensor,  # i64 (buckets,): k, or 0 for those that do not count; their sum is above 0, below 2**32
    found_inf: Tensor | None,  # f32 (1,): where it is not 0 the step was none, and the key stays
    model_key: Tensor,  # in-out: i64 (1,)
) -> None:
    """The key that the next step's candidates are counted against."""
    launch(
        _meet_thresholds_kernel, 1, model_key,
        thresholds, asked, found_inf,
        model_key,
        thresholds.numel(),
        HAS_VERDICT=found_inf is not None, CHUNK=32, shape="small",
    )  # fmt: skip

"""How parameters are split into buckets: every one in exactly one, the last gradients in a small one of their own."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from fusedcomp.buckets import Treatment, plan_buckets

MB = 2**20


def treatment(sparse: bool) -> Treatment:
    return Treatment(group=0, sparse=sparse, trust=False, decay="gradient", dtype=torch.float32)


def plan(numels: list[int], cap: int, sparse: list[bool] | None = None) -> list[list[int]]:
    """Indices of the parameters of every bucket, in launch order."""
    kinds = sparse or [True] * len(numels)
    params = [(torch.empty(n, device="meta"), treatment(kind)) for n, kind in zip(numels, kinds, strict=True)]
    where = {id(param): index for index, (param, _) in enumerate(params)}
    return [[where[id(p)] for p in bucket.params] for bucket in plan_buckets(params, cap, [False])]


@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=30), st.integers(100, 40_000))
def test_every_parameter_is_in_one_bucket_and_only_a_large_one_exceeds_the_cap(shapes, cap) -> None:
    numels, sparse = [n for n, _ in shapes], [kind for _, kind in shapes]
    buckets = plan(numels, cap, sparse)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(numels)))
    assert all(len({sparse[i] for i in bucket}) == 1 for bucket in buckets)
    assert all(len(bucket) == 1 or 4 * sum(numels[i] for i in bucket) <= cap for bucket in buckets)
    assert [min(bucket) for bucket in buckets] == sorted((min(bucket) for bucket in buckets), reverse=True)


def test_the_last_gradients_have_a_small_bucket() -> None:
    """Eighty megabytes in tensors of four, of a cap of 100: the first registered, eight of them, go last."""
    assert plan([MB] * 20, 100 * MB) == [list(range(19, 1, -1)), [1, 0]]


def test_half_a_bucket_is_not_split() -> None:
    assert plan([MB] * 12, 100 * MB) == [list(range(11, -1, -1))]


def test_a_first_parameter_that_is_no_tail_has_none_behind_it() -> None:
    """An embedding larger than a bucket is one by itself; one of a fifth of it stays with the others."""
    assert plan([30 * MB, *[MB] * 20], 100 * MB) == [list(range(20, 0, -1)), [0]]
    assert plan([5 * MB, *[MB] * 18], 100 * MB) == [list(range(18, -1, -1))]

"""Sampling: the threshold that candidates must reach, from a few thousand entries of the residual as it will be.

    threshold = rank-th largest key among the samples, cut to its leading 13, 21, 29, ... bits: as few as let a quarter
                more samples through; 0 (all are candidates) where there are no more samples
    width     = how finely the refining is to look between the threshold and the k-th key, as far as samples can tell

Nothing is remembered between steps, so the first step, a resumed one and one after a shock are no special cases.
"""

import triton
import triton.language as tl
from torch import Tensor

from fusedcomp.kernels._launch import ELEMENT, launch, weighing
from fusedcomp.kernels.accumulate import ACCUMULATE
from fusedcomp.kernels.digits import pick, pick_among, take_histogram
from fusedcomp.kernels.elements import element_pointer, half_offset, load_state, rounding_noise, stochastic, widen
from fusedcomp.kernels.keys import mix32, selection_key, weighted
from fusedcomp.kernels.order import last_arrival
from fusedcomp.kernels.segments import BLOCK, Operands, Segments

SAMPLES = 512  # samples per program; a scope's fill whole programs
TOP_SHIFT = tl.constexpr(50)  # of the first 13 of a key's 63 bits: 32 steps an octave
LENIENCE = 4  # a threshold may let 1 / LENIENCE more samples through than asked for


@triton.jit
def _sample_threshold_kernel(
    sample_ptr, group_ptr, rank_ptr, aim_ptr, address_ptr, numel_ptr, first_block_ptr, velocity_ptr, residual_ptr,  # in
    weight_ptr, trust_ptr, scale_ptr, seed_ptr, parity_ptr,
    keys_ptr, histogram_ptr, ticket_ptr,  # scratch
    threshold_ptr, width_ptr,  # out
    grad_scale, weight_decay, momentum, num_segments, half_numel,
    ACCUMULATE: tl.constexpr, HAS_VELOCITY: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_DECAY: tl.constexpr,
    HAS_TRUST: tl.constexpr, HAS_PARITY: tl.constexpr, HAS_WEIGHTS: tl.constexpr, IS_DRAWN: tl.constexpr,
    HALF: tl.constexpr, ELEMENT: tl.constexpr, SAMPLES: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
    LENIENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample = program * SAMPLES + tl.arange(0, SAMPLES)
    segment = tl.load(sample_ptr + 2 * sample)
    offset = tl.load(sample_ptr + 2 * sample + 1)
    mask = segment >= 0  # a scope's last program may have samples to spare
    segment = tl.maximum(segment, 0)
    seed = tl.load(seed_ptr)
    # The grid of samples is turned by a new amount every step, so that no entry is always or never looked at.
    turn = mix32(seed.to(tl.uint32)).to(tl.int64)
    offset = (offset + turn) % tl.load(numel_ptr + segment)
    grad_address = tl.load(address_ptr + segment)
    mask = mask & (grad_address != 0)
    grad = widen(tl.load(element_pointer(grad_address, offset, ELEMENT), mask=mask, other=0), ELEMENT) * grad_scale
    if HAS_SCALES:
        grad = grad * tl.load(scale_ptr + segment)
    if HAS_DECAY:
        param_pointer = element_pointer(tl.load(address_ptr + num_segments + segment), offset, ELEMENT)
        grad = grad + weight_decay * widen(tl.load(param_pointer, mask=mask, other=0), ELEMENT)
    if HAS_TRUST:
        grad = tl.load(trust_ptr + segment) * grad
    index = tl.load(first_block_ptr + segment) * BLOCK + offset
    residual_ptr += half_offset(parity_ptr, half_numel, 0, HAS_PARITY)
    residual = load_state(residual_ptr + index, mask, HALF)
    velocity = residual
    if HAS_VELOCITY:
        velocity_ptr += half_offset(parity_ptr, half_numel, 0, HAS_PARITY)
        velocity = load_state(velocity_ptr + index, mask, HALF)
    velocity, residual = ACCUMULATE(grad, velocity, residual, momentum)
    residual = stochastic(residual, rounding_noise(index, seed), HALF)
    ranked = weighted(residual, weight_ptr, index, seed, mask, HAS_WEIGHTS, IS_DRAWN)
    key = tl.where(mask, selection_key(ranked, index, seed, HALF and not (HAS_WEIGHTS or IS_DRAWN)), -1)
    tl.store(keys_ptr + sample, key)
    scope = tl.load(group_ptr + 3 * program)
    tl.atomic_add(histogram_ptr + scope * BINS + (key >> TOP_SHIFT), 1, mask=mask, sem="relaxed")

    first = tl.load(group_ptr + 3 * program + 1)
    last = tl.load(group_ptr + 3 * program + 2)
    if last_arrival(ticket_ptr + scope, last - first):
        histogram = take_histogram(histogram_ptr + scope * BINS, BINS)
        wanted = tl.load(rank_ptr + scope)
        low = wanted * 0
        if tl.sum(histogram) > wanted:
            digit, rank, excess = pick(histogram, wanted, BINS)
            low = digit << TOP_SHIFT
            shift = low * 0 + TOP_SHIFT
            while (excess > wanted // LENIENCE) & (shift > 0):  # ties
                below = tl.maximum(shift - 8, 0)
                low, rank, excess = pick_among(
                    keys_ptr, first * SAMPLES, last * SAMPLES, low * 0, low, rank, shift, below, CHUNK
                )
                shift = below
        tl.store(threshold_ptr + scope, low)
        # From the threshold to the end of the bin of the k-th key, in some hundred steps: a power of two.
        digit, _, _ = pick(histogram, tl.load(aim_ptr + scope), BINS)
        span = tl.maximum(((digit + 1) << TOP_SHIFT) - low, 1).to(tl.float32)
        tl.store(width_ptr + scope, tl.maximum((span.to(tl.int32, bitcast=True) >> 23) - 127 - 7, 0))


def sample_threshold(
    segments: Segments,
    operands: Operands,
    samples: Tensor,  # i64 (programs * SAMPLES, 2): segment (-1: none), offset in segment
    groups: Tensor,  # i32 (programs, 3): scope, first and last program of the scope
    ranks: Tensor,  # i64 (scopes,), >= 1
    aims: Tensor,  # i64 (scopes,), >= 1: the rank that the k-th key would have among the samples
    velocity: Tensor | None,  # f32 or bf16 (padded,)
    residual: Tensor,  # f32 or bf16 (padded,)
    weights: Tensor | None,  # f32 (padded,), in (0, 1]: entries are ranked by weight * |residual|. None: all are 1.
    # i32 (1,): they are drawn, by whom it says (keys.py)
    trust: Tensor | None,  # f32 (segments,)
    scales: Tensor | None,  # f32 (segments,): the gradient is multiplied by it first
    seed: Tensor,  # i32 (1,)
    parity: Tensor | None,  # i32 (1,): the states are two halves, of which it is read
    keys: Tensor,  # scratch: i64 (programs * SAMPLES,)
    histograms: Tensor,  # scratch: i32 (scopes, BINS), zeros before and after
    tickets: Tensor,  # scratch: i32 (scopes,), zeros before and after
    thresholds: Tensor,  # out: i64 (scopes,)
    widths: Tensor,  # out: i32 (scopes,): logarithms; they decide how fast the refining is, not what it finds
    *,
    accumulate: str,
    grad_scale: float,
    weight_decay: float,
    momentum: float,
) -> None:
    """Thresholds from keys of the residual as the pass will leave it, at the sampled entries. Changes no state."""
    launch(
        _sample_threshold_kernel, groups.shape[0], residual,
        samples, groups, ranks, aims, operands.addresses, segments.numel_table, segments.first_blocks, velocity,
        residual, weights, trust, scales, seed, parity,
        keys, histograms, tickets,
        thresholds, widths,
        grad_scale, weight_decay, momentum, len(segments.numels), segments.padded_numel,
        ACCUMULATE=ACCUMULATE[accumulate], HAS_VELOCITY=velocity is not None, HAS_SCALES=scales is not None,
        HAS_DECAY=weight_decay != 0.0, HAS_TRUST=trust is not None, HAS_PARITY=parity is not None,
        **weighing(weights), HALF=residual.itemsize == 2, ELEMENT=ELEMENT[operands.dtype],
        SAMPLES=SAMPLES, BINS=histograms.shape[1], CHUNK=8192, LENIENCE=LENIENCE, BLOCK=BLOCK, shape="stretch",
    )  # fmt: skip

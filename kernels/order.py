"""Order among the programs of one launch, without waiting for any that may not have started.

start_order     programs number themselves in the order in which they start
offset_before   what the programs with smaller numbers hold in all: each publishes its own count, then reads theirs
last_arrival    which program of a group is the last to get here: it sees what the others stored, and goes on alone

The ticket of ``last_arrival`` counts up from 0, and the last program puts 0 back. That of ``start_order`` is never put
back: how often it has gone round tells this launch's counts from those of launches before it, so nothing is cleared.
"""

import triton
import triton.language as tl


@triton.jit
def start_order(shared_ptr, programs):
    """This program's number among ``programs``, and this launch's; shared: i64 (1 + 2 programs,), zeros at first.

    Programs with smaller numbers are running or done: one may wait for them.
    """
    ticket = tl.atomic_add(shared_ptr, 1)
    return (ticket % programs).to(tl.int32), ticket // programs + 1


@triton.jit
def offset_before(shared_ptr, programs, number, count, launch, CHUNK: tl.constexpr):
    """The sum of the counts of programs 0 .. number - 1. A published number and the launch are one 64-bit word.

    Every program publishes its count at once and, when it knows it, the sum up to and including its own. It adds up the
    counts before it, backwards, as far as the nearest sum (Merrill and Garland, "Single-pass parallel prefix scan with
    decoupled look-back", 2016).
    """
    count_ptr = shared_ptr + 1
    sum_ptr = count_ptr + programs
    tag = launch << 32
    tl.atomic_xchg(count_ptr + number, tag | count.to(tl.int64), sem="relaxed")
    before = count.to(tl.int64) * 0
    end = number
    while end > 0:
        at = end - CHUNK + tl.arange(0, CHUNK)
        found = before * 0
        nearest = -1
        waiting = 1
        while waiting > 0:
            sums = tl.load(sum_ptr + at, mask=at >= 0, other=0, volatile=True)
            counts = tl.load(count_ptr + at, mask=at >= 0, other=0, volatile=True)
            nearest = tl.max(tl.where((at >= 0) & ((sums >> 32) == launch), at, -1))
            needed = (at >= 0) & (at > nearest)
            waiting = tl.sum((needed & ((counts >> 32) != launch)).to(tl.int32))
            words = tl.where(needed, counts, tl.where((at >= 0) & (at == nearest), sums, 0))
            found = tl.sum(words & 0xFFFFFFFF)
        before += found
        end = tl.where(nearest >= 0, 0, end - CHUNK)
    tl.atomic_xchg(sum_ptr + number, tag | (before + count), sem="relaxed")
    return before


@triton.jit
def last_arrival(ticket_ptr, programs):
    """Is this the last of ``programs`` to arrive? What the others stored before is then visible past the L1 cache."""
    tl.debug_barrier()  # the atomic is one thread's: the stores of all come first
    last = tl.atomic_add(ticket_ptr, 1) == programs - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last

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
    """This program's number among ``programs``, and this launch's; shared: i64 (1 + programs,), zeros at first.

    Programs with smaller numbers are running or done: one may wait for them.
    """
    ticket = tl.atomic_add(shared_ptr, 1)
    return (ticket % programs).to(tl.int32), ticket // programs + 1


@triton.jit
def offset_before(shared_ptr, number, count, launch, CHUNK: tl.constexpr):
    """The sum of the counts of programs 0 .. number - 1; publishes this one's. Count and launch are one 64-bit word."""
    published_ptr = shared_ptr + 1
    tl.atomic_xchg(published_ptr + number, (launch << 32) | count.to(tl.int64), sem="relaxed")
    before = count.to(tl.int64) * 0
    for chunk in range(0, number, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        words = tl.load(published_ptr + at, mask=at < number, other=0, volatile=True)
        while tl.sum(((at < number) & ((words >> 32) != launch)).to(tl.int32)) > 0:
            words = tl.load(published_ptr + at, mask=at < number, other=0, volatile=True)
        before += tl.sum(words & 0xFFFFFFFF)
    return before


@triton.jit
def last_arrival(ticket_ptr, programs):
    """Is this the last of ``programs`` to arrive? What the others stored before is then visible past the L1 cache."""
    tl.debug_barrier()  # the atomic is one thread's: the stores of all come first
    last = tl.atomic_add(ticket_ptr, 1) == programs - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last

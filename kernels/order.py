"""Order among the programs of one launch, without waiting for any that may not have started.

start_order     programs number themselves in the order in which they start
offset_before   what the programs with smaller numbers hold in all: each publishes its own count, then reads theirs
last_arrival    which program of a group is the last to get here: it sees what the others stored, and goes on alone

Tickets count up from 0 and the last program puts 0 back, so that every launch finds them so; published counts carry
the step they belong to, so that no one need clear them.
"""

import triton
import triton.language as tl


@triton.jit
def start_order(ticket_ptr, programs):
    """This program's number among ``programs``. Smaller numbers are running or done: it may wait for them."""
    number = tl.atomic_add(ticket_ptr, 1)
    if number == programs - 1:
        tl.store(ticket_ptr, 0)
    return number


@triton.jit
def offset_before(published_ptr, number, count, step, CHUNK: tl.constexpr):
    """The sum of the counts of programs 0 .. number - 1; publishes this one's. Count and step are one 64-bit word."""
    tag = step.to(tl.int64) + 1  # never the 0 that fresh memory holds
    tl.atomic_xchg(published_ptr + number, (tag << 32) | count.to(tl.int64), sem="relaxed")
    before = count.to(tl.int64) * 0
    for chunk in range(0, number, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        words = tl.load(published_ptr + at, mask=at < number, other=0, volatile=True)
        while tl.sum(((at < number) & ((words >> 32) != tag)).to(tl.int32)) > 0:
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

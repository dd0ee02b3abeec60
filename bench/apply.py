"""Taking in what W ranks sent: time against W, with the payloads of the last W steps of training for those of W ranks.

python bench/apply.py                          ResNet-50 up to 64 ranks, GPT-2 up to 16, 340 M up to 8
python bench/apply.py --quick --device cpu     small sizes, twins, figures that mean nothing

Payloads of consecutive steps overlap less than those of ranks in one step: an entry that was sent starts from zero.
Buckets that are never compressed are part of it: the whole of what happens after the exchange.
"""

import sys

import cases
from cases import Case, Timed
from frozen import Frozen, gate

USES = ("fp32",)
_ENTRY_BYTES = 6 + 8  # value and index read, parameter read and written


def measure(case: Case, frozen: Frozen) -> None:
    """Every power of two up to the payloads there are, each checked first."""
    usual = frozen.ranks
    most = min(len(received) for received in frozen.received)
    worlds = [2**i for i in range(most.bit_length()) if 2**i <= most]
    for ranks in worlds:
        frozen.set_ranks(ranks)
        gate(frozen, 0.0)
    case.time("apply", [_timed(frozen, ranks) for ranks in worlds])
    frozen.set_ranks(usual)
    frozen.reset()


def _timed(frozen: Frozen, ranks: int) -> Timed:
    nbytes = ranks * frozen.k * _ENTRY_BYTES + 20 * frozen.numel_dense

    def reset() -> None:
        frozen.set_ranks(ranks)
        frozen.reset()

    return Timed(frozen.provider(0.0), frozen.apply, reset, nbytes, label=str(ranks), fields={"ranks": ranks})


if __name__ == "__main__":
    sys.exit(cases.main("apply.py", __doc__, [sys.modules[__name__]]))

"""CAT: what is sent is chosen between the pass and the refining, from the magnitudes that the pass has counted.

launch:  [sample -> compress -> tune -> refine] -> payload -> all_gather
apply:   headers -> parameters, in rank order

Drawn entries are the largest of |gradient| / u, u by chance. Samples have a u of their own: what is sent stays the
gradient on average if the threshold that they set turns out to be the one that counts.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fusedcomp.compressors import CAT
from fusedcomp.costs import Message
from fusedcomp.kernels.keys import DRAW_UNIT
from fusedcomp.kernels.tune import COUNTERS, MAGNITUDES
from fusedcomp.rooms import Anew
from fusedcomp.sizing import sampled_room
from fusedcomp.sparse import SparseExchange


class TunedExchange(SparseExchange):
    """The entries that ``CAT`` selects."""

    compressor: CAT

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        segments, device = self.bucket.segments, self.bucket.device
        self.signed = self.compressor.variant == "sparse_quantized"
        self.drawn = self.compressor.variant == "stochastic"
        if self.drawn:  # by this rank, and for its samples
            self.weights, self.draws_of_samples = (
                torch.tensor([2 * self.group.rank + who], dtype=torch.int32, device=device) for who in (1, 2)
            )
        self.sizing = self._adaptive(sampled_room(self.compressor, segments.numel))
        terms = self.compressor.cost.terms(self._message())
        exponent = math.frexp(max(terms.each, terms.fixed))[1]  # the choice is of ratios: near 1 no product underflows
        costs = [math.ldexp(cost, -exponent) for cost in (terms.each, terms.fixed)]
        self.costs = torch.tensor(costs, dtype=torch.float64, device=device)
        self.cost_shape = torch.tensor([terms.whole, terms.lead], dtype=torch.int64, device=device)
        self.counters = torch.zeros(COUNTERS, MAGNITUDES, dtype=torch.int32, device=device)
        self.wanted = torch.zeros(1, dtype=torch.int32, device=device)

    def _demand(self) -> Anew:
        return Anew()

    def _message(self) -> Message:
        """What the cost is of."""
        head, entry = self._layout(0).nbytes, 2 if self.signed else 2 + self.compressor.wire_dtype.itemsize
        return Message(head, entry, self.group.world_size, self.bucket.segments.numel / max(self.compressed, 1))

    def _goes_dense(self, k: int) -> bool:
        return super()._goes_dense(max(k, 2) if self.drawn else k)  # of one drawn entry the key is the threshold

    @property
    def _sample_weights(self) -> Tensor | None:
        return self.draws_of_samples if self.drawn else self.weights

    def _refine(self) -> None:
        payload, tune = self.buffers.payload, self.ops.tune
        counted = (self.costs, self.cost_shape, self.counters, self.buffers.ranks, self.wanted)
        sizes = {"room": self.selection.k, "numel": self.bucket.segments.numel}
        if self.drawn:
            tune.choose_draws(*counted, self.widths, **sizes)
        else:
            scale = payload.values[0] if self.signed else None
            tune.choose_entries(*counted, self.thresholds, self.widths, scale, **sizes)
        super()._refine()
        payload.header[0, 1:2] = self.wanted

    def _asked(self, candidates: Tensor) -> Tensor:
        return self.wanted[0].long()

    def metrics(self) -> dict[str, Tensor]:
        """As of any; the threshold of drawn entries is what the smaller ones are sent as."""
        found = super().metrics()
        if self.drawn:
            found["threshold"] = found["threshold"] / DRAW_UNIT.value
        return found

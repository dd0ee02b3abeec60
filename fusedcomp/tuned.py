"""CAT: what is sent is chosen between the pass and the refining, from the magnitudes that the pass has counted.

launch:  [sample -> compress -> tune -> refine] -> payload -> all_gather
apply:   headers -> parameters, in rank order
"""

from typing import Any

import torch
from torch import Tensor

from fusedcomp.compressors import CAT
from fusedcomp.costs import Message
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
        self.sizing = self._adaptive(sampled_room(self.compressor, segments.numel))
        terms = self.compressor.cost.terms(self._message())
        self.costs = torch.tensor([terms.each, terms.fixed], dtype=torch.float64, device=device)
        self.cost_shape = torch.tensor([terms.whole, terms.lead], dtype=torch.int64, device=device)
        self.counters = torch.zeros(COUNTERS, MAGNITUDES, dtype=torch.int32, device=device)
        self.wanted = torch.zeros(1, dtype=torch.int32, device=device)

    def _demand(self) -> Anew:
        return Anew()

    def _message(self) -> Message:
        """What the cost is of."""
        head, entry = self._layout(0).nbytes, 2 if self.signed else 2 + self.compressor.wire_dtype.itemsize
        return Message(head, entry, self.group.world_size, self.bucket.segments.numel / max(self.compressed, 1))

    @property
    def signed(self) -> bool:
        """Are entries signs of one magnitude?"""
        return self.compressor.variant == "sparse_quantized"

    def _refine(self) -> None:
        payload = self.buffers.payload
        self.ops.tune.choose_entries(
            self.costs, self.cost_shape, self.counters, self.buffers.ranks, self.wanted,
            payload.values[0] if self.signed else None, room=self.selection.k, numel=self.bucket.segments.numel,
        )  # fmt: skip
        super()._refine()
        payload.header[0, 1:2] = self.wanted

    def _asked(self, candidates: Tensor) -> Tensor:
        return self.wanted[0].long()

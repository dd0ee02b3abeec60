"""One parameter, its optimizer and what it sends, for tests of what a step does."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import fusedcomp
from fusedcomp.gathered import GatheredExchange
from fusedcomp.kernels.reference.apply import apply_payloads
from fusedcomp.kernels.segments import Operands, Segments
from fusedcomp.sparse import SparseExchange


def stepper(
    shape: Sequence[int], compressor: Any, memory: Any, momentum: float, lr: float = 1.0, **more: Any
) -> tuple[nn.Parameter, fusedcomp.SGD, SparseExchange]:
    """A weight of zeros that is always compressed, its optimizer and exchange."""
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = fusedcomp.SGD(
        [weight], lr=lr, momentum=momentum, compressor=compressor, memory=memory, _always_sparse=True, **more
    )
    exchange = optimizer._exchanges[0]
    assert isinstance(exchange, SparseExchange)
    return weight, optimizer, exchange


def sent_by(exchange: GatheredExchange) -> torch.Tensor:
    """What the payload holds, as a padded dense vector."""
    payload = exchange.buffers.layout.views(exchange.buffers.own.view(1, -1))
    dense = torch.zeros(exchange.bucket.segments.padded_numel)
    operands = Operands([dense])
    segments = Segments.build([len(dense)], dense.device)
    apply_payloads(
        segments, operands, payload.starts, payload.indices, payload.values, torch.tensor([-1.0]), None,
        exchange.status, None, exchange.present, None, inverse_world=1.0, signed=exchange.buffers.layout.signed,
    )  # fmt: skip
    return dense

"""The table of addresses that kernels read, through captures, replays and plain steps between them."""

import pytest
import torch
from torch import Tensor

from fusedcomp.kernels import segments
from fusedcomp.kernels.segments import Operands


def tables(operands: Operands, grads: list[Tensor]) -> list[list[int]]:
    return [[g.data_ptr() for g in grads], [p.data_ptr() for p in operands.params]]


@pytest.mark.parametrize("same", [False, True], ids=["new", "as-before"])
def test_plain_steps_leave_the_table_of_a_graph_alone(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was written for the graph or lay there already; and they find their own again after replays."""
    operands = Operands([torch.zeros(3) for _ in range(5)])
    first, second, third = ([torch.zeros(3) for _ in range(5)] for _ in range(3))
    operands.update(first)
    captured = first if same else second
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_capturing", lambda device: True)
        operands.update(captured)
        graph = operands.addresses
        operands.update(third)  # a second step of the same graph
        other = operands.addresses
    for grads in (third, first, first, captured):
        operands.update(grads)
        assert operands.addresses.tolist() == tables(operands, grads)
        assert operands.addresses is not graph
        assert operands.addresses is not other
        assert graph.tolist() == tables(operands, captured)
        assert other.tolist() == tables(operands, third)


def test_addresses_are_sent_when_they_change_only(monkeypatch: pytest.MonkeyPatch) -> None:
    operands, sent = Operands([torch.zeros(3)]), []
    monkeypatch.setattr(operands._staging, "send", lambda host, out: sent.append(host))
    one, two = [torch.zeros(3)], [torch.zeros(3)]
    for grads in (one, one, two, two, one):
        operands.update(grads)
    assert len(sent) == 3

"""Two trials: a kernel against its twin; and two steps of training on small integers, whose sums are exact.

Of every step, in which the learning rate is 1 and a rank is alone:

    velocity    <- 0.5 * velocity + gradient
    accumulated  = residual + velocity
    accumulated == sent + kept          sent: old parameter - new parameter; kept: the new residual
"""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

import fusedcomp
from fusedcomp.kernels import dense
from fusedcomp.kernels.reference import dense as dense_twin
from fusedcomp.kernels.segments import Operands, Segments

_SHAPE = (64, 80)  # two blocks and a half
_DENSITY = 0.01
_MOMENTUM = 0.5


def kernel_equals_twin(device: torch.device) -> bool:
    """Run the dense update as a kernel on ``device`` and as its twin on the CPU: the same bits?"""
    return torch.equal(_updated(dense, device), _updated(dense_twin, torch.device("cpu")))


def _updated(module: object, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    param, grad = (torch.randn(_SHAPE, generator=generator).to(device) for _ in range(2))
    segments, operands = Segments.build([param.numel()], device), Operands([param])
    operands.update([grad])
    present, lr = torch.ones(1, dtype=torch.int32, device=device), torch.full((1,), 0.1, device=device)
    velocity = torch.zeros(segments.padded_numel, device=device)
    for _ in range(2):
        module.update_dense(  # type: ignore[attr-defined]
            segments, operands, present, None, lr, velocity,
            inverse_world=1.0, weight_decay=0.01, momentum=0.9, nesterov=False,
        )  # fmt: skip
    return param.cpu()


def two_steps(device: torch.device) -> str | None:
    """Train two steps on ``device``; what went wrong, None where nothing did."""
    param, wrong = _trained(device)
    if wrong is not None:
        return wrong
    with _twins():
        twin, wrong = _trained(torch.device("cpu"))
    if wrong is not None:
        return f"with the twins: {wrong}"
    return None if torch.equal(param, twin) else "parameters differ from those of the plain-torch twins"


@contextlib.contextmanager
def _twins() -> Iterator[None]:
    kept = os.environ.get("FUSEDCOMP_OPS")
    os.environ["FUSEDCOMP_OPS"] = "reference"
    try:
        yield
    finally:
        os.environ.pop("FUSEDCOMP_OPS")
        if kept is not None:
            os.environ["FUSEDCOMP_OPS"] = kept


def _trained(device: torch.device) -> tuple[Tensor, str | None]:
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(torch.randint(-8, 9, _SHAPE, generator=generator).float().to(device))
    optimizer = fusedcomp.SGD([param], lr=1.0, momentum=_MOMENTUM, compressor=fusedcomp.TopK(_DENSITY))
    velocity = residual = torch.zeros_like(param)
    for step in range(2):
        factors = torch.randint(-64, 65, _SHAPE, generator=generator).float().to(device)
        optimizer.zero_grad()
        (param * factors).sum().backward()  # the gradient is exactly these integers
        before = param.detach().clone()
        optimizer.step()
        velocity = _MOMENTUM * velocity + factors
        accumulated, sent = residual + velocity, before - param.detach()
        residual = optimizer.state[param]["residual"].clone()
        if not torch.equal(sent + residual, accumulated):
            return param.detach().cpu(), f"step {step}: what was sent and what was kept is not what had accumulated"
        if not sent.any():
            return param.detach().cpu(), f"step {step}: nothing was sent"
        velocity = torch.where(sent != 0, 0.0, velocity)  # momentum masking
    return param.detach().cpu(), None

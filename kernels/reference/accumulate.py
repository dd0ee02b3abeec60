"""How memory accumulates, in plain torch: every operation rounds once, as in the kernels."""

from torch import Tensor


def accumulate_none(grad: Tensor, velocity: Tensor, residual: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    return velocity, grad


def accumulate_residual(grad: Tensor, velocity: Tensor, residual: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    return velocity, residual + grad


def accumulate_momentum(grad: Tensor, velocity: Tensor, residual: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    velocity = velocity * momentum + grad
    return velocity, residual + velocity


def accumulate_nesterov(grad: Tensor, velocity: Tensor, residual: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    velocity = velocity * momentum + grad
    return velocity, residual + (grad + velocity * momentum)


ACCUMULATE = {
    "none": accumulate_none,
    "residual": accumulate_residual,
    "momentum": accumulate_momentum,
    "nesterov": accumulate_nesterov,
}

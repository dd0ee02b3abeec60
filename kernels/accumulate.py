"""How memory accumulates: device functions that the sample, compress and settle kernels take as a constexpr.

none        residual <- update,             update = gradient
residual    residual <- residual + update,  update = gradient
momentum    velocity <- momentum * velocity + gradient;  residual <- residual + velocity
nesterov    velocity <- momentum * velocity + gradient;  residual <- residual + (gradient + momentum * velocity)
"""

import triton
import triton.language as tl  # noqa: F401  the interpreter looks for it in the globals of a jitted function


@triton.jit
def accumulate_none(grad, velocity, residual, momentum):
    return velocity, grad


@triton.jit
def accumulate_residual(grad, velocity, residual, momentum):
    return velocity, residual + grad


@triton.jit
def accumulate_momentum(grad, velocity, residual, momentum):
    velocity = momentum * velocity + grad
    return velocity, residual + velocity


@triton.jit
def accumulate_nesterov(grad, velocity, residual, momentum):
    velocity = momentum * velocity + grad
    return velocity, residual + (grad + momentum * velocity)


ACCUMULATE = {
    "none": accumulate_none,
    "residual": accumulate_residual,
    "momentum": accumulate_momentum,
    "nesterov": accumulate_nesterov,
}

"""The network: two convolutions, a pool, two linear layers; no BatchNorm, whose buffers would differ between replicas.

Its three large weights are compressed. The first convolution and the biases, 618 of 143,466 parameters, are below the
2048 elements from which a parameter is, and go as they are.
"""

import torch
from torch import nn

NAME = "cnn"
CHANNELS = 32
HIDDEN = 256
CLASSES = 10
_POOLED = 4  # the pool's output side, for images of any side


def build(side: int, seed: int) -> nn.Module:
    """The network for images of ``side`` x ``side``, initialised from ``seed``; as large for any side."""
    torch.manual_seed(seed)
    stride = 1 if side <= 16 else 2  # larger images cost as many operations as they have pixels
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1, stride=stride),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(_POOLED),
        nn.Flatten(),
        nn.Linear(CHANNELS * _POOLED**2, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )

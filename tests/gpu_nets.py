"""A network for the tests on a GPU."""

import torch
from torch import nn


def wide_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(512, 10)).cuda()

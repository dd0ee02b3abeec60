"""Networks for the tests on a GPU."""

import torch
from torch import Tensor, nn


def wide_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(512, 10)).cuda()


class LinearLoss(nn.Module):
    """wide_net's parameters under a loss that is linear in them: gradients are those planted, whatever they become.

    What two trainings send then does not depend on how each rounds its updates.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = wide_net()

    def forward(self, seed: int) -> Tensor:
        device = next(self.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        planted = (torch.randn(p.shape, device=device, generator=generator) for p in self.parameters())
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), planted, strict=True)]).sum()

"""The two networks of ablation.py: a residual network for small images, an LSTM for characters; their blocks."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Unit(nn.Module):
    """Two convolutions beside a shortcut without parameters (He et al., CVPR 2016, option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.more = stride, outputs - inputs
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.after_first, self.after_second = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:  # (batch, channels, side, side)
        y = self.after_second(self.second(functional.relu(self.after_first(self.first(x)))))
        shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return functional.relu(y + shortcut)


class ResNet(nn.Module):
    """ResNet-20 where ``units`` is 3: three stages, each half the side and twice the width of the one before.

    Normalised by BatchNorm as in Deep Gradient Compression's own experiments. GroupNorm would have no buffers, but
    weights that BatchNorm makes free of scale are where a late update can hurt, so it would be another experiment.
    """

    def __init__(self, width: int, units: int, classes: int) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 4 * width]
        self.stem, self.after_stem = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.stages = nn.Sequential(*(
            Unit(widths[stage] if unit == 0 else widths[stage + 1], widths[stage + 1], 2 if stage and not unit else 1)
            for stage in range(3) for unit in range(units)
        ))  # fmt: skip
        self.head = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, images: Tensor) -> Tensor:  # f32 (batch, 1, side, side) -> logits (batch, classes)
        x = functional.relu(self.after_stem(self.stem(images)))
        return self.head(self.stages(x).mean((2, 3)))


class CharacterLSTM(nn.Module):
    """An LSTM of one layer; its state is zero where a window begins."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width // 4)
        self.lstm = nn.LSTM(width // 4, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:  # i64 (batch, time) -> logits (batch, time, vocabulary)
        return self.head(self.lstm(self.characters(characters))[0])


def stages(model: nn.Module) -> list[list[Tensor]]:
    """The parameters of consecutive parts, all but the head; of a residual network the first has the stem."""
    if isinstance(model, CharacterLSTM):
        parts = [[model.characters], [model.lstm]]
    else:
        units, each = list(model.stages), len(model.stages) // 3
        parts = [units[:each], units[each : 2 * each], units[2 * each :]]
        parts[0] = [model.stem, model.after_stem, *parts[0]]
    return [[param for module in part for param in module.parameters()] for part in parts]


def blocks(model: nn.Module, choice: str | None) -> list[list[Tensor]] | None:
    """Of JointSpar, as bench/jointspar.py names them; None: its default, layers."""
    if choice is None:
        return None
    *front, last = stages(model)
    early = [param for part in front for param in part]
    return {"stages": [*front, last], "most": [early, last], "early": [early]}[choice]


def numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@torch.no_grad()
def share_right(model: nn.Module, images: Tensor, labels: Tensor, batch: int) -> float:
    """Accuracy in [0, 1], ``batch`` images at a time."""
    parts = zip(images.split(batch), labels.split(batch), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in parts) / len(labels)

"""Gradient processes that leave realistic velocities and residuals behind: two networks in training, one synthetic.

A workload has ``params`` and ``backward()``, which fills their gradients and returns the loss (or None). The networks
take a batch from ``sample()``, or the one they are given, where making batches is not to be timed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness

_CLASSES_SEEN = 100  # few enough to be learned in 200 small batches
_WRONG_LABELS = 0.1  # so that gradients do not vanish when they are


# ---- resnet50 ------------------------------------------------------------------------------------------------------


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * inner)
        self.downsample: nn.Module = nn.Identity()
        if project:
            conv = nn.Conv2d(channels, 4 * inner, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * inner))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        return (self.bn3(self.conv3(y)) + self.downsample(x)).relu()


class _ResNet(nn.Module):
    """torchvision's bottleneck ResNet: its parameters in its order. For machines without it, and for small sizes."""

    def __init__(self, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        layers, channels = [], width
        for stage, count in enumerate(blocks):
            inner = width << stage
            for block in range(count):
                first = block == 0
                layers.append(_Bottleneck(channels, inner, 2 if first and stage > 0 else 1, first))
                channels = 4 * inner
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.bn1(self.conv1(x)).relu(), 3, 2, 1)
        return self.fc(self.layers(x).mean((2, 3)))


def _torchvision_resnet50() -> nn.Module:
    try:
        from torchvision.models import resnet50
    except Exception:  # a torchvision built for another torch raises more than ImportError
        return _ResNet((3, 4, 6, 3), 64, 1000)
    return resnet50()


class ImageTraining:
    """A ResNet on images that are a coarse pattern per class under noise."""

    def __init__(self, device: torch.device, quick: bool, batch: int = 32, channels_last: bool = False) -> None:
        self.batch, self.pixels, classes = (4, 32, 10) if quick else (batch, 224, _CLASSES_SEEN)
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        model = _ResNet((1, 1, 1, 1), 8, classes) if quick else _torchvision_resnet50()
        self.model = model.to(device, memory_format=self.layout)
        self.params = list(self.model.parameters())
        self.patterns = torch.randn(classes, 3, 8, 8, device=device)

    def sample(self) -> tuple[Tensor, Tensor]:
        """Images and labels."""
        device = self.patterns.device
        labels = torch.randint(len(self.patterns), (self.batch,), device=device)
        clean = F.interpolate(self.patterns[labels], size=(self.pixels, self.pixels), mode="bilinear")
        images = clean + torch.randn_like(clean)
        wrong = torch.rand(self.batch, device=device) < _WRONG_LABELS
        labels = torch.where(wrong, torch.randint_like(labels, len(self.patterns)), labels)
        return images.contiguous(memory_format=self.layout), labels

    def backward(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        images, labels = batch or self.sample()
        with torch.autocast(images.device.type, torch.bfloat16):
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        return loss.detach()


# ---- gpt2 ----------------------------------------------------------------------------------------------------------


class _GPT2(nn.Module):
    """GPT-2 with tied embeddings, weights as (in, out), and a last norm without parameters."""

    def __init__(self, shapes: Sequence[torch.Size], heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, shapes[0][1]
        depth = (len(shapes) - 2) // 12
        self.weights = nn.ParameterList([self._initial(shape, i, depth) for i, shape in enumerate(shapes)])

    def _initial(self, shape: torch.Size, index: int, depth: int) -> nn.Parameter:
        if len(shape) == 1:  # the first of a norm's two vectors is its gain
            gain = index >= 2 and (index - 2) % 12 in (0, 6)
            return nn.Parameter(torch.ones(shape) if gain else torch.zeros(shape))
        into_stream = index >= 2 and (index - 2) % 12 in (4, 10)
        return nn.Parameter(torch.randn(shape) * 0.02 / (math.sqrt(2 * depth) if into_stream else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        embedding, position, *layers = self.weights
        batch, length = tokens.shape
        x = embedding[tokens] + position[:length]
        for i in range(0, len(layers), 12):
            gain1, bias1, qkv, qkv_b, out, out_b, gain2, bias2, up, up_b, down, down_b = layers[i : i + 12]
            h = F.layer_norm(x, (self.width,), gain1, bias1) @ qkv + qkv_b
            q, k, v = h.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + h.transpose(1, 2).reshape(batch, length, self.width) @ out + out_b
            h = F.layer_norm(x, (self.width,), gain2, bias2) @ up + up_b
            x = x + F.gelu(h, approximate="tanh") @ down + down_b
        return F.layer_norm(x, (self.width,)) @ embedding.t()


class TextTraining:
    """A GPT-2 on a Markov text: Zipf-distributed tokens, every second one mostly a function of the one before it."""

    def __init__(self, device: torch.device, quick: bool, batch: int = 4, length: int = 256) -> None:
        shapes = harness.gpt2_shapes(512, 64, 64, 2) if quick else harness.gpt2_shapes()
        self.batch, self.length, heads = (2, 32, 4) if quick else (batch, length, 12)
        self.vocabulary = shapes[0][0]
        self.model = _GPT2(shapes, heads).to(device)
        self.params = list(self.model.parameters())

    def sample(self) -> Tensor:
        """Tokens, (batch, length + 1); token number r has a frequency of about 1 / r."""
        device = self.params[0].device
        uniform = torch.rand(self.batch, self.length + 2, device=device)
        tokens = (self.vocabulary**uniform).long().clamp_(max=self.vocabulary) - 1
        tokens = tokens[:, : (self.length + 2) // 2 * 2].view(self.batch, -1, 2)
        follows = torch.rand(tokens.shape[:2], device=device) < 0.8
        tokens[..., 1] = torch.where(follows, (tokens[..., 0] * 7919 + 31) % self.vocabulary, tokens[..., 1])
        return tokens.flatten(1)[:, : self.length + 1]

    def backward(self, batch: Tensor | None = None) -> Tensor:
        tokens = self.sample() if batch is None else batch
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()


# ---- flat340m ------------------------------------------------------------------------------------------------------


class HeavyTailed:
    """One tensor whose gradient is Student-t (3 degrees of freedom) times a log-normal scale per 4096 entries."""

    def __init__(self, device: torch.device, quick: bool, numel: int | None = None) -> None:
        shape = torch.Size((300, 1000)) if quick else harness.flat340m_shapes()[0]
        if numel is not None:
            shape = torch.Size((1, numel))  # of two dimensions: vectors are never compressed
        self.params = [nn.Parameter(torch.randn(shape, device=device) * 0.02)]
        self.scale = torch.randn(-(-shape.numel() // 4096), 1, device=device).exp_() * 1e-3

    def backward(self) -> None:
        size = (len(self.scale), 4096)
        squares, normal = (torch.zeros(size, device=self.scale.device) for _ in range(2))
        for _ in range(3):
            normal.normal_()
            squares.addcmul_(normal, normal)
        grad = normal.normal_().div_(squares.div_(3.0).clamp_(min=1e-6).sqrt_()).mul_(self.scale)
        for param in self.params:
            param.grad = grad.view(-1)[: param.numel()].view_as(param)


Workload = ImageTraining | TextTraining | HeavyTailed

WORKLOADS: dict[str, Callable[[torch.device, bool], Any]] = {
    "resnet50": ImageTraining,
    "gpt2": TextTraining,
    "flat340m": HeavyTailed,
}

LEARNING_RATES = {"resnet50": 0.02, "gpt2": 0.05, "flat340m": 0.05}


def check_shapes(case: str, params: Sequence[Tensor]) -> None:
    """The trained network must have the shapes the case is known by.

    Raises:
        RuntimeError: it has others.
    """
    expected = sorted(tuple(s) for s in harness.SHAPES[case]())
    if sorted(tuple(p.shape) for p in params) != expected:
        raise RuntimeError(f"the network of {case} has other parameters than harness.SHAPES[{case!r}]")

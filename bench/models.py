"""The two trainings of the end-to-end benchmark, as fast as torch makes them without changing their results.

resnet50   torchvision's ResNet-50 on 64 images of 224 x 224 a rank: bf16 autocast, channels_last, cudnn.benchmark
gpt2       GPT-2 small (124 M, tied embedding) on 8 x 1024 tokens a rank: bf16 autocast, flash attention, every block
           and the head compiled by themselves

Other benches ask for larger batches.

torch.compile over the whole model would hand over all gradients at once when backward is done, and nothing could be
sent before; compiled block by block, gradients come as each block's backward ends.

    flops of a GPT-2 step = 6 * parameters * tokens            forward 2, backward 4; position table left out
                          + 6 * layers * width * length * tokens   attention: half of 12, as half of it is masked
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BATCHES = 4  # generated once, used in turn
_PEAK_SIDE = 8192  # of the square matrices whose product says what the card can do


class Images:
    """ResNet-50 on random images."""

    def __init__(self, device: torch.device, quick: bool, rank: int, batch: int = 64) -> None:
        batch, pixels, classes = (4, 32, 10) if quick else (batch, 224, 1000)
        torch.manual_seed(0)
        self.model = _resnet(quick).to(device, memory_format=torch.channels_last)
        torch.manual_seed(1000 + rank)
        torch.backends.cudnn.benchmark = True
        images = [torch.randn(batch, 3, pixels, pixels, device=device) for _ in range(_BATCHES)]
        self.images = [i.contiguous(memory_format=torch.channels_last) for i in images]
        self.labels = [torch.randint(classes, (batch,), device=device) for _ in range(_BATCHES)]
        self.facts: dict[str, Any] = {"batch": batch, "parameters": count(self.model)}
        self.flops: int | None = None

    def loss(self, module: nn.Module, step: int) -> Tensor:
        images, labels = self.images[step % _BATCHES], self.labels[step % _BATCHES]
        with torch.autocast(images.device.type, torch.bfloat16):
            logits = module(images)
        return F.cross_entropy(logits.float(), labels)


def _resnet(quick: bool) -> nn.Module:
    from workloads import _ResNet

    if quick:
        return _ResNet((1, 1, 1, 1), 8, 10)
    try:
        from torchvision.models import resnet50
    except Exception:  # a torchvision built for another torch raises more than ImportError
        return _ResNet((3, 4, 6, 3), 64, 1000)
    return resnet50()


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class _Head(nn.Module):
    """Last norm, logits and loss: compiled together, so that the logits are stored once, in bf16."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embedding.embedding_dim)
        self.weight = embedding.weight

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(self.norm(x), self.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT2(nn.Module):
    """Returns the loss."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([_Block(width, heads) for _ in range(layers)])
        self.head = _Head(self.embedding)
        for name, param in self.named_parameters():
            if param.ndim > 1:
                into_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / (math.sqrt(2 * layers) if into_stream else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)

    def compile_regions(self, backend: str) -> None:
        """Each block and the head by itself; the blocks share one compilation."""
        for region in [*self.blocks, self.head]:
            region.compile(backend=backend, dynamic=False)


class Text:
    """GPT-2 small on random tokens; the vocabulary is padded to a multiple of 64, which tensor cores need."""

    def __init__(self, device: torch.device, quick: bool, rank: int, batch: int = 8, regions: bool = True) -> None:
        # vocabulary, context, width, layers, heads
        size = (512, 32, 64, 2, 4) if quick else (50304, 1024, 768, 12, 12)
        (vocabulary, length, width, layers, _), batch = size, 2 if quick else batch
        torch.manual_seed(0)
        self.model = GPT2(*size).to(device)
        torch._dynamo.config.optimize_ddp = False  # the regions are cut as they should be; DDP must not cut them anew
        if regions:
            self.model.compile_regions("inductor" if device.type == "cuda" else "eager")  # on CPU nothing is gained
        torch.manual_seed(1000 + rank)
        self.tokens = [torch.randint(vocabulary, (batch, length + 1), device=device) for _ in range(_BATCHES)]
        parameters = count(self.model)
        self.facts: dict[str, Any] = {"batch": batch, "length": length, "parameters": parameters}
        self.flops: int | None = gpt2_flops(parameters - length * width, width, layers, batch, length)

    def loss(self, module: nn.Module, step: int) -> Tensor:
        tokens = self.tokens[step % _BATCHES]
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return module(tokens[:, :-1], tokens[:, 1:])


def gpt2_flops(parameters: int, width: int, layers: int, batch: int, length: int) -> int:
    """Of a training step; ``parameters`` without the position table, the tied embedding once (as the head)."""
    tokens = batch * length
    return 6 * parameters * tokens + 6 * layers * width * length * tokens


def utilisation(flops: float, ms: float, peak_tflops: float) -> float:
    """Model FLOP utilisation: the share of the measured matrix-product peak that a step of ``ms`` reaches."""
    return flops / (ms * 1e9 * peak_tflops)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def matmul_tflops(device: torch.device, quick: bool) -> float:
    """What a bf16 product of square matrices reaches on random data: the peak of this card in this run."""
    from harness import Variant, clock_for, measure

    side, clock = 128 if quick else _PEAK_SIDE, clock_for(device)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    figure = measure(clock, [Variant("matmul", lambda: torch.mm(a, b, out=out))], 20, 1)[0]
    return 2 * side**3 / figure.median / 1e9


Training = Images | Text
TRAININGS: dict[str, Callable[[torch.device, bool, int], Training]] = {"resnet50": Images, "gpt2": Text}

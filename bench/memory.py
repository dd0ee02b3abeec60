"""Bytes of state per parameter, by the allocator's figures, against what is documented.

python bench/memory.py                          SGD and LARS, fp32 and bf16 states, TopK(0.001)
python bench/memory.py --quick --device cpu     small sizes; live tensors are counted instead

What is allocated between "parameters and gradients are there" and "one step was taken": states, tables, payloads and
scratch. Documented (SGD's state_dtype): two states of 4 or 2 bytes and 0.3 bytes of the selection's scratch for what is
compressed; momentum and the buffer that is all-reduced, of 4 bytes each, for what never is.
"""

import gc
import inspect
import sys
import traceback
from typing import Any

import torch
from torch import Tensor, nn

import cases
import fusedcomp
import harness
import records
import tables
from fusedcomp.sparse import SparseExchange
from harness import log
from trained import DENSITY, MOMENTUM, Config

CONFIGS = {
    "fusedcomp_fp32": Config("fp32"),
    "fusedcomp_bf16": Config("bf16", half=True),
    "fusedcomp_lars_fp32": Config("lars_fp32", kind="LARS"),
    "fusedcomp_lars_bf16": Config("lars_bf16", kind="LARS", half=True),
}
DEFAULT_CAP_MB: float = inspect.signature(fusedcomp.SGD).parameters["bucket_cap_mb"].default
TOLERANCE = 0.07
CASES = ("resnet50", "gpt2", "flat340m")


def allocated(device: torch.device) -> int:
    """Bytes that live tensors hold: the allocator's figure, or without one what the garbage collector knows."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    tensors = [t for t in gc.get_objects() if type(t) is Tensor]  # isinstance() would wake up lazy modules
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def model(case: str, device: torch.device, quick: bool) -> list[nn.Parameter]:
    """Parameters with gradients."""
    small = {
        "resnet50": lambda: harness.resnet50_shapes((1, 1, 1, 1), 16, 100),
        "gpt2": lambda: harness.gpt2_shapes(512, 64, 64, 2),
        "flat340m": lambda: [torch.Size((100, 1000))],
    }
    shapes = (small if quick else harness.SHAPES)[case]()
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


SCRATCH = 0.3  # at density 0.001: marks of 256 bytes a block, three words a candidate


def documented(optimizer: Any, half: bool) -> float:
    """Bytes."""
    total = 0.0
    for exchange in optimizer._exchanges:
        sparse = isinstance(exchange, SparseExchange)
        total += (2 * (2 if half else 4) + SCRATCH if sparse else 8) * exchange.bucket.segments.numel
    return total


def measure(case: str, provider: str, device: torch.device, quick: bool) -> tuple[float, float, dict[str, int]]:
    """(measured bytes, documented bytes) per parameter, and details."""
    params = model(case, device, quick)
    numel = sum(p.numel() for p in params)
    torch.zeros(1, device=device)  # the allocator is awake
    before = allocated(device)
    optimizer = CONFIGS[provider].build(params, 0.0, DEFAULT_CAP_MB)
    built = allocated(device) - before
    optimizer.step()
    after = allocated(device) - before
    details = {
        "numel": numel,
        "bytes_built": built,
        "bytes_after_step": after,
        "num_buckets": len(optimizer._exchanges),
    }
    return after / numel, documented(optimizer, CONFIGS[provider].half) / numel, details


def main() -> int:
    parser = cases.parser(__doc__, "memory.jsonl")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    args = cases.parse(parser)
    before, failed = tables.count(args.results), []
    for case in args.cases.split(","):
        for provider in CONFIGS:
            try:
                value, expected, details = measure(case, provider, torch.device(args.device), args.quick)
            except Exception:
                failed.append(f"{case}/{provider}")
                log(f"{case}, {provider}: FAILED\n{traceback.format_exc()}")
                continue
            for metric, number in (("bytes_per_param", value), ("of_documented", value / expected)):
                records.append(
                    args.results, bench="memory", case=case, provider=provider, metric=metric, value=number,
                    documented=expected, density=DENSITY, momentum=MOMENTUM, bucket_cap_mb=DEFAULT_CAP_MB,
                    quick=args.quick, **details,
                )  # fmt: skip
            far = "" if args.quick or abs(value / expected - 1) <= TOLERANCE else f"  more than {TOLERANCE:.0%} off"
            log(f"{case}, {provider}: {value:.2f} bytes per parameter, documented {expected:.2f}{far}")
    tables.show(args.results, before)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

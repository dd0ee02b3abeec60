"""Everything that one GPU can show, in under 8 minutes on an H100.

python bench/single_gpu.py                          all benches; where there are several GPUs, on as many as there are
python bench/single_gpu.py --quick --device cpu     a smoke test without a GPU: twins, figures that mean nothing

A case (compress, apply and step of one workload, trained once), overlap and memory run in processes of their own, each
with a time cap: a crash or a hang of one leaves the others' records alone.
"""

import queue
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import apply
import cases
import compress
import memory
import overlap
import step
import tables

BENCHES = (compress, apply, step)
OTHERS = {"memory.py": (60, memory.CASES), "overlap.py": (120, overlap.CASES)}  # seconds, cases
DEADLINE = 470  # seconds for everything


def main() -> int:
    script, args = Path(__file__).name, cases.parse(cases.parser_of_cases(__doc__))
    if args.case:
        return cases.run_case(script, args, BENCHES)
    begin, failed = time.perf_counter(), []
    paths = {other: args.results.with_name(f"{Path(other).stem}.jsonl") for other in OTHERS}
    before = {path: tables.count(path) for path in (args.results, *paths.values())}

    def left() -> float:
        return max(1.0, DEADLINE - (time.perf_counter() - begin))

    def case_on(case: str, gpu: int | None) -> bool:
        return cases.case_apart(script, args, case, min(cases.CASE_SECONDS, left()), gpu)

    def other_on(other: str, gpu: int | None) -> bool:
        seconds, known = OTHERS[other]
        wanted = ",".join(case for case in args.cases.split(",") if case in known)
        more = ("--cases", wanted, "--results", str(paths[other]))
        return not wanted or cases.apart(other, args, *more, seconds=min(seconds, left()), gpu=gpu)

    # A GPU of its own for every process that runs: one at a time on one GPU.
    gpus: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for gpu in range(torch.cuda.device_count()) if args.device == "cuda" else (None,):
        gpus.put(gpu)

    def run(part: Callable[[str, int | None], bool], name: str) -> None:
        gpu = gpus.get()
        try:
            if not part(name, gpu):
                failed.append(name)
        finally:
            gpus.put(gpu)

    with ThreadPoolExecutor(gpus.qsize()) as pool:
        parts = [pool.submit(run, case_on, case) for case in args.cases.split(",")]
        parts += [pool.submit(run, other_on, other) for other in OTHERS]
        for part in parts:
            part.result()  # raises what was raised in there
    for path, skip in before.items():
        tables.show(path, skip)
    took = time.perf_counter() - begin
    print(f"\nrecords: {args.results.parent}; {took:.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

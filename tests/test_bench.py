"""The benches run without a GPU, on twins and small sizes: records are complete, and nothing wrong is ever timed."""

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
sys.path.append(str(BENCH))  # after tests/, whose modules keep their names

import bandwidth  # noqa: E402
import cases  # noqa: E402
import compare_eager  # noqa: E402
import cub  # noqa: E402
import eager  # noqa: E402
import frozen  # noqa: E402
import harness  # noqa: E402
import jointspar  # noqa: E402
import lars  # noqa: E402
import launches  # noqa: E402
import methods  # noqa: E402
import sections_methods  # noqa: E402
import step  # noqa: E402
import tables  # noqa: E402
import trained  # noqa: E402
import workloads  # noqa: E402
from fusedcomp import LARS  # noqa: E402
from fusedcomp.kernels.segments import WORDS, Operands, Segments  # noqa: E402

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=150)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the commands --------------------------------------------------------------------------------------------------

# (bench, provider) -> metrics that must be there
EXPECTED = {
    ("compress", "fusedcomp_fp32"): {"ms", "pass_ms", "of_twin", "selection_ratio", "speedup", "nnz", "equals_topk"},
    ("compress", "fusedcomp_fp32_wd"): {"ms", "pass_ms", "of_twin", "selection_ratio"},
    ("compress", "fusedcomp_bf16"): {"ms", "pass_ms", "of_twin", "selection_ratio"},
    ("compress", "fusedcomp_fp32_d0.01"): {"ms", "selection_ratio"},
    ("compress", "bandwidth_twin"): {"ms"},
    ("compress", "bandwidth_twin_bf16"): {"ms"},
    ("compress", "accumulate_fp32"): {"ms"},
    ("compress", "eager"): {"ms"},
    ("compress", "eager_per_tensor"): {"ms"},
    ("compress", "compiled"): {"ms"},
    ("compress", "torch_topk"): {"ms"},
    ("apply", "fusedcomp_fp32"): {"ms"},
    ("step", "fusedcomp_fp32"): {"ms", "of_fused", "of_foreach", "host_us", "graph_host_us"},
    ("step", "fusedcomp_fp32_wd"): {"ms", "of_fused"},
    ("step", "fusedcomp_bf16"): {"ms", "of_fused"},
    ("step", "fusedcomp_bf16_wd"): {"ms", "of_fused"},
    ("step", "fusedcomp_lars_fp32"): {"ms", "of_lars"},
    ("step", "torch_sgd_fused"): {"ms", "host_us"},
    ("step", "torch_sgd_foreach"): {"ms"},
    ("step", "lars_foreach"): {"ms"},
    ("step", "lars_foreach_fused"): {"ms"},
    ("step", "lars_compiled"): {"ms"},
    ("memory", "fusedcomp_fp32"): {"bytes_per_param", "of_documented"},
    ("memory", "fusedcomp_lars_bf16"): {"bytes_per_param", "of_documented"},
    ("overlap", "backward_only"): {"ms"},
    ("overlap", "fusedcomp_overlap"): {"ms", "exposed_ms", "exposed_ratio"},
    ("overlap", "fusedcomp_serial"): {"ms", "compress_ms"},
}


def test_one_command_leaves_all_records(tmp_path: Path) -> None:
    results = tmp_path / "step.jsonl"
    done = run(
        "bench/single_gpu.py", "--quick", "--device", "cpu", "--cases", "resnet50", "--results", str(results)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [row for name in ("step", "memory", "overlap") for row in read(tmp_path / f"{name}.jsonl")]
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        assert math.isfinite(row["value"]), row
        assert row["quick"] is True
        found.setdefault((row["bench"], row["provider"]), set()).add(row["metric"])
    missing = {key: metrics - found.get(key, set()) for key, metrics in EXPECTED.items()}
    assert not {key: metrics for key, metrics in missing.items() if metrics}
    timed = [row for row in rows if row["bench"] == "step" and row["metric"] == "ms"]
    assert {row["timing"] for row in timed} == {"events", "graph"}
    assert {row["ranks"] for row in rows if row["bench"] == "apply"} == {1, 2, 4, 8}
    assert [row["value"] for row in rows if row["metric"] == "equals_topk"] == [1, 1]
    # Where records go is no part of how they came about, and names a folder of the machine.
    assert all(row["command"].startswith("python bench/") and str(tmp_path) not in row["command"] for row in rows)


@pytest.mark.parametrize("model", ["resnet50", "1e5"])
def test_compare_eager_prints_a_table_after_the_check(model: str) -> None:
    done = run("bench/compare_eager.py", "--quick", "--device", "cpu", "--model", model, "--density", "0.01")
    assert done.returncode == 0, done.stderr[-4000:]
    check, title = done.stdout.index("correctness:"), done.stdout.index("eager ms")
    assert check < title
    for what in ("compress: momentum", "per tensor", "apply what 8 ranks sent", "whole step", "torch SGD, fused"):
        assert what in done.stdout[title:]
    assert "left out" not in done.stdout


def test_compare_eager_refuses_a_model_it_does_not_know() -> None:
    done = run("bench/compare_eager.py", "--quick", "--device", "cpu", "--model", "vgg")
    assert done.returncode == 2
    assert "resnet50, gpt2 or a number of elements" in done.stderr


# ---- the gate ------------------------------------------------------------------------------------------------------


def quick_case(path: Path) -> cases.Case:
    return cases.Case("flat340m", CPU, True, path, "step.py")


@pytest.fixture
def only_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CONFIGS", (trained.Config("fp32"),))


@pytest.mark.usefixtures("only_fp32")
def test_nothing_is_timed_when_kernels_and_twins_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def wrong_twins(exchanges: Any) -> Any:
        yield
        exchanges[0].bucket.states["velocity"][7] += 1.0  # what a wrong twin, or a wrong kernel, would leave

    monkeypatch.setattr(frozen, "on_twins", wrong_twins)
    assert not quick_case(tmp_path / "records.jsonl").run([step])
    assert {row["provider"] for row in read(tmp_path / "records.jsonl")} == {"copy"}


@pytest.mark.usefixtures("only_fp32")
def test_everything_is_timed_when_they_agree(tmp_path: Path) -> None:
    assert quick_case(tmp_path / "records.jsonl").run([step])
    assert {"fusedcomp_fp32", "torch_sgd_fused"} <= {row["provider"] for row in read(tmp_path / "records.jsonl")}


def freeze(density: float = 0.01) -> frozen.Frozen:
    torch.manual_seed(0)
    config = trained.Config("fp32", density=density, keep=4)
    with torch.enable_grad():
        made = trained.Trained(workloads.ImageTraining(CPU, True), 0.02, 3)
        optimizer, payloads = made.continue_with(config, 1e6)
    with torch.no_grad():
        return frozen.Frozen(config, optimizer, payloads)


@torch.no_grad()
def test_a_frozen_step_can_be_taken_again_and_again() -> None:
    one = freeze()
    outcomes = []
    for _ in range(2):
        one.reset()
        one.whole_step(frozen.DECAY)
        outcomes.append({name: tensor.clone() for name, tensor in one.outcome().items()})
    assert outcomes[0].keys() == outcomes[1].keys()
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])
    assert not all(torch.equal(p, c) for p, c in zip(one.params, one.copies[2], strict=True))


@torch.no_grad()
def test_eager_apply_does_what_apply_does() -> None:
    one = freeze()
    exchange = one.sparse[0]
    hyper = one.hyper(exchange, 0.0)
    before = torch.cat([p.detach().reshape(-1) for p in exchange.bucket.params])
    take = eager.FlatApply(before, compare_eager.entries(one), hyper.lr)
    take.run()
    exchange.apply(hyper)
    after = torch.cat([p.detach().reshape(-1) for p in exchange.bucket.params])
    assert not torch.equal(after, before)
    torch.testing.assert_close(take.param, after)


# ---- baselines -----------------------------------------------------------------------------------------------------


def lars_case() -> tuple[list[nn.Parameter], lars.DenseLARS]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (7,), (3, 4, 2))]
    for param in params:
        param.grad = torch.randn_like(param)
    made = lars.DenseLARS([p.detach().clone() for p in params], [p.grad.clone() for p in params], 0.9, 1e-2)
    made.lr = 0.1
    return params, made


@pytest.mark.parametrize("kind", ["foreach", "fused", "compiled"])
@torch.no_grad()
def test_dense_lars_is_lars(kind: str) -> None:
    params, made = lars_case()
    ours = LARS(params, lr=0.1, momentum=0.9, weight_decay=1e-2, trust_coefficient=lars.COEFFICIENT, eps=lars.EPS)
    for _ in range(3):
        ours.step()
        getattr(made, kind)()
        made.reset()
    torch.testing.assert_close(made.params, [params[0].data, params[2].data])
    torch.testing.assert_close(made.vectors, [params[1].data])


@pytest.mark.parametrize("density", [0.001, 0.05])
def test_per_tensor_dgc_sends_about_the_largest(density: float) -> None:
    torch.manual_seed(0)
    velocity, residual, grad = (torch.randn(40_000) for _ in range(3))
    dgc = eager.PerTensorDGC([velocity], [residual], [grad], density, 0.9)
    ((values, index),) = dgc.run()
    k = math.ceil(40_000 * density)
    assert eager.LOWER * k <= len(index) <= k
    expected = residual + (velocity * 0.9 + grad)
    assert torch.equal(values, expected[index])
    assert values.abs().min() >= expected.abs().topk(2 * k).values[-1]
    assert not dgc.residuals[0][index].any()
    dgc.reset()
    assert torch.equal(dgc.residuals[0], residual)


def test_flat_dgc_and_its_compiled_self_agree() -> None:
    torch.manual_seed(0)
    dgc = eager.FlatDGC(torch.randn(5000), torch.randn(5000), torch.randn(5000), 50, 0.9)
    values, index = dgc.run()
    assert torch.equal(dgc.magnitudes[index], values.abs())
    dgc.reset()
    assert torch.equal(dgc.compiled()[0], values)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("momentum", "decay"), [(None, 0.0), (None, 1e-2), (0.9, 0.0), (0.9, 1e-2)])
def test_the_bandwidth_twin_moves_every_element(momentum: float | None, decay: float, half: bool, memory: bool) -> None:
    torch.manual_seed(0)
    params = [torch.randn(n, device=DEVICE) for n in (3000, 2048, 5)]
    segments, operands = Segments.build([p.numel() for p in params], DEVICE), Operands(params)
    operands.update([torch.randn_like(p) for p in params])
    states = [torch.zeros(segments.padded_numel, device=DEVICE) for _ in range(2)]
    for where in segments.slices:
        for state in states:
            state[where] = torch.randn(where.stop - where.start, device=DEVICE)
    if half:
        states = [s.bfloat16().view(torch.int16) for s in states]
    moved, expected = [[s.clone() for s in states] for _ in range(2)]
    counts = torch.zeros(segments.num_blocks, dtype=torch.int32, device=DEVICE)
    marks = torch.zeros(segments.num_blocks, WORDS, dtype=torch.int32, device=DEVICE)
    (velocity, residual), (true_velocity, true_residual) = moved, expected
    bandwidth.move_by_kernel(segments, operands, velocity if memory else None, residual, counts, marks, momentum, decay)
    bandwidth.move_in_torch(
        segments.slices, operands, true_velocity if memory else None, true_residual, momentum, decay
    )
    for a, b in zip(moved, expected, strict=True):
        close = dict(rtol=2e-2, atol=2e-2) if half else dict(rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(bandwidth.values(a), bandwidth.values(b), **close)


def test_cub_compiles_where_wheel_and_compiler_are() -> None:
    if not list(cub.WHEELS.glob("nvidia_cuda_cccl-*.whl")) or shutil.which("nvcc") is None:
        pytest.skip("needs the wheel nvidia-cuda-cccl in .wheels and nvcc")
    assert cub.library().cub_topk is not None
    with pytest.raises(cub.Unavailable, match="CUDA devices only"):
        cub.top_k(torch.zeros(8), 2)


# ---- helpers -------------------------------------------------------------------------------------------------------


def test_a_call_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_FIRST_CALL_SECONDS", 1)
    clock = harness.clock_for(CPU)
    calls: dict[str, Callable[[], Any]] = {"fine": list, "slow": lambda: time.sleep(5), "broken": lambda: 1 // 0}
    kept = harness.ready(clock, [harness.Variant(name, call) for name, call in calls.items()])
    assert [variant.name for variant in kept] == ["fine"]


def test_quotients_pair_equal_timings() -> None:
    def figure(ms: float) -> harness.Figure:
        return harness.Figure((ms,), (0.0,))

    figures = cases.Figures({("a", "events"): figure(3.0), ("a", "graph"): figure(2.0), ("b", "graph"): figure(4.0)})
    assert figures.ratios("a", "b") == {"graph": 0.5}
    assert figures.ratios("a", "c") == {}


def test_copies_and_fills_are_no_kernels() -> None:
    names = ["_compress_kernel", "Memcpy DtoD (Device -> Device)", "Memset (Device)"]
    assert [launches.Activity(name, 1.0).is_kernel for name in names] == [True, False, False]


def test_a_table_lines_up(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_table("title", ("where", "ms"), [["here", "1.25"], ["here", "10.5"], ["there", "2"]])
    assert capsys.readouterr().out == "\ntitle\nwhere ms\nhere  1.25\n      10.5\nthere 2\n"


def test_every_method_is_timed(tmp_path: Path) -> None:
    results = tmp_path / "methods.jsonl"
    done = run("bench/methods.py", "--quick", "--device", "cpu", "--cases", "gpt2", "--results", str(results))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = read(results)
    times = {row["provider"]: row for row in rows if (row["metric"], row["timing"]) == ("ms", "graph")}
    assert times.keys() == methods.METHODS.keys() == sections_methods.WORDS.keys()
    for provider, row in times.items():
        assert row["value"] > 0
        assert row["elements"] == 300 * 100 + 61 * 57
        # Raw gradients are 4 bytes an element. Of noise without tails many entries are worth drawing.
        assert 0 < row["payload_bytes"] < row["elements"] * (2 if provider == "cat_stochastic" else 1)
    # Which entries chance picks is known to all: they are sent without their places.
    assert times["randomk"]["payload_bytes"] < times["topk"]["payload_bytes"]


def test_charlm_trains_every_method(tmp_path: Path) -> None:
    """The smoke test of the language model: every method ends with one model on all ranks, and has its own rate."""
    results = tmp_path / "charlm.jsonl"
    done = run("bench/charlm.py", "--text", "README.md", "--quick", "--device", "cpu", "--results", str(results))
    assert done.returncode == 0, done.stderr
    rows = [row for row in read(results) if row["metric"] == "test_loss"]
    sent = {}
    for row in rows:
        assert row["quick"] is True
        assert row["replicas_equal"] is True
        assert 0 < row["value"] < 6
        sent[row["provider"]] = row["bytes_sent"]
    assert set(sent) == {
        "dense",
        "topk0.01_warmup",
        "topk0.01_advised",
        "topk0.01_ranked",
        "topk0.001_ranked",
        "powersgd4",
    }
    assert sent["topk0.01_ranked"] == sent["topk0.01_advised"] == sent["topk0.01_warmup"]
    assert sent["topk0.001_ranked"] < sent["topk0.01_ranked"]
    assert sent["topk0.01_warmup"] < sent["powersgd4"] < sent["dense"]


def test_jointspar_computes_less_for_less(tmp_path: Path) -> None:
    """FLOPs, unlike times, are the same on every machine: dense at a budget of 1, and fewer the smaller it is."""
    results = tmp_path / "jointspar.jsonl"
    done = run("bench/jointspar.py", "--quick", "--device", "cpu", "--results", str(results))
    assert done.returncode == 0, done.stderr
    for case in ("resnet50_256", "gpt2_16"):
        of_dense = {
            row["provider"]: row["value"]
            for row in read(results)
            if row["case"] == case and row["metric"] == "flops_of_dense"
        }
        assert of_dense["jointspar1.0"] == of_dense["jointspar1.0_torch"] == 1.0
        assert of_dense["jointspar0.7"] == of_dense["jointspar0.7_torch"]
        assert of_dense["jointspar0.3"] < of_dense["jointspar0.7"] < 1.0
        # The fewer blocks there are in front, the more often backward ends early.
        assert of_dense["jointspar0.6_most"] < of_dense["jointspar0.6_stages"] < of_dense["jointspar0.6"]


def test_active_sets_of_few_blocks_are_all_there_are() -> None:
    found = jointspar.sets_of(3, 0.7)
    assert len(found) == 8
    assert found[True, False, True] == pytest.approx(0.7 * 0.3 * 0.7)
    assert sum(found.values()) == pytest.approx(1.0)
    drawn = jointspar.sets_of(20, 0.5)
    assert sum(drawn.values()) == pytest.approx(1.0)
    assert drawn == jointspar.sets_of(20, 0.5)


def test_merges_are_timed_beside_taking_in(tmp_path: Path) -> None:
    results = tmp_path / "merging.jsonl"
    command = [sys.executable, str(ROOT / "bench" / "merging.py"), "--quick", "--device", "cpu", "--results", results]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert {row["provider"] for row in rows} == {"merge", "apply"}
    assert {(row["ranks"], row["density"]) for row in rows} == {(2, 0.001), (2, 0.05), (2, 0.01), (8, 0.05)}
    assert all(row["value"] > 0 and row["k"] == round(row["density"] * row["elements"]) for row in rows)

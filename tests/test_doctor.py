"""`python -m fusedcomp doctor` finds what is wrong, says what to do, and measures the link between ranks."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusedcomp import link
from fusedcomp.__main__ import main
from fusedcomp.doctor import Check, checks, command, measure_link, run_checks, trial
from fusedcomp.kernels._launch import INTERPRET
from ranks import message_of, run

ROOT = Path(__file__).resolve().parent.parent
USER_ENV = {key: value for key, value in os.environ.items() if key not in {"TRITON_INTERPRET", "FUSEDCOMP_OPS"}}
USER_ENV |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


@pytest.fixture(autouse=True)
def _as_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for triton's interpreter, which others may load later."""
    for name in (*checks._HURTS.keys() - {"TRITON_INTERPRET"}, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def by_name() -> dict[str, Check]:
    return {check.name: check for check in run_checks()}


# ---- checks --------------------------------------------------------------------------------------------------------


def test_nothing_fails_here() -> None:
    found = by_name()
    assert not [check for check in found.values() if check.status == checks.FAILED]
    assert {"Python", "torch", "triton", "einops", "gloo", "NCCL", "process group", "self-test"} <= found.keys()
    assert "bit for bit" in found["self-test"].found


def test_the_floors_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    asked = dict(re.findall(r'^    "(torch|triton|einops)(?:>=([\d.]+))?[;"]', text, re.MULTILINE))
    assert asked == checks.LEAST
    assert f'requires-python = ">={".".join(map(str, checks.LEAST_PYTHON))}"' in text


@pytest.mark.parametrize(
    ("version", "floor", "status"),
    [("2.13.0+cpu", "2.11", "ok"), ("2.11.0a0+git1", "2.11", "ok"), ("2.9.1", "2.11", "failed"), ("3.10", "3.6", "ok")],
)
def test_versions_are_compared_as_numbers(monkeypatch, version: str, floor: str, status: str) -> None:
    monkeypatch.setattr(checks.importlib.metadata, "version", lambda package: version)
    found = checks.package_version("some", floor)
    assert found.status == status
    assert found.advice == ("" if status == "ok" else f"pip install 'some>={floor}'")


def test_a_missing_package_fails() -> None:
    found = checks.package_version("no-such-package", "1.0")
    assert (found.status, found.advice) == ("failed", "pip install 'no-such-package>=1.0'")


@pytest.mark.parametrize(
    ("name", "value"),
    [("TRITON_INTERPRET", "1"), ("CUDA_LAUNCH_BLOCKING", "1"), ("NCCL_P2P_DISABLE", "1"), ("NCCL_IB_DISABLE", "1"),
     ("TORCH_NCCL_BLOCKING_WAIT", "1"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
     ("FUSEDCOMP_OPS", "reference")],
)  # fmt: skip
def test_a_variable_that_hurts_is_a_warning(monkeypatch, name: str, value: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert [check.name for check in checks.environment()] == ["environment"]
    monkeypatch.setenv(name, value)
    (found,) = checks.environment()
    assert (found.name, found.status) == (name, "warning")
    assert repr(value) in found.found
    assert "unset" in found.advice


def test_variables_that_do_not_hurt_are_none(monkeypatch) -> None:
    for name in ("CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE", "TRITON_INTERPRET", "TORCH_NCCL_BLOCKING_WAIT"):
        monkeypatch.setenv(name, "0")
    assert [check.status for check in checks.environment()] == ["ok"]


def test_a_check_that_raises_has_failed(monkeypatch) -> None:
    def broken():
        raise OSError("no such thing")

    monkeypatch.setitem(checks.CHECKS, "environment", broken)
    assert by_name()["environment"].status == checks.FAILED
    assert "OSError: no such thing" in by_name()["environment"].found


# ---- the self-test notices -----------------------------------------------------------------------------------------


def test_lost_mass_is_noticed(monkeypatch) -> None:
    step = trial.fusedcomp.SGD.step

    def lossy(self, closure=None):
        step(self, closure)
        for state in self.state.values():
            state["residual"].mul_(0.5)

    monkeypatch.setattr(trial.fusedcomp.SGD, "step", lossy)
    assert "what was sent and what was kept" in trial.two_steps(torch.device("cpu"))


def test_other_parameters_than_the_twins_are_noticed(monkeypatch) -> None:
    trained, calls = trial._trained, []

    def differing(device):
        param, wrong = trained(device)
        calls.append(device)
        return param + len(calls), wrong

    monkeypatch.setattr(trial, "_trained", differing)
    assert "differ from those of the plain-torch twins" in trial.two_steps(torch.device("cpu"))


def test_the_environment_is_left_as_it_was(monkeypatch) -> None:
    for value in (None, "reference"):
        monkeypatch.delenv("FUSEDCOMP_OPS", raising=False)
        if value is not None:
            monkeypatch.setenv("FUSEDCOMP_OPS", value)
        assert trial.two_steps(torch.device("cpu")) is None
        assert os.environ.get("FUSEDCOMP_OPS") == value


def test_a_kernel_equals_its_twin_in_the_interpreter() -> None:
    if not (INTERPRET or torch.cuda.is_available()):
        pytest.skip("needs the interpreter or a GPU")
    assert trial.kernel_equals_twin(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_exit_status_is_0_where_nothing_failed(capsys) -> None:
    assert main(["doctor"]) == 0
    assert re.search(r"^\d+ ok(, \d warning)?$", capsys.readouterr().out, re.MULTILINE)


def test_the_exit_status_is_1_where_a_check_failed(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FUSEDCOMP_OPS", "nonsense")
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    (failed,) = [check for check in told["checks"] if check["status"] == "failed"]
    assert failed["name"] == "self-test"
    assert "FUSEDCOMP_OPS must be 'kernels' or 'reference', got 'nonsense'" in failed["found"]
    assert "unset FUSEDCOMP_OPS" in failed["advice"]


def test_json_is_what_the_table_shows(capsys) -> None:
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert [Check(**check).name for check in told["checks"]] == list(by_name())


def test_of_several_ranks_the_first_prints(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("FUSEDCOMP_OPS", "nonsense")
    assert main(["doctor"]) == 1
    assert "failed" in capsys.readouterr().out


def test_without_rich_the_table_is_plain_text(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["Python", "ok"]
    assert all(len(line) <= 100 and line.isascii() for line in lines)


def test_advice_stands_below_what_it_is_for() -> None:
    lines = command.plain_table([Check("a", "ok", "found " * 30), Check("longer", "failed", "it", "do this")])
    assert lines[-2:] == ["longer  failed  it", "                -> do this"]
    assert all(line.startswith(" " * 16 + "found") for line in lines[1:-2])


@pytest.mark.parametrize(("gbit", "shown"), [(1474.2, "1470"), (9.487, "9.49"), (0.01234, "0.0123"), (100.0, "100")])
def test_rates_are_shown_without_exponents(gbit: float, shown: str) -> None:
    assert command._gbits(gbit * 1e9 / 8) == shown


# ---- the link ------------------------------------------------------------------------------------------------------


def measured(rank: int, world: int) -> dict[str, object]:
    start = time.perf_counter()
    found = measure_link(seconds=5.0)
    assert dist.get_world_size() == world  # the group is as it was
    return {
        "seconds": time.perf_counter() - start,
        "latency_s": found.latency_s,
        "bandwidth": found.bandwidth_bytes_per_s,
        "world_size": found.world_size,
        "rates": [(rate.collective, rate.nbytes, rate.seconds, rate.bytes_per_s) for rate in found.rates],
    }


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_measure_the_same(world: int) -> None:
    told = run(measured, world)
    assert all(one | {"seconds": 0} == told[0] | {"seconds": 0} for one in told)
    one = told[0]
    assert one["seconds"] < 15
    assert one["world_size"] == world
    assert 1e-6 < one["latency_s"] < 0.1
    sizes = [(collective, nbytes) for collective, nbytes, *_ in one["rates"]]
    assert sizes[:2] == [("all_reduce", link.SIZES[0]), ("all_gather", link.SIZES[0])]
    assert one["bandwidth"] == [rate for collective, _, _, rate in one["rates"] if collective == "all_reduce"][-1]
    for collective, nbytes, seconds, rate in one["rates"]:
        crossing = (2 if collective == "all_reduce" else 1) * (world - 1) / world * nbytes
        assert rate * seconds == pytest.approx(crossing)


def one_size_only(rank: int, world: int) -> int:
    return len(measure_link(seconds=0.0).rates)


def test_no_time_left_means_no_larger_message() -> None:
    assert run(one_size_only, 2) == [2, 2]


def a_rank_that_leaves(rank: int, world: int) -> str:
    from datetime import timedelta

    group = dist.new_group(timeout=timedelta(seconds=3))
    return "left" if rank == 1 else message_of(lambda: measure_link(group))


def test_a_rank_that_is_gone_does_not_hold_up_the_others() -> None:
    start = time.perf_counter()
    told = run(a_rank_that_leaves, 2)
    assert told[1] == "left"
    assert told[0].startswith("RuntimeError")
    assert time.perf_counter() - start < 60


def test_one_process_has_no_link() -> None:
    assert message_of(measure_link) == "RuntimeError: measure_link() needs torch.distributed.init_process_group()"


def test_in_one_process_link_says_how_to_start_it(capsys) -> None:
    assert main(["doctor", "--link"]) == 2
    assert "torchrun --nproc_per_node=2 -m fusedcomp doctor --link" in capsys.readouterr().err


def test_under_torchrun_it_prints_once_and_names_the_next_command(capsys) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, "-m", "fusedcomp", "doctor", "--link"], cwd=ROOT, env=USER_ENV, text=True,
                          capture_output=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("latency of a hop") == 1
    line = done.stdout.strip().splitlines()[-1]
    assert line.startswith("python -m fusedcomp plan ")
    assert main(line.split()[3:]) == 0
    assert "2 nodes of 1 GPU" in capsys.readouterr().out

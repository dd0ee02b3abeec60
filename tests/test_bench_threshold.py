"""bench/threshold.py: its smoke test keeps what theory says, and thresholds are picked by what they sent."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))  # after tests/, whose modules keep their names

pytest.importorskip("sklearn")

import threshold  # noqa: E402

Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    results = tmp_path_factory.mktemp("threshold") / "threshold.jsonl"
    command = [sys.executable, "bench/threshold.py", "--quick", "--results", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "\nlogreg_shuffled: " in done.stdout
    return [json.loads(line) for line in results.read_text().splitlines()]


def one(rows: list[Row], case: str, provider: str, metric: str = "accumulated_error") -> Row:
    (row,) = (r for r in rows if (r["case"], r["provider"], r["metric"]) == (case, provider, metric))
    return row


def test_records_are_complete(rows: list[Row]) -> None:
    assert {row["case"] for row in rows} == {"logreg_shuffled", "digits_threshold"}
    for row in rows:
        assert row["bench"] == "training"
        assert row["quick"] is True
        assert math.isfinite(row["value"])
        assert 0 < row["bytes_sent"] <= 1.01 * row["bytes_dense"] + 64 * row["steps"]
        if row["metric"] == "suboptimality":
            assert row["value"] > -row["optimum_error"]
            assert row["curve"][-1][0] == row["bytes_sent"]


def test_entries_are_matched(rows: list[Row]) -> None:
    """As many entries as TopK's, or somewhat fewer, at its learning rate.

    What is left behind depends on rooms in runs as short as this; tests/test_threshold.py has the claim.
    """
    topk = one(rows, "logreg_shuffled", "topk0.02")
    ours = one(rows, "logreg_shuffled", "threshold_entries_of_topk0.02")
    assert topk["entries"] == topk["steps"] * math.ceil(0.02 * topk["parameters"])
    assert 0.9 * topk["entries"] < ours["entries"] <= topk["entries"]
    assert (ours["lr"], ours["seed"], ours["steps"]) == (topk["lr"], topk["seed"], topk["steps"])


def test_budgets_are_kept(rows: list[Row]) -> None:
    ours = one(rows, "logreg_shuffled", "threshold_bytes_of_topk0.02")
    assert ours["bytes_sent"] <= one(rows, "logreg_shuffled", "topk0.02")["bytes_sent"]


def test_errors_grow_with_the_threshold(rows: list[Row]) -> None:
    """Of dense steps nothing is left, and the more is left the higher the threshold is, and the less is sent."""
    rungs = [
        r for r in rows
        if (r["case"], r["metric"]) == ("logreg_shuffled", "accumulated_error") and r["threshold"] and "_of_" not in
        r["provider"]
    ]  # fmt: skip
    rungs.sort(key=lambda row: row["threshold"])
    assert len({row["threshold"] for row in rungs}) > 4
    for lower, higher in itertools.pairwise(rungs):
        assert lower["value"] < higher["value"]
        assert lower["bytes_sent"] > higher["bytes_sent"]
    for case in ("logreg_shuffled", "digits_threshold"):
        assert one(rows, case, "dense")["value"] == 0


# ---- picking -------------------------------------------------------------------------------------------------------

LR = 0.5


def finished(plan: threshold.Plan, jobs: list[threshold.Job], runs: threshold.Runs) -> None:
    """Outcomes of a world in which bytes are 1 / value^2, and entries half of them."""
    for job in jobs:
        sent = 100.0 if job.method.value is None else job.method.value**-2
        runs.outcomes[job] = threshold.Outcome(
            0, {}, 0.0, sent / 2, 0.0, round(1000 * sent), 0, {}, job.method.value, [], 0.0
        )  # fmt: skip


def test_a_threshold_is_found_between_rungs() -> None:
    plan = threshold.Plan(2, (0.1,), threshold.ladder(0.04, 3, 2.0), (LR,), 2)
    runs = threshold.Runs(plan)
    finished(plan, plan.jobs, runs)
    coarse = runs.opponent(0.1, LR, "bytes_sent")
    assert coarse is not None
    assert coarse.value == 0.16
    jobs = runs.closer()
    assert [job.seed for job in jobs] == [0, 1]
    assert jobs[0].method.value == pytest.approx(0.1 / math.sqrt(0.975), rel=1e-3)
    finished(plan, jobs, runs)
    assert runs.opponent(0.1, LR, "bytes_sent") == jobs[0].method
    assert not runs.closer()


def test_without_a_rung_below_the_budget_there_is_no_opponent() -> None:
    plan = threshold.Plan(2, (0.1,), threshold.ladder(0.01, 2, 2.0), (LR,), 1)
    runs = threshold.Runs(plan)
    finished(plan, plan.jobs, runs)
    assert runs.opponent(0.1, LR, "bytes_sent") is None
    assert not runs.closer()
    assert "threshold_bytes_of_topk0.1" not in {provider for provider, *_ in runs.compared()}

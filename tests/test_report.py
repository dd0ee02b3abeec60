"""The figures in README.md and docs are those of the committed records, and the rules by which they are picked."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))  # after tests/, whose modules keep their names

import book  # noqa: E402
import goals  # noqa: E402
import linkgate  # noqa: E402
import plots  # noqa: E402
import records  # noqa: E402
import report  # noqa: E402
import sections  # noqa: E402
import sections_collectives  # noqa: E402
import sections_dgc  # noqa: E402
import sections_ranks  # noqa: E402
from book import Book, Key  # noqa: E402
from fusedcomp.plan.cost import COLLECTIVES  # noqa: E402

OLD, NEW = "a" * 40, "b" * 40


def script(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "bench" / "report.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def record(bench: str, case: str, provider: str, value: float, metric: str = "ms", **more: Any) -> dict[str, Any]:
    row = {
        "bench": bench, "case": case, "provider": provider, "metric": metric, "value": value, "card": "a card",
        "torch": "2.11.0", "triton": "3.6.0", "driver": None, "commit": NEW, "dirty": False,
        "command": "python bench/some.py --cases x", "date": "2026-01-02T00:00:00+00:00",
    }  # fmt: skip
    return row | more


def old(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"commit": OLD, "date": "2026-01-01T00:00:00+00:00"}


def book_of(folder: Path, *rows: dict[str, Any]) -> Book:
    folder.mkdir(exist_ok=True)
    (folder / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Book(folder)


# ---- the committed texts -------------------------------------------------------------------------------------------


def test_texts_are_what_the_records_say() -> None:
    done = script("--check")
    assert done.returncode == 0, done.stderr


def test_an_edited_figure_is_noticed_in_every_text(tmp_path: Path) -> None:
    for folder in ("bench", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    texts = {tmp_path / name: (ROOT / name).read_text() for name in ("README.md", "docs/benchmarks.md")}
    for path, text in texts.items():
        begin = text.index("| ResNet-50")
        digit = next(i for i in range(begin, len(text)) if text[i] == "0" and text[i + 1] == ".")
        path.write_text(text[:digit] + "9" + text[digit + 1 :])
    done = script("--check", root=tmp_path)
    assert done.returncode == 1
    assert "differs from the records" in done.stderr
    assert all(str(path.relative_to(tmp_path)) in done.stderr for path in texts)
    done = script(root=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(path.read_text() == text for path, text in texts.items())


def test_every_picture_of_the_page_is_there() -> None:
    shown = [plot.file for plot in plots.PLOTS if f"(img/{plot.file})" in (ROOT / "docs" / "benchmarks.md").read_text()]
    assert shown
    assert all((ROOT / "docs" / "img" / file).stat().st_size < 300_000 for file in shown)


def test_a_plot_is_drawn_alike_byte_for_byte(tmp_path: Path) -> None:
    committed = Book(records.RESULTS)
    for folder in ("one", "two"):
        assert plots.save(plots.ACCURACY, committed, tmp_path / folder)
    one, two = ((tmp_path / folder / plots.ACCURACY.file).read_bytes() for folder in ("one", "two"))
    assert one == two


def test_without_records_nothing_is_said(tmp_path: Path) -> None:
    empty = book_of(tmp_path)
    assert report.page(empty) == report.HEAD
    for plot in plots.PLOTS:
        assert not plots.save(plot, empty, tmp_path)


@pytest.mark.parametrize("text", ["<!-- begin step -->\n", "<!-- begin colour -->\n<!-- end colour -->\n"])
def test_markers_that_lead_nowhere_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SystemExit, match=r"page\.md"):
        report.render("page.md", text, book_of(tmp_path))


# ---- which record counts -------------------------------------------------------------------------------------------


def test_an_interrupted_run_hides_nothing_older(tmp_path: Path) -> None:
    found = book_of(
        tmp_path,
        old(record("step", "resnet50", "torch_sgd_fused", 1.0, timing="graph")),
        old(record("step", "gpt2", "torch_sgd_fused", 2.0, timing="graph")),
        record("step", "resnet50", "torch_sgd_fused", 3.0, timing="graph"),
    )
    key = Key("step", "torch_sgd_fused")
    assert [found.find(case, key)["value"] for case in ("resnet50", "gpt2")] == [3.0, 2.0]
    origin = book.origin(found.find(case, key) for case in ("resnet50", "gpt2"))
    assert NEW[:10] in origin
    assert OLD[:10] in origin


def test_device_time_is_preferred_within_a_run_and_smoke_tests_do_not_count(tmp_path: Path) -> None:
    rows = [record("step", "gpt2", "copy", 1.0, timing="graph"), record("step", "gpt2", "copy", 2.0, timing="events")]
    smoke = record("step", "gpt2", "copy", 9.0, timing="graph", quick=True, date="2027-01-01T00:00:00+00:00")
    found = book_of(tmp_path, *rows, smoke, record("step", "gpt2", "copy", 8.0, timing="graph", buckets="25mb"))
    assert found.find("gpt2", Key("step", "copy"))["value"] == 1.0


def test_a_quotient_never_mixes_runs(tmp_path: Path) -> None:
    ours, fused = Key("step", "fusedcomp_fp32"), Key("step", "torch_sgd_fused")
    rows = [old(record("step", "gpt2", "fusedcomp_fp32", 3.0)), old(record("step", "gpt2", "torch_sgd_fused", 2.0))]
    found = book_of(tmp_path, *rows, record("step", "gpt2", "fusedcomp_fp32", 1.0))
    assert found.quotient("gpt2", [ours], [fused]).value == 1.5
    found = book_of(tmp_path, old(record("step", "gpt2", "torch_sgd_fused", 2.0)), rows[0] | {"commit": NEW})
    assert found.quotient("gpt2", [ours], [fused]) is None


def test_a_series_is_of_one_run(tmp_path: Path) -> None:
    rows = [record("step", "gpt2", "fusedcomp_fp32", us, "launch_us", launch=name) for name, us in
            (("01 _sample_kernel", 1.0), ("02 _compress_kernel", 10.0))]  # fmt: skip
    gone = old(record("step", "gpt2", "fusedcomp_fp32", 5.0, "launch_us", launch="03 _gone_kernel"))
    assert list(sections.launch_rows(book_of(tmp_path, gone, *rows), "gpt2")) == [row["launch"] for row in rows]


# ---- goals ---------------------------------------------------------------------------------------------------------


def outcome(tmp_path: Path, text: str, *rows: dict[str, Any]) -> goals.Outcome:
    (found,) = [one for one in goals.outcomes(book_of(tmp_path, *rows)) if one.goal.text == text]
    return found


@pytest.mark.parametrize(("ms", "verdict"), [(0.89, "met"), (0.90, "met"), (1.08, "missed by 20 %")])
def test_a_goal_that_must_not_be_exceeded(tmp_path: Path, ms: float, verdict: str) -> None:
    rows = [record("step", "resnet50", "fusedcomp_fp32", ms), record("step", "resnet50", "torch_sgd_fused", 1.0)]
    assert outcome(tmp_path, "whole step / torch's fused SGD", *rows).verdict == verdict


@pytest.mark.parametrize(("ms", "verdict"), [(40.0, "met"), (30.0, "missed by 25 %")])
def test_a_goal_that_must_be_reached(tmp_path: Path, ms: float, verdict: str) -> None:
    case = "resnet50@10gbps/4x1"
    rows = [record("netlab", case, "ddp", ms), record("netlab", case, "topk0.001", 10.0)]
    assert outcome(tmp_path, "training step, DDP / TopK(0.001)", *rows).verdict == verdict


def test_the_best_of_several_baselines_is_the_one_that_counts(tmp_path: Path) -> None:
    case = "resnet50@10gbps/4x1"
    rows = [record("netlab", case, name, ms) for name, ms in
            (("ddp_bf16", 80.0), ("powersgd1", 50.0), ("powersgd4", 70.0), ("topk0.001", 25.0))]  # fmt: skip
    assert outcome(tmp_path, "training step, the best of torch's hooks / TopK(0.001)", *rows).value == 2.0


def test_the_host_may_take_longer_where_there_are_more_buckets(tmp_path: Path) -> None:
    row = record("step", "gpt2", "fusedcomp_fp32", 900.0, "host_us", buckets_sparse=2, buckets_dense=1)
    found = outcome(tmp_path, "host time of optimizer.step()", row)
    assert (found.limit, found.verdict) == (950.0, "met")


def test_memory_is_judged_in_both_directions(tmp_path: Path) -> None:
    for value, verdict in ((1.05, "met"), (0.95, "met"), (0.90, "missed by 3.0 %")):
        row = record("memory", "gpt2", "fusedcomp_fp32", value, "of_documented")
        assert outcome(tmp_path, "state bytes per parameter / documented, SGD", row).verdict == verdict


# ---- break-even ----------------------------------------------------------------------------------------------------


def links(tmp_path: Path, dense: dict[str, float], ours: dict[str, float]) -> str | None:
    rows = [record("netlab", f"gpt2@{link}/4x1", name, ms)
            for name, times in (("ddp_bf16", dense), ("topk0.001", ours)) for link, ms in times.items()]  # fmt: skip
    return sections_ranks.break_even(book_of(tmp_path, *rows), "gpt2")


def test_the_break_even_rate_of_times_that_are_linear_in_one_over_rate(tmp_path: Path) -> None:
    # 10 + 400 / rate against 20 + 20 / rate meet at 38.
    dense = {"10gbps": 50.0, "25gbps": 26.0, "nvlink": 10.0 + 400.0 / 3600.0}
    ours = {"10gbps": 22.0, "25gbps": 20.8, "nvlink": 20.0 + 20.0 / 3600.0}
    assert "at about 38 Gbit/s" in links(tmp_path, dense, ours)


def test_no_break_even_rate_is_made_up(tmp_path: Path) -> None:
    assert "TopK(0.001) beats" in links(tmp_path, {"10gbps": 50.0, "25gbps": 26.0}, {"10gbps": 22.0, "25gbps": 21.0})
    assert "all-reduce beats" in links(tmp_path, {"nvlink": 10.0}, {"nvlink": 12.0})
    assert links(tmp_path, {"10gbps": 50.0}, {"25gbps": 21.0}) is None


def test_a_curve_is_of_one_layout_at_every_rate(tmp_path: Path) -> None:
    """The one with most nodes, also for a row that only another layout has."""
    rows = [
        record("netlab", f"gpt2@10gbps/{layout}", name, ms)
        for layout, name, ms in (
            ("4x1", "ddp", 9.0),
            ("2x1", "ddp", 5.0),
            ("2x2", "ddp", 4.0),
            ("2x1", "hook0.001", 3.0),
        )
    ]
    found = sections_ranks.curves(book_of(tmp_path, *rows), "gpt2")
    assert {name: {rate: row["value"] for rate, row in line.items()} for name, line in found.items()} == {
        "ddp": {10.0: 9.0}
    }


def test_a_link_that_did_not_keep_its_rate_is_left_out() -> None:
    """Bulk at 8 of 25 Gbit/s would flatter whoever sends little."""
    for nominal, bulk, counts in ((25_000, 8.3, False), (25_000, 19.8, True), (10_000, 8.3, False), (None, 8.3, True)):
        gate = {"rate_mbit": nominal, "reduce_100mb_gbps": bulk}
        assert linkgate.keeps_up(gate) is counts
    assert linkgate.keeps_up(None)


def test_language_models_by_method(tmp_path: Path) -> None:
    more = {
        "lr": 0.002, "betas": [0.9, 0.95], "bytes_sent": 10, "bytes_dense": 400, "parameters": 2e6, "steps": 7,
        "world_size": 2, "batch_per_rank": 3, "context": 64, "lr_chosen_by": "x",
        "train_loss": 0.5,
    }  # fmt: skip
    rows = [
        record("training", "shakespeare", provider, value, "test_loss", seed=seed, **more)
        for provider, values in (("dense", (1.0, 3.0)), ("topk0.01_advised", (5.0,)))
        for seed, value in enumerate(values)
    ]
    longer = more | {"steps": 9, "dropout": 0.2, "final_lr": 0.1}
    rows.append(record("training", "shakespeare", "dense", 0.5, "test_loss", seed=0, **longer))
    rows.append(record("training", "shakespeare", "dense", 0.4, "test_loss", seed=0, **longer | {"final_lr": 0.0}))
    table = sections_ranks.language(book_of(tmp_path / "r", *rows))
    parts = table.split("|  | lr")[1:]
    assert len(parts) == 3  # one for each schedule
    long, to_nothing, short = parts
    assert "| dense | 0.002 | 0.9, 0.95 | 0.400 | +0.000 |" in to_nothing
    assert "9 steps, at the end of which the rate is 0 of what it was" in to_nothing
    assert "| dense | 0.002 | 0.9, 0.95 | 0.500 | +0.000 | 0.500 | 40.0x |" in long
    assert "9 steps, at the end of which the rate is 0.1 of what it was, 2 ranks of 3 windows of 64, dropout" in long
    assert "| dense | 0.002 | 0.9, 0.95 | 2.000 ± 1.414 | +0.000 | 0.500 | 40.0x |" in short
    assert "as advised | 0.002 | 0.9, 0.95 | 5.000 | +3.000 | 0.500 | 40.0x |" in short
    assert "2.00 M parameters on Shakespeare's plays" in table


def test_accuracy_against_dense_is_taken_seed_by_seed(tmp_path: Path) -> None:
    """Seeds that differ by 10 points, and a method that is 1, 2 and 3 behind: its error has nothing of the 10."""
    more = {
        "lr": 0.1, "bytes_sent": 10, "bytes_dense": 4000, "dataset": "digits", "parameters": 5, "epochs": 3,
        "world_size": 2, "batch_per_rank": 4,
    }  # fmt: skip
    rows = [
        record(
            "training", "digits", provider, 0.7 + seed / 10 - behind * (seed + 1), "test_accuracy", seed=seed, **more
        )
        for provider, behind in (("dense", 0.0), ("topk0.01", 0.01))
        for seed in range(3)
    ]
    table = sections_ranks.training(book_of(tmp_path, *rows))
    assert table is not None
    assert "| dense SGD | 0.1 | 80.00 ± 10.00 % | - | 0.00 MB | 400.0x |" in table
    assert "| SGD + TopK(0.01) | 0.1 | 78.00 ± 9.00 % | -2.00 ± 0.58 |" in table
    alone = sections_ranks.training(book_of(tmp_path / "alone", *rows[3:]))
    assert alone is not None
    assert "78.00 ± 9.00 % | - |" in alone


def test_dense_beside_the_recipe_and_what_each_part_is_worth(tmp_path: Path) -> None:
    """Of the lengths that are compared; the ablation is of the one that most methods were trained for."""
    more = {
        "lr": 0.1, "bytes_sent": 10, "bytes_dense": 4000, "bytes_last_step": 2, "seconds": 3.0, "steps": 20,
        "title": "a row", "dataset": "clothes", "model": "a net", "parameters": 1e6, "world_size": 2,
        "batch_per_rank": 3, "max_grad_norm": None, "trial_steps": 5,
    }  # fmt: skip
    rows = [
        record("ablation", case, provider, value + seed / 100, metric, seed=seed, **more)
        for case, metric, seeds in (("resnet", "test_accuracy", 3), ("lstm", "test_loss", 2))
        for provider, value in (("dense", 0.93), ("topk", 0.9), ("topk_no_masking", 0.8))
        for seed in range(seeds)
    ]
    rows += [
        record("ablation", "resnet", provider, value, "test_accuracy", seed=0, **more | {"steps": 7})
        for provider, value in (("topk_lars", 0.99), ("dense", 0.77))
    ]
    book = book_of(tmp_path / "r", *rows)
    headline = sections_dgc.dgc(book)
    assert headline is not None
    assert "20 steps | dense | 94.00 ± 1.00 % | 3 | 0.000 MB | 100x |" in headline
    assert "LSTM" not in headline
    table = sections_dgc.ablation(book)
    assert table is not None
    images, characters = table.split("test loss")
    assert "| a row | 0.1 | 91.00 ± 1.00 % | +0.00 | 400x | 100x |" in images
    assert "| 81.00 ± 1.00 % | -10.00 |" in images
    assert "99.00" not in images  # of another length
    assert "| a row, 7 steps | 0.1 | 77.00 % | -14.00 |" in images  # but dense in less time
    assert "| 0.935 ± 0.007 | +0.030 |" in characters
    assert sections_dgc.dgc(book_of(tmp_path / "none")) is None


def test_of_several_learning_rates_the_one_that_validation_prefers(tmp_path: Path) -> None:
    """And dense from the same command, where it is."""
    rows = [
        record(
            "ablation", "lstm", provider, loss, "test_loss", seed=seed, lr=lr, validation=validation, steps=20,
            command=command,
        )
        for seed in range(2)
        for provider, lr, validation, loss, command in (
            ("topk", 4, 1.2, 1.0, "a"), ("dense", 4, 1.1, 0.9, "a"), ("topk", 8, 1.3, 0.8, "b"),
            ("dense", 8, 1.0, 0.7, "b"),
        )
    ]  # fmt: skip
    book, pair = book_of(tmp_path, *rows), sections_dgc.PAIRS[1]
    ours = sections_dgc.runs(book, pair, "topk", 20)
    assert [(row["lr"], row["value"], row["seed"]) for row in ours] == [(4, 1.0, 0), (4, 1.0, 1)]
    assert {row["value"] for row in sections_dgc.runs(book, pair, "dense", 20)} == {0.7}
    assert {row["value"] for row in sections_dgc.runs(book, pair, "dense", 20, ours)} == {0.9}


def test_points_that_would_hide_one_another_stand_side_by_side() -> None:
    at = plots.side_by_side({"dense": 200.0, "a": 5.0, "b": 5.0, "c": 5.1, "far": 6.0})
    assert at["dense"] == pytest.approx(200.0)
    assert at["far"] == pytest.approx(6.0)
    assert at["b"] / at["a"] == pytest.approx(1.035)
    assert at["c"] / at["b"] == pytest.approx(1.035)
    assert at["b"] == pytest.approx((5.0 * 5.0 * 5.1) ** (1 / 3))


# ---- payloads under way --------------------------------------------------------------------------------------------


def test_runs_of_collectives_stand_side_by_side(tmp_path: Path) -> None:
    """The newest first; what is expected of a gather is bytes over rate, and latency."""
    case, numel = "flat6.5m@10gbps/8x1", 6_553_600
    ways = {"alone0.05": 0.5, "gather0.05": 19.0, "tree0.05": 9.0, "split0.05": 16.0}
    rows = [record("collectives", case, way, ms, elements=numel, gpus=1) for way, ms in ways.items()]
    table = sections_collectives.travel(book_of(tmp_path, *rows, *(old(row) | {"value": 77.0} for row in rows)))
    line = next(line for line in table.splitlines() if line.startswith("| 8, 10 Gbit/s"))
    _, where, density, alone, gather, tree, split, expected, *others, _ = map(str.strip, line.split("|"))
    assert (where, density) == ("8, 10 Gbit/s", "0.05")
    assert (alone, gather, tree, split) == ("0.50; 77.00", "19.00; 77.00", "9.00; 77.00", "16.00; 77.00")
    least = 7 * 6 * 0.05 * numel / 1.25e9 * 1e3  # entries of 6 bytes, of seven others, at the nominal rate
    assert least < float(expected) < 1.4 * least
    assert all(0 < float(ms) < float(expected) for ms in others)


def test_what_the_texts_say_of_collectives_is_what_was_measured() -> None:
    """docs/algorithms/sparse-collectives.md, and a sentence of `plan`; a payload of density 0.05 is large."""
    told = Book(records.RESULTS)
    cases = {sections_collectives.nodes_of(case): case for case in told.cases("collectives")}
    assert set(cases) == {2, 4, 8}
    for nodes, case in cases.items():

        def over(way: str, density: float, case: str = case) -> float:
            """Measured in the newest run against expected."""
            alone, row = (sections_collectives.runs(told, case, f"{name}{density:g}")[0] for name in ("alone", way))
            expected = sections_collectives.expected_ms(alone, density, way)
            assert expected is not None
            return row["value"] / expected

        assert all(0.75 < over(way, 0.05) < 1.25 for way in ("gather", "tree"))
        assert (over("split", 0.05) > 1.25) == (nodes in (4, 8))
        if nodes in (2, 4):
            assert all(over(way, 0.001) < 1.0 for way in COLLECTIVES)
        for density in (0.001, 0.05):
            rows = {way: sections_collectives.runs(told, case, f"{way}{density:g}")[0] for way in COLLECTIVES}
            assert min(COLLECTIVES, key=lambda way, rows=rows: rows[way]["value"]) == (
                "tree" if nodes == 8 else "gather"
            )


def test_merges_stand_beside_taking_in(tmp_path: Path) -> None:
    more = {"elements": 6_553_600, "density": 0.05, "k": 327_680, "ranks": 2, "timing": "graph"}
    rows = [record("merging", "flat6.55m", name, ms, **more) for name, ms in (("merge", 0.2), ("apply", 0.03))]
    assert "| 6.55 M | 0.05 | 2 x 327680 | 0.200 | 0.030 |" in sections_collectives.merging(book_of(tmp_path, *rows))
    assert sections_collectives.merging(book_of(tmp_path / "one", rows[0])) is None

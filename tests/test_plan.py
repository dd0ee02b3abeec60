"""`python -m fusedcomp plan`: the cost model is what its docstring says, and orders what was measured as it was."""

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusedcomp.__main__ import main
from fusedcomp.plan import Cluster, Method, Planner, command, load
from fusedcomp.plan.calibration import PATH, Bucket, parse
from fusedcomp.plan.cost import exchange_ms, payload_nbytes, tree_crossings
from fusedcomp.sizing import count_at
from fusedcomp.wire import split_layouts

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))  # after tests/, whose modules keep their names

import calibrate  # noqa: E402
import records  # noqa: E402
from book import Book  # noqa: E402

TOPK = Method("topk", 0.001)
METHODS = [Method("ddp"), Method("ddp_bf16"), Method("powersgd1"), TOPK, Method("topk", 0.01)]
GBIT = 1e9 / 8


def planner(model: str | int = "resnet50", compute_ms: float | None = None) -> Planner:
    known = load()
    return Planner(known.workload(model), known, "h200", compute_ms)


def four(gbit: float, **more: float) -> Cluster:
    return Cluster(4, 1, gbit * GBIT, **more)


# ---- against the records -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told() -> list[calibrate.Outcome]:
    return calibrate.outcomes(Book(records.RESULTS))


def test_who_is_faster_is_predicted_wherever_measurements_differ_by_a_quarter(told) -> None:
    """Within a run of a cell: between runs, measurements of the same cell differ by more."""
    judged = 0
    for one, other in itertools.combinations(told, 2):
        a, b = one.row, other.row
        same = all(a[field] == b[field] for field in ("case", "commit"))
        same &= a["provider"].endswith("_graph") == b["provider"].endswith("_graph")  # without the host: another step
        if same and max(a["value"], b["value"]) > 1.25 * min(a["value"], b["value"]):
            judged += 1
            assert (one.ms < other.ms) == (a["value"] < b["value"]), (a["case"], a["provider"], b["provider"])
    assert judged >= 20


def test_predictions_are_close_to_the_records(told) -> None:
    """What docs/plan.md states; a model that gets worse is noticed."""
    assert calibrate.mean_error(told) == pytest.approx(load().mean_error, rel=1e-4)
    assert calibrate.mean_error(told) < 0.10
    dense = [one for one in told if one.row["provider"].startswith("ddp")]
    assert calibrate.mean_error(dense) < 0.08


def test_bytes_are_those_that_the_records_counted(told) -> None:
    compressed = [one.row for one in told if "bytes_sent" in one.row]
    assert {row["case"].partition("@")[0] for row in compressed} == {"resnet50", "gpt2"}
    for row in compressed:
        model = row["case"].partition("@")[0]
        sent = planner(model).predict(TOPK, four(10)).nbytes
        assert sent == pytest.approx(row["bytes_sent"], rel=2e-3)  # the buckets were cut in other places then
        assert planner(model).predict(Method("ddp"), four(10)).nbytes == row["bytes_dense"]


def test_every_constant_names_its_records() -> None:
    told = json.loads(PATH.read_text())
    fits = [card[name] for card in told["cards"].values() for name in ("compress", "apply", "fused_sgd")]
    fits.append(told["merge"])
    medians = [model[name] for model in told["models"].values() for name in ("compute_ms", "host_ms")]
    for constant in [*fits, *medians, *told["host_ms"].values(), *told["constants"].values()]:
        assert constant["from"]
        assert all(one["card"] and one["commit"] and one["command"].startswith("python ") for one in constant["from"])


# ---- the model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
@pytest.mark.parametrize("model", ["resnet50", "gpt2"])
def test_a_faster_link_never_makes_a_step_longer(model: str, method: Method) -> None:
    steps = [planner(model).predict(method, four(10.0**e)).step_ms for e in range(-2, 6)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


@pytest.mark.parametrize(("model", "compute_ms"), [("resnet50", None), ("gpt2", 100.0), (340_000_000, 100.0)])
def test_at_the_break_even_both_take_as_long(model: str | int, compute_ms: float | None) -> None:
    plan, cluster = planner(model, compute_ms), four(10, latency_s=2e-5)
    found = plan.break_even(TOPK, cluster)

    def lead(rate: float) -> float:
        there = replace(cluster, bandwidth_bytes_per_s=rate)
        return plan.dense(there).step_ms - plan.predict(TOPK, there).step_ms

    assert lead(found) == pytest.approx(0.0, abs=1e-6)
    assert lead(found / 1.1) > 0.0 > lead(found * 1.1)


def test_a_dense_step_that_the_link_bounds_is_bytes_over_rate() -> None:
    """At 0.1 Gbit/s everything else is small: 2 (W - 1) / W tensors cross."""
    plan, cluster = planner(), four(0.1, latency_s=0.0, measured=True)
    wire_ms = 1e3 * 1.5 * 4 * plan.workload.numel / cluster.bandwidth_bytes_per_s
    assert plan.predict(Method("ddp"), cluster).step_ms == pytest.approx(wire_ms + plan.compute_ms / 3, rel=1e-3)
    # Nominal rates are reached in part only.
    nominal = plan.predict(Method("ddp"), replace(cluster, measured=False))
    assert nominal.step_ms == pytest.approx(wire_ms / load().efficiency + plan.compute_ms / 3, rel=1e-3)


def test_latency_counts_once_a_hop() -> None:
    plan = planner(compute_ms=20.0)
    steps = [plan.predict(TOPK, four(1e4, latency_s=s)) for s in (0.1, 0.2)]
    # ResNet-50 has two compressed buckets, three hops of an all-gather each, and a dense one: four hops of a tree.
    assert steps[1].step_ms - steps[0].step_ms == pytest.approx(1e3 * 0.1 * (2 * 3 + 4))


def test_one_rank_exchanges_nothing() -> None:
    cluster = Cluster(1, 1, 1.0)
    for method in METHODS:
        found = planner().predict(method, cluster)
        assert (found.exposed_ms, found.nbytes) == (0.0, 0)
    assert planner().dense(cluster).step_ms == planner().alone_ms
    assert planner().break_even(TOPK, cluster) is None


def test_what_no_link_slows_down_waits_for_the_host() -> None:
    found = planner().predict(TOPK, four(1e5, latency_s=0.0))
    assert found.limit == "host"
    assert planner(compute_ms=20.0).predict(TOPK, four(1e5, latency_s=0.0)).limit == "GPU"
    assert planner().predict(Method("ddp"), four(1)).limit == "link"


def test_many_ranks_send_dense_what_compression_would_make_larger() -> None:
    """density * 6 bytes * (W - 1) against 8 (W - 1) / W: from W = 8 / (6 density) on."""
    plan = planner(124_000_000, 100.0)
    for nodes, dense in ((100, False), (160, True)):
        found = plan.predict(Method("topk", 0.01), Cluster(nodes, 1, GBIT))
        assert bool(found.dense_buckets) is dense
    assert found.nbytes == pytest.approx(4 * 124e6, rel=1e-3)


def test_a_model_given_by_its_size_is_cut_like_a_real_one() -> None:
    known = load()
    real, like = known.workload("gpt2"), known.workload(known.workload("gpt2").numel)
    for buckets in (like.buckets, like.ddp_buckets):
        assert sum(b.numel for b in buckets) == real.numel
    sent = [Planner(w, known, "h200", 50.0).predict(TOPK, four(10)).nbytes for w in (real, like)]
    assert sent[1] == pytest.approx(sent[0], rel=0.01)


def test_several_gpus_per_node_share_its_link() -> None:
    plan = planner("gpt2", 50.0)
    one, eight = (plan.predict(Method("ddp"), Cluster(4, gpus, GBIT)).step_ms for gpus in (1, 8))
    assert one < eight < 1.5 * one
    one, eight = (plan.predict(Method("topk", 0.01), Cluster(4, gpus, GBIT)).step_ms for gpus in (1, 8))
    assert eight > 4 * one  # what is gathered grows with the ranks


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: Cluster(0, 1, 1.0), "nodes must be >= 1, got 0"),
        (lambda: Cluster(1, 1, 0.0), "bandwidth_bytes_per_s must be > 0 and finite, got 0.0"),
        (lambda: Cluster(1, 1, 1.0, -1.0), "latency_s must be >= 0 and finite, got -1.0"),
        (lambda: load().workload("bert"), "model must be one of resnet50, gpt2 or a number, got 'bert'"),
        (lambda: planner(1_000_000), "compute_ms must be > 0 and finite, got None"),
        (lambda: Planner(load().workload("gpt2"), load(), "a100"), "card must be one of h200, h100, got 'a100'"),
        (lambda: planner(10**6, 9.0).predict(Method("powersgd1"), four(1)), "what PowerSGD sends depends"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_refused(build, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        build()


# ---- collectives ---------------------------------------------------------------------------------------------------

TREE = replace(TOPK, collective="tree")


def test_the_table_of_collectives_is_what_its_code_prints(capsys) -> None:
    page = (ROOT / "docs" / "algorithms" / "sparse-collectives.md").read_text()
    table = page.partition("<!-- begin collectives -->")[2].partition("<!-- end collectives -->")[0].strip()
    code = page.partition("<!-- end collectives -->")[2].partition("```python\n")[2].partition("```")[0]
    exec(code, {})
    assert capsys.readouterr().out.strip() == table


def test_a_tree_takes_a_hop_and_a_payload_a_round() -> None:
    """At a slow link without latency the rest is small: 3 payloads of 8 ranks, not 7; with latency alone 3 hops."""
    plan = planner(compute_ms=20.0)
    slow, far = Cluster(8, 1, GBIT / 1e3, 0.0, measured=True), Cluster(8, 1, 1e4 * GBIT)
    sparse = [b for b in plan.workload.buckets if b.sparse]
    rows = [payload_nbytes(b, TREE) + 4 * (b.segments + 6) for b in sparse]
    dense = 4 * sum(b.numel + b.segments + 6 for b in plan.workload.buckets if not b.sparse)
    found = plan.predict(TREE, slow)
    assert found.nbytes == 3 * sum(rows) + dense
    crossed = 3 * sum(rows) + 2 * 7 / 8 * dense
    # Forward and the last bucket's share of backward come before; less than a step in all.
    assert 0.0 < found.step_ms - 1e3 * crossed / slow.bandwidth_bytes_per_s < 25.0
    steps = [plan.predict(TREE, replace(far, latency_s=s)).step_ms for s in (0.1, 0.2)]
    assert steps[1] - steps[0] == pytest.approx(1e3 * 0.1 * (len(rows) * 3 + 6))


def test_a_split_takes_pieces_and_shares() -> None:
    plan = planner(compute_ms=20.0)
    method = replace(TOPK, collective="split")
    slow, far = Cluster(8, 1, GBIT / 1e3, 0.0, measured=True), Cluster(8, 1, 1e4 * GBIT)
    sparse = [b for b in plan.workload.buckets if b.sparse]
    dealt = [split_layouts(b.segments, b.pages, count_at(0.001, b.numel), torch.float32, False, 8) for b in sparse]
    dense = 4 * sum(b.numel + b.segments + 6 for b in plan.workload.buckets if not b.sparse)
    found = plan.predict(method, slow)
    assert found.nbytes == dense + sum(split.owners * piece.nbytes + share.nbytes for split, piece, share in dealt)
    crossed = 7 / 8 * 2 * dense + sum(
        7 / 8 * split.owners * piece.nbytes + 7 * share.nbytes for split, piece, share in dealt
    )
    assert 0.0 < found.step_ms - 1e3 * crossed / slow.bandwidth_bytes_per_s < 25.0
    steps = [plan.predict(method, replace(far, latency_s=s)).step_ms for s in (0.1, 0.2)]
    assert steps[1] - steps[0] == pytest.approx(1e3 * 0.1 * (len(dealt) * 8 + 6))


@pytest.mark.parametrize(("world", "rounds"), [(2, 1), (3, 2), (8, 3), (13, 4)])
def test_merges_take_time_on_the_gpu(world: int, rounds: int) -> None:
    """One a round, of two payloads; of a split one, of every rank's piece for an owner; of a gather none."""
    known = load()
    bucket, cluster = Bucket(6_553_600, 1.0, 20, 100, sparse=True), Cluster(world, 1, 10 * GBIT)
    k = count_at(0.001, bucket.numel)
    merges = {
        "gather": 0.0,
        "tree": rounds * known.merge_ms(bucket.numel, 2 * k),
        "split": known.merge_ms(bucket.numel // world, k),
    }
    for collective, expected in merges.items():
        method = replace(TOPK, collective=collective)
        alone, shared = (exchange_ms(bucket, method, cluster, known, ranks) for ranks in (1, 4))
        without = exchange_ms(bucket, method, cluster, replace(known, merge=(0.0, 0.0, 0.0)))
        assert None not in (alone, shared, without)
        assert alone - without == pytest.approx(expected, rel=1e-3, abs=1e-9)
        assert shared - without == pytest.approx(4 * expected, rel=1e-3, abs=1e-9)


def test_where_links_are_fast_merging_decides(capsys) -> None:
    """A tree moves a third less on four ranks; on a link of 400 Gbit/s its merges take longer than what that saves."""
    where = ("--model", "gpt2", "--nodes", "4", "--density", "0.05", "--compute", "1", "--latency-us", "0")
    assert 'collective="tree" is the one to use here' in said(capsys, *where, "--link", "10gbps")
    assert 'collective="gather" is the one to use here' in said(capsys, *where, "--link", "400gbps")


@pytest.mark.parametrize(("density", "latency_us", "best"), [("0.0001", "100", "tree"), ("0.05", "5", "split")])
def test_long_latencies_are_for_trees_and_large_payloads_for_splits(capsys, density, latency_us, best) -> None:
    where = ("--model", "gpt2", "--nodes", "64", "--link", "10gbps", "--compute", "1")
    out = said(capsys, *where, "--density", density, "--latency-us", latency_us)
    assert f'collective="{best}" is the one to use here' in out


@pytest.mark.parametrize(
    ("nodes", "gpus", "crossings"),
    [(2, 1, (1, 1)), (8, 1, (3, 3)), (3, 1, (3, 3)), (4, 8, (16, 2)), (2, 3, (6, 4)), (1, 8, (0, 0))],
)
def test_what_of_a_tree_leaves_a_node(nodes: int, gpus: int, crossings: tuple[int, int]) -> None:
    """The first rounds stay inside a node of a power of two. 2 nodes of 3: ranks 4 and 5 fold into 0 and 1 and are told
    by them, which is two payloads each; between, 2 and 3 and then 1 and 3 are partners."""
    assert tree_crossings(nodes, gpus) == crossings


def test_the_best_collective_is_named(capsys) -> None:
    """Where the host hides both, a gather, which applies more; where the link is the limit, what moves least."""
    few = said(capsys, "--model", "gpt2", "--nodes", "4", "--link", "100gbps")
    assert 'collective="gather" is the one to use here' in few
    many = said(capsys, "--model", "gpt2", "--nodes", "256", "--link", "1gbps")
    assert 'collective="tree" is the one to use here' in many
    assert "collective=" not in said(capsys, "--model", "gpt2", "--nodes", "1")


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gbit"),
    [("10gbps", 10), ("10Gbit/s", 10), ("10 Gbit/s", 10), ("25", 25), ("1e9", 1), ("100Mbit/s", 0.1), ("1.25GB/s", 10),
     ("12.5GBps", 100), ("0.4Tbps", 400), ("2.5g", 2.5)],
)  # fmt: skip
def test_rates(text: str, gbit: float) -> None:
    assert command.rate(text) == pytest.approx(gbit * GBIT)


@pytest.mark.parametrize(("text", "numel"), [("124M", 124e6), ("340e6", 340e6), ("7B", 7e9), ("1.5b", 1.5e9)])
def test_sizes(text: str, numel: float) -> None:
    assert command.model(text) == numel


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_a_slow_link_says_that_compression_pays_and_up_to_where(capsys) -> None:
    out = said(capsys, "--model", "resnet50", "--nodes", "4", "--link", "1gbps")
    assert "Compressed is faster here" in out
    assert "Break-even at" in out
    rows = {line.partition("  ")[0]: line.split() for line in out.split("\n\n")[1].splitlines()[1:]}
    assert list(rows) == [
        "DDP, fp32", "DDP, bf16 hook", "DDP, PowerSGD hook, rank 1", "TopK(0.001), fp32 wire", "TopK(0.001), bf16 wire",
        "TopK(0.01), fp32 wire", "TopK(0.0001), fp32 wire",
    ]  # fmt: skip
    assert float(rows["DDP, fp32"][-1]) == pytest.approx(102.23)  # MB


@pytest.mark.parametrize(
    "where",
    [("--nodes", "1"), ("--nodes", "1", "--gpus-per-node", "4"), ("--nodes", "4", "--link", "400gbps")],
)  # fmt: skip
def test_it_says_plainly_where_dense_is_faster(capsys, where: tuple[str, ...]) -> None:
    out = said(capsys, "--model", "resnet50", "--latency-us", "5", *where)
    assert "ense is faster here" in out
    assert "Compressed is faster" not in out


def test_the_verdict_is_of_the_collective_that_it_names(capsys) -> None:
    """Where a gather of many payloads is slower than dense, and another way of sending them is not."""
    out = said(capsys, "--model", "gpt2", "--nodes", "16", "--link", "1", "--density", "0.05")
    assert 'collective="split" is the one to use here: gather' in out
    assert "Compressed is faster here" in out
    assert "TopK(0.05), fp32 wire, split" in out.partition("Compressed is faster here")[2].partition("\n")[0]
    assert "splits of large payloads were slower than predicted" in out


def test_a_model_with_nothing_to_compress(capsys) -> None:
    out = said(capsys, "--model", "100", "--compute", "1", "--nodes", "64", "--link", "1")
    assert "Nothing would be compressed here" in out
    assert "Compressed is faster" not in out
    assert "break-even" not in out


def test_a_difference_within_the_error_is_called_that(capsys) -> None:
    assert "Closer than the model's mean error" in said(capsys, "--model", "resnet50", "--nodes", "4", "--link", "80")


def test_bytes_do_not_depend_on_the_rate_and_a_measured_rate_is_taken_as_it_is(capsys) -> None:
    common = ("--model", "gpt2", "--nodes", "4", "--latency-us", "0")
    measured = said(capsys, *common, "--link", "10gbps", "--measured")
    nominal = said(capsys, *common, "--link", f"{10 / load().efficiency}gbps")
    assert measured.split("\n\n")[1] == nominal.split("\n\n")[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "bert", "--nodes", "2"], "argument --model: must be resnet50, gpt2, or a number of parameters"),
        (["--model", "gpt2", "--nodes", "0"], "argument --nodes: must be a whole number >= 1, got '0'"),
        (["--model", "gpt2", "--nodes", "2"], "argument --link: required where there are several nodes, got none"),
        (["--model", "gpt2", "--nodes", "2", "--link", "fast"], "argument --link: must be a rate > 0 such as 10gbps"),
        (["--model", "gpt2", "--nodes", "2", "--link", "0"], "argument --link: must be a rate > 0 such as 10gbps"),
        (["--model", "1M", "--nodes", "2", "--link", "1"], "argument --compute: required for models other than"),
        (["--model", "gpt2", "--nodes", "1", "--compute", "-1"], "argument --compute: must be a number > 0, got '-1'"),
        (["--model", "gpt2", "--nodes", "1", "--density", "2"], "argument --density: must be in (0, 1], got '2'"),
        (["--model", "gpt2", "--nodes", "1", "--latency-us", "x"], "--latency-us: must be a number >= 0, got 'x'"),
        (["--model", "gpt2", "--nodes", "1", "--card", "a100"], "argument --card: invalid choice: 'a100'"),
        (["--model", "gpt2", "--nodes", "1", "--plot", "x.bmp"], "argument --plot: must end in .png, .svg, .pdf"),
        (["--model", "gpt2", "--nodes", "1", "--plot", "no/x.png"], "argument --plot: there is no folder 'no'"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_refused_with_rule_and_value(arguments: list[str], complaint: str, capsys) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["plan", *arguments])
    assert exited.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_plot_has_a_curve_for_every_method(tmp_path: Path, capsys) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "plan.png"
    said(capsys, "--model", "resnet50", "--nodes", "4", "--link", "10gbps", "--plot", str(path))
    pixels = (255 * image.imread(path)[:, :, :3]).round().astype(int)
    for colour in ("000000", "0072B2", "D55E00", "E69F00", "CC79A7"):
        # Of a thin line, whose edges are blended, in part below the line of another method.
        assert (pixels == [*bytes.fromhex(colour)]).all(axis=2).sum() > 120


def test_without_matplotlib_the_plot_names_the_extra(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "fusedcomp.plan.plot", raising=False)
    monkeypatch.delattr("fusedcomp.plan.plot", raising=False)
    arguments = ["--model", "gpt2", "--nodes", "1", "--plot", str(tmp_path / "x.png")]
    assert main(["plan", *arguments]) == 1
    assert capsys.readouterr().err == "error: --plot needs matplotlib: pip install 'fusedcomp[plan]'\n"


def test_the_wire_type_is_what_halves_the_values() -> None:
    plan = planner()
    fp32, bf16 = (plan.predict(replace(TOPK, wire_dtype=t), four(10)).nbytes for t in (torch.float32, torch.bfloat16))
    k = sum(math.ceil(0.001 * b.numel) for b in plan.workload.buckets if b.sparse)
    assert fp32 - bf16 == pytest.approx(2 * k, abs=32)  # payloads are padded to 16 bytes


def test_constants_survive_a_round_trip() -> None:
    assert parse(json.loads(PATH.read_text())) == load()

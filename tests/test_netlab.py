"""The end-to-end benchmark: a smoke run on two gloo ranks, and everything in it that can be computed by hand."""

import json
import math
import subprocess
import sys
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ranks

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))  # after tests/, whose modules keep their names

import exchanges  # noqa: E402
import flat  # noqa: E402
import linkgate  # noqa: E402
import models  # noqa: E402
import netlab  # noqa: E402
import nodes  # noqa: E402
import rankset  # noqa: E402
import timeline  # noqa: E402


def run(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """The benchmark as users run it; what it wrote."""
    output = tmp_path / "netlab.jsonl"
    command = [sys.executable, str(ROOT / "bench" / "netlab.py"), "--quick", "--device", "cpu"]
    command += ["--output", str(output), "--trace", str(tmp_path / "trace.json"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done, [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


# ---- smoke -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shaped(tmp_path_factory):
    """ResNet on two nodes, all rows at the rate of all rows: log, records, trace."""
    folder = tmp_path_factory.mktemp("netlab")
    done, rows = run(folder, "--models", "resnet50", "--layouts", "2x1", "--rates", "10000")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, rows, json.loads((folder / "trace.json").read_text())


def test_every_row_is_recorded_or_said_to_be_skipped(shaped):
    log, rows, _ = shaped
    skipped = {row for row in netlab.EXCHANGES if f"{row}: skipped" in log}
    assert skipped <= {"ddp_bf16", "nocomm_graph", "topk0.001_graph", "topk0.001_2level"}
    assert [row["provider"] for row in rows] == [row for row in netlab.EXCHANGES if row not in skipped]


def test_records_hold_what_a_reader_needs(shaped):
    for row in shaped[1]:
        assert (row["bench"], row["case"], row["metric"]) == ("netlab", "resnet50@10gbps/2x1", "ms")
        assert (row["world"], row["quick"], row["device"]) == (2, True, "cpu")
        assert 0 < row["p20"] <= row["value"] <= row["p80"]
        assert row["max_ms"] > 0
        assert math.isfinite(row["loss_first"])
        assert math.isfinite(row["loss_last"])
        assert row["identical"] is (None if row["provider"] in exchanges.ALONE else True)
        assert row["gate"]["passed"] is None, "unshaped: nothing to judge"
        assert row["gate"]["reduce_100mb_gbps"] > 0
        assert {"nccl", "peak_tflops", "mfu", "commit", "batch", "parameters"} <= row.keys()


def test_exposed_time_is_against_no_communication(shaped):
    alone = shaped[1][0]
    assert (alone["provider"], alone["exposed_ms"]) == ("nocomm", 0.0)
    assert all(row["exposed_ms"] == row["value"] - alone["value"] for row in shaped[1])


def test_compressed_rows_report_their_bytes(shaped):
    sent = {row["provider"]: row.get("bytes_sent") for row in shaped[1]}
    dense = shaped[1][0]["parameters"] * 4
    assert sent["ddp"] is None
    assert 0 < sent["topk0.001"] < sent["topk0.01"] < dense


def test_trace_has_the_phases_of_a_step(shaped):
    trace = shaped[2]
    assert trace["provider"] == "topk0.001"
    columns = trace["columns"]
    phases = {event[columns.index("phase")] for event in trace["events"]}
    assert {"forward", "backward", "step"} <= phases
    assert trace["step_ms"] >= trace["busy_ms"]["model"] > 0


def test_plain_links_and_the_flat_step(tmp_path):
    done, rows = run(tmp_path, "--models", "gpt2", "--layouts", "nvlink", "--rows", "nocomm", "topk0.001")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [row for row in rows if row["bench"] == "netlab"]
    assert [(row["case"], row["provider"]) for row in steps] == [
        ("gpt2@nvlink/2x1", "nocomm"),
        ("gpt2@nvlink/2x1", "topk0.001"),
    ]
    assert all(
        row["mfu"] == models.utilisation(row["flops"], row["value"], row["peak_tflops"]) and row["mfu"] > 0
        for row in steps
    )
    flat = {(row["provider"], row["metric"]) for row in rows if row["bench"] == "step"}
    names = ("fusedcomp_fp32", "fusedcomp_fp32_wd", "nccl_fp32", "nccl_bf16")
    assert flat == {(name, metric) for name in names for metric in ("ms", "graph_ms")}
    assert {row["case"] for row in rows if row["bench"] == "step"} == {"flat100m@nvlink/2x1"}


# ---- the check that refuses records --------------------------------------------------------------------------------


def _identical_before_and_after_a_change(rank: int, world: int) -> list[bool]:
    parameters = list(ranks.net().parameters())
    answers = [exchanges.identical(parameters)]
    with torch.no_grad():
        if rank == 1:  # one bit of one entry
            parameters[2].view(torch.int32).view(-1)[7] ^= 1
    return [*answers, exchanges.identical(parameters)]


def test_one_bit_on_one_rank_is_noticed_by_all():
    assert ranks.run(_identical_before_and_after_a_change, 2) == [[True, False]] * 2


GOOD = {"identical": True, "loss_first": 2.0, "loss_last": 1.0}


@pytest.mark.parametrize(
    ("row", "bad", "reason"),
    [
        ("ddp", {}, None),
        ("ddp", {"identical": False}, "parameters differ"),
        ("topk0.001", {"identical": False}, "parameters differ"),
        ("nocomm", {"identical": False}, None),  # each rank for itself
        ("nocomm", {"loss_last": math.nan}, "not finite"),
    ],
    ids=["good", "ddp", "topk", "nocomm", "nan"],
)
def test_what_is_refused(row, bad, reason):
    refusal = netlab.refused(row, [GOOD, GOOD | bad])
    assert refusal is None if reason is None else reason in refusal


# ---- figures -------------------------------------------------------------------------------------------------------


def test_flops_of_gpt2_by_hand():
    width, layers, batch, length = 4, 2, 3, 8
    weights = layers * 12 * width * width + 16 * width  # matrices of the blocks, tied embedding of 16 tokens
    tokens = batch * length
    products = 3 * 2 * weights * tokens  # multiply and add; forward, and twice that backward
    scores_and_sums = layers * batch * 3 * 2 * (2 * width * length * length) // 2  # causal: half
    assert models.gpt2_flops(weights, width, layers, batch, length) == products + scores_and_sums


def test_utilisation_is_a_share_of_the_peak():
    assert models.utilisation(flops=4e12, ms=10.0, peak_tflops=800.0) == pytest.approx(0.5)


def test_gpt2_small_is_gpt2_small():
    with torch.device("meta"):
        model = models.GPT2(50304, 1024, 768, 12, 12)
    assert models.count(model) == 124_439_808 + (50304 - 50257) * 768  # OpenAI's, and the padding


@pytest.mark.parametrize(
    ("mbit", "rate", "burst", "mtu"),
    [
        (1_000, 125_000_000, 65_536, 65_536),  # 0.5 ms would be 62.5 kB: less than one packet of 64 KiB
        (2_500, 312_500_000, 156_250, 65_536),
        (10_000, 1_250_000_000, 262_144, 131_072),
        (25_000, 3_125_000_000, 262_144, 131_072),
    ],
)
def test_token_bucket(mbit, rate, burst, mtu):
    bucket = nodes.token_bucket(mbit)
    assert (bucket["rate"], bucket["burst"], bucket["mtu"]) == (rate, burst, mtu)
    assert bucket["peak"] == pytest.approx(1.05 * rate)


def probes(world: int, gather: float, reduce: float) -> list[dict[str, float]]:
    """What ranks measure where a ring's rate is ``gather`` and ``reduce`` Gbit/s."""
    own = dict.fromkeys(linkgate.GATHERS, gather / (world - 1))
    return [own | {"reduce_100mb": reduce / (2 * (world - 1) / world)}] * world


@pytest.mark.parametrize(
    ("mbit", "gather", "reduce", "faults"),
    [
        (10_000, 9.2, 9.4, []),
        (1_000, 0.95, 0.92, []),
        (10_000, 4.4, 9.4, []),  # bound by latency
        (10_000, 10.6, 9.4, ["gather_0.2mb", "gather_0.6mb"]),  # crossed in a burst
        (10_000, 9.2, 8.4, ["reduce_100mb"]),
        (10_000, 9.2, 10.1, ["reduce_100mb"]),
        (25_000, 5.0, 19.8, []),
        (25_000, 2.6, 8.3, ["reduce_100mb"]),  # a host that is short of CPU
    ],
    ids=["10", "1", "slow-gather", "burst", "slow-reduce", "fast-reduce", "25", "slow-25"],
)
def test_gate(mbit, gather, reduce, faults):
    gate = linkgate.judge(probes(4, gather, reduce), nodes=4, rate_mbit=mbit)
    assert (gate["faults"], gate["passed"]) == (faults, not faults)
    assert gate["gather_0.2mb_gbps"] == pytest.approx(gather)
    assert gate["reduce_100mb_gbps"] == pytest.approx(reduce)
    if faults:
        assert linkgate.worst(gate) == pytest.approx((gather if "gather_0.2mb" in faults else reduce) / (mbit / 1000))


@pytest.mark.parametrize(("nodes", "mbit"), [(1, None), (1, 10_000)], ids=["nvlink", "one-host"])
def test_gate_that_only_reports(nodes, mbit):
    assert linkgate.judge(probes(4, 1.0, 1.0), nodes, mbit)["passed"] is None


def test_gate_allows_two_nodes_a_tree():
    """Between two nodes of two ranks a tree moves two thirds of what a ring would."""
    assert linkgate.judge(probes(4, 9.2, 1.5 * 9.4), nodes=2, rate_mbit=10_000)["passed"]
    assert not linkgate.judge(probes(4, 9.2, 1.5 * 10.2), nodes=2, rate_mbit=10_000)["passed"]


def test_steps_fit_the_time_of_a_cell():
    assert netlab.steps_per_stretch(22.0, quick=False) == (20, 5)
    assert netlab.steps_per_stretch(700.0, quick=False) == (1, 5)
    assert netlab.steps_per_stretch(3000.0, quick=False) == (1, 3)


def test_plan():
    every, rates = tuple(netlab.EXCHANGES), [10_000, 25_000, 1_000]
    nodes4 = netlab.plan_layout("4x1", 4, rates, every)
    assert dict(nodes4.plan) == {10_000: every, 25_000: netlab.FEW, 1_000: netlab.FEW}
    assert nodes4.case("gpt2", 1_000) == "gpt2@1gbps/4x1"
    assert dict(netlab.plan_layout("2x2", 4, rates, every).plan) == {10_000: netlab.ON_2X2}
    plain = netlab.plan_layout("nvlink", 4, rates, ("ddp",))
    assert plain.plan == ((None, ("ddp",)),)
    assert plain.case("resnet50", None) == "resnet50@nvlink/4x1"


# ---- trace ---------------------------------------------------------------------------------------------------------


def kernel(name: str, stream: int, start: float, duration: float, correlation: int) -> list[dict[str, Any]]:
    """A kernel, and its launch 5 us before it starts."""
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start - 5, "dur": 1}
    run = {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration}
    return [
        launch | {"args": {"correlation": correlation}},
        run | {"args": {"stream": stream, "correlation": correlation}},
    ]


def test_timeline_of_a_hand_made_trace():
    phases = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": 100.0}
        for name, ts in (("forward", 1000.0), ("backward", 1100.0))
    ]
    events = [
        *phases,
        *kernel("void at::native::gemm<float>(int)", 7, 1010.0, 100.0, 1),
        *kernel("void at::native::gemm<float>(int)", 7, 1110.0, 50.0, 2),
        *kernel("_compress_kernel", 20, 1160.0, 10.0, 3),
        *kernel("ncclDevKernel_AllGather_RING_LL(x)", 24, 1150.0, 40.0, 4),
    ]
    summary = timeline.summary(events)
    assert summary["events"] == [
        ["gemm", "model", "forward", 7, 10.0, 100.0],
        ["gemm", "model", "backward", 7, 110.0, 50.0],
        ["ncclDevKernel_AllGather_RING_LL", "nccl", "backward", 24, 150.0, 40.0],
        ["_compress_kernel", "fusedcomp", "backward", 20, 160.0, 10.0],
    ]
    assert summary["exposed_ms"] == pytest.approx(0.020)  # 1170 to 1190
    assert summary["step_ms"] == pytest.approx(0.190)


# ---- processes that fail -------------------------------------------------------------------------------------------


class FakeSet(rankset.RankSet):
    """Ranks that answer as told: a dict, or nothing."""

    def __init__(self, *answers: dict[str, Any] | None) -> None:
        self.world_size, self.killed, self._connections, self._theirs = len(answers), False, [], []
        for answer in answers:
            ours, theirs = Pipe()
            self._connections.append(ours)
            self._theirs.append(theirs)
            if answer is not None:
                theirs.send(answer)  # before it is asked: a pipe keeps both

    def kill(self) -> None:
        self.killed = True


def test_answers_come_by_rank():
    assert FakeSet({"result": 1}, {"result": 2}).ask("x", 5) == [1, 2]


def test_an_error_of_all_leaves_the_set_alive():
    fake = FakeSet({"error": "Traceback ..."}, {"error": "Traceback ..."})
    with pytest.raises(rankset.CellError, match="Traceback"):
        fake.ask("x", 5)
    assert not fake.killed


def test_what_is_unavailable_is_no_error():
    with pytest.raises(rankset.Unavailable, match="no such argument"):
        FakeSet({"unavailable": "no such argument"}, {"unavailable": "no such argument"}).ask("x", 5)


def test_a_silent_rank_ends_the_set():
    fake = FakeSet({"error": "it was me"}, None)
    with pytest.raises(rankset.Hung, match=r"1 of 2 ranks.*\n.*it was me"):
        fake.ask("x", 0.3)
    assert fake.killed


def test_a_dead_rank_ends_the_set():
    fake = FakeSet({"result": 1}, None)
    fake._theirs[1].close()
    with pytest.raises(rankset.Hung):
        fake.ask("x", 5)
    assert fake.killed


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        (["NET/Socket : Using [0]eth0", "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0"], "via NET/Socket/0"),
        (["NET/Socket : Using [0]eth0", "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"], "via P2P/CUMEM"),
        ([], None),
    ],
    ids=["sockets", "nvlink", "gloo"],
)
def test_transport_is_quoted_from_the_log(tmp_path, lines, quoted):
    (tmp_path / "nccl.1").write_text("".join(f"vm:1:2 [0] NCCL INFO {line}\n" for line in lines))
    fake = FakeSet()
    fake._folder = SimpleNamespace(name=str(tmp_path))
    line = fake.transport()
    assert line is None if quoted is None else line.startswith("Channel") and line.endswith(quoted)


# ---- namespaces ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes():
    """Needs root, network namespaces and pyroute2; under names of their own, so that a running benchmark keeps its."""
    try:
        network = nodes.Nodes(2, prefix="fctest")
    except Exception as error:
        pytest.skip(f"no nodes: {type(error).__name__}: {error}")
    yield network
    network.close()


def buckets(network: nodes.Nodes) -> list[Any]:
    return [qdisc for end, index in network._ends for qdisc in end.get_qdiscs(index)]


def test_rates_change_in_place_on_both_ends(two_nodes):
    for mbit in (10_000, 1_000, 0, 25_000):
        two_nodes.set_rate(mbit)
        assert [q.get_attr("TCA_KIND") for q in buckets(two_nodes)] == ["tbf" if mbit else "noqueue"] * 4
        if mbit:
            parameters = [q.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS") for q in buckets(two_nodes)]
            assert {p["rate"] for p in parameters} == {mbit * 125_000}


# ---- collectives ---------------------------------------------------------------------------------------------------


def test_payloads_travel_every_way(tmp_path):
    output = tmp_path / "collectives.jsonl"
    command = [sys.executable, str(ROOT / "bench" / "collectives.py"), "--quick", "--device", "cpu"]
    command += ["--rates", "10000", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["provider"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert list(rows) == list(flat.LINKS)
    assert {row["case"] for row in rows.values()} == {"flat6.5m@10gbps/2x1"}
    assert 0 < rows["gather0.001"]["bytes_sent"] < rows["gather0.05"]["bytes_sent"]
    assert rows["nccl_fp32"]["bytes_sent"] is None

"""The training experiments in small: every row trains, is recorded, and ends with one model on all ranks."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "bench"))  # after tests/, whose modules keep their names

import ablation  # noqa: E402
import nets  # noqa: E402
import tasks  # noqa: E402
import teams  # noqa: E402
from fusedcomp import Identity  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four files, of 12 x 12 noise; the last pixel row tells the label."""
    folder = tmp_path_factory.mktemp("fashion")
    for name, count in (("train", 300), ("t10k", 100)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = np.random.RandomState(0).randint(0, 256, (count, 12, 12)).astype(np.uint8)
        images[:, -1] = 20 * labels[:, None]
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + values.tobytes()))
    return folder


def run(fashion: Path, results: Path, *more: str) -> list[dict[str, Any]]:
    """The records of a quick run."""
    command = [
        sys.executable, "bench/ablation.py", "--quick", "--device", "cpu", "--text", "README.md",
        "--fashion", str(fashion), "--results", str(results), *more,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_every_row_trains_on_both_tasks(fashion: Path, tmp_path: Path) -> None:
    rows = run(fashion, tmp_path / "ablation.jsonl")
    assert {(row["case"], row["provider"]) for row in rows} == {
        (task, method) for task in ("resnet", "lstm") for method in ablation.METHODS
    }
    assert len(rows) == 2 * len(ablation.METHODS)
    for row in rows:
        assert row["quick"] is True
        assert row["replicas_equal"] is True
        assert row["metric"] == {"resnet": "test_accuracy", "lstm": "test_loss"}[row["case"]]
        assert 0 <= row["value"] < 6
        assert row["compression_ratio"] == row["bytes_dense"] / row["bytes_sent"]
    for task in ("resnet", "lstm"):
        sent = {row["provider"]: row["bytes_sent"] for row in rows if row["case"] == task}
        last = {row["provider"]: row["bytes_last_step"] for row in rows if row["case"] == task}
        for name, method in ablation.METHODS.items():
            dense = sent["lars_dense" if method.lars else "dense"]  # LARS has more buckets
            assert (sent[name] == dense) == (method.compressor(1) == Identity() and method.budget is None)
            assert sent[name] <= dense
        assert sent["topk_no_warmup"] < sent["topk"] < sent["topk_dense_warmup"]
        assert last["topk_no_warmup"] == last["topk"] == last["topk_dense_warmup"]
        assert last["topk_bf16"] < last["topk"] < last["dense"]


def test_a_method_trains_at_the_rate_that_is_best_in_its_trials(fashion: Path, tmp_path: Path) -> None:
    more = ("--tasks", "lstm", "--methods", "topk", "--factors", "0.01", "2", "--steps", "12", "--trial-steps", "8")
    rows = run(fashion, tmp_path / "ablation.jsonl", *more)
    trials = {row["lr"]: row["value"] for row in rows if row["metric"] == "validation_loss"}
    (final,) = (row for row in rows if row["metric"] == "test_loss")
    assert set(trials) == {factor * tasks.RECIPES["lstm"].lr for factor in (0.01, 2)}
    assert final["lr"] == min(trials, key=trials.__getitem__)
    assert {row["steps"] for row in rows} == {8, 12}
    assert final["trial_steps"] == 8


def test_a_rate_that_diverged_once_is_not_chosen() -> None:
    assert teams.best_rate({0.1: [2.0, 2.0], 0.2: [1.0, float("nan")], 0.4: [3.0, 0.9]}) == 0.4
    assert teams.is_at_edge(0.4, [0.1, 0.2, 0.4])
    assert not teams.is_at_edge(0.2, [0.1, 0.2, 0.4])
    assert not teams.is_at_edge(0.2, [0.2])


def test_images_come_from_a_folder(fashion: Path) -> None:
    images = tasks.Images(fashion, quick=False, device=CPU)
    sizes = {name: len(labels) for name, (_, labels) in images.splits.items()}
    assert sizes == {"train": 150, "validation": 150, "test": 100}
    pixels, labels = images.batch(torch.tensor([3, 17]))
    assert pixels.shape == (2, 1, 12, 12)
    assert labels.tolist() == [3, 7]
    assert torch.equal(pixels[:, 0, -1, 0] * 255, torch.tensor([60.0, 140.0]))


@pytest.mark.parametrize(("rank", "seen"), [(0, 1), (1, 1)])
def test_an_epoch_shows_every_image_once(fashion: Path, monkeypatch: pytest.MonkeyPatch, rank: int, seen: int) -> None:
    images = tasks.Images(fashion, quick=True, device=CPU)  # 150 for training, 8 for each of two ranks
    monkeypatch.setattr(tasks.dist, "get_world_size", lambda: 2)
    orders = []
    for of_rank in (rank, 1 - rank):
        monkeypatch.setattr(tasks.dist, "get_rank", lambda of_rank=of_rank: of_rank)
        orders.append(images.order(seed=0, steps=11))
    assert [order.shape for order in orders] == [(11, 8), (11, 8)]
    epoch = torch.cat([order[:9] for order in orders]).flatten()  # 9 steps of 16 images
    assert epoch.bincount().max() == seen
    assert not torch.equal(orders[0][:2], orders[0][9:])


def test_the_networks_are_of_the_size_they_are_said_to_be() -> None:
    resnet, lstm = nets.ResNet(32, 3, 10), nets.CharacterLSTM(512, 84)
    assert (nets.numel(resnet), nets.numel(lstm)) == (1_073_386, 1_368_660)
    assert nets.numel(nets.ResNet(16, 3, 10)) == 269_434  # He et al., table 6: 0.27 M
    assert resnet(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert lstm(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 84)
    assert nets.share_right(torch.nn.Flatten(), torch.eye(10).view(10, 1, 1, 10), torch.arange(10), batch=4) == 1.0

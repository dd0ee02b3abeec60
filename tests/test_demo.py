"""`python -m fusedcomp demo` does what it says, in a short run, and fails in one sentence or one traceback."""

import importlib.util
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusedcomp.__main__ import main

np = pytest.importorskip("numpy")  # a GPU machine may have none of the demo's extras
from fusedcomp.demo import data, ranks, train  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
# As a user without a GPU; 80 columns are what rich assumes where there is no terminal.
USER_ENV = {key: value for key, value in os.environ.items() if key not in {"TRITON_INTERPRET", "FUSEDCOMP_OPS"}}
USER_ENV |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}

ROW = r"{} +[\d.]+ +([\d.]+)% +([\d.]+) +([\d.]+)x +[\d.]+"


def demo(*arguments: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fusedcomp", "demo", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=USER_ENV | env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run of 6 of the 30 epochs, and where it was."""
    for extra in ("rich", "sklearn", "matplotlib"):
        pytest.importorskip(extra)
    folder = tmp_path_factory.mktemp("demo")
    done = demo("--epochs", 6, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, folder


@pytest.mark.parametrize("method", train.METHODS, ids=lambda method: method.provider)
def test_every_method_learns_and_reports_what_it_sent(short, method):
    done, _ = short
    row = re.search(ROW.format(re.escape(method.title)), done.stdout)
    assert row, done.stdout
    accuracy, megabytes, ratio = map(float, row.groups())
    assert accuracy > 80
    # 96 steps of 143,466 fp32 parameters; a compressed step sends 1 % of 99.6 % of them, in 6 bytes each, and the rest.
    assert megabytes == pytest.approx(55.1 if method.provider == "dense" else 1.07, rel=0.01)
    assert ratio == pytest.approx(1.0 if method.provider == "dense" else 51.5, abs=0.25)


def test_seconds_are_not_sold_as_those_of_a_network(short):
    assert "Seconds say nothing about a network" in short[0].stdout


def test_nothing_is_printed_as_an_error(short):
    assert short[0].stderr == ""


def test_the_picture_shows_three_curves(short):
    import matplotlib.image

    from fusedcomp.demo import report

    _, folder = short
    picture = matplotlib.image.imread(folder / "fusedcomp-demo.png")
    assert picture.shape[0] > 400
    assert picture.shape[1] > 800
    pixels = (255 * picture[:, :, :3]).round().astype(int)
    for style in report.STYLES:
        # A curve is 4 pixels wide and its label adds some; the anti-aliased edges do not count.
        assert (pixels == [*bytes.fromhex(style.colour[1:])]).all(axis=2).sum() > 1000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--dataset", "cifar10"], "argument --dataset: invalid choice: 'cifar10'"),
        (["--epochs", "0"], "argument --epochs: must be a whole number >= 1, got '0'"),
        (["--output", "picture.jpg"], "argument --output: must end in .png, got 'picture.jpg'"),
        (["--output", "nowhere/picture.png"], "argument --output: there is no folder 'nowhere'"),
    ],
    ids=["dataset", "epochs", "suffix", "folder"],
)
def test_a_bad_argument_is_refused_before_any_work(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["demo", *arguments])
    assert exited.value.code == 2
    assert complaint in capsys.readouterr().err


def error_of(arguments, capsys):
    assert main(["demo", *arguments]) == 1
    return capsys.readouterr().err


def test_missing_extras_give_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module in {"rich", "sklearn"} else module)
    expected = "error: the demo needs rich, scikit-learn: pip install 'fusedcomp[demo]'\n"
    assert error_of([], capsys) == expected


def test_a_missing_dataset_gives_the_name_of_its_package(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    for module in ("rich", "matplotlib"):
        pytest.importorskip(module)
    monkeypatch.setattr(data, "_FASHION_MNIST", tmp_path)
    message = error_of(["--dataset", "fashion-mnist"], capsys)
    assert "install the Debian package dataset-fashion-mnist" in message
    assert message.count("\n") == 1


def test_the_command_is_importable_without_the_extras():
    code = "import sys, fusedcomp.__main__; print({'rich', 'matplotlib', 'sklearn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=USER_ENV, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_digits_are_split_once_and_for_all():
    pytest.importorskip("sklearn")
    first, second = data.load("digits"), data.load("digits")
    counts = [len(part.labels) for part in first]
    assert counts == [1077, 360, 360]
    # A training image that is also a test image would flatter everyone.
    assert len(np.unique(np.concatenate([part.images for part in first]).reshape(1797, 64), axis=0)) == 1797
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a.images, b.images)
        assert np.array_equal(a.labels, b.labels)


def raise_on_rank_1(device, send):
    send(dist.get_rank())
    if dist.get_rank() == 1:
        raise ValueError("what went wrong")
    dist.all_reduce(torch.zeros(1))  # gives rank 0 an error of its own, a consequence


def kill_rank_1(device, send):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize(
    ("work", "cause"),
    [
        (raise_on_rank_1, r"rank 1 failed\nTraceback(.|\n)*raise_on_rank_1(.|\n)*ValueError: what went wrong"),
        (kill_rank_1, r"rank 1 died with exit code -9"),
    ],
    ids=["exception", "signal"],
)
def test_ranks_fail_together_and_name_the_cause(work, cause):
    with pytest.raises(ranks.RankFailed, match=cause):
        list(ranks.launch(work))
    assert multiprocessing.active_children() == []


def test_what_all_ranks_send_arrives():
    assert sorted(ranks.launch(send_rank)) == [0, 1]


def send_rank(device, send):
    send(dist.get_rank())


@pytest.mark.multigpu
def test_the_work_runs_over_nccl_with_a_gpu_for_each_rank():
    assert ranks.backend(2) == "nccl"
    random = np.random.RandomState(0)
    split = data.Split(random.randint(0, 256, (256, 8, 8), np.uint8), random.randint(0, 10, 256))
    jobs = [train.Job(method, epochs=2, batch=32, seed=0) for method in train.METHODS]
    messages = ranks.launch(train.work, data.Images(split, split, split), jobs)
    outcomes = [message for message in messages if isinstance(message, train.Outcome)]
    ratios = [outcome.compression_ratio for outcome in outcomes]
    assert 0.99 < ratios[0] <= 1.0
    assert all(50 < ratio < 53 for ratio in ratios[1:])
    assert all(outcome.steps == 8 for outcome in outcomes)

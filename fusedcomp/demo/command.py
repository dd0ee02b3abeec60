"""``python -m fusedcomp demo``: arguments, and the order of things. Importable without the demo's extras."""

import argparse
import importlib.util
from pathlib import Path

from fusedcomp.demo import DATASETS, DemoError

SUMMARY = "train a small CNN three ways on two local processes: dense, TopK, LARS + TopK"
_EXTRAS = {"rich": "rich", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}  # module: what pip calls it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the demo."""
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="digits", help="default: %(default)s")
    defaults = ", ".join(f"{length.epochs} for {name}" for name, length in DATASETS.items())
    parser.add_argument("--epochs", type=_positive, help=f"per method; default: {defaults}")
    parser.add_argument("--seed", type=int, default=0, help="of weights and image order; default: %(default)s")
    parser.add_argument(
        "--output", type=_png, default=Path("fusedcomp-demo.png"), metavar="PNG", help="default: %(default)s"
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _png(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    if not path.parent.is_dir():  # now, not after the training
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def run(arguments: argparse.Namespace) -> None:
    """Train three ways, show what happens, print the table, draw the picture.

    Raises:
        DemoError: something is missing, or a rank failed.
    """
    missing = [package for module, package in _EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}: pip install 'fusedcomp[demo]'")
    from fusedcomp.demo import data, ranks, report, train

    length = DATASETS[arguments.dataset]
    epochs = arguments.epochs or length.epochs
    jobs = [train.Job(method, epochs, length.batch, arguments.seed) for method in train.METHODS]
    messages = ranks.launch(train.work, data.load(arguments.dataset), jobs)
    outcomes = report.follow(messages, jobs, arguments.dataset)
    report.print_table(jobs, outcomes, ranks.backend(world_size=2))
    report.draw(jobs, outcomes, arguments.dataset, arguments.output)

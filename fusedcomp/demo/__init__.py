"""The demo: a small CNN on real images, trained three ways by two local processes (``python -m fusedcomp demo``).

    command   arguments; runs the others, with a sentence for each error
    data      the images, and their split
    model     the network
    train     methods, the training loop; what a rank does
    ranks     processes that fail together
    report    progress, table, picture

``bench/training.py`` asks ``data``, ``train`` and ``ranks`` for many runs. Only this file and ``command`` can be
imported without the extras of ``fusedcomp[demo]``.
"""

from typing import NamedTuple


class Length(NamedTuple):
    """How long a run on a data set is."""

    epochs: int
    batch: int  # images per rank and step


# A run is long enough to converge, and all three together take less than three minutes on two cores.
DATASETS = {"digits": Length(epochs=30, batch=32), "fashion-mnist": Length(epochs=2, batch=64)}


class DemoError(Exception):
    """What a user can do something about, in a sentence; no traceback of ours is needed."""

"""Images that are already on this machine: scikit-learn's digits, or Fashion-MNIST from its Debian package.

Split into train, validation and test by a fixed seed, whatever the seed of a run: learning rates are chosen on
validation images, so that no run may have seen another's test images.
"""

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusedcomp.demo import DATASETS, DemoError

_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
_PACKAGE = "dataset-fashion-mnist"
_HELD_OUT = 360  # of 1797 digits, once for validation and once for test
_FASHION_VALIDATION = 5000  # of 60,000


class Split(NamedTuple):
    """Grey images and what they show."""

    images: NDArray[np.uint8]  # (count, side, side)
    labels: NDArray[np.int64]  # (count,), 0 to 9


class Images(NamedTuple):
    """A data set in its three parts."""

    train: Split
    validation: Split
    test: Split

    @property
    def side(self) -> int:
        """Pixels in a row."""
        return self.train.images.shape[1]


def load(dataset: str) -> Images:
    """The data set of that name, one of ``DATASETS``.

    Raises:
        DemoError: its files are not on this machine.
    """
    if dataset not in DATASETS:
        raise ValueError(f"dataset must be one of {sorted(DATASETS)}, got {dataset!r}")
    return _digits() if dataset == "digits" else _fashion_mnist()


def _digits() -> Images:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * (255 / 16)).astype(np.uint8)  # from 17 levels of grey
    # RandomState, not Generator: numpy promises it the same numbers in every version.
    order = np.random.RandomState(0).permutation(len(images))
    parts = np.split(order, [len(images) - 2 * _HELD_OUT, len(images) - _HELD_OUT])
    return Images(*(Split(images[part], digits.target[part].astype(np.int64)) for part in parts))


def _fashion_mnist() -> Images:
    train = Split(_read("train-images-idx3-ubyte.gz", 16), _read("train-labels-idx1-ubyte.gz", 8).astype(np.int64))
    test = Split(_read("t10k-images-idx3-ubyte.gz", 16), _read("t10k-labels-idx1-ubyte.gz", 8).astype(np.int64))
    first = len(train.labels) - _FASHION_VALIDATION
    fitted = Split(train.images[:first], train.labels[:first])  # the files are in random order
    return Images(fitted, Split(train.images[first:], train.labels[first:]), test)


def _read(name: str, header: int) -> NDArray[np.uint8]:
    """The bytes after the header of an IDX file; images in their shape."""
    try:
        with gzip.open(_FASHION_MNIST / name) as file:
            content = file.read()
    except OSError as error:
        raise DemoError(
            f"Fashion-MNIST is not in {_FASHION_MNIST} ({error}); install the Debian package {_PACKAGE} "
            f"(apt-get install {_PACKAGE}), or use --dataset digits"
        ) from error
    values = np.frombuffer(content, np.uint8, offset=header)
    return values.reshape(-1, 28, 28) if header == 16 else values

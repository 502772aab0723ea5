"""scikit-learn's 1797 handwritten digits of 8x8 pixels."""

from __future__ import annotations

import numpy as np

from shardwise.errors import ShardwiseError

from .arrays import Arrays
from .order import shuffled
from .source import class_names, optional

NUM_TEST = 360
SUBSETS = ("train", "test", "all")


def digits(subset: str = "train") -> Arrays:
    """The digits for training or for testing, always divided in the same way.

    >>> len(digits("train")), len(digits("test")), digits().shape
    (1437, 360, (1, 8, 8))
    """
    check_subset(subset)
    datasets = optional("sklearn.datasets", "the digits come with scikit-learn", "shardwise[train]")
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = np.asarray(pixels, dtype=np.uint8).reshape(-1, 1, 8, 8)
    order = shuffled(len(images), seed=0, epoch=0)
    chosen = {"test": order[:NUM_TEST], "train": order[NUM_TEST:], "all": np.sort(order)}[subset]
    name = "digits" if subset == "all" else f"digits ({subset})"
    return Arrays(images[chosen], labels[chosen], name, class_names(10), scale=1 / 16)


def check_subset(subset: str) -> None:
    """Raises unless this is a subset that a data set can have."""
    if subset not in SUBSETS:
        raise ShardwiseError(f"subset={subset!r} must be one of {', '.join(SUBSETS)}")

"""Which dimensions of operands and result belong together, as letters: Einstein's notation.

"bik", "bkj" -> "bij" is a product of matrices. A dimension of an operand is one of the result, and
cut as that one is, or it is gone there, and needed whole. One that is shorter stands for several of
the result: broadcasting, or fewer heads of keys than of queries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.geometry.layout import Layout, Ranges
from shardwise.graph.labels import Shape
from shardwise.operators.calls import Call
from shardwise.operators.splits import Split, rows
from shardwise.operators.strategy import Need, Strategy

NUMBERED = (
    "0123456789"  # dimensions that have no letter of their own: those of batches, or of `...`
)


@dataclass(frozen=True)
class Notation:
    """A letter per dimension of every operand, and of the result."""

    terms: tuple[str, ...]
    result: str

    @classmethod
    def of(cls, text: str) -> Notation:
        """
        >>> Notation.of("ik,kj->ij")
        Notation(terms=('ik', 'kj'), result='ij')
        """
        terms, _, result = text.partition("->")
        return cls(tuple(terms.split(",")), result)

    @property
    def gone(self) -> str:
        """The letters that the result has not."""
        return "".join(
            dict.fromkeys(x for term in self.terms for x in term if x not in self.result)
        )

    def sizes(self, shapes: Sequence[Shape]) -> dict[str, int]:
        """The size of every letter: where it is broadcast, that to which it is."""
        sizes: dict[str, int] = {}
        for term, shape in zip(self.terms, shapes, strict=True):
            for letter, size in zip(term, shape, strict=False):  # a scalar has no letter
                sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
        return sizes

    def labels(self, shapes: Sequence[Shape], known: Sequence[str]) -> dict[str, str]:
        """The labels of letters of the result, each once, from the first operand that has them."""
        found, sizes = dict[str, str](), self.sizes(shapes)
        for term, shape, labels in zip(self.terms, shapes, known, strict=True):
            for letter, size, label in zip(term, shape, labels, strict=False):
                taken = label in (".", *found.values()) or letter in found
                fits = size == sizes[letter] and (size > 1 or label == "n")
                if letter in self.result and fits and not taken:
                    found[letter] = label
        return found


def labels_of(call: Call, tensors: Sequence[Any]) -> list[str]:
    """The labels of these tensors; of weights there are none."""
    return ["" if call.model.is_stored(t) else call.model.labels_of(t) for t in tensors]


def einsum_notation(equation: str, shapes: Sequence[Shape]) -> Notation | None:
    """What torch.einsum makes of an equation; None where a diagonal is meant.

    >>> einsum_notation("...ij, jk", [(2, 3, 4), (4, 5)])
    Notation(terms=('0ij', 'jk'), result='0ik')
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    spread = [len(s) - len(t.replace("...", "")) for s, t in zip(shapes, terms, strict=True)]
    most = max(n if "..." in term else 0 for n, term in zip(spread, terms, strict=True))
    if most > len(NUMBERED):
        return None
    if not arrow:  # what stands there once, in order
        count = Counter(left.replace(".", "").replace(",", ""))
        right = "..." + "".join(sorted(letter for letter, times in count.items() if times == 1))
    batch = NUMBERED[:most]
    found = [t.replace("...", batch[most - n :]) for t, n in zip(terms, spread, strict=True)]
    if any(len(set(term)) < len(term) for term in found):
        return None
    return Notation(tuple(found), right.replace("...", batch))


def behind(letters: str, num_dims: int) -> str:
    """The letters of an operand that is broadcast: the last ones, as many as it has dimensions."""
    return letters[len(letters) - num_dims :]


class ByLetters(Strategy):
    """An operator on dimensions that a notation, in its attributes, tells apart."""

    def needs(self, split: Split[Any]) -> tuple[Need, ...]:
        pairs = zip(split.layer.operands, split.layer.attrs.terms, strict=True)
        return tuple(Need(self.part(split, operand.shape, term)) for operand, term in pairs)

    def part(self, split: Split[Any], shape: Shape, term: str) -> Layout:
        """What each rank needs of an operand with these letters; a scalar has none."""
        pairs = zip(shape, term or " ", strict=True)
        return Layout.of(shape, [self.ranges(split, letter, size) for size, letter in pairs])

    def ranges(self, split: Split[Any], letter: str, size: int) -> Ranges:
        """What each rank needs of a dimension."""
        dim = split.layer.attrs.result.find(letter)
        if dim < 0 or size == 0:
            return split.whole(size)
        return rows(self.result_ranges(split, dim), max(1, split.layer.shape[dim] // size))

    def result_ranges(self, split: Split[Any], dim: int) -> Ranges:
        """What each rank computes of a dimension of the result."""
        return split.dim_ranges(dim)


def extents(ranges: Ranges) -> np.ndarray:
    """How long each rank's range is; [world]."""
    return (ranges[:, 1] - ranges[:, 0]).astype(float)

"""What is found against what is expected: the error of every tensor, and how large it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, TypeGuard

import torch

TOLERANCE = 1e-9  # relative, in float64

# What rounding makes of a network of usual depth, by the dtype of the tensor. Sums of 10^4 terms in
# another order differ by about a hundred last bits; kernels of 16 bits sum in float32 and round
# once, so that only the roundings between layers count. More than this must be the network's own
# noise.
TOLERANCES = {
    torch.float64: TOLERANCE,
    torch.complex128: TOLERANCE,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.bfloat16: 2.0**-5,
    torch.float16: 2.0**-8,
}

# A plan rounds elsewhere than one device, in every layer; and a change of the last bit makes one
# device round otherwise in every layer. So error and noise are draws of one distribution. Of 504
# ill-conditioned networks under plans, in four dtypes, the worst of all tensors was within 3 times
# the largest of six draws in 94 %, within 10 times in 97 %; most of the rest are batch norms whose
# values lie on several ranks, and whose moments keep fewer digits than those of one device.
FACTOR = 10.0

# Elements below this part of the largest tensor of the same kind count as zero: the gradient of a
# bias before batch norm, say, is nothing but rounding on one device too.
FLOOR = 1e-4

Key = tuple[str, str]  # kind and name
Values = Mapping[Key, Any]  # tensors, mostly; None is a gradient that is not there


@dataclass(frozen=True)
class Comparison:
    """The largest error of one tensor, relative to its largest element, and what it may be.

    Integers are compared exactly: their error is the part of the elements that differ. `noise` is
    the error that one device makes when the last bit of what it is given changes, where that was
    measured; `origin` says where it arises. A `fault` is a difference that no rounding explains.
    """

    kind: str  # output, loss, gradient, statistics, weight
    name: str
    error: float
    tolerance: float = TOLERANCE
    noise: float | None = None
    fault: str = ""
    origin: str = ""
    cause: str = ""  # of what failed, as far as it is known

    @property
    def label(self) -> str:
        """Kind and name, as one says it."""
        return self.name if self.name.startswith(self.kind) else f"{self.kind} {self.name}"

    @property
    def limit(self) -> float:
        """How large the error may be; noise excuses only what needs it."""
        if self.error <= self.tolerance:
            return self.tolerance
        return max(self.tolerance, FACTOR * (self.noise or 0.0))

    @property
    def undetermined(self) -> bool:
        """Whether one device itself does not keep a single digit: any number is as good."""
        return self.limit >= 1.0

    @property
    def passed(self) -> bool:
        excused = self.undetermined and isfinite(self.error)
        return not self.fault and (self.error <= self.limit or excused)

    @property
    def severity(self) -> float:
        """The error in units of its limit, by which the worst of several is found."""
        if self.fault:
            return inf
        if self.undetermined and self.passed:
            return 0.0
        return self.error / max(self.limit, 1e-300)


def differences(found: Values, expected: Values) -> list[Comparison]:
    """One comparison for every tensor that either side has."""
    tops: dict[str, float] = {}
    for (kind, _), value in expected.items():
        tops[kind] = max(tops.get(kind, 0.0), size(value))
    results = []
    for key in dict.fromkeys([*expected, *found]):
        mine, theirs = found.get(key), expected.get(key)
        if key[0] == "gradient":
            mine, theirs = _zeros_for_none(mine, theirs), _zeros_for_none(theirs, mine)
        error, fault = _error(mine, theirs, FLOOR * tops.get(key[0], 0.0))
        results.append(Comparison(*key, error, _tolerance(key, expected), fault=fault))
    return results


def _tolerance(key: Key, expected: Values) -> float:
    """What rounding in the dtype of a tensor usually makes; a loss is as rounded as the outputs."""
    value = expected.get(key)
    if key[0] == "loss":
        rounded = [k for k, y in expected.items() if k[0] == "output" and is_inexact(y)]
        return max((_tolerance(k, expected) for k in rounded), default=TOLERANCE)
    if not is_inexact(value):
        return TOLERANCE if value is None else 0.0
    return TOLERANCES.get(value.dtype, 4 * torch.finfo(value.dtype).eps)


def _zeros_for_none(gradient: Any, other: Any) -> Any:
    """No gradient counts as one of zeros: the update is the same unless weights decay."""
    return torch.zeros_like(other) if gradient is None and other is not None else gradient


def _error(found: Any, expected: Any, floor: float) -> tuple[float, str]:
    """How far two values are apart, and what differs beyond numbers."""
    if _look(found) != _look(expected):
        return inf, f"{_look(found)} instead of {_look(expected)}"
    if not isinstance(expected, torch.Tensor) or not expected.numel():
        return 0.0, ""
    if not is_inexact(expected):
        return float((found != expected).double().mean()), ""
    return distance(found, expected) / max(size(expected), floor, 1e-300), ""


def _look(value: Any) -> str:
    """Shape and dtype of a tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = "x".join(map(str, value.shape)) or "a scalar"
    return f"{shape} of {str(value.dtype).removeprefix('torch.')}"


def is_inexact(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor whose elements are rounded."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two elements; infinite where one is not finite and they differ."""
    if not expected.numel():
        return 0.0
    a, b = _wide(found), _wide(expected)
    gap = (a - b).abs()
    largest = float(gap.max())
    if isfinite(largest):
        return largest
    gap = gap.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    return float(torch.where(gap.isnan(), inf, gap).max())


def size(value: Any) -> float:
    """The largest element of those that are finite."""
    if not is_inexact(value) or not value.numel():
        return 0.0
    sizes = _wide(value).abs()
    largest = float(sizes.max())
    return largest if isfinite(largest) else float(sizes.masked_fill(~sizes.isfinite(), 0).max())

"""What a convolution's time depends on: sizes, strides, layout and precision.

x_NCHW, w_FCRS, y_NFPQ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from shardwise.kernels.native import ConvProblem

Pair = tuple[int, int]
PRECISIONS = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True)
class ConvShape:
    """One 2-D convolution on one device.

    >>> ConvShape((2, 3, 8, 8), (4, 3, 3, 3), padding=(1, 1)).out
    (2, 4, 8, 8)
    """

    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    last: bool = False  # x and y have their channels last in memory
    filter_last: bool = False
    dtype: str = "float32"

    @property
    def out(self) -> tuple[int, int, int, int]:
        sizes = self.x[2:], self.w[2:]
        p, q = num_windows(*sizes, self.stride, self.padding, self.dilation)
        return self.x[0], self.w[0], p, q

    @property
    def flops(self) -> int:
        """Multiplications and additions of one direction; the same for all three."""
        n, f, p, q = self.out
        _, c, r, s = self.w
        return 2 * n * f * p * q * c * r * s

    @property
    def key(self) -> str:
        """A line of text that names this shape in a file."""
        values = (getattr(self, field.name) for field in fields(self))
        return " ".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)

    def problem(self, threads: int, relu: bool = False) -> ConvProblem:
        _, _, p, q = self.out
        f, _, r, s = self.w
        return ConvProblem(
            *(*self.x, f, r, s, p, q, *self.stride, *self.padding, *self.dilation, self.groups),
            *(self.last, self.filter_last, relu, threads),
        )


def num_windows(
    sizes: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """How many windows there are along each dimension: the sizes of a convolution's output."""
    parts = zip(sizes, window, stride, padding, dilation, strict=True)
    return [(n + 2 * pad - dil * (k - 1) - 1) // step + 1 for n, k, step, pad, dil in parts]


def pair(value: int | Pair) -> Pair:
    """A number for each dimension, where one may be given for both."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def shape_of(
    x: torch.Tensor, w: torch.Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> ConvShape | None:
    """The shape of this convolution, or None where only the stock operator will do."""
    usable = x.ndim == w.ndim == 4 and x.dtype == w.dtype and x.dtype in PRECISIONS
    usable = usable and not x.is_neg() and not w.is_neg()  # views of which memory has the negative
    if not usable or x.device.type != "cpu" or w.device.type != "cpu" or not x.numel():
        return None
    shape = ConvShape(
        *(tuple(x.shape), tuple(w.shape), stride, padding, dilation, groups),  # type: ignore[arg-type]
        last=channels_last(x, w),
        filter_last=strictly_last(w),
        dtype=PRECISIONS[x.dtype],
    )
    fits = shape.x[1] == shape.w[1] * groups and shape.w[0] % groups == 0
    return shape if fits and min(shape.out) > 0 and min(shape.w) > 0 else None


def strictly_last(t: torch.Tensor) -> bool:
    """Whether the channels lie last, and that is not the same as lying planar."""
    return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def channels_last(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether y is to have its channels last: as x; as w where x is the same either way."""
    if x.is_contiguous():
        either = x.is_contiguous(memory_format=torch.channels_last)
        return either and strictly_last(w)
    return x.is_contiguous(memory_format=torch.channels_last) or (
        x.stride(1) == 1 and x.shape[1] > 1
    )


def memory_format(last: bool) -> torch.memory_format:
    return torch.channels_last if last else torch.contiguous_format


def is_eager(*tensors: torch.Tensor | None) -> bool:
    """Whether these are plain tensors and nothing traces, transforms or watches operators."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    plain = all(t is None or type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
    return plain and not torch._C._len_torch_dispatch_stack()

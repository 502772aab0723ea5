"""What a convolution's time depends on: sizes, strides, layout and precision.

x_NC..., w_FC..., y_NF..., with one, two or three spatial dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod

import torch

from shardwise.kernels.native import ConvProblem

Sizes = tuple[int, ...]  # one number for each dimension
PRECISIONS = {torch.float32: "float32", torch.float64: "float64"}
# How torch names channels last, by the dimensions of a tensor; it has no name for that of lines.
LAST = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class ConvShape:
    """One convolution on one device; what is not given is 1, and no padding, in every dimension.

    >>> ConvShape((2, 3, 8, 8), (4, 3, 3, 3), padding=(1, 1)).out
    (2, 4, 8, 8)
    """

    x: Sizes
    w: Sizes
    stride: Sizes = ()
    padding: Sizes = ()
    dilation: Sizes = ()
    groups: int = 1
    last: bool = False  # x and y have their channels last in memory
    filter_last: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1)):
            if not getattr(self, name):
                object.__setattr__(self, name, (usual,) * self.num_dims)

    @property
    def num_dims(self) -> int:
        """Of images: 1 for lines, 2 for pictures, 3 for volumes."""
        return len(self.x) - 2

    @property
    def out(self) -> Sizes:
        sizes = self.x[2:], self.w[2:]
        windows = num_windows(*sizes, self.stride, self.padding, self.dilation)
        return self.x[0], self.w[0], *windows

    @property
    def flops(self) -> int:
        """Multiplications and additions of one direction; the same for all three."""
        return 2 * prod(self.out) * prod(self.w[1:])

    @property
    def key(self) -> str:
        """A line of text that names this shape in a file."""
        values = (getattr(self, field.name) for field in fields(self))
        return " ".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)

    def problem(self, threads: int, relu: bool = False) -> ConvProblem:
        """For the library every image is a volume: missing dimensions have one slice, one row."""
        more = 3 - self.num_dims
        one, none = (1,) * more, (0,) * more
        return ConvProblem(
            *(*self.x[:2], *one, *self.x[2:], self.w[0], *one, *self.w[2:], *one, *self.out[2:]),
            *(*one, *self.stride, *none, *self.padding, *one, *self.dilation),
            *(self.groups, self.last, self.filter_last, relu, threads),
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


def per_dim(value: int | Sizes, num_dims: int) -> Sizes:
    """A number for each dimension, where one may be given for all.

    >>> per_dim(2, 3), per_dim((1, 2), 2)
    ((2, 2, 2), (1, 2))
    """
    return (value,) * num_dims if isinstance(value, int) else tuple(value)


def shape_of(
    x: torch.Tensor, w: torch.Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> ConvShape | None:
    """The shape of this convolution, or None where only the stock operator will do."""
    usable = x.ndim == w.ndim and x.ndim in LAST and x.dtype == w.dtype and x.dtype in PRECISIONS
    usable = usable and not x.is_neg() and not w.is_neg()  # views of which memory has the negative
    if not usable or x.device.type != "cpu" or w.device.type != "cpu" or not x.numel():
        return None
    shape = ConvShape(
        *(tuple(x.shape), tuple(w.shape), stride, padding, dilation, groups),
        last=channels_last(x, w),
        filter_last=strictly_last(w),
        dtype=PRECISIONS[x.dtype],
    )
    fits = shape.x[1] == shape.w[1] * groups and shape.w[0] % groups == 0
    return shape if fits and min(shape.out) > 0 and min(shape.w) > 0 else None


def strictly_last(t: torch.Tensor) -> bool:
    """Whether the channels lie last, and that is not the same as lying planar."""
    return t.is_contiguous(memory_format=LAST[t.ndim]) and not t.is_contiguous()


def channels_last(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether y is to have its channels last: as x; as w where x is the same either way."""
    if x.is_contiguous():
        return x.is_contiguous(memory_format=LAST[x.ndim]) and strictly_last(w)
    if x.ndim == 3:
        return False
    return x.is_contiguous(memory_format=LAST[x.ndim]) or (x.stride(1) == 1 and x.shape[1] > 1)


def memory_format(last: bool, ndim: int = 4) -> torch.memory_format:
    return LAST[ndim] if last else torch.contiguous_format


def is_eager(*tensors: torch.Tensor | None) -> bool:
    """Whether these are plain tensors and nothing traces, transforms or watches operators."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    plain = all(t is None or type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
    return plain and not torch._C._len_torch_dispatch_stack()

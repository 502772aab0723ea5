"""Random programs of tensor operators: dtypes, masks, indices, scalars, draws, writes in place.

A program is drawn step by step on real tensors: a step that torch refuses is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from outside_cases.case import Case, number, seed_everything

T = torch.Tensor
Step = Callable[..., Any]  # from tensors to a tensor; a module where it has weights
PER_GROUP = 20
LARGEST = 6000  # elements of a value
DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16)


# Names of functions in torch.
FUNCTIONS = """tanh exp sigmoid abs square sign floor round neg relu sin isnan isfinite logical_not
signbit erf sqrt trunc frac reciprocal log1p""".split()  # noqa: SIM905
TO_SCALARS = ("sum", "mean", "amax", "amin", "prod", "std", "median", "numel")
ALONG_A_DIM = ("sum", "mean", "amax", "amin", "var", "logsumexp", "softmax", "log_softmax")


def _dim(draw: random.Random, x: T) -> int:
    return draw.randrange(-x.ndim, x.ndim)


def _written(x: T, write: Callable[[T], Any]) -> T:
    """A copy of x that was written into."""
    y = x.clone()
    write(y)
    return y


def _set(index: Any, value: float) -> Callable[[T], None]:
    def write(y: T) -> None:
        y[index] = value

    return write


class Scaled(nn.Module):
    """Times a parameter of any number of dimensions, none included, plus a buffer."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)
        self.register_buffer("shift", torch.rand(shape))

    def forward(self, x: T) -> T:
        return x * self.scale + self.shift


def _conv(draw: random.Random, x: T) -> nn.Module:
    nd, c = x.ndim - 2, x.shape[1]
    groups = draw.choice([1, 1, c])
    kernel, stride = draw.randint(1, 3), draw.randint(1, 2)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[nd - 1]
    mode = draw.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
    filters = groups * draw.randint(1, 3)
    return kind(c, filters, kernel, stride, draw.randint(0, 2), 1, groups, padding_mode=mode)


def _transposed(draw: random.Random, x: T) -> nn.Module:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[x.ndim - 3]
    return kind(x.shape[1], draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 2))


def _pool(draw: random.Random, x: T) -> nn.Module:
    nd = x.ndim - 2
    name = draw.choice(["MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "LPPool"])
    sizes = (2, draw.randint(1, 3)) if name == "LPPool" else (draw.randint(1, 3),)
    return getattr(nn, f"{name}{nd}d")(*sizes)


def _norm(draw: random.Random, x: T) -> nn.Module:
    nd, c = x.ndim - 2, x.shape[1]
    name = draw.choice(["batch", "instance", "group", "layer", "local"])
    if name == "group":
        return nn.GroupNorm(draw.choice([g for g in range(1, c + 1) if c % g == 0]), c)
    if name == "layer":
        return nn.LayerNorm(x.shape[draw.randint(1, x.ndim - 1) :])
    if name == "local":
        return nn.LocalResponseNorm(3)
    return getattr(nn, f"{name.title()}Norm{max(nd, 1)}d")(c)


# From a draw and an example to a step; whatever torch refuses is drawn again.
MODULES: list[Callable[[random.Random, T], Step]] = [
    _conv, _conv, _transposed, _pool, _norm, _norm,
    lambda d, x: nn.Linear(x.shape[-1], d.randint(1, 6)),
    lambda d, x: d.choice([nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout])(0.4),
    lambda d, x: d.choice([nn.ReLU, nn.ELU, nn.Hardswish, nn.SiLU, nn.LeakyReLU])(inplace=True),
    lambda d, x: d.choice([nn.GELU, nn.Softplus, nn.PReLU, nn.RReLU, nn.GLU, nn.Tanhshrink])(),
    lambda d, x: Scaled(d.choice([(), (1,), tuple(x.shape[1:]), tuple(x.shape[-1:])])),
    lambda d, x: nn.Upsample(scale_factor=2, mode=d.choice(["nearest", "bilinear", "bicubic"])),
    lambda d, x: d.choice([nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle])(2),
]  # fmt: skip
UNARY: list[Callable[[random.Random, T], Step]] = [
    lambda d, x: getattr(torch, d.choice(
        FUNCTIONS)),
    lambda d, x: lambda y: y.clamp(-0.5, 0.5),
    lambda d, x: lambda y: y.clamp(min=0),
    lambda d, x: lambda y: y.pow(2),
    lambda d, x: lambda y: y.nan_to_num(0.5, 1.0, -1.0),
]  # fmt: skip
CASTS: list[Callable[[random.Random, T], Step]] = [
    lambda d, x: partial(torch.Tensor.to, dtype=d.choice([torch.float64, torch.float32])),
    lambda d, x: partial(torch.Tensor.to, dtype=d.choice([torch.int64, torch.int32, torch.uint8])),
    lambda d, x: lambda y: y > 0,
    lambda d, x: lambda y: y.bool(),
    lambda d, x: lambda y: (y * 3).round().to(torch.int64),
    lambda d, x: lambda y: y.bfloat16(),
    lambda d, x: lambda y: y.half().float(),
]
MASKS: list[Callable[[random.Random, T], Step]] = [
    lambda d, x: lambda y: y * (y > 0),
    lambda d, x: lambda y: torch.where(y > 0, y, 0.1),
    lambda d, x: lambda y: y.masked_fill(y > 0.3, -1.0),
    lambda d, x: lambda y: y.masked_fill(torch.ones_like(y, dtype=torch.bool).triu(), 2.0),
    lambda d, x: partial(lambda y, dim: y * (y == y.amax(dim, keepdim=True)), dim=_dim(d, x)),
]
INDICES: list[Callable[[random.Random, T], Step]] = [
    lambda d, x: partial(torch.argmax, dim=_dim(d, x), keepdim=d.random() < 0.5),
    lambda d, x: partial(torch.argsort, dim=_dim(d, x), stable=True),
    lambda d, x: partial(lambda y, dim: y.sort(dim).values, dim=_dim(d, x)),
    lambda d, x: partial(lambda y, dim: y.max(dim).indices, dim=_dim(d, x)),
    lambda d, x: partial(lambda y, dim: y.topk(2, dim).values, dim=_dim(d, x)),
    lambda d, x: partial(lambda y, dim: y.gather(dim, y.argsort(dim)), dim=_dim(d, x)),
    lambda d, x: lambda y: F.one_hot(y.argmax(1), y.shape[1]),
    lambda d, x: partial(lambda y, dim: y.index_select(dim, torch.tensor([0, 0])), dim=_dim(d, x)),
    lambda d, x: partial(torch.cumsum, dim=_dim(d, x)),
    lambda d, x: partial(lambda y, dim: y.cummax(dim).values, dim=_dim(d, x)),
    lambda d, x: lambda y: y[:, [0, -1]],
    lambda d, x: lambda y: y.flatten(1)[:, ::2],
]
REDUCTIONS: list[Callable[[random.Random, T], Step]] = [
    lambda d, x: getattr(torch, d.choice(TO_SCALARS)),
    lambda d, x: partial(
        getattr(torch, d.choice(ALONG_A_DIM)),
        dim=_dim(d, x)),
    lambda d, x: partial(torch.mean, dim=_dim(d, x), keepdim=True),
    lambda d, x: partial(d.choice([torch.any, torch.all, torch.count_nonzero]), dim=_dim(d, x)),
    lambda d, x: lambda y: y - y.mean(),
    lambda d, x: lambda y: y / (y.abs().amax() + 1),
    lambda d, x: lambda y: y.norm(),
    lambda d, x: partial(F.normalize, dim=_dim(d, x)),
    lambda d, x: lambda y: y.square().mean((-1, -2)).sqrt(),
]  # fmt: skip
DRAWS: list[Callable[[random.Random, T], Step]] = [
    lambda d, x: lambda y: y + torch.randn_like(y),
    lambda d, x: lambda y: y * torch.rand_like(y),
    lambda d, x: lambda y: F.dropout(y, 0.3),
    lambda d, x: lambda y: y + torch.rand(y.shape[-1]),
    lambda d, x: lambda y: torch.bernoulli(y.sigmoid()),
    lambda d, x: lambda y: y * torch.randint(0, 3, (y.shape[0], *[1] * (y.ndim - 1))),
    lambda d, x: lambda y: y[..., torch.randperm(y.shape[-1])],
    lambda d, x: lambda y: F.gumbel_softmax(y, dim=-1),
    lambda d, x: lambda y: y + torch.zeros_like(y).normal_(),
]
WRITES: list[Callable[[random.Random, T], Step]] = [
    lambda d, x: lambda y: _written(y, lambda z: z.mul_(2).add_(1)),
    lambda d, x: lambda y: _written(y, lambda z: z.relu_()),
    lambda d, x: lambda y: (y + 1).clamp_(0, 1).sub_(0.5),
    lambda d, x: lambda y: _written(y, _set((Ellipsis, 0), 0.0)),
    lambda d, x: lambda y: _written(y, _set((slice(None), slice(0, 1)), 1.0)),
    lambda d, x: lambda y: _written(y, _set(0, -1.0)),
    lambda d, x: lambda y: _written(y, lambda z: z[:, 0].add_(1)),
    lambda d, x: lambda y: _written(y, lambda z: z.masked_fill_(z > 0, 0.5)),
    lambda d, x: lambda y: _written(y, lambda z: z.transpose(0, 1).mul_(2)),
    lambda d, x: lambda y: _written(y, lambda z: z.zero_()),
    lambda d, x: lambda y: _written(y, lambda z: z.copy_(z * 2)),
]
SHAPES: list[Callable[[random.Random, T], Step]] = [
    lambda d, x: partial(torch.permute, dims=(0, *d.sample(range(1, x.ndim), x.ndim - 1))),
    lambda d, x: partial(torch.transpose, dim0=_dim(d, x), dim1=_dim(d, x)),
    lambda d, x: partial(torch.flatten, start_dim=d.randint(0, 2)),
    lambda d, x: lambda y: y.reshape(y.shape[0], -1, 2),
    lambda d, x: lambda y: y.view(-1, y.shape[-1]),
    lambda d, x: partial(torch.unsqueeze, dim=_dim(d, x)),
    lambda d, x: torch.squeeze,
    lambda d, x: partial(torch.flip, dims=(_dim(d, x),)),
    lambda d, x: partial(torch.roll, shifts=1, dims=_dim(d, x)),
    lambda d, x: partial(torch.select, dim=_dim(d, x), index=-1),
    lambda d, x: lambda y: y[:, ::2],
    lambda d, x: lambda y: y[..., 1:],
    lambda d, x: lambda y: y[1:],
    lambda d, x: lambda y: y[:0],
    lambda d, x: partial(lambda y, dim: torch.cat(y.chunk(2, dim)[::-1], dim), dim=_dim(d, x)),
    lambda d, x: partial(lambda y, dim: y.unbind(dim)[0], dim=_dim(d, x)),
    lambda d, x: partial(F.pad, pad=(d.randint(-1, 2), d.randint(0, 2)), value=0.5),
    lambda d, x: partial(F.pad, pad=(1, 1), mode=d.choice(["reflect", "circular", "replicate"])),
    lambda d, x: lambda y: y.repeat(1, *[2] * (y.ndim - 1)),
    lambda d, x: lambda y: y.unfold(-1, 2, 1),
    lambda d, x: lambda y: y.mean(1, keepdim=True).expand(y.shape),
    lambda d, x: lambda y: F.interpolate(y, scale_factor=1.5, mode="nearest"),
    lambda d, x: lambda y: y.detach(),
]
CREATED: list[Callable[[random.Random, T], Step]] = [
    lambda d, x: lambda y: y + torch.arange(y.shape[-1]),
    lambda d, x: lambda y: torch.zeros_like(y),
    lambda d, x: lambda y: torch.ones(3, 2),
    lambda d, x: lambda y: y * torch.linspace(0, 1, y.shape[-1]),
    lambda d, x: lambda y: y.new_full((2, 2), 0.5),
    lambda d, x: lambda y: y @ torch.eye(y.shape[-1], dtype=y.dtype),
    lambda d, x: lambda y: torch.tensor(2.0),
]
BINARY: list[Step] = [
    torch.add, torch.mul, torch.sub, torch.maximum, torch.matmul, torch.true_divide, torch.eq,
    lambda a, b: torch.where(a > b, a, b), lambda a, b: torch.cat([a, b], 1),
    lambda a, b: torch.stack([a, b]), lambda a, b: torch.einsum("n...,n...->n", a, b),
    lambda a, b: F.mse_loss(a, b), lambda a, b: a.clone().add_(b), lambda a, b: torch.lt(a, b),
    lambda a, b: F.linear(a, b), lambda a, b: torch.outer(a.flatten()[:5], b.flatten()[:5]),
]  # fmt: skip
FAMILIES = (MODULES, MODULES, UNARY, CASTS, MASKS, INDICES, REDUCTIONS, DRAWS, WRITES, SHAPES,
            SHAPES, CREATED)  # fmt: skip


class Program(nn.Module):
    """Steps that read earlier values; returns some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ModuleList()
        self.steps: list[tuple[Step | int, tuple[int, ...]]] = []  # a number is a module's
        self.outputs: tuple[int, ...] = ()

    def forward(self, a: T, b: T | None = None) -> tuple[T, ...]:
        values: list[Any] = [a] if b is None else [a, b]
        for step, operands in self.steps:
            values.append(self.call(step, [values[i] for i in operands]))
        return tuple(values[i] for i in self.outputs)

    def call(self, step: Step | int, operands: list[T]) -> Any:
        function = self.weights[step] if isinstance(step, int) else step
        return function(*operands)


def draw_program(seed: int) -> tuple[nn.Module, tuple[T, ...]]:
    """A random program of a few steps and inputs for it."""
    draw = random.Random(seed)
    seed_everything(seed)
    dtype = draw.choice(DTYPES)
    shape = (draw.randint(1, 5), draw.choice([1, 2, 3, 4, 6]))
    shape += tuple(draw.randint(2, 7) for _ in range(draw.choice([0, 1, 2, 2, 2, 3])))
    inputs = [torch.randn(shape, dtype=dtype)]
    if draw.random() < 0.3:
        like = draw.choice([shape, shape[:1], (shape[0], 1, 1)])
        number = torch.randint(0, 3, like)
        inputs.append(number if draw.random() < 0.4 else number.to(dtype))
    program, values = Program(), list(inputs)
    for _ in range(draw.randint(1, 7)):
        _extend(program, values, draw, dtype)
    made = range(len(inputs), len(values))
    last = len(values) - 1
    program.outputs = tuple(sorted({last, *draw.sample(made, min(len(made), draw.randint(0, 2)))}))
    return program, tuple(inputs)


def _extend(program: Program, values: list[Any], draw: random.Random, dtype: torch.dtype) -> None:
    """One more step, the first drawn one that torch accepts."""
    for _ in range(50):
        newest = len(values) - 1 if draw.random() < 0.8 else draw.randrange(len(values))
        operands, x = (newest,), values[newest]
        try:
            if draw.random() < 0.2:
                operands = (newest, draw.randrange(len(values)))
                step: Step | int = draw.choice(BINARY)
            else:
                step = draw.choice(draw.choice(FAMILIES))(draw, x)
            if isinstance(step, nn.Module):
                program.weights.append(step.to(dtype))
                step = len(program.weights) - 1
            with torch.no_grad():
                y = program.call(step, [values[i].clone() for i in operands])
        except (
            RuntimeError,
            ValueError,
            IndexError,
            TypeError,
            NotImplementedError,
            AttributeError,
        ):
            continue
        if isinstance(y, T) and y.numel() <= LARGEST:
            program.steps.append((step, operands))
            values.append(y)
            return


def groups() -> list[str]:
    return [str(number) for number in range(1000)]


def most(group: str) -> int:
    return PER_GROUP


def cases(group: str) -> list[Case]:
    """Twenty programs; the group is the first digits of their seeds."""
    found = []
    for index in range(PER_GROUP):
        name = f"programs:{group}:{index}"
        found.append(Case(name, partial(draw_program, number(name)), num_steps=2))
    return found

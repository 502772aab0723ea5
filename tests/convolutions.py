"""Random convolutions, and what they should give: sums over taps in float64, nothing clever.

Run as a script, it checks every kernel on a few of them, those of norms and pools too:
AddressSanitizer watches that. Shapes are others in every run; SHARDWISE_TEST_SEED repeats one.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from math import prod
from unittest import mock

import torch

from images import check_norm, check_pool
from shardwise.kernels import native
from shardwise.kernels.conv_shape import ConvShape
from shardwise.kernels.dispatch import INEXACT, KERNELS
from shardwise.kernels.native import DIRECTIONS, DONE, Library, library

SEED = int(os.environ.get("SHARDWISE_TEST_SEED") or time.time())

CASES = [(kernel, direction) for direction in DIRECTIONS for kernel in KERNELS[direction]]
FLAT = ("direct", "reindex")  # of images only
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}
# Winograd's intermediate sums are larger than its results, by the norms of its transforms.
WINOGRAD_GROWTH = {"winograd2": 2.0, "winograd4": 8.0}


def _loads(isa: str) -> bool:
    with suppress(OSError):
        return bool(native.load(native.FOLDER / f"libshardwise_{isa}.so"))
    return False


ISAS = [isa for isa in native.library_names() if _loads(isa)]  # best first


@contextmanager
def chosen(**variables: str) -> Iterator[None]:
    """Inside, the library is the one that these variables of the environment choose."""
    with mock.patch.dict(os.environ, variables):
        library.cache_clear()
        try:
            yield
        finally:
            library.cache_clear()


def random_shape(rng: random.Random, kernel: str) -> ConvShape:
    """A small convolution that the kernel takes, with edges of every kind."""
    while True:
        shape = _any_shape(rng, kernel)
        if min(shape.out) > 0:
            return shape


def _any_shape(rng: random.Random, kernel: str) -> ConvShape:
    num_dims = 2 if kernel in FLAT else rng.choice([1, 2, 2, 3, 3])
    if kernel in INEXACT:
        num_dims = max(2, num_dims)
    groups = rng.choice([1, 1, 1, 2, 3])
    c, f = rng.choice([1, 2, 3, 5, 8, 16, 17, 33]), rng.choice([1, 2, 3, 7, 16, 17, 40, 65])
    size = rng.choice([1, 1, 2, 3, 3, 5])
    window = [rng.choice([size, size, 1, 3]) for _ in range(num_dims)]
    stride = rng.choice([1, 1, 2, 3])
    strides = [rng.choice([stride, stride, 1, 2]) for _ in range(num_dims)]
    dilation = [rng.choice([1, 1, 2]) for _ in range(num_dims)]
    if kernel in INEXACT:
        groups, strides, dilation = 1, [1] * num_dims, [1] * num_dims
        window = [*window[:-2], 3, 3]
    if kernel == "depthwise":
        groups, c, f = rng.choice([1, 5, 16, 20, 33]), 1, 1
    if kernel == "direct":
        groups, c = 1, rng.randint(1, 4)
    sizes = (rng.randint(1, 19 if num_dims < 3 else 9) for _ in range(num_dims))
    return ConvShape(
        (rng.choice([1, 2, 3, 5]), groups * c, *sizes),
        (groups * f, c, *window),
        tuple(strides),
        tuple(rng.randint(0, 3) for _ in range(num_dims)),
        tuple(dilation),
        groups,
        rng.random() < 0.5,
        rng.random() < 0.5,
        "float32" if kernel in INEXACT else rng.choice(["float32", "float64"]),
    )


def reference(shape: ConvShape, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y in float64: one strided slice of the padded x for each tap."""
    (n, f, *sizes), groups = shape.out, shape.groups
    around = [pad for pad in reversed(shape.padding) for _ in range(2)]
    padded = torch.nn.functional.pad(x.double(), around)
    w_GFC = w.double().reshape(groups, f // groups, *w.shape[1:])
    y = x.new_zeros((n, groups, f // groups, *sizes), dtype=torch.float64)
    for tap in product(*map(range, w.shape[2:])):
        along = zip(tap, sizes, shape.stride, shape.dilation, strict=True)
        where = [slice(i * dil, i * dil + (k - 1) * step + 1, step) for i, k, step, dil in along]
        taken = padded[(..., *where)].reshape(n, groups, -1, *sizes)
        y = y + torch.einsum("gfc,ngc...->ngf...", w_GFC[(..., *tap)], taken)
    return y.reshape(shape.out)


def expected(shape: ConvShape, direction: str, x, w, dy) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """The float64 result of one direction; the gradients are those of `reference`."""
    x, w = (t.double().detach().requires_grad_() for t in (x, w))
    y = reference(shape, x, w)
    if direction == "fwd":
        return y.detach()
    return torch.autograd.grad(y, x if direction == "dx" else w, dy.double())[0]


def random_tensor(shape: tuple[int, ...], dtype: str, last: bool) -> torch.Tensor:
    """Dense in the layout asked for, also where a size of 1 hides it."""
    values = torch.randn(shape, dtype=getattr(torch, dtype))
    return values.movedim(1, -1).contiguous().movedim(-1, 1) if last else values


def worst_excess(
    lib: Library, kernel: str, direction: str, shape: ConvShape, threads: int
) -> float:
    """The largest error, in units of what rounding may cause; 1 is the limit.

    The output is poisoned with NaN, so that an element that is not written is an infinite error;
    so is the workspace, by the same convolution of NaNs.
    """
    relu, biased = random.Random(shape.key).random() < 0.3, direction == "fwd"
    x = random_tensor(shape.x, shape.dtype, shape.last)
    w = random_tensor(shape.w, shape.dtype, shape.filter_last)
    dy = random_tensor(shape.out, shape.dtype, shape.last)
    bias = torch.randn(shape.w[0], dtype=x.dtype) if biased else None
    truth = expected(shape, direction, x, w, dy)
    scale = expected(shape, direction, x.abs(), w.abs(), dy.abs())
    if bias is not None:
        added = bias.double().view(-1, *[1] * shape.num_dims)
        truth, scale = truth + added, scale + added.abs()
        truth = truth.relu() if relu else truth
    last = shape.filter_last if direction == "dw" else shape.last
    out = torch.full_like(random_tensor(tuple(truth.shape), shape.dtype, last), float("nan"))
    problem = shape.problem(threads, relu and biased)
    poison = [None if t is None else torch.full_like(t, float("nan")) for t in (x, w, dy, bias)]
    assert lib.run(kernel, direction, problem, tuple(poison), out) == DONE
    out.fill_(float("nan"))
    assert lib.run(kernel, direction, problem, (x, w, dy, bias), out) == DONE
    error = (out.double() - truth).abs()
    limit = rounding(shape, direction)
    if kernel in INEXACT:
        worst = error.max() / (limit * WINOGRAD_GROWTH[kernel] * scale.max())
    else:
        worst = (error / (limit * scale + 1e-300)).max()
    return float("inf") if worst.isnan() else worst.item()


def rounding(shape: ConvShape, direction: str) -> float:
    """The error that a plain sum may have, as a part of the sum of its terms' sizes."""
    return EPSILON[shape.dtype] * (_num_terms(shape, direction) ** 0.5 + 4)


def _num_terms(shape: ConvShape, direction: str) -> int:
    """How many products are added for one element."""
    (n, f, *sizes), (_, c, *window) = shape.out, shape.w
    of = {"fwd": (c, *window), "dx": (f // shape.groups, *window), "dw": (n, *sizes)}
    return prod(of[direction])


def check(kernel: str, direction: str, count: int) -> float:
    """The worst excess over so many random shapes, each on 1 to 3 threads."""
    lib, rng, done, worst = library(), random.Random(f"{kernel} {direction} {SEED}"), 0, 0.0
    assert lib is not None
    torch.manual_seed(SEED)
    while done < count:
        shape, threads = random_shape(rng, kernel), rng.randint(1, 3)
        problem = shape.problem(threads)
        if lib.workspace(kernel, direction, shape.dtype == "float64", problem) < 0:
            continue
        excess = worst_excess(lib, kernel, direction, shape, threads)
        where = f"{kernel} {direction}, {threads} threads, {shape}"
        assert excess <= 1, f"SHARDWISE_TEST_SEED={SEED}: {where}: {excess:.3g}"
        worst, done = max(worst, excess), done + 1
    return worst


if __name__ == "__main__":
    for kernel, direction in CASES:
        print(kernel, direction, f"{check(kernel, direction, int(sys.argv[1])):.2f}", flush=True)
    rng = random.Random(SEED)
    for _ in range(8 * int(sys.argv[1])):
        check_norm(rng, relu=rng.random() < 0.5, affine=rng.random() < 0.5)
        check_pool(rng)

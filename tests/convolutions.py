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
from unittest import mock

import torch

from images import check_norm, check_pool
from shardwise.kernels import native
from shardwise.kernels.conv_shape import ConvShape
from shardwise.kernels.dispatch import INEXACT, KERNELS
from shardwise.kernels.native import DIRECTIONS, DONE, Library, library

SEED = int(os.environ.get("SHARDWISE_TEST_SEED") or time.time())

CASES = [(kernel, direction) for direction in DIRECTIONS for kernel in KERNELS[direction]]
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
    groups = rng.choice([1, 1, 1, 2, 3])
    c, f = rng.choice([1, 2, 3, 5, 8, 16, 17, 33]), rng.choice([1, 2, 3, 7, 16, 17, 40, 65])
    h, w = rng.randint(1, 19), rng.randint(1, 19)
    r = rng.choice([1, 1, 2, 3, 3, 5])
    s = rng.choice([r, r, 1, 3])
    stride = rng.choice([1, 1, 2, 3])
    strides = (stride, rng.choice([stride, 1, 2]))
    dilation = (rng.choice([1, 1, 2]), rng.choice([1, 1, 2]))
    if kernel in INEXACT:
        groups, r, s, strides, dilation = 1, 3, 3, (1, 1), (1, 1)
    if kernel == "depthwise":
        groups, c, f = rng.choice([1, 5, 16, 20, 33]), 1, 1
    if kernel == "direct":
        groups, c = 1, rng.randint(1, 4)
    return ConvShape(
        (rng.choice([1, 2, 3, 5]), groups * c, h, w),
        (groups * f, c, r, s),
        strides,
        (rng.randint(0, 3), rng.randint(0, 3)),
        dilation,
        groups,
        rng.random() < 0.5,
        rng.random() < 0.5,
        "float32" if kernel in INEXACT else rng.choice(["float32", "float64"]),
    )


def reference(shape: ConvShape, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y in float64: one strided slice of the padded x for each tap."""
    (n, f, p, q), groups = shape.out, shape.groups
    (sh, sw), (ph, pw), (dh, dw) = shape.stride, shape.padding, shape.dilation
    padded = torch.nn.functional.pad(x.double(), (pw, pw, ph, ph))
    w_GFCRS = w.double().reshape(groups, f // groups, *w.shape[1:])
    y = x.new_zeros((n, groups, f // groups, p, q), dtype=torch.float64)
    for r in range(w.shape[2]):
        for s in range(w.shape[3]):
            rows = slice(r * dh, r * dh + (p - 1) * sh + 1, sh)
            columns = slice(s * dw, s * dw + (q - 1) * sw + 1, sw)
            taken = padded[:, :, rows, columns].reshape(n, groups, -1, p, q)
            y = y + torch.einsum("gfc,ngcpq->ngfpq", w_GFCRS[:, :, :, r, s], taken)
    return y.reshape(n, f, p, q)


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
    return values.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if last else values


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
        truth, scale = (
            t + b.double().view(-1, 1, 1) for t, b in ((truth, bias), (scale, bias.abs()))
        )
        truth = truth.relu() if relu else truth
    last = shape.filter_last if direction == "dw" else shape.last
    out = torch.full_like(random_tensor(tuple(truth.shape), shape.dtype, last), float("nan"))
    problem = shape.problem(threads, relu and biased)
    poison = [None if t is None else torch.full_like(t, float("nan")) for t in (x, w, dy, bias)]
    assert lib.run(kernel, direction, problem, tuple(poison), out) == DONE
    out.fill_(float("nan"))
    assert lib.run(kernel, direction, problem, (x, w, dy, bias), out) == DONE
    error = (out.double() - truth).abs()
    limit = EPSILON[shape.dtype] * (_num_terms(shape, direction) ** 0.5 + 4)
    if kernel in INEXACT:
        worst = error.max() / (limit * WINOGRAD_GROWTH[kernel] * scale.max())
    else:
        worst = (error / (limit * scale + 1e-300)).max()
    return float("inf") if worst.isnan() else worst.item()


def _num_terms(shape: ConvShape, direction: str) -> int:
    """How many products are added for one element."""
    (n, f, p, q), (_, c, r, s) = shape.out, shape.w
    return {"fwd": c * r * s, "dx": f // shape.groups * r * s, "dw": n * p * q}[direction]


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

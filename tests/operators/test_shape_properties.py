"""Random shapes, dims and plans for the general classes of operators: all equal one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_properties import check, deep, quick
from torch import Tensor, nn
from torch.nn import functional

from shape_cases import Apply, whole_numbers

Case = tuple[nn.Module, tuple[int, ...]]
sizes = st.integers(2, 7)


@st.composite
def shapes(draw: Any, least: int = 1, most: int = 5) -> tuple[int, ...]:
    return tuple(draw(sizes) for _ in range(draw(st.integers(least, most))))


@st.composite
def pieces(draw: Any) -> Case:
    """Joined, cut, mirrored, shifted around and written into."""
    shape = draw(shapes())
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    size = shape[dim]
    by, start = draw(st.integers(-2 * size, 2 * size)), draw(st.integers(0, size - 1))
    step, other = draw(st.integers(1, 3)), draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["roll", "flip", "slice", "cat", "write", "stack", "repeat"]))
    place = (slice(None),) * (dim % len(shape)) + (slice(start, None, step),)

    def move(x: Tensor) -> Tensor:
        if kind == "roll":
            return x.roll((by, 1), (dim, other)) * x + x.roll(by)
        if kind == "flip":
            return x.flip(dim) * x
        if kind == "slice":
            return x[place].tanh()
        if kind == "cat":
            return torch.cat([x, x[place], x.flip(dim)], dim).sin()
        if kind == "stack":
            return torch.stack([x, x.exp()], dim).unbind(dim)[1] * x.unsqueeze(dim).squeeze(dim)
        if kind == "repeat":
            return x.repeat_interleave(step, dim) * x.repeat(
                [step if d == dim % x.ndim else 1 for d in range(x.ndim)]
            )
        y = x * 2
        y[place] = x[place].square()
        y.select(dim, start).mul_(3)
        return y

    return Apply(move), shape


@st.composite
def pads(draw: Any) -> Case:
    num_dims = draw(st.integers(1, 3))
    shape = (draw(sizes), draw(sizes), *(draw(st.integers(4, 7)) for _ in range(num_dims)))
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    pad = [draw(st.integers(-1, 3)) for _ in range(2 * num_dims)]
    if mode == "constant":
        pad += [draw(st.integers(-1, 2)) for _ in range(draw(st.sampled_from([0, 2, 4])))]
    return Apply(lambda x: functional.pad(x, pad, mode).square()), shape


ALONG = {
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: x.cumprod(d),
    "cummax": lambda x, d: x.cummax(d).values,
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "sort": lambda x, d: x.sort(d)[0] + x.sort(d)[1],
    "topk": lambda x, d: x.topk(2, d)[0] * x.topk(2, d)[1],
    "argsort": lambda x, d: x.argsort(d, descending=True) * 1.0,
    "softmax": lambda x, d: x.softmax(d),
    "max": lambda x, d: x.max(d)[0] + x.max(d)[1],
    "min": lambda x, d: x.min(d, True)[0] * x.min(d, True)[1],
    "argmax": lambda x, d: x.argmax(d, keepdim=True) + x,
    "prod": lambda x, d: x.prod(d),
    "logsumexp": lambda x, d: x.logsumexp(d, True),
    "any": lambda x, d: (x > 1).any(d) * 2.0 + (x > 0).all(d),
    "median": lambda x, d: x.median(d)[0],
    "fft": lambda x, d: torch.fft.irfft(torch.fft.rfft(x, dim=d) ** 2, n=x.shape[d], dim=d),
    "diff": lambda x, d: x.diff(dim=d),
    "sum": lambda x, d: x.sum(d) ** 2,
    "mean": lambda x, d: x.mean(d, True) ** 2,
    "sum of all": lambda x, d: x.sum() * x + x.mean(),
    "amax": lambda x, d: x.amax(d),
    "gather": lambda x, d: x.gather(d, whole_numbers(x, x.shape[d])),
    "scatter": lambda x, d: x.scatter_add(d, whole_numbers(x, x.shape[d]), x.exp()),
    "select": lambda x, d: x.index_select(d, torch.tensor([1, 0, 1])) ** 2,
    "add": lambda x, d: x.index_add(d, torch.tensor([1, 0]), x.narrow(d, 0, 2).exp()),
    "unfold": lambda x, d: x.unfold(d, 2, 1).exp(),
}


@st.composite
def lines(draw: Any) -> Case:
    shape = draw(shapes())
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    function = ALONG[draw(st.sampled_from(sorted(ALONG)))]
    return Apply(lambda x: function(x, dim)), shape


@st.composite
def places(draw: Any) -> Case:
    """x[..., places, ...], read and written, with places in one or two dimensions."""
    shape = draw(shapes(2, 4))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True))
    found = draw(st.sampled_from([(), (3,), (2, 1), (1, 3)]))
    rows = {
        dim: torch.arange(6)[: max(1, int(torch.tensor(found).prod()))] % shape[dim] for dim in dims
    }
    index = tuple(rows[d].reshape(found) if d in dims else slice(None) for d in range(len(shape)))
    writes = draw(st.booleans())

    def pick(x: Tensor) -> Tensor:
        if not writes:
            return x[index].exp()
        y = x * 2
        y[index] += x[index].mean()
        return y

    return Apply(pick), shape


@st.composite
def resizings(draw: Any) -> Case:
    num_dims = draw(st.sampled_from([1, 2, 2, 3]))
    linear = ("linear", "bilinear", "trilinear")[num_dims - 1]
    modes = ["nearest", "nearest-exact", linear, linear, *(["bicubic"] if num_dims == 2 else [])]
    options: dict[str, Any] = {"mode": draw(st.sampled_from(modes))}
    if "nearest" not in options["mode"]:
        options["align_corners"] = draw(st.booleans())
        smooth = num_dims == 2 and draw(st.booleans())
        options |= {"antialias": True, "align_corners": False} if smooth else {}
    if draw(st.booleans()):
        options["size"] = tuple(draw(st.integers(1, 12)) for _ in range(num_dims))
    else:
        options["scale_factor"] = tuple(draw(st.floats(0.3, 2.5)) for _ in range(num_dims))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    shape += tuple(draw(st.integers(4, 11)) for _ in range(num_dims))
    return Apply(lambda x: functional.interpolate(x, **options)), shape


@st.composite
def patches(draw: Any) -> Case:
    number = st.integers(1, 3)
    kernel, stride, dilation = ((draw(number), draw(number)) for _ in range(3))
    padding = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    shape = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(7, 11)),
        draw(st.integers(7, 9)),
    )
    how = {"dilation": dilation, "padding": padding, "stride": stride}

    def fold(x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.unfold(x, kernel, **how).square()
        return y, functional.fold(y, x.shape[2:], kernel, **how)

    return Apply(fold), shape


@st.composite
def maxima(draw: Any) -> Case:
    """Pooling with places, with -inf among the values, and back."""
    num_dims = draw(st.sampled_from([2, 2, 3]))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(num_dims))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(num_dims))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    options = {"dilation": draw(st.integers(1, 2)), "ceil_mode": draw(st.booleans())}
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    shape += tuple(draw(st.integers(6, 9)) for _ in range(num_dims))
    pool = {2: functional.max_pool2d, 3: functional.max_pool3d}[num_dims]

    def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
        gone = x.masked_fill(x.detach() < 0.7, -torch.inf)
        found = pool(gone, kernel, stride, padding, return_indices=True, **options)[1]
        return pool(x, kernel, stride, padding, **options), found

    return Apply(pooled), shape


@st.composite
def triangles(draw: Any) -> Case:
    shape, offset = draw(shapes(2, 4)), draw(st.integers(-3, 3))
    a, b = draw(st.permutations(range(len(shape))))[:2]

    def cut(x: Tensor) -> tuple[Tensor, ...]:
        size = x.diagonal(max(min(offset, 1), -1), a, b)
        return (
            x.tril(offset) * x,
            x.triu(offset).exp(),
            size.square(),
            x.rot90(offset, (a, b)).sin(),
        )

    return Apply(cut), shape


ALL = {
    "pieces": pieces(),
    "pads": pads(),
    "lines": lines(),
    "places": places(),
    "resizing": resizings(),
    "patches": patches(),
    "maxima": maxima(),
    "triangles": triangles(),
}


@pytest.mark.parametrize("kind", ALL)
def test_random_operators_under_random_plans_equal_one_device(kind: str) -> None:
    given(ALL[kind], st.integers(0, 10_000))(quick(lambda case, seed: check(*case, seed)))()


@pytest.mark.deep
@pytest.mark.parametrize("kind", ALL)
def test_many_more_random_operators_equal_one_device(kind: str) -> None:
    given(ALL[kind], st.integers(0, 10_000))(deep(lambda case, seed: check(*case, seed)))()

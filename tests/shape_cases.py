"""Small modules of operators that move, pick, reduce, resize or draw, with uneven sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Apply(nn.Module):
    """A function of a tensor, and perhaps of parameters."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.weights)


def whole_numbers(x: Tensor, below: int) -> Tensor:
    """Whole numbers from nought, which have no gradient."""
    return (x.detach() * 7).long() % below


# -- pointwise -------------------------------------------------------------------------------------


def special(x: Tensor) -> Tensor:
    p = x.abs() + 0.5
    y = torch.special.xlog1py(x, p) + torch.special.entr(p) + torch.special.i0e(x)
    y = y + torch.lgamma(p) + torch.polygamma(1, p) + torch.special.ndtr(x) + torch.sinc(x)
    y = y + torch.hypot(x, p) + torch.logaddexp(x, p) + torch.copysign(p, x) + p.xlogy(p)
    return y + torch.special.expit(x) + torch.fmax(x, 0.1 * p) + torch.deg2rad(x).exp2()


def of_bits(x: Tensor) -> Tensor:
    n = whole_numbers(x, 9)
    m = (n << 2) | (n >> 1) ^ (n & 5)
    mantissa, exponent = torch.frexp(x.detach())
    return x * (m.gcd(n + 1) - torch.bitwise_not(n)) + mantissa * exponent + torch.signbit(x)


def clamped(x: Tensor) -> Tensor:
    low = x.mean((2, 3), keepdim=True) - 0.4
    y = torch.clamp(x, low, low + 0.9).lerp(x, 0.3) + torch.addcmul(x, low, x, value=0.5)
    y = y.masked_fill(x > 1, 0.5).where(x < 0.5, low) + torch.addcdiv(x, low, x.exp())
    return y + torch.isclose(x, y).to(x.dtype) + x.clip(-1).nan_to_num()


def of_complex(x: Tensor) -> Tensor:
    z = torch.complex(x, x.roll(1, 3))
    pairs = torch.view_as_real(z * z.conj() * torch.polar(x.exp(), x))
    y = torch.view_as_complex(pairs.contiguous()) * z
    return y.real + y.imag * z.abs() + z.angle()


def in_place(x: Tensor) -> Tensor:
    y = x * 1
    y.clamp_(-1, 1).mul_(2).lerp_(x, 0.2).masked_fill_(x > 1, 0.5).atan2_(x.exp())
    y.add_(x).copysign_(x.detach())
    return y


# -- moving ----------------------------------------------------------------------------------------


def weather(x: Tensor) -> Tensor:
    """Longitudes go round; beyond a pole is the other half of the circle."""
    x = functional.pad(x, (2, 3, 0, 0), mode="circular")
    north, south = (row.roll(x.shape[3] // 2, 3).flip(2) for row in (x[:, :, :2], x[:, :, -2:]))
    return torch.cat([north, x, south], 2)


def padded(x: Tensor, w: Tensor) -> Tensor:
    y = functional.pad(x, (1, 0, -1, 2), mode="replicate")
    y = functional.pad(y, (2, 1, 1, 2), mode="reflect") + functional.pad(w, (-1, 3, 2, 0))
    z = functional.pad(x, (0, 0, 0, 0, 1, 2, 1, 0), value=0.5)
    z = functional.pad(z, (-1, 2, 1, -1), mode="circular")
    return y.sum() * z + functional.pad(w, (1, 0), mode="circular").mean()


def joined(x: Tensor) -> Tensor:
    a, b = x.tensor_split(2, 2)
    c, *_ = x.split([3, 4, 1], 1)
    y = torch.stack([x, x.flip(2), x.rot90(2, (2, 3))], 2).unbind(2)[1]
    y = y + torch.hstack([x[:, 5:], x[:, :5]]) + x.narrow(3, 1, 3).mean()
    return y * torch.vstack([a.amax(2), b.amin(2)])[: x.shape[0], :, None] + c.sum(1, keepdim=True)


def repeated(x: Tensor) -> Tensor:
    y = x.repeat(1, 2, 2, 3) * x.tile(2, 3).repeat(1, 2, 1, 1)
    z = x.repeat_interleave(3, 2).diff(dim=2) + x.mean((1, 2, 3), True).expand_as(x)[:, :1, :1]
    return y.movedim(1, 3).swapaxes(0, 1).sum((1, 2)) * z.mean()


def rolled(x: Tensor) -> Tensor:
    y = x.roll((2, -1, 7), (2, 3, 1)) + x.roll(1, 0)
    return y * x.rot90(1, (2, 3)).transpose(2, 3) + y.flip((0, 1, 3))


def triangles(x: Tensor) -> Tensor:
    y = x.tril(1) * x + x.triu(-2)
    diagonal = x.diagonal(1, 2, 3) * x.diagonal(-1, 3, 1).sum(-1, keepdim=True)[:, :1].mean()
    y = y + x[0, 0].trace()
    return y.sum(1) + torch.diag_embed(diagonal.mean(1)).sum((1, 2))[:, None, None]


def written(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3] = x[:, :2]
    y[:, :, 2] = y[:, :, 0] * 3
    y[..., ::2] += 1
    y[:, [0, 5], 1:] = x[:, 2:4, :-1]
    return y.index_fill(1, torch.tensor([6]), 0.5)


def written_by_masks(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
    """The same numbers wherever a mask is true, of all dimensions or some."""
    y, z = x * 2, x.permute(0, 2, 3, 1) * 3
    y[x > 0.3] = 0.5
    y[:, 0][x[:, 0] < 0] = w.sum()
    y[:, x[0, :, 0, 0] > 0] = w
    z[x[:, 1] > 0] = row
    return y + z.permute(0, 3, 1, 2)


def windows(x: Tensor) -> Tensor:
    y = x.unfold(2, 3, 2).unfold(3, 2, 1).mean(-1)
    patches = functional.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1))
    back = functional.fold(patches * patches, (5, 4), (3, 2), (1, 2), (1, 0), (2, 1))
    one = functional.fold(functional.unfold(x[0], 2, stride=3), (5, 4), 2, stride=3)
    return y.sum((1, 2, 3, 4))[:, None, None, None] * back + one


def pixels(x: Tensor) -> Tensor:
    y = functional.channel_shuffle(functional.pixel_unshuffle(x, 2), 4)
    return functional.pixel_shuffle(y[:, None] ** 2, 2)[:, 0] + x


# -- along dimensions ------------------------------------------------------------------------------


def running(x: Tensor) -> Tensor:
    y = x.cumsum(1) + x.cumprod(2) * x.logcumsumexp(3) + x.cummax(2)[0] - x.cummin(1).values
    return y * functional.glu(torch.cat([x, y], 2), 2) + x.cumsum(0)


def ordered(x: Tensor) -> Tensor:
    values, places = x.sort(1)
    best, where = x.topk(3, 2)
    y = values * places + x.argsort(3).to(x.dtype) + x.median(3, keepdim=True)[0]
    return y[:, :, :3] * best + where + x.kthvalue(2, 1, keepdim=True).values[:, :, :3]


def extremes(x: Tensor) -> Tensor:
    high, where = x.max(1, keepdim=True)
    low, there = x.min(2)
    y = x * high + where + (low * there)[:, :, None] + x.argmax(3, keepdim=True)
    y = (
        y
        + x.prod(2, keepdim=True)
        + x.logsumexp((1, 3), keepdim=True)
        + x.aminmax(dim=1)[0][:, None]
    )
    return (
        y
        + (x > 0).any(1)[:, None]
        - (x > 0).all(3, keepdim=True).to(x.dtype)
        + x.argmin(1)[:, None]
    )


def sums(x: Tensor) -> tuple[Tensor, ...]:
    y = x.float().sum(1, dtype=torch.float64) + x.mean((1, 2), dtype=torch.float64)[:, None]
    n = whole_numbers(x, 5)
    return y, x.sum(), x.mean((0, 1)), n.sum((0, 2, 3)), n.sum(), x.sum((0, 1), keepdim=True)


def transformed(x: Tensor) -> Tensor:
    z = torch.fft.rfft2(x)
    y = torch.fft.irfft2(z * z[:, :1], s=x.shape[2:])
    return y * torch.fft.fft(x, dim=1).abs() + torch.fft.fftshift(x, dim=(2, 3))


def looked_up(x: Tensor, table: Tensor) -> Tensor:
    index = whole_numbers(x, 4)
    y = x.gather(3, index) + x.take_along_dim(index[:, :1], 1)
    y = y + x.index_select(2, index[0, 0, 0])[:, :, :1]
    y = (
        y
        + x[:, index[0, 0, 0]][:, :1]
        + x[:, :, index[0, 0, :, :1], index[0, 0, :1]].mean((2, 3), True)
    )
    y = y + x[index[0, 0, 0] % x.shape[0], 1:, index[0, 0, 0]][:1, :1, :1, None]
    y = y.scatter_add(2, index, x) + torch.zeros_like(x).scatter(3, index, x)
    rows = functional.embedding(index[:, 0], table, padding_idx=1)
    return y + rows.permute(0, 3, 1, 2) + functional.one_hot(index[:, 0], 8).permute(0, 3, 1, 2)


def searched(x: Tensor) -> Tensor:
    edges = x.detach().sort(3)[0]
    found = torch.searchsorted(edges, x.detach().contiguous()) + torch.isin(
        whole_numbers(x, 4), torch.tensor([1, 3])
    )
    return (
        x * found
        + torch.bucketize(x.detach(), edges[0, 0, 0])
        + torch.linalg.cross(x[:, :3], x[:, 1:4], dim=1).mean()
    )


# -- resizing and pooling --------------------------------------------------------------------------


def resized(mode: str, **options: Any) -> Apply:
    return Apply(partial(functional.interpolate, mode=mode, **options))


def unpooled(x: Tensor) -> Tensor:
    y, places = functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    z, others = functional.adaptive_max_pool2d(x, (4, 3), return_indices=True)
    back = functional.max_unpool2d(y, places, 3, 2, 1, x.shape[2:])
    dilated = functional.max_pool2d(x, 2, 2, 1, 3, return_indices=True)[1]
    return back * x + (z * others).mean() + dilated.sum()


def pooled(x: Tensor) -> Tensor:
    y = functional.lp_pool2d(x.abs() + 0.1, 2.0, 3, 2)
    return (
        y
        + functional.avg_pool2d(x[0], 3, 2)[None]
        + functional.fractional_max_pool2d(
            x,
            2,
            output_size=y.shape[2:],
            _random_samples=torch.full((*x.shape[:2], 2), 0.4, dtype=x.dtype),
        )
    )


# -- random ----------------------------------------------------------------------------------------


def drawn(x: Tensor) -> Tensor:
    x = functional.alpha_dropout(x, 0.2, True) + functional.feature_alpha_dropout(x, 0.3, True)
    x = x * torch.bernoulli(torch.sigmoid(x)) + functional.rrelu(x, training=True)
    x = x + torch.normal(x.detach(), 0.2) + torch.poisson(x.detach().abs())
    x = x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.8).div_(0.8)
    x = x + functional.gumbel_softmax(x, dim=1) + functional.gumbel_softmax(x, hard=True, dim=2)
    return functional.dropout(x * 2, 0.3, inplace=True) + torch.randn_like(x) + torch.rand(4)


# -- losses ----------------------------------------------------------------------------------------


def one_row(x: Tensor) -> Tensor:
    return x.tanh().cumsum(0) * x.sort()[0].flip(0) + x.sum()


def loss(x: Tensor, weight: Tensor) -> Tensor:
    """All in one number."""
    y, p, n = x.flip(3), torch.sigmoid(x), whole_numbers(x[:, 0], 8)
    total = functional.mse_loss(x, y) + functional.l1_loss(x, y) + functional.smooth_l1_loss(x, y)
    total = (
        total
        + functional.huber_loss(x, y, delta=0.3)
        + functional.binary_cross_entropy(p, p.flip(2))
    )
    total = total + functional.binary_cross_entropy_with_logits(
        x, p, pos_weight=weight.detach()[:, None, None]
    )
    total = total + functional.kl_div(x.log_softmax(1), p, reduction="batchmean")
    chances = weight.detach().abs()
    total = total + functional.cross_entropy(x, n, chances, ignore_index=2, label_smoothing=0.1)
    total = total + functional.cross_entropy(x, n, label_smoothing=0.2, reduction="sum")
    total = total + functional.cross_entropy(x, p.softmax(1), chances, label_smoothing=0.1)
    total = total + functional.cross_entropy(x, n, reduction="none").mean((1, 2)).square().sum()
    total = (
        total
        + functional.nll_loss(x.log_softmax(1), n, ignore_index=0)
        + functional.nll_loss(x, n, chances)
    )
    flat, labels = x[:, :, 0, 0], n[:, 0, 0]
    total = (
        total
        + functional.multi_margin_loss(flat, labels)
        + functional.soft_margin_loss(x, p.detach().sign())
    )
    return total + functional.cross_entropy(flat[0], labels[0]) + functional.poisson_nll_loss(x, p)


SHAPES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "special functions": (Apply(special), (3, 8, 5, 4)),
    "bits": (Apply(of_bits), (3, 8, 5, 4)),
    "clamped": (Apply(clamped), (3, 8, 5, 4)),
    "complex": (Apply(of_complex), (3, 8, 5, 4)),
    "pointwise in place": (Apply(in_place), (3, 8, 5, 4)),
    "weather": (Apply(weather), (2, 3, 7, 10)),
    "padded": (Apply(padded, (7, 6)), (3, 8, 5, 4)),
    "joined": (Apply(joined), (3, 8, 5, 4)),
    "repeated": (Apply(repeated), (3, 8, 5, 4)),
    "rolled": (Apply(rolled), (3, 8, 5, 5)),
    "triangles": (Apply(triangles), (3, 8, 5, 6)),
    "scattered": (Apply(written), (3, 8, 5, 4)),
    "written by masks": (Apply(written_by_masks, (1,), (8,)), (3, 8, 5, 4)),
    "windows": (Apply(windows), (3, 8, 5, 4)),
    "pixels": (Apply(pixels), (3, 4, 6, 10)),
    "running": (Apply(running), (3, 8, 5, 4)),
    "ordered": (Apply(ordered), (3, 8, 5, 4)),
    "extremes along": (Apply(extremes), (3, 8, 5, 4)),
    "sums": (Apply(sums), (3, 8, 5, 4)),
    "transformed": (Apply(transformed), (3, 8, 5, 4)),
    "looked up": (Apply(looked_up, (4, 8)), (3, 8, 5, 4)),
    "searched": (Apply(searched), (3, 8, 5, 4)),
    "nearest exact": (resized("nearest-exact", size=(7, 11)), (3, 4, 5, 6)),
    "nearest down": (resized("nearest", scale_factor=0.6), (3, 4, 9, 11)),
    "linear 1d": (resized("linear", scale_factor=1.7), (3, 4, 11)),
    "bilinear down": (resized("bilinear", size=(5, 4)), (3, 4, 9, 11)),
    "bicubic": (resized("bicubic", scale_factor=(1.6, 2.3)), (3, 4, 5, 6)),
    "bicubic aligned": (resized("bicubic", size=(4, 9), align_corners=True), (3, 4, 7, 5)),
    "bilinear smooth": (resized("bilinear", size=(4, 9), antialias=True), (3, 4, 11, 7)),
    "bicubic smooth": (resized("bicubic", scale_factor=0.4, antialias=True), (3, 4, 13, 12)),
    "area": (resized("area", size=(4, 9)), (3, 4, 7, 5)),
    "unpooled": (Apply(unpooled), (3, 4, 7, 9)),
    "pooled": (Apply(pooled), (3, 4, 7, 9)),
    "drawn": (Apply(drawn), (3, 8, 5, 4)),
    "loss": (Apply(loss, (8,)), (3, 8, 5, 4)),
    "one row": (Apply(one_row), (7,)),
}

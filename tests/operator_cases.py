"""Small modules, one per operator (or way of using it), with an input shape of uneven sizes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from product_cases import ATTENTION, NORMS, PRODUCTS
from shape_cases import SHAPES


class ChannelShuffle(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class ChunkAndCat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [part * (i + 1) for i, part in enumerate(x.chunk(3, 1))]
        return torch.cat(parts[::-1], 1)


class Means(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x * x.mean((2, 3), keepdim=True)
            + x.mean(1, keepdim=True)
            + x.sum((0, 2, 3))[:, None, None]
        )


class Expand(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3), keepdim=True).expand(x.shape) - x


class Extremes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.amax((1, 2), keepdim=True) + x.mean()


class Crop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(x, (1, 2, -1, 3), value=2.0)


class Select(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x[:, 2], x[:, ::3][:, 1]
        return torch.stack([first, second], 1) + x[:, 1:3]


class RunningSum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(2) * x


class GridSample(nn.Module):
    """All modes, at positions inside and outside of the image that depend on it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = 1.3 * torch.tanh(x[:, :2].permute(0, 2, 3, 1))[:, 1:]
        found = [
            functional.grid_sample(x, grid, mode, padding, corners)
            for mode in ("bilinear", "nearest", "bicubic")
            for padding in ("zeros", "border", "reflection")
            for corners in (False, True)
        ]
        volume = functional.grid_sample(
            x[:, :, None], torch.cat([grid, grid[..., :1]], -1)[:, None], align_corners=False
        )
        return torch.stack([*found, volume[:, :, 0]]).mean(0)


class Renorm(nn.Module):
    """Has no strategy: one worker computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.renorm(self.conv(x), 2, 1, 1.5) * 2


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(8, 3, 1), nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = functional.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.up(functional.silu(self.down(scale))))


class Residual(nn.Module):
    """In-place operators on tensors that others read later."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu_(self.norm(self.conv1(x)))
        z = self.conv2(y)
        z += y
        return functional.relu(z, inplace=True) + x


class Shared(nn.Module):
    """One parameter in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(6, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.conv(x) * self.scale) * self.scale


class ChannelsLastNorm(nn.Module):
    """Layer norm and a linear layer on permuted tensors, as ConvNeXt does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.linear(self.norm(x.permute(0, 2, 3, 1))))
        return y.permute(0, 3, 1, 2)


class WeightStandardised(nn.Module):
    """A weight that is computed, not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 4, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(x, weight, None, 1, 1)


class Heads(nn.Module):
    """Two outputs, one of them used again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 6, 3), nn.Linear(6, 5), nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.stem(x)
        logits = self.a(y.mean((2, 3)))
        return {"logits": logits, "map": self.b(y), "softmax": logits.log_softmax(1)}


class FrozenStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)
        self.stem.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-1, 1, 6, dtype=torch.float64).view(6, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.stem(x) + self.shift).tanh())


class Mask(nn.Module):
    """Comparisons and whole numbers, made on fewer ranks than those that read them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = x > x.mean(1, keepdim=True)
        rank = (x * 3).to(torch.int64).clamp(-1, 1)
        return x.masked_fill(high & ~torch.isnan(x), 0.5) * rank + torch.where(high, x, rank)


class Indices(nn.Module):
    """Indices from operators that one worker computes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        best = y.argmax(1)
        chosen = functional.one_hot(best, 5).permute(0, 3, 1, 2)
        values, places = y.max(1, keepdim=True)
        return y * chosen + values * places - torch.gather(y, 1, best[:, None])


class Scalars(nn.Module):
    """Parameters and values without dimensions; the second is of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 3)
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("offset", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.scale * self.conv(x) + self.shift.exp() + self.offset
        return y / (1 + y.abs().amax()), y.square().mean() * self.scale


class Noise(nn.Module):
    """Random numbers of every kind, between layers that would notice ranks out of step."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.1 * torch.randn_like(x)
        keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.7).div_(0.7)
        x = self.norm(x * keep) + torch.rand(x.shape[2:], dtype=x.dtype)
        coin = torch.bernoulli(torch.sigmoid(x.detach()))
        x = functional.rrelu(x, training=True) * coin[:, torch.randperm(8)]
        x = functional.dropout(x * 2, 0.2, inplace=True)
        return self.drop(x) + torch.empty_like(x).uniform_(-1, 1)


class Written(nn.Module):
    """Writes into new tensors, into views, and through views of views."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros((1, 1, *x.shape[2:]))
        mask[:, :, 1:3, 1:] = 1
        mask[..., 0] += 2
        y = self.conv(x)
        top = y[:, :3]
        top.mul_(2)
        top[:, 1].add_(x[:, 0])
        y.view(x.shape[0], -1)[:, ::2].mul_(0.5)
        y[:, 4:].copy_(y[:, :4] * 0.5)
        y.transpose(2, 3)[:, :, 0] = 7.0
        return y * mask + top.sum(1, keepdim=True)


class Positions(nn.Module):
    """Constants that are made in forward, from nothing and from shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(3, dtype=x.dtype)[:, None] * torch.linspace(0.1, 1, 2)
        table = torch.cat([angles.sin(), angles.cos()], 1).flatten()[:6].to(x.dtype)
        rows = torch.arange(x.shape[2]).view(-1, 1).float()  # another type than the model
        return x * self.linear(table[None])[..., None, None] + torch.sin(rows)


class TransposedGradient(nn.Module):
    """The gradient of a norm arrives transposed: torch's kernel is wrong for one sample then."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 8, 3, 2, 1), norm, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return y + self.linear(y)


class FunctionalNorm(nn.Module):
    """Batch norm with a momentum and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.middle, self.spread, training=True, momentum=0.6)


class InfiniteGradient(nn.Module):
    """A ReLU that lets nothing pass of a gradient without bounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).sqrt().flip(3).sqrt().flip(3)


class BatchSize(nn.Module):
    """Numbers made of the batch size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 / x.shape[0]) + x.new_full((x.shape[0], 1, 1, 1), 0.5 * x.shape[0])


OPERATORS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv": (nn.Conv2d(6, 8, 3, padding=1), (5, 6, 11, 9)),
    "conv stride 2": (nn.Conv2d(6, 9, 3, 2, padding=1), (5, 6, 11, 9)),
    "conv dilated": (nn.Conv2d(6, 9, 3, 1, 2, 2), (2, 6, 11, 9)),
    "conv even kernel": (nn.Conv2d(5, 7, (4, 2), (3, 1), (1, 0)), (3, 5, 13, 7)),
    "conv stride over kernel": (nn.Conv2d(5, 7, 2, 3), (3, 5, 13, 10)),
    "conv groups": (nn.Conv2d(6, 9, 3, 1, 1, groups=3), (2, 6, 11, 9)),
    "conv depthwise": (nn.Conv2d(6, 12, 3, 1, 1, groups=6), (2, 6, 11, 9)),
    "conv same": (nn.Conv2d(6, 6, 4, padding="same"), (2, 6, 11, 9)),
    "conv circular": (nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular"), (2, 6, 11, 9)),
    "conv reflect": (nn.Conv2d(6, 6, 5, padding=2, padding_mode="reflect"), (2, 6, 11, 9)),
    "conv replicate": (nn.Conv2d(6, 6, 5, padding=2, padding_mode="replicate"), (2, 6, 11, 9)),
    "conv 1d": (nn.Conv1d(5, 4, 3, 2, 1), (3, 5, 17)),
    "conv 3d": (nn.Conv3d(3, 4, 3, 2, 1), (2, 3, 7, 6, 5)),
    "conv transpose": (nn.ConvTranspose2d(6, 8, 3, 2, 1, 1), (3, 6, 5, 7)),
    "conv transpose k3 s1 p1": (nn.ConvTranspose2d(6, 8, 3, 1, 1), (3, 6, 5, 7)),
    "conv transpose k2 s3": (nn.ConvTranspose2d(6, 4, 2, 3, 0, 2), (3, 6, 5, 7)),
    "conv transpose groups": (nn.ConvTranspose2d(6, 8, 3, 2, 1, groups=2), (3, 6, 5, 7)),
    "conv transpose 3d": (nn.ConvTranspose3d(4, 3, 2, 2), (2, 4, 3, 4, 5)),
    "linear": (nn.Linear(7, 10), (5, 7)),
    "linear 3d": (nn.Linear(7, 10, bias=False), (5, 6, 7)),
    "linear 5d": (nn.Linear(4, 6), (2, 3, 4, 5, 4)),
    "batch norm": (nn.BatchNorm2d(6), (5, 6, 7, 8)),
    "batch norm 1d": (nn.BatchNorm1d(6, momentum=None), (5, 6)),
    "batch norm plain": (
        nn.BatchNorm3d(4, affine=False, track_running_stats=False),
        (2, 4, 3, 5, 4),
    ),
    "group norm": (nn.GroupNorm(3, 9), (5, 9, 7, 8)),
    "instance norm": (nn.InstanceNorm2d(6, affine=True), (5, 6, 7, 8)),
    "layer norm": (nn.LayerNorm((6, 8)), (5, 7, 6, 8)),
    "layer norm last": (nn.LayerNorm(8), (5, 7, 6, 8)),
    "max pool": (nn.MaxPool2d(3, 2, 1), (3, 4, 11, 9)),
    "max pool ceil": (nn.MaxPool2d(3, 2, 1, ceil_mode=True), (3, 4, 11, 10)),
    "max pool dilated": (nn.MaxPool2d(2, 1, 0, 2), (3, 4, 11, 10)),
    "max pool 3d": (nn.MaxPool3d(2), (2, 4, 6, 5, 7)),
    "avg pool": (nn.AvgPool2d(3, 2, 1), (3, 4, 11, 9)),
    "avg pool ceil": (
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        (3, 4, 11, 10),
    ),
    "avg pool 1d": (nn.AvgPool1d(3, 2, 1), (3, 4, 11)),
    "adaptive avg pool": (nn.AdaptiveAvgPool2d((4, 3)), (3, 4, 11, 9)),
    "global avg pool": (nn.AdaptiveAvgPool2d(1), (3, 4, 11, 9)),
    "adaptive max pool": (nn.AdaptiveMaxPool2d((4, 3)), (3, 4, 11, 9)),
    "bilinear": (nn.Upsample(scale_factor=2, mode="bilinear"), (3, 4, 5, 6)),
    "bilinear aligned": (
        nn.Upsample(size=(7, 11), mode="bilinear", align_corners=True),
        (3, 4, 5, 6),
    ),
    "trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), (2, 3, 4, 3, 5)),
    "nearest": (nn.Upsample(size=(7, 11)), (3, 4, 5, 6)),
    "prelu": (nn.PReLU(6), (3, 6, 5, 6)),
    "flatten": (nn.Flatten(), (3, 5, 4, 3)),
    "softmax": (nn.Softmax(1), (3, 8, 5, 4)),
    "running sum": (RunningSum(), (3, 8, 5, 4)),
    "dropout": (nn.Dropout(0.3), (3, 8, 5, 4)),
    "dropout 2d": (nn.Dropout2d(0.3), (3, 8, 5, 4)),
    "pixel shuffle": (nn.PixelShuffle(2), (3, 8, 5, 4)),
    "reflection pad": (nn.ReflectionPad2d((2, 1, 3, 0)), (3, 8, 5, 4)),
    "channel shuffle": (ChannelShuffle(), (3, 6, 5, 4)),
    "chunk and cat": (ChunkAndCat(), (3, 8, 5, 4)),
    "means": (Means(), (3, 8, 5, 4)),
    "expand": (Expand(), (3, 8, 5, 4)),
    "extremes": (Extremes(), (3, 8, 5, 4)),
    "crop": (Crop(), (3, 8, 5, 4)),
    "select": (Select(), (3, 8, 5, 4)),
    "grid sample": (GridSample(), (3, 5, 7, 6)),
    "no strategy": (Renorm(), (3, 8, 5, 4)),
    "squeeze-excite": (SqueezeExcite(), (3, 8, 5, 4)),
    "residual": (Residual(), (3, 6, 7, 5)),
    "shared parameter": (Shared(), (3, 6, 7, 5)),
    "channels-last norm": (ChannelsLastNorm(), (3, 8, 5, 4)),
    "computed weight": (WeightStandardised(), (3, 4, 6, 5)),
    "several outputs": (Heads(), (5, 3, 8, 7)),
    "frozen parameters": (FrozenStem(), (3, 3, 8, 7)),
    "mask": (Mask(), (3, 8, 5, 4)),
    "indices": (Indices(), (3, 8, 5, 4)),
    "scalars": (Scalars(), (3, 8, 5, 4)),
    "noise": (Noise(), (3, 8, 5, 4)),
    "written": (Written(), (3, 8, 5, 4)),
    "positions": (Positions(), (3, 8, 5, 4)),
    "transposed gradient": (TransposedGradient(nn.BatchNorm2d(8)), (4, 3, 7, 6)),
    "transposed gradient, frozen": (TransposedGradient(nn.BatchNorm2d(8).eval()), (4, 3, 7, 6)),
    "transposed gradient, groups": (TransposedGradient(nn.GroupNorm(2, 8)), (4, 3, 7, 6)),
    "layer norm of all": (nn.LayerNorm((3, 8, 5)), (3, 8, 5)),
    "infinite gradient": (InfiniteGradient(), (3, 8, 5, 4)),
    "functional norm": (FunctionalNorm(), (3, 8, 5, 4)),
    "batch size": (BatchSize(), (3, 8, 5, 4)),
    "one sample conv": (nn.Conv2d(6, 8, 3, padding=1), (6, 11, 9)),
    "one sample conv transpose": (nn.ConvTranspose2d(6, 8, 3, 2, 1, 1), (6, 5, 7)),
    "one sample max pool": (nn.MaxPool2d(3, 2, 1), (4, 11, 9)),
    "one sample adaptive max pool": (nn.AdaptiveMaxPool3d((4, 3, 2)), (4, 7, 6, 5)),
    "one sample adaptive avg pool": (nn.AdaptiveAvgPool2d((4, 3)), (4, 7, 6)),
    "one sample global avg pool": (nn.AdaptiveAvgPool2d(1), (4, 7, 6)),
}
OPERATORS |= PRODUCTS | ATTENTION | NORMS
OPERATORS |= SHAPES

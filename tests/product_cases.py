"""Small modules of products, attention and norms; a part of `operator_cases`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


class SelfAttention(nn.Module):
    """As timm writes it: one linear layer for all of q, k and v, two products and a softmax."""

    def __init__(self, width: int = 12, num_heads: int = 3) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = (
            num_heads,
            nn.Linear(width, 3 * width),
            nn.Linear(width, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, rows, width = x.shape
        parts = self.qkv(x).reshape(n, rows, 3, self.num_heads, width // self.num_heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(n, rows, width))


class Matrices(nn.Module):
    """Everything that multiplies a matrix, with weights and without."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.column, self.scalar = parameter(6, 6), parameter(6), parameter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.column, torch.mm(x * 2, self.square), self.square, beta=2, alpha=0.3)
        y = torch.addmm(self.scalar, y, self.square) + torch.inner(y, self.square)
        y = torch.addmm(x.mean(0), y, torch.linalg.multi_dot([self.square, x.t(), x]))
        y = torch.addr(y, torch.mv(x, self.column), self.column) + torch.outer(x[:, 0], self.column)
        return y * torch.addmv(x[:, 1], y, self.column)[:, None] + self.column @ self.square


class Batches(nn.Module):
    """Batches of matrices, broadcast and with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.table = parameter(7, 5), parameter(6, 4), parameter(3, 1, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.left @ (x * 2) @ self.right
        y = torch.baddbmm(y[:, :1], y, torch.bmm(y.transpose(1, 2), y), beta=0.5, alpha=0.1)
        y = y + torch.addbmm(self.right[0], y, self.table[:, 0].sum(0, True).expand(len(y), 4, 4))
        return (y @ self.table).sum(0) + torch.linalg.vecdot(y, y[:, :1])[..., None]


class Equations(nn.Module):
    """torch.einsum: letters that are summed over, dots, three operands, a diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gram = torch.einsum("bchw,bdhw->bcd", x, x)
        y = torch.einsum("...ij,jk->...ki", x, self.weight)
        y = (
            y * torch.einsum("bchw -> bc", x)[:, :, None, None]
            + torch.einsum("bij,jk", x[:, 0], self.weight).mean()
        )
        y = y + torch.einsum(
            "bcd,bckh,bdkh->bckh", gram, y, x[..., :1].transpose(2, 3).expand_as(y)
        )
        return (
            y * torch.einsum("bii->bi", gram)[:, :, None, None]
            + torch.tensordot(x, x, ([1, 2], [1, 2])).mean()
        )


class Numbers(nn.Module):
    """Products that end in one number, and those of diagonals."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.column = parameter(6, 6), parameter(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bchw,bchw->", x, x.sin()) + torch.einsum("ii", self.square)
        y = y + torch.dot(self.column, self.column) * torch.vdot(self.column, self.square[0])
        y = y + self.column @ self.square[:, 1] + torch.einsum("...w,w->", x, self.column)
        return y * torch.einsum("bccw->bcw", x) + torch.einsum("b c h w -> ", x)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(5, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bilinear(x[..., :5] * 2, x[..., 5:])


class Attention(nn.Module):
    """Stock attention; keys and values may have fewer heads or rows, and values another size."""

    def __init__(
        self, num_heads: int | None = None, num_keys: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.num_heads, self.num_keys, self.options = num_heads, num_keys, options
        if mask := options.pop("mask", None):
            self.mask = parameter(*mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * 2).split((4, 4, x.shape[-1] - 8), -1)
        if self.num_heads is not None:
            k, v = k[:, : self.num_heads], v[:, : self.num_heads]
        k, v = k[..., : self.num_keys, :], v[..., : self.num_keys, :]
        mask = getattr(self, "mask", None)
        return functional.scaled_dot_product_attention(q, k, v, mask, **self.options)


class Masked(nn.Module):
    """A mask that is computed, some of whose rows hide everything."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x[..., : x.shape[2]] > 0.8
        y = functional.scaled_dot_product_attention(x, x * 2, x, mask, self.dropout)
        return y + torch.rand(x.shape[-1], dtype=x.dtype)  # notices ranks out of step


class WithWeights(nn.Module):
    """What nn.MultiheadAttention does where its weights are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attention(x, x[:, :3], x[:, :3])


class Norms(nn.Module):
    """Norms over channels, over space, over both and over all; some hold all elements at nought."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.normalize(x) / (1 + x.norm(p=3, dim=(2, 3), keepdim=True))
        y = y + torch.linalg.vector_norm(x, 1, (0, 2, 3))[:, None, None] + x.norm()
        y = y * torch.linalg.vector_norm(x, float("inf"), (2,), keepdim=True)
        nought = torch.linalg.vector_norm(x * 0, dim=(2, 3), keepdim=True)
        y = y + torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64).to(x.dtype)
        y = y + torch.linalg.matrix_norm(x, 1)[..., None, None] * x.dist(x.flip(2))
        return y + torch.linalg.matrix_norm(x)[..., None, None] + nought


class Spreads(nn.Module):
    """Variances and deviations, over dimensions that are split and over others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        var, mean = torch.var_mean(x, (2, 3), keepdim=True)
        y = (x - mean) / (var + 1) * x.std((2,), correction=0.5, keepdim=True)
        return (
            y
            + x.var((0, 2, 3))[:, None, None]
            + x.std(1, keepdim=True)
            + (x * 0).std((2, 3), keepdim=True)
            + x.var()
        )


class WeightNorm(nn.Module):
    """What weight_norm of torch.nn.utils makes of a convolution."""

    def __init__(self, dim: int, *length: int) -> None:
        super().__init__()
        self.dim, self.direction, self.length = dim, parameter(6, 4, 3, 3), parameter(*length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, torch._weight_norm(self.direction, self.length, self.dim))


Cases = dict[str, tuple[nn.Module, tuple[int, ...]]]

PRODUCTS: Cases = {
    "self-attention": (SelfAttention(), (3, 7, 12)),
    "self-attention of one sample": (SelfAttention(), (1, 7, 12)),
    "matrices": (Matrices(), (5, 6)),
    "batches of matrices": (Batches(), (3, 5, 6)),
    "equations": (Equations(), (3, 4, 5, 6)),
    "products that are numbers": (Numbers(), (3, 5, 5, 6)),
    "bilinear": (Pairs(), (3, 5, 9)),
}
ATTENTION: Cases = {
    "attention": (Attention(), (3, 4, 5, 11)),
    "attention without heads": (Attention(scale=0.7), (3, 5, 11)),
    "attention of one sample": (Attention(is_causal=True), (1, 4, 7, 12)),
    "attention of few keys": (Attention(num_keys=3), (3, 4, 5, 11)),
    "attention, causal": (Attention(is_causal=True), (3, 4, 7, 11)),
    "attention, causal, few keys": (Attention(num_keys=3, is_causal=True), (2, 3, 7, 12)),
    "attention, shared heads": (Attention(2, is_causal=True, enable_gqa=True), (2, 6, 5, 12)),
    "attention, one head of keys": (Attention(1), (2, 6, 5, 12)),
    "attention, trained mask": (Attention(mask=(4, 1, 5)), (3, 4, 5, 11)),
    "attention, computed mask": (Masked(0.0), (3, 4, 5, 6)),
    "attention with dropout": (Masked(0.3), (3, 4, 5, 6)),
    "attention with dropout, shared heads": (
        Attention(2, is_causal=True, enable_gqa=True, dropout_p=0.2),
        (2, 6, 5, 12),
    ),
    "attention with weights": (WithWeights(), (3, 5, 8)),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 12, 0.1, batch_first=True), (3, 5, 8)),
}
NORMS: Cases = {
    "RMS norm": (nn.RMSNorm(8), (5, 7, 6, 8)),
    "layer norm of a vector": (nn.LayerNorm(7), (7,)),
    "RMS norm of a vector": (nn.RMSNorm(7), (7,)),
    "RMS norm of several": (nn.RMSNorm((6, 8), eps=1e-3), (5, 7, 6, 8)),
    "RMS norm of all": (nn.RMSNorm((3, 6, 8), elementwise_affine=False), (3, 6, 8)),
    "group norm without space": (nn.GroupNorm(3, 9), (5, 9)),
    "group norm 3d": (nn.GroupNorm(2, 6), (2, 6, 4, 3, 5)),
    "one sample instance norm": (nn.InstanceNorm2d(6, affine=True), (6, 7, 5)),
    "local response norm": (nn.LocalResponseNorm(3), (3, 8, 5, 4)),
    "weight norm": (WeightNorm(0, 6, 1, 1, 1), (3, 4, 7, 6)),
    "weight norm of columns": (WeightNorm(1, 1, 4, 1, 1), (3, 4, 7, 6)),
    "weight norm of all": (WeightNorm(-1), (3, 4, 7, 6)),
    "norms of vectors": (Norms(), (3, 4, 6, 5)),
    "spreads": (Spreads(), (3, 4, 6, 5)),
}

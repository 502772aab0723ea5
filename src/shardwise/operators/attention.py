"""Attention: softmax of q times k, times v, split over samples, heads and rows of queries.

q_BHID, k_BHJD, v_BHJE, y_BHIE. A rank needs its rows of the queries, and all keys and values of its
samples and heads; where rows only look back, those up to its last row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shardwise.geometry.layout import Ranges
from shardwise.graph.labels import Shape
from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request
from shardwise.operators.notation import (
    NUMBERED,
    ByLetters,
    Notation,
    behind,
    extents,
    labels_of,
)
from shardwise.operators.splits import Split
from shardwise.operators.strategy import Local, operator
from shardwise.tensors import autocast_to

SOFTMAX = 8.0  # operations per score


@dataclass(frozen=True)
class AttentionAttrs(Notation):
    causal: bool  # a row sees the keys up to its own number
    scale: float | None
    grouped: bool  # there may be fewer heads of keys than of queries
    dropout: float


def _notation(shapes: list[Shape]) -> Notation:
    batch = NUMBERED[: max(map(len, shapes[:3])) - 2]
    ends = zip(shapes, ("id", "jd", "je"), strict=False)
    terms = [behind(batch, len(shape) - 2) + end for shape, end in ends]
    masks = [behind(batch + "ij", len(shape)) for shape in shapes[3:]]
    return Notation((*terms, *masks), batch + "ie")


def _dims(notation: Notation, shapes: list[Shape], known: list[str]) -> str:
    """The labels of queries; what has none is samples, heads (as channels) or rows."""
    labels = notation.labels(shapes, known[:2] + [""] * len(shapes[2:]))
    sizes, (*batch, row, _) = notation.sizes(shapes), notation.result
    heads = [(letter, "c") for letter in batch[:0:-1] if sizes[letter] > 1]
    for letter, label in (*heads, *zip(batch, "n", strict=False), *((row, x) for x in "whdc")):
        if letter not in labels and label not in labels.values():
            labels[letter] = label
    return "".join(labels.get(letter, ".") for letter in (*batch, row)) + "."


@operator("attention")
class Attention(ByLetters):
    """Scaled dot-product attention, masked or causal."""

    keeps_inputs, draws = True, False

    def keeps_output(self, layer: Layer) -> bool:
        return True

    def ranges(self, split: Split[AttentionAttrs], letter: str, size: int) -> Ranges:
        found = super().ranges(split, letter, size)
        if letter == "j" and split.layer.attrs.causal:
            last = split.dim_ranges(len(split.layer.shape) - 2)[:, 1]
            return np.stack([found[:, 0], np.minimum(found[:, 1], last)], axis=1)
        return found

    def run(self, local: Local[AttentionAttrs], tensors: list[Tensor]) -> Tensor:
        q, k, v, *masks = tensors
        attrs, mask = local.attrs, masks[0] if masks else None
        from_first = local.output.starts[-2] == 0  # torch counts rows from nought
        if attrs.causal and not from_first:
            mask = _looking_back(local, k)
        shared = attrs.grouped and _is_even(local)
        if attrs.grouped and not shared:
            k, v = _per_head(local, k, v)
        how = {"scale": attrs.scale, "enable_gqa": shared}
        looks_back = attrs.causal and from_first
        return functional.scaled_dot_product_attention(q, k, v, mask, 0.0, looks_back, **how)

    def flops(self, split: Split[AttentionAttrs]) -> np.ndarray:
        attrs = split.layer.attrs
        sizes = attrs.sizes([operand.shape for operand in split.layer.operands])
        inner, keys = sizes["d"] + sizes["e"], extents(self.ranges(split, "j", sizes["j"]))
        rows = self.output(split).numels / max(1, sizes["e"])
        return rows * keys * (2.0 * inner + SOFTMAX)


def _looking_back(local: Local[AttentionAttrs], k: Tensor) -> Tensor:
    """Which of these keys this rank's rows see, where they see none behind them."""
    rows = local.output.shape[-2]
    ones = torch.ones(rows, k.shape[-2], dtype=torch.bool, device=k.device)
    return ones.tril(local.output.starts[-2])


def _sharing(local: Local[AttentionAttrs]) -> list[int]:
    """How many heads of queries use the same head of keys, and of values."""
    return [local.layer.shape[-3] // o.shape[-3] for o in local.layer.operands[1:3]]


def _is_even(local: Local[AttentionAttrs]) -> bool:
    """Whether the heads of this rank share all their keys with heads of this rank only."""
    ends = local.output.starts[-3], local.output.stops[-3]
    return all(end % each == 0 for end in ends for each in _sharing(local))


def _per_head(local: Local[AttentionAttrs], k: Tensor, v: Tensor) -> list[Tensor]:
    """Keys and values of each head of queries by themselves."""
    start, stop = local.output.starts[-3], local.output.stops[-3]
    heads = torch.arange(start, stop, device=k.device)
    pairs = zip((k, v), _sharing(local), strict=True)
    return [t.index_select(-3, heads // each - start // each) for t, each in pairs]


@operator("attention_dropout", "scaled_dot_product_attention")
class AttentionDropout(Attention):
    """The same with some of the weights dropped.

    Every rank draws for the whole tensor, as one device does, and uses its own part.
    """

    draws = True

    def read(self, call: Call) -> Request | None:
        tensors = [t for t in call.pick("query", "key", "value", "attn_mask") if t is not None]
        shapes = [call.shape(tensor) for tensor in tensors]
        drops = call["dropout_p"] > 0.0
        if any(0 in shape for shape in shapes) or (drops and _on_gpu(call)):
            return None
        notation = _notation(shapes)
        options = call.pick("is_causal", "scale", "enable_gqa", "dropout_p")
        attrs = AttentionAttrs(notation.terms, notation.result, *options)
        dims = _dims(notation, shapes, labels_of(call, tensors))
        return Request(
            "attention_dropout" if drops else "attention", tuple(tensors), attrs, dims=dims
        )

    def keeps_beside(self, layer: Layer[AttentionAttrs]) -> float:
        """Weights before and after some are dropped, and which: per element of the output."""
        return layer.operands[1].shape[-2] / layer.shape[-1] * (2.0 * layer.dtype.itemsize + 1.0)

    def run(self, local: Local[AttentionAttrs], tensors: list[Tensor]) -> Tensor:
        kept = _drawn(local, tensors[0].device)
        if local.output.empty:
            return tensors[0].reshape(-1)[:0].reshape(local.output.shape)
        q, k, v, *masks = (_cast(local, tensor) for tensor in tensors)
        p, scale = local.attrs.dropout, local.attrs.scale or q.shape[-1] ** -0.5
        if local.attrs.grouped:
            k, v = _per_head(local, k, v)
        with autocast_to(q.device.type, None):  # as within torch's own
            scores = (q * scale) @ k.transpose(-1, -2)
            for mask in [_looking_back(local, k)] if local.attrs.causal else masks:
                hides = mask.dtype is torch.bool
                scores = scores.masked_fill(~mask, -inf) if hides else scores + mask
            weights = torch.ops.aten._safe_softmax(scores, -1) * kept[..., : k.shape[-2]]
            return (weights * (1.0 / (1.0 - p) if p < 1.0 else 0.0)) @ v


def _drawn(local: Local[AttentionAttrs], device: torch.device) -> Tensor:
    """Which weights are kept, of this rank's rows; drawn for all, where torch draws any."""
    p, rows = local.attrs.dropout, local.layer.shape[:-1]
    shape = (*rows, local.layer.operands[1].shape[-2])
    whole = torch.zeros(shape, dtype=torch.bool, device=device)
    own = tuple(map(slice, local.output.starts[:-1], local.output.stops[:-1]))
    return (whole.bernoulli_(1.0 - p) if p < 1.0 else whole)[own]


def _cast(local: Local[AttentionAttrs], tensor: Tensor) -> Tensor:
    """What autocast would make of an operand."""
    return tensor.to(local.layer.dtype) if tensor.is_floating_point() else tensor


def _on_gpu(call: Call) -> bool:
    """Whether torch draws inside of kernels, of which nobody else learns the numbers."""
    return call.node.meta["val"].device.type == "cuda"

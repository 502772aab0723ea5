"""From blobs of a `.caffemodel` file to the weights of a net, layer by layer, by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError

from .blobs import read_weights
from .net import CaffeNet
from .weighted_layers import CaffeBatchNorm

CAFFEMODEL = ".caffemodel"  # how a file of weights ends


def load_caffemodel(net: CaffeNet, path: str | Path) -> None:
    """Weights of layers that the file has; others stay, and what the net lacks is passed over.

    That is how Caffe fine-tunes: a layer that is to begin anew gets another name.
    """
    found = [
        (name, net.layer_module(name), blobs)
        for name, blobs in read_weights(path).items()
        if net.layer_module(name) is not None
    ]
    if not found:
        raise ShardwiseError(f"{str(path)!r} has weights of no layer of {net.path!r}")
    with torch.no_grad():
        for name, module, blobs in found:
            _load(module, blobs, f"{str(path)!r}: layer {name!r}")


def _load(module: nn.Module | None, blobs: list[np.ndarray], place: str) -> None:
    if isinstance(module, CaffeBatchNorm):
        if len(blobs) != 3 or blobs[2].size != 1:
            raise ShardwiseError(f"{place} must have a mean, a variance and their factor")
        mean, variance = _values(blobs[0]), _values(blobs[1])
        _check(module.running_mean, blobs[0], place)
        _check(module.running_var, blobs[1], place)
        module.load_sums(mean.flatten(), variance.flatten(), float(blobs[2].flat[0]))
        return
    params = list(module.parameters()) if module is not None else []
    if len(params) != len(blobs):
        raise ShardwiseError(f"{place} has {len(blobs)} blobs, and {len(params)} in the net")
    for param, blob in zip(params, blobs, strict=True):
        _check(param, blob, place)
        param.copy_(_values(blob).reshape(param.shape))


def _check(target: Tensor | None, blob: np.ndarray, place: str) -> None:
    """Shapes agree but for leading ones, which old files have four dims of."""
    here = tuple(target.shape) if target is not None else ()
    if _without_ones(here) != _without_ones(blob.shape):
        there = "x".join(map(str, blob.shape))
        raise ShardwiseError(f"{place} is {there}, and {'x'.join(map(str, here))} in the net")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return tuple(shape[first:])


def _values(blob: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(blob))

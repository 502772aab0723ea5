"""Binary files of Caffe: the weights of `.caffemodel`, and the mean of `.binaryproto`."""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path

import numpy as np

from shardwise.errors import ShardwiseError
from shardwise.files import system_errors_as

from .wire import DOUBLE, FLOAT, WireMessage

# Numbers of fields, from Caffe's own description of its messages.
OLD_LAYERS, LAYERS = 2, 100  # of a net
NAME_AND_BLOBS = {OLD_LAYERS: (4, 6), LAYERS: (1, 7)}  # of a layer
OLDEST = 1  # in a layer of the old form: one of a form that is older still
LEGACY_SHAPE, DATA, SHAPE, DOUBLE_DATA = (1, 2, 3, 4), 5, 7, 8  # of a blob
DIM = 1  # of a shape


def read_weights(path: str | Path) -> dict[str, list[np.ndarray]]:
    """The blobs of every layer that has some, by its name; the file is mapped, not read."""
    net, found = _mapped(path), {}
    for number, value in net.fields():
        if number not in NAME_AND_BLOBS:
            continue
        layer, blobs, name = net.within(value), [], ""
        for own, content in layer.fields():
            if own == NAME_AND_BLOBS[number][0]:
                name = layer.text(content)
            elif own == NAME_AND_BLOBS[number][1]:
                blobs.append(_blob(layer.within(content)))
            elif number == OLD_LAYERS and own == OLDEST:
                raise ShardwiseError(f"{str(path)!r} is of Caffe's oldest form, which is not read")
        if blobs:
            found[name] = blobs
    if not found:
        raise ShardwiseError(f"{str(path)!r} has no weights: it is no .caffemodel file")
    return found


def read_mean(path: str | Path) -> np.ndarray:
    """The mean image of a `.binaryproto` file: channels x height x width."""
    mean = _blob(_mapped(path))
    while mean.ndim > 3 and mean.shape[0] == 1:
        mean = mean[0]
    if mean.ndim != 3 or not mean.size:
        raise ShardwiseError(f"{str(path)!r} holds no mean image")
    return mean.astype(np.float32)


def _mapped(path: str | Path) -> WireMessage:
    with system_errors_as(f"{str(path)!r} cannot be read"), Path(path).open("rb") as file:
        if not file.seek(0, 2):
            raise ShardwiseError(f"{str(path)!r} is empty")
        return WireMessage(
            memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), str(path)
        )


def _blob(wire: WireMessage) -> np.ndarray:
    parts: dict[int, list] = {}
    for number, value in wire.fields():
        parts.setdefault(number, []).append(value)
    legacy = [wire.integers(parts[n])[-1] if n in parts else 1 for n in LEGACY_SHAPE]
    shape = tuple(legacy) if any(n in parts for n in LEGACY_SHAPE) else ()
    if SHAPE in parts:
        inner = wire.within(parts[SHAPE][-1])
        shape = tuple(inner.integers([value for n, value in inner.fields() if n == DIM]))
    number, kind = (DOUBLE_DATA, DOUBLE) if DOUBLE_DATA in parts else (DATA, FLOAT)
    values = wire.floats(parts.get(number, []), kind)
    if prod(shape) != values.size:
        raise ShardwiseError(
            f"{wire.file!r}: a blob of shape {'x'.join(map(str, shape)) or '1'} has {values.size} "
            "numbers"
        )
    return values.reshape(shape)

"""JPEG and PNG content as arrays, by Pillow."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np

from shardwise.errors import ShardwiseError

from .source import optional

PILLOW = ("images are read with Pillow", "shardwise[train]")
SUFFIXES = {".jpg", ".jpeg", ".png"}
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}  # 8 bits a channel, or fewer
Size = tuple[int, int]  # height, width


def check_channels(channels: int) -> None:
    if channels not in (1, 3):
        raise ShardwiseError(f"channels={channels} must be 3 (colour) or 1 (grey)")


def decoded(
    content: bytes,
    path: Path | str,
    channels: int,
    size: Size | None,
    check: Callable[[Size], None],
) -> np.ndarray:
    """An image as channels x height x width, resized where a size is given.

    `check` may refuse its own size, before it takes memory. `path` is how messages call it.
    """
    pillow, ops = (optional(f"PIL.{name}", *PILLOW) for name in ("Image", "ImageOps"))
    try:
        if str(path).lower().endswith(".png"):
            pillow.open(BytesIO(content)).verify()  # checksums, which load() passes over
        image = pillow.open(BytesIO(content), formats=("JPEG", "PNG"))
        check((image.height, image.width))
        image.load()
    except ShardwiseError:
        raise
    except Exception as error:  # a decoder may fail in any way on a damaged file
        raise ShardwiseError(f"{path} is no image that can be read: {error}") from None
    if image.mode not in MODES:
        raise ShardwiseError(f"{path} has pixels of kind {image.mode}, and not of 8 bits")
    image = image.convert("RGB" if channels == 3 else "L")
    if size is not None:
        height, width = size
        image = ops.fit(image, (width, height), pillow.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)

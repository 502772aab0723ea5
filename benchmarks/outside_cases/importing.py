"""Importing packages that need torchvision, whose own operators are not compiled everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def uncompiled_torchvision() -> Iterator[None]:
    """Within, torchvision can be imported where its compiled parts are not there."""
    register = torch.library.register_fake

    def stub(name: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **kwargs)

    torch.library.register_fake = stub  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.library.register_fake = register

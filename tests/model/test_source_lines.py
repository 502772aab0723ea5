"""What cannot be captured is refused with the line of the user's file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import CaptureError, capture


class Middle(nn.Module):
    def __init__(self, middle: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.middle = nn.Conv2d(3, 4, 3), [middle]
        self.register_buffer("count", torch.zeros(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle[0](self, self.conv(x))  # called here


def branches(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y if y.sum() > 0 else -y  # branches


def loops(model: Any, y: torch.Tensor) -> torch.Tensor:
    return sum(y for _ in range(int(y.sum())))  # type: ignore[return-value]  # loops


def fails(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y @ torch.ones(99, 5)  # fails


def chooses(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y[y > 0].sum()


def writes(model: Any, y: torch.Tensor) -> torch.Tensor:
    model.count += y.mean((0, 2, 3)).view(4, 1, 1)
    return y


def sparse(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y.to_sparse()


CASES = {
    branches: (r"depends on the values of tensors \(an if, .*\)", "# branches"),
    loops: (r"depends on the values of tensors \(an if, .*\)", "# loops"),
    fails: ("must have same reduction dim", "# fails"),
    chooses: ("depends on a number of 'index'", "# called here"),
    writes: ("writes into 'count' in its forward pass", "# called here"),
    sparse: ("to_sparse.* cannot be followed", "# called here"),
}


@pytest.mark.parametrize("middle", CASES, ids=lambda middle: middle.__name__)
def test_what_cannot_be_captured_is_named_by_file_and_line(
    middle: Callable[[Any, torch.Tensor], torch.Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    reason, mark = CASES[middle]
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(mark))
    with pytest.raises(CaptureError, match=reason) as error:
        capture(Middle(middle), torch.zeros(2, 3, 6, 6))
    assert f"test_source_lines.py:{number}" in str(error.value)
    assert capfd.readouterr().err == ""  # of what torch writes, nothing

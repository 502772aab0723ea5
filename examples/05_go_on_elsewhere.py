"""A run that ends on two workers goes on with three, under another plan, to the same weights.

python examples/05_go_on_elsewhere.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from shardwise import Settings, train
from shardwise.checkpoint import export

RUN = Settings(
    options={"width": 4}, batch=256, schedule="constant", precision="float64", report=False
)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint of a run as a plain state_dict of the original module."""
    return torch.load(export(run, run / "weights.pt"), weights_only=True)


def main() -> None:
    with TemporaryDirectory() as home:
        whole, broken = Path(home) / "whole", Path(home) / "broken"
        on_two = {"workers": 2, "split": "n=2"}
        train(RUN.model_copy(update={**on_two, "steps": 8, "out": str(whole)}))

        train(RUN.model_copy(update={**on_two, "steps": 4, "out": str(broken)}))
        on_three = {"workers": 3, "split": "h=3", "resume": True}
        train(RUN.model_copy(update={**on_three, "steps": 8, "out": str(broken)}))

        expected, found = weights_of(whole), weights_of(broken)
        error = max(float((expected[n] - found[n]).abs().max()) for n in expected)
    print(f"{len(expected)} tensors, largest difference {error:.1e}")
    assert error < 1e-9


if __name__ == "__main__":
    main()

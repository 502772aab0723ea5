"""A run with a model and samples of your own: metrics, checkpoints and a report.

python examples/03_train_your_model.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

import shardwise


def build() -> nn.Module:
    """Any module that torch.export can capture."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def samples(number: int, seed: int) -> shardwise.data.Arrays:
    """Images with stripes, upright (class 0) or lying (class 1), under noise."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, number)
    waves = np.sin(np.arange(12) * 2)[None, None, None, :].repeat(12, 2)
    images = np.where(labels[:, None, None, None] == 0, waves, waves.swapaxes(2, 3))
    noisy = images + random.normal(0, 0.5, images.shape)
    return shardwise.data.Arrays(noisy.astype(np.float32), labels, "stripes", num_classes=2)


def fit(folder: str) -> None:
    """What every worker does."""
    torch.manual_seed(0)
    settings = shardwise.Settings(split="h=2", epochs=3, batch=32, lr=0.1, out=folder)
    trainer = shardwise.Trainer(
        settings, model=build(), train=samples(256, seed=1), test=samples(64, seed=2)
    )
    trainer.fit()


if __name__ == "__main__":
    with TemporaryDirectory() as home:
        run = Path(home) / "run"
        shardwise.run_local(fit, 2, str(run))
        print("written:", *sorted(path.name for path in run.iterdir()))

"""P4's Table 2: a 4096 -> 4096 linear layer after convolutions, and what the planner chooses.


    shardwise plan examples/p4_table2.py:build --cluster k80x16 --input 512x3x64x64 --explain fc

The paper's 512 images on 16 GPUs behind 1 GB/s links: samples cost 1,076 ms, one weird trick 135.7,
two workers 27.0, one worker 28.8. P4's channels c are filters f here.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def build() -> nn.Module:
    """Convolutions that belong on all workers, then the linear layer."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 64, 5, padding=2),
            relu1=nn.ReLU(inplace=True),
            conv2=nn.Conv2d(64, 64, 5, padding=2),
            relu2=nn.ReLU(inplace=True),
            conv3=nn.Conv2d(64, 64, 5, padding=2),
            pool=nn.AvgPool2d(8),
            flatten=nn.Flatten(),
            fc=nn.Linear(4096, 4096),
        )
    )

"""Gradients are summed while the backward pass goes on, and a step shows what that hid.

python examples/06_hide_communication.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import shardwise


def steps() -> list[str]:
    """What every worker does: a few steps with each way of summing, the last one recorded."""
    lines = []
    for engine in (shardwise.Engine("end"), shardwise.Engine("buckets", bucket_bytes=64 << 10)):
        torch.manual_seed(0)
        net = shardwise.zoo.build("digits", width=32)
        x, y = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
        plan = shardwise.Plan.uniform(shardwise.capture(net, x), n=2)
        model = shardwise.parallelize(net, plan, gradients=engine)
        optimizer = shardwise.optimizer(model, torch.optim.SGD, lr=0.01, momentum=0.9)
        for _ in range(3):
            with model.record() as trace:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        lines.append(
            f"{engine.mode:8} step {1e3 * trace.seconds:.1f} ms, "
            f"{100 * trace.overlap:.0f} % of communication hidden"
        )
    return lines


if __name__ == "__main__":
    print(*shardwise.run_local(steps, 2)[0], sep="\n")

"""Four workers split a network, and every number is what one device computes.

    python examples/01_first_split.py

Samples are split in two, and the rows of every image in two.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import shardwise


def train_one_step() -> tuple[str, float, float]:
    """What every worker does: one step of training, once in parallel and once alone."""
    torch.manual_seed(0)  # all ranks make the same model, and read the same global batch
    alone = shardwise.zoo.build("digits", width=8).double()
    x, y = torch.randn(6, 1, 8, 8).double(), torch.randint(10, (6,))

    graph = shardwise.capture(alone, x)
    plan = shardwise.Plan.uniform(graph, n=2, h=2)
    model = shardwise.parallelize(alone, plan)

    loss = cross_entropy(model(x), y)  # the whole output is on every rank
    loss.backward()
    gradients = model.full_gradients()

    expected = cross_entropy(alone(x), y)
    expected.backward()
    errors = [
        float((gradients[name] - p.grad).norm() / p.grad.norm())
        for name, p in alone.named_parameters()
        if p.grad is not None and p.grad.norm() > 1e-12
    ]
    return str(plan), abs(loss.item() - expected.item()), max(errors)


if __name__ == "__main__":
    plan, loss_error, gradient_error = shardwise.run_local(train_one_step, 4)[0]
    print(plan)
    print(f"the loss differs by {loss_error:.1e}, gradients by at most {gradient_error:.1e}")
    assert loss_error < 1e-9 and gradient_error < 1e-9

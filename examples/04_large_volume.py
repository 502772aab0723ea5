"""A 3-D U-Net on volumes of which no worker holds more than its part.

    python examples/04_large_volume.py

Each worker reads, computes and compares its own part: input, output and labels stay split.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import shardwise
from shardwise.data import Loader, open_source

VOLUME = 16


def train() -> tuple[str, str, float]:
    """What every worker does: a step on its part of one volume."""
    torch.manual_seed(0)
    model = shardwise.zoo.build("unet3d", channels=(4, 8))
    graph = shardwise.capture(model, torch.zeros(1, 1, VOLUME, VOLUME, VOLUME))
    plan = shardwise.Plan.uniform(graph, d=2, h=2)  # four parts of every volume
    model = shardwise.parallelize(model, plan, output="local")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    volumes = open_source(f"synthetic:2x1x{VOLUME}x{VOLUME}x{VOLUME}", num_classes=3)
    losses = []
    for batch in Loader(volumes, batch=1, box=model.input_box):
        output = model(batch.x, batch=batch.size)  # this rank's part of all classes
        target = (batch.x[:, 0] > 0).long()  # a label per voxel, made from the part itself
        # The loss of the whole volume is the sum of all parts', so each divides by all voxels.
        loss = cross_entropy(output, target, reduction="sum") / VOLUME**3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return str(tuple(batch.x.shape)), str(tuple(output.shape)), losses[-1]


if __name__ == "__main__":
    ranks = shardwise.run_local(train, 4)
    for rank, (read, returned, loss) in enumerate(ranks):
        print(f"rank {rank} read {read} and returned {returned}, its part of the loss: {loss:.4f}")
    print(f"loss of the whole volume: {sum(loss for _, _, loss in ranks):.4f}")

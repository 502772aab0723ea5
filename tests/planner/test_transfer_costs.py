"""Tables of transfers equal the messages that the runtime would send, pair by pair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from message_times import message_seconds
from shardwise import capture
from shardwise.cluster.cluster import Cluster
from shardwise.geometry.layout import Layout
from shardwise.geometry.transfer import Transfer
from shardwise.operators import STRATEGIES, Split
from shardwise.planner.candidates import Candidates
from shardwise.planner.costs import value_operands
from shardwise.planner.layout_columns import Columns, Layouts
from shardwise.planner.links import Network
from shardwise.planner.transfer_costs import Table, Traffic


def transfer_table(
    sources: Sequence[Layout], targets: Sequence[Layout], itemsize: int, network: Network
) -> Table:
    """What it takes to carry a tensor from each source partition to each target cover."""
    columns = Columns(network.world)
    held, needed = (
        Layouts.of(columns, columns.of(np.stack([layout.bounds for layout in layouts])))
        for layouts in (sources, targets)
    )
    needed = needed.inside(sources[0].shape)
    table = Traffic(network, itemsize).table(held, needed)
    pick = np.ix_(held.index, needed.index)
    return Table(table.seconds[pick], table.nbytes[pick])


class Block(nn.Module):
    """Layers with halos, strides, groups, partial sums, concatenation and a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.linear = nn.Linear(16 * 3 * 3, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv1(x)).relu()
        x = torch.cat([self.conv2(x), self.pool(x)], 1)
        return self.linear(nn.functional.adaptive_avg_pool2d(x, 3).flatten(1))


GRAPH = capture(Block(), torch.zeros(8, 4, 13, 12))


def exact(source: Layout, target: Layout, network: Network) -> tuple[float, float]:
    messages = Transfer(source, target).messages * 4.0
    return message_seconds(network, messages), float(messages.sum())


def without_latency(cluster: Cluster) -> Cluster:
    links = tuple(link.model_copy(update={"latency": 0.0}) for link in cluster.links)
    return cluster.model_copy(update={"links": links})


@pytest.mark.parametrize(
    "cluster", ["4x10Gb", "2x2@1Gb/4:1", "8@1Gb", "2x2x2@1Gb/2:1/2:1", "6@1Gb"]
)
def test_tables_equal_messages(cluster: str) -> None:
    machines = without_latency(Cluster.load(cluster))
    network = Network(machines)
    candidates = Candidates.of(GRAPH, machines.world)
    generator = np.random.default_rng(0)
    for layer in GRAPH.layers:
        for index, name in value_operands(layer):
            producer = GRAPH[name]
            ends = [candidates.configs(end, GRAPH.batch) for end in (producer, layer)]
            chosen = [
                [configs[i] for i in generator.integers(0, len(configs), 9)] for configs in ends
            ]
            held = [Split(producer, c, machines.world) for c in chosen[0]]
            needing = [Split(layer, c, machines.world) for c in chosen[1]]
            sources = [STRATEGIES[producer.op].output(split) for split in held]
            targets = [STRATEGIES[layer.op].needs(split)[index].layout for split in needing]
            table = transfer_table(sources, targets, 4, network)
            for i, source in enumerate(sources):
                for j, target in enumerate(targets):
                    seconds, nbytes = exact(source, target, network)
                    where = f"{name} {chosen[0][i]} -> {layer.name} {chosen[1][j]}"
                    assert table.nbytes[i, j] == pytest.approx(nbytes), where
                    assert table.seconds[i, j] == pytest.approx(seconds, rel=1e-6), where

"""Where the layers of a graph are drawn: rows from top to bottom, branches side by side.

The usual way to draw a graph in layers (Sugiyama, Tagawa and Toda 1981): rows by the longest path,
long edges pass through places of their own in the rows between, each row is ordered by the mean of
its neighbours, and is then put as near to them as widths allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.graph.layer_graph import Layer, LayerGraph
from shardwise.operators import STRATEGIES
from shardwise.plans.plan import Plan

WIDTH, HEIGHT = 200.0, 40.0  # of a block, in pixels
PITCH = 66.0  # from row to row
GAP = 18.0  # between neighbours of a row
LINE = 8.0  # width of the place that a passing edge takes
SWEEPS = 13  # odd: the last one goes down, so that chains hang straight

Item = tuple[int, int]  # a block at its row, or what passes from a block through a row below it
Links = dict[Item, tuple[list[Item], list[Item]]]  # the neighbours of each item above and below


@dataclass(frozen=True)
class DrawnLayers:
    """Layers drawn as one: a layer and those after it that keep its shape and its split."""

    layers: tuple[str, ...]
    x: float = 0.0  # of the middle
    y: float = 0.0  # of the top


@dataclass(frozen=True)
class Edge:
    """A line from one block down to another; places in the drawing's list of blocks."""

    source: int
    target: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Drawing:
    width: float
    height: float
    blocks: tuple[DrawnLayers, ...]
    edges: tuple[Edge, ...]


def draw(graph: LayerGraph, plan: Plan) -> Drawing:
    """The graph as blocks with places, and edges around them."""
    groups = grouped(graph, plan)
    place = {name: i for i, names in enumerate(groups) for name in names}
    reads = [
        sorted({place[source] for name in names for source in graph[name].inputs} - {i})
        for i, names in enumerate(groups)
    ]
    row = _rows(reads)
    rows, links = _items(row, reads)
    _order(rows, links)
    xs = _places(rows, links, row)
    left = min(xs[item] - _width(item, row) / 2 for item in xs)
    xs = {item: x - left + GAP for item, x in xs.items()}
    right = max(xs[item] + _width(item, row) / 2 for item in xs)
    blocks = tuple(
        DrawnLayers(tuple(names), xs[i, row[i]], GAP + PITCH * row[i])
        for i, names in enumerate(groups)
    )
    edges = tuple(
        Edge(source, target, _points(source, target, row, xs))
        for target, sources in enumerate(reads)
        for source in sources
    )
    return Drawing(right + GAP, PITCH * (len(rows) - 1) + HEIGHT + 2 * GAP, blocks, edges)


def grouped(graph: LayerGraph, plan: Plan) -> list[list[str]]:
    """Layers that are drawn together, in the order in which they run."""
    groups: list[list[str]] = []
    home: dict[str, list[str]] = {}
    for layer in graph.layers:
        if _continues(layer, graph, plan):
            home[layer.name] = home[layer.inputs[0]]
            home[layer.name].append(layer.name)
        else:
            home[layer.name] = [layer.name]
            groups.append(home[layer.name])
    return groups


def _continues(layer: Layer, graph: LayerGraph, plan: Plan) -> bool:
    """Whether a layer only touches up what the one before it has computed."""
    if layer.is_input or STRATEGIES[layer.op].contracts or len(set(layer.inputs)) != 1:
        return False
    source = graph[layer.inputs[0]]
    return (
        not source.is_input
        and len(graph.consumers[source.name]) == 1
        and source.name not in graph.outputs
        and source.shape == layer.shape
        and plan.config(source, graph) == plan.config(layer, graph)
    )


def _rows(reads: Sequence[Sequence[int]]) -> list[int]:
    """The longest path from an input to each block; inputs go just above their first reader."""
    row: list[int] = []
    for sources in reads:
        row.append(max((row[source] + 1 for source in sources), default=0))
    for i, sources in enumerate(reads):
        below = [row[target] for target, read in enumerate(reads) if i in read and not sources]
        row[i] = min(below) - 1 if below else row[i]
    return row


def _items(row: Sequence[int], reads: Sequence[Sequence[int]]) -> tuple[list[list[Item]], Links]:
    """What stands in each row, and the neighbours of each item.

    All long edges of one block share their way down, else a dense network would be all lines.
    """
    rows: list[list[Item]] = [[] for _ in range(max(row) + 1)]
    links: Links = {}
    last = list(row)
    for target, sources in enumerate(reads):
        for source in sources:
            last[source] = max(last[source], row[target] - 1)
    for block, first in enumerate(row):
        for level in range(first, last[block] + 1):
            rows[level].append((block, level))
            links[block, level] = ([], [])
    for block, first in enumerate(row):
        for upper, lower in pairwise((block, level) for level in range(first, last[block] + 1)):
            _link(links, upper, lower)
    for target, sources in enumerate(reads):
        for source in sources:
            _link(links, (source, row[target] - 1), (target, row[target]))
    return rows, links


def _link(links: Links, upper: Item, lower: Item) -> None:
    links[upper][1].append(lower)
    links[lower][0].append(upper)


def _order(rows: list[list[Item]], links: Links) -> None:
    """Sorts every row by the mean place of its neighbours, downwards and upwards in turn."""
    spot = {item: float(i) for row in rows for i, item in enumerate(row)}
    for sweep in range(SWEEPS):
        side = sweep % 2
        for row in rows if side == 0 else reversed(rows):
            row.sort(key=lambda item: _mean(links[item][side], spot, spot[item]))
            spot.update({item: i - (len(row) - 1) / 2 for i, item in enumerate(row)})


def _places(rows: Sequence[Sequence[Item]], links: Links, row: Sequence[int]) -> dict[Item, float]:
    """The middle of every item: near its neighbours, and no two of a row overlap."""
    xs = {item: 0.0 for items in rows for item in items}
    for sweep in range(SWEEPS):
        side = sweep % 2
        for items in rows if side == 0 else reversed(rows):
            wanted = [_mean(links[item][side], xs, xs[item]) for item in items]
            gaps = [(_width(a, row) + _width(b, row)) / 2 + GAP for a, b in pairwise(items)]
            xs.update(zip(items, spread(wanted, gaps), strict=True))
    return xs


def _mean(items: Sequence[Item], values: Mapping[Item, float], default: float) -> float:
    return sum(values[item] for item in items) / len(items) if items else default


def _width(item: Item, row: Sequence[int]) -> float:
    block, level = item
    return WIDTH if level == row[block] else LINE


def spread(wanted: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Places in this order, at least `gaps` apart, with the least squares of moves.

    Less the gaps to their left the places must not fall: isotonic regression, by pooling
    neighbours that are in the wrong order.

    >>> spread([0, 0], [10])
    [-5.0, 5.0]
    """
    offsets = [0.0]
    for gap in gaps:
        offsets.append(offsets[-1] + gap)
    pools: list[tuple[float, int]] = []  # mean and number of members
    for want, offset in zip(wanted, offsets, strict=True):
        mean, count = want - offset, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _points(
    source: int, target: int, row: Sequence[int], xs: Mapping[Item, float]
) -> tuple[tuple[float, float], ...]:
    """From the bottom of one block to the top of another, straight through the rows between."""
    points = [(xs[source, row[source]], GAP + PITCH * row[source] + HEIGHT)]
    for level in range(row[source] + 1, row[target]):
        x, top = xs[source, level], GAP + PITCH * level
        points += [(x, top), (x, top + HEIGHT)]
    return (*points, (xs[target, row[target]], GAP + PITCH * row[target]))

"""Which layers the backward pass computes again, instead of keeping what it needs of them.

A plan names *segments*: layers, or modules with all their layers. Of a segment only what comes from
outside is kept: values that others made, and what other ranks sent. Just before its gradients are
needed it is computed again, and let go at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from shardwise.errors import PlanError
from shardwise.graph.layer_graph import LayerGraph

Segments = tuple[tuple[str, ...], ...]  # names of layers or of modules


def segment_numbers(segments: Segments, graph: LayerGraph) -> dict[str, int]:
    """The segment of every layer that is computed again; names that a graph has not are no matter.

    The graph of evaluation may have other layers than that of training.
    """
    return {
        layer: number
        for number, names in enumerate(segments)
        for name in names
        for layer in _named(name, graph)
    }


def check_segments(segments: Segments, graph: LayerGraph) -> None:
    """Raises where a segment names what the model has not, or what another has named."""
    seen: dict[str, int] = {}
    for number, names in enumerate(segments):
        for name in names:
            found = list(_named(name, graph))
            if not found:
                close = get_close_matches(name, graph.by_name, n=1)
                nearest = f" (nearest: {close[0]!r})" if close else ""
                raise PlanError(
                    f"'recompute' names {name!r}, which is no layer or module of it{nearest}"
                )
            for layer in found:
                if seen.setdefault(layer, number) != number:
                    raise PlanError(
                        f"'recompute' names layer {layer!r} in two segments; leave it in one"
                    )


def _named(name: str, graph: LayerGraph) -> Iterator[str]:
    """The layers that a name stands for: that of the name, or else those of the module.

    Steps within a module may have its name with more behind it, and be in another segment.
    """
    if name in graph:
        found = [graph[name]]
    else:
        found = [layer for layer in graph.layers if layer.name.startswith(f"{name}.")]
    yield from (layer.name for layer in found if not layer.is_input)

"""The loss and the score of a batch, whether a rank has the whole output or its part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from shardwise.comm import About
from shardwise.data import Batch, Source
from shardwise.data.loader import IGNORED
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.graph.layer_graph import LayerGraph
from shardwise.runtime.parallel import ParallelModel, of

from .settings import Settings


class Losses:
    """Cross entropy over all samples (and voxels) of the global batch.

    With whole outputs every rank computes the same. With local ones each computes its part, and the
    parts of all ranks add up.
    """

    def __init__(self, settings: Settings, model: ParallelModel, graph: LayerGraph) -> None:
        self.smoothing, self.model = settings.label_smoothing, model
        self.local = settings.output == "local"
        self.comm = of(model).comm
        if len(graph.outputs) != 1 or len(graph[graph.outputs[0]].shape) < 2:
            raise ShardwiseError(
                f"the model returns {len(graph.outputs)} outputs; training needs one tensor of "
                "samples x classes (x space)"
            )
        self._shape = graph[graph.outputs[0]].shape

    def label_box(self, source: Source) -> Callable[[int], Box] | None:
        """Which labels a rank reads: all of them, or those of its part of the output."""
        self._check(source)
        if not self.local:
            return None

        def part(batch: int) -> Box:
            box, keep = of(self.model).output_box(batch), [0]
            if not box.empty and box.shape[1] != self._shape[1]:
                raise ShardwiseError(
                    "the plan splits the classes of the output; with output local a rank needs all "
                    "classes of its part"
                )
            keep += range(2, len(self._shape)) if source.label_shape else []
            if box.empty:
                return Box((0,) * len(keep), (0,) * len(keep))
            return Box(
                tuple(box.starts[dim] for dim in keep), tuple(box.stops[dim] for dim in keep)
            )

        return part

    def _check(self, source: Source) -> None:
        classes, space = self._shape[1], self._shape[2:]
        if classes < len(source.classes):
            raise ShardwiseError(
                f"the model has {classes} classes, and {source.name} has {len(source.classes)}"
            )
        if bool(space) != bool(source.label_shape):
            kind = "a label per voxel" if source.label_shape else "one label per sample"
            raise ShardwiseError(
                f"the model's output is {'x'.join(map(str, self._shape))}, and {source.name} has "
                f"{kind}"
            )

    def __call__(self, output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, float]:
        """The loss to differentiate, of this rank's part, and the value of the whole."""
        if not self.local:
            loss = self._entropy(output, batch.y, "mean")
            if batch.mixed is not None:
                other = self._entropy(output, batch.mixed, "mean")
                loss = batch.share * loss + (1 - batch.share) * other
            return loss, float(loss.detach())
        count = self.over_ranks((batch.y != IGNORED).sum().double().view(1))
        loss = self._entropy(output, batch.y, "sum") / count.to(output.dtype).squeeze()
        return loss, float(self.over_ranks(loss.detach().double().view(1)))

    def _entropy(self, output: torch.Tensor, labels: torch.Tensor, how: str) -> torch.Tensor:
        return functional.cross_entropy(
            output, labels, ignore_index=IGNORED, reduction=how, label_smoothing=self.smoothing
        )

    def score(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The sum of losses, how many are right, and of how many; of this rank's part."""
        loss = functional.cross_entropy(output, batch.y, ignore_index=IGNORED, reduction="sum")
        right = (output.argmax(1) == batch.y).sum() if output.numel() else batch.y.sum() * 0
        count = (batch.y != IGNORED).sum()
        return torch.stack([loss.double(), right.double(), count.double()])

    def over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """The sums of all ranks, where each has a part."""
        if self.local:
            everybody = tuple(range(self.comm.size))
            self.comm.all_reduce(everybody, sums, About("the loss")).wait()
        return sums

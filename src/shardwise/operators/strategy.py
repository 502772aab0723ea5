"""What every operator says about itself: its legal splits, what it needs, holds and computes.

Planner, simulator and runtime all read this one description. A strategy is stateless; everything
it says is a function of a `Split`, i.e. of a layer, its config and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from shardwise.errors import PlanError
from shardwise.geometry.box import Box
from shardwise.geometry.grid import AXES, AXIS_NAMES, Config
from shardwise.geometry.layout import Layout
from shardwise.graph.labels import Shape, default_dims, inherited_dims
from shardwise.graph.layer_graph import Attrs, Layer
from shardwise.operators.calls import Call, Request, Requests, overloads_of
from shardwise.operators.splits import LABEL_AXES, Split
from shardwise.tensors import Wait


@dataclass(frozen=True)
class Need:
    """The box of one operand that each rank needs, and what lies beyond the tensor's edge."""

    layout: Layout
    fill: float = 0.0


Inputs = list[tuple[Shape, str]]  # the shape and the labels of each layer that is read
Function = Callable[[list[torch.Tensor]], torch.Tensor]
Gradients = Callable[[], list[torch.Tensor | None]]  # of a layer's weights, in their order


@dataclass(frozen=True)
class Local(Generic[Attrs]):
    """One rank's share of a layer, with what `run` may ask of the runtime."""

    layer: Layer[Attrs]
    config: Config
    output: Box  # of the partial result where there is one
    needs: tuple[Box, ...]
    sums: Box | None = None  # of the statistics that are summed inside the layer
    sum: Callable[[torch.Tensor], torch.Tensor] | None = None  # sums them over the ranks
    gather: tuple[Callable[[torch.Tensor], Wait], ...] = ()  # start these, see Strategy.gathers
    later: Callable[[Gradients], object] | None = None  # computes weights' gradients when due
    module: Any = None
    in_place: bool = False  # the first operand is read by nobody else and may be overwritten
    moved: bool = False  # others read a moved copy of the output, so nobody keeps the output itself
    device: torch.device | None = None  # where tensors that are made here belong

    @cached_property
    def attrs(self) -> Attrs:
        return self.layer.attrs

    @cached_property
    def is_split(self) -> tuple[bool, ...]:
        """Whether each dimension of the output is cut at all."""
        axes = [LABEL_AXES[label] for label in self.layer.dims]
        return tuple(prod(getattr(self.config, a) for a in each) > 1 for each in axes)

    def tensors(self, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The operands in the operator's fixed order, None for those left out."""
        present = iter(tensors)
        return [next(present) if there else None for there in self.layer.present]


def remembered(method: Callable[[Any, Split], Any]) -> Callable[[Any, Split], Any]:
    """A strategy's answer about a split, given once and kept with the split."""
    name = method.__qualname__

    @wraps(method)
    def answer(strategy: Any, split: Split) -> Any:
        key = (type(strategy).__name__, name)
        if key not in split.memory:
            split.memory[key] = method(strategy, split)
        return split.memory[key]

    return answer


class Strategy:
    """An operator whose output is split by its own labels; a base for all others."""

    op: str  # its name, which `operator` gives it

    # What every operator must say, see `operator`.
    keeps_inputs: bool  # for the backward pass
    draws: bool  # uses random numbers, which every rank must draw to stay in step

    joint_channels = True  # f and c split the same dimension, so their product is limited
    free = False  # hands out a view of its operand: no time, no memory
    degrees_matter = False  # its needs depend on how many parts an axis has, not only on which
    always_runs = False  # even if nothing comes of it: torch.export may have told another shape
    keeps_bytes = 0  # for the backward pass, beside tensors, per element of the output
    known = True  # False: nobody has described it; it runs whole, and a plan says so
    contracts = False  # a product with a weight, over channels
    fully_connected = False  # of samples without space
    normalizes = False  # belongs into a block with the layer before it
    counts_batches = False  # in a buffer of its module
    labels_by_position = False  # samples, channels, space: whatever its operands are called
    reads_beyond = False  # its boxes may reach past the edge of its operand, into padding
    part_of_layer = False  # a step before the layer that a module stands for
    as_called = False  # runs the ATen call itself
    shapes_only = False  # reads nothing of its operands but their shapes

    def __init_subclass__(cls) -> None:
        for name in ("output", "partial", "needs", "sums"):
            if name in cls.__dict__:
                setattr(cls, name, remembered(cls.__dict__[name]))

    def read(self, call: Call) -> Request | Requests | None:
        """The layers that compute a call; None where this operator cannot: it runs whole then."""
        raise NotImplementedError

    def labels(self, attrs: Any, shape: Shape, inputs: Inputs) -> str:
        """The labels of the output's dimensions, from the shapes and labels of what it reads."""
        return default_dims(shape) if self.labels_by_position else inherited_dims(shape, inputs)

    def ends_gradient(self, layer: Layer) -> bool:
        """Whether nothing that comes before gets a gradient through this layer."""
        return False

    def makes_new_tensor(self, layer: Layer) -> bool:
        """Whether the output is memory of its own that nobody keeps for the backward pass."""
        return False

    def keeps_output(self, layer: Layer) -> bool:
        """Whether the backward pass reads the output."""
        return False

    def keeps(self, layer: Layer) -> bool:
        """Whether the backward pass reads the operands."""
        return self.keeps_inputs

    def keeps_beside(self, layer: Layer) -> float:
        """What the backward pass reads beside tensors; bytes per element of the output."""
        return self.keeps_bytes

    def num_sums(self, layer: Layer) -> int:
        """How many messages of statistics, if any, its forward pass sends one after the other."""
        return 1

    def axes(self, layer: Layer) -> dict[str, int]:
        """The axes that may split this layer and their largest degrees."""
        pairs = zip(layer.shape, layer.dims, strict=True)
        return {axis: size for size, label in pairs for axis in LABEL_AXES[label]}

    def limits(self, layer: Layer, batch: int) -> dict[str, int]:
        """The same for batches of so many samples."""
        limits = self.axes(layer)
        return limits | {"n": max(batch, 1)} if "n" in limits else limits

    @remembered
    def output(self, split: Split) -> Layout:
        """The partition of the output."""
        return split.grid.layout(split.layer.shape, split.layer.dims)

    def partial(self, split: Split) -> Layout | None:
        """The cover of partial results that are summed into `output`, if there are any."""
        return None

    def needs(self, split: Split) -> tuple[Need, ...]:
        """What each rank needs of each operand."""
        raise NotImplementedError

    def sums(self, split: Split) -> Layout | None:
        """The cover of statistics summed inside the layer, in forward and in backward."""
        return None

    def can_gather(self, layer: Layer) -> bool:
        """Whether the gradient of its weights may be computed from gathered inputs (P3)."""
        return False

    def gathers(self, split: Split) -> tuple[tuple[Layout, Layout], ...]:
        """What is gathered for the gradient of the weights (P3), each from its layout to another.

        First the operand, then the gradient of the output.
        """
        return ()

    def run(self, local: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The local computation: from the needed boxes to the box of the output."""
        raise NotImplementedError

    def lower(self, local: Local) -> Function:
        """The local computation as a function of tensors, with all else found out before."""
        return partial(self.run, local)

    def flops(self, split: Split) -> np.ndarray:
        """Forward floating-point operations per rank; [world]."""
        return (self.partial(split) or self.output(split)).numels.astype(float)

    def bytes(self, split: Split, itemsize: int = 4) -> np.ndarray:
        """Bytes that the forward computation reads and writes per rank; [world]."""
        read = sum((need.layout.numels for need in self.needs(split)), np.zeros(split.world))
        written = (self.partial(split) or self.output(split)).numels
        return (read + written) * float(itemsize)

    def check(self, layer: Layer, config: Config, world: int) -> None:
        """Raises where this config cannot split this layer."""
        legal = self.axes(layer)
        for axis, degree in zip(AXES, config.degrees, strict=True):
            if degree == 1 or (axis == "n" and axis in legal):  # a batch may be smaller than n
                continue
            if axis not in legal:
                allowed = ", ".join(f"{a} up to {k}" for a, k in legal.items() if a != "n")
                allowed = ", ".join(filter(None, ["n" if "n" in legal else "", allowed]))
                raise PlanError(
                    f"layer {layer.name!r} ({layer.op}) cannot be split over {AXIS_NAMES[axis]} "
                    f"({axis}={degree}); legal: {allowed or 'one worker'}"
                )
            if degree > max(legal[axis], 1):
                raise PlanError(
                    f"layer {layer.name!r} ({layer.op}): {axis}={degree} is larger than its "
                    f"{legal[axis]} {AXIS_NAMES[axis]}; legal: {axis} from 1 to {legal[axis]}"
                )
        if max(config.ranks) >= world:
            raise PlanError(
                f"layer {layer.name!r}: rank {max(config.ranks)} does not exist among {world} "
                f"workers; legal: 0 to {world - 1}"
            )
        if config.gradient == "gather" and not (
            config.num_workers == config.n and self.can_gather(layer)
        ):
            raise PlanError(
                f"layer {layer.name!r} ({layer.op}): gradient 'gather' is for linear layers that "
                f"are split over samples only, and whose weights are parameters, not for {config}"
            )
        joint = LABEL_AXES["c"]
        if "c" in layer.dims and "c" in legal and self.joint_channels:
            degree, size = config.f * config.c, layer.shape[layer.dims.index("c")]
            if degree > max(size, 1):
                raise PlanError(
                    f"layer {layer.name!r} ({layer.op}): {' x '.join(joint)} = {degree} is larger "
                    f"than its {size} channels"
                )


def is_active(local: Local) -> bool:
    """Whether a layer with two modes behaves as in training."""
    traits = local.layer.traits
    return not traits.never and (traits.always or local.module.training)


STRAIGHT = Strategy()


def whole(split: Split, shape: tuple[int, ...]) -> Layout:
    """Every used rank needs the whole operand."""
    return Layout.of(shape, [split.whole(size) for size in shape])


def broadcast(split: Split, shape: tuple[int, ...]) -> Layout:
    """What an output box needs of an operand that is broadcast against the output."""
    if shape == split.layer.shape:
        return Strategy.output(STRAIGHT, split)
    lead = len(split.layer.shape) - len(shape)
    ranges = [
        split.whole(1) if size == 1 else split.dim_ranges(lead + dim)
        for dim, size in enumerate(shape)
    ]
    return Layout.of(shape, ranges)


def narrow(tensor: torch.Tensor, held: Box, wanted: Box) -> torch.Tensor:
    """The part `wanted` of a tensor that holds `held`; the tensor itself if they are the same."""
    return tensor if held == wanted else tensor[wanted.slices_in(held)]


# -- where operators are found: by name, and by the ATen calls that they read ----------------------

STRATEGIES: dict[str, Strategy] = {}  # by the name that layers have in their `op`
READERS: dict[str, Strategy] = {}  # by the ATen operator whose calls they read

S = TypeVar("S", bound=Strategy)
STATED = ("keeps_inputs", "draws")  # by every operator: forgotten, plans are wrong
WRITTEN = ("needs", "run")


def operator(name: str, *aten: str) -> Callable[[type[S]], type[S]]:
    """Makes a class the operator of this name, for calls of these ATen operators.

    >>> @operator("flip", "flip")  # doctest: +SKIP
    ... class Flip(Moves): ...
    """

    def register(cls: type[S]) -> type[S]:
        missing = [member for member in STATED if not hasattr(cls, member)]
        missing += [own for own in WRITTEN if getattr(cls, own) is getattr(Strategy, own)]
        if aten and cls.read is Strategy.read:
            missing.append("read")
        if missing:
            raise TypeError(
                f"operator {name!r} ({cls.__name__}) does not say: {', '.join(missing)}"
            )
        random = [each for each in aten if _draws(each)]
        if random and not cls.draws:
            raise TypeError(
                f"operator {name!r}: {random[0]} draws random numbers, `draws` is False"
            )
        cls.op = name
        STRATEGIES[name] = cls()
        READERS.update(dict.fromkeys(aten, STRATEGIES[name]))
        return cls

    return register


def _draws(aten: str) -> bool:
    """Whether torch says that an ATen operator uses random numbers."""
    packet = getattr(torch.ops.aten, aten, None)
    if packet is None:
        raise TypeError(f"there is no ATen operator {aten!r}")
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads_of(packet))


def read(call: Call) -> Requests:
    """The layers that compute a call: by who knows it, or whole on one worker."""
    anyone = (STRATEGIES[name] for name in ("pointwise", "drawn", "opaque"))
    for reader in (STRATEGIES["made"], READERS.get(call.name), *anyone):
        found = _read(reader, call) if reader is not None else None
        if found is not None:
            return [found] if isinstance(found, Request) else found
    raise AssertionError(call.name)


def _read(reader: Strategy, call: Call) -> Request | Requests | None:
    try:
        return reader.read(call)
    except KeyError as missing:
        if call.may_have(missing.args[0]):  # another overload has it
            return None
        raise

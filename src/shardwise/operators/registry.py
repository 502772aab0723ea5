"""Where operators are found: by name, and by the ATen calls that they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from shardwise.graph.layer_graph import Layer
from shardwise.operators.calls import Call, Request, Requests
from shardwise.operators.strategy import Strategy

STRATEGIES: dict[str, Strategy] = {}  # by the name that layers have in their `op`
READERS: dict[str, Strategy] = {}  # by the ATen operator whose calls they read

S = TypeVar("S", bound=Strategy)
STATED = ("keeps_inputs", "draws", "needs_float32")  # by every operator: forgotten, plans are wrong
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
        STRATEGIES[name] = cls()
        READERS.update(dict.fromkeys(aten, STRATEGIES[name]))
        return cls

    return register


def _draws(aten: str) -> bool:
    """Whether torch says that an ATen operator uses random numbers."""
    packet = getattr(torch.ops.aten, aten, None)
    if packet is None:
        raise TypeError(f"there is no ATen operator {aten!r}")
    overloads = (getattr(packet, each) for each in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def strategy_of(layer: Layer) -> Strategy:
    """The strategy of a layer's operator."""
    return STRATEGIES[layer.op]


def read(call: Call) -> Requests:
    """The layers that compute a call: made of shapes alone, known, or whole on one worker."""
    for reader in (STRATEGIES["made"], READERS.get(call.name), STRATEGIES["opaque"]):
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

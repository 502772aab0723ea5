"""What is looked at before an optimizer's step: whether it is right for parameters that are blocks.

An optimizer of the original's parameters, made before `parallelize`, goes on with those of the
parallel model, as it would with DDP. What it keeps must be of the blocks that this rank holds: that
of whole parameters is cut, and that of other blocks is refused. Its `state_dict()` is whole, as the
model's is, so that what rank 0 saves can be loaded by all ranks, and under any plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.runtime.agreement import together
from shardwise.runtime.block import BlockParameter
from shardwise.runtime.elementwise import is_elementwise, kind_of
from shardwise.runtime.place import Place
from shardwise.runtime.weights import gather_whole

NOTE = "shardwise_blocks"  # of a group of parameters: the boxes of those that are blocks, by name


@dataclass(frozen=True, eq=False)
class Wrapped:
    """The parameters of a model that was made parallel, and the parallel one."""

    originals: tuple[weakref.ref[nn.Parameter], ...]
    root: weakref.ref[nn.Module]

    def is_trained(self) -> bool:
        """Whether the parallel model has gradients, and the original has none."""
        root, params = self.root(), [ref() for ref in self.originals]
        if root is None or any(p is not None and p.grad is not None for p in params):
            return False
        return any(p.grad is not None for p in root.parameters())


_wrapped: Any = WeakIdKeyDictionary()  # original parameter -> what it was wrapped as
_last: list[Wrapped] = []  # that was made parallel


def note_originals(original: nn.Module, root: nn.Module) -> None:
    """From now on optimizers of the original's parameters are known as such."""
    named = dict(original.named_parameters())
    wrapped = Wrapped(tuple(map(weakref.ref, named.values())), weakref.ref(root))
    _last[:] = [wrapped]
    for name, param in named.items():
        live = [own for own in _wrapped.get(param, ()) if own[0].root() is not None]
        _wrapped[param] = [*live, (wrapped, name)]


def check_optimizer(optimizer: Optimizer, *_: Any) -> None:
    """Raises where an optimizer would be wrong on blocks; what it keeps becomes that of blocks."""
    if _seen(optimizer):
        return
    changed = _follow(optimizer)
    for group in optimizer.param_groups:
        places = {p: kept_place(optimizer, p) for p in group["params"]}
        blocks = {param: place for param, place in places.items() if place is not None}
        if blocks or NOTE in group:
            _check_group(optimizer, group, blocks)
    if changed or not any(p in _wrapped for g in optimizer.param_groups for p in g["params"]):
        optimizer.__dict__["_shardwise_seen"] = _look(optimizer)


def _look(optimizer: Optimizer) -> list[Any]:
    """On what it depends whether an optimizer must be looked at again."""
    found: list[Any] = [*_last]
    for group in optimizer.param_groups:
        found += [group, group.get(NOTE), *group["params"]]
    return found


def _seen(optimizer: Optimizer) -> bool:
    """Whether this optimizer is as it was when it was looked at."""
    before, now = optimizer.__dict__.get("_shardwise_seen", []), _look(optimizer)
    return len(before) == len(now) and all(map(is_, before, now))


# -- made before parallelize -----------------------------------------------------------------------


def _follow(optimizer: Optimizer) -> bool:
    """Puts parameters of a parallel model in the place of its original's, which nobody trains."""
    twins: Any = WeakIdKeyDictionary()
    is_trained = cache(Wrapped.is_trained)  # by all its parameters, each of which asks
    for group in optimizer.param_groups:
        for param in group["params"]:
            twin = _twin(param, optimizer, is_trained)
            if twin is not None:
                twins[param] = twin
    for group in optimizer.param_groups if len(twins) else ():
        for param in group["params"]:
            if param in twins and param in optimizer.state:
                optimizer.state[twins[param]] = optimizer.state.pop(param)
        group["params"] = [twins.get(param, param) for param in group["params"]]
    return len(twins) > 0


def _twin(
    param: nn.Parameter, optimizer: Optimizer, is_trained: Callable[[Wrapped], bool]
) -> nn.Parameter | None:
    trained = [own for own in _wrapped.get(param, ()) if is_trained(own[0])]
    if len(trained) > 1:
        raise ShardwiseError(
            f"the {kind_of(optimizer).__name__} holds parameters of a model that was made parallel "
            "several times; make it of the parameters() of the parallel model that it is to train"
        )
    for wrapped, name in trained:
        root = wrapped.root()
        return None if root is None else root.get_parameter(name)
    return None


# -- blocks ----------------------------------------------------------------------------------------


Blocks = dict[nn.Parameter, Place]


def kept_place(optimizer: Optimizer, param: torch.Tensor) -> Place | None:
    """Where what is kept of a parameter lies, where ranks keep blocks, or share one in parts."""
    find = getattr(optimizer, "shardwise_place", None)
    found = None if find is None else find(param)
    return param._place if found is None and isinstance(param, BlockParameter) else found


def _check_group(optimizer: Optimizer, group: dict[str, Any], blocks: Blocks) -> None:
    _check_kind(optimizer, group, blocks)
    comm = next((place.comm for place in blocks.values()), None)
    with together(comm, "an optimizer's step") if comm is not None else nullcontext():
        _check_boxes(group, [*blocks.values()])
    if blocks and "_shardwise_whole" not in optimizer.__dict__:
        hook = optimizer.register_state_dict_post_hook(_whole)
        optimizer.__dict__["_shardwise_whole"] = hook
    for param, place in blocks.items():
        own = optimizer.state.get(param, {})
        own |= {key: _cut(value, place) for key, value in own.items()}


def _check_kind(optimizer: Optimizer, group: dict[str, Any], blocks: Blocks) -> None:
    options = {key: value for key, value in group.items() if key not in ("params", NOTE)}
    for ndim in sorted({param.ndim for param in blocks}):
        param, place = next(pair for pair in blocks.items() if pair[0].ndim == ndim)
        cut = ndim if hasattr(optimizer, "shardwise_place") else 2  # parts are of any dim
        if not is_elementwise(optimizer, options, ndim, param.device, cut):
            name = place.name
            if not isinstance(param, BlockParameter):
                raise ShardwiseError(
                    f"{kind_of(optimizer).__name__} does not update every element by itself, and "
                    f"with shard_state=True every rank would update a part of {name!r} as if there "
                    "were no others; use an optimizer such as SGD, Adam or RMSprop, or leave out "
                    "shard_state"
                )
            raise ShardwiseError(
                f"{kind_of(optimizer).__name__} does not update every element by itself, and "
                f"{name!r} is split: every rank would update its block as if there were no others; "
                "use an optimizer such as SGD, Adam or RMSprop, or a plan that splits neither "
                "filters nor channels"
            )


def _check_boxes(group: dict[str, Any], places: list[Place]) -> None:
    """Raises where what the optimizer keeps is of other blocks; notes those of this rank."""
    here = {place.name: str(place.layout[place.comm.rank]) for place in places}
    noted = group.get(NOTE, here)
    for name in {**noted, **here}:
        if noted.get(name) != here.get(name):
            raise ShardwiseError(
                f"the optimizer's state is of another rank or plan: of {name!r} it has "
                f"{noted.get(name, 'the whole')}, and this rank holds "
                f"{here.get(name, 'the whole')}; every rank must load what it saved itself, or "
                "use shardwise.checkpoint, which loads under any plan"
            )
    group[NOTE] = here


def _cut(value: Any, place: Place) -> Any:
    """This rank's block of what an optimizer keeps for a whole parameter."""
    box = place.layout[place.comm.rank]
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != place.layout.shape:
        return value
    whole = Box.whole(place.layout.shape)
    return value if box == whole else value[box.slices_in(whole)].clone()


# -- what is saved ---------------------------------------------------------------------------------

_as_blocks: ContextVar[bool] = ContextVar("as_blocks", default=False)


@contextmanager
def as_blocks() -> Iterator[None]:
    """Within, the `state_dict()` of optimizers is of this rank's blocks."""
    token = _as_blocks.set(True)
    try:
        yield
    finally:
        _as_blocks.reset(token)


def _whole(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """What an optimizer keeps of whole parameters; all ranks must ask for it."""
    if _as_blocks.get():
        return None
    state, groups = dict(state_dict["state"]), []
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, number in zip(group["params"], saved["params"], strict=True):
            place = kept_place(optimizer, param)
            if NOTE in group and place is not None and number in state:
                state[number] = _gathered(place, state[number])
        groups.append({key: value for key, value in saved.items() if key != NOTE})
    return {**state_dict, "state": state, "param_groups": groups}


def _gathered(place: Place, kept: dict[str, Any]) -> dict[str, Any]:
    shape, found = place.layout[place.comm.rank].shape, dict(kept)
    with together(place.comm, "an optimizer's state_dict"):
        for key, value in kept.items():
            if isinstance(value, torch.Tensor) and value.ndim and tuple(value.shape) == shape:
                found[key] = gather_whole(f"{key} of {place.name}", value, place.layout, place.comm)
    return found


register_optimizer_step_pre_hook(check_optimizer)

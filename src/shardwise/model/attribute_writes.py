"""What forward leaves in its modules: plain data is left there by every pass, tensors are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, get_proxy_slot

from shardwise.errors import CaptureError
from shardwise.model.attribute_values import (
    MISSING,
    LeftBehind,
    Reads,
    copied,
    inside,
    is_data,
    is_object,
    token,
)
from shardwise.model.attributes import INTERNAL

NOTHING = object()
Left = dict[tuple[str, str], Any]  # values, by the path of a module and the name of an attribute


@contextmanager
def left_behind(model: nn.Module, reads: Reads) -> Iterator[Left]:
    """Within, what a call of the model leaves in its modules is found; there is one such call."""
    before = {
        path: {name: (value, token(value)) for name, value in vars(module).items()}
        for path, module in model.named_modules()
    }
    left: Left = {}
    refusals: list[CaptureError] = []

    def look(*_: Any) -> None:  # while tensors still know what they were made of
        left.clear()
        for path, name, was, value in _changed(model, before):
            try:
                left[path, name] = _judge(path, name, was, value, name in reads.get(path, ()))
            except CaptureError as error:
                refusals.append(error)

    handle = model.register_forward_hook(look)
    try:
        yield left
    finally:
        handle.remove()
    for key in [key for key, value in left.items() if value is NOTHING]:
        del left[key]
    if refusals:
        raise refusals[0]


def _changed(model: nn.Module, before: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """Path, name, and what was and is there, of all attributes that are other than before."""
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            was, known = before.get(path, {}).get(name, (MISSING, None))
            if name not in INTERNAL and known != token(value):
                yield path, name, was, value


def _judge(path: str, name: str, was: Any, value: Any, read: bool) -> Any:
    """What a pass is to leave; NOTHING where later calls do not miss it."""
    known, held = {id(own) for own in inside(was)}, inside(value)
    tensors = [x for x in held if isinstance(x, torch.Tensor) and id(x) not in known]
    if tensors and (is_object(value) or not any(map(_depends, tensors))):
        return NOTHING  # what modules tell each other, or would make again of nothing but numbers
    if value is was and not tensors and isinstance(value, dict) and was.keys() <= value.keys():
        return NOTHING  # a table of what was found before
    if (isinstance(value, torch.Tensor) and read) or (value is was and is_object(value)):
        raise CaptureError(changes(path, name))
    return _without_tensors(value, LeftBehind(name, _module(path)))


def _without_tensors(value: Any, lost: LeftBehind) -> Any:
    if isinstance(value, tuple):
        return tuple(_without_tensors(own, lost) for own in value)
    if isinstance(value, list):
        return [_without_tensors(own, lost) for own in value]
    if isinstance(value, dict):
        return {key: _without_tensors(own, lost) for key, own in value.items()}
    return value if all(map(is_data, inside(value))) else lost


def changes(path: str, name: str) -> str:
    """Why a model whose calls depend on earlier ones is refused."""
    return (
        f"forward changes {name!r} of {_module(path)}, so that later calls depend on earlier ones, "
        "and a parallel model is captured for many calls at once; change it outside of forward, "
        "or give it to forward and let it return it"
    )


def _depends(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made of inputs or weights."""
    mode = get_innermost_proxy_mode()
    if mode is None:
        return True
    made = get_proxy_slot(tensor, mode.tracer, None)
    seen, todo = set(), [made.proxy.node] if made is not None else []
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            return True
        todo += [source for source in node.all_input_nodes if source not in seen]
        seen.add(node)
    return False


def _module(path: str) -> str:
    return f"module {path!r}" if path else "the model"


def leave(left: Mapping[tuple[str, str], Any], modules: Mapping[str, Any]) -> None:
    """Leaves in a parallel model's modules what forward leaves on one device."""
    for (path, name), value in left.items():
        modules[path].__dict__[name] = copied(value, {}) if is_data(value) else value

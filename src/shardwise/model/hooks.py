"""Hooks that modules have when they are captured: what they do must be in the graph, or be refused.

Those of the whole model run as ever, outside of the graph. Those of modules in it run while the
model is captured: what they compute becomes part of the graph, what they only look at is lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError, ShardwiseError

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = (*FORWARD, *BACKWARD)


def never_run(path: str) -> str:
    """Why a hook of a module inside of a parallel model is refused."""
    return (
        f"a hook of module {path!r} would never run: layers of a parallel model are run "
        "without their modules; hooks of the whole model and of parameters do run"
    )


def is_of_torch(hook: Any) -> bool:
    """Whether a hook is part of how torch computes a weight (weight_norm, prune)."""
    kind = hook if isinstance(hook, type) else type(hook)
    return str(getattr(hook, "__module__", kind.__module__)).startswith("torch.nn.utils")


def check_hooks(model: nn.Module) -> None:
    """Raises where a hook of the original would be lost."""
    for path, module in model.named_modules():
        if path and any(getattr(module, table) for table in BACKWARD):
            raise ShardwiseError(never_run(path))
    for name, param in model.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ShardwiseError(
                f"a hook of parameter {name!r} would be lost: set it on the parameter of the "
                "parallel model, where it sees the gradient of this rank's block"
            )


def drop_captured(root: nn.Module) -> None:
    """The hooks of the whole model that are part of its graph do not run once more."""
    for table in HOOKS:
        hooks = getattr(root, table)
        for key in [key for key, hook in hooks.items() if is_of_torch(hook)]:
            del hooks[key]


@contextmanager
def traced_hooks(model: nn.Module) -> Iterator[None]:
    """Within, hooks of the whole model do not run, and those that only look on are noted.

    These are refused at the end.
    """
    onlookers: list[str] = []
    before = [(m, table, getattr(m, table)) for m in model.modules() for table in FORWARD]
    for path, module in model.named_modules():
        for table in FORWARD:
            hooks = OrderedDict(getattr(module, table))
            for key, hook in list(hooks.items()):
                if not is_of_torch(hook) and path:
                    hooks[key] = _watched(hook, path, onlookers)
                elif not is_of_torch(hook):
                    del hooks[key]
            module.__dict__[table] = hooks
    try:
        yield
    finally:
        for module, table, hooks in before:
            module.__dict__[table] = hooks
    if onlookers:
        raise CaptureError(never_run(onlookers[0]))


def _watched(hook: Any, path: str, onlookers: list[str]) -> Any:
    def run(module: nn.Module, *args: Any) -> Any:
        before = _looks(module, args)
        result = hook(module, *args)
        if result is None and _looks(module, args) == before:
            onlookers.append(path)
        return result

    return run


def _looks(module: nn.Module, args: Any) -> Any:
    """What a hook may change, beside what it returns."""
    tables = (module.__dict__, module._parameters, module._buffers)
    versions = [x._version for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    return [{key: id(value) for key, value in table.items()} for table in tables], versions

"""`optimizer`: stock optimizers whose updates of gathered layers hide behind the next forward, and
whose state ranks with the same weights may share (`sharded_state`).

P3: the gradient of a layer with gradient "gather" is computed, and its weights are updated, just
before the layer is used again. The result is that of the same optimizer without delay: momentum,
weight decay, Adam's moments and the learning rate of the step they belong to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.runtime.model_gradients import ModelGradients
from shardwise.runtime.parallel import ParallelModel, of
from shardwise.runtime.sharded_state import Sharded
from shardwise.runtime.state import State
from shardwise.runtime.stored_blocks import StoredBlocks

Settings = list[dict[str, Any]]  # of each group of parameters: learning rate, momentum, ...


def optimizer(
    model: ParallelModel,
    kind: type[Optimizer],
    params: Any = None,
    *,
    shard_state: bool = False,
    **options: Any,
) -> Optimizer:
    """An optimizer of this kind for a parallel model, of all its parameters or those given.

    Weights of gathered layers are up to date in the model's next forward pass, in `state_dict()`
    and after `model.flush()`. With shard_state=True ranks that hold the same weights share what the
    optimizer keeps of them: each keeps and updates a part, and gives its new values to the others;
    all ranks must call it together.

    >>> sgd = optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    """
    bases: tuple[type[Optimizer], ...] = (Sharded, kind) if shard_state else (kind,)
    if not getattr(kind, "knows_blocks", False):  # what asks other ranks must not come later
        bases = (_Delayed, *bases)
    known = type(f"Parallel{kind.__name__}", bases, {"shardwise_kind": kind})
    made: Any = known(model.parameters() if params is None else params, **options)
    if shard_state:
        made.share(of(model)._state)
    if isinstance(made, _Delayed):
        made.follow(of(model)._state)
    return made


class _Delayed(Optimizer):
    """Puts off the update of parameters whose gradient is still on its way."""

    _gradients: ModelGradients
    _blocks: StoredBlocks
    _due: frozenset[str]  # parameters whose update was asked for
    _settings: Settings  # when it was asked for

    def follow(self, state: State) -> None:
        self._gradients, self._blocks = state.gradients, state.blocks
        self._due, self._settings = frozenset(), []
        self._gradients.update_delayed = self.update_delayed

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        delayed = self._gradients.delayed
        if closure is not None or self._due or any(self._has_gradient(n) for n in delayed.names):
            self.update_delayed(None)  # two gradients, or two updates, of one parameter do not mix
        result = super().step(closure)
        self._due = delayed.names
        self._settings = [_settings(group) for group in self.param_groups]
        return result

    def update_delayed(self, wanted: frozenset[str] | None) -> None:
        """Computes delayed gradients of these parameters, and makes the updates that are due."""
        named = self._blocks.params()
        updated = []
        with torch.no_grad():
            for name, gradient in self._gradients.delayed.take(wanted).items():
                param = named[name]
                gradient = gradient.to(param.dtype)  # layers may compute in another
                param.grad = gradient if param.grad is None else param.grad + gradient
                if name in self._due:
                    updated.append(param)
        self._due &= self._gradients.delayed.names
        if updated:
            self._update(updated)

    def _update(self, params: list[torch.Tensor]) -> None:
        """One step for these parameters alone, as it would have been when it was asked for."""
        chosen = {id(param) for param in params}
        others = [p for g in self.param_groups for p in g["params"] if id(p) not in chosen]
        gradients = [param.grad for param in others]
        now = [_settings(group) for group in self.param_groups]
        for param in others:
            param.grad = None
        try:
            self._set(self._settings)
            super().step()
        finally:
            self._set(now)
            for param, gradient in zip(others, gradients, strict=True):
                param.grad = gradient
            for param in params:
                param.grad = None

    def _set(self, settings: Settings) -> None:
        for group, values in zip(self.param_groups, settings, strict=True):
            group.update(values)

    def _has_gradient(self, name: str) -> bool:
        return self._blocks.params()[name].grad is not None

    def zero_grad(self, set_to_none: bool = True) -> None:
        delayed = self._gradients.delayed
        if not self._due:
            delayed.take()  # nobody asked for an update with these
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        self.update_delayed(None)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.update_delayed(None)
        super().load_state_dict(state_dict)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}

"""The model that was made parallel: it stays as it was, which whoever comes from DDP may forget."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn


class _Stale:
    """A hook of the original's state_dict: its weights are not those that were trained."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._versions = _versions(model)

    @property
    def is_over(self) -> bool:
        return self._model() is None

    def __call__(self, original: nn.Module, prefix: str, keep_vars: bool) -> None:
        model = self._model()
        if model is not None and _versions(model) != self._versions:
            warnings.warn(
                f"this {type(original).__name__} is the original, with the weights from before "
                "parallelize; those that were trained are in the parallel model's state_dict()",
                stacklevel=4,
            )

    def __deepcopy__(self, memo: Any) -> Any:
        return "".format

    def __reduce__(self) -> Any:
        """Copies and files of the original get a function of Python's own that does nothing."""
        return getattr, ("", "format")


def _versions(model: nn.Module) -> list[int]:
    """How often each parameter was written to."""
    return [param._version for param in model.parameters()]


def warn_when_saved(original: nn.Module, model: nn.Module) -> None:
    """Lets the original's state_dict() warn once the parallel model has been trained.

    Hooks of parallel models that are gone are removed here, and not when they go: somebody might be
    going through the hooks just then.
    """
    copied, own = model._state_dict_pre_hooks, original._state_dict_pre_hooks
    for hooks, every in ((copied, True), (own, False)):
        stale = [(key, hook) for key, hook in hooks.items() if isinstance(hook, _Stale)]
        for key, hook in stale:
            if every or hook.is_over:
                del hooks[key]
    original.register_state_dict_pre_hook(_Stale(model))

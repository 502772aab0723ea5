"""Whether an optimizer updates every element by itself: it is tried on a small tensor, whole and in
halves.

Only such an optimizer is right where ranks hold blocks of a parameter. Any optimizer can be tried,
also those that nobody here knows of; one that cannot counts as one that does not.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

SHAPE = (4, 6, 4, 2, 2)  # as many of these sizes as the parameter has dims
NUM_STEPS = 3
RATE = 0.1  # in the trial: that of a warm-up may be zero, with which nothing can be seen

_known: dict[Any, bool] = {}


def kind_of(optimizer: Optimizer) -> type[Optimizer]:
    """The kind of an optimizer, without what Shardwise itself has put on it."""
    return getattr(type(optimizer), "shardwise_kind", type(optimizer))


def is_elementwise(
    optimizer: Optimizer,
    options: dict[str, Any],
    ndim: int,
    device: torch.device,
    cut: int = 2,  # filters and channels
) -> bool:
    """Whether an optimizer with these options is right on blocks of a tensor of so many dims.

    The first so many of these dims may be `cut`.
    One that says `knows_blocks = True` of itself asks other ranks where it must.
    """
    if getattr(optimizer, "knows_blocks", False):
        return True
    kind = kind_of(optimizer)
    options = {key: _rate(value) if key == "lr" else value for key, value in options.items()}
    key = kind, repr(sorted(options.items(), key=lambda item: item[0])), ndim, device, cut
    if key not in _known:
        _known[key] = _try(kind, options, ndim, device, cut)
    return _known[key]


def _rate(value: Any) -> Any:
    return torch.full_like(value, RATE) if isinstance(value, torch.Tensor) else RATE


def _try(
    kind: type[Optimizer], options: dict[str, Any], ndim: int, device: torch.device, cut: int
) -> bool:
    generator = torch.Generator().manual_seed(0)
    shape = SHAPE[:ndim]
    values = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
        for _ in range(1 + NUM_STEPS)
    ]
    try:
        whole = _run(kind, options, values)
        for dim in range(min(len(shape), cut)):
            for half in range(2):
                found = _run(kind, options, [value.chunk(2, dim)[half] for value in values])
                expected = whole.chunk(2, dim)[half]
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    except Exception:
        return False
    return True


def _run(
    kind: type[Optimizer], options: dict[str, Any], values: list[torch.Tensor]
) -> torch.Tensor:
    """A parameter after one step with each gradient."""
    start, *gradients = values
    param = nn.Parameter(start.clone())
    known = signature(kind.__init__).parameters
    given = {key: value for key, value in options.items() if key in known}
    made = kind([{"params": [param], **options}], **given)
    step: Any = type(made).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # nobody's hooks are to know of this
    devices = [param.device] if param.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(0)
        for gradient in gradients:
            param.grad = gradient.clone()
            step(made)
    return param.detach()

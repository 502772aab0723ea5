"""LARS: layer-wise rates for large batches (You et al. 2017), exact for split parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

Tensors = list[torch.Tensor]
Norms = Callable[[Tensors, Tensors], torch.Tensor]  # of values that lie as their parameters


def local_norms(params: Tensors, values: Tensors) -> torch.Tensor:
    return torch.stack([value.double().norm() for value in values])


class Lars(Optimizer):
    """SGD with momentum, each parameter's rate scaled by the norms of weight and gradient.

    Vectors (biases, and the scales of norms) are updated as SGD does, without weight decay. `norms`
    says how norms are found where a parameter here is a block of one that lies on many ranks.

    >>> Lars([torch.ones(2, 2, requires_grad=True)], lr=0.1).defaults["trust"]
    0.001
    """

    knows_blocks = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        norms: Norms = local_norms,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)
        self._norms = norms

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        scaled = [p for p in group["params"] if p.ndim > 1]
        rates = dict(zip(map(id, scaled), self._rates(group, scaled), strict=True))
        for param in group["params"]:
            gradient, rate = param.grad, rates.get(id(param), 1.0)
            if gradient is None:
                continue
            if id(param) in rates:
                gradient = gradient.add(param, alpha=group["weight_decay"])
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param)
            buffer = state["momentum_buffer"]
            buffer.mul_(group["momentum"]).add_(gradient, alpha=group["lr"] * rate)
            param.sub_(buffer)

    def _rates(self, group: dict[str, Any], params: Tensors) -> list[float]:
        """trust * |w| / (|g| + decay * |w|); 1 where either is nothing."""
        if not params:
            return []
        # A rank may lack the gradient of what others have a part of; it asks for the norm as well.
        gradients = [p.new_empty(0) if p.grad is None else p.grad for p in params]
        norms = self._norms(params * 2, [*params, *gradients])
        weights, gradients = norms.split(len(params))
        rates = group["trust"] * weights / (gradients + group["weight_decay"] * weights)
        rates[(weights == 0) | (gradients == 0)] = 1.0
        return rates.tolist()

"""Whether two sights of a model are the same, but for what rounding makes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from outside_cases.observe import Key, Seen
from shardwise.verify.comparison import Comparison, differences, is_inexact
from shardwise.verify.noise import LastBit

Inputs = tuple[torch.Tensor, ...]
Noise = dict[Key, float]
NUM_DRAWS = 6


def wrong(found: Seen, expected: Seen, noise: Callable[[], Noise]) -> str | None:
    """What differs first, in words; noise is only asked for where something does."""
    if found.nesting != expected.nesting:
        return f"the output is {found.nesting} and not {expected.nesting}"
    ours, theirs = found.tensors, expected.tensors
    for key in ours.keys() ^ theirs.keys():
        if key[0] != "gradient" or (ours | theirs)[key].any():  # no gradient is one of zeros
            return f"{' '.join(key)} {'is missing' if key in theirs else 'should not be there'}"
    both = ours.keys() & theirs.keys()
    ours, theirs = ({key: x for key, x in of.items() if key in both} for of in (ours, theirs))
    failed = [c for c in differences(ours, theirs) if not c.passed]
    if failed:
        drawn = noise()
        noisy = (replace(c, noise=max(drawn[c.kind, c.name], c.noise or 0.0)) for c in failed)
        failed = [c for c in noisy if not c.passed]
    return _told(failed[0], expected) if failed else None


def _told(comparison: Comparison, expected: Seen) -> str:
    name = f"{comparison.kind} {comparison.name}"
    if comparison.fault:
        return f"{name}: {comparison.fault}"
    shape = "x".join(map(str, expected.tensors[comparison.kind, comparison.name].shape))
    return f"{name} ({shape}): error {comparison.error:.2g}, where {comparison.limit:.2g} may be"


def measure(
    model: nn.Module, inputs: Inputs, expected: Seen, look: Callable[[nn.Module, Inputs], Seen]
) -> Noise:
    """How much each tensor changes on one device when last bits of what it is given change."""
    noise: Noise = dict.fromkeys(expected.tensors, 0.0)
    for draw in range(NUM_DRAWS):
        last_bit, twin = LastBit(draw), copy.deepcopy(model)
        with torch.no_grad():
            moved = tuple(last_bit.changed(x) if is_inexact(x) else x for x in inputs)
            for param in filter(is_inexact, twin.parameters()):
                param.copy_(last_bit.changed(param))
        with last_bit:
            seen = look(twin, moved)
        _add(noise, seen, expected)
    before = torch.get_rng_state()
    exact = _in_float64(model, inputs, look)
    drawn = not torch.equal(before, torch.get_rng_state())  # other numbers, in another dtype
    if exact is not None and not drawn:
        _add(noise, exact, expected)
    return noise


def _add(noise: Noise, seen: Seen, expected: Seen) -> None:
    """Notes how far two sights of one device are apart."""
    theirs = expected.tensors
    ours = {k: x.to(theirs[k].dtype) for k, x in seen.tensors.items() if k in theirs}
    for c in differences(ours, theirs):
        noise[c.kind, c.name] = max(noise.get((c.kind, c.name), 0.0), c.error)


def _in_float64(
    model: nn.Module, inputs: Inputs, look: Callable[[nn.Module, Inputs], Seen]
) -> Seen | None:
    """What one device should have got in fewer digits, if the model can be run in more."""
    coarse = [x for x in (*inputs, *model.parameters()) if x.is_floating_point()]
    if all(x.dtype is torch.float64 for x in coarse):
        return None
    finer = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    try:
        return look(copy.deepcopy(model).double(), finer)
    except Exception:
        return None

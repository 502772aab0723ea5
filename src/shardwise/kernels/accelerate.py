"""`accelerate`: a copy of a model whose convolutions run on the kernels that are fastest here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from shardwise.kernels import tuner
from shardwise.kernels.conv_shape import LAST, ConvShape, shape_of
from shardwise.kernels.dispatch import KernelChoice
from shardwise.kernels.norm_conv import HOOKS, NORMS, adopt_row, rows_of
from shardwise.kernels.ops import convolve
from shardwise.kernels.timed_layers import OWN, AppliedReLU, FusedBatchNorm2d, adopt, applied
from shardwise.kernels.tuner import MEMORY_BYTES, Tuner
from shardwise.modules import copy_structure
from shardwise.units import parse_size


class TunedConv(_ConvNd):
    """A convolution with a kernel for each direction; parameters and state are the original's."""

    choice: KernelChoice
    relu = False  # apply the ReLU that followed, while the numbers are in the cache
    after_norm = False  # in a sequence: take the norm and ReLU before it along

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.choice.stock or input.ndim != self.weight.ndim:
            y = super().forward(input)  # of nn.Conv1d, nn.Conv2d or nn.Conv3d
            return applied(functional.relu(y, inplace=True)) if self.relu else y
        how = (self.stride, self.padding, self.dilation, self.groups)
        y = convolve(input, self.weight, self.bias, how, self.choice, self.relu)  # type: ignore[arg-type]
        return applied(y) if self.relu else y


class TunedConv1d(TunedConv, nn.Conv1d): ...


class TunedConv2d(TunedConv, nn.Conv2d): ...


class TunedConv3d(TunedConv, nn.Conv3d): ...


TUNED = {nn.Conv1d: TunedConv1d, nn.Conv2d: TunedConv2d, nn.Conv3d: TunedConv3d}


@dataclass(frozen=True)
class Seen:
    """A convolution as one forward pass met it."""

    name: str
    shape: ConvShape
    first: bool  # its input needs no gradient


def accelerate(
    model: nn.Module,
    x: torch.Tensor,
    *,
    memory: str | int | None = None,
    exact_kernels: bool = False,
    layout: str = "keep",
    report: Callable[[Seen], None] | None = None,
) -> nn.Module:
    """A tuned copy of a model: the same parameters, the same `state_dict`, faster convolutions.

    Every kernel is timed on every convolution that x meets, the stock operator too, and the
    fastest one of each direction is used from then on; so are batch norm and max pooling. Times are
    kept on disk. A convolution or batch norm takes the ReLU that follows it in a sequence along; a
    pointwise convolution the batch norm and ReLU before it, where channels lie last.

    `memory` limits the workspace of a kernel, `exact_kernels` forbids Winograd's (which round
    more), `layout="auto"` times whole steps in both layouts, converts the inputs to channels last
    if that is faster, and leaves everything to torch if nothing is.

    >>> twin = accelerate(model, torch.randn(64, 3, 32, 32))  # doctest: +SKIP
    """
    if layout not in ("keep", "channels_last", "auto"):
        raise ValueError(f"layout={layout!r} is not one of keep, channels_last, auto")
    limit = parse_size(memory) if isinstance(memory, str) else memory
    chooser = Tuner(MEMORY_BYTES if limit is None else limit, exact_kernels)
    if layout != "auto":
        return _tuned(model, x, layout == "channels_last", chooser, report)
    twins = {f"tuned {last}": _tuned(model, x, last, chooser, report) for last in (False, True)}
    twins |= {f"stock {last}": _laid_out(model, last) for last in (False, True)}
    steps = {key: _training_step(twin, x) for key, twin in twins.items()}
    times = tuner.interleaved(steps)
    return twins[min(times, key=times.__getitem__)]


def _laid_out(model: nn.Module, last: bool) -> nn.Module:
    twin = copy_structure(model)
    if last:
        twin.register_forward_pre_hook(_channels_last)
    return twin


def _tuned(
    model: nn.Module,
    x: torch.Tensor,
    last: bool,
    chooser: Tuner,
    report: Callable[[Seen], None] | None,
) -> nn.Module:
    twin = _laid_out(model, last)
    x = _last(x) if last else x
    choices: dict[str, KernelChoice] = {}
    for one in convolutions(twin, x):
        if report is not None:
            report(one)
        directions = ("fwd", "dw") if one.first else ("fwd", "dx", "dw")
        choices[one.name] = chooser.tune(one.shape, directions)
    for name, choice in choices.items():
        module = twin.get_submodule(name)
        module.__class__ = TUNED[type(module)]  # keeps every table of the module as it is
        module.choice = choice  # type: ignore[assignment]
    before_relus = {id(before) for before, _ in _before_relus(twin)}

    def race(name: str, input: torch.Tensor) -> None:
        layer = twin.get_submodule(name)
        adopt(layer, input, chooser, id(layer) in before_relus)

    _watch(twin, x, tuple(OWN), race)
    _fuse_relus(twin)
    rows = rows_of(twin)

    def race_rows(name: str, input: torch.Tensor) -> None:
        if name in rows:
            adopt_row(*rows[name], input, chooser)

    _watch(twin, x, NORMS, race_rows)
    return twin


def _fuse_relus(model: nn.Module) -> None:
    """In a sequence, a ReLU becomes part of the convolution or batch norm before it."""
    for before, after in _before_relus(model):
        if isinstance(before, TunedConv | FusedBatchNorm2d):
            before.relu = True
            after.__class__ = AppliedReLU


def _before_relus(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Layers of sequences that only a ReLU follows, and those ReLUs."""
    uses: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        uses[id(module)] = uses.get(id(module), 0) + 1
    return [
        (before, after)
        for sequence in model.modules()
        if type(sequence) is nn.Sequential
        for before, after in pairwise(sequence)
        if type(after) is nn.ReLU and isinstance(before, (*TUNED, nn.BatchNorm2d))
        if uses[id(before)] == uses[id(after)] == 1 and not _hooked(before, after)
    ]


def _hooked(*modules: nn.Module) -> bool:
    """Whether someone watches what goes in or out of these modules."""
    return any(getattr(module, table) for module in modules for table in HOOKS)


def _channels_last(_module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(_last(t) if isinstance(t, torch.Tensor) else t for t in inputs)


def _last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=LAST[t.ndim]) if t.ndim in (4, 5) else t


def convolutions(model: nn.Module, x: torch.Tensor) -> list[Seen]:
    """The convolutions that one forward pass runs; the model's state is as before.

    Where a layer runs several times, the last shape counts.
    """
    found: dict[str, Seen] = {}

    def record(name: str, input: torch.Tensor) -> None:
        module = model.get_submodule(name)
        assert isinstance(module, _ConvNd)
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return
        how = (module.stride, module.padding, module.dilation, module.groups)
        shape = shape_of(input, module.weight, *how)  # type: ignore[arg-type]
        if shape is not None:
            found[name] = Seen(name, shape, input.data_ptr() == x.data_ptr())

    _watch(model, x, tuple(TUNED), record)
    return list(found.values())


def _watch(
    model: nn.Module,
    x: torch.Tensor,
    kinds: tuple[type[nn.Module], ...],
    record: Callable[[str, torch.Tensor], None],
) -> None:
    """Runs a forward pass and tells what goes into these layers; the model's state is as before."""
    twin = copy_structure(model)
    for module in twin.modules():  # running statistics change in a forward pass: those of copies
        module._buffers = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    for name, module in twin.named_modules():
        if type(module) in kinds:
            module.register_forward_pre_hook(
                lambda _module, inputs, name=name: record(name, inputs[0])
            )
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        twin(x)


def _training_step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Forward and backward on copies of nothing: gradients and statistics are put back."""

    def step() -> None:
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.random.fork_rng(devices=[]):
            out = model(x)
            parameters = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(_total(out), parameters, allow_unused=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])

    return step


def _total(out: object) -> torch.Tensor:
    """A number that depends on every output."""
    if isinstance(out, torch.Tensor):
        return out.sum()
    values = out.values() if isinstance(out, dict) else out
    parts = [_total(part) for part in values if part is not None]  # type: ignore[union-attr]
    return torch.stack(parts).sum()

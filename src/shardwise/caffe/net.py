"""`CaffeNet`: the module that a net's file describes, with the layers of either phase."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, one_line

from .inputs import DATA, NetInput, net_inputs
from .messages import ProtoMessage
from .phases import NetState, present, read_layers
from .plain_layers import PLAIN
from .weighted_layers import CaffeBatchNorm, Convolve, InnerProduct, PRelu, Scale, Shapes

Build = Callable[[ProtoMessage, Shapes], nn.Module]
LOSS, ACCURACY, SILENCE = "SoftmaxWithLoss", "Accuracy", "Silence"


class Plain(nn.Module):
    """A layer without weights."""

    def __init__(self, layer: ProtoMessage, shapes: Shapes) -> None:
        super().__init__()
        self.kind, self.function = layer.type, PLAIN[layer.type](layer, shapes)

    def forward(self, *bottoms: Tensor) -> Any:
        return self.function(*bottoms)

    def extra_repr(self) -> str:
        return self.kind


def _dropout(layer: ProtoMessage, shapes: Shapes) -> nn.Module:
    if not layer.dropout_param.scale_train:
        raise layer.wrong(f"layer {layer.name!r}: scale_train must be true")
    return nn.Dropout(layer.dropout_param.dropout_ratio)


BUILD: dict[str, Build] = {
    **dict.fromkeys(PLAIN, Plain),
    "BatchNorm": CaffeBatchNorm,
    "Bias": Scale,
    "Convolution": lambda layer, shapes: Convolve(layer, shapes, False),
    "Deconvolution": lambda layer, shapes: Convolve(layer, shapes, True),
    "Dropout": _dropout,
    "InnerProduct": InnerProduct,
    "PReLU": PRelu,
    "Scale": Scale,
}


class CaffeNet(nn.Module):
    """In training mode the layers of phase TRAIN, otherwise those of TEST.

    It takes what data layers give, labels left out, and returns what losses are computed from: the
    scores of the loss with the largest weight first. A net without losses returns the tops that no
    layer uses.
    """

    def __init__(self, path: str, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        net, layers = read_layers(path)
        self.path, self.device = path, torch.get_default_device()
        self.attributes: dict[str, str] = {}  # from names of layers to those of modules
        self.multipliers: dict[str, tuple[float, float]] = {}  # of a weight's rate and decay
        self.phases: dict[str, _Phase] = {}
        for phase in ("TEST", "TRAIN"):
            chosen = [layer for layer in layers if present(layer, NetState(phase))]
            self.phases[phase] = _Phase(self, chosen, net_inputs(net, chosen, shape))

    @property
    def inputs(self) -> tuple[NetInput, ...]:
        return self.phases["TRAIN"].inputs

    def forward(self, *tensors: Tensor) -> Any:
        return self.phases["TRAIN" if self.training else "TEST"].run(self, tensors)

    @property
    def loss_weights(self) -> tuple[float, ...]:
        """Of the losses of what comes out in training, in its order; empty where there are none."""
        scores = self.phases["TRAIN"].scores
        return (
            tuple(sum(w for w, n in scores if n == name) for name in self.phases["TRAIN"].outputs)
            if scores
            else ()
        )

    def layer_module(self, name: str) -> nn.Module | None:
        """The module of a layer that has weights or statistics."""
        for key, attribute in self.attributes.items():
            module = getattr(self, attribute)
            if key.rpartition("/")[0] == name and module.state_dict():
                return module
        return None

    def module_of(self, layer: ProtoMessage, shapes: Shapes) -> tuple[str, nn.Module]:
        """The module of a layer; phases share weights by the names of layers."""
        key = f"{layer.name}/{layer.type}"
        if key not in self.attributes:
            name = re.sub(r"\W", "_", layer.name) or "layer"
            while hasattr(self, name):
                name += "_"
            self.add_module(name, _built(layer, shapes))
            self.attributes[key] = name
        return self.attributes[key], getattr(self, self.attributes[key])


class _Phase:
    """The steps of a phase: modules by name, from tensors by name to others."""

    def __init__(
        self, net: CaffeNet, layers: list[ProtoMessage], inputs: tuple[NetInput, ...]
    ) -> None:
        self.steps: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
        self.scores: list[tuple[float, str]] = []
        shapes = {given.name: given.shape for given in inputs}
        for layer in layers:
            if layer.type in (LOSS, ACCURACY) and len(layer.bottom) != 2:
                raise layer.wrong(f"layer {layer.name!r} must read scores and labels")
        labels = {layer.bottom[1] for layer in layers if layer.type in (LOSS, ACCURACY)}
        self.inputs = tuple(given for given in inputs if given.name not in labels)
        unused = dict.fromkeys(shapes)
        for layer in layers:
            if layer.type in DATA:
                continue
            missing = [name for name in layer.bottom if name not in shapes]
            if missing:
                raise layer.wrong(f"layer {layer.name!r} reads {missing[0]!r}, which is not there")
            for name in layer.bottom:
                unused.pop(name, None)
            if layer.type == LOSS:
                weight = layer.loss_weight[0] if layer.loss_weight else 1.0
                self.scores.append((weight, layer.bottom[0]))
            elif layer.type not in (ACCURACY, SILENCE):
                self._add(net, layer, shapes)
                unused |= dict.fromkeys(layer.top)
        best = sorted(self.scores, key=lambda score: -score[0])
        self.outputs = list(dict.fromkeys(n for _, n in best)) or [
            n for n in unused if n not in labels
        ]

    def _add(self, net: CaffeNet, layer: ProtoMessage, shapes: dict[str, tuple[int, ...]]) -> None:
        bottoms = [shapes[name] for name in layer.bottom]
        name, module = net.module_of(layer, bottoms)
        try:
            shapes.update(zip(layer.top, _meta_run(module, bottoms), strict=True))
        except ShardwiseError:
            raise
        except Exception as error:
            raise layer.wrong(f"layer {layer.name!r} does not fit: {one_line(error)}") from None
        self.steps.append((name, tuple(layer.bottom), tuple(layer.top)))
        if any(p.is_meta for p in [*module.parameters(), *module.buffers()]):
            _made(module, net.device, layer)
        for (own, _), spec in zip(module.named_parameters(), layer.param, strict=False):
            net.multipliers[f"{name}.{own}"] = (spec.lr_mult, spec.decay_mult)

    def run(self, net: CaffeNet, tensors: tuple[Tensor, ...]) -> Any:
        values = dict(zip((given.name for given in self.inputs), tensors, strict=True))
        for name, bottoms, tops in self.steps:
            found = getattr(net, name)(*(values[bottom] for bottom in bottoms))
            values.update(zip(tops, found if isinstance(found, tuple) else (found,), strict=True))
        outputs = tuple(values[name] for name in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs


def _built(layer: ProtoMessage, shapes: Shapes) -> nn.Module:
    if layer.type not in BUILD:
        raise layer.wrong(
            f"layer {layer.name!r} is of type {layer.type!r}, which is not known", "type"
        )
    with torch.device("meta"):
        return BUILD[layer.type](layer, shapes)


def _meta_run(module: nn.Module, shapes: Shapes) -> Shapes:
    """The shapes of what comes out; nothing is computed."""
    state = {n: t.to("meta") for n, t in [*module.named_parameters(), *module.named_buffers()]}
    inputs = tuple(torch.empty(shape, device="meta") for shape in shapes)
    with torch.no_grad():
        found = torch.func.functional_call(module, state, inputs)
    return [tuple(top.shape) for top in (found if isinstance(found, tuple) else (found,))]


def _made(module: Any, device: torch.device, layer: ProtoMessage) -> None:
    """Weights where they belong, filled, and frozen where their lr_mult is 0."""
    if device.type != "meta":
        module.to_empty(device=device)
        module.fill()
    for param, spec in zip(module.parameters(), layer.param, strict=False):
        param.requires_grad_(spec.lr_mult != 0)
        if spec.name:
            raise spec.wrong(
                f"layer {layer.name!r} shares the weight {spec.name!r}, which is not done"
            )

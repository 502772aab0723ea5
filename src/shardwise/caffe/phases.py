"""Which layers of a net are there in a phase, in the words of today's files."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ShardwiseError

from .messages import ProtoMessage, read_message

NEW_TYPES = {  # of old files, where joining the capitalised words is not right
    "ABSVAL": "AbsVal",
    "BNLL": "BNLL",
    "HDF5_DATA": "HDF5Data",
    "LRN": "LRN",
    "RELU": "ReLU",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "TANH": "TanH",
}


@dataclass(frozen=True)
class NetState:
    """What the rules of layers are about."""

    phase: str = "TRAIN"
    stages: tuple[str, ...] = ()
    level: int = 0

    def meets(self, rule: ProtoMessage) -> bool:
        lowest = rule.min_level if rule.has("min_level") else self.level
        highest = rule.max_level if rule.has("max_level") else self.level
        return (
            (not rule.has("phase") or rule.phase == self.phase)
            and lowest <= self.level <= highest
            and set(rule.stage) <= set(self.stages)
            and not set(rule.not_stage) & set(self.stages)
        )


def read_layers(path: str) -> tuple[ProtoMessage, list[ProtoMessage]]:
    """A net's file, and all its layers."""
    net = read_message(path, "NetParameter")
    if net.has("layer") and net.has("layers"):
        raise net.wrong("a file has either 'layer' or 'layers', the old form", "layers")
    layers = net.layer or [_renewed(old) for old in net.layers]
    if not layers:
        raise ShardwiseError(f"{path}: there are no layers")
    return net, list(layers)


def present(layer: ProtoMessage, state: NetState) -> bool:
    """Whether a layer is part of the net in this state."""
    if layer.has("include") and layer.has("exclude"):
        raise layer.wrong(f"layer {layer.name!r} has include and exclude rules; give one kind")
    if layer.has("include"):
        return any(map(state.meets, layer.include))
    return not any(map(state.meets, layer.exclude))


def _renewed(old: ProtoMessage) -> ProtoMessage:
    """A layer of the old form as one of today's."""
    layer = ProtoMessage("LayerParameter", old.file, old.line)
    moved = {"type", "param", "blob_share_mode", "blobs_lr", "weight_decay"}
    layer.written = {name: value for name, value in old.written.items() if name not in moved}
    layer.lines = dict(old.lines)
    kind = old.type or "NONE"
    layer.written["type"] = NEW_TYPES.get(kind, "".join(p.title() for p in kind.split("_")))
    rates, decays, names = old.blobs_lr, old.weight_decay, old.param
    params = []
    for index in range(max(map(len, (rates, decays, names)))):
        param = ProtoMessage("ParamSpec", old.file, old.line)
        for name, values in (("lr_mult", rates), ("decay_mult", decays), ("name", names)):
            if index < len(values):
                param.written[name] = values[index]
        params.append(param)
    if params:
        layer.written["param"] = params
    return layer

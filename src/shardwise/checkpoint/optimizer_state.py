"""What an optimizer keeps, by the names of parameters: from it to pieces, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from shardwise.checkpoint.held_tensors import Held, host_copy
from shardwise.checkpoint.manifest import Group, OptimizerState, Values
from shardwise.checkpoint.pieces import BoxOfTensor, Pieces
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.runtime.elementwise import kind_of
from shardwise.runtime.optimizer_checks import NOTE, as_blocks, check_optimizer, kept_place

PREFIX = "optimizer"
State = dict[int, dict[str, Any]]  # by the number of a parameter, and key
PLAIN = (bool, int, float, str, type(None))


class Contents(Protocol):
    """What a checkpoint says of an optimizer; its tensors have a shape."""

    @property
    def optimizer(self) -> OptimizerState: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...


class Reading(Protocol):
    """Reads boxes of tensors of a checkpoint."""

    @property
    def document(self) -> Contents: ...
    def read(self, key: str, box: Box | None = None) -> torch.Tensor: ...


class Optimizing:
    """An optimizer of a model's parameters."""

    def __init__(self, optimizer: Optimizer, held: list[Held]) -> None:
        self.optimizer, self.kind = optimizer, kind_of(optimizer).__name__
        known = {id(tensor.tensor): tensor for tensor in held}
        self.groups: list[list[Held]] = []
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in known:
                    raise ShardwiseError(
                        f"group {number} of the optimizer has a parameter of shape "
                        f"{tuple(param.shape)} that is not the model's; give it model.parameters()"
                    )
            self.groups.append([self._held(known[id(param)]) for param in group["params"]])
        self.params = [param for group in self.groups for param in group]  # as torch counts them
        self.numbers = {param.names[0]: number for number, param in enumerate(self.params)}

    def _held(self, param: Held) -> Held:
        """The parameter as what is kept of it lies, of which a rank may have but a part."""
        place = kept_place(self.optimizer, param.tensor)
        return (
            param if place is None or param.layout is None else replace(param, layout=place.layout)
        )

    # -- saving --------------------------------------------------------------------------------

    def snapshot(self) -> tuple[list[Group], Pieces, Values]:
        """The settings, copies of what this rank writes, and numbers that are no tensors."""
        with as_blocks():
            state = self.optimizer.state_dict()
        groups = [
            Group(params=[param.names[0] for param in group], settings=plain_settings(own))
            for group, own in zip(self.groups, state["param_groups"], strict=True)
        ]
        pieces: Pieces = {}
        values: Values = {}
        for number, own in state["state"].items():
            param = self.params[number]
            if not param.here:
                continue
            for place, (key, value) in enumerate(own.items()):
                if isinstance(value, PLAIN):
                    values.setdefault(param.names[0], {})[key] = value
                else:
                    piece = self._piece(param, key, value, number + place)
                    if piece is not None:
                        pieces[_key(param, key)] = piece
        return groups, pieces, values

    def _piece(self, param: Held, key: str, value: Any, turn: int) -> BoxOfTensor | None:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if shape is None or "/" in key or shape not in ((), param.box.shape):
            what = type(value).__name__ if shape is None else f"a tensor of shape {shape}"
            raise ShardwiseError(
                f"{self.kind} keeps {what} as {key!r} of {param.names[0]!r}; a checkpoint holds "
                f"numbers and tensors of the parameter's shape, here {param.box.shape}"
            )
        if shape:
            return param.copied(value, turn)
        mine = param.first == param.rank
        return BoxOfTensor.whole(host_copy(value)) if mine else None

    # -- loading -------------------------------------------------------------------------------

    def check(self, document: Contents, place: object) -> None:
        """Raises where a checkpoint's optimizer is another one."""
        saved = document.optimizer
        if saved.kind != self.kind:
            raise ShardwiseError(
                f"{place} is of the optimizer {saved.kind}, and this one is {self.kind}"
            )
        if len(saved.groups) != len(self.groups):
            raise ShardwiseError(
                f"{place} has {len(saved.groups)} groups of parameters, and the optimizer "
                f"{len(self.groups)}"
            )
        for number, (there, here) in enumerate(zip(saved.groups, self.groups, strict=True)):
            own = [param.names[0] for param in here]
            other = sorted(set(own) ^ set(there.params))
            if other or len(own) != len(there.params):
                raise ShardwiseError(
                    f"{place}: optimizer.groups.{number} has other parameters than the "
                    f"optimizer: {', '.join(map(repr, other[:1])) or 'one of them twice'}"
                )
            own = self.optimizer.param_groups[number]
            for key, value in there.settings.items():
                if not _alike(own.get(key), value):
                    raise ShardwiseError(
                        f"{place}: optimizer.groups.{number}.settings.{key} is {value!r}, where "
                        f"{self.kind} has {own[key]!r}"
                    )
        for name in saved.values:
            if name not in self.numbers:
                raise ShardwiseError(
                    f"{place}: optimizer.values.{name} is of no parameter of the optimizer"
                )
        for name, key, stored in _stored(document):
            where = f"{place}: tensors.{PREFIX}/{name}/{key}"
            if name not in self.numbers:
                raise ShardwiseError(f"{where} is of no parameter of the optimizer")
            if tuple(stored.shape) not in ((), self.params[self.numbers[name]].shape):
                raise ShardwiseError(f"{where} has another shape than its parameter")

    def read(self, reader: Reading) -> State:
        """What a checkpoint holds of the parameters; of those this rank has none of, nothing."""
        values = reader.document.optimizer.values
        state: State = {
            number: dict(values.get(param.names[0], {})) for number, param in enumerate(self.params)
        }
        for name, key, stored in _stored(reader.document):
            number = self.numbers[name]
            param = self.params[number]  # all ranks keep the same, be it of an empty box
            box = param.box if stored.shape else None
            state[number][key] = reader.read(_key(param, key), box)
        return {number: own for number, own in state.items() if own}

    def restore(self, document: Contents, state: State) -> None:
        """Gives the optimizer the settings of a checkpoint and what was read."""
        groups = self._groups(document)
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._undo_casts(state)
        check_optimizer(self.optimizer)  # which now has blocks of this rank

    def _groups(self, document: Contents) -> list[dict[str, Any]]:
        """The groups as torch writes them; values get the kinds that they have now."""
        found = []
        with as_blocks():
            present = self.optimizer.state_dict()["param_groups"]
        for own, saved in zip(present, document.optimizer.groups, strict=True):
            settings = {key: _like(own.get(key), value) for key, value in saved.settings.items()}
            found.append({**own, **settings})
        return found

    def _undo_casts(self, state: State) -> None:
        """Torch casts what it loads to the parameter's dtype; what was saved is kept as it was."""
        for number, own in state.items():
            now = self.optimizer.state[self.params[number].tensor]
            for key, value in own.items():
                if isinstance(value, torch.Tensor) and now[key].dtype != value.dtype:
                    now[key] = value.to(now[key].device)


def _key(param: Held, key: str) -> str:
    return f"{PREFIX}/{param.names[0]}/{key}"


def _stored(document: Contents) -> Iterator[tuple[str, str, Any]]:
    """The tensors that belong to the optimizer: parameter, key, and what is stored."""
    for key, stored in document.tensors.items():
        if key.startswith(f"{PREFIX}/"):
            name, _, own = key.removeprefix(f"{PREFIX}/").rpartition("/")
            yield name, own, stored


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group as JSON: a learning rate that is a tensor becomes a number."""
    found = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            value = value.item()
        value = list(value) if isinstance(value, tuple) else value
        if key in ("params", "param_names", NOTE):
            continue
        if not all(isinstance(v, PLAIN) for v in (value if isinstance(value, list) else [value])):
            raise ShardwiseError(
                f"the optimizer's setting {key!r} is {type(value).__name__}; a checkpoint holds "
                "numbers, words and lists of them"
            )
        found[key] = value
    return found


def _like(now: Any, value: Any) -> Any:
    if isinstance(now, torch.Tensor):
        return torch.full_like(now, value)
    return tuple(value) if isinstance(now, tuple) else value


def _alike(now: Any, value: Any) -> bool:
    """Whether a setting may replace the present one: numbers for numbers, words for words."""
    if now is None or value is None:
        return True
    if isinstance(now, (tuple, list)):
        return isinstance(value, list) and len(value) == len(now) and all(map(_alike, now, value))
    if isinstance(now, (bool, str)):
        return isinstance(value, type(now))
    return isinstance(value, (int, float)) and not isinstance(value, bool)

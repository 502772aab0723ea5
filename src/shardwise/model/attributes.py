"""What modules hold beside tensors: forward may read it, so that changes ask for a new capture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.model.attribute_values import MISSING, Reads, as_read, inside, token, twin

INTERNAL = frozenset(nn.Module().__dict__) | {"_shardwise", "_is_full_backward_hook"}
# Modules of torch that do something else in another mode, beyond what layers follow as they run.
BRANCHING = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.RReLU)
BRANCHING += (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RNNBase)
# Those whose mode layers follow as they run; others inherit their forward.
FOLLOWED = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.BatchNorm2d)
NOTHING = (token(MISSING), MISSING)


@dataclass(frozen=True)
class Looks:
    """How modules differ from those that were made parallel: what a graph was captured with."""

    others: tuple[str, ...] = ()  # modules in another mode than the model
    tokens: tuple[Any, ...] = ()  # of changes: path, name, and what tells the value from others
    changes: tuple[tuple[str, str, Any], ...] = field(default=(), compare=False)

    def apply(self, model: nn.Module) -> None:
        """Makes the same changes in another copy of the model."""
        for path, name, value in self.changes:
            own = model.get_submodule(path).__dict__
            if value is MISSING:
                own.pop(name, None)
            else:
                own[name] = value


class Attributes:
    """The attributes of a parallel model's modules, compared with those it began with.

    It does not keep the model itself alive. What `reads` says that forward reads is followed; it
    grows with every mode that is captured.
    """

    def __init__(
        self, modules: Mapping[str, Any], reads: Reads, base: Mapping[str, Any] | None = None
    ) -> None:
        self._reads = reads
        children = {path: module for path, module in modules.items() if path}
        self._root = modules[""]  # a weak reference
        self._paths, self._dicts = [*children], [m.__dict__ for m in children.values()]
        self._modes = [(path, own) for path, own in children.items() if _may_branch(own)]
        self.base = base or {
            path: {name: (token(value), value) for name, value in own.items()}
            for path, own in self._tables()
        }
        self._note()

    def looks(self) -> Looks:
        """How modules differ now in what forward reads."""
        reads = self._reads
        if _num_names(reads) != self._num_reads or self._are_other():
            self._note()
        training = self._root.training
        others = tuple(path for path, module in self._modes if module.training != training)
        if not others and not self._changes:
            return Looks()
        read = [c for c in self._changes if c[1] in reads.get(c[0], ())]
        tokens = tuple((path, name, as_read(token(value), reads)) for path, name, value in read)
        return Looks(others, tokens, tuple(read))

    def _tables(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        yield "", self._own_of_root()
        yield from zip(self._paths, self._dicts, strict=True)

    def _own_of_root(self) -> dict[str, Any]:
        return {k: v for k, v in self._root.__dict__.items() if k not in INTERNAL}

    def _are_other(self) -> bool:
        try:
            return bool(
                self._own_of_root() != self._own
                or self._dicts != self._seen
                or any(tensor._version != version for tensor, version in self._tensors)
            )
        except Exception:  # arrays, say, have no truth value
            return True

    def _note(self) -> None:
        """Takes down what is there now, and how it differs from the beginning."""
        tables, self._num_reads = dict(self._tables()), _num_names(self._reads)
        self._own, self._seen = self._copied(tables[""]), [*map(self._copied, self._dicts)]
        read = [
            own[name]
            for path, own in tables.items()
            for name in self._reads.get(path, ())
            if name in own and name not in INTERNAL  # buffers change in every step, and may
        ]
        tensors = (value for value in inside(read) if isinstance(value, torch.Tensor))
        self._tensors = [(t, t._version) for t in tensors if not isinstance(t, nn.Parameter)]
        self._changes: list[tuple[str, str, Any]] = []
        for path, own in tables.items():
            base = self.base.get(path, {})
            for name in own.keys() | base.keys():
                now = own.get(name, MISSING)
                was, known = as_read(base.get(name, NOTHING)[0], self._reads), token(now)
                if name not in INTERNAL and as_read(known, self._reads) != was:
                    self._changes.append((path, name, now))
        self._changes.sort(key=lambda change: change[:2])

    def _copied(self, table: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v if k in INTERNAL else twin(v, self._reads) for k, v in table.items()}


def _num_names(reads: Reads) -> int:
    return sum(map(len, reads.values()))


def _may_branch(module: nn.Module) -> bool:
    """Whether forward may do something else in another mode, beyond what layers do as they run."""
    if isinstance(module, BRANCHING):
        return True
    if type(module).forward in [kind.forward for kind in FOLLOWED]:
        return False
    return not type(module).__module__.startswith("torch.nn.modules.")

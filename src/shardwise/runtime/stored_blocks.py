"""The tensors that a parallel model stores: where blocks lie, and whether they have values."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError
from shardwise.geometry.layout import Layout
from shardwise.modules import named_tensors
from shardwise.runtime.uninitialized import Uninitialized


class StoredBlocks:
    """This rank's blocks of a model's parameters and buffers.

    It holds the model's tables of tensors, not the model itself, which would keep both alive.
    """

    def __init__(self, layouts: dict[str, Layout], comm: Communicator) -> None:
        self.layouts, self.comm = layouts, comm  # of all that is split, also of tied names
        self._root: Any = None
        self._places: list[tuple[str, str, dict[str, nn.Parameter | None]]] = []
        self._blanks = Uninitialized({}, unchecked=False)

    def adopt(self, root: nn.Module) -> None:
        """Takes note of the tables that hold the parameters of this model."""
        self._root = weakref.proxy(root)
        names = ((name, *name.rpartition(".")[::2]) for name, _ in root.named_parameters())
        self._places = [
            (name, leaf, root.get_submodule(path)._parameters) for name, path, leaf in names
        ]
        self._shapes = {name: la[self.comm.rank].shape for name, la in self.layouts.items()}

    def params(self) -> dict[str, nn.Parameter]:
        """The same as named_parameters, without a walk over all modules, which every step needs."""
        found = {name: table[leaf] for name, leaf, table in self._places}
        return {name: param for name, param in found.items() if param is not None}

    def check_shapes(self, params: Mapping[str, torch.Tensor]) -> None:
        """Parameters may have been replaced, by whole ones say."""
        for name, param in params.items():
            held = self._shapes.get(name, param.shape)
            if param.shape != held and param.ndim:
                found, wanted = ("x".join(map(str, shape)) for shape in (param.shape, held))
                raise ShardwiseError(
                    f"the model has parameters of other shapes than before: {name!r} is {found}, "
                    f"and this rank's block of it {wanted}; load_state_dict takes whole ones"
                )

    # -- tensors without values ----------------------------------------------------------------

    def lack_values(self, blank: Mapping[str, torch.Tensor]) -> None:
        """These have no values yet, and some of other ranks may have none where these have."""
        self._blanks = Uninitialized(blank, unchecked=bool(blank))

    def check_values(self) -> None:
        """Raises on all ranks where a tensor has no values yet; all ranks come here together."""
        if self._blanks:
            self._blanks.check(self._tensors(), self.comm)

    @contextmanager
    def keeping_uninitialized(self, copied: StoredBlocks | None = None) -> Iterator[None]:
        """What has no values has none afterwards either, though its tensors become others.

        These are of the same model, or of a copy of it.
        """
        blank = self._blanks.left(self._tensors()) if self._blanks else None
        yield
        if blank is not None:
            twin = copied or self
            own = twin._tensors()
            twin._blanks = Uninitialized({name: own[name] for name in blank})

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(named_tensors(self._root))

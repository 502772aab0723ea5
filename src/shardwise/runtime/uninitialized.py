"""Blocks that have no values yet: those of a model that was made on the meta device.

They are filled with what is no number, and remembered until something is written into them. A pass
or a state that would use one before is refused on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import chain

import torch
from torch import nn

from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError, some
from shardwise.model.weightless import device_of
from shardwise.runtime.agreement import Disagreement


def home_of(comm: Communicator) -> torch.device | None:
    """Where messages can be sent from, if not from anywhere."""
    return torch.device("cuda", torch.cuda.current_device()) if comm.backend == "nccl" else None


def blank_like(tensor: torch.Tensor, home: torch.device | None) -> torch.Tensor:
    """Room for a tensor; what it holds cannot be taken for values."""
    with torch.inference_mode(False):  # whose tensors do not count what is written into them
        room = torch.empty_like(tensor, device=device_of(tensor, home), requires_grad=False)
        if room.is_floating_point() or room.is_complex():
            return room.fill_(float("nan"))
        return room.fill_(0 if room.dtype == torch.bool else torch.iinfo(room.dtype).min)


class Uninitialized:
    """Tensors of a model that have no values, by their names; true until all have been checked.

    It is so on all ranks together, even on one that has nothing but empty blocks.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], unchecked: bool = True) -> None:
        self._seen = {name: (weakref.ref(t), t._version) for name, t in tensors.items()}
        self._unchecked = unchecked

    def __bool__(self) -> bool:
        return self._unchecked

    def left(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of a model's tensors into which nothing has been written since."""
        own = {name: tensors[name] for name in self._seen if name in tensors}
        return {n: t for n, t in own.items() if 0 not in t.shape and self._is_as_before(n, t)}

    def _is_as_before(self, name: str, tensor: torch.Tensor) -> bool:
        seen, version = self._seen[name]
        return seen() is tensor and tensor._version == version

    def check(self, tensors: Mapping[str, torch.Tensor], comm: Communicator) -> None:
        """Raises on all ranks where one has a tensor without values; else forgets them all."""
        left = list(dict.fromkeys(chain(*comm.gather_objects(list(self.left(tensors))))))
        if left:
            has, it = ("has", "it") if len(left) == 1 else ("have", "them")
            raise Disagreement(
                f"{some(left)} {has} no values: the model was made on the meta device, and nothing "
                f"was loaded into {it}; use shardwise.load_weights(model, file), or load_state_dict"
            )
        self._seen, self._unchecked = {}, False


def valued_names(model: nn.Module, comm: Communicator) -> list[str]:
    """The parameters and buffers that have values on rank 0.

    Raises on all ranks where a buffer has none and could not be loaded.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    own = [name for name, tensor in named if not tensor.is_meta]
    everyone = comm.gather_objects((own, _not_loadable(model)))
    valued = set(everyone[0][0])
    for _, names in everyone:
        for name in (name for name in names if name not in valued):
            raise ShardwiseError(
                f"buffer {name!r} was made on the meta device and has no values, and as it is not "
                "persistent none can be loaded: set it to a tensor with values before parallelize, "
                "or make it with device='cpu'"
            )
    return everyone[0][0]


def _not_loadable(model: nn.Module) -> list[str]:
    """The buffers without values that are in no state."""
    known = {
        id(buffer)
        for module in model.modules()
        for leaf, buffer in module._buffers.items()
        if leaf not in module._non_persistent_buffers_set
    }
    named = model.named_buffers()
    return [name for name, buffer in named if buffer.is_meta and id(buffer) not in known]


def check_attributes(model: nn.Module) -> None:
    """Raises where a module holds a tensor without values that is no parameter or buffer."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                where = f"{path}.{name}" if path else name
                raise ShardwiseError(
                    f"the tensor {where!r} was made on the meta device and has no values, and as "
                    "it is no parameter or buffer none can be loaded: make it with device='cpu'"
                )

"""A model of which every rank holds blocks of the parameters, and gives them out whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from math import inf
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from shardwise.box import Box
from shardwise.comm import About, Communicator
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan
from shardwise.runtime import Tensors
from shardwise.state import State
from shardwise.stored import (
    assign,
    block_of,
    copy_structure,
    from_root,
    gather_whole,
    named_tensors,
    resolve,
)


class SplitModel(nn.Module):
    """A model that holds this rank's blocks of the parameters, under their original names."""

    def __init__(self, model: nn.Module, state: State) -> None:
        super().__init__()
        self._shardwise = state
        self._adopt(model)
        self._split_tensors()
        self.train(model.training)

    def _adopt(self, model: nn.Module) -> None:
        """Takes over a copy of the model's modules (not of its tensors), so that names stay."""
        root = copy_structure(model)
        self._modules, self._parameters, self._buffers = (
            root._modules,
            root._parameters,
            root._buffers,
        )
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self._shardwise.modules = dict(root.named_modules(remove_duplicate=False))
        self._places = [
            (name, self._shardwise.modules[name.rpartition(".")[0]]._parameters)
            for name, _ in root.named_parameters()
        ]

    def _params(self) -> dict[str, nn.Parameter]:
        """The same as named_parameters, without a walk over all modules, which every step needs."""
        found = ((name, table[name.rpartition(".")[2]]) for name, table in self._places)
        return {name: param for name, param in found if param is not None}

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of all modules, the original root included."""
        self._shardwise.modules[""].training = mode
        return super().train(mode)

    def _split_tensors(self) -> None:
        """Every tensor becomes this rank's block of rank 0's tensor; ties stay ties."""
        state = self._shardwise
        named = list(named_tensors(self))
        unique = {id(tensor): tensor for _, tensor in named}
        full = dict(zip(unique, from_root(list(unique.values()), state.comm), strict=True))
        blocks: dict[int, torch.Tensor] = {}
        first: dict[int, str] = {}  # names of tied tensors, by which layers know them
        for name, tensor in named:
            known = first.setdefault(id(tensor), name)
            if known in state.layouts:
                state.layouts[name] = state.layouts[known]
            if id(tensor) not in blocks:
                block = block_of(full.pop(id(tensor)), state.layouts.get(name), state.comm.rank)
                if isinstance(tensor, nn.Parameter):
                    block = nn.Parameter(block, requires_grad=tensor.requires_grad)
                blocks[id(tensor)] = block
            assign(self, name, blocks[id(tensor)])

    # -- state ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Computes gradients and makes updates that were put off, see `shardwise.optimizer`."""
        state = self._shardwise
        self._wait_for_sums()
        if state.settle is not None:
            state.settle(None)

    def _wait_for_sums(self, params: Collection[int] | None = None) -> None:
        """Waits for sums that go on after backward, of parameters with these ids or of all."""
        sums = self._shardwise.unfinished
        if sums is not None:
            named = self._params().items()
            sums.wait(None if params is None else {n for n, p in named if id(p) in params})

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The full state, by the original names, the same on every rank; all ranks must call it."""
        self.flush()
        with self._whole_tensors():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads a full state, of any plan or of the original model."""
        if assign:
            raise ShardwiseError("load_state_dict(assign=True) would replace this rank's blocks")
        self.flush()
        with self._whole_tensors() as blocks:
            result = super().load_state_dict(state_dict, strict)
            state = self._shardwise
            with torch.no_grad():
                for name, block in blocks.items():
                    full = resolve(self, name)
                    block.copy_(block_of(full, state.layouts[name], state.comm.rank))
        return result

    @contextmanager
    def _whole_tensors(self) -> Iterator[dict[str, torch.Tensor]]:
        """Within, every split tensor is whole; yields this rank's blocks by name."""
        state, blocks, whole = self._shardwise, {}, {}
        try:
            for name, tensor in list(named_tensors(self)):
                if name in state.layouts:
                    blocks[name] = tensor
                    if id(tensor) not in whole:
                        full = gather_whole(name, tensor.detach(), state.layouts[name], state.comm)
                        whole[id(tensor)] = (
                            nn.Parameter(full, tensor.requires_grad)
                            if isinstance(tensor, nn.Parameter)
                            else full
                        )
                    assign(self, name, whole[id(tensor)])
            yield blocks
        finally:
            for name, block in blocks.items():
                assign(self, name, block)

    def full_tensors(self, ranks: tuple[int, ...] | None = None) -> Tensors:
        """Every whole parameter and buffer by its name; on all ranks, or on those given.

        All ranks must call it; on other ranks than those given, split tensors are empty.
        """
        self.flush()
        state, found, whole = self._shardwise, {}, {}
        for name, tensor in named_tensors(self):
            layout = state.layouts.get(name)
            if id(tensor) not in whole:
                value = tensor.detach()
                if layout is not None:
                    value = gather_whole(name, value, layout, state.comm, ranks)
                whole[id(tensor)] = value
            found[name] = whole[id(tensor)]
        return found

    def full_gradients(self, ranks: tuple[int, ...] | None = None) -> Tensors:
        """Every parameter's whole gradient by its name; see `full_tensors`."""
        self.flush()
        state, gradients = self._shardwise, {}
        here = {name for name, param in self.named_parameters() if param.grad is not None}
        anywhere = set().union(*state.comm.gather_objects(here))
        for name, param in self.named_parameters():
            if name not in anywhere:
                continue
            block = param.grad if param.grad is not None else torch.zeros_like(param)
            layout = state.layouts.get(name)
            if layout is not None:
                block = gather_whole(f"{name} gradient", block, layout, state.comm, ranks)
            gradients[name] = block
        return gradients

    def blocks(self) -> dict[str, tuple[Box, torch.Tensor]]:
        """This rank's block of every split tensor, and where it lies."""
        self.flush()
        state = self._shardwise
        found = {n: (state.layouts[n], t) for n, t in named_tensors(self) if n in state.layouts}
        return {name: (layout[state.comm.rank], t) for name, (layout, t) in found.items()}

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scales all gradients as torch's clip_grad_norm_ would on one device.

        All ranks must call it; `foreach` is accepted as torch's is, and changes nothing.
        """
        self.flush()
        params = list(self.parameters())  # a rank may lack the gradient of what others have
        gradients = [p.new_empty(0) if p.grad is None else p.grad for p in params]
        norm = torch.linalg.vector_norm(self.norms(params, gradients, norm_type), norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped. To disable this error and scale the "
                "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # keeps what is not a number
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device))
        kinds = [g.abs().dtype for p, g in zip(params, gradients, strict=True) if p.requires_grad]
        return norm.to(reduce(torch.promote_types, kinds) if kinds else torch.float32)

    @torch.no_grad()
    def norms(
        self, params: Sequence[torch.Tensor], values: Sequence[torch.Tensor], p: float = 2.0
    ) -> torch.Tensor:
        """The norm of each whole value, of which this rank has a block as it has of the parameter.

        All ranks must call it, for the same parameters.
        """
        state, names = self._shardwise, {id(param): name for name, param in self.named_parameters()}
        device = params[0].device if params else None
        largest = p in (inf, -inf)
        nothing = inf if p == -inf else 0.0
        own = torch.full((len(params),), nothing, dtype=torch.float64, device=device)
        for index, (param, value) in enumerate(zip(params, values, strict=True)):
            layout = state.layouts.get(names[id(param)])
            owner = layout.segment(state.comm.rank)[0] if layout else 0
            if owner == state.comm.rank and value.numel():
                exact = value.to(torch.promote_types(value.dtype, torch.float64))
                norm = torch.linalg.vector_norm(exact, p)
                own[index] = norm if p == 0 or largest else norm**p
        if largest:
            every = torch.stack(state.comm.gather_objects(own.cpu()))
            return (every.amax(0) if p > 0 else every.amin(0)).to(device)
        everybody = tuple(range(state.comm.size))
        state.comm.all_reduce(everybody, own, About("the norms of all tensors")).wait()
        return own if p == 0 else own ** (1.0 / p)

    @property
    def plan(self) -> Plan:
        return self._shardwise.plan

    @property
    def comm(self) -> Communicator:
        """How this rank talks to the others."""
        return self._shardwise.comm

    def extra_repr(self) -> str:
        return f"world={self.plan.world}"

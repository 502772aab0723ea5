"""Autoencoders of `diffusers`: decoders on all ranks of a group, in an unmodified pipeline."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.cluster.cluster import Cluster
from shardwise.comm.given import WORLD, communicator_of
from shardwise.errors import ShardwiseError
from shardwise.planner.planned import plan as make_plan
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import ParallelModel, of, parallelize

ENCODING = ("encoder", "quant_conv")  # what decoding does not need
IN_PIECES = ("use_tiling", "use_slicing")  # what splitting makes needless, and what is not exact
MOST_KEPT = 4  # decoders, for different arguments beside latents


class Decoding(nn.Module):
    """From latents to images or frames, as a function of tensors."""

    def __init__(self, vae: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.vae: Any = _without_encoder(vae)
        self.options = options

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(z, return_dict=False, **self.options)[0]


def _without_encoder(vae: nn.Module) -> Any:
    """The same autoencoder with the same tensors, but for those that only encoding needs."""
    shell = copy.copy(vae)
    shell.__dict__.pop("decode", None)  # that of an instance, which this is for
    own = vae._modules.items()  # of what is gone some family may ask how many layers it has
    kept = {name: nn.Module() if child and name in ENCODING else child for name, child in own}
    shell.__dict__["_modules"] = kept
    for name in IN_PIECES:
        if hasattr(shell, name):
            setattr(shell, name, False)
    return shell


class ParallelDecoder:
    """The decoders that an autoencoder runs in the place of its own; made when they are needed."""

    def __init__(
        self, vae: Any, plan: Plan | None, planning: dict[str, Any], running: dict[str, Any]
    ) -> None:
        self.vae, self._given = vae, plan
        self._planning, self._running = planning, running
        self._decoders: dict[str, ParallelModel] = {}  # by their arguments; the last used is last

    def decode(self, z: torch.Tensor, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        """As the autoencoder's own, on all ranks; they are given the same latents."""
        decoder = self._decoder(z, self._options(z, args, kwargs))
        sample = decoder.eval()(z) if not self.vae.training else decoder.train()(z)
        if not return_dict:
            return (sample,)
        return sys.modules[type(self.vae).__module__].DecoderOutput(sample=sample)

    def _options(self, z: torch.Tensor, args: Any, kwargs: Any) -> dict[str, Any]:
        """The arguments beside latents, by name; a generator draws nothing while one decodes."""
        bound = inspect.signature(type(self.vae).decode).bind(self.vae, z, *args, **kwargs)
        _, _, *others = bound.arguments
        options = {n: bound.arguments[n] for n in others if n not in ("return_dict", "generator")}
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                raise ShardwiseError(
                    f"decode is given the tensor {name!r}, and a parallel decoder takes latents "
                    "only; make the decoder itself parallel (shardwise.parallelize)"
                )
        return {name: value for name, value in options.items() if value is not None}

    def _decoder(self, z: torch.Tensor, options: dict[str, Any]) -> ParallelModel:
        key = repr(sorted(options.items()))
        found = self._decoders.pop(key, None) or self._made(z, options)
        self._decoders[key] = found
        while len(self._decoders) > MOST_KEPT:
            del self._decoders[next(iter(self._decoders))]
        return found

    def _made(self, z: torch.Tensor, options: dict[str, Any]) -> ParallelModel:
        module = Decoding(self.vae, options).train(self.vae.training)
        plan = self._given or make_plan(module, z, **self._planning)
        decoder = parallelize(module, plan, **self._running)
        _share_memory(module, decoder)
        return decoder

    @property
    def plan(self) -> Plan:
        """That of the decoder used last, or the one that was given."""
        if self._decoders:
            return of(next(reversed(self._decoders.values()))).plan
        if self._given is None:
            raise ShardwiseError("the decoder is planned when it is first used: decode something")
        return self._given

    def restore(self) -> None:
        """Lets the autoencoder decode on one device again."""
        self.vae.__dict__.pop("decode", None)
        self._decoders.clear()


def _share_memory(original: nn.Module, decoder: nn.Module) -> None:
    """Weights that this rank holds whole are held once."""
    whole = dict(original.named_parameters()) | dict(original.named_buffers())
    for name, tensor in [*decoder.named_parameters(), *decoder.named_buffers()]:
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.shape == whole[name].shape:
            whole[name].data = tensor.data


def parallelize_decoder(
    vae: nn.Module,
    plan: Plan | None = None,
    *,
    group: Any = WORLD,
    mesh: Any = None,
    sizes: Sequence[Any] = (),
    cluster: str | Cluster = "local",
    memory: str | int | None = None,
    inference: bool = True,
    **running: Any,
) -> ParallelDecoder:
    """Lets an autoencoder of `diffusers` decode on all ranks of a group, exactly; in place.

    All ranks of the group call `vae.decode` with the same latents. Without a plan the best one for
    the first latents is found, and for latents of other shapes (`sizes`), on so many workers of
    `cluster` with so much memory; what else `parallelize` takes is passed on to it. Latents of
    any size can be decoded then. Tiling and slicing, which are not exact, are left out.

    >>> parallelize_decoder(pipe.vae, cluster="h100x8")
    """
    if not callable(getattr(vae, "decode", None)):
        raise ShardwiseError(f"a {type(vae).__name__} has no decode: this is for autoencoders")
    if "decode" in vars(vae):
        raise ShardwiseError("this autoencoder decodes in parallel already")
    num_workers = 1 if plan is None else plan.world
    comm = communicator_of(running.pop("comm", None), group, mesh, num_workers)
    planning = {"cluster": cluster, "workers": comm.size, "memory": memory, "sizes": sizes}
    planning |= {"inference": inference, "output": running.get("output", "full")}
    decoder = ParallelDecoder(vae, plan, planning, running | {"comm": comm})
    vae.__dict__["decode"] = decoder.decode
    return decoder

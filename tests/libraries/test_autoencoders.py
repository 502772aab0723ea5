"""Autoencoders of diffusers decode on several ranks what they decode on one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from outside_cases.autoencoders import FAMILIES
from shardwise import Plan, ShardwiseError, capture, parallelize_decoder
from shardwise.comm import Communicator
from shardwise.comm.in_process import World
from shardwise.libraries.autoencoders import Decoding
from shardwise.model.capture import ModelGraphs

pytest.importorskip("diffusers")
SD = FAMILIES["stable diffusion"]


def latents(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_decoder_gives_what_it_gives_on_one_device(name: str) -> None:
    family = FAMILIES[name]
    vae: Any = family.build().double()
    shapes = family.latents, family.of_size(12, 10)
    with torch.no_grad():
        expected = [vae.decode(latents(shape), **family.arguments).sample for shape in shapes]
    module, sizes = Decoding(vae, dict(family.arguments)), (shapes[0],)
    graphs = ModelGraphs(module, sizes, (torch.float64,), sizes_vary=True)
    graph = graphs(False, sizes)
    limit = 1e-5 if family.float32 else 1e-12
    assert not Plan.uniform(graph, h=3).whole  # layers that one worker would compute

    def work(comm: Communicator, plan: Plan | None) -> None:
        own = copy.deepcopy(vae)
        parallelize_decoder(own, plan, comm=comm, graphs=graphs)
        for shape, y in zip(shapes, expected, strict=True):
            with torch.inference_mode():
                found = own.decode(latents(shape), **family.arguments).sample
            assert float((found - y).abs().max()) <= limit * float(y.abs().max())

    for plan in (Plan.uniform(graph, h=3), Plan.uniform(graph, w=2)):
        World(plan.world).run(work, plan)
    if len(graph.layers) < 100:
        World(2).run(work, None)  # planned by itself


def on_two(work: Any) -> list[Any]:
    vae: Any = SD.build().double()
    graph = capture(Decoding(vae, {}), latents(SD.latents), training=False)
    plan = Plan.uniform(graph, h=2)

    def run(comm: Communicator) -> Any:
        own = copy.deepcopy(vae)
        return work(own, parallelize_decoder(own, plan, comm=comm), copy.deepcopy(vae))

    return World(2).run(run)


def test_a_reward_on_the_image_has_the_gradients_of_one_device() -> None:
    def work(own: Any, decoder: Any, alone: Any) -> None:
        found, expected = (latents(SD.latents).requires_grad_() for _ in range(2))
        own.decode(found, return_dict=False)[0].square().mean().backward()
        alone.decode(expected, return_dict=False)[0].square().mean().backward()
        torch.testing.assert_close(found.grad, expected.grad)

    on_two(work)


def test_weights_that_are_whole_are_held_once() -> None:
    def work(own: Any, decoder: Any, alone: Any) -> None:
        own.decode(latents(SD.latents))
        (held,) = decoder._decoders.values()
        first = held.vae.decoder.conv_in.weight
        assert first.data_ptr() == own.decoder.conv_in.weight.data_ptr()
        torch.testing.assert_close(own.decoder.conv_in.weight, alone.decoder.conv_in.weight)
        assert not any(".encoder." in name for name, _ in held.named_parameters())

    on_two(work)


def test_it_can_be_undone_and_looked_at() -> None:
    def work(own: Any, decoder: Any, alone: Any) -> None:
        assert decoder.plan.main_split == "h=2"
        with pytest.raises(ShardwiseError, match="decodes in parallel already"):
            parallelize_decoder(own)
        decoder.restore()
        assert "decode" not in vars(own)
        assert own.decode(latents(SD.latents)).sample.shape[2:] == (36, 28)

    on_two(work)


def test_what_cannot_be_decoded_in_parallel_is_named() -> None:
    with pytest.raises(ShardwiseError, match="a Linear has no decode"):
        parallelize_decoder(nn.Linear(2, 2))

    class Masked(nn.Module):
        def decode(self, z: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return z

    masked: Any = Masked()
    decoder = parallelize_decoder(masked)
    with pytest.raises(ShardwiseError, match="given the tensor 'mask'"):
        masked.decode(torch.zeros(1, 2), mask=torch.zeros(1, 2))
    with pytest.raises(ShardwiseError, match="decode something"):
        _ = decoder.plan

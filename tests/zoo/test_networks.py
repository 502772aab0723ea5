"""What every network must do: have the published size, run, learn and export.

Most tests build on torch's meta device, where neither weights nor activations take memory.
"""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from shardwise import zoo

# Published counts; those of P3 are given there as 48, 76 and 140 million. The CIFAR-10,
# digits and unet3d counts have no publication and only guard against accidents.
NUM_PARAMETERS = {
    "alexnet": 61_100_840,
    "alexnet_bn": 61_100_840 + 2 * (64 + 192),
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg128": 47_609_192,
    "vgg256": 76_400_360,
    "vgg512": 140_175_848,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "wrn50_2": 68_883_240,
    "wrn50_4": 223_439_144,
    "googlenet": 13_004_888,
    "inception_v3": 27_161_264,
    "densenet121": 7_978_856,
    "vgg16_cifar": 15_245_130,
    "resnet34_cifar": 21_282_122,
    "densenet121_cifar": 6_956_298,
    "googlenet_cifar": 5_490_986,
    "digits": 58_474,
    "unet3d": 1_401_299,
}

# Image sizes, below the published ones, that tests and examples elsewhere can afford.
REDUCED = {
    name: 96 if name == "inception_v3" else 64
    for name, entry in zoo.MODELS.items()
    if entry.num_classes == 1000
}


@cache  # a network on the meta device keeps nothing but its mode and gradients
def on_meta(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return zoo.build(name, **options)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", zoo.names())
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    assert num_parameters(on_meta(name)) == NUM_PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "expected"), [("googlenet", 6_624_904), ("inception_v3", 23_834_568)]
)
def test_without_auxiliary_heads_their_parameters_are_gone(name: str, expected: int) -> None:
    assert num_parameters(on_meta(name, aux=False)) == expected


@pytest.mark.parametrize("name", zoo.names())
def test_evaluation_returns_one_tensor_of_class_scores(name: str) -> None:
    y = on_meta(name).eval()(torch.empty(zoo.input_shape(name, 2), device="meta"))
    entry = zoo.entry(name)
    voxels = entry.input_shape[1:] if name == "unet3d" else ()
    assert y.shape == (2, entry.num_classes, *voxels)


@pytest.mark.parametrize("name", zoo.names())
def test_every_parameter_takes_part_in_training(name: str) -> None:
    model = on_meta(name).train()
    ys = outputs(model(torch.empty(zoo.input_shape(name, 2), device="meta")))
    model.zero_grad()
    torch.stack([y.sum() for y in ys]).sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", REDUCED)
def test_smaller_images_run_in_both_modes(name: str) -> None:
    model = on_meta(name)
    x = torch.empty(2, 3, REDUCED[name], REDUCED[name], device="meta")
    for mode in (True, False):
        assert all(y.shape == (2, 1000) for y in outputs(model.train(mode)(x)))


@pytest.mark.parametrize("name", ["alexnet", "vgg11", "googlenet", "inception_v3"])
def test_dropout_can_be_switched_off(name: str) -> None:
    options = {"aux_dropout": 0.0} if name == "googlenet" else {}
    model = on_meta(name, dropout=0.0, **options)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.0}


def test_dropout_of_a_dense_layer_can_be_switched_on() -> None:
    model = on_meta("densenet121_cifar", dropout=0.2)
    assert sum(isinstance(m, nn.Dropout) for m in model.modules()) == 6 + 12 + 24 + 16


@pytest.mark.parametrize("name", ["vgg16_cifar", "resnet34_cifar", "digits"])
def test_scores_and_gradients_of_a_fresh_network_are_finite_and_not_zero(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name)
    y = model(torch.randn(zoo.input_shape(name, 4)))
    nn.functional.cross_entropy(y, torch.arange(4)).backward()
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    assert norms.isfinite().all()
    first, *_ = model.parameters()
    assert first.grad is not None and first.grad.norm() > 1e-4


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", ["digits", "unet3d", "vgg16_cifar"])
def test_export_leaves_the_batch_size_free(name: str, mode: bool) -> None:
    torch.manual_seed(0)
    options = {"dropout": 0.0} if name == "vgg16_cifar" else {}
    model = zoo.build(name, **options).train(mode)
    x = torch.randn(zoo.input_shape(name, 4))
    program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim.DYNAMIC},))
    other = x[:3]
    torch.testing.assert_close(program.module()(other), model(other))

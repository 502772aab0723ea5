"""Networks of the zoo under random plans equal one device; all of them in the deep run."""

from __future__ import annotations

import pytest

from shardwise import zoo
from shardwise.specs.model_spec import ModelSpec
from shardwise.verify.by_name import VerifyRequest, verify_model

# Small images that still leave batch norm several values per channel in the last layers: with few
# values it amplifies rounding beyond any tolerance, on one device too.
SIZES = {
    "inception_v3": 139,
    "densenet121": 96,
    "googlenet": 96,
    "vgg11": 32,
    "vgg16": 32,
    "vgg19": 32,
    "vgg128": 32,
    "vgg256": 32,
    "vgg512": 32,
    "unet3d": 16,
}
MANY_WORKERS = [("alexnet", 3), ("alexnet", 6), ("alexnet", 8), ("resnet34", 3), ("resnet34", 6)]
MANY_WORKERS += [("resnet34", 8), ("inception_v3", 3), ("inception_v3", 6), ("inception_v3", 8)]


def check(name: str, workers: int, num_random: int) -> None:
    batch, channels, *space = zoo.input_shape(name, max(4, workers))
    size = min(space[0], SIZES.get(name, 64))
    shape = (batch, channels, *[size] * len(space))
    results = verify_model(VerifyRequest(ModelSpec(name, (shape,)), workers, num_random=num_random))
    assert len(results) == num_random
    assert all(result.passed for result in results), [result.error for result in results]


@pytest.mark.parametrize(("name", "workers"), [("digits", 3), ("unet3d", 4), ("resnet34_cifar", 2)])
def test_a_small_network_of_the_zoo_equals_one_device(name: str, workers: int) -> None:
    check(name, workers, 1)


@pytest.mark.deep
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", zoo.names())
def test_every_network_of_the_zoo_equals_one_device_on_four_workers(name: str) -> None:
    check(name, 4, 5)


@pytest.mark.deep
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "workers"), MANY_WORKERS)
def test_networks_equal_one_device_on_three_six_and_eight_workers(name: str, workers: int) -> None:
    check(name, workers, 5)

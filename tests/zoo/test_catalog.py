"""The list of networks: names, entries and errors."""

import dataclasses
import pickle

import pytest
import torch

from shardwise import zoo


def test_names_are_the_keys_of_the_list_of_models() -> None:
    assert zoo.names() == tuple(zoo.MODELS)
    assert all(entry.name == name for name, entry in zoo.MODELS.items())


def test_every_network_says_who_uses_it() -> None:
    assert all(entry.source for entry in zoo.MODELS.values())


@pytest.mark.parametrize("paper", ["P1", "P2", "P3", "P4", "P5"])
def test_every_paper_has_a_network(paper: str) -> None:
    assert any(paper in entry.source for entry in zoo.MODELS.values())


def test_an_entry_cannot_be_changed_and_survives_pickling() -> None:
    entry = zoo.entry("resnet50")
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(entry)) == entry
    assert str(entry) == "resnet50 (P2, P5)"


@pytest.mark.parametrize(
    ("alias", "name"),
    [("vgg_a", "vgg11"), ("wide_resnet50_2", "wrn50_2"), ("wide_resnet50_4", "wrn50_4")],
)
def test_an_alias_finds_the_same_entry(alias: str, name: str) -> None:
    assert zoo.entry(alias) is zoo.MODELS[name]


def test_input_shape_puts_the_batch_first() -> None:
    assert zoo.input_shape("inception_v3", 8) == (8, 3, 299, 299)
    assert zoo.input_shape("unet3d", 1) == (1, 1, 32, 32, 32)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("resnet5", "resnet50"), ("VGG16", "vgg16"), ("incepton_v3", "inception_v3")],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"no network '{wrong}'; did you mean '{nearest}'?"):
        zoo.build(wrong)
    with pytest.raises(ValueError, match=nearest):
        zoo.input_shape(wrong, 1)


def test_a_name_like_no_other_is_refused_with_the_whole_list() -> None:
    with pytest.raises(ValueError, match=r"choose from alexnet, .*, unet3d\."):
        zoo.build("##")


@pytest.mark.parametrize("name", ["alexnet", "resnet34_cifar", "digits", "unet3d"])
def test_the_number_of_classes_can_be_chosen(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name, num_classes=7).eval()
        assert model(torch.empty(zoo.input_shape(name, 2))).shape[:2] == (2, 7)

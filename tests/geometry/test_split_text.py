"""Splits as people write them become configs, and say in a sentence what is wrong with them."""

from __future__ import annotations

import pytest

from shardwise import Config, ShardwiseError
from shardwise.geometry.split_text import parse_config, parse_layer_split


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(n=2, h=2),
        Config(n=16, gradient="gather"),
        Config(f=2, ranks=(1, 3)),
        Config(f=4, ranks=(0, 4, 8, 12)),
        Config(n=2, f=2, ranks=(3, 1, 0, 2)),
    ],
    ids=str,
)
def test_what_a_config_prints_is_read_as_the_same_config(config: Config) -> None:
    assert parse_config(str(config), 16) == (config, "@" in str(config))


def test_commas_and_spaces_are_the_same_between_degrees() -> None:
    assert parse_config("n=2,h=2", 4) == parse_config("n=2 h=2", 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n=32", "needs 32 workers, and there are 16"),
        ("n=99999999999999999999", "workers, and there are 16"),
        ("x=2", "'x' is not an axis"),
        ("whole n=2", "'whole n' is not an axis|'whole' is not an axis"),
        ("n=2 @a", r"ranks 'a' are not written as in @0,8 or @0:16:4"),
        ("n=2 @0:999999999999", "are not first, end and step"),
        ("n=2 @0:4:0", "are not first, end and step"),
        ("n=2 @0,1,2", "3 ranks"),
        ("n=2 @0,0", "must be different"),
        ("", "'' is not an axis"),
    ],
)
def test_a_wrong_split_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ShardwiseError, match=message) as error:
        parse_config(text, 16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "conv1", "conv1=", "=h=2"])
def test_a_layer_without_a_split_is_refused(text: str) -> None:
    with pytest.raises(ShardwiseError, match="is not a layer and its split"):
        parse_layer_split(text)

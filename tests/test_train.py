"""Training the digits: it learns, and any number of workers learns the same."""

from __future__ import annotations

import pytest
import torch

from shardwise.data.digits import NUM_TEST
from shardwise.errors import ShardwiseError
from shardwise.train import Settings, load_digits, train_digits


def test_the_digits_are_split_without_overlap() -> None:
    digits = load_digits()
    assert digits.train_x.shape == (1797 - NUM_TEST, 1, 8, 8)
    assert digits.test_x.shape == (NUM_TEST, 1, 8, 8)
    assert digits.train_x.min() >= 0 and digits.train_x.max() <= 1
    labels = torch.cat([digits.train_y, digits.test_y])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_two_workers_learn_what_one_learns() -> None:
    # A short run: rounding in float32 grows with every step, on one device too.
    settings = {"epochs": 2, "batch": 128, "lr": 0.02}
    alone = train_digits(Settings(workers=1, **settings))
    together = train_digits(Settings(workers=2, split={"h": 2}, **settings))
    assert together[1].loss < together[0].loss
    for one, two in zip(alone, together, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-4)
        assert two.accuracy == pytest.approx(one.accuracy, abs=1.5 / NUM_TEST)
    assert together[1].accuracy > 0.8


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch": 0}, {"lr": 0.0}, {"seed": -1}])
def test_a_wrong_setting_is_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ShardwiseError, match=f"{next(iter(wrong))}="):
        Settings(**wrong)

"""Orders: one shuffle for all ranks, every sample once, also across a resumed run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data import Batches, shuffled
from shardwise.errors import ShardwiseError

SHUFFLED_8 = [0, 3, 7, 5, 1, 2, 6, 4]
SHUFFLED_8_OTHER = [7, 1, 6, 0, 4, 2, 3, 5]


def test_an_epoch_has_every_sample_once_in_its_own_order() -> None:
    first, second = shuffled(50, seed=1, epoch=1), shuffled(50, seed=1, epoch=2)
    assert sorted(first.tolist()) == list(range(50))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, shuffled(50, seed=2, epoch=1))
    assert np.array_equal(first, shuffled(50, seed=1, epoch=1))


def test_the_shuffle_never_changes_between_versions() -> None:
    assert shuffled(8, seed=0, epoch=0).tolist() == SHUFFLED_8
    assert shuffled(8, seed=7, epoch=3).tolist() == SHUFFLED_8_OTHER


def test_the_shuffle_is_even() -> None:
    first = np.bincount([shuffled(5, seed, 0)[0] for seed in range(2000)])
    assert first.min() > 320 and first.max() < 480


def test_without_shuffling_samples_come_in_order() -> None:
    batches = Batches(7, 3, shuffle=False)
    assert [b.tolist() for b in batches.remaining()] == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(batches) == 3


def test_the_last_batch_may_be_dropped() -> None:
    batches = Batches(7, 3, shuffle=False, drop_last=True)
    assert [b.tolist() for b in batches.remaining()] == [[0, 1, 2], [3, 4, 5]]
    assert len(batches) == 2
    with pytest.raises(ShardwiseError, match="no batch is left"):
        Batches(2, 3, drop_last=True)


@settings(deadline=None, max_examples=60)
@given(
    num=st.integers(1, 60),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    stops=st.lists(st.integers(0, 4), min_size=1, max_size=5),
)
def test_a_run_resumed_with_other_batches_sees_every_sample_once(
    num: int, sizes: list[int], stops: list[int]
) -> None:
    seen: list[int] = []
    state = Batches(num, sizes[0], seed=3).state_dict()
    for size, stop in zip(sizes, stops, strict=False):
        run = Batches(num, size, seed=3)
        run.load_state_dict(json.loads(json.dumps(state)))
        for indices, _ in zip(run.remaining(), range(stop), strict=False):
            seen += indices.tolist()
            run.position += len(indices)
        state = run.state_dict()
    last = Batches(num, 4, seed=3)
    last.load_state_dict(state)
    for indices in last.remaining():
        seen += indices.tolist()
    assert seen == shuffled(num, 3, 0).tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 11}, "num_samples=11"),
        ({"seed": 1}, "seed=1"),
        ({"shuffle": 0}, "shuffle=0"),
        ({"position": 11}, "beyond"),
        ({"position": -1}, "position is -1"),
        ({"epoch": "2"}, "epoch is '2'"),
        ({"epoch": 1.5}, "epoch is 1.5"),
        ({"epoch": None}, "epoch is None"),
    ],
)
def test_a_position_of_another_run_is_refused(change: dict, words: str) -> None:
    batches = Batches(10, 3)
    with pytest.raises(ShardwiseError, match=words):
        batches.load_state_dict(batches.state_dict() | change)
    with pytest.raises(ShardwiseError, match="num_samples is None"):
        batches.load_state_dict({})
    assert (batches.epoch, batches.position) == (0, 0)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"num_samples": 0}, {"seed": -1}])
def test_a_wrong_setting_is_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ShardwiseError, match=f"{next(iter(wrong))}="):
        Batches(**{"num_samples": 5, "batch": 2} | wrong)

"""Prefetching: bounded, in order, with errors carried over, and a thread that always ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from shardwise.data.loader import prefetched


def running() -> int:
    return sum(thread.name.startswith("shardwise-prefetch") for thread in threading.enumerate())


def test_items_come_in_order_and_the_thread_ends() -> None:
    with closing(prefetched(iter(range(100)), depth=3)) as items:
        assert list(items) == list(range(100))
        assert list(items) == []
    assert running() == 0


def test_no_more_is_made_than_the_depth_allows() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    with closing(prefetched(numbers(), depth=2)) as items:
        for count in range(1, 5):
            next(items)
            time.sleep(0.05)
            assert len(made) <= count + 2
    assert running() == 0 and len(made) <= 6


def test_an_error_is_raised_where_its_item_would_have_come() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("three")

    with closing(prefetched(numbers(), depth=5)) as items:
        assert [next(items), next(items)] == [1, 2]
        with pytest.raises(KeyError, match="three"):
            next(items)
        assert list(items) == []
    assert running() == 0


def test_leaving_early_ends_the_thread() -> None:
    for _ in range(20):
        with closing(prefetched(iter(range(1000)), depth=4)) as items:
            next(items)
    assert running() == 0

"""Reading ahead in a background thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
END: Any = object()


def prefetched(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The items of an iterator, of which up to `depth` are made before they are asked for.

    What the iterator raises is raised where the item would have come. Closing this ends the thread,
    after the item that it is making.

    >>> list(prefetched(iter("abc"), depth=2))
    ['a', 'b', 'c']
    """
    with ThreadPoolExecutor(1, "shardwise-prefetch") as thread:
        ahead = deque(thread.submit(next, items, END) for _ in range(depth))
        try:
            while (item := ahead.popleft().result()) is not END:
                ahead.append(thread.submit(next, items, END))
                yield item
        finally:
            thread.shutdown(cancel_futures=True)

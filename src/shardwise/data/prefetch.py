"""Reading ahead in a background thread."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
ITEM, ERROR, END = "item", "error", "end"


class Prefetch(Generic[T]):
    """The items of an iterator, of which up to `depth` are made before they are asked for.

    What the iterator raises is raised where the item would have come. Leaving the `with` block ends
    the thread; it ends after the item that it is making.

    >>> with Prefetch(iter("abc"), depth=2) as letters:
    ...     list(letters)
    ['a', 'b', 'c']
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items, self._free = items, Semaphore(depth)
        self._made: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._stopped = self._ended = False
        self._thread = Thread(target=self._make, name="shardwise-prefetch", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        """On the thread: a place is taken before an item is made, so that memory is bounded."""
        try:
            while True:
                self._free.acquire()
                if self._stopped:
                    return
                self._made.put((ITEM, next(self._items)))
        except StopIteration:
            self._made.put((END, None))
        except BaseException as error:
            self._made.put((ERROR, error))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended or self._stopped:
            raise StopIteration
        kind, value = self._made.get()
        if kind == ITEM:
            self._free.release()
            return value
        self._ended = True
        if kind == ERROR:
            raise value
        raise StopIteration

    def close(self) -> None:
        self._stopped = True
        self._free.release()
        self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

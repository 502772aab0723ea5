"""Messages under way, and what is said when they do not arrive."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shardwise.comm.headers import Mismatch
from shardwise.comm.world_state import world_state
from shardwise.errors import LostPeer, ShardwiseError

if TYPE_CHECKING:
    from shardwise.comm.ranks import Ranks

GRACE = 0.5  # seconds in which a rank whose connection is lost may have said why


@dataclass(frozen=True)
class About:
    """What a communication is for: in traces, in headers, and in the message when it fails."""

    name: str = "a tensor"
    kind: str = "transfer"  # or statistics, gradients, agreement


ANYTHING = About()
AGREEMENT = About("what all ranks must agree on", "agreement")


@dataclass(frozen=True, eq=False)
class Carried:
    """What torch carries, and the headers that announce it, where ranks are connected."""

    headers: Sequence[Any]
    work: Any
    timeout: float

    def wait(self) -> None:
        """Whatever differs from what was awaited is an error before it is used."""
        for one in self.headers:
            one.wait()
        self.work.wait(timedelta(seconds=self.timeout))

    def get_future(self) -> Any:
        return self.work.get_future()


class Pending:
    """Messages under way; `wait` returns when all buffers may be read and written."""

    def __init__(
        self,
        works: list[Any],
        finish: Callable[[], None] | None = None,
        talk: Communication | None = None,
    ) -> None:
        self._works, self._finish, self._talk = works, finish, talk
        if talk is not None and works:
            talk.watch(works)

    def wait(self) -> None:
        if self._works and self._talk is not None:
            self._talk.wait(self._works)
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None

    def then(self, act: Callable[[], object]) -> Pending:
        """The same, and something that is done when these messages are there."""

        def finish() -> None:
            self.wait()
            act()

        return Pending([], finish)


class Communication:
    """One communication: who waits for whom, for what, and how long."""

    def __init__(self, comm: Ranks, action: str, peers: Iterable[int], about: About) -> None:
        self.world_state = world_state()
        self.world_state.alarm.check()
        self.comm, self.action, self.peers, self.about = comm, action, tuple(peers), about
        self._begin = self._landed = comm.timeline.now() if comm.timeline.on else 0.0

    @contextmanager
    def starting(self, peers: Iterable[int] | None = None) -> Iterator[None]:
        """Within, messages are started; that fails where a peer is known to be dead."""
        try:
            yield
        except (RuntimeError, ShardwiseError) as error:
            raise self.failed(error, self.peers if peers is None else peers) from None

    def watch(self, works: list[Any]) -> None:
        """Notes when the last message has arrived, whether or not anybody waits for it yet."""
        if self.comm.timeline.on:
            for work in works:
                future = getattr(work, "get_future", None)
                if future is not None:
                    with suppress(RuntimeError):  # not every kind of work has one
                        future().add_done_callback(self._note)

    def _note(self, _: Any) -> None:
        self._landed = max(self._landed, self.comm.timeline.now())

    def wait(self, works: list[Any]) -> None:
        if self.comm.timeline.on:
            self._recorded(works)
        else:
            self._wait(works)

    def _wait(self, works: list[Any]) -> None:
        for number, work in enumerate(works):
            try:
                work.wait()
            except (RuntimeError, ShardwiseError) as error:
                apart = len(works) == len(self.peers)  # a message each, or one work for all?
                peers = self.peers[number : number + 1] if apart else self.peers
                peers = getattr(error, "peers", peers)  # whom our own thread waited for
                raise self.failed(error, peers) from None

    def _recorded(self, works: list[Any]) -> None:
        timeline = self.comm.timeline
        before, start = timeline.switch(), timeline.now()
        self._wait(works)
        end = timeline.now()
        landed = self._landed if self._landed > self._begin else end
        lane = "gradients" if self.about.kind == "gradients" else "transfers"
        about = (self.about.name, self.about.kind, lane)
        timeline.add(*about, self._begin, min(landed, end), end - start)
        timeline.switch(*before)

    def failed(self, error: Exception, peers: Iterable[int]) -> ShardwiseError:
        """What to raise: what the rank that failed first has said, or else why this one fails."""
        comm, alarm = self.comm, self.world_state.alarm
        if told := alarm.heard(0.0 if isinstance(error, Mismatch) else GRACE):
            return LostPeer(told)
        if isinstance(error, Mismatch):
            comm.fail(str(error))
            return error
        sentence = self._complaint(error, comm.lost_by(error) or peers)
        comm.fail(sentence)
        return LostPeer(sentence)

    def _complaint(self, error: Exception, peers: Iterable[int]) -> str:
        """One sentence: who waited for whom, and in what."""
        comm = self.comm
        others = [str(comm.global_rank(peer)) for peer in dict.fromkeys(peers) if peer != comm.rank]
        ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
        return (
            f"rank {comm.global_rank(comm.rank)} waited in vain for "
            f"{ranks if others else 'the others'} in the {self.action} of {self.about.name}: "
            f"{_reason(error)}"
        )


def _reason(error: Exception) -> str:
    """The first sentence of an error, without the place in gloo's source that it begins with."""
    text = re.sub(r"^\[[^\]]*\.cc:\d+\]\s*", "", str(error).strip())
    return re.split(r"\n|\. ", text)[0] or "the connection was lost"

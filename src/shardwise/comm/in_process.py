"""A world whose ranks are threads of one process: seeded, replayable, and never without end.

One rank runs at a time. Which one goes on when a rank waits, and when every message arrives, is
drawn from a seed, so that a case that fails runs again just as it did. Each rank has torch's random
numbers to itself, as a process has. Every message is compared with what its receiver awaits, and
where all ranks wait for each other they are told so at once.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.measured_sums import Algorithm
from shardwise.comm.communicator import Communicator, Messages
from shardwise.comm.headers import Mismatch
from shardwise.comm.pending import AGREEMENT, About, Pending
from shardwise.comm.timeline import Timeline
from shardwise.errors import LostPeer, ShardwiseError
from shardwise.tensors import dtype_name

LONGEST = 12  # turns that a message is under way at most
OBJECT = "an object"
Channel = tuple[str, int, int]  # lane, from, to


class Hung(ShardwiseError):
    """All ranks wait for each other."""


@dataclass
class Letter:
    """One message: what it is for, what it holds, and when it arrives."""

    about: str
    kind: str  # number of elements and dtype
    content: Any
    arrival: int
    sealed: bool  # the content is a copy; else the sender's memory, which it must leave alone

    def seal(self) -> None:
        if not self.sealed:
            self.content, self.sealed = self.content.clone(), True


@dataclass
class Mail:
    """What has been sent from one rank to another, and how much of it somebody awaits."""

    letters: list[Letter] = field(default_factory=list)
    awaited: int = 0


class World:
    """Runs a function on all ranks, each in a thread with a communicator of its own.

    >>> World(3, seed=1).run(lambda comm: sum(comm.gather_objects(comm.rank)))
    [3, 3, 3]
    """

    def __init__(self, size: int, seed: int = 0, delays: tuple[int, ...] = ()) -> None:
        """`delays` makes all messages of some ranks late, by so many turns."""
        self.size, self.seed = size, seed
        self._draw = random.Random(seed)
        self._delays = (*delays, *[0] * size)
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._over = threading.Semaphore(0)
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._alive = set(range(size))
        self._mail: dict[Channel, Mail] = {}
        self._now = 0
        self.failure: ShardwiseError | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(comm, *args) on every rank; raises what the first failing rank raised."""
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}
        random_numbers = torch.get_rng_state()

        def work(rank: int) -> None:
            self._turns[rank].acquire()
            torch.set_rng_state(random_numbers)
            try:
                results[rank] = function(InProcess(self, rank), *args)
            except BaseException as error:
                errors[rank] = error
                self.fail(rank, error)
            self._alive.discard(rank)
            self._pass_on()

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._over.acquire()
        for thread in threads:
            thread.join()
        torch.set_rng_state(random_numbers)
        if errors:
            raise next(iter(errors.values()))
        return results

    def fail(self, rank: int, error: BaseException) -> None:
        """From now on every rank that waits or sends is told what this one said."""
        if self.failure is None:
            self.failure = LostPeer(f"rank {rank} failed: {error}")

    # -- turns ---------------------------------------------------------------------------------

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Lets others run until this rank may go on."""
        self._waiting[rank] = ready, what
        self.give_way(rank)
        if self.failure is not None:
            raise self.failure

    def give_way(self, rank: int) -> None:
        """Lets another rank run, perhaps."""
        chosen = self._choose()
        if chosen != rank:
            state = torch.get_rng_state()
            self._turns[chosen].release()
            self._turns[rank].acquire()
            torch.set_rng_state(state)
        self._waiting.pop(rank, None)

    def _pass_on(self) -> None:
        if self._alive:
            self._turns[self._choose()].release()
        else:
            self._over.release()

    def _choose(self) -> int:
        """A rank that may go on; time moves on until there is one."""
        self._now += 1
        while not (able := [rank for rank in sorted(self._alive) if self._may_go_on(rank)]):
            coming = [
                letter.arrival
                for mail in self._mail.values()
                for letter in mail.letters
                if letter.arrival > self._now
            ]
            if coming:
                self._now = min(coming)
            else:
                each = [f"rank {rank} {what}" for rank, (_, what) in sorted(self._waiting.items())]
                self.failure = Hung("all ranks wait for each other: " + "; ".join(each))
        return self._draw.choice(able)

    def _may_go_on(self, rank: int) -> bool:
        return self.failure is not None or rank not in self._waiting or self._waiting[rank][0]()

    # -- messages ------------------------------------------------------------------------------

    def post(self, channel: Channel, about: str, kind: str, content: Any) -> Letter:
        """Sends a message; it arrives after those that were sent before it."""
        if self.failure is not None:
            raise self.failure
        letters = self._mail.setdefault(channel, Mail()).letters
        arrival = self._now + self._delays[channel[1]] + self._draw.randrange(LONGEST)
        arrival = max(arrival, letters[-1].arrival if letters else 0)
        letter = Letter(about, kind, content, arrival, kind == OBJECT)
        if self._draw.random() < 0.5:
            letter.seal()
        letters.append(letter)
        return letter

    def await_(self, channel: Channel, about: str, kind: str) -> Callable[[], Any]:
        """Takes the next message of a channel; what it returns waits for it."""
        mail = self._mail.setdefault(channel, Mail())
        place, (_, source, target) = mail.awaited, channel
        mail.awaited += 1

        def arrived() -> bool:
            return len(mail.letters) > place and mail.letters[place].arrival <= self._now

        def receive() -> Any:
            what = f"waits for message {place} of rank {source}, {kind} for {about!r}"
            self.wait(target, arrived, what)
            letter = mail.letters[place]
            letter.seal()
            if (letter.about, letter.kind) != (about, kind):
                raise Mismatch(
                    f"rank {source} sent {letter.kind} for {letter.about!r} where rank {target} "
                    f"awaits {kind} for {about!r}; the ranks do not do the same"
                )
            content, letter.content = letter.content, None
            return content

        return receive


class InProcess(Communicator):
    """What one rank of a `World` says to the others; every collective is made of messages."""

    def __init__(self, world: World, rank: int, lane: str = "") -> None:
        self.world, self.rank, self.size, self.lane = world, rank, world.size, lane
        self.timeout, self.group, self.timeline = None, None, Timeline()
        self._global, self.backend = tuple(range(world.size)), "threads"

    def _exchange(
        self, sends: Messages, receives: Messages, about: About, action: str, ranks: tuple[int, ...]
    ) -> Pending:
        """Posts all messages; waiting for them copies what has arrived."""
        purpose = f"{about.kind} {about.name}"
        sent = [
            self.world.post((self.lane, self.rank, peer), purpose, _kind(tensor), tensor.detach())
            for peer, tensor in sends
        ]
        coming = []
        for peer, buffer in receives:
            _spoil(buffer)  # who reads it too early shall notice
            receive = self.world.await_((self.lane, peer, self.rank), purpose, _kind(buffer))
            coming.append((buffer, receive))

        def arrive() -> None:
            for buffer, receive in coming:
                buffer.copy_(receive().view(buffer.shape))
            for letter in sent:
                letter.seal()

        self.world.give_way(self.rank)
        return Pending([], arrive)

    def _directly(self, ranks: tuple[int, ...]) -> bool:
        return True

    def _winner(self, ranks: tuple[int, ...], nbytes: int) -> Algorithm:
        return "direct"

    def broadcast(self, x: torch.Tensor, root: int = 0) -> Pending:
        everybody = tuple(range(self.size))
        sends = self._others(everybody, [x] * self.size) if self.rank == root else []
        receives = [(root, x)] if self.rank != root else []
        return self.exchange(sends, receives, About("the parameters", "broadcast"))

    def gather_objects(self, value: Any, about: About = AGREEMENT) -> list[Any]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            channel = self.lane, self.rank, rank
            self.world.post(channel, OBJECT, OBJECT, copy.deepcopy(value))
        receive = {r: self.world.await_((self.lane, r, self.rank), OBJECT, OBJECT) for r in others}
        found = {rank: receive[rank]() for rank in others} | {self.rank: value}
        return [found[rank] for rank in range(self.size)]

    def abort(self, reason: str) -> None:
        """Tells all other ranks why this one cannot go on."""
        self.world.fail(self.rank, ShardwiseError(reason))

    def prepare(self, groups: Any) -> None:
        """Threads need no process groups."""

    def group_of_lane(self, lane: str) -> Any:
        return None

    def summing_as(self, cluster: Cluster | str | None) -> InProcess:
        return self


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} x {dtype_name(tensor.dtype)}"


def _spoil(buffer: torch.Tensor) -> None:
    buffer.fill_(float("nan") if buffer.is_floating_point() or buffer.is_complex() else 1)

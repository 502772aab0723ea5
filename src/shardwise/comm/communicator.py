"""The messages between ranks, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from shardwise.cluster import Cluster
from shardwise.comm.connecting import connect
from shardwise.comm.groups import group_of, known_group
from shardwise.comm.schedules import ALGORITHMS, Rounds, Switches, schedule
from shardwise.comm.summing import start_sum
from shardwise.comm.timeline import Timeline
from shardwise.comm.wires import LARGEST, Lost, wires
from shardwise.errors import ShardwiseError
from shardwise.winners import Algorithm, Winner, fastest

Messages = Sequence[tuple[int, torch.Tensor]]  # (peer, contiguous tensor)

HOST_ONLY = ("gloo", "mpi4py")  # backends that move memory of the host only
FEW = 8  # ranks that exchange messages directly
SMALL = 64 << 10  # bytes of a sum that is sent whole to every rank


@dataclass(frozen=True)
class About:
    """What a communication is for: in traces, and in the message when it fails."""

    name: str = "a tensor"
    kind: str = "transfer"  # or statistics, gradients


ANYTHING = About()


@dataclass(frozen=True)
class Sums:
    """How to sum: the switch of every rank, and the winners that were measured."""

    switches: tuple[int, ...]
    winners: tuple[Winner, ...] = ()

    def of(self, ranks: tuple[int, ...]) -> Switches:
        """Some ranks, by the switch they lie at."""
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.switches[rank], []).append(rank)
        return tuple(map(tuple, found.values()))

    def algorithm(self, ranks: tuple[int, ...], nbytes: int) -> Algorithm | None:
        return fastest(self.winners, len(ranks), len(self.of(ranks)), nbytes)


class LostPeer(ShardwiseError):
    """A rank that died, or was cut off, while another waited for it."""


class Pending:
    """Messages under way; `wait` returns when all buffers may be read and written."""

    def __init__(
        self,
        works: list[Any],
        finish: Callable[[], None] | None = None,
        flight: Flight | None = None,
    ) -> None:
        self._works, self._finish, self._flight = works, finish, flight
        if flight is not None and works:
            flight.watch(works)

    def wait(self) -> None:
        if self._works and self._flight is not None:
            self._flight.wait(self._works)
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None


class Flight:
    """One communication: who waits for whom, for what, and how long."""

    def __init__(self, comm: Communicator, action: str, peers: Iterable[int], about: About) -> None:
        self.comm, self.action, self.peers, self.about = comm, action, tuple(peers), about
        self._begin = self._landed = comm.timeline.now() if comm.timeline.on else 0.0

    @contextmanager
    def starting(self, peers: Iterable[int] | None = None) -> Iterator[None]:
        """Within, messages are started; that fails where a peer is known to be dead."""
        try:
            yield
        except RuntimeError as error:
            peers = self.comm.lost_by(error) or (self.peers if peers is None else peers)
            raise LostPeer(complaint(self.comm, self.action, peers, self.about, error)) from None

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
        timeline = self.comm.timeline
        before = timeline.switch()
        start = timeline.now()
        for number, work in enumerate(works):
            try:
                work.wait()
            except RuntimeError as error:
                apart = len(works) == len(self.peers)  # a message each, or one work for all?
                peers = self.peers[number : number + 1] if apart else self.peers
                peers = getattr(error, "peers", peers)  # whom our own thread waited for
                peers = self.comm.lost_by(error) or peers
                raise LostPeer(
                    complaint(self.comm, self.action, peers, self.about, error)
                ) from None
        if timeline.on:
            end = timeline.now()
            landed = self._landed if self._landed > self._begin else end
            lane = "gradients" if self.about.kind == "gradients" else "transfers"
            timeline.add(
                self.about.name, self.about.kind, lane, self._begin, min(landed, end), end - start
            )
            timeline.switch(*before)


def complaint(
    comm: Communicator, action: str, peers: Iterable[int], about: About, error: Exception
) -> str:
    """One sentence about a communication that failed: who waited for whom, and in what."""
    others = [str(comm.name_of(peer)) for peer in dict.fromkeys(peers) if peer != comm.rank]
    whom = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else "the connection was lost"
    return (
        f"rank {comm.name_of(comm.rank)} waited in vain for {whom} in the {action} of "
        f"{about.name}: {reason}"
    )


class Communicator:
    """Asynchronous messages and collectives among the ranks of a process group.

    Ranks are numbered inside the group. Without torch.distributed there is one rank, which has
    nobody to talk to. Another lane has process groups of its own, so that what moves there does not
    wait for what moves elsewhere.
    """

    def __init__(self, group: Any = None, timeout: float | None = None, lane: str = "") -> None:
        self.timeout, self.lane, self.group = timeout, lane, group
        self.timeline = Timeline()
        self.sums: Sums | None = None
        if not (dist.is_available() and dist.is_initialized()):
            self.rank, self.size, self._global, self._backend = 0, 1, (0,), ""
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._global = tuple(dist.get_process_group_ranks(group))
        self._backend = dist.get_backend(group)
        if timeout is None:  # groups of lanes wait as long as the group that they belong to
            self.timeout = _timeout_of(group or dist.group.WORLD)

    def name_of(self, rank: int) -> int:
        """The number of a rank of this group among all processes."""
        return self._global[rank]

    def exchange(self, sends: Messages, receives: Messages, about: About = ANYTHING) -> Pending:
        """Sends every tensor to its peer and fills every buffer from its peer."""
        return self._exchange(sends, receives, about, "exchange")

    def _exchange(self, sends: Messages, receives: Messages, about: About, action: str) -> Pending:
        sends = [(peer, self._stage(tensor)) for peer, tensor in sends]
        staged = [(peer, self._stage(buffer, empty=True)) for peer, buffer in receives]
        peers = [peer for peer, _ in [*receives, *sends]]  # as works stand
        flight = Flight(self, action, peers, about)
        if self._backend == "nccl":
            steps = [(dist.irecv, *message) for message in staged]
            steps += [(dist.isend, *message) for message in sends]
            operations = [dist.P2POp(do, t, self._global[p], self.group) for do, p, t in steps]
            works = dist.batch_isend_irecv(operations) if operations else []
        else:
            into, out = (wires().receive, dist.irecv), (wires().send, dist.isend)
            works = [self._start(into, *message, flight) for message in staged]
            works += [self._start(out, *message, flight) for message in sends]

        def finish() -> None:
            _ = sends  # alive until they have left
            for (_, buffer), (_, arrived) in zip(receives, staged, strict=True):
                if buffer is not arrived:
                    buffer.copy_(arrived)

        return Pending(works, finish, flight)

    def _start(self, ways: tuple[Any, Any], peer: int, tensor: torch.Tensor, flight: Flight) -> Any:
        """Starts a message our own way where that carries it, else torch's."""
        own, other = ways
        with flight.starting((peer,)):
            if self._wired((self.rank, peer), tensor, flight.about):
                return own(self._global[peer], tensor, self.timeout)
            return other(tensor, self._global[peer], self.group)

    def _wired(self, ranks: tuple[int, ...], x: torch.Tensor, about: About) -> bool:
        """Whether such messages go over our own connections; the same on all of these ranks."""
        if self.lane or about.kind == "gradients" or self._backend != "gloo":
            return False
        return x.numel() * x.element_size() <= LARGEST and wires().connected(self._members(ranks))

    def lost_by(self, error: Exception) -> tuple[int, ...]:
        """The rank at the other end of a connection of our own that was lost, if it was that."""
        member = error.member if isinstance(error, Lost) else None
        return (self._global.index(member),) if member in self._global else ()

    def all_gather(
        self, ranks: tuple[int, ...], parts: list[torch.Tensor], x: Any, about: About = ANYTHING
    ) -> Pending:
        """Fills one part per rank of the group with that rank's x."""
        if self._directly(ranks):
            parts[ranks.index(self.rank)].copy_(x)
            others = [(r, part) for r, part in zip(ranks, parts, strict=True) if r != self.rank]
            return self._exchange([(rank, x) for rank, _ in others], others, about, "gather")
        staged = [self._stage(part, empty=True) for part in parts]
        x = self._stage(x)
        flight = Flight(self, "gather", ranks, about)
        with flight.starting():
            work = dist.all_gather(staged, x, self._subgroup(ranks), async_op=True)
        return Pending([work], lambda: _copy_back(parts, staged, x), flight)

    def reduce_scatter(
        self, ranks: tuple[int, ...], y: Any, parts: list[torch.Tensor], about: About = ANYTHING
    ) -> Pending:
        """Fills y with the sum over the group of this rank's part."""
        if self._directly(ranks):
            return self._sum_directly(ranks, y, parts, about)
        staged = self._stage(y, empty=True)
        parts = [self._stage(part) for part in parts]
        flight = Flight(self, "sum of parts", ranks, about)
        with flight.starting():
            work = dist.reduce_scatter(staged, parts, group=self._subgroup(ranks), async_op=True)
        return Pending([work], lambda: _copy_back([y], [staged], parts), flight)

    def all_to_all(
        self,
        ranks: tuple[int, ...],
        receives: list[torch.Tensor],
        sends: list[torch.Tensor],
        about: About = ANYTHING,
    ) -> Pending:
        """Sends one tensor to each rank of the group and receives one from each."""
        outgoing = self._stage(torch.cat([t.reshape(-1) for t in sends]))
        arrived = torch.empty(
            sum(t.numel() for t in receives), dtype=outgoing.dtype, device=outgoing.device
        )
        flight = Flight(self, "exchange", ranks, about)
        with flight.starting():
            work = dist.all_to_all_single(
                arrived,
                outgoing,
                [t.numel() for t in receives],
                [t.numel() for t in sends],
                group=self._subgroup(ranks),
                async_op=True,
            )

        def finish() -> None:
            parts = arrived.split([t.numel() for t in receives])
            for buffer, part in zip(receives, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
            _ = outgoing

        return Pending([work], finish, flight)

    def all_reduce(
        self,
        ranks: tuple[int, ...],
        x: torch.Tensor,
        about: About = ANYTHING,
        algorithm: Algorithm | None = None,
    ) -> Pending:
        """Replaces x by its sum over the group; the algorithm is the measured winner if not given.

        Schedules need a lane, where no other messages are, and messages that need no pairing.
        """
        if len(ranks) == 1:
            return Pending([])
        algorithm = algorithm or self._winner(ranks, x.numel() * x.element_size())
        if algorithm == "direct" and self._wired(ranks, x, about):
            return self._sum_over_wires(ranks, x, about)
        if algorithm == "direct":
            return self._sum_directly(ranks, x, [x.clone()] * len(ranks), about)
        if algorithm in ALGORITHMS:
            switches = self.sums.of(ranks) if self.sums is not None else (ranks,)
            rounds = schedule(algorithm, switches, self.rank, x.numel())
            return self.carry_out(rounds, ranks, x, about)
        staged = self._stage(x)
        flight = Flight(self, "sum", ranks, about)
        with flight.starting():
            work = dist.all_reduce(staged, group=self._subgroup(ranks), async_op=True)
        return Pending([work], lambda: _copy_back([x], [staged], None), flight)

    def carry_out(
        self, rounds: Rounds, ranks: tuple[int, ...], x: torch.Tensor, about: About = ANYTHING
    ) -> Pending:
        """Starts this rank's rounds on x, in our own thread."""
        assert self.lane, "messages of schedules need process groups of their own"
        staged, group = self._stage(x), self._subgroup(ranks)
        places = {rank: dist.get_group_rank(group, self._global[rank]) for rank in ranks}
        flight = Flight(self, "sum", ranks, about)
        work = start_sum(staged.view(-1), rounds, group, places)
        return Pending([work], lambda: _copy_back([x], [staged], None), flight)

    def _winner(self, ranks: tuple[int, ...], nbytes: int) -> Algorithm:
        """What was measured to be fastest, and without measurements what mostly is."""
        if self.sums is not None and self.lane and self._backend != "nccl":
            measured = self.sums.algorithm(ranks, nbytes)
            if measured is not None:
                return measured
        return "direct" if self._directly(ranks) and nbytes <= SMALL else "backend"

    def _directly(self, ranks: tuple[int, ...]) -> bool:
        """Whether a few messages beat the backend's collective.

        Gloo's take milliseconds to start on busy cores, its messages a fraction of that. MPI's
        start as soon as messages, but gather through a buffer.
        """
        return self._backend in HOST_ONLY and len(ranks) <= FEW

    def _sum_directly(
        self, ranks: tuple[int, ...], y: Any, parts: list[torch.Tensor], about: About
    ) -> Pending:
        """Sends every rank its part; the sum is in rank order, so that all get the same bits."""
        arrived = {rank: torch.empty_like(y) for rank in ranks if rank != self.rank}
        sends = [(r, part) for r, part in zip(ranks, parts, strict=True) if r != self.rank]
        pending = self._exchange(sends, list(arrived.items()), about, "sum")
        arrived[self.rank] = parts[ranks.index(self.rank)]

        def finish() -> None:
            pending.wait()
            y.copy_(arrived[ranks[0]])
            for rank in ranks[1:]:
                y.add_(arrived[rank])

        return Pending([], finish)

    def _sum_over_wires(self, ranks: tuple[int, ...], x: torch.Tensor, about: About) -> Pending:
        """The same as one swap, which takes half the time of a message to and from each."""
        others = tuple(rank for rank in ranks if rank != self.rank)
        mine = self._stage(x.clone(memory_format=torch.contiguous_format))
        arrived = mine.new_empty((len(others), *x.shape))
        flight = Flight(self, "sum", others, about)
        with flight.starting():
            parcels = wires().swap(self._members(others), mine, arrived, self.timeout)

        def finish() -> None:
            rows = dict(zip(others, arrived, strict=True)) | {self.rank: mine}
            x.copy_(reduce(torch.add, (rows[rank] for rank in ranks)))

        return Pending(parcels, finish, flight)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> Pending:
        """Replaces x by the root's."""
        if self.size == 1:
            return Pending([])
        staged = self._stage(x)
        about = About("the parameters")
        flight = Flight(self, "broadcast", (root,) if self.rank != root else (), about)
        with flight.starting():
            work = dist.broadcast(staged, self._global[root], self.group, async_op=True)
        return Pending([work], lambda: _copy_back([x], [staged], None), flight)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value (small, plain data), in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, self.group)
        except RuntimeError as error:
            about = About("what all ranks must agree on")
            message = complaint(self, "exchange", range(self.size), about, error)
            raise LostPeer(message) from None
        return values

    def _stage(self, tensor: torch.Tensor, empty: bool = False) -> torch.Tensor:
        """A twin in memory of the host, for backends that move nothing else."""
        if self._backend not in HOST_ONLY or not tensor.is_cuda:
            return tensor
        return torch.empty_like(tensor, device="cpu") if empty else tensor.cpu()

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Connects all ranks, and makes the process groups of some; all call it with the same."""
        for ranks in groups:
            if len(ranks) > 1 and (len(ranks) < self.size or self.lane):
                group_of(self.lane, self._members(ranks), self.timeout)
        if self._backend == "gloo" and not self.lane:
            connect(self._global, self._global[self.rank], self.gather_objects)

    def _subgroup(self, ranks: tuple[int, ...]) -> Any:
        if len(ranks) == self.size and not self.lane:
            return self.group
        return known_group(self.lane, self._members(ranks))

    def _members(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._global[rank] for rank in ranks)

    def group_of_lane(self, lane: str) -> Any:
        """A process group of all these ranks that moves the host's memory; all ranks call it."""
        if self.size == 1:
            return None
        backend = None if self._backend in HOST_ONLY else "gloo"
        return group_of(lane, self._global, self.timeout, backend)

    def in_lane(self, lane: str) -> Communicator:
        """The same ranks, over process groups of their own."""
        twin = copy(self)
        twin.lane = lane
        return twin

    def summing_as(self, cluster: Cluster | str | None) -> Communicator:
        """The same ranks, whose lanes sum by the winners of a cluster's measurements."""
        if cluster is None:
            return self
        loaded = Cluster.load(cluster) if isinstance(cluster, str) else cluster
        loaded, twin = loaded.with_workers(self.size), copy(self)
        twin.sums = Sums(loaded.switches, loaded.sums)
        if any(other != twin.sums for other in self.gather_objects(twin.sums)):
            raise ShardwiseError("ranks were given clusters with different measurements of sums")
        return twin


def _timeout_of(group: Any) -> float | None:
    """Seconds, where the backend says; torch's groups do not take it over from one another."""
    try:
        device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        return group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return None


def _copy_back(buffers: list[torch.Tensor], staged: list[torch.Tensor], keep: Any) -> None:
    """What arrived in host memory goes to its place; `keep` stayed alive until now."""
    for buffer, arrived in zip(buffers, staged, strict=True):
        if buffer is not arrived:
            buffer.copy_(arrived)

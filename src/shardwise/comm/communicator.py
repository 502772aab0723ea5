"""The messages between ranks, over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.measured_sums import Algorithm, Winner, fastest
from shardwise.cluster.schedules import ALGORITHMS, Rounds, Switches, schedule
from shardwise.comm.carrying import (
    HOST_ONLY,
    announce,
    compare,
    receive,
    send,
    swap,
    tag_for,
    wired,
)
from shardwise.comm.numbers import added, check_summed, known_to_backends
from shardwise.comm.pending import ANYTHING, About, Carried, Communication, Pending
from shardwise.comm.ranks import Ranks
from shardwise.comm.summing import start_sum
from shardwise.errors import LostPeer, ShardwiseError

__all__ = ["ANYTHING", "About", "Communicator", "LostPeer", "Messages", "Pending", "SumRules"]

Messages = Sequence[tuple[int, torch.Tensor]]  # (peer, contiguous tensor)

FEW = 8  # ranks that exchange messages directly
SMALL = 64 << 10  # bytes of a sum that is sent whole to every rank


@dataclass(frozen=True)
class SumRules:
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


class Communicator(Ranks):
    """Asynchronous messages and collectives among the ranks of a process group.

    Every message is compared with what its receiver awaits; NCCL's are not.
    """

    sums: SumRules | None = None  # how lanes sum, where that was measured

    # -- messages ------------------------------------------------------------------------------

    def exchange(self, sends: Messages, receives: Messages, about: About = ANYTHING) -> Pending:
        """Sends every tensor to its peer and fills every buffer from its peer."""
        return self._exchange(sends, receives, about, "exchange", tuple(range(self.size)))

    def _exchange(
        self, sends: Messages, receives: Messages, about: About, action: str, ranks: tuple[int, ...]
    ) -> Pending:
        """Messages among some ranks: in a lane over these ranks' own process group."""
        group = self._subgroup(ranks) if self.lane else self.group
        sends = [(peer, self._stage(tensor)) for peer, tensor in sends]
        staged = [(peer, self._stage(buffer, empty=True)) for peer, buffer in receives]
        peers = [peer for peer, _ in [*receives, *sends]]  # as works stand
        talk = Communication(self, action, peers, about)
        if self.backend == "nccl":
            steps = [(dist.irecv, *message) for message in staged]
            steps += [(dist.isend, *message) for message in sends]
            operations = [dist.P2POp(do, t, self._global[p], group) for do, p, t in steps]
            works = dist.batch_isend_irecv(operations) if operations else []
        else:
            works = [receive(talk, peer, buffer, group) for peer, buffer in staged]
            works += [send(talk, peer, tensor, group) for peer, tensor in sends]

        def finish() -> None:
            _ = sends  # alive until they have left
            for (_, buffer), (_, arrived) in zip(receives, staged, strict=True):
                if buffer is not arrived:
                    buffer.copy_(arrived)

        return Pending(works, finish, talk)

    # -- collectives ---------------------------------------------------------------------------

    def all_gather(
        self, ranks: tuple[int, ...], parts: list[torch.Tensor], x: Any, about: About = ANYTHING
    ) -> Pending:
        """Fills one part per rank of the group with that rank's x."""
        if self._directly(ranks):
            parts[ranks.index(self.rank)].copy_(x)
            others = [(r, part) for r, part in zip(ranks, parts, strict=True) if r != self.rank]
            sends = [(rank, x) for rank, _ in others]
            return self._exchange(sends, others, about, "gather", ranks)
        staged, x = [self._stage(part, empty=True) for part in parts], self._stage(x)
        group = self._subgroup(ranks)
        talk = Communication(self, "gather", ranks, about)
        with talk.starting():
            notes = announce(talk, ranks, group, x.dtype, [x] * len(ranks), parts)
            raw = [self._raw(part) for part in staged]
            work = dist.all_gather(raw, self._raw(x), group, async_op=True)
        return self._carried(notes, work, lambda: _copy_back(parts, staged, x), talk)

    def reduce_scatter(
        self, ranks: tuple[int, ...], y: Any, parts: list[torch.Tensor], about: About = ANYTHING
    ) -> Pending:
        """Fills y with the sum over the group of this rank's part."""
        check_summed(y, about.name)
        if y.is_complex():
            halves = [torch.view_as_real(part.resolve_conj()) for part in parts]
            return self.reduce_scatter(ranks, torch.view_as_real(y), halves, about)
        if self._directly(ranks):
            return self._sum_directly(ranks, y, parts, about)
        staged, group = self._stage(known_to_backends(y), empty=True), self._subgroup(ranks)
        parts = [self._stage(known_to_backends(part)) for part in parts]
        talk = Communication(self, "sum of parts", ranks, about)
        with talk.starting():
            notes = announce(talk, ranks, group, y.dtype, parts, [staged] * len(ranks))
            work = dist.reduce_scatter(staged, parts, group=group, async_op=True)
        return self._carried(notes, work, lambda: _copy_back([y], [staged], parts), talk)

    def all_to_all(
        self,
        ranks: tuple[int, ...],
        receives: list[torch.Tensor],
        sends: list[torch.Tensor],
        about: About = ANYTHING,
    ) -> Pending:
        """Sends one tensor to each rank of the group and receives one from each."""
        if self._directly(ranks):
            place = ranks.index(self.rank)
            receives[place].copy_(sends[place].view(receives[place].shape))
            out, into = (
                [(r, t) for r, t in zip(ranks, tensors, strict=True) if r != self.rank]
                for tensors in (sends, receives)
            )
            return self._exchange(out, into, about, "exchange", ranks)
        group = self._subgroup(ranks)
        outgoing = self._stage(torch.cat([t.reshape(-1) for t in sends]))
        arrived = torch.empty(
            sum(t.numel() for t in receives), dtype=outgoing.dtype, device=outgoing.device
        )
        talk = Communication(self, "exchange", ranks, about)
        with talk.starting():
            notes = announce(talk, ranks, group, outgoing.dtype, sends, receives)
            work = dist.all_to_all_single(
                self._raw(arrived),
                self._raw(outgoing),
                [self._raw_numel(t) for t in receives],
                [self._raw_numel(t) for t in sends],
                group=group,
                async_op=True,
            )

        def finish() -> None:
            parts = arrived.split([t.numel() for t in receives])
            for buffer, part in zip(receives, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
            _ = outgoing

        return self._carried(notes, work, finish, talk)

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
        check_summed(x, about.name)
        if len(ranks) == 1:
            return Pending([])
        if x.is_complex():
            return self._sum_halves(ranks, x, about, algorithm)
        algorithm = algorithm or self._winner(ranks, x.numel() * x.element_size())
        if algorithm == "direct":
            return self._sum_at_once(ranks, x, about)
        if algorithm in ALGORITHMS:
            switches = self.sums.of(ranks) if self.sums is not None else (ranks,)
            rounds = schedule(algorithm, switches, self.rank, x.numel())
            return self.carry_out(rounds, ranks, x, about)
        staged, group = self._stage(known_to_backends(x)), self._subgroup(ranks)
        talk = Communication(self, "sum", ranks, about)
        with talk.starting():
            notes = announce(talk, ranks, group, x.dtype, [x] * len(ranks), [x] * len(ranks))
            if not self.lane:  # somebody is about to wait for it anyway
                notes = compare(notes)
            work = dist.all_reduce(staged, group=group, async_op=True)
        return self._carried(notes, work, lambda: _copy_back([x], [staged], None), talk)

    def _sum_halves(
        self, ranks: tuple[int, ...], x: torch.Tensor, about: About, algorithm: Algorithm | None
    ) -> Pending:
        """Real and imaginary parts, as numbers of their own."""
        halves = torch.view_as_real(x.resolve_conj())
        pending = self.all_reduce(ranks, halves, about, algorithm)

        def finish() -> None:
            pending.wait()
            if x.is_conj():  # then its memory holds other numbers
                x.copy_(torch.view_as_complex(halves))

        return Pending([], finish)

    def carry_out(
        self, rounds: Rounds, ranks: tuple[int, ...], x: torch.Tensor, about: About = ANYTHING
    ) -> Pending:
        """Starts this rank's rounds on x, in our own thread."""
        assert self.lane, "messages of schedules need process groups of their own"
        staged, group = self._stage(x), self._subgroup(ranks)
        places = {rank: dist.get_group_rank(group, self._global[rank]) for rank in ranks}
        talk = Communication(self, "sum", ranks, about)
        with talk.starting():
            notes = announce(talk, ranks, group, x.dtype, [x] * len(ranks), [x] * len(ranks))
        tag = tag_for(talk, ranks, x)
        work = start_sum(staged.view(-1), rounds, group, places, tag, self.timeout)
        return self._carried(notes, work, lambda: _copy_back([x], [staged], None), talk)

    def _carried(self, notes: list[Any], work: Any, finish: Any, talk: Communication) -> Pending:
        return Pending([Carried(notes, work, self.timeout)], finish, talk)

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
        pending = self._exchange(sends, list(arrived.items()), about, "sum", ranks)
        arrived[self.rank] = parts[ranks.index(self.rank)]

        def finish() -> None:
            pending.wait()
            y.copy_(added([arrived[rank] for rank in ranks]))

        return Pending([], finish)

    def _sum_at_once(self, ranks: tuple[int, ...], x: torch.Tensor, about: About) -> Pending:
        """Sends all of it to every rank; over our own connections that is one swap.

        Which takes half the time of a message to and from each.
        """
        others = tuple(rank for rank in ranks if rank != self.rank)
        talk = Communication(self, "sum", others, about)
        if not wired(talk, ranks, x):
            return self._sum_directly(ranks, x, [x.clone()] * len(ranks), about)
        mine = self._stage(x.clone(memory_format=torch.contiguous_format))
        arrived = mine.new_empty((len(others), *x.shape))
        with talk.starting():
            parcels = swap(talk, mine, arrived)

        def finish() -> None:
            rows = dict(zip(others, arrived, strict=True)) | {self.rank: mine}
            x.copy_(added([rows[rank] for rank in ranks]))

        return Pending(parcels, finish, talk)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> Pending:
        """Replaces x by the root's."""
        if self.size == 1:
            return Pending([])
        staged, everybody = self._stage(x), tuple(range(self.size))
        about, sizes = About("the parameters"), [x] * self.size
        talk = Communication(self, "broadcast", (root,) if self.rank != root else (), about)
        with talk.starting():
            compare(announce(talk, everybody, self.group, x.dtype, sizes, sizes))
            work = dist.broadcast(self._raw(staged), self._global[root], self.group, async_op=True)
        return self._carried([], work, lambda: _copy_back([x], [staged], None), talk)

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
        twin.sums = SumRules(loaded.switches, loaded.sums)
        if any(other != twin.sums for other in self.gather_objects(twin.sums)):
            raise ShardwiseError("ranks were given clusters with different measurements of sums")
        return twin


def _copy_back(buffers: list[torch.Tensor], staged: list[torch.Tensor], keep: Any) -> None:
    """What arrived in host memory goes to its place; `keep` stayed alive until now."""
    for buffer, arrived in zip(buffers, staged, strict=True):
        if buffer is not arrived:
            buffer.copy_(arrived)

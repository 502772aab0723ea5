"""The messages between ranks, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.measured_sums import Algorithm, Winner, fastest
from shardwise.cluster.schedules import ALGORITHMS, Rounds, Switches, schedule
from shardwise.comm.numbers import added, check_summed, known_to_backends
from shardwise.comm.pending import (
    ANYTHING,
    HOST_ONLY,
    About,
    Carried,
    Communication,
    Pending,
    announce,
    compare,
    message,
    swap,
    tag_for,
    wired,
)
from shardwise.comm.ranks import Ranks
from shardwise.comm.summing import start_sum
from shardwise.errors import ShardwiseError

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
        staged = [(peer, self._stage(buffer, empty=True), False) for peer, buffer in receives]
        leaving = [(peer, self._stage(tensor), True) for peer, tensor in sends]
        messages = [*staged, *leaving]
        talk = Communication(self, action, [peer for peer, *_ in messages], about)
        if self.backend != "nccl":
            works = [message(talk, *one, group) for one in messages]
        else:
            operations = [
                dist.P2POp(dist.isend if leaves else dist.irecv, x, self._global[peer], group)
                for peer, x, leaves in messages
            ]
            works = dist.batch_isend_irecv(operations) if operations else []
        buffers, arrived = [buffer for _, buffer in receives], [x for _, x, _ in staged]
        return Pending(works, lambda: _copy_back(buffers, arrived, leaving), talk)

    # -- collectives ---------------------------------------------------------------------------

    def all_gather(
        self, ranks: tuple[int, ...], parts: list[torch.Tensor], x: Any, about: About = ANYTHING
    ) -> Pending:
        """Fills one part per rank of the group with that rank's x."""
        if self._directly(ranks):
            parts[ranks.index(self.rank)].copy_(x)
            sends, receives = self._others(ranks, [x] * len(ranks)), self._others(ranks, parts)
            return self._exchange(sends, receives, about, "gather", ranks)
        staged, x = [self._stage(part, empty=True) for part in parts], self._stage(x)
        raw = [self._raw(part) for part in staged]
        return self._collective(
            Communication(self, "gather", ranks, about),
            (x.dtype, [x] * len(ranks), parts),
            lambda group: dist.all_gather(raw, self._raw(x), group, async_op=True),
            lambda: _copy_back(parts, staged, x),
        )

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
        staged = self._stage(known_to_backends(y), empty=True)
        parts = [self._stage(known_to_backends(part)) for part in parts]
        return self._collective(
            Communication(self, "sum of parts", ranks, about),
            (y.dtype, parts, [staged] * len(ranks)),
            lambda group: dist.reduce_scatter(staged, parts, group=group, async_op=True),
            lambda: _copy_back([y], [staged], parts),
        )

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
            out, into = self._others(ranks, sends), self._others(ranks, receives)
            return self._exchange(out, into, about, "exchange", ranks)
        outgoing = self._stage(torch.cat([t.reshape(-1) for t in sends]))
        arrived = outgoing.new_empty(sum(t.numel() for t in receives))
        parts = arrived.split([t.numel() for t in receives])
        shaped = [part.view(t.shape) for part, t in zip(parts, receives, strict=True)]
        return self._collective(
            Communication(self, "exchange", ranks, about),
            (outgoing.dtype, sends, receives),
            lambda group: dist.all_to_all_single(
                self._raw(arrived),
                self._raw(outgoing),
                [self._raw_numel(t) for t in receives],
                [self._raw_numel(t) for t in sends],
                group=group,
                async_op=True,
            ),
            lambda: _copy_back(receives, shaped, outgoing),
        )

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
        algorithm = algorithm or self._winner(ranks, x.nbytes)
        if algorithm == "direct":
            return self._sum_at_once(ranks, x, about)
        if algorithm in ALGORITHMS:
            switches = self.sums.of(ranks) if self.sums is not None else (ranks,)
            rounds = schedule(algorithm, switches, self.rank, x.numel())
            return self.carry_out(rounds, ranks, x, about)
        staged = self._stage(known_to_backends(x))
        return self._collective(
            Communication(self, "sum", ranks, about),
            (x.dtype, [x] * len(ranks), [x] * len(ranks)),
            lambda group: dist.all_reduce(staged, group=group, async_op=True),
            lambda: _copy_back([x], [staged]),
            at_once=not self.lane,  # somebody is about to wait for it anyway
        )

    def _sum_halves(
        self, ranks: tuple[int, ...], x: torch.Tensor, about: About, algorithm: Algorithm | None
    ) -> Pending:
        """Real and imaginary parts, as numbers of their own."""
        halves = torch.view_as_real(x.resolve_conj())
        pending = self.all_reduce(ranks, halves, about, algorithm)
        if not x.is_conj():
            return pending
        # Its memory holds other numbers.
        return pending.then(lambda: x.copy_(torch.view_as_complex(halves)))

    def carry_out(
        self, rounds: Rounds, ranks: tuple[int, ...], x: torch.Tensor, about: About = ANYTHING
    ) -> Pending:
        """Starts this rank's rounds on x, in our own thread."""
        assert self.lane, "messages of schedules need process groups of their own"
        staged, talk = self._stage(x), Communication(self, "sum", ranks, about)

        def start(group: Any) -> Any:
            places = {rank: dist.get_group_rank(group, self._global[rank]) for rank in ranks}
            tag = tag_for(talk, self.members(ranks), x)
            return start_sum(staged.view(-1), rounds, group, places, tag, self.timeout)

        sizes = [x] * len(ranks)
        finish = partial(_copy_back, [x], [staged])
        return self._collective(talk, (x.dtype, sizes, sizes), start, finish)

    def _collective(
        self,
        talk: Communication,
        sizes: tuple[torch.dtype, list[torch.Tensor], list[torch.Tensor]],
        start: Callable[[Any], Any],
        finish: Callable[[], None],
        at_once: bool = False,
    ) -> Pending:
        """Tells the ranks what this one takes part in, and starts it in their process group.

        The sizes are of what goes to, and comes from, each rank; `at_once` compares them first.
        """
        group = self._subgroup(talk.peers)
        with talk.starting():
            notes = announce(talk, talk.peers, group, *sizes)
            notes = compare(notes) if at_once else notes
            work = start(group)
        return Pending([Carried(notes, work, self.timeout)], finish, talk)

    def _others(
        self, ranks: tuple[int, ...], tensors: Sequence[torch.Tensor]
    ) -> list[tuple[int, torch.Tensor]]:
        """A tensor for each rank of a group but this one."""
        return [(r, x) for r, x in zip(ranks, tensors, strict=True) if r != self.rank]

    def _winner(self, ranks: tuple[int, ...], nbytes: int) -> Algorithm:
        """What was measured to be fastest, and without measurements what mostly is."""
        if self.sums is not None and self.lane and self.backend != "nccl":
            measured = self.sums.algorithm(ranks, nbytes)
            if measured is not None:
                return measured
        return "direct" if self._directly(ranks) and nbytes <= SMALL else "backend"

    def _directly(self, ranks: tuple[int, ...]) -> bool:
        """Whether a few messages beat the backend's collective.

        Gloo's take milliseconds to start on busy cores, its messages a fraction of that. MPI's
        start as soon as messages, but gather through a buffer.
        """
        return self.backend in HOST_ONLY and len(ranks) <= FEW

    def _sum_directly(
        self, ranks: tuple[int, ...], y: Any, parts: list[torch.Tensor], about: About
    ) -> Pending:
        """Sends every rank its part; the sum is in rank order, so that all get the same bits."""
        arrived = {rank: torch.empty_like(y) for rank in ranks if rank != self.rank}
        sends = self._others(ranks, parts)
        pending = self._exchange(sends, list(arrived.items()), about, "sum", ranks)
        arrived[self.rank] = parts[ranks.index(self.rank)]
        return pending.then(lambda: y.copy_(added([arrived[rank] for rank in ranks])))

    def _sum_at_once(self, ranks: tuple[int, ...], x: torch.Tensor, about: About) -> Pending:
        """Sends all of it to every rank; over our own connections that is one swap.

        Which takes half the time of a message to and from each.
        """
        others = tuple(rank for rank in ranks if rank != self.rank)
        if not wired(self, ranks, x, about):
            return self._sum_directly(ranks, x, [x.clone()] * len(ranks), about)
        talk = Communication(self, "sum", others, about)
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
        work = Carried([], work, self.timeout)
        return Pending([work], lambda: _copy_back([x], [staged]), talk)

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


def _copy_back(
    buffers: Sequence[torch.Tensor], staged: Sequence[torch.Tensor], keep: Any = None
) -> None:
    """What arrived elsewhere goes to its place; `keep` stayed alive until now."""
    for buffer, arrived in zip(buffers, staged, strict=True):
        if buffer is not arrived:
            buffer.copy_(arrived)

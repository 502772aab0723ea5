"""The ranks of a process group, all of the world or some: who they are, how they fail, and which
groups they form."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.connecting import ALARM, USES, connect
from shardwise.comm.headers import Mismatch
from shardwise.comm.pending import AGREEMENT, HOST_ONLY, About, Communication, announce, compare
from shardwise.comm.process_groups import check_group, ended, make_group
from shardwise.comm.timeline import Timeline
from shardwise.comm.wires import LostConnection, Members
from shardwise.comm.world_state import GroupKey, backend_of, world_state

TIMEOUT = 1800.0  # seconds, where torch does not say how long its groups wait
MAKING = About("a process group", "agreement")


class Ranks:
    """The ranks of a process group, seen from one of them.

    They are numbered inside the group. Without torch.distributed there is one rank, which has
    nobody to talk to. Another lane has process groups of its own, so that what moves there does not
    wait for what moves elsewhere.
    """

    whole = True  # these are all ranks of the world

    def __init__(self, group: Any = None, timeout: float | None = None, lane: str = "") -> None:
        self.lane, self.group = lane, group
        self.timeline = Timeline()
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise ended()
            self.rank, self.size, self._global, self.backend = 0, 1, (0,), ""
            self.timeout = TIMEOUT if timeout is None else timeout
            return
        self.whole = group is None or group is dist.group.WORLD
        if not self.whole:
            check_group(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._global = tuple(dist.get_process_group_ranks(group))
        self.backend = backend_of(group)  # what torch moves tensors with
        # Groups of lanes wait as long as the group that they belong to.
        self.timeout = _timeout_of(group or dist.group.WORLD) if timeout is None else timeout
        if self.size > 1:
            world_state().alarm.expect(self._global)
        if not self.whole and group not in world_state().others:
            world_state().others.append(group)

    def global_rank(self, rank: int) -> int:
        """The number of a rank of this group among all processes."""
        return self._global[rank]

    def members(self, ranks: tuple[int, ...] | None = None) -> Members:
        """The numbers of several ranks, or of all of this group, among all processes."""
        return self._global if ranks is None else tuple(self._global[rank] for rank in ranks)

    # -- failures ------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Ends what all other ranks wait for, now and later, with this rank's reason."""
        self.fail(f"rank {self.global_rank(self.rank)} failed: {reason}")

    def fail(self, sentence: str) -> None:
        """Tells all ranks that nothing can be sent any more; only the first sentence counts."""
        if self.size > 1:
            world_state().alarm.sound(sentence)

    def lost_by(self, error: Exception) -> tuple[int, ...]:
        """The rank at the other end of a connection of our own that was lost, if it was that."""
        member = error.member if isinstance(error, LostConnection) else None
        return (self._global.index(member),) if member in self._global else ()

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Within, messages say that they belong to this: "the forward pass", say."""
        now = world_state()
        before, now.phase = now.phase, phase
        try:
            yield
        finally:
            now.phase = before

    # -- groups --------------------------------------------------------------------------------

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Connects all ranks, and makes the process groups of some; all call it with the same."""
        self._connect()
        groups = [g for g in groups if len(g) > 1 and (len(g) < self.size or self.lane)]
        known = world_state().groups
        missing = [ranks for ranks in groups if self._key(ranks) not in known]
        if not missing:
            return
        told = self.gather_objects((missing, token_hex(8)))
        for rank, (others, _) in enumerate(told):
            if others != missing:
                other, own = self.global_rank(rank), self.global_rank(self.rank)
                raise Mismatch(
                    f"rank {other} makes groups of ranks {others}, and rank {own} of {missing}; "
                    "the ranks do not do the same thing"
                )
        for number, ranks in enumerate(missing):
            known[self._key(ranks)] = self._made(ranks, f"{told[0][1]}-{number}")

    def _made(self, ranks: tuple[int, ...], name: str, backend: str | None = None) -> Any:
        """A new process group of some of these ranks, which all of these ranks make in turn."""
        members = self.members(ranks)
        with Communication(self, "making", ranks, MAKING).starting():
            if self.whole:
                limit = timedelta(seconds=self.timeout)
                return dist.new_group(list(members), timeout=limit, backend=backend)
            if self.rank in ranks:
                return make_group(members, backend or self.backend, self.timeout, name)
        return dist.GroupMember.NON_GROUP_MEMBER

    def _connect(self) -> None:
        """The first time, all ranks together."""
        uses = {"gloo": USES, "mpi4py": (ALARM,)}.get(self.backend)
        if uses and self.size > 1:
            with Communication(self, "exchange", range(self.size), AGREEMENT).starting():
                connect(self._global, self._global[self.rank], self._gathered, uses)

    def _key(self, ranks: tuple[int, ...]) -> GroupKey:
        return self.lane, self.backend, self._global, self.members(ranks)

    def _subgroup(self, ranks: tuple[int, ...]) -> Any:
        if len(ranks) == self.size and not self.lane:
            return self.group
        key, known = self._key(ranks), world_state().groups
        assert key in known, f"ranks {ranks} have not been prepared"
        return known[key]

    def group_of_lane(self, lane: str) -> Any:
        """A process group of all these ranks that moves the host's memory; all ranks call it."""
        if self.size == 1:
            return None
        backend = self.backend if self.backend in HOST_ONLY else "gloo"
        key, known = (lane, backend, self._global, self._global), world_state().groups
        if key not in known:
            name = self.gather_objects(token_hex(8))[0]
            known[key] = self._made(tuple(range(self.size)), name, backend)
        return known[key]

    # -- memory --------------------------------------------------------------------------------

    def _stage(self, tensor: torch.Tensor, empty: bool = False) -> torch.Tensor:
        """A twin in memory that the backend moves: of the host, or of GPUs only."""
        tensor = tensor.resolve_conj().resolve_neg()  # what is put off is not in memory yet
        home = "cpu" if self.backend in HOST_ONLY else "cuda"
        if tensor.device.type == home or self.backend not in (*HOST_ONLY, "nccl"):
            return tensor
        return torch.empty_like(tensor, device=home) if empty else tensor.to(home)

    def _raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as bytes: gloo's collectives do not know every kind of number."""
        return tensor.view(-1).view(torch.uint8) if self.backend in HOST_ONLY else tensor

    def _raw_numel(self, tensor: torch.Tensor) -> int:
        return tensor.nbytes if self.backend in HOST_ONLY else tensor.numel()

    def gather_objects(self, value: Any, about: About = AGREEMENT) -> list[Any]:
        """Every rank's value (small, plain data), in rank order."""
        if self.size == 1:
            return [value]
        everybody = tuple(range(self.size))
        self._connect()
        talk = Communication(self, "exchange", everybody, about)
        with talk.starting():
            compare(announce(talk, everybody, self.group))
            return self._gathered(value)

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values


def _timeout_of(group: Any) -> float:
    """Seconds, where the backend says; torch's groups do not take it over from one another."""
    if isinstance(group, dist.ProcessGroup) and hasattr(group, "seconds"):
        return group.seconds  # type: ignore[attr-defined]
    try:
        device = torch.device("cuda" if backend_of(group) == "nccl" else "cpu")
        return group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        _warn_of_timeout()
        return TIMEOUT


@cache
def _warn_of_timeout() -> None:
    warnings.warn(
        "this torch does not say how long its process groups wait; messages are given up after "
        f"{TIMEOUT:g} s",
        stacklevel=4,
    )

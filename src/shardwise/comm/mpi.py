"""MPI as a backend of torch.distributed, named "mpi4py": every communication is nonblocking.

Any thread may start and wait for communications. MPI moves data only while somebody calls it, so a
thread of this module looks after what is under way while the others compute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from mpi4py import MPI

from shardwise.comm.mpi_work import Finish, MPIWork
from shardwise.comm.numbers import ADDED_IN
from shardwise.errors import ShardwiseError

NAME = "mpi4py"
TYPES = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
}
OPERATIONS = (
    (dist.ReduceOp.SUM, MPI.SUM),
    (dist.ReduceOp.AVG, MPI.SUM),  # divided afterwards
    (dist.ReduceOp.PRODUCT, MPI.PROD),
    (dist.ReduceOp.MIN, MPI.MIN),
    (dist.ReduceOp.MAX, MPI.MAX),
)


# -- joining and leaving ---------------------------------------------------------------------------


def join(rank: int, world: int, timeout: float) -> None:
    """Joins the ranks that mpirun has started, without any rendezvous but MPI's own."""
    if MPI.COMM_WORLD.size != world or MPI.COMM_WORLD.rank != rank:
        raise ShardwiseError(
            f"mpirun has started {world} workers, but mpi4py found {MPI.COMM_WORLD.size}: it uses "
            "another MPI library than this mpirun's (pip install mpich brings both)"
        )
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise ShardwiseError(
            "this MPI library lets only one thread call it; use one with MPI_THREAD_MULTIPLE"
        )
    dist.init_process_group(
        NAME,
        store=dist.HashStore(),  # nothing is looked up in it: MPI knows all ranks
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    _abort_after_errors()


def _abort_after_errors() -> None:
    """A rank that fails ends all: else it would wait for them at exit, and they for it."""
    show = sys.excepthook

    def hook(*error: Any) -> None:
        show(*error)
        abort(1)

    sys.excepthook = hook


PASSED_ON = 1.0  # seconds: mpirun drops what it has not passed on when a job is aborted


def abort(code: int) -> None:
    """Ends all ranks now; what was printed comes out before."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(PASSED_ON)
    MPI.COMM_WORLD.Abort(code)


# -- the backend -----------------------------------------------------------------------------------


# Its methods are called by place; the names and defaults in torch's types are of other overloads.
ProcessGroup: Any = dist.ProcessGroup


class MPIGroup(ProcessGroup):
    """The ranks of an MPI communicator, as torch.distributed calls them."""

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], options: Any) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._comm, self._ranks, self._name = comm, tuple(ranks), options.group_id
        self.seconds = options.timeout.total_seconds()

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        self._comm.Free()

    def abort(self) -> None:
        abort(1)

    def set_timeout(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()

    def _work(
        self, request: MPI.Request, what: str, keep: Any = None, finish: Finish | None = None
    ) -> MPIWork:
        return MPIWork(request, what, self.seconds, keep, finish)

    def _among(self, what: str) -> str:
        return f"{what} among ranks {', '.join(map(str, self._ranks))}"

    # -- messages ------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> MPIWork:
        x = tensors[0].contiguous()
        what = f"a message to rank {self._ranks[dstRank]}"
        return self._work(self._comm.Isend(_bytes(x), dstRank, _tag(tag)), what, x)

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> MPIWork:
        return self._receive(tensors[0], srcRank, tag, f"rank {self._ranks[srcRank]}")

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> MPIWork:
        return self._receive(tensors[0], MPI.ANY_SOURCE, tag, "any rank")

    def _receive(self, x: torch.Tensor, source: int, tag: int, sender: str) -> MPIWork:
        twin = x.contiguous()
        request = self._comm.Irecv(_bytes(twin), source, _tag(tag))
        return self._work(request, f"a message from {sender}", twin, _back(x, twin))

    # -- collectives ---------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> MPIWork:
        return self._work(self._comm.Ibarrier(), self._among("a barrier"))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> MPIWork:
        x, twin = tensors[0], tensors[0].contiguous()
        request = self._comm.Ibcast(_bytes(twin), opts.rootRank)
        what = f"a broadcast from rank {self._ranks[opts.rootRank]}"
        return self._work(request, what, twin, _back(x, twin))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> MPIWork:
        [x] = tensors
        total = x.to(ADDED_IN.get(x.dtype, x.dtype)).contiguous()  # MPI knows no short floats
        request = self._comm.Iallreduce(MPI.IN_PLACE, _numbers(total), _operation(opts))
        finish = partial(self._put, x, total, opts)
        return self._work(request, self._among("a sum"), total, finish)

    def allgather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any
    ) -> MPIWork:
        x = input_tensors[0].contiguous()
        blocks, arrived, finish = _room(x, output_tensors[0])
        request = self._comm.Iallgatherv(_bytes(x), blocks)
        return self._work(request, self._among("a gather"), (x, arrived), finish)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> MPIWork:
        request = self._comm.Iallgatherv(_bytes(input), _blocks(output, self._numels(output, [])))
        return self._work(request, self._among("a gather"), (output, input))

    def gather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any
    ) -> MPIWork:
        x, what = input_tensors[0].contiguous(), self._among("a gather")
        if self._comm.rank != opts.rootRank:
            return self._work(self._comm.Igatherv(_bytes(x), None, opts.rootRank), what, x)
        blocks, arrived, finish = _room(x, output_tensors[0])
        request = self._comm.Igatherv(_bytes(x), blocks, opts.rootRank)
        return self._work(request, what, (x, arrived), finish)

    def scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any
    ) -> MPIWork:
        y, what = output_tensors[0], f"a part from rank {self._ranks[opts.rootRank]}"
        twin, sent, blocks = y.contiguous(), None, None
        if self._comm.rank == opts.rootRank:
            [parts] = input_tensors
            sent = torch.cat([part.reshape(-1) for part in parts])
            blocks = _blocks(sent, [part.numel() for part in parts])
        request = self._comm.Iscatterv(blocks, _bytes(twin), opts.rootRank)
        return self._work(request, what, (sent, twin), _back(y, twin))

    def reduce_scatter(
        self, output_tensors: list[torch.Tensor], input_tensors: list[list[torch.Tensor]], opts: Any
    ) -> MPIWork:
        [y], [parts] = output_tensors, input_tensors
        dtype = ADDED_IN.get(y.dtype, y.dtype)
        sent = torch.cat([part.reshape(-1) for part in parts]).to(dtype)
        total = torch.empty_like(y, dtype=dtype, memory_format=torch.contiguous_format)
        counts = [part.numel() for part in parts]
        request = self._comm.Ireduce_scatter(
            _numbers(sent), _numbers(total), counts, _operation(opts)
        )
        finish = partial(self._put, y, total, opts)
        return self._work(request, self._among("a sum of parts"), (sent, total), finish)

    def reduce_scatter_single(
        self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any
    ) -> MPIWork:
        parts = list(inputTensor.chunk(self._comm.size))
        return self.reduce_scatter([outputTensor], [parts], opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> MPIWork:
        sends = _blocks(input, self._numels(input, input_split_sizes))
        receives = _blocks(output, self._numels(output, output_split_sizes))
        request = self._comm.Ialltoallv(sends, receives)
        return self._work(request, self._among("an exchange"), (output, input))

    # What torch before 2.13 calls them.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _numels(self, x: torch.Tensor, sizes: list[int]) -> list[int]:
        """Elements for each rank, from the rows that each gets; equal parts without these."""
        row = x[0].numel() if len(x) else 0
        return [size * row for size in sizes] or [x.numel() // self._comm.size] * self._comm.size

    def _put(self, y: torch.Tensor, total: torch.Tensor, opts: Any) -> None:
        """A sum, or the average that is made of it, goes to its place."""
        if opts.reduceOp == dist.ReduceOp.AVG:
            total.div_(self._comm.size)
        if total is not y:
            y.copy_(total)


def _tag(tag: int) -> int:
    """One that MPI allows: every library has a largest one."""
    return tag % ((MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) + 1)


def _create(options: Any, _: Any) -> MPIGroup:
    """The group that torch.distributed asks for; of a part of the ranks, only these take part."""
    world, ranks = MPI.COMM_WORLD, options.global_ranks_in_group
    if not ranks:
        return MPIGroup(world.Dup(), range(world.size), options)
    tag = crc32(options.group_id.encode()) % 32768  # threads may make groups at the same time
    comm = world.Create_group(world.group.Incl(ranks), tag)
    return MPIGroup(comm, ranks, options)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


# -- memory ----------------------------------------------------------------------------------------


def _memory(x: torch.Tensor) -> MPI.buffer:
    if x.device.type != "cpu":
        raise ShardwiseError(f"MPI moves memory of the host only, and a tensor is on {x.device}")
    if not x.is_contiguous():
        raise ValueError(f"a tensor of strides {x.stride()} must be contiguous")
    return MPI.buffer.fromaddress(x.data_ptr(), x.nbytes)


def _back(x: torch.Tensor, twin: torch.Tensor) -> Finish | None:
    """What arrived in a contiguous twin goes to its place."""
    return None if twin is x else partial(x.copy_, twin)


def _bytes(x: torch.Tensor) -> list[Any]:
    """Any kind of number travels as bytes."""
    return [_memory(x), x.nbytes, MPI.BYTE]


def _blocks(x: torch.Tensor, numels: Sequence[int]) -> list[Any]:
    """Consecutive blocks of a tensor, as bytes."""
    counts = [numel * x.element_size() for numel in numels]
    return [_memory(x), counts, [0, *accumulate(counts[:-1])], MPI.BYTE]


def _numbers(x: torch.Tensor) -> list[Any]:
    if x.dtype not in TYPES:
        raise ValueError(f"MPI cannot sum {x.dtype}; it can {', '.join(map(str, TYPES))}")
    return [_memory(x), x.numel(), TYPES[x.dtype]]


def _operation(opts: Any) -> MPI.Op:
    for known, operation in OPERATIONS:
        if opts.reduceOp == known:
            return operation
    raise ValueError(f"MPI is not asked for {opts.reduceOp}; use SUM, AVG, PRODUCT, MIN or MAX")


def _room(x: torch.Tensor, parts: Sequence[torch.Tensor]) -> tuple[list[Any], torch.Tensor, Finish]:
    """Memory in which parts arrive one after the other, and what puts them in their places."""
    numels = [part.numel() for part in parts]
    arrived = x.new_empty(sum(numels))

    def deal() -> None:
        for part, block in zip(parts, arrived.split(numels), strict=True):
            part.copy_(block.view(part.shape))

    return _blocks(arrived, numels), arrived, deal

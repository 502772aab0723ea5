"""What test_mpi.py starts under mpirun: rank 0 checks case by case, the other ranks are its pool.

Prints a line per case that passed; the first failure ends the job.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from pipes import Run, new_pipe, plan_of
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pool
from exactness import seeded, seeded_input
from operator_cases import OPERATORS
from saving import make_plan, train_alone, train_from
from shardwise.comm import About, Communicator, communicator
from shardwise.comm.world_state import world_state
from shardwise.errors import ShardwiseError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.launch.launchers import end_all, init_from_environment
from shardwise.model.capture import capture
from shardwise.plans.gradient_schedule import Engine
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import parallelize
from shardwise.verify import Comparison, compare
from summed_training import STEPS, Net, train, weights_of

TIMEOUT = 60.0
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
SOME = ("conv", "conv circular", "linear", "batch norm", "group norm", "bilinear")  # that talk
LARGE = 20_000  # elements: more than what is sent whole to every rank


class Ranks:
    """Like the worker pool, of the ranks that mpirun has started: rank 0 takes part itself."""

    broken = False

    def __init__(self) -> None:
        self.comm = Communicator()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) on every rank; called on rank 0."""
        return self._work((function, args))

    def serve(self) -> None:
        """What the other ranks do until rank 0 is done."""
        while self._work(None):
            pass

    def stop(self) -> None:
        self._work(("stop", ()))

    def _work(self, job: Any) -> list[Any]:
        jobs = [job]
        dist.broadcast_object_list(jobs, 0)
        function, args = jobs[0]
        if function == "stop":
            return []
        error, result = "", None
        try:
            result = function(*args)
        except Exception:
            error = f"rank {self.comm.rank}:\n{traceback.format_exc()}"
        found = self.comm.gather_objects((error, result))
        errors = [error for error, _ in found if error]
        assert not errors, "\n".join(errors)
        return [result for _, result in found]


# -- the communicator ------------------------------------------------------------------------------


def numbers(rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, so that every kind of number sums them exactly."""
    count = torch.Size([shape] if isinstance(shape, int) else shape).numel()
    return ((torch.arange(count) + 3 * rank) % 8).to(dtype).view(shape)


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def messages(dtype: torch.dtype) -> None:
    """Every rank to every rank, itself and empty messages included."""
    comm = Communicator()
    peers = range(comm.size)
    sends = [(p, numbers(comm.rank, (p, 5), dtype)) for p in peers]
    receives = [(p, torch.empty((comm.rank, 5), dtype=dtype)) for p in peers]
    comm.exchange(sends, receives).wait()
    for peer, arrived in receives:
        equal(arrived, numbers(peer, (comm.rank, 5), dtype))


def masks() -> None:
    comm = Communicator()
    mask = torch.arange(10) % 3 == comm.rank
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    arrived = torch.empty_like(mask)
    comm.exchange([(right, mask)], [(left, arrived)]).wait()
    equal(arrived, torch.arange(10) % 3 == left)


def tags() -> None:
    """Messages are told apart by their tags, in whatever order they come."""
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    works = [dist.isend(torch.tensor([tag]), right, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        arrived = torch.empty(1, dtype=torch.int64)
        dist.recv(arrived, left, tag=tag)
        equal(arrived, torch.tensor([tag]))
    for work in works:
        assert work is not None and work.wait() and work.is_completed()


def collectives(dtype: torch.dtype, few: int, ranks: tuple[int, ...]) -> None:
    """All collectives of the communicator; with few=0 all of them are MPI's own."""
    comm = Communicator()
    comm.prepare([(0, 2), (1, 3), (1, 2, 3)])
    if comm.rank not in ranks:
        return
    before, communicator.FEW = communicator.FEW, few
    try:
        for count in (7, LARGE):
            total = sum(numbers(rank, count, dtype) for rank in ranks)
            assert isinstance(total, torch.Tensor)
            mine = numbers(comm.rank, count, dtype)
            parts = [torch.empty_like(mine) for _ in ranks]
            comm.all_gather(ranks, parts, mine).wait()
            for rank, part in zip(ranks, parts, strict=True):
                equal(part, numbers(rank, count, dtype))
            y = torch.empty_like(mine)
            comm.reduce_scatter(ranks, y, [mine + i % 2 for i in range(len(ranks))]).wait()
            equal(y, total + ranks.index(comm.rank) % 2 * len(ranks))
            comm.all_reduce(ranks, mine).wait()
            equal(mine, total)
        uneven(comm, ranks, dtype)
    finally:
        communicator.FEW = before


def uneven(comm: Communicator, ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every pair of ranks exchanges another number of elements, some none."""
    sends = [numbers(comm.rank, comm.rank * rank, dtype) for rank in ranks]
    receives = [torch.empty(comm.rank * rank, dtype=dtype) for rank in ranks]
    comm.all_to_all(ranks, receives, sends).wait()
    for rank, arrived in zip(ranks, receives, strict=True):
        equal(arrived, numbers(rank, comm.rank * rank, dtype))


def whole_group() -> None:
    comm = Communicator()
    for root in range(comm.size):
        x = numbers(comm.rank, (3, 4), torch.float32)
        comm.broadcast(x, root).wait()
        equal(x, numbers(root, (3, 4), torch.float32))
    assert comm.gather_objects({"rank": comm.rank}) == [{"rank": r} for r in range(comm.size)]
    x, parts = numbers(comm.rank, (3, 4), torch.float32).t(), None
    for root in range(comm.size):
        if comm.rank == root:
            parts = [torch.empty(4, 3) for _ in range(comm.size)]
        dist.gather(x, parts if comm.rank == root else None, root)
        y = torch.empty(3, 4).t()
        dist.scatter(y, parts if comm.rank == root else None, root)
        equal(y, x)
    dist.barrier()
    strided = torch.full((4, 6), float(comm.rank)).t()
    dist.all_reduce(strided, dist.ReduceOp.AVG)
    equal(strided, torch.full((6, 4), 1.5))
    largest = torch.tensor(comm.rank)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert largest == comm.size - 1


def single_tensors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, part = torch.empty(2 * size), torch.empty(2)
    with warnings.catch_warnings():  # torch changes the names of these
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_into_tensor(rows, torch.full((2,), float(rank)))
        dist.reduce_scatter_tensor(part, rows)
    equal(rows, torch.arange(size).repeat_interleave(2).float())
    equal(part, torch.full((2,), 4.0 * rank))


def lanes_and_threads() -> None:
    """Two threads use process groups of their own at the same time."""
    comm = Communicator()
    lane, everyone = comm.in_lane("other"), tuple(range(comm.size))
    lane.prepare([everyone])

    def sums(comm: Communicator, errors: list[BaseException]) -> None:
        try:
            for step in range(25):
                x = numbers(comm.rank + step, LARGE, torch.float64)
                comm.all_reduce(everyone, x).wait()
                equal(x, sum(numbers(r + step, LARGE, torch.float64) for r in everyone))  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    errors: list[BaseException] = []
    thread = threading.Thread(target=sums, args=(lane, errors))
    thread.start()
    sums(comm, errors)
    thread.join()
    assert not errors, errors


def moves_alone() -> None:
    """A sum ends, and says so, though nobody waits for it."""
    x = torch.ones(1 << 20)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    noted: list[float] = []
    work.get_future().add_done_callback(lambda _: noted.append(time.monotonic()))
    end = time.monotonic() + 20
    while not noted and time.monotonic() < end:
        time.sleep(0.01)
    assert noted
    equal(x, torch.full_like(x, 4.0))


def late_peer() -> None:
    """A wait ends with the group's timeout, and says what was waited for."""
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    assert Communicator(group).timeout == 0.3
    if dist.get_rank() == 0:
        work = dist.irecv(torch.empty(3), 1, group)
        assert work is not None
        with pytest.raises(RuntimeError, match=r"a message from rank 1 was not over within 0.3 s"):
            work.wait()
    dist.barrier()
    if dist.get_rank() == 1:
        dist.send(torch.zeros(3), 0, group)  # so that nothing is left under way
    dist.barrier()
    dist.destroy_process_group(group)


def other_memory() -> None:
    with pytest.raises(ShardwiseError, match="memory of the host only"):
        dist.all_reduce(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"cannot sum torch\.bool"):
        dist.all_reduce(torch.zeros(3, dtype=torch.bool))


# -- exactness -------------------------------------------------------------------------------------


def compared(
    module: nn.Module, graph: LayerGraph, plans: list[Plan], x: torch.Tensor
) -> list[list[Comparison]]:
    comm = Communicator()
    return [compare(module, plan, (x,), comm, 1, graphs=lambda *_: graph) for plan in plans]


def operator(ranks: Ranks, name: str) -> None:
    module, shape = OPERATORS[name]
    module, x = seeded(module), seeded_input(shape)
    graph = capture(module, x)
    split = {"c": 2, "f": 2} if name.startswith(("conv", "linear")) else {"n": 2, "h": 2}
    plans = [Plan.uniform(graph, 4, **split), Plan.random(graph, 4, seed=4)]
    for comparisons in ranks.run(compared, module, graph, plans, x)[0]:
        assert comparisons and all(c.passed for c in comparisons), (name, comparisons)


def training(ranks: Ranks, engine: Engine, optimizer: str) -> None:
    """Weights after some steps are those of one device."""
    alone = train(seeded(Net()), optimizer, STEPS).state_dict()
    for [state] in ranks.run(weights_of, engine, [{"n": 2, "h": 2}], optimizer):
        for name, tensor in alone.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11)


def checkpoints(ranks: Ranks) -> None:
    """A run that goes on under another plan ends with the weights of one device."""
    with TemporaryDirectory() as folder:
        for first, last, save in ((0, 4, 3), (3, 5, 5)):
            plan = make_plan(4, seed=first)
            states = ranks.run(train_from, Path(folder), plan, "adamw", first, last, save)
    for name, tensor in train_alone("adamw", 5).items():
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-9, atol=1e-9)


def some_ranks() -> None:
    """Two pairs train a pipe each, at the same time, and both with others between, in turns."""
    runs = []
    for seed, members in enumerate(((0, 1), (3, 2), (1, 3), (0, 2, 1), (0, 1, 2, 3))):
        group, pipe = dist.new_group(members, sort_ranks=False), new_pipe(seed)
        if dist.get_rank() in members:
            plan = plan_of(pipe, "decoder", len(members), **({"h": 2} if seed == 1 else {}))
            pipe.decoder = parallelize(pipe.decoder, plan, group=group)
            runs.append(Run(pipe, seed, clip=0.2))
    for _ in range(2):
        for run in runs:
            run.step()
    assert [run.finish() for run in runs] == [[] for _ in runs]


def cases(ranks: Ranks) -> Iterator[tuple[str, Callable[[], Any]]]:
    for dtype in DTYPES:
        yield f"operation: messages of {dtype}", partial(ranks.run, messages, dtype)
        for few in (0, 8):
            for members in ((0, 1, 2, 3), (0, 2), (1, 3), (1, 2, 3)):
                name = f"operation: collectives of {dtype} among {members}, few={few}"
                yield name, partial(ranks.run, collectives, dtype, few, members)
    checks = (masks, tags, whole_group, single_tensors, lanes_and_threads, moves_alone)
    for check in (*checks, late_peer, other_memory):
        yield f"operation: {check.__name__}", partial(ranks.run, check)
    for name in SOME:
        yield f"operator: {name}", partial(operator, ranks, name)
    yield "training: SGD", partial(training, ranks, Engine("chunks", last=1), "momentum")
    yield "training: Adam", partial(training, ranks, Engine("layer"), "adam")
    yield "training: checkpoints", partial(checkpoints, ranks)
    yield "training: parts of models on some ranks", partial(ranks.run, some_ranks)


def main() -> None:
    init_from_environment(TIMEOUT)
    assert dist.get_backend() == "mpi4py"
    torch.set_num_threads(1)
    ranks = Ranks()
    if dist.get_rank() > 0:
        ranks.serve()
    else:
        pool._pools[4] = ranks  # type: ignore[assignment]
        for name, check in cases(ranks):
            start = time.perf_counter()
            check()
            print(f"passed {name}  ({time.perf_counter() - start:.2f} s)", flush=True)
        ranks.stop()
    dist.destroy_process_group()


def fail(how: str) -> None:
    """Rank 1 fails while rank 0 waits for it."""
    init_from_environment(TIMEOUT)
    if how == "differ":
        return differ()
    if dist.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            print("error: a mistake", file=sys.stderr)
            end_all(2)
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def differ() -> None:
    """Ranks sum different things: both say so, and why; then one of them gives up."""
    comm = Communicator()
    comm.prepare([])
    about = About(f"layer {comm.rank}")
    try:
        comm.all_reduce((0, 1), torch.ones(LARGE + comm.rank), about).wait()
    except ShardwiseError as error:
        print(f"told rank {comm.rank}: {error}", flush=True)
    time.sleep(0.5)
    world_state().alarm.check()


if __name__ == "__main__":
    fail(sys.argv[1]) if sys.argv[1:] else main()

"""A training step on a cluster, event by event, for all ranks at once.

The interpreter that runs programs runs them here on clocks: computation, links and gradient sums
are separate resources. A step of the program happens on all ranks, so an event is a vector over
ranks: thousands of ranks cost hardly more than one. Links serve transfers in the program's order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.errors import PlanError
from shardwise.geometry.layout import Layout
from shardwise.geometry.transfer import Transfer
from shardwise.graph.layer_graph import LayerGraph
from shardwise.operators import Split
from shardwise.planner.layer_costs import STATISTICS, Roofline, Timer, Training
from shardwise.planner.links import Network, PortQueues
from shardwise.plans.compile import compile_program
from shardwise.plans.gradient_schedule import Chunk, Engine, gradient_chunks
from shardwise.plans.interpreter import backward, forward
from shardwise.plans.plan import Plan
from shardwise.plans.program import TO_WHOM, Cut, Move, Op, Program, Run, Segment, handed_out
from shardwise.plans.trace import Span, Trace


def simulate(
    plan: Plan,
    graph: LayerGraph,
    cluster: Cluster,
    timer: Timer | None = None,
    training: Training | None = None,
    gradients: Engine | str | None = None,
) -> Trace:
    """The predicted trace of one training step."""
    if plan.world != cluster.world:
        raise PlanError(
            f"the plan is for {plan.world} workers, and the cluster has {cluster.world}"
        )
    training = training or Training()
    timer = timer or Roofline(cluster.device, training.itemsize)
    program = compile_program(graph, plan, 0, graph.params)
    network = Network(cluster)
    layers = sum(1 for layer in graph.layers if layer.params)
    traces = [
        ClockMachine(program, network, timer, training, choice).step()
        for choice in Engine.of(gradients).choices(layers)
    ]
    return min(traces, key=lambda trace: trace.seconds)


@dataclass(eq=False)
class ClockMachine:
    """All ranks as the interpreter's machine: values are nothing, and their making takes time."""

    program: Program
    network: Network
    timer: Timer
    training: Training
    engine: Engine

    def __post_init__(self) -> None:
        self.world = self.network.world
        self.trace = Trace(self.world)
        self.note = self.trace.spans.append
        self.clock = np.zeros(self.world)  # when each rank is free to compute
        self.ports = PortQueues(self.network)
        self.times: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        chunks = gradient_chunks(self.program, self.engine, self.training.itemsize)
        self.sums = _Sums(self, chunks)
        self.sum_starts: Collection[int] = {chunk.start for chunk in chunks}

    def step(self) -> Trace:
        """One training step, or a forward pass where nothing is trained."""
        forward(self.program, self, dict.fromkeys(self.program.inputs))
        if self.training.gradients:
            every = range(len(self.program.backward))
            backward(self.program, self, dict.fromkeys(self.program.outputs), every)
            self.sums.wait()
            self._optimizer()
        return self.trace

    # -- forward -------------------------------------------------------------------------------

    def run(self, block: Run, inputs: list[None]) -> list[None]:
        for op in block.ops:
            self._op(op, forward=True)
        return [None] * len(block.outputs)

    def start(self, move: Move, value: None) -> Callable[[], None]:
        return self._carry(move.target, move.transfer, move.transfer.messages)

    def cut(self, cut: Cut, value: None) -> None:
        """A view takes no time."""

    def hand_out(self, output: str, value: None) -> Callable[[], None]:
        transfer = handed_out(self.program.layouts[output], self.training.output)
        if transfer is None:
            return lambda: None
        return self._carry(f"{output} {TO_WHOM[self.training.output]}", transfer, transfer.messages)

    # -- backward ------------------------------------------------------------------------------

    def compute_again(self, segment: Segment) -> None:
        """Without messages: statistics, and what others sent, were kept."""
        for step in segment.steps:
            if isinstance(step, Move):
                nbytes = step.transfer.target.numels * float(self.training.itemsize)
                self.copy(f"{step.target} again", nbytes * (step.transfer.messages.any(axis=0)))
            else:
                for op in step.ops:
                    self.compute(op.local.layer.name, "recompute", self._times(op)[0])

    def run_back(self, block: Run, gradients: list[None]) -> list[tuple[str, None]]:
        for op in reversed(block.ops):
            self._op(op, forward=False)
            for transfer in op.gathers if any(s.kind == "param" for s in op.operands) else ():
                self.sums.gather(op.local.layer.name, transfer)
        return [(name, None) for name in block.inputs]

    def start_back(self, move: Move, gradient: None) -> Callable[[], None]:
        return self._carry(f"{move.source} gradient", move.transfer, move.transfer.messages.T)

    def cut_back(self, cut: Cut, gradient: None) -> None:
        """Inputs have no gradients in a training step."""

    def add(self, gradient: None, other: None) -> None:
        """Gradients of a value with several readers are added on the way."""

    def start_sums(self, position: int) -> None:
        self.sums.start(position)

    # -- computation ---------------------------------------------------------------------------

    def _op(self, op: Op, forward: bool) -> None:
        """One layer's computation; statistics are summed in between, both ways."""
        layer = op.local.layer
        seconds = self._times(op)[0 if forward else 1]
        kind = "forward" if forward else "backward"
        if op.sums is not None and self.training.statistics == "global":
            seconds = seconds / 2
            self.compute(layer.name, kind, seconds)
            half = done = self.clock
            for _ in range(op.strategy.num_sums(layer) if forward else 1):
                done = self._sum(op.sums.source, done, STATISTICS)
            name, self.clock = f"{layer.name} statistics", done
            self.note(Span(name, "statistics", "transfers", half, done, done - half))
        self.compute(layer.name, kind, seconds)

    def _times(self, op: Op) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a layer on each rank, forward and backward."""
        layer = op.local.layer
        if layer.name not in self.times:
            split = Split.of(layer, op.local.config, self.world)
            self.times[layer.name] = self.timer.seconds(split)
        return self.times[layer.name]

    def _sum(self, layout: Layout, ready: np.ndarray, itemsize: int) -> np.ndarray:
        """When each rank has the sum of its segment."""
        segments, nbytes = layout.holders, float(layout.numels.max()) * itemsize
        seconds = self.network.sum_seconds(segments, nbytes)
        return after_all(segments, ready) + seconds * (segments >= 0)

    def _optimizer(self) -> None:
        """Weights, gradients and the optimizer's state are read, and all but gradients written."""
        steps = [step for step in self.program.forward if isinstance(step, Run)]
        held = np.zeros(self.world)
        for name in sorted({name for step in steps for name in step.params}):
            held += self.program.params[name].numels
        accesses = 3.0 + 5.0 * min(self.training.states, 1) + 8.0 * max(self.training.states - 1, 0)
        nbytes = held * self.training.itemsize * accesses
        seconds = nbytes / self.network.cluster.device.memory_bandwidth
        self.compute("optimizer", "update", seconds)

    def compute(self, name: str, kind: str, seconds: np.ndarray) -> None:
        """Every rank is busy for so long."""
        start, self.clock = self.clock, self.clock + seconds
        self.note(Span(name, kind, "compute", start, self.clock))

    # -- transfers -----------------------------------------------------------------------------

    def _carry(self, name: str, transfer: Transfer, messages: np.ndarray) -> Callable[[], None]:
        """What a rank sends is packed, and what it keeps is copied; then messages leave."""
        matrix = messages * float(self.training.itemsize)
        own = self._own(transfer)
        moves = messages.any(axis=0) | messages.any(axis=1)
        self.copy(f"{name} packed", matrix.sum(axis=1) + own * moves)  # a view costs nothing
        self._post(name, matrix)
        start = self.clock.copy()
        arrival = self.ports.carry(matrix, start, own)
        return partial(self._arrive, name, start, arrival, matrix.sum(axis=0))

    def _own(self, transfer: Transfer) -> np.ndarray:
        """Bytes that each rank both holds and needs."""
        source, target = transfer.source.bounds, transfer.target.bounds
        starts = np.maximum(source[..., 0], target[..., 0])
        common = np.maximum(np.minimum(source[..., 1], target[..., 1]) - starts, 0).prod(axis=1)
        return common * float(self.training.itemsize)

    def copy(self, name: str, nbytes: np.ndarray) -> None:
        """Memory is read and written once, on the way to or from a message."""
        if nbytes.any():
            seconds = 2.0 * nbytes / self.network.cluster.device.memory_bandwidth
            self.compute(name, "copy", seconds)

    def _post(self, name: str, matrix: np.ndarray) -> None:
        """A rank's own time to hand over what it sends, and to say where to put what it gets."""
        post = self.network.cluster.links[0].post
        if post > 0.0:
            sent = matrix > 0
            self.compute(f"{name} posted", "copy", post * (sent.sum(axis=0) + sent.sum(axis=1)))

    def _arrive(
        self, name: str, start: np.ndarray, arrival: np.ndarray, received: np.ndarray
    ) -> None:
        """Ranks that need a value wait until it is there."""
        blocked = np.maximum(arrival - self.clock, 0.0)
        self.clock = self.clock + blocked
        self.note(Span(name, "transfer", "transfers", start, arrival, blocked))
        self.copy(f"{name} unpacked", received)


class _Sums:
    """The sums of gradients: what starts when, and what is under way, in a lane of their own."""

    def __init__(self, machine: ClockMachine, chunks: list[Chunk]) -> None:
        self.machine, self.chunks = machine, chunks
        self.free = np.zeros(machine.world)
        self.spans: list[tuple[str, np.ndarray, np.ndarray]] = []

    def gather(self, layer: str, transfer: Transfer) -> None:
        """What a layer with gathered gradients needs of the other ranks is on its way."""
        machine = self.machine
        start = np.maximum(machine.clock, self.free)
        matrix = transfer.messages * float(machine.training.itemsize)
        self._note(f"{layer} gathered", start, machine.ports.carry(matrix, start))

    def start(self, position: int) -> None:
        """Starts the sums that a step of the backward pass completes, packed per segment."""
        for chunk in (chunk for chunk in self.chunks if chunk.start == position):
            name = f"the gradients of {chunk.label}"
            for segments, nbytes in self._packs(chunk):
                seconds = self.machine.network.sum_seconds(segments, nbytes)
                if seconds > 0:
                    self._sum(name, segments, nbytes, seconds)

    def _packs(self, chunk: Chunk) -> list[tuple[np.ndarray, float]]:
        """Ranks that sum the same block, and its bytes."""
        found: dict[bytes, tuple[np.ndarray, float]] = {}
        for layout in (self.machine.program.params[name] for name in chunk.params):
            segments, key = layout.holders, layout.holders.tobytes()
            nbytes = float(layout.numels.max()) * self.machine.training.itemsize
            found[key] = segments, found.get(key, (segments, 0.0))[1] + nbytes
        return list(found.values())

    def _sum(self, name: str, segments: np.ndarray, nbytes: float, seconds: float) -> None:
        machine, link = self.machine, self.machine.network.cluster.links[0]
        machine.copy(f"{name} packed", nbytes * (segments >= 0))
        start = np.maximum(machine.clock, self.free)
        end = after_all(segments, start) + seconds
        if link.overlap < 1.0:  # it needs the cores that compute, which takes so much longer
            machine.compute(name, "copy", (1.0 - link.overlap) * seconds * (segments >= 0))
        self._note(name, start, np.where(segments >= 0, end, start))

    def _note(self, name: str, start: np.ndarray, end: np.ndarray) -> None:
        self.free = np.maximum(self.free, end)
        self.spans.append((name, start, end))

    def wait(self) -> None:
        """The optimizer waits for all sums."""
        clock = self.machine.clock
        for name, start, end in self.spans:
            blocked = np.maximum(end - np.maximum(clock, start), 0.0)
            self.machine.note(Span(name, "gradients", "gradients", start, end, blocked))
            clock = np.maximum(clock, end)
        self.machine.clock = clock


def after_all(segments: np.ndarray, ready: np.ndarray) -> np.ndarray:
    """When the last rank of each rank's segment is ready."""
    latest = np.full(len(ready) + 1, -np.inf)
    np.maximum.at(latest, segments, ready)
    return np.where(segments >= 0, latest[segments], ready)

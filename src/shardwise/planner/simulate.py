"""A training step on a cluster, event by event, for all ranks at once.

Every rank runs the steps of its program in order; computation, links and gradient sums are separate
resources. A step of the program happens on all ranks, so an event is a vector over ranks: thousands
of ranks cost hardly more than one. Links serve transfers in the order of the program.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.errors import PlanError
from shardwise.geometry.layout import Layout
from shardwise.geometry.transfer import Transfer
from shardwise.graph.layer_graph import LayerGraph
from shardwise.operators import Split
from shardwise.planner.layer_costs import STATISTICS, Roofline, Timer, Training
from shardwise.planner.links import Network
from shardwise.planner.port_queues import PortQueues
from shardwise.planner.rings import segments_of
from shardwise.plans.compile import compile_program
from shardwise.plans.gradient_schedule import Engine
from shardwise.plans.plan import Plan
from shardwise.plans.program import Cut, Move, Op, Program, Run, to_all
from shardwise.plans.trace import Span, Trace


def simulate(
    plan: Plan,
    graph: LayerGraph,
    cluster: Cluster,
    timer: Timer | None = None,
    training: Training | None = None,
    engine: Engine | None = None,
) -> Trace:
    """The predicted trace of one training step."""
    if plan.world != cluster.world:
        raise PlanError(
            f"the plan is for {plan.world} workers, and the cluster has {cluster.world}"
        )
    training = training or Training()
    timer = timer or Roofline(cluster.device, training.itemsize)
    trainable = frozenset(name for layer in graph.layers for name in layer.params)
    program = compile_program(graph, plan, 0, trainable)
    network = Network(cluster)
    layers = sum(1 for layer in graph.layers if layer.params)
    traces = [
        _Simulator(program, plan, trainable, network, timer, training, choice).run()
        for choice in (engine or Engine()).choices(layers)
    ]
    return min(traces, key=lambda trace: trace.seconds)


class _Simulator:
    def __init__(
        self,
        program: Program,
        plan: Plan,
        trainable: frozenset[str],
        network: Network,
        timer: Timer,
        training: Training,
        engine: Engine,
    ) -> None:
        self.program, self.network, self.timer = program, network, timer
        self.training, self.engine = training, engine
        self.world, self.trainable = plan.world, trainable
        self.trace = Trace(plan.world)
        self.clock = np.zeros(plan.world)  # when each rank is free to compute
        self.lanes = PortQueues(network)
        self.ready: dict[str, np.ndarray] = {}  # when each value is there
        self.arriving: dict[str, _Arriving] = {}  # values still on their way
        self.coming: dict[str, list[_Arriving]] = {}  # parts of gradients still on their way
        self.times: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.gradients = _Gradients(self)

    def run(self) -> Trace:
        for name in self.program.inputs:
            self.ready[name] = self.clock.copy()
        for step in self.program.forward:
            self._forward(step)
        self._outputs()
        if self.training.gradients:
            self._backward()
        return self.trace

    # -- forward -------------------------------------------------------------------------------

    def _forward(self, step: Run | Move | Cut) -> None:
        if isinstance(step, Cut):
            self.ready[step.target] = self.ready[step.source]
        elif isinstance(step, Move):
            self._wait(step.source)
            self._start(step.target, step.transfer)
        else:
            for name in step.inputs:
                self._wait(name)
            for op in step.ops:
                self._op(op, forward=True)
            for name in step.outputs:
                self.ready[name] = self.clock.copy()

    def _outputs(self) -> None:
        """Every rank gets the whole output, for the loss."""
        for name in self.program.outputs:
            self._wait(name)
            if self.training.output == "full":
                transfer = to_all(self.program.layouts[name])
                self._start(f"{name} to all", transfer)
        for name in self.program.outputs:
            if self.training.output == "full":
                self._wait(f"{name} to all")

    def _op(self, op: Op, forward: bool) -> None:
        """One layer's computation; statistics are summed in between, both ways."""
        layer = op.local.layer
        if layer.name not in self.times:
            self.times[layer.name] = self.timer.seconds(
                Split.of(layer, op.local.config, self.world)
            )
        seconds = self.times[layer.name][0 if forward else 1]
        start, kind = self.clock.copy(), "forward" if forward else "backward"
        if op.sums is not None and self.training.statistics == "global":
            half = start + seconds / 2
            self._span(layer.name, kind, "compute", start, half)
            done = half
            for _ in range(op.strategy.num_sums(layer) if forward else 1):
                done = self._sum(op.sums.source, done, STATISTICS)
            self._span(
                f"{layer.name} statistics", "statistics", "transfers", half, done, done - half
            )
            start, seconds = done, seconds / 2
        self.clock = start + seconds
        self._span(layer.name, kind, "compute", start, self.clock)

    def _sum(self, layout: Layout, ready: np.ndarray, itemsize: int) -> np.ndarray:
        """When each rank has the sum of its segment."""
        segments = segments_of(layout.bounds[None])[0]
        nbytes = float(layout.numels.max()) * itemsize
        return self.after_all(segments, ready) + (
            self.network.sum_seconds(segments, nbytes) * (segments >= 0)
        )

    @staticmethod
    def after_all(segments: np.ndarray, ready: np.ndarray) -> np.ndarray:
        """When the last rank of each rank's segment is ready."""
        latest = np.full(len(ready) + 1, -np.inf)
        np.maximum.at(latest, segments, ready)
        return np.where(segments >= 0, latest[segments], ready)

    # -- transfers -----------------------------------------------------------------------------

    def _start(self, target: str, transfer: Transfer) -> None:
        """What a rank sends is packed, and what it keeps is copied; then messages leave."""
        matrix = transfer.messages * float(self.training.itemsize)
        self._copy(f"{target} packed", matrix.sum(axis=1) + self._kept(transfer))
        self._post(target, matrix)
        start = self.clock.copy()
        arrival = self.lanes.carry(matrix, start, self._own(transfer))
        self.arriving[target] = _Arriving(target, start, arrival, matrix.sum(axis=0))
        self.ready[target] = arrival

    def _own(self, transfer: Transfer) -> np.ndarray:
        """Bytes that each rank both holds and needs."""
        source, target = transfer.source.bounds, transfer.target.bounds
        starts = np.maximum(source[..., 0], target[..., 0])
        common = np.maximum(np.minimum(source[..., 1], target[..., 1]) - starts, 0).prod(axis=1)
        return common * float(self.training.itemsize)

    def _kept(self, transfer: Transfer) -> np.ndarray:
        """Bytes of a rank's own part that are copied to their new place; a view costs nothing."""
        messages = transfer.messages
        return self._own(transfer) * (messages.any(axis=0) | messages.any(axis=1))

    def _copy(self, name: str, nbytes: np.ndarray) -> None:
        """Memory is read and written once, on the way to or from a message."""
        if nbytes.any():
            start = self.clock
            self.clock = start + 2.0 * nbytes / self.network.cluster.device.memory_bandwidth
            self._span(name, "copy", "compute", start, self.clock)

    def _post(self, name: str, matrix: np.ndarray) -> None:
        """A rank's own time to hand over what it sends, and to say where to put what it gets."""
        post = self.network.cluster.links[0].post
        if post > 0.0:
            start, sent = self.clock, matrix > 0
            self.clock = start + post * (sent.sum(axis=0) + sent.sum(axis=1))
            self._span(f"{name} posted", "copy", "compute", start, self.clock)

    def _wait(self, name: str) -> None:
        """Ranks that need a value wait until it is there."""
        blocked = np.maximum(self.ready[name] - self.clock, 0.0)
        self.clock = self.clock + blocked
        if name in self.arriving:
            moving = self.arriving.pop(name)
            self._span(name, "transfer", "transfers", moving.start, moving.arrival, blocked)
            self._copy(f"{name} unpacked", moving.received)

    def _span(
        self,
        name: str,
        kind: str,
        lane: str,
        starts: np.ndarray,
        ends: np.ndarray,
        blocked: np.ndarray | None = None,
    ) -> None:
        self.trace.spans.append(Span(name, kind, lane, starts, ends, blocked))

    # -- backward ------------------------------------------------------------------------------

    def _backward(self) -> None:
        self.ready = {name: self.clock.copy() for name in self.program.outputs}
        for step in self.program.backward:
            if isinstance(step, Move):
                self._take(step.target)
                back = step.transfer.messages.T * float(self.training.itemsize)
                self._copy(
                    f"{step.source} gradient packed", back.sum(axis=1) + self._kept(step.transfer)
                )
                self._post(f"{step.source} gradient", back)
                start = self.clock.copy()
                arrival = self.lanes.carry(back, start, self._own(step.transfer))
                self._add(step.source, start, arrival, back.sum(axis=0))
            elif isinstance(step, Run):
                for name in step.outputs:
                    self._take(name)
                for op in reversed(step.ops):
                    self._op(op, forward=False)
                    self.gradients.ready(op)
                for name in step.inputs:
                    self.ready[name] = np.maximum(self.ready.get(name, self.clock), self.clock)
        self.gradients.finish()
        self._optimizer()

    def _optimizer(self) -> None:
        """Weights, gradients and the optimizer's state are read, and all but gradients written."""
        held = np.zeros(self.world)
        for name in self.trainable:
            held += self.program.params[name].numels
        accesses = 3.0 + 5.0 * min(self.training.states, 1) + 8.0 * max(self.training.states - 1, 0)
        seconds = held * self.training.itemsize * accesses
        start = self.clock
        self.clock = start + seconds / self.network.cluster.device.memory_bandwidth
        self._span("optimizer", "update", "compute", start, self.clock)

    def _add(self, name: str, start: np.ndarray, arrival: np.ndarray, received: np.ndarray) -> None:
        """A part of a value's gradient comes from a reader on other ranks."""
        self.ready[name] = np.maximum(self.ready.get(name, arrival), arrival)
        self.coming.setdefault(name, []).append(_Arriving(name, start, arrival, received))

    def _take(self, name: str) -> None:
        """Waits for the gradient of a value, if anything of it comes."""
        if name not in self.ready:
            self.ready[name] = self.clock.copy()
        for moving in self.coming.pop(name, []):
            blocked = np.maximum(moving.arrival - self.clock, 0.0)
            self.clock = self.clock + blocked
            label = f"{name} gradient"
            self._span(label, "transfer", "transfers", moving.start, moving.arrival, blocked)
            self._copy(f"{label} unpacked", moving.received)
        self.clock = np.maximum(self.clock, self.ready[name])


@dataclass(frozen=True, eq=False)
class _Arriving:
    name: str
    start: np.ndarray
    arrival: np.ndarray
    received: np.ndarray  # bytes


@dataclass(eq=False)
class _Gradients:
    """The gradient engine: what is ready, and the sums under way, in a lane of their own."""

    simulator: _Simulator
    pending: dict[bytes, tuple[np.ndarray, float]] = field(default_factory=dict)
    held: dict[bytes, tuple[np.ndarray, float]] = field(default_factory=dict)  # for the end
    names: list[str] = field(default_factory=list)
    layers: int = 0
    summed: int = 0
    spans: list[tuple[str, np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = np.zeros(self.simulator.world)

    def ready(self, op: Op) -> None:
        """The gradients of a layer's weights are there."""
        simulator = self.simulator
        params = [s.name for s in op.operands if s.kind == "param"]
        if not params:
            return
        for transfer in op.gathers:
            matrix = transfer.messages * float(simulator.training.itemsize)
            start = np.maximum(simulator.clock, self.free)
            self._note(
                f"{op.local.layer.name} gathered", start, simulator.lanes.carry(matrix, start)
            )
        for name in () if op.gathers else params:
            layout = simulator.program.params[name]
            segments = segments_of(layout.bounds[None])[0]
            nbytes = float(layout.numels.max()) * simulator.training.itemsize
            pending = self.held if self.summed < simulator.engine.held else self.pending
            known = pending.get(segments.tobytes(), (segments, 0.0))
            pending[segments.tobytes()] = (segments, known[1] + nbytes)
        self.summed += not op.gathers
        self.names.append(op.local.layer.name)
        total = sum(nbytes for _, nbytes in self.pending.values())
        if simulator.engine.flushes(self.layers, total):
            self._flush()
        self.layers += 1

    def _flush(self) -> None:
        """Starts the sums of all that is pending, packed per segment."""
        label = self.names[0] if len(self.names) == 1 else f"{len(self.names)} layers"
        for segments, nbytes in self.pending.values():
            start = np.maximum(self.simulator.clock, self.free)
            seconds = self.simulator.network.sum_seconds(segments, nbytes)
            if seconds > 0:
                self.simulator._copy(f"{label} packed", nbytes * (segments >= 0))
                start = np.maximum(self.simulator.clock, self.free)
                begin = self.simulator.after_all(segments, start)
                self._steal(label, segments, seconds)
                self._note(
                    f"sum of {label}", start, np.where(segments >= 0, begin + seconds, start)
                )
        self.pending, self.names = {}, []

    def _steal(self, label: str, segments: np.ndarray, seconds: float) -> None:
        """Where a sum needs the cores that compute, computation takes so much longer."""
        simulator, link = self.simulator, self.simulator.network.cluster.links[0]
        if link.overlap < 1.0:
            start = simulator.clock
            simulator.clock = start + (1.0 - link.overlap) * seconds * (segments >= 0)
            simulator._span(f"sum of {label}", "copy", "compute", start, simulator.clock)

    def _note(self, name: str, start: np.ndarray, end: np.ndarray) -> None:
        self.free = np.maximum(self.free, end)
        self.spans.append((name, start, end))

    def finish(self) -> None:
        """The optimizer waits for all sums."""
        simulator = self.simulator
        self._flush()
        self.pending, self.names = self.held, ["the last layers"]
        self._flush()
        clock = simulator.clock
        for name, start, end in self.spans:
            blocked = np.maximum(end - np.maximum(clock, start), 0.0)
            simulator._span(name, "gradients", "gradients", start, end, blocked)
            clock = np.maximum(clock, end)
        simulator.clock = clock

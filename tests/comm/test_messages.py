"""What is sent is what the strategies declare, message by message and byte by byte."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from exactness import seeded, seeded_input
from operator_cases import OPERATORS
from pool import shared_pool
from recording import Recording, Sent
from shardwise.geometry.grid import Config
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.capture import capture
from shardwise.plans.compile import compile_program
from shardwise.plans.plan import Plan
from shardwise.plans.program import Move, Op, Program, Run, handed_out
from shardwise.runtime.parallel import parallelize

BYTES = 8  # of a float64


def _record(
    module: nn.Module, graph: LayerGraph, plans: list[Plan], x: torch.Tensor
) -> list[tuple[list[Sent], list[Sent]]]:
    """What this rank sent in forward and in backward, for each plan."""
    comm, results = Recording(), []
    for plan in plans:
        model = parallelize(module, plan, comm=comm, graphs=lambda training, batch: graph)
        comm.sent.clear()
        y = model(x)
        y = sum(t.sum() for t in pytree.tree_leaves(y))
        forward = list(comm.sent)
        comm.sent.clear()
        if y.requires_grad:  # else there is nothing to train
            y.backward()
        results.append((forward, list(comm.sent)))
    return results


def declared(program: Program, rank: int, module: nn.Module) -> tuple[Counter, Counter]:
    """The messages the layouts of the strategies imply, for this rank."""

    def counts(op: Op) -> bool:
        """Statistics are summed by layers in training mode."""
        owner = op.local.layer.traits.module
        return op.sums is not None and (owner is None or module.get_submodule(owner).training)

    def messages(elements: np.ndarray, value: str) -> Counter:
        return Counter(int(n) * program.dtypes[value].itemsize for n in elements[rank] if n)

    forward, backward = Counter(), Counter()
    for step in program.forward:
        if isinstance(step, Move):
            forward += messages(step.transfer.messages, step.source)
        elif isinstance(step, Run):
            for op in step.ops:
                if counts(op):
                    for _ in range(op.strategy.num_sums(op.local.layer)):
                        forward += sums(op.sums, rank)
    for step in program.backward:
        if isinstance(step, Move):
            backward += messages(step.transfer.messages.T, step.source)
        elif isinstance(step, Run):
            for op in step.ops:
                if counts(op):
                    backward += sums(op.sums, rank)
    for name in program.outputs:
        forward += messages(handed_out(program.layouts[name], "full").messages, name)
    return forward, backward


def sums(transfer, rank: int) -> Counter:
    if transfer.source.is_segmented:
        in_group = len(transfer.source.segment(rank)) > 1 and transfer.source.numels[rank]
        return Counter({("sum", int(transfer.source.numels[rank]) * BYTES): int(bool(in_group))})
    return Counter(int(n) * BYTES for n in transfer.messages[rank] if n)


def counted(sent: list[Sent]) -> Counter:
    return Counter(s.bytes if s.kind == "message" else ("sum", s.bytes) for s in sent)


def gradient_sums(program: Program, rank: int) -> Counter:
    """One packed sum per segment of ranks that hold the same blocks."""
    trained = {name for step in program.backward for name in getattr(step, "params", ())}
    packed: Counter = Counter()
    for name in trained:
        layout = program.params[name]
        if layout.numels[rank] and len(layout.segment(rank)) > 1:
            packed[layout.segment(rank)] += int(layout.numels[rank]) * BYTES
    return Counter(("sum", size) for size in packed.values())


@pytest.mark.parametrize("name", OPERATORS)
def test_messages_sent_are_the_messages_declared(name: str) -> None:
    module, shape = OPERATORS[name]
    module, x = seeded(module), seeded_input(shape)
    graph = capture(module, x)
    plans = [Plan.uniform(graph, 4, **d) for d in ({"n": 4}, {"h": 2, "w": 2}, {"c": 2, "f": 2})]
    plans += [Plan.random(graph, 4, seed) for seed in range(3)]
    results = shared_pool(4).run(_record, module, graph, plans, x)
    trainable = frozenset(n for n, p in module.named_parameters() if p.requires_grad)
    for index, plan in enumerate(plans):
        for rank in range(4):
            program = compile_program(graph, plan, rank, trainable)
            forward, backward = declared(program, rank, module)
            sent_forward, sent_backward = results[rank][index]
            assert counted(sent_forward) == +forward, f"{plan}"
            assert counted(sent_backward) == +backward + gradient_sums(program, rank), f"{plan}"


def test_a_spatial_split_of_a_k3_convolution_moves_one_row_of_halo_per_side() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 3, padding=1))
    graph = capture(model, torch.zeros(2, 3, 12, 10))
    plan = Plan.make(graph, 4, lambda layer: Config(h=4))
    program = compile_program(graph, plan, 1, frozenset(n for n, _ in model.named_parameters()))
    (halo,) = [step.transfer for step in program.forward if isinstance(step, Move)]
    row = 2 * 4 * 10
    neighbours = np.diag([row] * 3, 1) + np.diag([row] * 3, -1)
    assert (halo.messages == neighbours).all()
    assert (halo.transpose.messages == neighbours).all()


def test_nothing_moves_between_equal_layouts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))
    graph = capture(model, torch.zeros(8, 3, 12, 10))
    program = compile_program(graph, Plan.uniform(graph, n=4), 0, frozenset({"0.weight"}))
    assert not [step for step in program.forward if isinstance(step, Move)]

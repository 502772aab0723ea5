"""What a parallel model knows beyond its modules."""

from __future__ import annotations

import copy
import weakref
from inspect import Signature
from typing import Any

import torch
from torch import nn

from shardwise.comm import Communicator
from shardwise.errors import ShardwiseError
from shardwise.model.capture import Graphs
from shardwise.plans.gradient_schedule import Engine
from shardwise.plans.plan import Plan
from shardwise.plans.program import OUTPUTS, Program, param_layouts
from shardwise.runtime.compiling import GRAPHS
from shardwise.runtime.model_gradients import ModelGradients
from shardwise.runtime.programs import Programs
from shardwise.runtime.stored_blocks import StoredBlocks
from shardwise.runtime.wrapping import Watch

MODES = ("default", *GRAPHS, "max-autotune-no-cudagraphs")  # of torch.compile
PRECISIONS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


class State:
    """How a model was made parallel, its blocks, its programs, and its gradients."""

    def __init__(
        self,
        plan: Plan,
        output: str,
        comm: Communicator,
        graphs: Graphs,
        engine: Engine,
        precision: str | None,
        compile: bool | str,
    ) -> None:
        if output not in OUTPUTS:
            raise ShardwiseError(f"output={output!r} must be 'full', 'local' or 'one'")
        if precision not in PRECISIONS:
            raise ShardwiseError(f"precision={precision!r} must be 'bf16', 'fp16' or None")
        if compile not in (True, False, *MODES):
            modes = ", ".join(map(repr, MODES))
            raise ShardwiseError(f"compile={compile!r} must be True, False, or one of {modes}")
        self.plan, self.comm, self.precision = plan, comm, PRECISIONS[precision]
        self.output = output
        self.mode = "default" if compile is True else compile or None
        self.arguments = Signature()  # of the model's forward
        self.name = "model"  # of the original's class
        self.modules: dict[str, Any] = {}
        self.watch: Watch | None = None
        graph, *others = known = [
            graphs(plan.training, each.inputs) for each in (plan, *plan.others)
        ]
        for each, of_size in zip((plan, *plan.others), known, strict=True):
            each.check(of_size)
        self.facts = {"plan": plan.to_json(), "model": graph.signature}  # the same on all ranks
        self.blocks = StoredBlocks(param_layouts(plan, graph, *others), comm)
        self.programs = Programs(plan, graphs, self.blocks.layouts, comm)
        self.lane = comm.in_lane("gradients")
        engines = engine.choices(sum(1 for layer in graph.layers if layer.params))
        self.gradients = ModelGradients(engines, comm, self.lane, self.blocks.params)
        self._prepared: set[tuple[int, ...]] = set()  # groups of ranks that can talk

    def adopt(self, root: nn.Module, copied: State | None = None) -> None:
        """Takes note of the modules of the model that this is about, maybe a copy of another."""
        self.modules = dict(root.named_modules(remove_duplicate=False))
        self.modules[""] = weakref.proxy(root)
        self.name = type(root).__name__.removeprefix("Parallel")
        self.blocks.adopt(root)
        self.programs.adopt(self.modules, None if copied is None else copied.programs)

    def twin(self, root: nn.Module) -> State:
        """The same, for a copy of the model; nothing is under way, and no pass has been made."""
        twin, layouts = copy.copy(self), self.blocks.layouts
        twin.blocks = StoredBlocks(layouts, self.comm)
        twin.programs = Programs(self.plan, self.programs.graph, layouts, self.comm)
        engines, params = self.gradients.engines, twin.blocks.params
        twin.gradients = ModelGradients(engines, self.comm, self.lane, params)
        twin.watch = None
        with self.blocks.keeping_uninitialized(twin.blocks):
            twin.adopt(root, self)
        return twin

    def prepare(self, program: Program) -> None:
        """Makes the process groups that a program needs; all ranks come here together."""
        if not self._prepared.issuperset(program.groups):
            self.comm.prepare(program.groups)
            segments = {ranks for layout in program.params.values() for ranks in layout.segments}
            self.lane.prepare(sorted(segments))
            self._prepared |= set(program.groups)

    @property
    def training(self) -> bool:
        return self.modules[""].training

"""One case tried: captured once, run under a few plans in worlds of one process, and judged."""

from __future__ import annotations

import copy
import random
import time
import traceback
from dataclasses import dataclass, replace

import torch
from torch import nn

from outside_cases.case import Case, number
from outside_cases.judge import Inputs, Noise, measure, wrong
from outside_cases.observe import Seen, observe
from shardwise.comm import Communicator
from shardwise.comm.in_process import Hung, Mismatch, World
from shardwise.errors import ShardwiseError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.model.torch_export import Captured
from shardwise.operators import STRATEGIES
from shardwise.operators.splits import Split
from shardwise.plans.plan import Plan
from shardwise.runtime.parallel import parallelize

RIGHT, WHOLE, REFUSED, EXPORT = "right and split", "right but whole", "refused", "no export"
WRONG, HUNG, TRACEBACK = "wrong", "hung", "traceback"
SLOW, NOT_RUNNABLE = "too slow", "not runnable"
CLASSES = (RIGHT, WHOLE, REFUSED, EXPORT, WRONG, HUNG, TRACEBACK, SLOW, NOT_RUNNABLE)
BAD = (WRONG, HUNG, TRACEBACK)
SEVERITY = (WHOLE, RIGHT, REFUSED, WRONG, HUNG, TRACEBACK)  # of plans; the worst is the case's

UNIFORM: tuple[dict[str, int], ...] = (
    {"n": 2}, {"h": 2}, {"f": 2}, {"c": 2}, {"n": 2, "h": 2}, {"w": 3}, {"h": 2, "w": 2},
    {"f": 3}, {"n": 3}, {"c": 2, "f": 2}, {"n": 5}, {"d": 2},
)  # fmt: skip
WORLDS = (2, 2, 3, 3, 4, 5)  # of random plans
ENOUGH = 15.0  # seconds of computing after which no other plan is tried
AS_A_USER = 0.1  # of all plans are run without the graphs that were captured before


@dataclass(frozen=True)
class Verdict:
    """What became of a case, or of one plan for it."""

    kind: str
    reason: str = ""
    plan: str = ""
    case: str = ""
    seed: int = 0
    num_runs: int = 1  # each with another plan, world and order of arrivals
    seconds: float = 0.0


def attempt(case: Case, seed: int) -> Verdict:
    """The verdict about a case; never raises."""
    begin = time.perf_counter()
    try:
        found = _attempt(case, number(case.name) + seed)
    except Exception as error:
        found = Verdict(TRACEBACK, _told(error))
    return replace(found, case=case.name, seed=seed, seconds=time.perf_counter() - begin)


def _attempt(case: Case, seed: int) -> Verdict:
    if case.check is not None:
        wrong = case.check(seed)
        return Verdict(WRONG, wrong) if wrong else Verdict(WHOLE)
    assert case.build is not None
    module, inputs = case.build()
    pristine = copy.deepcopy(module)
    try:
        expected, backward = _reference(pristine, inputs, case)
    except Exception as error:
        expected, backward = error, True
    if isinstance(expected, Exception) != case.must_fail:
        return Verdict(NOT_RUNNABLE, "no error" if case.must_fail else str(expected)[:200])
    try:
        modes = {True, False} if case.and_eval else {True, case.training}
        captured = {training: Captured(module, inputs, training) for training in modes}
        for exported in captured.values():
            exported.graph(inputs[0].shape[0])
    except ShardwiseError as error:
        ours = case.must_fail or not _export_fails(pristine, inputs)
        return Verdict(REFUSED if ours else EXPORT, str(error))
    except Exception as error:
        return Verdict(TRACEBACK, "capture: " + _told(error))
    return _Trial(case, module, pristine, inputs, captured, expected, backward).verdict(seed)


def _observe(model: nn.Module, inputs: Inputs, case: Case, backward: bool) -> Seen:
    return observe(model, inputs, case.training, backward, case.num_steps, case.and_eval)


def _reference(module: nn.Module, inputs: Inputs, case: Case) -> tuple[Seen, bool]:
    """What plain torch gives, with gradients where it has any; raises where it gives nothing."""
    backward = True
    try:
        seen = _observe(copy.deepcopy(module), inputs, case, True)
    except (RuntimeError, NotImplementedError):
        backward = False
        seen = _observe(copy.deepcopy(module), inputs, case, False)
    again = _observe(copy.deepcopy(module), inputs, case, backward)
    reason = wrong(again, seen, lambda: dict.fromkeys(seen.tensors, 0.0))
    if reason is not None:
        raise RuntimeError(f"torch itself gives different results: {reason}")
    return seen, backward


def _export_fails(module: nn.Module, inputs: Inputs) -> bool:
    """Whether torch.export itself cannot take this model, with all sizes fixed."""
    try:
        torch.export.export(copy.deepcopy(module), inputs, strict=False)
    except Exception:
        return True
    return False


@dataclass
class _Trial:
    """A case that was captured, with what is expected of it."""

    case: Case
    module: nn.Module
    pristine: nn.Module  # as it was before it was captured
    inputs: Inputs
    captured: dict[bool, Captured]
    expected: Seen | Exception
    backward: bool
    noise: Noise | None = None

    def verdict(self, seed: int) -> Verdict:
        """The worst of a few plans, as many as there is time for."""
        worst, begin, num_runs = Verdict(WHOLE), time.process_time(), 0
        for draw in range(self.case.num_plans):
            found = self.run(seed + draw, uniform=draw % 2 == 0)
            worst = max(worst, found, key=lambda verdict: SEVERITY.index(verdict.kind))
            num_runs += 1
            if worst.kind in BAD or time.process_time() - begin > ENOUGH:
                break
        if worst.kind not in BAD and isinstance(self.expected, Seen):
            seen = _observe(self.module, self.inputs, self.case, self.backward)
            reason = self._difference(seen)
            if reason is not None:
                worst = Verdict(WRONG, f"the model itself was changed: {reason}")
        return replace(worst, num_runs=num_runs)

    def run(self, seed: int, uniform: bool) -> Verdict:
        """The verdict about one plan."""
        text, draw = "", random.Random(seed)
        try:
            graph = self._graph(True, self.inputs[0].shape[0])
            if uniform:
                plan = Plan.uniform(graph, **draw.choice(UNIFORM))
            else:
                plan = Plan.random(graph, draw.choice(WORLDS), seed)
            as_a_user = draw.random() < AS_A_USER
            text = f"world {plan.world}{', as a user' * as_a_user}, " + ", ".join(
                f"{name}: {config}" for name, config in plan.layers.items()
            )
            everywhere = World(plan.world, seed).run(self._work, plan, as_a_user)
        except Exception as error:
            return self._raised(error, text)
        if isinstance(self.expected, Exception):
            return Verdict(WRONG, f"no error where torch says: {_told(self.expected)}", text)
        for rank, seen in enumerate(everywhere):
            known = rank and seen.equals(everywhere[0])
            reason = None if known else self._difference(seen)
            if reason is not None:
                return Verdict(WRONG, f"rank {rank}: {reason}", text)
        return Verdict(RIGHT if _is_split(graph, plan) else WHOLE, "", text)

    def _graph(self, training: bool, batch: int) -> LayerGraph:
        return self.captured[training].graph(batch)

    def _work(self, comm: Communicator, plan: Plan, as_a_user: bool) -> Seen:
        """What one rank of a world does."""
        graphs = None if as_a_user else self._graph
        model = parallelize(self.module, plan, comm=comm, graphs=graphs)
        return _observe(model, self.inputs, self.case, self.backward)

    def _raised(self, error: Exception, plan: str) -> Verdict:
        if isinstance(error, (Hung, Mismatch)):
            return Verdict(HUNG, str(error), plan)
        if isinstance(error, ShardwiseError):
            return Verdict(REFUSED, str(error), plan)
        if isinstance(self.expected, Exception) and str(error) == str(self.expected):
            return Verdict(REFUSED, f"as torch: {error}", plan)
        return Verdict(TRACEBACK, _told(error), plan)

    def _difference(self, seen: Seen) -> str | None:
        """What differs from one device by more than a change in the last bits makes there."""
        assert isinstance(self.expected, Seen)
        return wrong(seen, self.expected, self._noise)

    def _noise(self) -> Noise:
        """What one device itself makes of changes in the last bits, measured once."""
        if self.noise is None:
            assert isinstance(self.expected, Seen)
            self.noise = measure(self.pristine, self.inputs, self.expected, self._look)
        return self.noise

    def _look(self, module: nn.Module, inputs: Inputs) -> Seen:
        return _observe(module, inputs, self.case, self.backward)


def _is_split(graph: LayerGraph, plan: Plan) -> bool:
    """Whether some layer besides inputs lies on more than one rank."""
    for layer in graph.layers:
        if layer.op != "input":
            split = Split.of(layer, plan.layers[layer.name], plan.world)
            if sum(n > 0 for n in STRATEGIES[layer.op].output(split).numels) > 1:
                return True
    return False


def _told(error: BaseException) -> str:
    """The error's class, first line, and the last line of ours that it passed through."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/shardwise/" in f.filename]
    where = f" [{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].lineno}]" if ours else ""
    return f"{type(error).__name__}: {lines[0].strip()[:300]}{where}"

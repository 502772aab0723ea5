"""One case tried: captured once, run under a few plans in worlds of one process, and judged."""

from __future__ import annotations

import copy
import random
import time
import traceback
from dataclasses import dataclass

import torch
from torch import nn

from outside_cases.case import Case, number
from outside_cases.observe import Seen, difference, noise_of, nudged, observe
from shardwise.capture import Captured
from shardwise.comm import Communicator
from shardwise.comm.in_process import Hung, Mismatch, World
from shardwise.errors import ShardwiseError
from shardwise.graph import LayerGraph
from shardwise.parallel import parallelize
from shardwise.plan import Plan
from shardwise.strategies import strategy_of
from shardwise.strategies.base import Split

RIGHT, WHOLE, REFUSED, EXPORT = "right and split", "right but whole", "refused", "no export"
WRONG, HUNG, TRACEBACK = "wrong", "hung", "traceback"
NOT_RUNNABLE, SLOW = "not runnable", "too slow"
CLASSES = (RIGHT, WHOLE, REFUSED, EXPORT, WRONG, HUNG, TRACEBACK, SLOW, NOT_RUNNABLE)
BAD = (WRONG, HUNG, TRACEBACK)
SEVERITY = (WHOLE, RIGHT, REFUSED, WRONG, HUNG, TRACEBACK)  # of plans; the worst is the case's

UNIFORM: tuple[dict[str, int], ...] = (
    {"n": 2}, {"h": 2}, {"f": 2}, {"c": 2}, {"n": 2, "h": 2}, {"w": 3}, {"h": 2, "w": 2},
    {"f": 3}, {"n": 3}, {"c": 2, "f": 2}, {"n": 5}, {"d": 2},
)  # fmt: skip

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    case: str
    kind: str
    reason: str = ""
    plan: str = ""
    seconds: float = 0.0


def attempt(case: Case, seed: int) -> Verdict:
    """The verdict about a case; never raises."""
    begin = time.perf_counter()
    try:
        kind, reason, plan = _attempt(case, number(case.name) + seed)
    except Exception as error:
        kind, reason, plan = TRACEBACK, _told(error), ""
    return Verdict(case.name, kind, reason, plan, time.perf_counter() - begin)


def _attempt(case: Case, seed: int) -> tuple[str, str, str]:
    if case.check is not None:
        wrong = case.check(seed)
        return (WRONG, wrong, "") if wrong else (WHOLE, "", "")
    assert case.build is not None
    module, inputs = case.build()
    pristine = copy.deepcopy(module)
    try:
        expected, backward = _reference(module, inputs, case)
    except Exception as error:
        if not case.must_fail:
            return NOT_RUNNABLE, _told(error), ""
        expected, backward = error, True
    else:
        if case.must_fail:
            return NOT_RUNNABLE, "torch does not raise", ""
    try:
        captured = {t: Captured(module, inputs, t) for t in _modes(case)}
        for exported in captured.values():
            exported.graph(inputs[0].shape[0])
    except ShardwiseError as error:
        refused = case.must_fail or not _export_fails(module, inputs)
        return (REFUSED if refused else EXPORT), str(error), ""
    except Exception as error:
        return TRACEBACK, "capture: " + _told(error), ""
    trial = _Trial(case, module, pristine, inputs, captured, expected, backward)
    worst, begin = (WHOLE, "", ""), time.perf_counter()
    for draw in range(case.num_plans):
        if draw and time.perf_counter() - begin > case.seconds / 4:
            break
        found = trial.run(seed + draw, uniform=draw % 2 == 0)
        worst = max(worst, found, key=lambda verdict: SEVERITY.index(verdict[0]))
        if worst[0] in BAD:
            return worst
    changed = trial.changed()
    return (WRONG, f"the model itself was changed: {changed}", "") if changed else worst


def _modes(case: Case) -> set[bool]:
    return {True, False} if case.and_eval else {True, case.training}


def _observe(model: nn.Module, inputs: Inputs, case: Case, backward: bool) -> Seen:
    return observe(model, inputs, case.training, backward, case.num_steps, case.and_eval)


def _export_fails(module: nn.Module, inputs: Inputs) -> bool:
    """Whether torch.export itself cannot take this model, with all sizes fixed."""
    try:
        torch.export.export(module, inputs, strict=False)
    except Exception:
        return True
    return False


def _reference(module: nn.Module, inputs: Inputs, case: Case) -> tuple[Seen, bool]:
    """What plain torch gives, with gradients where it has any; raises where it gives nothing."""

    def once(backward: bool) -> Seen:
        return _observe(copy.deepcopy(module), inputs, case, backward)

    backward = True
    try:
        seen = once(True)
    except (RuntimeError, NotImplementedError):
        seen, backward = once(False), False
    reason = difference(once(backward), seen)
    if reason is not None:
        raise RuntimeError(f"torch itself gives different results: {reason}")
    return seen, backward


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
    noise: dict[str, float] | None = None

    def graph(self, training: bool, batch: int) -> LayerGraph:
        return self.captured[training].graph(batch)

    def run(self, seed: int, uniform: bool) -> tuple[str, str, str]:
        """The verdict about one plan."""
        text = ""
        try:
            graph = self.graph(True, self.inputs[0].shape[0])
            plan = _plan(graph, seed, uniform)
            text = f"world {plan.world}, " + ", ".join(
                f"{name}: {config}" for name, config in plan.layers.items()
            )
            found = World(plan.world, seed).run(self._work, plan)
        except Exception as error:
            return *self._raised(error), text
        if isinstance(self.expected, Exception):
            return WRONG, f"no error where torch says: {_told(self.expected)}", text
        for rank, seen in enumerate(found):
            reason = self._difference(seen)
            if reason is not None:
                return WRONG, f"rank {rank}: {reason}", text
        return (RIGHT if _is_split(graph, plan) else WHOLE), "", text

    def changed(self) -> str | None:
        """What the model given to Shardwise does no longer do as before."""
        if isinstance(self.expected, Exception):
            return None
        return self._difference(_observe(self.module, self.inputs, self.case, self.backward))

    def _work(self, comm: Communicator, plan: Plan) -> Seen:
        model = parallelize(self.module, plan, comm=comm, graphs=self.graph)
        return _observe(model, self.inputs, self.case, self.backward)

    def _raised(self, error: Exception) -> tuple[str, str]:
        if isinstance(error, (Hung, Mismatch)):
            return HUNG, str(error)
        if isinstance(error, ShardwiseError):
            return REFUSED, str(error)
        if isinstance(self.expected, Exception) and str(error) == str(self.expected):
            return REFUSED, f"as torch: {error}"
        return TRACEBACK, _told(error)

    def _difference(self, seen: Seen) -> str | None:
        assert isinstance(self.expected, Seen)
        reason = difference(seen, self.expected, self.noise)
        if reason is not None and self.noise is None:
            self.noise = self._measure_noise(self.expected)
            reason = difference(seen, self.expected, self.noise)
        return reason

    def _measure_noise(self, expected: Seen) -> dict[str, float]:
        changed = []
        for seed in range(3):
            module = copy.deepcopy(self.pristine)
            with torch.no_grad():
                for tensor in module.parameters():
                    tensor.copy_(nudged(tensor, seed))
            inputs = tuple(nudged(x, seed) for x in self.inputs)
            changed.append(_observe(module, inputs, self.case, self.backward))
        return noise_of(changed, expected)


def _plan(graph: LayerGraph, seed: int, uniform: bool) -> Plan:
    draw = random.Random(seed)
    if uniform:
        return Plan.uniform(graph, **draw.choice(UNIFORM))
    return Plan.random(graph, draw.choice((2, 2, 3, 3, 4, 5)), seed)


def _is_split(graph: LayerGraph, plan: Plan) -> bool:
    """Whether some layer besides inputs lies on more than one rank."""
    for layer in graph.layers:
        if layer.op != "input":
            split = Split.of(layer, plan.layers[layer.name], plan.world)
            if sum(n > 0 for n in strategy_of(layer).output(split).numels) > 1:
                return True
    return False


def _told(error: BaseException) -> str:
    """The error's class, first line, and the last line of ours that it passed through."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/shardwise/" in f.filename]
    where = f" [{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].lineno}]" if ours else ""
    return f"{type(error).__name__}: {lines[0].strip()[:300]}{where}"

"""`parallelize`: an nn.Module that computes on many workers exactly what it computed on one."""

from __future__ import annotations

import copy
import types
from contextlib import nullcontext
from functools import cache
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from shardwise.cluster.cluster import Cluster
from shardwise.comm import Communicator
from shardwise.comm.given import communicator_of
from shardwise.errors import PlanError, ShardwiseError
from shardwise.model.capture import Graphs, ModelGraphs
from shardwise.model.hooks import check_hooks, drop_captured
from shardwise.model.torch_export import check_not_parallel
from shardwise.modules import copy_structure
from shardwise.plans.gradient_schedule import Engine
from shardwise.plans.plan import Plan
from shardwise.runtime.agreement import agree_on, agree_to_start, checksum, together
from shardwise.runtime.handle import Handle
from shardwise.runtime.optimizer_checks import note_originals
from shardwise.runtime.originals import warn_when_saved
from shardwise.runtime.passes import run
from shardwise.runtime.splitting import split_tensors
from shardwise.runtime.state import State
from shardwise.runtime.uninitialized import check_attributes, valued_names
from shardwise.runtime.weights import close_tables, guard_blocks, whole_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@torch.inference_mode(False)  # what is made here may be trained later
def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    output: Literal["full", "local", "one"] = "full",
    group: ProcessGroup | Literal["world"] | None = "world",
    mesh: DeviceMesh | None = None,
    comm: Communicator | None = None,
    graphs: Graphs | None = None,
    gradients: Engine | str | None = None,
    cluster: Cluster | str | None = None,
    precision: Literal["bf16", "fp16"] | None = None,
    compile: bool | str = False,
) -> ParallelModel:
    """Wraps a model so that it runs as the plan says; the model itself is left as it was.

    It runs on all ranks, or on those of a process `group` or a 1-D `mesh`, which alone call it, and
    starts from the first one's parameters and buffers; those on the meta device must be loaded
    first (`load_weights`). With output="full" every rank returns the whole output and computes the
    same loss; with "local" each its own part; with "one", for inference, the first all and the
    others None. `graphs` saves capturing the model again; `gradients` says when they are summed
    ("chunks:9", or an Engine), a `cluster` by which algorithms (`shardwise probe --sums`). With
    precision="bf16" or "fp16" layers compute as under torch.autocast; parameters, gradients and
    outputs stay float32. compile=True, or a mode of torch.compile, joins layers between messages.

    >>> model = parallelize(nn.Sequential(nn.Linear(4, 2)), plan)
    """
    comm = communicator_of(comm, group, mesh, plan.world).summing_as(cluster)
    state, refusal = None, None
    try:
        _check(model, plan, comm)
        graphs = graphs or _captured(model, plan)
        state = State(plan, output, comm, graphs, Engine.of(gradients), precision, compile)
    except Exception as error:  # all ranks must hear of it before they wait for this one
        refusal = error
    agree_to_start(refusal, state.facts if state else {}, comm)
    assert state is not None
    valued = valued_names(model, comm)
    with together(comm, "parallelize"):
        return _wrap(model, state, valued)


def _captured(model: nn.Module, plan: Plan) -> ModelGraphs:
    """The captures that a plan was made with, if they are of this model as it is, or new ones."""
    origin = plan.findings.costs.graph.origin if plan.findings is not None else None
    known = origin.take(model, plan.inputs, plan.input_dtypes) if origin is not None else None
    sizes_vary = bool(plan.others) or not plan.training
    return known or ModelGraphs(model, plan.inputs, plan.input_dtypes, sizes_vary)


def _check(model: nn.Module, plan: Plan, comm: Communicator) -> None:
    check_hooks(model)
    check_attributes(model)
    check_not_parallel(model)
    if plan.world != comm.size:
        here = "are running; start" if comm.whole else "are in the group; give it one of"
        raise PlanError(
            f"the plan is for {plan.world} workers, but {comm.size} {here} {plan.world}, or make a "
            f"plan for {comm.size}"
        )


def of(model: nn.Module) -> Handle:
    """What Shardwise knows of a parallel model, and can do with it, whatever the model's own names.

    >>> of(model).plan, of(model).clip_grad_norm_(1.0)
    """
    state = model.__dict__.get("_shardwise")
    if state is None:
        raise ShardwiseError(f"a {type(model).__name__} that parallelize has not made has no plan")
    return Handle(model, state)


class NoModule(ShardwiseError, AttributeError):
    """What DDP has, and code for DDP asks for."""


PUBLIC = frozenset(name for name in dir(Handle) if not name.startswith("_"))


class ParallelModel(nn.Module):
    """A model that runs as its plan says: this rank's part of it.

    It is also of the original's class, with all its names, children, attributes and methods. What
    Shardwise adds is in `shardwise.of(model)`, and here where the original has not that name.
    """

    def __init_subclass__(cls) -> None:
        """Classes that are made here are none of those that the original's class may note."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the global batch, given whole on every rank.

        Or, with `batch=` so many samples, for parts: each rank gives its own, see `input_box`. Of
        images of another size than the plan's, `batch` is the shape of the whole input.
        """
        if "_shardwise" not in self.__dict__:  # a slice of a sequence, say, which is a new module
            return super().forward(*args, **kwargs)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            raise ShardwiseError(
                "a parallel model cannot be exported or traced: its passes are messages to other "
                "ranks; export the original, with the state_dict() of the parallel one"
            )
        state: State = self._shardwise
        batch = kwargs.pop("_shardwise_batch", None)  # whatever the model's own arguments are
        if "batch" not in state.arguments.parameters:
            batch = kwargs.pop("batch", batch)
        try:
            inputs, refusal = _inputs(state.arguments, args, kwargs), None
        except ShardwiseError as error:
            inputs, refusal = (), error
        return run(state, inputs, batch, refusal)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The full state, by the original names, the same on every rank; all ranks must call it."""
        state: State | None = self.__dict__.get("_shardwise")
        if state is None:
            return super().state_dict(*args, **kwargs)
        with together(state.comm, "state_dict"):
            state.gradients.flush()
            state.blocks.check_values()
            with whole_tensors(self, state.blocks.layouts, state.comm):
                return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Loads a full state, of any plan or of the original model; all ranks must do it."""
        state: State | None = self.__dict__.get("_shardwise")
        if state is not None:
            with together(state.comm, "load_state_dict"):
                state.gradients.flush()
                own = {name: x for name, x in state_dict.items() if name.startswith(prefix)}
                content = checksum([[*own], [*map(checksum, own.values())]])
                agree_on(content, "loads another state", state.comm)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves or casts all tensors; those without values have none afterwards either."""
        state: State | None = self.__dict__.get("_shardwise")
        with nullcontext() if state is None else state.blocks.keeping_uninitialized():
            return super()._apply(fn, recurse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in PUBLIC and "_shardwise" in self.__dict__:
                return getattr(of(self), name)
            if name == "module":  # a loop that unwraps while there is one must come to an end
                raise NoModule("a parallel model is the module itself: leave out .module") from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and "_shardwise" in self.__dict__:
            raise ShardwiseError(
                "the forward of a parallel model cannot be replaced; change that of the original "
                "and make it parallel again"
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *PUBLIC})

    def __copy__(self) -> Any:
        twin = type(self).__new__(type(self))
        twin.__dict__ = dict(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with tensors of its own, under the same plan: what averages of weights need."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        state: State | None = self.__dict__.get("_shardwise")
        if state is not None:
            state.gradients.flush()
        own = {name: value for name, value in self.__dict__.items() if name != "_shardwise"}
        twin.__dict__ = copy.deepcopy(own, memo)
        if state is not None:
            twin.__dict__["_shardwise"] = state.twin(twin)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardwiseError(
            "a parallel model is one rank's part of a model and cannot be pickled; save its "
            "state_dict(), which is whole, or a checkpoint (shardwise.checkpoint)"
        )


@cache
def _parallel(kind: type[nn.Module]) -> type[ParallelModel]:
    """The class of parallel models whose original is of this class."""

    def describe(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": kind.__module__, "__doc__": kind.__doc__}
        namespace["forward"] = torch.compiler.disable(ParallelModel.forward)  # is compiled already

    return types.new_class(f"Parallel{kind.__name__}", (ParallelModel, kind), exec_body=describe)


def _wrap(model: nn.Module, state: State, valued: list[str]) -> ParallelModel:
    """A copy of the model whose tensors are this rank's blocks of rank 0's."""
    state.comm.prepare(())
    root: Any = copy_structure(model)
    root.__dict__.pop("forward", None)  # the model's own, which was captured
    drop_captured(root)
    root.__class__ = _parallel(type(model))
    blank = split_tensors(root, state.blocks.layouts, state.comm, valued)
    guard_blocks(root, state.blocks.layouts, state.comm.rank)
    close_tables(root)
    state.arguments = _arguments(model)
    root.__dict__["_shardwise"] = state
    state.adopt(root)
    state.blocks.lack_values(blank)
    note_originals(model, root)
    warn_when_saved(model, root)
    return root


# -- arguments -------------------------------------------------------------------------------------


def _arguments(model: nn.Module) -> Signature:
    """How the original model is called."""
    try:
        return signature(model.forward)
    except ValueError:  # not written in Python
        return signature(lambda *inputs: None)


def _inputs(
    known: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The input tensors in their order, whether they are given by place or by name."""
    if not kwargs and all(isinstance(value, torch.Tensor) for value in args):
        return args
    try:
        given = known.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ShardwiseError(f"the model's forward cannot be called like this: {error}") from None
    inputs: list[torch.Tensor] = []
    left_out = ""
    for name, parameter in known.parameters.items():
        values = given.get(name, parameter.default)
        values = values if parameter.kind is Parameter.VAR_POSITIONAL else (values,)
        for value in () if values is Parameter.empty else values:
            if isinstance(value, torch.Tensor) and not left_out:
                inputs.append(value)
            elif isinstance(value, torch.Tensor):
                raise ShardwiseError(
                    f"argument {name!r} is given without {left_out!r}: a parallel model takes the "
                    "tensors that it was captured with"
                )
            elif name in given and not _is_same(value, parameter.default):
                raise ShardwiseError(
                    f"argument {name!r} is {value!r}, and must be a tensor: all other arguments of "
                    "a parallel model keep the values that it was captured with"
                )
            else:
                left_out = left_out or name
    return tuple(inputs)


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and value == default)

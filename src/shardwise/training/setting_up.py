"""From settings to the parts of a run: samples, model, weights, plan, and whether bf16 works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from shardwise.caffe.loading import CAFFEMODEL, load_caffemodel
from shardwise.caffe.net import CaffeNet
from shardwise.cluster.cluster import Cluster
from shardwise.comm import Communicator
from shardwise.data import Augment, Source, flips
from shardwise.errors import ShardwiseError
from shardwise.graph.layer_graph import LayerGraph
from shardwise.planner.costs import Costs
from shardwise.planner.layer_costs import Training
from shardwise.planner.layer_times import timer_for
from shardwise.plans.plan import Plan
from shardwise.report.run_report import PLAN
from shardwise.specs.model_spec import CAFFE, ModelSpec
from shardwise.specs.plan_spec import PlanSpec
from shardwise.specs.request import planned

from .settings import Settings

DTYPES = {"float32": torch.float32, "bf16": torch.float32, "float64": torch.float64}  # of weights
VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
TRIAL = "import torch; torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()"


def make_augment(settings: Settings, source: Source) -> Augment:
    return Augment(
        flip=flips(settings.flip, len(source.shape) - 1) if settings.flip else (),
        size=settings.crop,
        padding=settings.padding,
        mean=settings.mean,
        std=settings.std,
    )


def build_model(settings: Settings, source: Source) -> nn.Module:
    """The model with its first weights; the zoo's have as many classes as the samples."""
    options = dict(settings.options)
    if settings.model.endswith(CAFFE):
        options["shape"] = make_augment(settings, source).out_shape(source.shape)
    elif ":" not in settings.model:
        options.setdefault("num_classes", len(source.classes))
    torch.manual_seed(settings.seed)
    model = ModelSpec(settings.model, options=options).build().to(DTYPES[settings.precision])
    if settings.weights is not None:
        _load_weights(model, Path(settings.weights))
    return model


def _load_weights(model: nn.Module, path: Path) -> None:
    """A plain state, as `shardwise export` writes it, or Caffe's; nothing pickled is run."""
    if path.suffix == CAFFEMODEL:
        if not isinstance(model, CaffeNet):
            raise ShardwiseError(f"the weights {str(path)!r} are for a net of a prototxt file")
        load_caffemodel(model, path)
        return
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(str(path))
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = " ".join(line.strip() for line in lines[:2])
        raise ShardwiseError(f"the weights {str(path)!r} cannot be loaded: {reason}") from None


def choose_plan(
    settings: Settings, graph: LayerGraph, comm: Communicator, resumed: Path | None
) -> Plan:
    """The plan that rank 0 finds or reads, on every rank; a run that goes on keeps its plan."""
    found = _found(settings, graph, comm.size, resumed) if comm.rank == 0 else None
    text = comm.gather_objects(found.to_json() if found is not None else None)[0]
    return found if found is not None else Plan.from_json(text)


def _found(settings: Settings, graph: LayerGraph, world: int, resumed: Path | None) -> Plan:
    def best() -> Plan:
        if resumed is not None and (resumed / PLAN).exists():
            before = Plan.load(resumed / PLAN)
            if before.world == world and before.inputs[0][0] == graph.batch:
                before.check(graph)
                return before
        return planned([make_costs(settings, graph, world)], settings.gradients, settings.memory)

    return PlanSpec.parse(settings.plan, settings.split).find(graph, world, best)


def make_costs(settings: Settings, graph: LayerGraph, world: int) -> Costs:
    """What plans for this run would cost."""
    machines = Cluster.load(settings.cluster).with_workers(world)
    training = Training(
        itemsize=DTYPES[settings.precision].itemsize,
        states=2 if settings.optimizer.startswith("adam") else 1,
        output=settings.output,
        shard_state=settings.shard_state,
    )
    return Costs(graph, machines, timer_for(machines, graph), training)


def check_bf16(device: torch.device) -> None:
    """Raises where a product of matrices would end the process.

    A processor may name AMX units that its operating system, or the sandbox around it, does not let
    programs use; oneDNN uses them all the same. So another process tries.
    """
    if device.type != "cpu" or VARIABLE in os.environ or not torch.cpu._is_amx_tile_supported():
        return
    if subprocess.run([sys.executable, "-c", TRIAL], capture_output=True).returncode < 0:
        raise ShardwiseError(
            "precision=bf16: this machine does not let programs use the AMX units that its "
            f"processor names; set {VARIABLE}={WITHOUT_AMX} in the environment"
        )

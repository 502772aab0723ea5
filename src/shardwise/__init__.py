"""Trains any PyTorch CNN in parallel over every dimension, exactly as one device would."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shardwise.version import __version__

if TYPE_CHECKING:
    from shardwise import data, zoo
    from shardwise.checkpoint.weight_files import load_weights
    from shardwise.cluster.cluster import Cluster
    from shardwise.errors import CaptureError, LostPeer, PlanError, ShardwiseError, WorkerError
    from shardwise.geometry.grid import Config
    from shardwise.graph.layer_graph import Layer, LayerGraph
    from shardwise.kernels.accelerate import accelerate
    from shardwise.kernels.ops import conv
    from shardwise.kernels.tuner import tuning
    from shardwise.launch.launchers import init_from_environment, under_launcher
    from shardwise.launch.workers import run_local
    from shardwise.libraries.autoencoders import parallelize_decoder
    from shardwise.model.capture import capture
    from shardwise.planner.planned import plan
    from shardwise.planner.simulate import simulate
    from shardwise.plans.gradient_schedule import Engine
    from shardwise.plans.plan import Plan
    from shardwise.plans.trace import Trace
    from shardwise.runtime.delayed_optimizer import optimizer
    from shardwise.runtime.handle import Handle
    from shardwise.runtime.parallel import ParallelModel, of, parallelize
    from shardwise.training.settings import Settings
    from shardwise.training.trainer import Trainer, train

HOMES = {  # of public names; each is imported when it is first used, as torch.export takes seconds
    "checkpoint.weight_files": ("load_weights",),
    "cluster.cluster": ("Cluster",),
    "errors": ("CaptureError", "LostPeer", "PlanError", "ShardwiseError", "WorkerError"),
    "geometry.grid": ("Config",),
    "graph.layer_graph": ("Layer", "LayerGraph"),
    "kernels.accelerate": ("accelerate",),
    "kernels.ops": ("conv",),
    "kernels.tuner": ("tuning",),
    "launch.launchers": ("init_from_environment", "under_launcher"),
    "launch.workers": ("run_local",),
    "libraries.autoencoders": ("parallelize_decoder",),
    "model.capture": ("capture",),
    "planner.planned": ("plan",),
    "planner.simulate": ("simulate",),
    "plans.gradient_schedule": ("Engine",),
    "plans.plan": ("Plan",),
    "plans.trace": ("Trace",),
    "runtime.delayed_optimizer": ("optimizer",),
    "runtime.handle": ("Handle",),
    "runtime.parallel": ("ParallelModel", "of", "parallelize"),
    "training.settings": ("Settings",),
    "training.trainer": ("Trainer", "train"),
}

__all__ = [
    "CaptureError",
    "Cluster",
    "Config",
    "Engine",
    "Handle",
    "Layer",
    "LayerGraph",
    "LostPeer",
    "ParallelModel",
    "Plan",
    "PlanError",
    "Settings",
    "ShardwiseError",
    "Trace",
    "Trainer",
    "WorkerError",
    "__version__",
    "accelerate",
    "capture",
    "conv",
    "data",
    "init_from_environment",
    "load_weights",
    "of",
    "optimizer",
    "parallelize",
    "parallelize_decoder",
    "plan",
    "run_local",
    "simulate",
    "train",
    "tuning",
    "under_launcher",
    "zoo",
]


def __getattr__(name: str) -> Any:
    for home, names in HOMES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return found
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):  # a folder, such as `data`
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

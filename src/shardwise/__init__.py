"""Trains any PyTorch CNN in parallel over every dimension, exactly as one device would."""

from shardwise import data, zoo
from shardwise.accelerate import accelerate
from shardwise.capture import capture
from shardwise.checkpoint import load_weights
from shardwise.cluster import Cluster
from shardwise.comm import LostPeer
from shardwise.config import Config
from shardwise.engine import Engine
from shardwise.errors import CaptureError, PlanError, ShardwiseError
from shardwise.graph import Layer, LayerGraph
from shardwise.handle import Handle
from shardwise.kernels.ops import conv
from shardwise.kernels.tuner import tuning
from shardwise.launch import WorkerError, init_from_environment, run_local, under_launcher
from shardwise.optimizer import optimizer
from shardwise.parallel import ParallelModel, of, parallelize
from shardwise.plan import Plan
from shardwise.planning import plan
from shardwise.simulate import simulate
from shardwise.trace import Trace
from shardwise.training import Settings, Trainer, train
from shardwise.version import __version__

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
    "plan",
    "run_local",
    "simulate",
    "train",
    "tuning",
    "under_launcher",
    "zoo",
]

"""Trains any PyTorch CNN in parallel over every dimension, exactly as one device would."""

from shardwise import zoo
from shardwise.capture import capture
from shardwise.config import Config
from shardwise.errors import CaptureError, PlanError, ShardwiseError
from shardwise.graph import Layer, LayerGraph
from shardwise.launch import WorkerError, init_from_environment, run_local, under_launcher
from shardwise.parallel import ParallelModel, parallelize
from shardwise.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Config",
    "Layer",
    "LayerGraph",
    "ParallelModel",
    "Plan",
    "PlanError",
    "ShardwiseError",
    "WorkerError",
    "capture",
    "init_from_environment",
    "parallelize",
    "run_local",
    "under_launcher",
    "zoo",
]

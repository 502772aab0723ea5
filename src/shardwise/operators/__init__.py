"""One class per operator: the single description that planner, simulator and runtime read."""

from importlib import import_module
from pkgutil import iter_modules

from shardwise.operators.calls import Call, Request
from shardwise.operators.splits import LABEL_AXES, Grid, Split
from shardwise.operators.strategy import (
    STRATEGIES,
    Gradients,
    Local,
    Need,
    Strategy,
    operator,
)

__all__ = [
    "LABEL_AXES",
    "STRATEGIES",
    "Call",
    "Gradients",
    "Grid",
    "Local",
    "Need",
    "Request",
    "Split",
    "Strategy",
    "operator",
]

for _module in iter_modules(__path__):  # a new operator is a file here, and a case in tests
    import_module(f"{__name__}.{_module.name}")

"""Training runs: from settings to trained weights, checkpoints, metrics and a report."""

from .journal import Epoch
from .lars import Lars
from .settings import Settings, read_settings
from .start import train
from .trainer import Trainer

__all__ = ["Epoch", "Lars", "Settings", "Trainer", "read_settings", "train"]

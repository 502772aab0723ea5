"""Networks of the five papers, and two more, as plain single-device modules.

>>> from shardwise import zoo
>>> model = zoo.build("resnet34_cifar")
>>> zoo.input_shape("resnet34_cifar", batch=64)
(64, 3, 32, 32)
"""

from .catalog import ALIASES, MODELS, Entry, build, entry, input_shape, names

__all__ = ["ALIASES", "MODELS", "Entry", "build", "entry", "input_shape", "names"]

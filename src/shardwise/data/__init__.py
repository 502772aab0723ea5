"""Data: sources of samples, stores, and a loader that reads a rank's box of every batch.

>>> from shardwise.data import Loader, open_source
>>> for batch in Loader(open_source("digits"), batch=512):
...     print(batch.x.shape)
torch.Size([512, 1, 8, 8])
torch.Size([512, 1, 8, 8])
torch.Size([413, 1, 8, 8])
"""

from .arrays import Arrays, digits, npy
from .augment import Augment, flips
from .chunked import Hdf5, Zarr
from .cifar import Cifar10
from .image_folder import ImageFolder
from .loader import Batch, Loader
from .nifti import Nifti
from .opening import open_source
from .order import Batches, shuffled
from .pack import pack
from .source import Source, Subset, bad_samples, without
from .store import Store
from .synthetic import Synthetic
from .tars import Tars

__all__ = [
    "Arrays",
    "Augment",
    "Batch",
    "Batches",
    "Cifar10",
    "Hdf5",
    "ImageFolder",
    "Loader",
    "Nifti",
    "Source",
    "Store",
    "Subset",
    "Synthetic",
    "Tars",
    "Zarr",
    "bad_samples",
    "digits",
    "flips",
    "npy",
    "open_source",
    "pack",
    "shuffled",
    "without",
]

"""The native library: found, loaded and called through ctypes; absent where nothing was built."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from shardwise.errors import ShardwiseError

DIRECTIONS = ("fwd", "dx", "dw")
WAYS = ("forward", "backward")
DONE, UNSUPPORTED, NO_MEMORY, FAILED = range(4)
INTERFACE = 4  # of native/api.cpp
FOLDER = Path(__file__).parent
ISAS = ("avx512", "avx2", "portable")  # a CPU that runs one runs those after it
CAPABILITIES = {"AVX512": "avx512", "AVX2": "avx2"}  # as torch names what the CPU has


def int64s(*names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    """The fields of a structure that the library reads."""
    return [(name, ctypes.c_int64) for name in names]


class ConvProblem(ctypes.Structure):
    """One convolution as the library reads it: x_NCDHW, w_FCTRS, y_NFOPQ."""

    _fields_ = int64s(
        *("n", "c", "d", "h", "w", "f", "t", "r", "s", "o", "p", "q"),
        *("stride_d", "stride_h", "stride_w", "pad_d", "pad_h", "pad_w"),
        *("dilation_d", "dilation_h", "dilation_w"),
        *("groups", "last", "filter_last", "relu", "threads"),
    )


def library_names() -> tuple[str, ...]:
    """The builds to use, best first: those that this CPU can run and SHARDWISE_ISA does not forbid.

    SHARDWISE_ISA names the widest instructions to use; with `none` there are no kernels of ours.
    """
    widest = os.environ.get("SHARDWISE_ISA") or ISAS[0]
    if widest == "none":
        return ()
    if widest not in ISAS:
        raise ShardwiseError(f"SHARDWISE_ISA={widest} is not one of {', '.join(ISAS)}, none")
    here = CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ISAS[-1])
    return ISAS[max(ISAS.index(widest), ISAS.index(here)) :]


@dataclass(frozen=True)
class Library:
    """The loaded library and the numbers of its kernels."""

    lib: ctypes.CDLL
    numbers: dict[str, int]

    @property
    def isa(self) -> str:
        return self.lib.sw_cpu().decode()

    def workspace(self, kernel: str, direction: str, double: bool, problem: ConvProblem) -> int:
        """Bytes this kernel takes from the arena, or -1 if it does not take the problem."""
        if kernel not in self.numbers:
            return -1
        where = DIRECTIONS.index(direction)
        return self.lib.sw_workspace(self.numbers[kernel], where, double, ctypes.byref(problem))

    def run(
        self,
        kernel: str,
        direction: str,
        problem: ConvProblem,
        tensors: tuple[torch.Tensor | None, ...],
        out: torch.Tensor,
        keep: bool = True,
        columns: torch.Tensor | None = None,
    ) -> int:
        """Computes `out` from x, w, y and bias; the status says whether it was possible.

        BASE takes its im2col matrix from `columns`, if given.
        """
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        return self.lib.sw_run(
            self.numbers[kernel],
            DIRECTIONS.index(direction),
            out.dtype == torch.float64,
            ctypes.byref(problem),
            *pointers,
            out.data_ptr(),
            None if columns is None else columns.data_ptr(),
            keep,
        )


def load(path: Path) -> Library:
    lib = ctypes.CDLL(str(path))
    if not hasattr(lib, "sw_interface") or lib.sw_interface() != INTERFACE:
        raise OSError("it is of another version; `python hatch_build.py` makes it anew")
    pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    problem = ctypes.POINTER(ConvProblem)
    lib.sw_kernel_name.restype = ctypes.c_char_p
    lib.sw_cpu.restype = ctypes.c_char_p
    lib.sw_workspace.argtypes = [number, number, number, problem]
    lib.sw_workspace.restype = long
    lib.sw_run.argtypes = [number, number, number, problem, *[pointer] * 6, number]
    lib.sw_im2col.argtypes = [number, problem, pointer, pointer]
    lib.sw_arena_peak.restype = long
    lib.sw_use_runtime.argtypes = [pointer] * 3
    real = ctypes.c_double
    lib.sw_norm_forward.argtypes = [number, *[pointer] * 8, real, real, number, pointer]
    lib.sw_norm_backward.argtypes = [number, *[pointer] * 7, number, *[pointer] * 3]
    lib.sw_norm_conv_forward.argtypes = [number, *[pointer] * 8, real, real, *[pointer] * 3]
    lib.sw_norm_conv_backward.argtypes = [number, *[pointer] * 12]
    lib.sw_pool_forward.argtypes = lib.sw_pool_backward.argtypes = [number, *[pointer] * 4]
    ways = (f"{kind}_{way}" for kind in ("norm", "norm_conv", "pool") for way in WAYS)
    for always in ("im2col", *ways):
        getattr(lib, f"sw_{always}").errcheck = _check
    numbers: dict[str, int] = {}
    while (name := lib.sw_kernel_name(len(numbers))) is not None:
        numbers[name.decode()] = len(numbers)
    _share_threads(lib)
    return Library(lib, numbers)


def _check(status: int, function: Callable[..., object], _arguments: tuple[object, ...]) -> int:
    """Raises where a kernel that takes any problem did not compute it."""
    if status == DONE:
        return status
    name = getattr(function, "__name__", "a kernel")
    if status == NO_MEMORY:
        raise MemoryError(
            f"{name}: no memory is left for its workspace; a smaller batch needs less"
        )
    raise RuntimeError(f"{name} failed with status {status}")


def _share_threads(lib: ctypes.CDLL) -> None:
    """Hands over the OpenMP runtime that torch has loaded: a second one would spin beside it.

    Without one (another runtime, SHARDWISE_THREADS=own) the library's own pool, which sleeps.
    """
    lib.sw_use_runtime(None, None, None)
    if os.environ.get("SHARDWISE_THREADS") == "own" or not os.path.exists("/proc/self/maps"):
        return
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    if len(paths) == 1:
        gomp = ctypes.CDLL(paths.pop())
        entries = (gomp.GOMP_parallel, gomp.omp_get_thread_num, gomp.omp_get_num_threads)
        lib.sw_use_runtime(*(ctypes.cast(entry, ctypes.c_void_p) for entry in entries))


@cache
def library() -> Library | None:
    """The library, or None where none is allowed, or, said once, none was built or loads."""
    names, forced = library_names(), os.environ.get("SHARDWISE_LIBRARY")
    paths = [Path(forced)] if forced else [FOLDER / f"libshardwise_{name}.so" for name in names]
    for path in paths:
        if path.exists():
            try:
                return load(path)
            except (OSError, AttributeError) as error:
                warnings.warn(f"{path.name} does not load ({error})", stacklevel=2)
    if paths:
        warnings.warn(
            "shardwise's native kernels, which are compiled where it is installed with a C++ "
            "compiler, are not there: convolutions run on PyTorch's own operators",
            stacklevel=2,
        )
    return None

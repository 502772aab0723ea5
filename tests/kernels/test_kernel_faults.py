"""A kernel that finds no memory says so; it neither ends the process nor leaves numbers behind."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from hatch_build import compiler

from kept_columns import KeptColumns
from shardwise.kernels import native
from shardwise.kernels.timed_layers import Images, Windows

ROOT = Path(__file__).parents[2]
HUGE = 1 << 50  # channels: more numbers than there is memory for

needs_library = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def test_exceptions_of_any_thread_become_a_status_and_blocks_come_back(tmp_path: Path) -> None:
    if not (ROOT / "native").exists() or (found := compiler()) is None:
        pytest.skip("no sources or no compiler here")
    program = tmp_path / "faults"
    flags = ["-std=c++17", "-pthread", "-fopenmp", f"-I{ROOT / 'native'}", "-o", str(program)]
    command = [found, *flags, str(ROOT / "tests" / "native_faults.cpp")]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert subprocess.run([program], timeout=60).returncode == 0


@needs_library
def test_a_norm_without_memory_is_a_memory_error() -> None:
    lib, images = native.library(), Images(1, HUGE, 1, 0, 1)
    assert lib is not None
    with pytest.raises(MemoryError, match="sw_norm_forward: no memory is left"):
        lib.lib.sw_norm_forward(0, ctypes.byref(images), *[None] * 7, 0.1, 1e-5, 0, None)
    with pytest.raises(MemoryError, match="sw_norm_backward: no memory is left"):
        lib.lib.sw_norm_backward(0, ctypes.byref(images), *[None] * 6, 0, *[None] * 3)


@needs_library
def test_a_pool_without_memory_is_a_memory_error() -> None:
    lib, windows = native.library(), Windows(1, 1, 1, 1, 1, HUGE, 1, 1, 1, 1, 0, 0, 1)
    assert lib is not None
    with pytest.raises(MemoryError, match="sw_pool_forward: no memory is left"):
        lib.lib.sw_pool_forward(0, ctypes.byref(windows), None, None, None)


@needs_library
@pytest.mark.parametrize(
    ("status", "error"), [(native.NO_MEMORY, MemoryError), (native.UNSUPPORTED, RuntimeError)]
)
def test_base_raises_where_it_computed_nothing(
    status: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.Library, "run", lambda *_: status)
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    with pytest.raises(error, match="BASE, fwd"):
        KeptColumns.apply(x, w, None, ((1, 1), (0, 0), (1, 1), 1))


@needs_library
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "INTERFACE", -1)
    native.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="of another version; `python hatch_build.py` makes"):
            assert native.library() is None
    finally:
        native.library.cache_clear()

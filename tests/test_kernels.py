"""Every native kernel, in every direction, computes what sums in float64 give."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from convolutions import CASES, check
from shardwise.kernels import native

ROOT = Path(__file__).parent.parent
NUM_SHAPES = 170  # of each kernel and direction: more than 3,000 in all

needs_library = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@needs_library
@pytest.mark.parametrize(("kernel", "direction"), CASES)
def test_a_kernel_equals_the_reference_on_random_shapes(kernel: str, direction: str) -> None:
    assert check(kernel, direction, seed=1, count=NUM_SHAPES) <= 1


def test_there_are_at_least_3000_random_shapes() -> None:
    assert NUM_SHAPES * len(CASES) >= 3000


def run_convolutions(num_shapes: int, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests" / "convolutions.py"), str(num_shapes)]
    path = os.pathsep.join(map(str, [Path(native.FOLDER).parent.parent, *sys.path]))
    variables = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)


@needs_library
@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_the_builds_for_other_cpus_are_right_too(isa: str) -> None:
    if not (native.FOLDER / f"libshardwise_{isa}.so").exists():
        pytest.skip(f"no {isa} build")
    if isa != "portable" and isa not in native.library_names():
        pytest.skip(f"this CPU has no {isa}")
    done = run_convolutions(12, SHARDWISE_ISA=isa)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_library
def test_the_library_has_threads_of_its_own_where_torch_lends_none() -> None:
    done = run_convolutions(6, SHARDWISE_THREADS="own")
    assert done.returncode == 0, done.stderr[-2000:]


@needs_library
def test_no_kernel_reads_or_writes_outside_its_buffers(tmp_path: Path) -> None:
    """AddressSanitizer on fewer shapes; it also fences the buffers inside a workspace."""
    build = ROOT / "hatch_build.py"
    compiler = sysconfig.get_config_var("CXX") or "c++"
    runtime = subprocess.run(
        [compiler.split()[0], "-print-file-name=libasan.so"], capture_output=True, text=True
    )
    if not build.exists() or "/" not in runtime.stdout:
        pytest.skip("no sources or no AddressSanitizer here")
    made = subprocess.run(
        [sys.executable, str(build), "--sanitize", str(tmp_path)], capture_output=True, text=True
    )
    assert made.returncode == 0 and made.stdout.strip(), made.stderr
    done = run_convolutions(
        4,
        SHARDWISE_LIBRARY=made.stdout.strip(),
        LD_PRELOAD=runtime.stdout.strip(),
        ASAN_OPTIONS="detect_leaks=0",
    )
    assert done.returncode == 0, done.stderr[-3000:]

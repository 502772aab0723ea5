"""Every native kernel, in every direction and build, computes what sums in float64 give."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatch_build import compiler

from convolutions import CASES, ISAS, SEED, check, chosen
from shardwise.errors import ShardwiseError
from shardwise.kernels import native

ROOT = Path(__file__).parents[2]
NUM_SHAPES, NUM_SHAPES_DEEP = 30, 170  # of each kernel and direction

needs_library = pytest.mark.skipif(not ISAS, reason="no native kernels here")


@pytest.fixture(scope="module", autouse=True)
def sanitized_build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen | None]:
    """The last test needs it: the other core compiles while the tests before run."""
    build = ROOT / "hatch_build.py"
    if not ISAS or not build.exists() or sanitizer() is None:
        yield None
        return
    folder = str(tmp_path_factory.mktemp("sanitized"))
    command = [sys.executable, str(build), "--sanitize", folder, ISAS[0]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as building:
        yield building
        building.kill()


def sanitizer() -> str | None:
    """The runtime of AddressSanitizer, of the compiler that hatch_build.py uses."""
    if (found := compiler()) is None:
        return None
    command = [found, "-print-file-name=libasan.so"]
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return path if "/" in path else None


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kernel", "direction"), CASES)
def test_a_kernel_equals_the_reference_on_random_shapes(
    kernel: str, direction: str, isa: str
) -> None:
    with chosen(SHARDWISE_ISA=isa):
        assert check(kernel, direction, NUM_SHAPES) <= 1


@needs_library
@pytest.mark.deep
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kernel", "direction"), CASES)
def test_a_kernel_equals_the_reference_on_many_random_shapes(
    kernel: str, direction: str, isa: str
) -> None:
    assert NUM_SHAPES_DEEP * len(CASES) >= 3000
    with chosen(SHARDWISE_ISA=isa):
        assert check(kernel, direction, NUM_SHAPES_DEEP) <= 1


@needs_library
@pytest.mark.parametrize(("kernel", "direction"), CASES)
def test_the_library_has_threads_of_its_own_where_torch_lends_none(
    kernel: str, direction: str
) -> None:
    with chosen(SHARDWISE_THREADS="own"):
        assert check(kernel, direction, 2) <= 1
    native.library()  # with torch's threads again


@pytest.mark.parametrize(
    ("torch_says", "widest", "expected"),
    [
        ("AVX512", None, ("avx512", "avx2", "portable")),
        ("AVX512", "avx2", ("avx2", "portable")),
        ("AVX2", None, ("avx2", "portable")),
        ("AVX2", "avx512", ("avx2", "portable")),
        ("AVX2", "portable", ("portable",)),
        ("DEFAULT", "avx2", ("portable",)),
        ("SVE256", None, ("portable",)),
        ("AVX2", "none", ()),
    ],
)
def test_only_instructions_that_the_cpu_has_and_the_user_allows_are_used(
    torch_says: str, widest: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: torch_says)
    monkeypatch.delenv("SHARDWISE_ISA", raising=False)
    if widest is not None:
        monkeypatch.setenv("SHARDWISE_ISA", widest)
    assert native.library_names() == expected


def test_an_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_ISA", "avx9")
    with pytest.raises(ShardwiseError, match="SHARDWISE_ISA=avx9 is not one of avx512, avx2"):
        native.library_names()


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_the_build_that_is_asked_for_is_the_one_that_runs(isa: str) -> None:
    with chosen(SHARDWISE_ISA=isa):
        lib = native.library()
        assert lib is not None and lib.isa in (isa, "neon")


@needs_library
def test_no_kernel_reads_or_writes_outside_its_buffers(
    sanitized_build: subprocess.Popen | None,
) -> None:
    """AddressSanitizer on fewer shapes; it also fences the buffers inside a workspace."""
    if sanitized_build is None:
        pytest.skip("no sources, no compiler or no AddressSanitizer here")
    made, errors = sanitized_build.communicate(timeout=400)
    assert sanitized_build.returncode == 0 and made.strip(), errors
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, [native.FOLDER.parent.parent, *sys.path])),
        "SHARDWISE_LIBRARY": made.strip(),
        "SHARDWISE_TEST_SEED": str(SEED),
        "LD_PRELOAD": str(sanitizer()),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [sys.executable, str(ROOT / "tests" / "convolutions.py"), "4"]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]

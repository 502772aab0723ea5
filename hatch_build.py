"""Compiles native/ while the package is built; without a C++ compiler the package goes without.

`python hatch_build.py` does the same in place, for work on the kernels; `--sanitize FOLDER ISA`
builds the library of one instruction set with AddressSanitizer there.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent
TARGET = ROOT / "src" / "shardwise" / "kernels"
COMMON = ("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
OPTIMISED = ("-O3", "-fno-math-errno", "-fno-trapping-math")
# One library per instruction set rather than one for all: no function of the wide ones can end up
# in code that a narrower CPU runs.
X86 = {
    "avx512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mavx2"),
    "avx2": ("-mavx2", "-mfma"),
}


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """A compiler may be set up for wide instructions, so `portable` says that it is not."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return {**X86, "portable": ("-march=x86-64",)}
    return {"portable": ()}


def compiler() -> str | None:
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compile_one(cxx: str, folder: Path, name: str, flags: tuple[str, ...]) -> Path | None:
    """One library, or None, with the compiler's first error on the screen."""
    target = folder / f"libshardwise_{name}.so"
    partial = target.with_suffix(".partial")
    command = [cxx, *COMMON, *flags, str(ROOT / "native" / "api.cpp"), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        print(f"shardwise: {target.name} was not built: {error.strip()}", file=sys.stderr)
        partial.unlink(missing_ok=True)
        return None
    partial.replace(target)
    return target


def build(sets: dict[str, tuple[str, ...]] | None = None, folder: Path = TARGET) -> list[Path]:
    """Every library that this machine's compiler can make; never raises."""
    cxx = compiler()
    if cxx is None:
        print("shardwise: no C++ compiler, so no native kernels", file=sys.stderr)
        return []
    optimised = {name: (*OPTIMISED, *flags) for name, flags in instruction_sets().items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(compile_one, cxx, folder, *item) for item in (sets or optimised).items()
        ]
        return [path for job in jobs if (path := job.result()) is not None]


def sanitized(isa: str) -> dict[str, tuple[str, ...]]:
    """-Og compiles in a third of the time that -O1 takes."""
    return {f"{isa}_asan": ("-Og", "-g1", "-fsanitize=address", *instruction_sets()[isa])}


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    pass
else:

    class NativeBuildHook(BuildHookInterface):
        """Hatchling calls this before it collects the files of a wheel or an editable install."""

        def initialize(self, version: str, build_data: dict) -> None:
            built = build()
            if not built:
                return
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            if version != "editable":  # there, the files lie where they are read
                for path in built:
                    inside = str(path.relative_to(ROOT / "src"))
                    build_data["force_include"][str(path)] = inside


if __name__ == "__main__":
    sanitize = sys.argv[1:2] == ["--sanitize"]
    made = build(sanitized(sys.argv[3]), Path(sys.argv[2])) if sanitize else build()
    print("\n".join(map(str, made)))

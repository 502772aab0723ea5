"""Rules of the code base: imports point one way, public names are listed."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import shardwise

SOURCE = pathlib.Path(shardwise.__file__).parent
BASE = {"errors", "files", "modules", "tensors", "units", "version"}
# What each room may import, beside itself and the base: describe, decide, execute, use. A room that
# is not here fails.
DESCRIBE = {
    "geometry": set(),
    "graph": {"geometry"},
    "kernels": set(),
    "operators": {"geometry", "graph", "kernels"},
    "model": {"graph", "operators"},
    "cluster": set(),
    "plans": {"geometry", "graph", "operators"},
}
DECIDE = {"planner": {"geometry", "graph", "operators", "model", "cluster", "plans"}}
EXECUTE = {
    "comm": {"geometry", "cluster"},
    "runtime": {"geometry", "graph", "operators", "model", "cluster", "plans", "comm"},
}
CORE = {*DESCRIBE, *DECIDE, *EXECUTE}
USE = {
    "zoo": set(),
    "data": {"geometry"},
    "launch": {"comm"},
    "specs": CORE - {"comm", "runtime", "kernels"} | {"zoo"},
    "measure": CORE | {"launch", "specs"},
    "checkpoint": {"geometry", "comm", "runtime"},
    "verify": CORE - {"planner"} | {"launch", "specs"},
    "report": CORE - {"comm", "runtime", "kernels"} | {"specs"},
    "training": CORE | {"launch", "specs", "data", "checkpoint", "report"},
    "libraries": CORE - {"kernels"},
    "cli": CORE
    | {"launch", "specs", "measure", "data", "checkpoint", "verify", "report"}
    | {"training"},
}
ALLOWED = DESCRIBE | DECIDE | EXECUTE | USE
ROOT = {"__init__": None, "__main__": {"cli"}}  # the first names the homes of public names


def room(path: pathlib.Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imported(path: pathlib.Path) -> set[str]:
    """The rooms, or files of the root, that a file imports something of."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level or len(path.relative_to(SOURCE).parts) > 1, path
            module = node.module or "" if not node.level else f"shardwise.{room(path)}"
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        ours = (name.split(".") for name in names)
        found |= {parts[1] for parts in ours if parts[0] == "shardwise" and len(parts) > 1}
    return found


def test_imports_point_from_use_to_execute_to_decide_to_describe() -> None:
    for path in SOURCE.rglob("*.py"):
        own = room(path)
        if own in BASE:
            assert imported(path) <= BASE, f"{path.name} is of the base: it imports nothing else"
        elif (allowed := ROOT[own] if own in ROOT else ALLOWED[own]) is not None:
            wrong = imported(path) - allowed - BASE - {own}
            assert not wrong, f"{own}/{path.name} imports {sorted(wrong)}"


RESTRICTED_UNPICKLER = "dcp_folder.py"  # torch's own format: its find_class admits no code


def test_no_pickle_is_read_from_a_file() -> None:
    restricted = (SOURCE / "checkpoint" / RESTRICTED_UNPICKLER).read_text()
    assert "def find_class" in restricted
    assert "pickle.load" not in restricted
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                allowed = {"pickle"} if path.name == RESTRICTED_UNPICKLER else set()
                assert not names & ({"pickle", "FileSystemReader"} - allowed), path.name
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), path.name


def test_public_names_exist_and_have_one_home() -> None:
    names = [name for names in shardwise.HOMES.values() for name in names]
    assert sorted([*names, "data", "zoo", "__version__"]) == sorted(shardwise.__all__)
    for name in shardwise.__all__:
        assert getattr(shardwise, name) is not None


def test_a_folder_is_there_when_it_is_asked_for() -> None:
    code = "import shardwise; shardwise.checkpoint.Checkpoints, shardwise.verify.compare"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert not hasattr(shardwise, "nothing") and not hasattr(shardwise, "_nothing")


def test_the_root_has_few_files() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 8


def test_a_public_function_has_no_module_of_its_name() -> None:
    functions = {name for names in shardwise.HOMES.values() for name in names}
    assert not functions & {path.stem for path in SOURCE.iterdir()}


def test_a_file_name_means_one_thing() -> None:
    """The same name twice sends a reader to the wrong file; what a package is about may be so."""
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        if path.name != "__init__.py":
            places.setdefault(path.name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_importing_shardwise_imports_no_torch() -> None:
    code = "import sys, shardwise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_files_and_functions_are_short() -> None:
    """Commands may be longer: each of their options takes some lines, and its help is one."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 400, path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                begin = node.body[0].lineno if room(path) == "cli" else node.lineno
                assert node.end_lineno - begin < 40, f"{path.name}: {node.name}"


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: found for name, found in places.items() if len(found) > 1}

"""Rules of the code base: imports point one way, public names are listed."""

from __future__ import annotations

import ast
import pathlib

import shardwise

SOURCE = pathlib.Path(shardwise.__file__).parent
DESCRIBE = {
    "box",
    "layout",
    "config",
    "errors",
    "files",
    "graph",
    "dims",
    "operators",
    "build",
    "calls",
    "capture",
    "formats",
    "functional",
    "functions",
    "regions",
    "attributes",
    "values",
    "lost",
    "lines",
    "reading",
    "writing",
    "hooks",
    "strategies",
    "transfer",
    "units",
    "kernels",
    "cluster",
    "documents",
    "winners",
    "weightless",
}
DECIDE = {
    "plan",
    "program",
    "network",
    "traffic",
    "calibrate",
    "candidates",
    "columns",
    "stacks",
    "cost",
    "search",
    "planner",
    "planning",
    "simulate",
    "trace",
    "timing",
    "engine",
}
EXECUTE = {
    "comm",
    "exchange",
    "runtime",
    "state",
    "model_graphs",
    "stored",
    "blank",
    "splitting",
    "parallel",
    "originals",
    "agreement",
    "entering",
    "unsummed",
    "way_back",
    "passes",
    "block",
    "elementwise",
    "stepping",
    "handle",
    "probe",
    "sum_tuning",
    "gradients",
    "optimizer",
}
ALLOWED = {
    "describe": DESCRIBE,
    "decide": DESCRIBE | DECIDE,
    "execute": DESCRIBE | DECIDE | EXECUTE,
}


def room(path: pathlib.Path) -> tuple[str, str]:
    name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for layer, names in (("describe", DESCRIBE), ("decide", DECIDE), ("execute", EXECUTE)):
        if name in names:
            return layer, name
    return "use", name


def imported(path: pathlib.Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shardwise"):
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return names


def test_imports_point_from_use_to_execute_to_decide_to_describe() -> None:
    for path in SOURCE.rglob("*.py"):
        layer, name = room(path)
        if layer in ALLOWED:
            wrong = imported(path) - ALLOWED[layer] - {name}
            assert not wrong, f"{path.name} ({layer}) imports {sorted(wrong)}"


def test_the_zoo_imports_nothing_of_the_rest() -> None:
    for path in (SOURCE / "zoo").glob("*.py"):
        assert imported(path) <= {"zoo"}, path.name


def test_data_knows_boxes_and_nothing_of_plans() -> None:
    for path in (SOURCE / "data").glob("*.py"):
        assert imported(path) <= {"data", "box", "documents", "errors", "files"}, path.name


def test_no_pickle_is_read_from_a_file() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "FileSystemReader"}, path.name
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), path.name


def test_public_names_exist() -> None:
    for name in shardwise.__all__:
        assert hasattr(shardwise, name)

"""Whatever is written: ended or refused at any moment, the old content is there or the new."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convolutions import SEED
from faults.moments import killed_at, refuse, striking
from saving import make_plan, start, train
from shardwise import Plan, capture
from shardwise.checkpoint import Checkpoints, export
from shardwise.checkpoint.snapshot import Snapshot
from shardwise.checkpoint.step_folders import StepFolders
from shardwise.checkpoint.weight_files import read_state
from shardwise.cluster.cluster import Cluster
from shardwise.data import Arrays
from shardwise.data.pack import pack
from shardwise.data.store import Store
from shardwise.errors import ShardwiseError
from shardwise.kernels.tuner import Winners
from shardwise.planner.layer_times import TimeTable
from shardwise.plans.trace import Trace
from shardwise.report.page import write_page
from shardwise.training.run_folder import RunFolder

MOST = 400  # moments of one writer
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass(frozen=True)
class Writer:
    """Writes something that says a number, and reads which numbers are there."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], set[int]]
    renews: bool = True  # what is there is replaced; else there was nothing before
    stride: int = 1  # of the moments that are tried


# -- the writers -----------------------------------------------------------------------------------


def _plan(number: int) -> Plan:
    net = torch.nn.Conv2d(1, 1, 1)
    return Plan.uniform(capture(net, torch.zeros(2 + number, 1, 4, 4)), 1, n=1)


PLANS = {number: _plan(number) for number in range(3)}


def _write_trace(folder: Path, number: int) -> None:
    activity = (str(number), "forward", "compute", 0.0, 1.0, None)
    Trace.of_ranks([[activity]]).save(folder / "trace.json")


def _write_winners(_: Path, number: int) -> None:
    Winners(1, seconds={"shape": {"forward": {"stock": 1.0 + number}}}).save()


def _read_winners(folder: Path) -> set[int]:
    (path,) = folder.glob("kernels-*.json")
    data = json.loads(path.read_text())
    return {int(data["seconds"]["shape"]["forward"]["stock"]) - 1}


def _write_page(folder: Path, number: int) -> None:
    write_page(folder / "report.html", {"title": "a run", "number": number})


def _read_page(folder: Path) -> set[int]:
    text = (folder / "report.html").read_text()
    assert text.rstrip().endswith("</html>")
    return {n for n in range(3) if f'"number":{n}' in text}


def _pack(folder: Path, number: int) -> None:
    images = np.full((5, 1, 3, 3), number, np.uint8)
    pack(Arrays(images, np.arange(5) % 2, "mine"), folder / "store", num_stripes=2)


def _read_store(folder: Path) -> set[int]:
    if not (folder / "store").exists():
        return set()
    store = Store(folder / "store")
    store.check()
    return {int(value) for n in range(5) for value in np.unique(store.read(n))}


def _begin(folder: Path, number: int) -> None:
    run = RunFolder(folder / "run", first=True)
    run.begin({"number": number}, PLANS[number].to_json(), step=0, resumed_bytes=None)
    run.add(step=number, loss=1.0)
    run.close()


def _read_run(folder: Path) -> set[int]:
    config = json.loads((folder / "run/config.json").read_text())
    return {config["number"], _batch(Plan.load(folder / "run/plan.json"))}


def _batch(plan: Plan) -> int:
    return plan.inputs[0][0] - 2


MODEL: list[Any] = []  # one for all tests: it is captured once


def _model() -> tuple[Any, Any]:
    if not MODEL:
        MODEL.extend(start(make_plan(1, 0), "momentum"))
        train(*MODEL, [0])
    return MODEL[0], MODEL[1]


def _checkpoint(folder: Path, number: int) -> None:
    """In this thread: a fork has no others."""
    model, stepper = _model()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(number)
    taken = Snapshot(number, model, stepper, {"at": number})
    Checkpoints(folder / "checkpoints", keep=1)._write(number, taken, None)


def _read_checkpoint(folder: Path) -> set[int]:
    step, path = max(StepFolders(folder / "checkpoints").complete().items())
    state, (model, _) = read_state(path), _model()
    found = {int(x) for name, _ in model.named_parameters() for x in state[name].unique()}
    assert found == {step}
    return found


RUNS: dict[int, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Three checkpoints, for exports."""
    for number in range(3):
        RUNS[number] = tmp_path_factory.mktemp(f"run-{number}")
        _checkpoint(RUNS[number], number)


def _export(kind: str) -> Writer:
    def write(folder: Path, number: int) -> None:
        export(RUNS[number], folder / f"model.{kind}")

    def read(folder: Path) -> set[int]:
        from safetensors.torch import load_file

        path = folder / f"model.{kind}"
        state = load_file(path) if kind == "safetensors" else torch.load(path, weights_only=True)
        return {int(x) for x in state["head.weight"].unique()}

    return Writer(write, read, stride=25 if kind == "pt" else 1)  # torch writes in small pieces


WRITERS = {
    "plan": Writer(
        lambda folder, number: PLANS[number].save(folder / "plan.json"),
        lambda folder: {_batch(Plan.load(folder / "plan.json"))},
    ),
    "cluster": Writer(
        lambda folder, number: Cluster.load(f"{2 + number}x10Gb").save(folder / "here.yaml"),
        lambda folder: {Cluster.load(str(folder / "here.yaml")).world - 2},
    ),
    "trace": Writer(
        _write_trace, lambda folder: {int(s.name) for s in Trace.load(folder / "trace.json").spans}
    ),
    "times": Writer(
        lambda _, number: TimeTable("a device", seconds={"conv": (float(number), 1.0)}).save(),
        lambda _: {int(TimeTable.load("a device").seconds["conv"][0])},
    ),
    "kernels": Writer(_write_winners, _read_winners),
    "report": Writer(_write_page, _read_page),
    "store": Writer(_pack, _read_store, renews=False),
    "run": Writer(_begin, _read_run),
    "checkpoint": Writer(_checkpoint, _read_checkpoint, stride=3),
    "export.pt": _export("pt"),
    "export.safetensors": _export("safetensors"),
}


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest) -> Writer:
    return WRITERS[request.param]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Writer) -> Iterator[Path]:
    """Folders without end, each with the old content."""

    def make() -> Iterator[Path]:
        for number in range(1, MOST):
            folder = tmp_path / str(number)
            folder.mkdir()
            monkeypatch.setenv("SHARDWISE_CACHE", str(folder))
            if writer.renews:
                writer.write(folder, 0)
            yield folder
        raise AssertionError("there is no end of moments")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels whose times cannot be kept
        yield make()  # type: ignore[misc]


@pytest.mark.deep
def test_killed_at_every_moment_of_a_checkpoint_the_old_one_or_the_new_is_there(
    tmp_path: Path,
) -> None:
    for moment in range(1, MOST):
        folder = tmp_path / str(moment)
        _checkpoint(folder, 0)
        killed = killed_at(moment, folder, lambda folder=folder: _checkpoint(folder, 1))
        assert _read_checkpoint(folder) <= {0, 1}
        if not killed:
            return
    raise AssertionError("there is no end of moments")


def _check(writer: Writer, folder: Path) -> None:
    found = writer.read(folder)
    assert found <= {0, 1} if writer.renews else found <= {1}, (folder, found)
    assert found or not writer.renews


def test_killed_at_any_moment_a_writer_leaves_the_old_content_or_the_new(
    writer: Writer, folders: Iterator[Path]
) -> None:
    moment = 1 + SEED % writer.stride
    for folder in folders:
        killed = killed_at(moment, folder, lambda folder=folder: writer.write(folder, 1))
        _check(writer, folder)
        if not killed:
            break
        if writer.renews or not writer.read(folder):
            writer.write(folder, 2)  # what was left is in nobody's way
            assert writer.read(folder) == {2}
        moment += writer.stride
    assert moment > 4 and writer.read(folder) == {1}


def test_a_disk_that_is_full_at_any_moment_costs_nothing_that_was_there(
    writer: Writer, folders: Iterator[Path]
) -> None:
    moment = 1 + SEED % writer.stride
    for folder in folders:
        with striking(folder, moment, refuse) as moments:
            try:
                writer.write(folder, 1)
            except ShardwiseError as error:
                assert str(folder) in str(error) and "\n" not in str(error)
                assert "No space left on device" in str(error)
        _check(writer, folder)
        left = [path.name for path in folder.rglob(".*")]
        assert not left, (moment, left)
        if moments.left > 0:
            break
        moment += writer.stride
    assert writer.read(folder) == {1}


# -- several writers at once -----------------------------------------------------------------------


def _add_times(cache: str, first: int) -> None:
    import os

    os.environ["SHARDWISE_CACHE"] = cache
    for number in range(first, first + 20):
        TimeTable("a device", seconds={str(number): (1.0, 2.0)}).save()


def test_measurements_of_several_processes_do_not_overwrite_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_add_times, args=(str(tmp_path), 20 * n)) for n in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert TimeTable.load("a device").seconds.keys() == {str(n) for n in range(60)}
    assert [path.name for path in tmp_path.iterdir()] == ["times-a-device.json"]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    plan, link = PLANS[0], tmp_path / "link.json"
    link.symlink_to(tmp_path / "plan.json")
    plan.save(link)
    assert link.is_symlink() and Plan.load(tmp_path / "plan.json").layers == plan.layers
    plan.save("/dev/null")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(ShardwiseError, match="cannot be written"):
        plan.save(tmp_path)


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    path.chmod(0o640)
    PLANS[0].save(path)
    assert path.stat().st_mode & 0o777 == 0o640

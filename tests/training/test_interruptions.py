"""Runs that are killed, told to end or run out of memory: nothing is lost."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import shared_pool
from shardwise.checkpoint import export
from shardwise.training.settings import read_settings
from shardwise.training.trainer import Trainer

SETTINGS = {
    "batch": 64,
    "option": "width=4",
    "log-every": 1,
    "checkpoint-every": 4,
    "steps": 60,
    "split": "h=2",
    "timeout": 120,
}
RANKS = 2
PATIENCE = 240  # seconds for a start: ranks import torch, on a machine that may be busy
WORDS = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A test that fails half way ends what it has started."""
    yield
    for process in STARTED:
        if process.poll() is None:
            for worker in workers_of(process.pid):
                os.kill(worker, signal.SIGKILL)
            process.kill()
            process.wait()
    STARTED.clear()


def start(launcher: list[str], folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [*launcher, "-m", "shardwise", "train", "--out", str(folder), "--no-report"]
    command += [*WORDS, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    STARTED.append(process)
    return process


def elastic(world: int, restarts: int) -> list[str]:
    """The launcher that restarts all workers when one has died."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={world}", f"--max-restarts={restarts}"]


def weights(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    export(folder, out)
    return torch.load(out, weights_only=True)


def workers_of(launcher: int) -> list[int]:
    """The processes that a launcher has started, by what the kernel says of them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == launcher and b"shardwise" in command:
            found.append(int(path.parent.name))
    return found


def kill_some(
    launcher: subprocess.Popen[str], folder: Path, num: int, within: float, seed: int
) -> int:
    """Kills a worker so many seconds after its start at most, saving or not; returns how many."""
    chance, killed = random.Random(seed), 0
    while launcher.poll() is None and killed < num:
        before = steps_of(folder)
        deadline = time.monotonic() + PATIENCE
        while launcher.poll() is None and steps_of(folder) == before:
            assert time.monotonic() < deadline, "the run does not go on"
            time.sleep(0.02)
        time.sleep(chance.random() * within)
        workers = workers_of(launcher.pid)
        if workers:
            os.kill(chance.choice(workers), signal.SIGKILL)
            killed += 1
    return killed


def steps_of(folder: Path) -> tuple[float, int]:
    """Changes whenever the run has made a step."""
    path = folder / "metrics.jsonl"
    return (path.stat().st_mtime, path.stat().st_size) if path.exists() else (0.0, 0)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    return run_calm(tmp_path_factory.mktemp("calm"), RANKS)


def run_calm(folder: Path, world: int, *words: str) -> Path:
    undisturbed = start(elastic(world, 0), folder, *words)
    output, _ = undisturbed.communicate(timeout=600)
    assert undisturbed.returncode == 0, output
    return folder


def run_killed(calm: Path, wild: Path, kills: int, within: float, world: int, *words: str) -> None:
    disturbed = start(elastic(world, kills + 1), wild, *words)
    killed = kill_some(disturbed, wild, kills, within, seed=kills)
    output, _ = disturbed.communicate(timeout=600)
    assert disturbed.returncode == 0, output
    assert killed == kills, "the run was over before all kills"
    wanted = weights(calm, wild / "calm.pt")
    found = weights(wild, wild / "wild.pt")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert losses(wild) == losses(calm)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in found] == list(range(1, len(found) + 1)), "one is missing or twice"
    return [loss for _, loss in found]


@pytest.mark.timeout(1200)
def test_killed_ranks_cost_nothing_but_time(calm: Path, tmp_path: Path) -> None:
    run_killed(calm, tmp_path, 2, 1.0, RANKS)


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_twenty_killed_ranks_cost_nothing_but_time(tmp_path: Path) -> None:
    words = ("--steps", "400", "--split", "n=2,h=2")
    calm = run_calm(tmp_path / "calm", 4, *words)
    run_killed(calm, tmp_path / "wild", 20, 3.0, 4, *words)


def test_sigterm_makes_a_checkpoint_and_the_run_goes_on(calm: Path, tmp_path: Path) -> None:
    folder, workers = tmp_path / "run", ("--workers", str(RANKS))
    process = start([sys.executable], folder, *workers, "--checkpoint-every", "1000")
    deadline = time.monotonic() + PATIENCE
    while steps_of(folder)[1] < 400:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and "stopped after step" in output, output
    again = start([sys.executable], folder, *workers, "--resume")
    output, _ = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0 and "going on from step" in output, output
    assert losses(folder) == losses(calm)


def starve(given: dict[str, Any]) -> None:
    """Trains with hardly more memory than is already in use."""
    trainer = Trainer(read_settings(None, given), quiet=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), most))
    try:
        trainer.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def test_memory_that_runs_out_names_the_layer_and_a_plan_that_fits(tmp_path: Path) -> None:
    given = {"out": str(tmp_path), "model": "vgg16_cifar", "data": "synthetic:2048x3x32x32"}
    given |= {"num_classes": 10, "batch": 1024, "split": "f=1", "prefetch": 0}
    with pytest.raises(AssertionError) as failed:
        shared_pool(2).run(starve, given)
    said = str(failed.value)
    assert "out of memory in layer '" in said
    assert "per worker; --memory" in said and "finds one that needs" in said

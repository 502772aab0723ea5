"""Whole runs: any number of workers and any plan learn the same, and a run goes on anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pool import shared_pool
from shardwise import Plan, capture, zoo
from shardwise.checkpoint import export
from shardwise.data import Arrays, Synthetic
from shardwise.errors import ShardwiseError
from shardwise.report import write_report
from shardwise.training.settings import Settings, read_settings
from shardwise.training.trainer import Trainer, train

SMALL: dict[str, Any] = {
    "precision": "float64",
    "batch": 96,
    "options": {"width": 4},
    "log_every": 1,
    "report": False,
    "lr": 0.02,
}


def fit(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    trainer = Trainer(read_settings(None, given), quiet=True)
    trainer.fit()
    return trainer.model.state_dict()


def curve(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(losses) == list(range(1, len(losses) + 1))
    return list(losses.values())


def run_with(world: int, folder: Path, **given: Any) -> dict[str, torch.Tensor]:
    job = SMALL | {"out": str(folder)} | given
    return shared_pool(world).run(fit, job)[0] if world > 1 else fit(job)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_a_run_that_moves_between_workers_and_plans_is_the_undisturbed_one(
    tmp_path: Path, optimizer: str
) -> None:
    recipe = {"optimizer": optimizer, "schedule": "step", "milestones": "1.2", "warmup_epochs": 0.5}
    recipe |= {"clip": 2.0, "label_smoothing": 0.1, "mixup": 0.3} if optimizer == "sgd" else {}
    wanted = run_with(1, tmp_path / "one", steps=22, **recipe)
    moving = tmp_path / "moving"
    run_with(4, moving, steps=7, split="n=2,h=2", **recipe)
    run_with(2, moving, steps=17, split="f=2", resume=True, **recipe)
    found = run_with(3, moving, steps=22, resume=True, **recipe)
    assert curve(moving) == pytest.approx(curve(tmp_path / "one"), rel=1e-9)
    assert epochs(moving) == pytest.approx(epochs(tmp_path / "one"), rel=1e-9)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)


def epochs(folder: Path) -> dict[int, float]:
    """The loss of every epoch as it was last written."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["epoch"]: line["epoch_loss"] for line in lines if "epoch" in line}


def read_samples(given: dict[str, Any]) -> list[tuple[int, tuple[int, ...]]]:
    """The epoch and the samples of every batch that the model is trained on."""
    trainer = Trainer(read_settings(None, given), quiet=True)
    seen: list[tuple[int, tuple[int, ...]]] = []
    step = trainer._step
    trainer._step = lambda batch, traced: (  # type: ignore[method-assign]
        seen.append((batch.epoch, batch.indices)),
        step(batch, traced),
    )[1]
    trainer.fit()
    return seen


def test_no_sample_is_seen_twice_or_missed_when_workers_change(tmp_path: Path) -> None:
    common = SMALL | {"out": str(tmp_path / "run")}
    seen = shared_pool(4).run(read_samples, common | {"steps": 7, "split": "n=4"})[0]
    seen += shared_pool(2).run(read_samples, common | {"steps": 17, "resume": True})[1]
    seen += shared_pool(3).run(read_samples, common | {"epochs": 2, "resume": True})[2]
    for epoch in (0, 1):
        samples = [index for own, batch in seen if own == epoch for index in batch]
        assert sorted(samples) == list(range(1437))


def test_float32_runs_agree_for_other_workers_and_plans(tmp_path: Path) -> None:
    # Rounding in float32 grows with every step, on one device too: 1e-3 after two epochs.
    recipe = {"precision": "float32", "epochs": 2}
    run_with(1, tmp_path / "one", **recipe)
    run_with(4, tmp_path / "four", split="f=4", **recipe)
    assert curve(tmp_path / "four") == pytest.approx(curve(tmp_path / "one"), rel=1e-3)


def command(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["train", "--out", str(folder), "--no-report", "--log-every", "1", *options]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *words], env=environment, capture_output=True, text=True
    )


def test_bf16_learns_and_keeps_float32_weights(tmp_path: Path) -> None:
    recipe = ("--precision", "bf16", "--epochs", "2", "--batch", "96", "--option", "width=8")
    for workers, split in (("1", "n=1"), ("4", "n=2,f=2")):
        folder = tmp_path / workers
        done = command(folder, "--workers", workers, "--split", split, *recipe)
        assert done.returncode == 0, done.stderr
        export(folder, tmp_path / "weights.pt")
        states = torch.load(tmp_path / "weights.pt", weights_only=True)
        assert all(value.dtype != torch.bfloat16 for value in states.values())
    one, four = curve(tmp_path / "1"), curve(tmp_path / "4")
    assert four == pytest.approx(one, rel=0.1, abs=0.05)  # bf16 has 8 bits
    assert one[:3] != curve_of_float32(tmp_path / "32", (*recipe[4:], "--steps", "3"))
    assert np.mean(four[-5:]) < 0.3 * four[0]


def curve_of_float32(folder: Path, recipe: tuple[str, ...]) -> list[float]:
    command(folder, "--workers", "1", *recipe)
    return curve(folder)


class Voxels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv3d(1, 5, 3, padding=1)
        self.head = nn.Conv3d(5, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


def volumes() -> Arrays:
    generator = np.random.default_rng(0)
    images = generator.normal(size=(7, 1, 6, 5, 9)).astype(np.float32)
    labels = generator.integers(0, 3, size=(7, 6, 5, 9))
    return Arrays(images, labels, "volumes", ("a", "b", "c"))


def fit_volumes(given: dict[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    source = volumes()
    trainer = Trainer(
        read_settings(None, given), model=Voxels().double(), train=source, test=source, quiet=True
    )
    history = trainer.fit()
    return [(e.loss, e.test_loss, e.accuracy) for e in history], trainer.model.state_dict()


def test_volumes_with_local_outputs_train_as_whole_ones(tmp_path: Path) -> None:
    given = SMALL | {"options": {}, "batch": 3, "epochs": 2, "padding": 1, "flip": "hw"}
    one = fit_volumes(given | {"out": str(tmp_path / "one")})
    local = given | {"out": str(tmp_path / "four"), "output": "local", "split": "d=2,w=2"}
    for history, states in shared_pool(4).run(fit_volumes, local):
        for mine, theirs in zip(history, one[0], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)
        for name, value in one[1].items():
            torch.testing.assert_close(states[name], value, rtol=1e-8, atol=1e-10)


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(256, 10)
        with torch.no_grad():
            self.second.bias[3] = float("inf")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)).flatten(1))


def fit_breaking(given: dict[str, Any]) -> str:
    try:
        Trainer(read_settings(None, given), model=Breaking().double(), train=digit_like()).fit()
    except ShardwiseError as error:
        return str(error)
    return "no error"


def digit_like() -> Synthetic:
    return Synthetic(40, (1, 8, 8), num_classes=10)


def test_a_loss_that_is_not_finite_names_step_and_layer(tmp_path: Path) -> None:
    given = SMALL | {"out": str(tmp_path), "batch": 8, "split": "f=2"}
    for message in shared_pool(2).run(fit_breaking, given):
        assert "at step 1 (epoch 1), first in the output of layer 'second'" in message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "unet3d", "options": {}}, "input"),
        (
            {"data": "synthetic:20x1x8x8", "num_classes": 12, "options": {"num_classes": 3}},
            "3 class",
        ),
        ({"data": "nowhere"}, "nowhere is neither a folder"),
        ({"flip": "d"}, "flip='d' must be made of h, w"),
        ({"mean": "1,2"}, "mean must have 1 numbers"),
        ({"plan": "nowhere.json"}, "nowhere.json"),
        ({"weights": "nowhere.pt"}, "the weights 'nowhere.pt' cannot be loaded"),
        ({"test_data": "synthetic:20x3x8x8"}, "has shape (3, 8, 8)"),
        ({"gradients": "sometimes"}, "gradients 'sometimes' must be"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardwiseError) as raised:
        Trainer(read_settings(None, SMALL | {"out": str(tmp_path)} | given), quiet=True)
    assert message in str(raised.value)


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    run_with(1, tmp_path, steps=1)
    with pytest.raises(ShardwiseError, match="already holds a run; go on with --resume"):
        run_with(1, tmp_path, steps=1)


def test_weights_of_a_file_are_where_a_run_starts(tmp_path: Path) -> None:
    state = run_with(1, tmp_path / "one", steps=2)
    torch.save(state, tmp_path / "weights.pt")
    settings = SMALL | {"out": str(tmp_path / "two"), "weights": str(tmp_path / "weights.pt")}
    trainer = Trainer(Settings(**settings), quiet=True)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, state[name])


def test_a_model_and_samples_that_were_given_are_what_the_run_is_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, labels = np.zeros((8, 3, 6, 5), np.float32), np.arange(8) % 2
    module = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    settings = Settings(split="n=1", epochs=1, batch=4, out=str(tmp_path / "run"))
    Trainer(settings, model=module, train=Arrays(images, labels, "mine")).fit()
    assert capsys.readouterr().out.startswith("Sequential on 1 worker")
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["model"] is None and config["data"] is None
    assert '"op":"conv"' in (tmp_path / "run/report.html").read_text()  # with all its costs
    write_report(tmp_path / "run")  # later, when the model is not at hand


def test_a_plan_file_says_how_many_workers_are_started(tmp_path: Path) -> None:
    graph = capture(zoo.build("digits", width=4), torch.zeros(96, 1, 8, 8))
    Plan.uniform(graph, n=1).save(tmp_path / "plan.json")
    given = SMALL | {"plan": str(tmp_path / "plan.json"), "steps": 1, "out": str(tmp_path / "run")}
    train(Settings(**given))  # on one worker, and not on the two of the default
    assert json.loads((tmp_path / "run/plan.json").read_text())["world"] == 1

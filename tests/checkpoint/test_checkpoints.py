"""Checkpoints: a run goes on from them as if it had never stopped, under any plan."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from exactness import seeded, seeded_input
from pool import shared_pool
from saving import OPTIMIZERS, SHAPE, Net, make_plan, start, train, train_alone, train_from
from shardwise import Config, Plan, ShardwiseError, capture, parallelize
from shardwise.checkpoint import Checkpoints, export
from shardwise.checkpoint.writer import Writer
from shardwise.runtime.block import plain

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Tensors = dict[str, torch.Tensor]


def assert_close(found: Tensors, wanted: Tensors) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_with_other_workers_and_plans_as_if_undisturbed(
    tmp_path: Path, kind: str
) -> None:
    first = make_plan(4, None if kind == "delayed" else 1)
    legs = ((4, first, 0, 5, 3), (2, make_plan(2, 2), 3, 7, 5), (3, make_plan(3, 3), 5, 8, 8))
    for world, plan, begin, last, save in legs:
        states = shared_pool(world).run(train_from, tmp_path, plan, kind, begin, last, save)
        for state in states:
            assert_close(state, train_alone(kind, last))


# -- one plan: the same bits -----------------------------------------------------------------------


def _everything(model: Any, stepper: Any) -> Tensors:
    """Copies of all that this rank holds, and of what the optimizer keeps for its blocks."""
    model.flush()
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, param in model.named_parameters():
        kept = stepper.state.get(param, {}) if param.numel() else {}
        found |= {f"{name} {k}": v for k, v in kept.items() if isinstance(v, torch.Tensor)}
    found["random"] = torch.get_rng_state()
    return {name: plain(tensor).clone() for name, tensor in found.items()}


def _same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name])
        for name, tensor in one.items()
    )


def _round_trip(folder: Path, plan: Plan, kind: str) -> None:
    model, stepper = start(plan, kind)
    train(model, stepper, range(2))
    before = _everything(model, stepper)
    settings = [dict(group, params=None) for group in stepper.param_groups]
    checkpoints = Checkpoints(folder / kind)
    checkpoints.save(2, model, stepper, {})
    train(model, stepper, range(2, 4))
    after = _everything(model, stepper)
    assert checkpoints.load(model, stepper) == {}
    assert _same(_everything(model, stepper), before)
    assert [dict(group, params=None) for group in stepper.param_groups] == settings
    train(model, stepper, range(2, 4))
    assert _same(_everything(model, stepper), after)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_under_one_plan_every_bit_comes_back_and_the_run_repeats_itself(
    tmp_path: Path, kind: str
) -> None:
    plan = make_plan(2, None if kind == "delayed" else 5)
    shared_pool(2).run(_round_trip, tmp_path, plan, kind)


# -- one worker, without any process group ---------------------------------------------------------


def alone(kind: str = "momentum", **changes: Any) -> tuple[Any, Any]:
    return start(make_plan(1, 0), kind, **changes)


def saved(folder: Path, steps: tuple[int, ...] = (2,), **options: Any) -> Checkpoints:
    model, stepper = alone()
    train(model, stepper, range(1))
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(step, model, stepper, {"at": step})
    checkpoints.wait()
    return checkpoints


def test_the_last_few_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    (tmp_path / ".saving-00000007-abc").mkdir()
    (tmp_path / ".saving-00000007-abc" / "rank-0.bin").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    checkpoints = saved(tmp_path, (1, 2, 10, 3, 10), keep=2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"notes", "step-00000003", "step-00000010-1"}
    assert checkpoints.latest() == 10
    assert Checkpoints(tmp_path).load(*alone(), step=3) == {"at": 3}


def test_a_save_copies_first_and_a_second_one_waits(tmp_path: Path) -> None:
    model, stepper = alone()
    checkpoints = Checkpoints(tmp_path)
    states = {}
    for step in range(6):
        train(model, stepper, [step])
        checkpoints.save(step, model, stepper, {"at": step})
        states[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in (3, 4, 5):
        assert checkpoints.load(model, stepper, step) == {"at": step}
        assert all(torch.equal(t, states[step][n]) for n, t in model.state_dict().items())


def test_a_checkpoint_may_be_loaded_without_its_optimizer(tmp_path: Path) -> None:
    checkpoints, (model, _) = saved(tmp_path), alone(seed=4)
    assert checkpoints.load(model, None) == {"at": 2}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_export_is_a_plain_state_of_the_original_module(tmp_path: Path, suffix: str) -> None:
    checkpoints = saved(tmp_path / "checkpoints")
    model, stepper = alone(seed=4)
    checkpoints.load(model, stepper)
    out = export(tmp_path, tmp_path / f"model{suffix}")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [out.name]
    state = torch.load(out, weights_only=True) if suffix == ".pt" else load_file(out)
    plain = seeded(Net(), seed=9)
    if suffix == ".pt":
        assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state, strict=True)
    x = seeded_input(SHAPE)
    assert torch.equal(plain.eval()(x), model.eval()(x))


def _save_on_four(folder: Path, plan: Plan) -> None:
    model, stepper = start(plan, "momentum")
    train(model, stepper, range(2))
    checkpoints = Checkpoints(folder)
    checkpoints.save(2, model, stepper, {})
    checkpoints.wait()


def test_the_command_exports_what_four_workers_have_saved(tmp_path: Path, run: Any) -> None:
    shared_pool(4).run(_save_on_four, tmp_path / "checkpoints", make_plan(4, 6))
    document = json.loads((tmp_path / "checkpoints/step-00000002/checkpoint.json").read_text())
    files = {c["file"] for t in document["tensors"].values() for c in t["chunks"]}
    assert len(files) == 4
    code, out, err = run("export", str(tmp_path), str(tmp_path / "model.pt"))
    assert (code, err) == (0, "") and str(tmp_path / "model.pt") in out
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_close(state, train_alone("momentum", 2))
    code, _, err = run("export", str(tmp_path), str(tmp_path / "model.bin"))
    assert code == 2 and "must end in .pt or .safetensors" in err
    code, _, err = run("export", str(tmp_path / "other"), str(tmp_path / "model.pt"))
    assert code == 2 and "no complete checkpoint" in err and err.count("\n") == 1
    code, _, err = run("export", str(tmp_path), str(tmp_path / "model.pt"), "--step", "3")
    assert code == 2 and "of step 3; there are those of 2" in err


# -- what does not fit -----------------------------------------------------------------------------


class Smaller(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 3)


class Named(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra, self.more = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))


class Untied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fc2 = nn.Linear(9, 9)


class Fewer(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.unused


def _other(kind: type[nn.Module]) -> Any:
    module = seeded(kind())
    graph = capture(module, torch.zeros(SHAPE, dtype=torch.float64))
    return parallelize(module, Plan.make(graph, 1, lambda la: Config()))


@pytest.mark.parametrize(
    "kind, message",
    [
        (Smaller, "'head.weight' is 4x9 float64 there and 3x9 float64 here (and 1 other"),
        (Named, "it lacks 'extra' and 1 other"),
        (Fewer, "which has 'unused'"),
        (Untied, "it ties parameters that are two here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, kind: type[nn.Module], message: str
) -> None:
    checkpoints, model = saved(tmp_path), _other(kind)
    before = [p.clone() for p in model.parameters()]
    stepper = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(ShardwiseError) as error:
        checkpoints.load(model, stepper)
    assert f"{tmp_path}/step-00000002/checkpoint.json is of another model" in str(error.value)
    assert message in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path)
    model, adam = alone("adamw")
    with pytest.raises(ShardwiseError, match="of the optimizer SGD, and this one is AdamW"):
        checkpoints.load(model, adam)
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    with pytest.raises(ShardwiseError, match="has 1 groups of parameters, and the optimizer 2"):
        checkpoints.load(model, torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ShardwiseError, match=r"optimizer.groups.0 has other parameters.*'unused'"):
        checkpoints.load(model, torch.optim.SGD(params[1:], lr=0.1))


def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    model, stepper = alone()
    checkpoints = Checkpoints(tmp_path)
    for progress in ({"a": torch.ones(2)}, {"a": {1, 2}}):
        checkpoints.save(1, model, stepper, progress)
        with pytest.raises(ShardwiseError, match="progress of a checkpoint must be JSON data"):
            checkpoints.wait()
    deep: list[Any] = []
    for _ in range(600):
        deep = [deep]
    for step, progress in ((1, {"a": deep}), (2**60, {})):
        checkpoints.save(step, model, stepper, progress)
        with pytest.raises(ShardwiseError, match=r"written to .*: (progress\.a|step)"):
            checkpoints.wait()
    factored = torch.optim.Adafactor(model.parameters())
    train(model, factored, range(1))
    checkpoints.save(1, model, factored, {})
    with pytest.raises(ShardwiseError, match=r"Adafactor keeps a tensor of shape .* as 'row_var'"):
        checkpoints.wait()
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    checkpoints.save(1, model, stranger, {})
    with pytest.raises(ShardwiseError, match="is not the model's"):
        checkpoints.wait()
    assert checkpoints.latest() is None and not list(tmp_path.iterdir())
    with pytest.raises(ShardwiseError, match="no complete checkpoint"):
        checkpoints.load(model, stepper)
    with pytest.raises(ShardwiseError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def _save_apart(folder: Path, plan: Plan) -> str:
    """Every rank has a disk of its own under the same name, as on hosts that share none."""
    model, stepper = start(plan, "momentum")
    checkpoints = Checkpoints(folder / "checkpoints")
    own = folder / f"disk {model._shardwise.comm.rank}"
    write = Writer.write_data

    def write_apart(writer: Writer, plan: Any, planner: Any) -> Any:
        told = Path(plan.storage_data.folder)
        elsewhere = replace(plan.storage_data, folder=str(own / told.name))
        rank = plan.storage_data.rank
        return write(writer, replace(plan, storage_data=elsewhere) if rank else plan, planner)

    Writer.write_data = write_apart
    try:
        checkpoints.save(1, model, stepper, {})
        checkpoints.wait()
    except ShardwiseError as error:
        return str(error)
    finally:
        Writer.write_data = write
    return ""


def test_a_folder_that_hosts_do_not_share_is_found_out(tmp_path: Path) -> None:
    for error in shared_pool(2).run(_save_apart, tmp_path, make_plan(2, 1)):
        assert "must be one folder for all hosts, and rank-1.bin has been written" in error
    assert not list((tmp_path / "checkpoints").iterdir())


# -- a full disk -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "shardwise", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small disk cannot be mounted")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _until_full(disk: Path, plan: Plan) -> str:
    model, stepper = start(plan, "momentum")
    train(model, stepper, range(1))
    checkpoints = Checkpoints(disk / "checkpoints", keep=100)
    error = ""
    for step in range(100):
        checkpoints.save(step, model, stepper, {"at": step})
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            checkpoints.wait()
        except ShardwiseError as full:
            error = str(full)
            break
    assert step > 2 and checkpoints.latest() == step - 1
    assert checkpoints.load(model, stepper) == {"at": step - 1}
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    return error


def test_a_full_disk_is_named_and_the_last_good_checkpoint_stays(small_disk: Path) -> None:
    for error in shared_pool(2).run(_until_full, small_disk, make_plan(2, 2)):
        assert error == (
            f"a checkpoint cannot be written to {small_disk}/checkpoints: No space left on device"
        )
    left = [p.name for p in (small_disk / "checkpoints").iterdir() if p.name.startswith(".")]
    assert not left


def test_a_folder_that_is_opened_keeps_a_save_that_is_under_way_elsewhere(tmp_path: Path) -> None:
    under_way = tmp_path / ".saving-00000007-0123abcd"
    under_way.mkdir()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None and under_way.is_dir()

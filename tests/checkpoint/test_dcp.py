"""Folders of torch.distributed.checkpoint: from torch to any plan, and back to torch."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from exactness import seeded
from pool import shared_pool
from saving import OPTIMIZERS, Net, make_plan, start, train
from shardwise import Plan, ShardwiseError
from shardwise.checkpoint import Checkpoints, export, load_dcp, load_weights, save_dcp
from shardwise.runtime.agreement import Disagreement

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
Tensors = dict[str, torch.Tensor]
KINDS = ("momentum", "adamw")


def alone(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, (make, settings) = seeded(Net(), seed), OPTIMIZERS[kind]
    return model, make(model.parameters(), **settings)


def go_on(model: nn.Module, stepper: Any) -> Tensors:
    """Two steps with the same random numbers everywhere."""
    torch.manual_seed(11)
    train(model, stepper, range(3, 5))
    return model.state_dict()


def torch_save(folder: Path, model: nn.Module, optimizer: Any, **how: Any) -> None:
    weights, kept = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": kept}, checkpoint_id=folder, **how)


def torch_load(folder: Path, model: nn.Module, optimizer: Any, **how: Any) -> None:
    weights, kept = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": kept}
    # Torch wants state of parameters that are never used, from its own folders too.
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=folder, planner=planner, **how)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )


def assert_close(found: Tensors, wanted: Tensors) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


def _loaded(folder: Path, plan: Plan, kind: str) -> Tensors:
    model, stepper = start(plan, kind, seed=5)
    load_dcp(folder, model, stepper)
    return go_on(model, stepper)


def _trained_and_saved(folder: Path, plan: Plan, kind: str) -> Tensors:
    model, stepper = start(plan, kind)
    train(model, stepper, range(3))
    save_dcp(folder, model, stepper)
    return go_on(model, stepper)


def _fsdp(folder: Path, kind: str, saves: bool) -> Tensors:
    model, (make, settings) = seeded(Net(), 0 if saves else 5), OPTIMIZERS[kind]
    model.requires_grad_(True)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    stepper = make(model.parameters(), **settings)
    if saves:
        torch.manual_seed(3)
        train(model, stepper, range(3))
        torch_save(folder, model, stepper)
    else:
        torch_load(folder, model, stepper)
    whole = model.state_dict()
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in whole.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_plain_torch_saves_goes_on_under_any_plan(tmp_path: Path, kind: str) -> None:
    model, stepper = alone(kind, 0)
    train(model, stepper, range(3))
    torch_save(tmp_path / "dcp", model, stepper, no_dist=True)
    wanted = go_on(model, stepper)
    for world in (2, 3):
        for state in shared_pool(world).run(_loaded, tmp_path / "dcp", make_plan(world, 2), kind):
            assert_close(state, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_what_any_plan_saves_goes_on_in_plain_torch_and_other_plans(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "dcp"
    wanted = shared_pool(3).run(_trained_and_saved, folder, make_plan(3, 1), kind)[0]
    model, stepper = alone(kind, 5)
    torch_load(folder, model, stepper, no_dist=True)
    assert_close(go_on(model, stepper), wanted)
    for state in shared_pool(2).run(_loaded, folder, make_plan(2, 2), kind):
        assert_close(state, wanted)


def _weights_of(folder: Path, plan: Plan) -> Tensors:
    model, _ = start(plan, "plain", seed=5)
    load_weights(model, folder)
    return model.state_dict()


def test_fsdp_reads_what_a_plan_saved_and_a_plan_what_fsdp_saved(tmp_path: Path) -> None:
    shared_pool(2).run(_trained_and_saved, tmp_path / "ours", make_plan(2, 1), "plain")
    model, stepper = alone("plain", 5)
    torch_load(tmp_path / "ours", model, stepper, no_dist=True)
    for state in shared_pool(2).run(_fsdp, tmp_path / "ours", "plain", False):
        assert_close(state, model.state_dict())
    wanted = shared_pool(2).run(_fsdp, tmp_path / "theirs", "plain", True)[0]
    for state in shared_pool(3).run(_weights_of, tmp_path / "theirs", make_plan(3, 4)):
        assert_close(state, wanted)


def test_a_run_is_exported_with_its_optimizer(tmp_path: Path) -> None:
    model, stepper = start(make_plan(1, None), "adamw")
    train(model, stepper, range(3))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    checkpoints.save(3, model, stepper, {})
    checkpoints.wait()
    wanted = go_on(model, stepper)
    folder = export(tmp_path / "run", tmp_path / "dcp")
    other, its = alone("adamw", 5)
    torch_load(folder, other, its, no_dist=True)
    assert_close(go_on(other, its), wanted)
    with pytest.raises(ShardwiseError, match="exists already"):
        export(tmp_path / "run", folder)


class Trap:
    def __reduce__(self) -> Any:
        return os.system, ("touch trapped",)


def test_nothing_that_a_description_names_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap()))
    model, _ = start(make_plan(1, None), "plain")
    with pytest.raises(ShardwiseError, match=r"\.metadata cannot be read: it names .*\.system"):
        load_weights(model, tmp_path)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("part", [".metadata", "__0_0.distcp"])
def test_a_damaged_folder_is_one_sentence(tmp_path: Path, part: str) -> None:
    model, stepper = start(make_plan(1, None), "plain")
    save_dcp(tmp_path / "dcp", model, stepper)
    path = tmp_path / "dcp" / part
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], os.urandom(len(content))):
        path.write_bytes(damaged)
        with pytest.raises(ShardwiseError, match="dcp") as caught:
            load_dcp(tmp_path / "dcp", model, stepper)
        assert "\n" not in str(caught.value)


def _refused(folder: Path, plan: Plan) -> str:
    model, stepper = start(plan, "adamw")
    with pytest.raises((ShardwiseError, Disagreement)) as caught:
        load_dcp(folder, model, stepper)
    return str(caught.value)


def test_a_folder_without_the_state_of_an_optimizer_says_so(tmp_path: Path) -> None:
    dcp.save(seeded(Net()).state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    for said in shared_pool(2).run(_refused, tmp_path / "dcp", make_plan(2, 1)):
        assert "holds no state of an optimizer" in said

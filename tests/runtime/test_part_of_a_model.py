"""A part of a larger model on some of the ranks: whatever is around it is ordinary torch code.

Every case runs in a world of its own, in the same worker processes, and says what is wrong.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from pipes import FEATURES, SHAPE, Run, new_pipe, plan_of, sgd, trained
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from exactness import seeded_input
from pool import WorkerPool
from shardwise import Engine, Plan, parallelize
from shardwise.checkpoint import Checkpoints
from shardwise.comm.exchange import Delivery
from shardwise.errors import ShardwiseError
from worlds import reachable, run_cases

WORLD = 4
LIMIT = timedelta(seconds=20)
SOON = 8.0  # seconds


def new_group(*ranks: int, limit: timedelta = LIMIT) -> Any:
    return dist.new_group(list(ranks), timeout=limit, sort_ranks=False)


# -- one group -------------------------------------------------------------------------------------

PLANS: tuple[dict[str, int], ...] = ({"h": 2}, {"n": 2}, {"f": 2}, {"c": 2}, {})


def in_a_group(ranks: tuple[int, ...], reach: bool) -> list[str]:
    """The ranks of the group train their pipes; the others train theirs alone."""
    group, found = new_group(*ranks), []
    for seed, split in enumerate(PLANS if reach else PLANS[-2:]):
        pipe = new_pipe(seed)
        if dist.get_rank() in ranks:
            plan = plan_of(pipe, "decoder", **split)
            with reachable(reach):
                pipe.decoder = parallelize(pipe.decoder, plan, group=group)
            assert shardwise.of(pipe.decoder).comm.rank == ranks.index(dist.get_rank())
        found += trained(pipe, seed, 2)
    return found


def test_a_part_of_a_model_on_some_ranks_is_that_of_one_device() -> None:
    cases = [((2, 3), True), ((1, 3), True), ((3, 1), True), ((0, 2), False)]
    for case, ranks in zip(cases, run_cases(in_a_group, WORLD, cases), strict=True):
        assert ranks == [[]] * WORLD, case


def of_all_but_one(_: str) -> list[str]:
    group, found = new_group(0, 2, 1), []
    for split in ({"h": 3}, {"f": 3}, {}):
        pipe = new_pipe()
        if dist.get_rank() < 3:
            plan = plan_of(pipe, "decoder", 3, **split)
            pipe.decoder = parallelize(pipe.decoder, plan, group=group)
        found += trained(pipe, 0, 2, clip=0.5)
    return found


def of_one_rank(_: str) -> list[str]:
    group, pipe = new_group(2), new_pipe()
    if dist.get_rank() == 2:
        pipe.decoder = parallelize(pipe.decoder, plan_of(pipe, "decoder", 1, n=1), group=group)
    return trained(pipe, 0, 2)


def in_a_mesh(_: str) -> list[str]:
    """A mesh of all ranks, one of some, and those of one of two dimensions, both at once."""
    everybody, found = init_device_mesh("cpu", (WORLD,)), []
    some = DeviceMesh("cpu", [1, 3])
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "domain"))
    for mesh, workers in ((everybody, 4), (some, 2), (square["domain"], 2), (square["copies"], 2)):
        pipe = new_pipe()
        if mesh.get_coordinate() is not None:
            plan = plan_of(pipe, "decoder", workers)
            pipe.decoder = parallelize(pipe.decoder, plan, mesh=mesh)
        found += trained(pipe, 0, 2)
    return found


# -- several modules -------------------------------------------------------------------------------


def side_by_side(_: str) -> list[str]:
    """Two pairs of ranks train pipes of their own, for other numbers of steps."""
    pairs = new_group(0, 1), new_group(2, 3)
    mine = dist.get_rank() // 2
    pipe = new_pipe(mine)
    plan = plan_of(pipe, "decoder", **({"h": 2} if mine else {"f": 2}))
    pipe.decoder = parallelize(pipe.decoder, plan, group=pairs[mine])
    return trained(pipe, mine, 2 + 5 * mine, clip=0.1 * mine)


def two_in_one_group(_: str) -> list[str]:
    group, pipe = new_group(1, 2), new_pipe()
    if dist.get_rank() in (1, 2):
        pipe.decoder = parallelize(pipe.decoder, plan_of(pipe, "decoder"), group=group)
        pipe.refiner = parallelize(pipe.refiner, plan_of(pipe, "refiner", h=2), group=group)
    return trained(pipe, 0, 3, clip=0.5)


def one_of_all_and_one_of_some(_: str) -> list[str]:
    """All ranks run the decoder; the first two share their refiner, the others have it alone."""
    group, found = new_group(0, 1), []
    for decoder, refiner in (({"h": 4}, {"f": 2}), ({}, {}), ({"n": 2, "h": 2}, {"w": 2})):
        pipe = new_pipe()
        if dist.get_rank() < 2:
            plan = plan_of(pipe, "refiner", **refiner)
            pipe.refiner = parallelize(pipe.refiner, plan, group=group)
        pipe.decoder = parallelize(pipe.decoder, plan_of(pipe, "decoder", 4, **decoder))
        found += trained(pipe, 0, 2)
    return found


def one_within_another(_: str) -> list[str]:
    """The decoder on ranks 0 to 2, the refiner on two of these; both have split weights."""
    wide, found = new_group(0, 1, 2), []
    for narrow, split in (((1, 2), {"h": 3}), ((2, 0), {})):
        group, pipe = new_group(*narrow), new_pipe()
        if dist.get_rank() < 3:
            plan = plan_of(pipe, "decoder", 3, **split)
            pipe.decoder = parallelize(pipe.decoder, plan, group=wide)
        if dist.get_rank() in narrow:
            pipe.refiner = parallelize(pipe.refiner, plan_of(pipe, "refiner"), group=group)
        found += trained(pipe, 0, 2, clip=0.3)
    return found


def overlapping_in_turns(_: str) -> list[str]:
    """Every pair of neighbours trains a pipe, and three ranks one more, step by step in turns."""
    runs = []
    for seed, ranks in enumerate(((0, 1), (1, 2), (2, 3), (3, 0), (0, 3, 1))):
        group, pipe = new_group(*ranks), new_pipe(seed)
        if dist.get_rank() in ranks:
            plan = plan_of(pipe, "decoder", len(ranks), **({"h": 2} if seed % 2 else {}))
            pipe.decoder = parallelize(pipe.decoder, plan, group=group)
            runs.append(Run(pipe, seed, clip=0.2))
    for _ in range(3):
        for run in runs:
            run.step()
    return [text for run in runs for text in run.finish()]


def what_a_handle_does(_: str) -> list[str]:
    """Traces, whole tensors and gradients, accumulation, copies, on ranks 3 and 1."""
    group, alone, found = new_group(3, 1), new_pipe().decoder, []
    if dist.get_rank() not in (1, 3):
        return []
    model = parallelize(new_pipe().decoder, plan_of(new_pipe(), "decoder"), group=group)
    handle, inputs = shardwise.of(model), [seeded_input(FEATURES["decoder"], i) for i in range(3)]
    with handle.record() as trace:
        with handle.no_sync():
            model(inputs[0]).sum().backward()
        model(inputs[1]).square().sum().backward()
    alone(inputs[0]).sum().backward()
    alone(inputs[1]).square().sum().backward()
    gradients, tensors = handle.full_gradients(), handle.full_tensors(ranks=(1,))
    for name, param in alone.named_parameters():
        if not torch.allclose(gradients[name], param.grad, rtol=1e-9, atol=1e-11):
            found.append(f"the gradient of {name}")
        if handle.comm.rank == 1 and not torch.equal(tensors[name], param):
            found.append(name)
    copied, kept = copy.deepcopy(model).eval(), copy.deepcopy(alone).eval()
    if not torch.allclose(copied(inputs[2]), kept(inputs[2]), rtol=1e-9):
        found.append("the copy")
    if handle.first_not_finite(inputs[2] / 0) is None or trace.world != 2 or not trace.spans:
        found.append("what is not finite, or the trace")
    return found


def sums_that_go_on(_: str) -> list[str]:
    """Every layer waits for the sum of its own gradients only when it is used again."""
    pairs, mine = (new_group(0, 2), new_group(3, 1)), dist.get_rank() % 2
    pipe, run = new_pipe(), Run(new_pipe(), 0)
    plan = plan_of(pipe, "decoder", n=2)
    engine = Engine("chunks", last=1, wait="use", held=1)
    pipe.decoder = parallelize(pipe.decoder, plan, group=pairs[mine], gradients=engine)
    run.pipes = pipe, run.pipes[1]
    rest = [p for n, p in pipe.named_parameters() if not n.startswith("decoder.")]
    run.optimizers[0] = _Both(
        torch.optim.SGD(rest, lr=0.05, momentum=0.9),
        shardwise.optimizer(pipe.decoder, torch.optim.SGD, lr=0.05, momentum=0.9),
    )
    for _ in range(3 + mine):
        run.step()
    return run.finish()


class _Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


CASES = {
    function.__name__: function
    for function in (
        of_all_but_one,
        of_one_rank,
        in_a_mesh,
        side_by_side,
        two_in_one_group,
        one_of_all_and_one_of_some,
        one_within_another,
        overlapping_in_turns,
        what_a_handle_does,
        sums_that_go_on,
    )
}


def case(name: str) -> list[str]:
    return CASES[name](name)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return dict(zip(CASES, run_cases(case, WORLD, [(name,) for name in CASES]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_parts_of_models_side_by_side_are_those_of_one_device(
    found: dict[str, list[Any]], name: str
) -> None:
    assert found[name] == [[]] * WORLD


def test_three_ranks_have_groups_of_two_as_well() -> None:
    cases = [((2, 0), True), ((1, 2), False)]
    assert run_cases(in_a_group, 3, cases) == [[[]] * 3] * 2


# -- what is saved ---------------------------------------------------------------------------------


def saved_and_loaded(folder: Path) -> list[str]:
    """Ranks 1 and 3 save what ranks 0, 2 and 3 go on with."""
    first, second, pipe = new_group(1, 3), new_group(3, 0, 2), new_pipe()
    if dist.get_rank() in (1, 3):
        pipe.decoder = parallelize(pipe.decoder, plan_of(pipe, "decoder"), group=first)
        run = Run(pipe, 0)
        run.step()
        of_all = Checkpoints(folder)
        with pytest.raises(ShardwiseError, match=r"runs on 2 workers.*on 4; give Checkpoints"):
            of_all.save(1, pipe.decoder, run.optimizers[0], {})
        decoder = torch.optim.SGD(pipe.decoder.parameters(), lr=0.05, momentum=0.9)
        checkpoints = Checkpoints(folder, comm=shardwise.of(pipe.decoder).comm)
        checkpoints.save(1, pipe.decoder, decoder, {"at": 1})
        checkpoints.wait()
        state = {"model": pipe.state_dict(), "optimizer": run.optimizers[0].state_dict()}
        assert run.finish() == []
        if dist.get_rank() == 1:
            torch.save(state, folder / "whole.pt")
    dist.barrier()
    return _gone_on(folder, torch.load(folder / "whole.pt"), second) if dist.get_rank() != 1 else []


def _gone_on(folder: Path, state: Any, group: Any) -> list[str]:
    """Another group goes on with what was saved, and so does one device."""
    found: list[str] = []
    for way in ("state_dict", "checkpoint"):
        pipe = new_pipe(7)
        plan = plan_of(pipe, "decoder", 3)
        pipe.decoder = parallelize(pipe.decoder, plan, group=group)
        pipe.load_state_dict(state["model"] if way == "state_dict" else new_pipe(8).state_dict())
        run = Run(pipe, 0)
        run.pipes[1].load_state_dict(state["model"])
        if way == "state_dict":
            for optimizer in run.optimizers:
                optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch shares it
        else:
            handle = shardwise.of(pipe.decoder)
            progress = Checkpoints(folder, comm=handle.comm).load(pipe.decoder, None)
            rest = {n: t for n, t in state["model"].items() if not n.startswith("decoder.")}
            pipe.load_state_dict(rest, strict=False)
            found += [] if progress == {"at": 1} else [f"progress is {progress}"]
        run.step()
        found += run.finish()
    return found


def test_what_one_group_saves_another_goes_on_with(tmp_path: Path) -> None:
    assert run_cases(saved_and_loaded, WORLD, [(tmp_path,)]) == [[[]] * WORLD]


# -- refused ---------------------------------------------------------------------------------------


def _said(action: Callable[[], object]) -> str:
    """What is said, at once."""
    start = time.monotonic()
    try:
        action()
    except ShardwiseError as error:
        assert time.monotonic() - start < SOON
        return str(error)
    return ""


def refusals() -> dict[str, str]:
    group, pipe = new_group(0, 1), new_pipe()
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "domain"))
    nameless, some = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [0, 1])
    local = dist.new_group([0, 1], use_local_synchronization=True)
    two, three = (plan_of(pipe, "decoder", workers, h=workers) for workers in (2, 3))

    def said(plan: Plan, **where: Any) -> str:
        return _said(lambda: parallelize(pipe.decoder, plan, **where))

    found = {
        "both": said(two, group=group, mesh=some),
        "two dims": said(two, mesh=square),
        "two dims without names": said(two, mesh=nameless),
        "no mesh": said(two, mesh=[0, 1]),
        "no group": said(two, group=square),
    }
    if dist.get_rank() < 2:
        return found | {"plan": said(three, group=group), "goes on": said(two, group=group)}
    strangers = {"group": group, "local": local}
    found |= {name: said(two, group=other) for name, other in strangers.items()}
    return found | {"mesh": said(two, mesh=some)}


def test_what_is_no_part_of_the_ranks_is_refused_in_a_sentence() -> None:
    ((first, second, _, last),) = run_cases(refusals, WORLD, [()])
    assert first["both"] == "group and mesh are both given; give the one that is meant"
    assert "2 dimensions has several groups" in first["two dims"]
    assert first["two dims"].endswith("mesh['domain'], say")
    assert "name them" in first["two dims without names"]
    assert "must be a torch.distributed.device_mesh.DeviceMesh" in first["no mesh"]
    assert "must be a process group" in first["no group"]
    for own in (first, second):
        assert own["plan"] == (
            "the plan is for 3 workers, but 2 are in the group; give it one of 3, or make a plan "
            "for 2"
        )
        assert own["goes on"] == ""
    for name in ("group", "local", "mesh"):
        assert last[name].startswith("rank 3 is not in the group; make the module parallel on")


def differs() -> list[str]:
    """Rank 3 does other things than rank 2, one after the other; both are told, and go on."""
    group, pipe, found = new_group(2, 3), new_pipe(), []
    if dist.get_rank() < 2:
        return []
    pipe.decoder = parallelize(pipe.decoder, plan_of(pipe, "decoder"), group=group)
    other, x = dist.get_rank() == 3, seeded_input(FEATURES["decoder"])
    found.append(_said(lambda: pipe.decoder(x + int(other))))
    with torch.set_grad_enabled(not other):
        found.append(_said(lambda: pipe.decoder(x)))
    y = pipe.decoder(x)
    found.append(_said((y * (2 if other else 1)).sum().backward))
    state = new_pipe(int(other)).decoder.state_dict()
    return [*found, _said(lambda: pipe.decoder.load_state_dict(state))]


def test_ranks_of_a_group_that_differ_are_named_by_their_numbers_among_all() -> None:
    ((_, _, first, second),) = run_cases(differs, WORLD, [()])
    assert first == second
    batch, mode, loss, state = first
    assert batch.startswith("rank 3 was given another batch than rank 2;")
    assert mode.startswith("rank 3 runs a batch of 2 samples") and "and rank 2 a batch" in mode
    assert loss.startswith("the loss of rank 3 is another than that of rank 2,")
    assert state == "rank 3 loads another state than rank 2"


def scaled(split: dict[str, int]) -> str:
    """One optimizer and a gradient scaler for modules on three ranks and on two of these."""
    wide, narrow, pipe = new_group(0, 1, 2), new_group(1, 2), new_pipe()
    if dist.get_rank() == 3:
        return ""
    plan = plan_of(pipe, "decoder", 3)
    pipe.decoder = parallelize(pipe.decoder, plan, group=wide)
    if dist.get_rank() > 0:
        pipe.refiner = parallelize(pipe.refiner, plan_of(pipe, "refiner", **split), group=narrow)
    scaler, optimizer = torch.amp.GradScaler("cpu"), sgd(pipe)

    def train() -> None:
        scaler.scale(pipe(seeded_input(SHAPE)).sum()).backward()
        scaler.step(optimizer)

    return _said(train)


def test_one_gradient_scaler_of_several_groups_is_refused_where_it_would_make_other_steps() -> None:
    split, whole = run_cases(scaled, WORLD, [({},), ({"h": 2},)])
    assert whole == [""] * WORLD
    for sentence in split[:3]:  # of the rank itself, or of the one that was first
        assert "'0.weight' and others of one optimizer lie on different groups" in sentence


# -- failures --------------------------------------------------------------------------------------


def fails(how: str, reach: bool) -> tuple[list[str], str]:
    """Rank 3 fails or does not come in its second step; ranks 0 and 1 train on."""
    pairs, mine = (new_group(0, 1), new_group(2, 3, limit=LIMIT / 4)), dist.get_rank() // 2
    pipe = new_pipe(mine)
    with reachable(reach):
        plan = plan_of(pipe, "decoder", h=2)
        pipe.decoder = parallelize(pipe.decoder, plan, group=pairs[mine])
    run = Run(pipe, mine)
    run.step()
    if dist.get_rank() == 3 and how == "does not come":
        return [], ""
    if dist.get_rank() == 3:
        failing = mock.patch.object(Delivery, "_start", side_effect=MemoryError("it is too much"))
        with failing, suppress(MemoryError):
            run.step()
        return [], ""
    if mine == 0:
        for _ in range(3):
            run.step()
            time.sleep(0.1)
        return run.finish(), ""
    return [], _said(run.step)


def test_a_rank_that_fails_ends_its_group_in_time_and_the_others_go_on() -> None:
    cases = [(how, reach) for how in ("fails", "does not come") for reach in (True, False)]
    told = {"fails": "rank 3 failed: it is too much", "does not come": "rank 2 waited in vain for"}
    for case, ranks in zip(cases, run_cases(fails, WORLD, cases), strict=True):
        assert [wrong for wrong, _ in ranks] == [[]] * WORLD, case
        assert ranks[2][1].startswith(told[case[0]]), case


def dies(_: str) -> tuple[list[str], str]:
    pairs, mine = (new_group(0, 1), new_group(2, 3)), dist.get_rank() // 2
    pipe = new_pipe(mine)
    pipe.decoder = parallelize(pipe.decoder, plan_of(pipe, "decoder"), group=pairs[mine])
    run = Run(pipe, mine)
    run.step()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if mine == 1:
        return [], _said(run.step)
    time.sleep(0.5)
    run.step()
    return run.finish(), ""


def test_a_rank_that_is_killed_ends_its_group_and_the_others_go_on() -> None:
    workers = WorkerPool(WORLD)
    try:
        for connection in workers._connections:
            connection.send((dies, ("",)))
        answers = [c.recv() if c.poll(60) else None for c in workers._connections[:3]]
        assert answers[:2] == [("result", ([], ""))] * 2
        kind, (_, said) = answers[2] or ("", ("", ""))
        assert kind == "last result" and "rank 2 waited in vain for rank 3" in said
    finally:
        workers.stop()

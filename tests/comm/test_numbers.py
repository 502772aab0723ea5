"""Every kind of number travels bit by bit, and is summed as on one device or refused."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from pool import shared_pool
from shardwise import run_local
from shardwise.comm import About, Communicator, communicator
from shardwise.comm.numbers import SUMMED
from shardwise.errors import ShardwiseError
from worlds import reachable

WORLD = 3
EVERYBODY = tuple(range(WORLD))
COMPLEX = (torch.complex64, torch.complex128)
MOVED_ONLY = tuple(
    getattr(torch, name)
    for name in ("bool", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
)
SHAPES = ((), (0,), (1,), (2, 0, 3), (5, 7), (300, 1000))  # the last is one that gloo carries
WAYS = (8, 0)  # how few ranks exchange messages directly: with none the backend's collectives run


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits that are numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-50, 50, shape, generator=generator).float() / 8
    if dtype.is_complex:
        return torch.complex(x, torch.flip(x, (-1,)) if shape else x).to(dtype)
    if dtype == torch.bool:
        return x > 0
    whole = not dtype.is_floating_point
    return (x.abs().floor() if whole and not dtype.is_signed else x.floor() if whole else x).to(
        dtype
    )


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit by bit: not every kind of number can be compared."""
    raw = [x.resolve_conj().contiguous().view(-1).view(torch.uint8) for x in (found, expected)]
    return found.shape == expected.shape and torch.equal(*raw)


def moved(dtype: torch.dtype, few: int) -> list[str]:
    """What did not arrive as it was."""
    comm, wrong = Communicator(), []
    comm.prepare([EVERYBODY])
    ahead, behind = (comm.rank + 1) % WORLD, (comm.rank - 1) % WORLD
    with mock.patch.object(communicator, "FEW", few):
        for shape in SHAPES:
            mine = drawn(shape, dtype, comm.rank)
            arrived, parts = torch.empty_like(mine), [torch.empty_like(mine) for _ in EVERYBODY]
            comm.exchange([(ahead, mine)], [(behind, arrived)]).wait()
            comm.all_gather(EVERYBODY, parts, mine).wait()
            swapped = [torch.empty_like(mine) for _ in EVERYBODY]
            sends = [drawn(shape, dtype, 10 * comm.rank + rank) for rank in EVERYBODY]
            comm.all_to_all(EVERYBODY, swapped, sends).wait()
            copy = mine.clone()
            comm.broadcast(copy, 1).wait()
            for what, found, seed in (
                ("exchange", arrived, behind),
                ("broadcast", copy, 1),
                *(("gather", part, rank) for rank, part in enumerate(parts)),
                *(("all to all", part, 10 * r + comm.rank) for r, part in enumerate(swapped)),
            ):
                if not same(found, drawn(shape, dtype, seed)):
                    wrong.append(f"{what} of {shape}")
    return wrong


@pytest.mark.parametrize("few", WAYS)
@pytest.mark.parametrize("dtype", (*SUMMED, *COMPLEX, *MOVED_ONLY), ids=str)
def test_every_kind_of_number_arrives_as_it_was_sent(dtype: torch.dtype, few: int) -> None:
    assert shared_pool(WORLD).run(moved, dtype, few) == [[]] * WORLD


def moved_by_gloo() -> list[str]:
    with reachable(False):
        return moved(torch.complex64, 8) + moved(torch.bool, 8)


def test_ranks_that_are_not_connected_move_every_shape_too() -> None:
    assert run_local(moved_by_gloo, WORLD) == [[]] * WORLD


def on_one_device(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0, dtype=parts[0].dtype)


def summed(dtype: torch.dtype, few: int) -> list[str]:
    """Sums that are not those of one device."""
    comm, wrong = Communicator(), []
    comm.prepare([EVERYBODY])
    lane = comm.in_lane("sums")
    lane.prepare([EVERYBODY])
    with mock.patch.object(communicator, "FEW", few):
        for shape in SHAPES:
            everyone = [drawn(shape, dtype, rank) for rank in EVERYBODY]
            found = {}
            for name, own, algorithm in (
                ("sum", comm, None),
                ("sum in a lane", lane, None),
                ("ring", lane, "ring"),
            ):
                found[name] = everyone[comm.rank].clone()
                own.all_reduce(EVERYBODY, found[name], algorithm=algorithm).wait()
            found["sum of parts"] = torch.empty_like(everyone[0])
            comm.reduce_scatter(
                EVERYBODY, found["sum of parts"], [everyone[comm.rank]] * WORLD
            ).wait()
            expected = on_one_device(everyone)
            for name, x in found.items():
                exact = not dtype.is_floating_point
                if not torch.allclose(x, expected, **({"rtol": 0, "atol": 0} if exact else {})):
                    wrong.append(f"{name} of {shape}")
    return wrong


@pytest.mark.parametrize("few", WAYS)
@pytest.mark.parametrize("dtype", (*SUMMED, *COMPLEX), ids=str)
def test_sums_are_those_of_one_device(dtype: torch.dtype, few: int) -> None:
    assert shared_pool(WORLD).run(summed, dtype, few) == [[]] * WORLD


def conjugate() -> list[bool]:
    """Torch puts conjugation off: the memory of such a tensor holds other numbers."""
    comm = Communicator()
    comm.prepare([EVERYBODY])
    ahead, behind = (comm.rank + 1) % WORLD, (comm.rank - 1) % WORLD
    each = [drawn((4, 5), torch.complex64, rank).conj() for rank in EVERYBODY]
    arrived, total = torch.empty_like(each[0].resolve_conj()), each[comm.rank].clone()
    comm.exchange([(ahead, each[comm.rank])], [(behind, arrived)]).wait()
    comm.all_reduce(EVERYBODY, total).wait()
    lazy = drawn((4, 5), torch.complex64, comm.rank).conj()
    comm.all_reduce(EVERYBODY, lazy).wait()
    return [
        same(arrived, each[behind].resolve_conj()),
        *(torch.allclose(x, on_one_device(each)) for x in (total, lazy)),
    ]


def test_numbers_whose_conjugation_is_put_off_travel_as_what_they_are() -> None:
    assert shared_pool(WORLD).run(conjugate) == [[True] * 3] * WORLD


@pytest.mark.parametrize("dtype", MOVED_ONLY, ids=str)
def test_what_cannot_be_summed_is_refused_by_name(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    x, comm = torch.zeros(3).to(dtype), Communicator()
    with pytest.raises(ShardwiseError, match=f"'mask' is {name}, which is not summed over ranks"):
        comm.all_reduce((0,), x, About("mask"))
    with pytest.raises(ShardwiseError, match=f"'mask' is {name}, which is not summed over ranks"):
        comm.reduce_scatter((0,), x, [x], About("mask"))

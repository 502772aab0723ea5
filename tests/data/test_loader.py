"""The loader: each rank gets its box of the same batches, resumes anywhere, and reads little."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from datafiles import write_cifar
from pool import shared_pool
from shardwise import Plan, capture, parallelize, zoo
from shardwise.data import Augment, Cifar10, Loader, Store, Synthetic, digits, pack
from shardwise.errors import ShardwiseError
from shardwise.geometry.box import Box
from shardwise.geometry.layout import blocks


def samples_of(rank: int, world: int, shape: tuple[int, ...]):  # type: ignore[no-untyped-def]
    """The box of a rank when samples are split."""

    def box(num: int) -> Box:
        start, stop = blocks(num, world)[rank].tolist()
        return Box((start,) + (0,) * len(shape), (stop, *shape))

    return box


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_ranks_sees_the_same_batches(world: int) -> None:
    source = Synthetic(37, (1, 6, 6))
    augment = Augment((True, True), None, 2)
    alone = list(Loader(source, 10, seed=4, augment=augment))
    assert [batch.size for batch in alone] == [10, 10, 10, 7]
    ranks = [
        Loader(source, 10, seed=4, augment=augment, box=samples_of(rank, world, source.shape))
        for rank in range(world)
    ]
    for whole, parts in zip(alone, zip(*ranks, strict=True), strict=True):
        assert torch.equal(torch.cat([part.x for part in parts]), whole.x)
        for part in parts:
            assert part.indices == whole.indices and torch.equal(part.y, whole.y)


def test_no_sample_is_missed_or_seen_twice_when_ranks_come_and_go() -> None:
    source = Synthetic(50, (1, 4, 4))
    undisturbed = Loader(source, 8, seed=9)
    wanted = [batch.indices for _ in range(2) for batch in undisturbed]
    given: list[tuple[int, ...]] = []
    state = Loader(source, 8, seed=9).state_dict()
    for world, num_batches in ((4, 3), (2, 2), (3, 4), (1, 1), (4, 99)):
        ranks = [
            Loader(source, 8, seed=9, box=samples_of(rank, world, source.shape))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.load_state_dict(state)
        seen: list[int] = []
        while len(seen) < num_batches and ranks[0].epoch < 2:
            for parts in zip(*ranks, strict=True):
                assert len({part.indices for part in parts}) == 1
                assert sum(len(part.x) for part in parts) == parts[0].size
                given.append(parts[0].indices)
                seen.append(len(parts))
                state = ranks[0].state_dict()
                assert all(rank.state_dict() == state for rank in ranks)
                if len(seen) == num_batches:
                    break
    assert given == wanted
    for epoch in range(2):
        numbers = [index for batch in given[epoch * 7 : epoch * 7 + 7] for index in batch]
        assert sorted(numbers) == list(range(50))


def test_a_run_resumed_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    source = Synthetic(6, (1, 4, 4))
    loader = Loader(source, 3)
    for _ in loader:
        state = loader.state_dict()
    resumed = Loader(source, 3)
    resumed.load_state_dict(state)
    assert (resumed.epoch, len(resumed), list(resumed)) == (0, 0, [])
    assert (resumed.epoch, len(resumed)) == (1, 2)
    assert loader.epoch == 1


def test_a_quarter_with_halo_reads_at_most_30_percent(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar")
    pack(Synthetic(4, (3, 256, 256)), tmp_path / "store")
    augment = Augment((False, True), None, 4)
    for source, halo in ((Cifar10(tmp_path / "cifar"), 1), (Store(tmp_path / "store"), 3)):
        size, sample = source.shape[1], int(np.prod(source.shape))
        for transform in (None, augment if size > 32 else None):
            for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
                low = [max(0, place * size // 2 - halo) for place in (row, column)]
                high = [min(size, (place + 1) * size // 2 + halo) for place in (row, column)]

                def box(num: int, low: list[int] = low, high: list[int] = high) -> Box:
                    return Box((0, 0, *low), (num, 3, *high))

                before = source.bytes_read
                for _ in Loader(source, 4, box=box, augment=transform):
                    pass
                assert source.bytes_read - before <= 0.30 * sample * len(source)


def test_ranks_without_a_part_get_empty_tensors_and_read_no_sample() -> None:
    source = Synthetic(6, (2, 4, 4))
    loader = Loader(source, 3, box=lambda num: Box((0, 0, 0, 0), (0, 2, 4, 4)))
    assert [tuple(batch.x.shape) for batch in loader] == [(0, 2, 4, 4)] * 2
    assert source.bytes_read == 0


def test_a_box_outside_of_the_batch_is_refused() -> None:
    loader = Loader(Synthetic(6, (2, 4, 4)), 3, box=lambda num: Box((0, 0, 0, 0), (num, 2, 5, 4)))
    with pytest.raises(ShardwiseError, match=r"is not inside a batch of 3x2x4x4"):
        next(iter(loader))


class Broken(Synthetic):
    def _read(self, index: int, box: Box) -> np.ndarray:
        if index == 3:
            raise ShardwiseError("sample 3 is broken")
        return super()._read(index, box)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_while_reading_ahead_reaches_the_reader(prefetch: int) -> None:
    loader = Loader(Broken(8, (1, 4, 4)), 2, shuffle=False, prefetch=prefetch)
    seen = []
    with pytest.raises(ShardwiseError, match="sample 3 is broken"):
        for batch in loader:
            seen.append(batch.indices)
    assert seen == [(0, 1)]
    assert loader.state_dict()["position"] == 2
    assert not any(thread.name == "shardwise-prefetch" for thread in threading.enumerate())


def test_leaving_a_loop_ends_the_thread_and_the_next_one_goes_on() -> None:
    loader = Loader(Synthetic(20, (1, 4, 4)), 4, seed=1)
    wanted = [batch.indices for batch in Loader(Synthetic(20, (1, 4, 4)), 4, seed=1)]
    for batch in loader:
        assert batch.indices == wanted[0]
        break
    assert not any(thread.name == "shardwise-prefetch" for thread in threading.enumerate())
    assert [batch.indices for batch in loader] == wanted[1:]


def test_numbers_are_those_that_training_wants() -> None:
    batch = next(iter(Loader(digits(), 64)))
    assert batch.x.dtype == torch.float32 and batch.y.dtype == torch.int64
    assert batch.x.shape == (64, 1, 8, 8) and batch.y.shape == (64,)
    assert batch.x.min() == 0 and batch.x.max() == 1
    assert not batch.x.is_pinned()


def test_parts_go_to_the_device() -> None:
    batch = next(iter(Loader(digits(), 64, device="meta")))
    assert batch.x.device.type == batch.y.device.type == "meta"


def _train_from_parts() -> tuple[list[float], int]:
    """On every rank: a few steps of the digits network, with each rank reading its own box."""
    torch.manual_seed(0)
    model = zoo.build("digits", width=4)
    graph = capture(model, torch.zeros(32, 1, 8, 8))
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    split = {1: {}, 2: {"h": 2}, 4: {"h": 2, "w": 2}}[world]
    model = parallelize(model, Plan.uniform(graph, world=world, **split))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    source = digits("test")
    augment = Augment(padding=1, mean=(0.3,), std=(0.4,))
    loader = Loader(source, 32, box=model.input_box, augment=augment)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch.x, batch=batch.size), batch.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, source.bytes_read - 8 * len(source)


def test_ranks_that_read_their_own_boxes_train_as_one() -> None:
    alone, whole = shared_pool(1).run(_train_from_parts)[0]
    assert len(alone) == 12
    for losses, read in shared_pool(4).run(_train_from_parts):
        np.testing.assert_allclose(losses, alone, rtol=1e-4)
        assert read < 0.3 * whole

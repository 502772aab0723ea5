"""What a launcher has started, and where it computes."""

from __future__ import annotations

import pytest
import torch

from shardwise import ShardwiseError, init_from_environment
from shardwise.launch import launchers


@pytest.fixture
def three_workers(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 3), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 3)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_nccl_with_fewer_gpus_than_workers_is_refused(three_workers: object) -> None:
    sentence = "2 GPUs are on this host, and 3 workers: NCCL needs one for each"
    with pytest.raises(ShardwiseError, match=sentence):
        init_from_environment(backend="nccl")


def test_gpus_that_are_left_alone_are_said(three_workers: pytest.MonkeyPatch) -> None:
    class Joined(Exception):
        pass

    def check(_: object) -> None:
        raise Joined  # before anybody waits for others

    three_workers.setattr(launchers, "_check_address", check)
    three_workers.setattr(launchers, "_has_mpi", lambda: False)
    with pytest.warns(UserWarning, match="they compute on its CPUs"), pytest.raises(Joined):
        init_from_environment()

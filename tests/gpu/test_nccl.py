"""Exactness over NCCL, several ranks on one GPU; `make test-gpu` runs these."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
PROGRAM = Path(__file__).parent / "nccl_ranks.py"
ALIKE = ("vgg19", "vgg128", "vgg256", "vgg512", "wrn50_4", "alexnet_bn")  # to others of the zoo


def run_ranks(what: str, world: int, names: list[str], seconds: float) -> str:
    """What rank 0 says; all ranks must end, and well."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), what, str(rank), str(world), port, *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, said[0][-3000:]
    return said[0]


@pytest.mark.timeout(600)
def test_networks_of_the_zoo_equal_one_device_over_nccl() -> None:
    from shardwise import zoo

    names = [name for name in zoo.names() if name not in ALIKE]
    said = run_ranks("exact", 4, names, 580)
    assert said.count("is exact") == len(names)


@pytest.mark.timeout(300)
def test_16_bits_over_nccl_are_within_the_spread_of_one_device() -> None:
    run_ranks("lowered", 4, ["resnet50", "inception_v3", "vgg16_cifar"], 280)

"""Emulated hosts: shaped links, prefixed output, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hosts import card_bytes
from shardwise.errors import ShardwiseError
from shardwise.launch.emulate import (
    Emulation,
    Wiring,
    _check_possible,
    run_on_hosts,
)


def _possible() -> str:
    try:
        with Emulation(Wiring(1, 1e8)):
            return ""
    except (ShardwiseError, OSError) as error:
        return str(error)


REASON = _possible()
emulated = pytest.mark.skipif(bool(REASON), reason=f"no emulated hosts here: {REASON}")

ALLREDUCE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2_500_000)
dist.all_reduce(x[:8])
start = time.perf_counter()
dist.all_reduce(x)
world = dist.get_world_size()
rate = 2 * (world - 1) / world * x.numel() * 4 / (time.perf_counter() - start)
print("rate", round(rate / 1e6, 1), "sum", float(x[-1]))
dist.destroy_process_group()
"""


def holders() -> int:
    found = subprocess.run(["pgrep", "-fc", "sleep infinity"], capture_output=True, text=True)
    return int(found.stdout or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "1gbit"), "--hosts 0"),
        ((2, "1gbit", 3), "--per-switch 3"),
        ((2, "1gbit", None, "1gbit"), "--uplink needs --per-switch"),
        ((2, "fast"), "fast"),
        ((3, "1gbit,500mbit"), "2 rates for 3 hosts"),
    ],
)
def test_a_wiring_that_cannot_be_is_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ShardwiseError, match=message):
        Wiring.of(*arguments)


def test_hosts_may_have_links_of_their_own() -> None:
    wiring = Wiring.of(3, "800mbit, 800mbit, 80mbit")
    assert [wiring.rate(host) for host in range(3)] == [1e8, 1e8, 1e7]
    assert wiring.uplink == 1e8
    assert [Wiring.of(2, "80mbit").rate(host) for host in range(2)] == [1e7, 1e7]


def test_without_root_there_is_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ShardwiseError, match="needs root"):
        _check_possible()


@emulated
def test_links_have_their_rate_and_hosts_their_names(capfd: pytest.CaptureFixture[str]) -> None:
    before = holders()
    code = run_on_hosts(Wiring.of(2, "400mbit"), [sys.executable, "-c", ALLREDUCE])
    lines = [line for line in capfd.readouterr().out.splitlines() if " rate " in line]
    assert code == 0
    assert {line.split(" | ")[0] for line in lines} == {"host 0", "host 1"}
    rates = [float(line.split()[4]) for line in lines]
    assert all(rate < 55 for rate in rates)  # 50 MB/s, and a burst
    assert holders() == before


@emulated
def test_cards_count_what_crosses_an_oversubscribed_uplink() -> None:
    with Emulation(Wiring.of(4, "1gbit", 2, "200mbit")) as emulation:
        before = [card_bytes(holder.pid) for holder in emulation.holders]
        jobs = [emulation.start(0, ["ping", "-c", "1", "10.77.0.4"], {})] if _has("ping") else []
        for job in jobs:
            assert job.wait(10) == 0
        after = [card_bytes(holder.pid) for holder in emulation.holders]
    assert len(before) == len(after) == 5  # of four hosts, and of the switches


def _has(tool: str) -> bool:
    return subprocess.run(["which", tool], capture_output=True).returncode == 0


@emulated
def test_a_failing_rank_gives_its_exit_code_and_the_others_are_ended() -> None:
    script = "import os, sys, time; time.sleep(0 if os.environ['RANK'] == '1' else 60); sys.exit(7)"
    start = time.monotonic()
    code = run_on_hosts(Wiring.of(2, "1gbit"), [sys.executable, "-c", script], grace=0.5)
    assert code == 7
    assert time.monotonic() - start < 30


@emulated
def test_nothing_is_left_behind_when_the_emulator_is_killed() -> None:
    before = holders()
    program = "from shardwise.launch.emulate import *; "
    program += "run_on_hosts(Wiring.of(2, '1gbit'), ['sleep', '87'])"
    job = subprocess.Popen([sys.executable, "-c", program])
    for _ in range(400):
        if subprocess.run(["pgrep", "-f", "^sleep 87"], capture_output=True).returncode == 0:
            break
        time.sleep(0.05)
    assert holders() > before
    job.send_signal(signal.SIGKILL)
    job.wait()
    for _ in range(100):
        if holders() == before:
            break
        time.sleep(0.05)
    assert holders() == before
    assert subprocess.run(["pgrep", "-f", "^sleep 87"], capture_output=True).returncode == 1

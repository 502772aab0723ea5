"""A cluster on one machine: every host a network namespace, every link a shaped veth pair.

Namespaces have no names: each lives as long as the process that holds it, and these processes end
with this one, however it ends. So nothing is ever left behind.

    host 0  eth0 ---- p0  \\
    host 1  eth0 ---- p1  - bridge br0  u0 ---- c0 \\
                                                    - bridge core
    host 2  eth0 ---- p2  - bridge br1  u1 ---- c1 /
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from shardwise.errors import ShardwiseError
from shardwise.units import parse_rate

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
GRACE = 5.0  # seconds a process gets to end before it is killed
MAX_HOSTS = 250
PACKET = 80_000  # bytes: 64 KiB and the headers of all segments, with some room
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Wiring:
    """How many hosts there are and how they are joined; rates in bytes per second.

    Hosts have links of the same rate, or one each (`links`).
    """

    hosts: int
    link: float
    per_switch: int | None = None
    uplink: float | None = None
    links: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, hosts: int, link: str, per_switch: int | None = None, uplink: str | None = None
    ) -> Wiring:
        """From what a user writes; says what is wrong."""
        if not 1 <= hosts <= MAX_HOSTS:
            raise ShardwiseError(f"--hosts {hosts}: there can be 1 to {MAX_HOSTS} hosts")
        if per_switch is not None and not 1 <= per_switch <= hosts:
            raise ShardwiseError(f"--per-switch {per_switch}: there can be 1 to {hosts} per switch")
        if uplink is not None and per_switch is None:
            raise ShardwiseError("--uplink needs --per-switch: the hosts that share an uplink")
        rates = tuple(parse_rate(text.strip()) for text in link.split(","))
        if len(rates) not in (1, hosts):
            raise ShardwiseError(f"--link {link}: {len(rates)} rates for {hosts} hosts")
        fastest, several = max(rates), rates if len(rates) > 1 else ()
        return cls(hosts, fastest, per_switch, parse_rate(uplink) if uplink else fastest, several)

    def rate(self, host: int) -> float:
        """Bytes a second of a host's link."""
        return self.links[host] if self.links else self.link

    @property
    def num_switches(self) -> int:
        return -(-self.hosts // self.per_switch) if self.per_switch else 1

    def switch(self, host: int) -> int:
        return host // self.per_switch if self.per_switch else 0

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"


@dataclass
class Emulation:
    """The namespaces of one emulated cluster; use it in a `with` statement."""

    wiring: Wiring
    holders: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Emulation:
        _check_possible()
        try:
            self.holders = [_holder() for _ in range(self.wiring.hosts + 1)]
            self._wire()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the namespaces; their devices go with them."""
        for holder in self.holders:
            holder.kill()
        for holder in self.holders:
            holder.wait()
        self.holders = []

    @property
    def _fabric(self) -> int:
        """The process whose namespace holds the switches."""
        return self.holders[-1].pid

    def _wire(self) -> None:
        wiring = self.wiring
        for switch in range(wiring.num_switches):
            _inside(
                self._fabric, f"ip link add br{switch} type bridge", f"ip link set br{switch} up"
            )
        for host in range(wiring.hosts):
            pid, port = self.holders[host].pid, f"p{host}"
            _inside(
                self._fabric,
                f"ip link add {port} type veth peer name eth0 netns {pid}",
                f"ip link set {port} master br{wiring.switch(host)} up",
                _shape(port, wiring.rate(host)),
            )
            _inside(
                pid,
                "ip link set lo up",
                f"ip addr add {wiring.address(host)}/16 dev eth0",
                "ip link set eth0 up",
                _shape("eth0", wiring.rate(host)),
            )
        if wiring.num_switches > 1:
            self._wire_uplinks()

    def _wire_uplinks(self) -> None:
        _inside(self._fabric, "ip link add core type bridge", "ip link set core up")
        assert self.wiring.uplink is not None
        for switch in range(self.wiring.num_switches):
            up, down = f"u{switch}", f"c{switch}"
            _inside(
                self._fabric,
                f"ip link add {up} type veth peer name {down}",
                f"ip link set {up} master br{switch} up",
                f"ip link set {down} master core up",
                _shape(up, self.wiring.uplink),
                _shape(down, self.wiring.uplink),
            )

    def start(
        self, host: int, command: Sequence[str], environment: dict[str, str], **options: object
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a host."""
        inside = ["nsenter", f"--net=/proc/{self.holders[host].pid}/ns/net", "--", *command]
        return subprocess.Popen(
            inside,
            env=os.environ | environment,
            preexec_fn=_die_with_parent,
            start_new_session=True,
            **options,  # type: ignore[arg-type]
        )


def _check_possible() -> None:
    missing = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if missing:
        raise ShardwiseError(f"emulating hosts needs {' and '.join(sorted(missing))} installed")
    if os.geteuid() != 0:
        raise ShardwiseError("emulating hosts needs root, to make network namespaces")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _holder() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own, which lives as long as it does."""
    holder = subprocess.Popen(
        ["unshare", "--net", "sleep", "infinity"],
        preexec_fn=_die_with_parent,
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    own = os.readlink("/proc/self/ns/net")
    for _ in range(500):
        with suppress(OSError):
            if os.readlink(f"/proc/{holder.pid}/ns/net") != own:
                return holder
        if holder.poll() is not None:
            break
        time.sleep(0.01)
    holder.kill()
    _, text = holder.communicate()
    reason = text.decode(errors="replace").strip().replace("\n", "; ") or "no answer"
    raise ShardwiseError(f"this system makes no network namespaces: {reason}")


def _inside(pid: int, *lines: str) -> None:
    """Runs commands in the namespace of a process."""
    for line in lines:
        command = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *line.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr or done.stdout).strip().replace("\n", "; ")
            raise ShardwiseError(f"emulating hosts failed at {line!r}: {reason}")


def _shape(device: str, rate: float) -> str:
    """A token bucket that lets so many bytes a second through.

    What an idle bucket holds passes at once, so it holds little: a packet of 64 KiB, as hosts hand
    them to their cards, or half a millisecond, as timers may be that late.
    """
    burst = max(int(rate / 2000), PACKET)
    return f"tc qdisc add dev {device} root tbf rate {int(rate * 8)}bit burst {burst} latency 100ms"


# -- running a command on all hosts ----------------------------------------------------------------


def run_on_hosts(
    wiring: Wiring, command: Sequence[str], per_host: int = 1, grace: float = 60.0
) -> int:
    """Runs a command's ranks on emulated hosts, prefixes their output, returns an exit code.

    When a rank fails, the others get `grace` seconds to end by themselves. Ctrl-C and SIGTERM are
    passed on.
    """
    if not command:
        raise ShardwiseError("there is no command to run; write it after --")
    if shutil.which(command[0]) is None:
        raise ShardwiseError(f"the command {command[0]!r} cannot be found; write its path")
    with Emulation(wiring) as emulation:
        jobs = [
            _start(emulation, host, local, per_host, command)
            for host in range(wiring.hosts)
            for local in range(per_host)
        ]
        readers = [
            threading.Thread(
                target=_echo, args=(job.stdout, f"host {place // per_host}"), daemon=True
            )
            for place, job in enumerate(jobs)
        ]
        for reader in readers:
            reader.start()
        try:
            return _wait(jobs, grace)
        finally:
            _end(jobs)
            for reader in readers:
                reader.join(GRACE)


def _start(
    emulation: Emulation, host: int, local: int, per_host: int, command: Sequence[str]
) -> subprocess.Popen[bytes]:
    wiring = emulation.wiring
    environment = {
        "RANK": str(host * per_host + local),
        "WORLD_SIZE": str(wiring.hosts * per_host),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": wiring.address(0),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONUNBUFFERED": "1",
        "SHARDWISE_PER_SWITCH": str((wiring.per_switch or wiring.hosts) * per_host),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Hosts have addresses and no names, which torch would warn about for every rank.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    try:
        return emulation.start(
            host, command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise ShardwiseError(f"the command {command[0]!r} cannot be run: {error}") from None


def _echo(stream: IO[bytes] | None, label: str) -> None:
    for line in stream or ():
        sys.stdout.write(f"{label} | {line.decode(errors='replace')}")
        sys.stdout.flush()


def _wait(jobs: list[subprocess.Popen[bytes]], grace: float) -> int:
    """The first failure's exit code, or 0; a signal is passed on to all ranks."""
    asked: list[int] = []
    handlers = {
        number: signal.signal(number, lambda sign, _: asked.append(sign))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        failed, deadline = 0, float("inf")
        while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
            if asked:
                _signal(jobs, asked[0])
                failed, deadline = 128 + asked[0], min(deadline, time.monotonic() + GRACE)
                asked.clear()
            if not failed and (failed := _first_failure(jobs)):
                deadline = time.monotonic() + grace
            time.sleep(0.05)
        return failed or _first_failure(jobs)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _first_failure(jobs: list[subprocess.Popen[bytes]]) -> int:
    """The exit code of the first rank that failed, as shells count signals; 0 if none has."""
    return next((code if code > 0 else 128 - code for job in jobs if (code := job.poll())), 0)


def _signal(jobs: list[subprocess.Popen[bytes]], number: int) -> None:
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, number)


def _end(jobs: list[subprocess.Popen[bytes]]) -> None:
    """Nothing that was started stays."""
    _signal([job for job in jobs if job.poll() is None], signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
        time.sleep(0.02)
    _signal(jobs, signal.SIGKILL)
    for job in jobs:
        job.wait()

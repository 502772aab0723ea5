"""One rank of a run in which something goes wrong at a named place."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from faults.table import Cell
from shardwise import capture
from shardwise.checkpoint import export, manifest, pieces, writer
from shardwise.comm import communicator, pending
from shardwise.data import Arrays
from shardwise.data.store import Store
from shardwise.errors import ShardwiseError
from shardwise.training import run_folder
from shardwise.training.settings import read_settings
from shardwise.training.trainer import Trainer

FIRST_STEPS, LAST_STEP, STORE = 2, 6, "store"
KINDS = {"forward": "transfer", "statistics": "statistics", "gradients": "gradients"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv1, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv1(self.norm(self.conv0(x)).relu()).mean((2, 3)))


capture(Net(), torch.zeros(6, 1, 9, 6))  # imports what torch imports late, once for all workers


class Samples(Arrays):
    """Reads as arrays do, past a place where something may happen."""

    def __init__(self, pass_by: Callable[[], None] = lambda: None) -> None:
        images = np.random.default_rng(0).normal(size=(24, 1, 9, 6)).astype(np.float32)
        super().__init__(images, np.arange(24) % 3, "samples", ("a", "b", "c"))
        self.pass_by = pass_by

    def read(self, *args: Any) -> Any:
        self.pass_by()
        return super().read(*args)


class Fault:
    """Strikes once, at the n-th occasion."""

    def __init__(self, cell: Cell, timeout: float, tell: Callable[[str], None]) -> None:
        self.cell, self.timeout, self.tell, self.left = cell, timeout, tell, cell.chance

    def pass_by(self, half_done: Callable[[], None] = lambda: None) -> None:
        self.left -= 1
        if self.left == 0:
            self.tell("struck")
            half_done()
            getattr(self, self.cell.fault)()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    torn = kill  # half of it is written

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def slow(self) -> None:
        time.sleep(self.timeout / 2)

    def exception(self) -> None:
        raise LookupError("a fault of the test")

    def memory(self) -> None:
        raise MemoryError

    def full(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def cut(self) -> None:
        """All connections over TCP but the one to the meeting point."""
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as end:
                    inside = end.family in (socket.AF_INET, socket.AF_INET6)
                    if inside and end.getpeername()[1] != int(os.environ["STORE_PORT"]):
                        end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def inject(fault: Fault) -> Callable[[], None]:
    """Puts the fault at its place; returns what reading a sample passes by."""
    place = fault.cell.place
    if place in KINDS:
        begin = pending.Communication.__init__

        def started(self: Any, comm: Any, action: str, peers: Any, about: Any) -> None:
            layer = about.name.split(">")[0].split(" ")[0] in ("conv0", "conv1", "norm", "head")
            if about.kind == KINDS[place] and (layer or place != "forward"):
                fault.pass_by()
            begin(self, comm, action, peers, about)

        pending.Communication.__init__ = started  # type: ignore[method-assign]
    elif place == "start":
        _before(communicator.Communicator, "gather_objects", fault)
    elif place == "checkpoint":
        write = writer._write

        def write_half(file: Any, content: memoryview) -> None:
            fault.pass_by(lambda: write(file, content[: len(content) // 2]))
            write(file, content)

        writer._write = write_half
    elif place == "resume" and fault.cell.fault == "full":
        _before(run_folder, "write_whole", fault)
    elif place == "resume":
        _before(manifest.Reader, "_read", fault)
    elif place == "metrics":
        _before(run_folder.RunFolder, "add", fault, inside=fault.cell.fault in ("full", "torn"))
    return fault.pass_by if place == "data" else lambda: None


def _before(owner: Any, name: str, fault: Fault, inside: bool = False) -> None:
    """The fault comes before a call; or inside it, when its file is written to."""
    original = getattr(owner, name)

    def replaced(*args: Any, **values: Any) -> Any:
        if inside:
            args[0]._metrics = _Half(args[0]._metrics, fault)
        else:
            fault.pass_by()
        return original(*args, **values)

    setattr(owner, name, replaced)


class _Half:
    """A file of which half a write arrives before the fault."""

    def __init__(self, file: Any, fault: Fault) -> None:
        self._file, self._fault = file, fault

    def write(self, content: bytes) -> int:
        self._fault.pass_by(lambda: (self._file.write(content[:9]), self._file.flush())[0])
        return self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def train(run: Path, world: int, samples: Any, steps: int, **given: Any) -> None:
    pieces.SMALL = 16  # bytes: so that every rank writes a part
    settings = {"out": str(run), "batch": 6, "split": f"h={world}", "steps": steps, "lr": 0.01}
    settings |= {"log_every": 1, "checkpoint_every": 1, "report": False, "prefetch": 1, **given}
    torch.manual_seed(0)
    Trainer(read_settings(None, settings), model=Net(), train=samples, quiet=True).fit()


def work(
    rank: int, world: int, port: int, cell: Cell | None, run: Path, timeout: float, pipe: Connection
) -> None:
    """Trains on from a checkpoint until the fault, and says how this rank has ended."""

    def tell(kind: str, text: str = "") -> None:
        pipe.send((kind, text, time.monotonic()))

    os.environ.update(STORE_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    seconds = timedelta(seconds=timeout)
    try:
        passed: Callable[[], None] = lambda: None  # noqa: E731
        if cell is not None and rank == cell.victim(world):
            passed = inject(Fault(cell, timeout, tell))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=seconds)
        steps = FIRST_STEPS if cell is None else LAST_STEP
        torn = cell is not None and cell.damaged and cell.place == "data"
        samples = Store(run / STORE) if torn else Samples(passed)
        train(run, world, samples, steps, resume=cell is not None)
        tell("done")
    except ShardwiseError as error:
        tell("sentence", str(error))
    except BaseException as error:
        tell("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    pipe.recv()  # leaving now would end the others, who must end by themselves
    os._exit(0)


def export_alone(cell: Cell, run: Path, timeout: float, pipe: Connection) -> None:
    """Exports over an older file."""

    def tell(kind: str, text: str = "") -> None:
        pipe.send((kind, text, time.monotonic()))

    fault = Fault(cell, timeout, tell)
    save = torch.save

    def save_half(state: Any, file: Any) -> None:
        fault.pass_by(lambda: save(state, file))
        save(state, file)

    fault.left, torch.save = 1, save_half
    try:
        export(run, run / "model.pt")
        tell("done")
    except ShardwiseError as error:
        tell("sentence", str(error))
    except BaseException as error:
        tell("error", f"{type(error).__name__}: {error}")
    pipe.recv()
    os._exit(0)

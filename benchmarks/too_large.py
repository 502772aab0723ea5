"""A 3-D U-Net that is too large for one worker: made on the meta device, and trained on four.

    python benchmarks/too_large.py [--channels 64 128 256 512] [--edge 40] [--limit 220MiB]

Every process may use so much address space (RLIMIT_AS) beyond what it has when its libraries are
loaded. Alone, plain torch cannot hold the weights, their gradients and momentum; nor, where weights
cost nothing, the activations of a forward pass. Four workers make the model on the meta device,
plan it, read their blocks from a safetensors file, and train. Losses are compared with those of a
process without a limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import shardwise
from results import save
from shardwise import load_weights, parallelize, run_local, zoo
from shardwise.planner.best_plan import size
from shardwise.planner.layer_costs import Training
from shardwise.runtime.block import plain
from shardwise.units import parse_size

WORKERS = 4
SIGNS = ("allocate memory", "not enough memory", "MemoryError")
STACK = 1 << 20  # bytes for each of a worker's 15 or so threads, of gloo mostly; else 8 MiB
PLANNED = 0.9  # of the limit; the rest is for messages and what libraries need


@dataclass(frozen=True)
class Case:
    """A network, a volume, and how long it is trained."""

    channels: tuple[int, ...]
    edge: int
    steps: int = 3

    def network(self, device: str = "cpu") -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            return zoo.build("unet3d", channels=self.channels)

    def volume(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator, shape = torch.Generator().manual_seed(0), (self.edge,) * 3
        x = torch.randn(1, 1, *shape, generator=generator)
        return x, torch.randint(0, 3, (1, *shape), generator=generator)


TINY = Case((4, 8), 8, steps=1)


def used(field: str) -> int:
    """Bytes of address space that this process uses (VmSize), or has used at most (VmPeak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def reserve_little() -> None:
    """Processes that are started from here reserve little address space that they do not use."""
    # Large tensors go back to the system when they are freed, and threads have no heaps.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, most))


def limit_memory(limit: int | None) -> None:
    if limit is not None:
        most = used("VmSize") + limit
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def train(model: nn.Module, case: Case) -> list[float]:
    """The losses of some steps with momentum."""
    x, y = case.volume()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses = []
    for _ in range(case.steps):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# -- alone -----------------------------------------------------------------------------------------


def hold(case: Case) -> str:
    """Weights, gradients and momentum, and nothing else."""
    optimizer = torch.optim.SGD(case.network().parameters(), lr=1e-3, momentum=0.9)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return "held"


def activate(case: Case) -> str:
    """Weights, and what a forward pass keeps for the way back."""
    loss = case.network()(case.volume()[0]).sum()
    return f"held, {float(loss.detach()):.3g}"


def train_alone(case: Case) -> list[float]:
    return train(case.network(), case)


def attempt(action: Any, case: Case, limit: int | None) -> Any:
    """What one process can do under a limit, or the words in which torch gives up."""
    torch.set_num_threads(1)
    train_alone(TINY)  # libraries are loaded
    limit_memory(limit)
    try:
        return action(case)
    except (RuntimeError, MemoryError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        if not any(sign in text for sign in SIGNS):
            raise
        return text


def in_a_process(action: Any, case: Case, limit: int | None = None) -> Any:
    """The same in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(attempt, action, case, limit).result()


# -- together --------------------------------------------------------------------------------------


def train_together(case: Case, file: Path, memory: int | None) -> dict[str, Any]:
    """Made on the meta device, planned, loaded block by block and trained."""
    model = case.network("meta")
    x = torch.empty(1, 1, *(case.edge,) * 3, device="meta")
    training = Training(states=1)
    plan = shardwise.plan(model, x, workers=WORKERS, memory=memory, training=training)
    parallel = parallelize(model, plan)
    load_weights(parallel, file)
    held = sum(plain(p).nbytes for p in parallel.parameters())
    splits = sorted({str(config) for config in plan.layers.values()})
    predicted = plan.findings.prediction.memory
    return {
        "losses": train(parallel, case),
        "weights": held,
        "splits": splits,
        "predicted": predicted,
    }


def worker(case: Case, files: tuple[Path, Path], limit: int | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    tiny, file = files
    train_together(TINY, tiny, None)  # libraries are loaded, and workers are connected
    base = used("VmSize")
    limit_memory(limit)
    found = train_together(case, file, None if limit is None else int(PLANNED * limit))
    return found | {"peak": used("VmPeak") - base}


def write_weights(case: Case, path: Path) -> int:
    state = case.network().state_dict()
    save_file(state, path)
    return sum(value.nbytes for value in state.values())


def compare(case: Case, limit: int) -> dict[str, Any]:
    """All that can be done alone and together under this limit."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "tiny.safetensors"), Path(folder, "unet.safetensors")
        write_weights(TINY, files[0])
        weights = write_weights(case, files[1])
        together = run_local(worker, WORKERS, case, files, limit)
    return {
        "case": case.__dict__,
        "limit": limit,
        "weights": weights,
        "weights alone": in_a_process(hold, case, limit),
        "activations alone": in_a_process(activate, case, limit + weights),
        "alone without limit": in_a_process(train_alone, case),
        "together": together,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--edge", type=int, default=40, help="of the volume")
    parser.add_argument("--limit", default="220MiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    reserve_little()
    case = Case(tuple(arguments.channels), arguments.edge, arguments.steps)
    found = compare(case, parse_size(arguments.limit))
    weights, limit = found["weights"], found["limit"]
    print(f"U-Net of {size(weights)}, one volume of {case.edge}^3, at most {size(limit)} a process")
    print(f"one process holds weights, gradients, momentum: {found['weights alone']}")
    print(f"activations, with {size(weights)} more for weights: {found['activations alone']}")
    for rank, own in enumerate(found["together"]):
        print(
            f"rank {rank}: {size(own['weights'])} of weights, predicted {size(own['predicted'])}, "
            f"at most {size(own['peak'])}"
        )
    print(f"splits: {', '.join(found['together'][0]['splits'])}")
    alone, losses = found["alone without limit"], found["together"][0]["losses"]
    error = max(abs(a / b - 1) for a, b in zip(losses, alone, strict=True))
    print(f"losses of four: {', '.join(f'{loss:.7f}' for loss in losses)}")
    print(f"without limit:  {', '.join(f'{loss:.7f}' for loss in alone)} (at most {error:.0e} off)")
    save(arguments.json, found)


if __name__ == "__main__":
    main()

"""One worker against plain PyTorch on a GPU: whole training steps, in turns, in one run.

    python benchmarks/gpu.py [eager] [compiled] [graphs] [split] [--networks resnet50 ...]

eager: float32 (with TF32), and bf16 under torch.autocast with channels_last; images per second, and
the most memory that a step holds. The aim is a ratio of at most 1.02 and 1.03, of memory 1.03.
compiled: bf16 with compile=True against torch.compile of the plain model, with the time that
compiling takes. graphs: ResNet-50 with 2 and 16 images, in CUDA graphs, against plain eager.
split: what 2, 4 and 8 workers compute, one after the other and without their messages, against one.
Times are medians of turns of several steps with SGD and momentum; ratios are shardwise / plain.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from results import save
from shardwise import Plan, capture, parallelize, zoo
from shardwise.comm.silent import Silent

CUDA = torch.device("cuda")


class ConvNeXtBlock(nn.Module):
    """A depthwise 7x7 convolution, layer norm over channels, and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(nn.functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
        return x + self.scale * y


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    """A network like ConvNeXt-T."""
    widths, layers = (96, 192, 384, 768), []
    for before, width, depth in zip((3, *widths), widths, (3, 3, 9, 3), strict=False):
        size = 4 if before == 3 else 2
        norm = [] if before == 3 else [ChannelNorm(before, eps=1e-6)]
        layers += [*norm, nn.Conv2d(before, width, size, size)]
        layers += [ConvNeXtBlock(width) for _ in range(depth)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, 1000))


class Case(NamedTuple):
    """A network, the samples of a step, and their shape."""

    build: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    num_classes: int


CASES = {
    "resnet50": Case(lambda: zoo.build("resnet50"), 128, (3, 224, 224), 1000),
    "vgg16": Case(lambda: zoo.build("vgg16"), 64, (3, 224, 224), 1000),
    "inception_v3": Case(lambda: zoo.build("inception_v3"), 64, (3, 299, 299), 1000),
    "densenet121": Case(lambda: zoo.build("densenet121"), 64, (3, 224, 224), 1000),
    "convnext": Case(convnext, 64, (3, 224, 224), 1000),
    "unet3d": Case(lambda: zoo.build("unet3d"), 1, (1, 160, 160, 160), 3),
}


class Trained:
    """A model with its optimizer and a batch; `steps` trains it."""

    def __init__(self, model: nn.Module, case: Case, x: torch.Tensor, half: bool) -> None:
        self.model, self.x, self.half = model, x, half
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        shape = (len(x),) if case.num_classes == 1000 else (len(x), *case.shape[1:])
        self.y = torch.randint(0, case.num_classes, shape, device=CUDA)

    def steps(self, count: int) -> float:
        """Seconds that so many steps take."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            with torch.autocast("cuda", torch.bfloat16) if self.half else nullcontext():
                made = self.model(self.x)
                outputs = [made] if isinstance(made, torch.Tensor) else list(made)
                loss = sum(nn.functional.cross_entropy(out, self.y) for out in outputs)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start


def batch_of(case: Case, batch: int, half: bool) -> torch.Tensor:
    x = torch.randn(batch, *case.shape, device=CUDA)
    last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    return x.to(memory_format=last) if half else x


def plain_of(case: Case, half: bool) -> nn.Module:
    torch.manual_seed(0)
    model = case.build().to(CUDA)
    last = torch.channels_last if len(case.shape) == 3 else torch.channels_last_3d
    return model.to(memory_format=last) if half else model


def parallel_of(plain: nn.Module, x: torch.Tensor, **options: Any) -> nn.Module:
    return parallelize(plain, Plan.uniform(capture(plain, x)), **options)


def made(make: Callable[[], Trained]) -> tuple[Trained, int]:
    """A model, and the most bytes that are held while it trains, beside what was held before."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    trained = make()
    gc.collect()  # models from which parallel ones were made
    trained.steps(3)
    torch.cuda.reset_peak_memory_stats()
    trained.steps(2)
    return trained, torch.cuda.max_memory_allocated() - before


def in_turns(models: dict[str, Trained], rounds: int, seconds: float = 0.4) -> dict[str, Any]:
    """Median seconds of a step of each, and quartiles of the ratio of the second to the first."""
    first = next(iter(models))
    for trained in models.values():
        trained.steps(6)
    count = max(2, round(seconds / (models[first].steps(4) / 4)))
    times: dict[str, list[float]] = {name: [] for name in models}
    for index in range(rounds):
        for name in list(models) if index % 2 else list(reversed(models)):
            times[name].append(models[name].steps(count) / count)
    ratios = [b / a for a, b in zip(*list(times.values())[:2], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    row: dict[str, Any] = {f"{k} ms": 1e3 * statistics.median(v) for k, v in times.items()}
    return row | {"ratio": middle, "ratio 25 %": low, "ratio 75 %": high}


def eager(name: str, case: Case, half: bool, rounds: int) -> dict[str, Any]:
    x = batch_of(case, case.batch, half)
    makers: dict[str, Callable[[], Trained]] = {
        "plain": lambda: Trained(plain_of(case, half), case, x, half),
        "shardwise": lambda: Trained(parallel_of(plain_of(case, half), x), case, x, half),
    }
    both = {key: made(make) for key, make in makers.items()}
    memory = {key: held for key, (_, held) in both.items()}
    row = in_turns({key: trained for key, (trained, _) in both.items()}, rounds)
    images = {f"{k} images/s": case.batch / (1e-3 * row[f"{k} ms"]) for k in makers}
    held = {"plain GiB": memory["plain"] / 2**30, "memory": memory["shardwise"] / memory["plain"]}
    return {"network": name, "types": "bf16" if half else "float32", **row, **images, **held}


def compiled(name: str, case: Case, rounds: int) -> dict[str, Any]:
    x, models, taken = batch_of(case, case.batch, True), {}, {}
    for key in ("plain", "shardwise"):
        torch._dynamo.reset()
        torch.compiler.reset()
        plain = plain_of(case, True)
        start = time.perf_counter()
        with torch._inductor.utils.fresh_inductor_cache():
            model = torch.compile(plain) if key == "plain" else parallel_of(plain, x, compile=True)
            models[key] = Trained(model, case, x, True)
            models[key].steps(2)
        taken[f"{key} compile s"] = time.perf_counter() - start
    row = in_turns(models, rounds)
    images = {f"{k} images/s": case.batch / (1e-3 * row[f"{k} ms"]) for k in models}
    ratio = taken["shardwise compile s"] / taken["plain compile s"]
    return {"network": name, "types": "bf16", **row, **images, **taken, "compile ratio": ratio}


def graphs(case: Case, batch: int, rounds: int) -> dict[str, Any]:
    x = batch_of(case, batch, True)
    models = {
        "plain": Trained(plain_of(case, True), case, x, True),
        "graphs": Trained(
            parallel_of(plain_of(case, True), x, compile="reduce-overhead"), case, x, True
        ),
        "eager": Trained(parallel_of(plain_of(case, True), x), case, x, True),
    }
    row = in_turns(models, rounds)
    return {"network": "resnet50", "batch": batch, **row, "faster": 1 / row["ratio"]}


def split(name: str, case: Case, world: int, axis: str, rounds: int) -> dict[str, Any]:
    """The sum of all workers' steps without messages, by that of one."""
    batch = max(case.batch, world if axis == "n" else 1)
    x = batch_of(case, batch, True)
    plain = plain_of(case, True)
    plan = Plan.uniform(capture(plain, x), world, **{axis: world})
    models = {"one": Trained(parallel_of(plain, x), case, x, True)}
    for rank in sorted({0, 1, world - 1}):  # the ends have one neighbour, the others two
        own = parallelize(plain, plan, comm=Silent(rank, world))
        models[f"rank {rank}"] = Trained(own, case, x, True)
    row = in_turns(models, rounds)
    inner = row["rank 1 ms"] * max(world - 2, 0)
    total = row["rank 0 ms"] + inner + row[f"rank {world - 1} ms"]
    kept = {key: value for key, value in row.items() if key.endswith("ms")}
    about = {"network": name, "split": f"{axis}={world}", "batch": batch}
    return {**about, **kept, "sum of all / one": total / row["one ms"]}


def show(row: dict[str, Any]) -> None:
    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["eager", "compiled", "graphs", "split"])
    parser.add_argument("--networks", nargs="*", default=list(CASES))
    parser.add_argument("--types", nargs="*", default=["float32", "bf16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    jobs: list[Callable[[], dict[str, Any]]] = []
    for name in arguments.networks:
        case = CASES[name]
        if "eager" in arguments.what:
            jobs += [
                lambda name=name, case=case, half=half: eager(name, case, half, arguments.rounds)
                for half in (True, False)
                if ("bf16" if half else "float32") in arguments.types
            ]
        if "compiled" in arguments.what and name in ("resnet50", "vgg16", "unet3d"):
            jobs.append(lambda name=name, case=case: compiled(name, case, arguments.rounds))
    if "split" in arguments.what:
        jobs += [
            lambda n=n, w=w, a=a: split(n, CASES[n], w, a, arguments.rounds)
            for n in ("resnet50", "unet3d")
            for w in (2, 4, 8)
            for a in ("n", "h")
            if n in arguments.networks and (n, a) != ("unet3d", "n")
        ]
    if "graphs" in arguments.what:
        small = (2, 16)
        jobs += [lambda b=b: graphs(CASES["resnet50"], b, arguments.rounds) for b in small]
    rows = []
    for job in jobs:
        try:
            rows.append(job())
            show(rows[-1])
        except Exception as error:
            print(f"failed: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            if arguments.json is None:
                raise
        torch.cuda.empty_cache()
    save(arguments.json, rows)


if __name__ == "__main__":
    main()

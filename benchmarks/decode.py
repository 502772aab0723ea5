"""Autoencoders of diffusers decoded on several ranks: exact, and what it takes.

    python benchmarks/decode.py [--families NAME ...] [--ranks 2 3 4 8] [--sizes 17x13 ...]

Image and video families, small and with random weights, at uneven sizes of latents, their rows cut
into one band per rank; real processes over gloo. Prints, relative to the output's largest value,
the error in float64, and in bf16 beside what one device makes of a change in the last bit; messages
and bytes of a decoded image or clip; and how many layers that make more than 1,000 elements run on
one rank. Below each family: the memory that decoding adds on the fullest rank against one device,
at a larger size (float32, peak resident set); and decoding in tiles that overlap by a quarter, as
others do it, on one device: its error, and its time against decoding whole.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from memory import reset_peak, resident
from outside_cases.autoencoders import FAMILIES, Family
from results import save
from shardwise import Plan, parallelize, run_local
from shardwise.graph.layer_graph import LayerGraph
from shardwise.libraries.autoencoders import Decoding
from shardwise.model.capture import ModelGraphs
from shardwise.planner.best_plan import size as size_text
from shardwise.plans.compile import compile_program
from shardwise.plans.program import Move, Run, handed_out
from shardwise.verify import compare

SIZES = ("17x13", "24x31", "37x29")  # of latents
LARGE = {4: (96, 80), 5: (40, 32)}  # latents of images and of clips, to measure memory with
TILE = 8  # latents
SMALL = 1000  # elements
DTYPES = {"float64": torch.float64, "bf16": torch.bfloat16}
Graphs = dict[tuple[str, torch.dtype], LayerGraph]


def module_of(family: Family, dtype: torch.dtype) -> nn.Module:
    return Decoding(family.build().to(dtype), dict(family.arguments)).eval()


def latents(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def graphs_of(family: Family, sizes: list[tuple[int, int]]) -> Iterator[tuple[Any, LayerGraph]]:
    """The graphs of all sizes and types, each exported once."""
    for dtype in (*DTYPES.values(), torch.float32):
        first = family.of_size(*sizes[0])
        captured = ModelGraphs(module_of(family, dtype), (first,), (dtype,), sizes_vary=True)
        for size in sizes:
            yield (size, dtype), captured(False, (family.of_size(*size),))


def traffic(graph: LayerGraph, plan: Plan) -> tuple[int, int]:
    """Messages and bytes of all ranks in one forward pass, outputs to all included."""
    program = compile_program(graph, plan, 0, frozenset())
    ops = [op for run in program.forward if isinstance(run, Run) for op in run.ops]
    moves = [(step.transfer, 4) for step in program.forward if isinstance(step, Move)]
    moves += [(op.sums, 8) for op in ops if op.sums and op.strategy.num_sums(op.local.layer)]
    outputs = (handed_out(program.layouts[name], "full") for name in program.outputs)
    moves += [(transfer, 4) for transfer in outputs if transfer is not None]
    counts = [(int(np.count_nonzero(t.messages)), int(t.messages.sum()) * n) for t, n in moves]
    return sum(count for count, _ in counts), sum(nbytes for _, nbytes in counts)


def num_whole(graph: LayerGraph, plan: Plan) -> int:
    large = [layer for layer in graph.layers if prod(layer.shape) > SMALL]
    return sum(plan.layers[layer.name].num_workers == 1 for layer in large)


# -- on every rank ---------------------------------------------------------------------------------


def measure(name: str, graphs: Graphs, sizes: list[Any], world: int) -> list[dict[str, Any]]:
    """The errors of all sizes, on rank 0; casts of a model are layers in some types only."""
    torch.set_num_threads(1)
    family, rows = FAMILIES[name], []
    for size in sizes:
        row: dict[str, Any] = {}
        for label, dtype in DTYPES.items():
            module, z = module_of(family, dtype), latents(family.of_size(*size), dtype)
            known = graphs[size, dtype]
            plan = Plan.uniform(known, h=world)
            found = compare(module, plan, (z,), graphs=lambda *_, g=known: g, inference=True)
            if found:
                row |= {label: found[0].error, f"{label} noise": found[0].noise}
        rows.append(row)
    return rows


def split_memory(name: str, graph: LayerGraph, plan: Plan) -> int:
    torch.set_num_threads(1)
    module = module_of(FAMILIES[name], torch.float32)
    parallel = parallelize(module, plan, output="local", graphs=lambda *_: graph).eval()
    return added(parallel, latents(plan.inputs[0], torch.float32))


def added(module: nn.Module, z: torch.Tensor) -> int:
    """Bytes that decoding adds to this process at its peak."""
    with torch.inference_mode():
        module(z)
        reset_peak()
        before = resident("VmRSS")
        module(z)
        return resident("VmHWM") - before


def alone(name: str, sizes: list[tuple[int, int]]) -> tuple[int, list[dict[str, float]]]:
    """One device: the memory of decoding whole, and decoding in tiles."""
    torch.set_num_threads(1)
    family = FAMILIES[name]
    z = latents(family.of_size(*LARGE[len(family.latents)]), torch.float32)
    whole = added(module_of(family, torch.float32), z)
    return whole, [tiled(family, size) for size in sizes]


def tiled(family: Family, size: tuple[int, int]) -> dict[str, float]:
    """The error of decoding in tiles, and its time against decoding whole; if it can be tiled."""
    vae: Any = family.build().double()
    if not any(hasattr(vae, name) for name in ("tiled_decode", "_tiled_decode")):
        return {}
    z = latents(family.of_size(*size), torch.float64)
    with torch.inference_mode():
        whole, once = timed(vae, z, family)
        factor = whole.shape[-1] // z.shape[-1]
        for dim in ("size", "height", "width"):
            if hasattr(vae, f"tile_latent_min_{dim}"):
                setattr(vae, f"tile_latent_min_{dim}", TILE)
            if hasattr(vae, f"tile_sample_min_{dim}"):
                setattr(vae, f"tile_sample_min_{dim}", TILE * factor)
            if hasattr(vae, f"tile_sample_stride_{dim}"):
                setattr(vae, f"tile_sample_stride_{dim}", TILE * 3 // 4 * factor)
        vae.use_tiling = True
        found, seconds = timed(vae, z, family)
    if found.shape != whole.shape:  # of this size, tiles do not make the whole
        return {"tiles": inf, "tiles time": seconds / once}
    error = float((found - whole).abs().max() / whole.abs().max())
    return {"tiles": error, "tiles time": seconds / once}


def timed(vae: Any, z: torch.Tensor, family: Family) -> tuple[torch.Tensor, float]:
    vae.decode(z, **family.arguments)
    start = time.process_time()
    found = vae.decode(z, **family.arguments).sample
    return found, time.process_time() - start


# -- tables ----------------------------------------------------------------------------------------

HEAD = f"{'latents':<10}{'ranks':>6}{'float64':>10}{'bf16':>9}{'one device':>12}"
HEAD += f"{'messages':>10}{'moved':>10}{'on one rank':>13}"


def table(name: str, sizes: list[tuple[int, int]], ranks: list[int]) -> list[dict[str, Any]]:
    family, rows = FAMILIES[name], []
    graphs: Graphs = dict(graphs_of(family, sizes))
    (once, tiles), _ = run_local(alone, 2, name, sizes)
    layers = len(graphs[sizes[0], torch.float32].layers)
    note = "; some layers compute in float32" if family.float32 else ""
    print(f"\n{name} ({family.kind}), {layers} layers{note}\n{HEAD}", flush=True)
    for world in ranks:
        found = run_local(measure, world, name, graphs, sizes, world)[0]
        for row, size in zip(found, sizes, strict=True):
            graph = graphs[size, torch.float32]
            plan = Plan.uniform(graph, h=world)
            messages, moved = traffic(graph, plan)
            row |= {
                "messages": messages,
                "bytes": moved,
                "whole": num_whole(graphs[size, torch.float32], plan),
            }
            row |= {"family": name, "latents": size, "ranks": world}
            print(line(row), flush=True)
            rows.append(row)
    rows.append({"family": name, "memory": memory(name, ranks, once)})
    for size, own in zip(sizes, tiles, strict=True):
        if own:
            print(
                f"{'x'.join(map(str, size)):<10}tiles of {TILE} latents on one device: "
                + ("another size" if own["tiles"] == inf else f"error {own['tiles']:.1e}")
                + f", {own['tiles time']:.2f} times the time"
            )
            rows.append({"family": name, "latents": size, **own})
    return rows


def memory(name: str, ranks: list[int], once: int) -> dict[int, float]:
    """The share of one device's memory that the fullest rank needs, by the number of ranks."""
    family = FAMILIES[name]
    large = family.of_size(*LARGE[len(family.latents)])
    module = module_of(family, torch.float32)
    graph = ModelGraphs(module, (large,), sizes_vary=True)(False, (large,))
    found = {}
    for world in ranks:
        parts = run_local(split_memory, world, name, graph, Plan.uniform(graph, h=world))
        found[world] = max(parts) / once
    text = ", ".join(f"{share:.0%} on {world}" for world, share in found.items())
    latents = "x".join(map(str, large))
    print(f"memory, latents {latents}: one device {size_text(once)}; a rank {text}", flush=True)
    return found


def line(row: dict[str, Any]) -> str:
    spread = row["bf16 noise"]
    return (
        f"{'x'.join(map(str, row['latents'])):<10}{row['ranks']:>6}{row['float64']:>10.1e}"
        f"{row['bf16']:>9.1e}{'' if spread is None else f'{spread:.1e}':>12}{row['messages']:>10}"
        f"{size_text(row['bytes']):>10}{row['whole']:>13}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4, 8])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), help="height x width of latents")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    # Large tensors go back to the system when they are freed, so that the peak is theirs.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    sizes: list[Any] = [tuple(map(int, text.split("x"))) for text in arguments.sizes]
    rows = [row for name in arguments.families for row in table(name, sizes, arguments.ranks)]
    exact = [r for r in rows if "ranks" in r and not FAMILIES[r["family"]].float32]
    worst = max((row["float64"] for row in exact), default=0.0)
    whole = sum(row["whole"] for row in rows if "ranks" in row)
    print(
        f"\n{len({row['family'] for row in rows})} families; largest error in float64 {worst:.1e} "
        f"(limit 1e-12) where all layers are float64; {whole} layers on one rank"
    )
    save(arguments.json, rows)


if __name__ == "__main__":
    main()

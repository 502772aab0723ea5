"""All-reduce on emulated hosts behind two switches: every algorithm, by size.

    python benchmarks/allreduce.py [--quick] [--json FILE]

Emulates 8 hosts, 4 on each switch, whose uplink is as fast as one host's link (4:1 oversubscribed).
Tunes, and sums vectors of 4 KiB to 256 MiB by gloo's own all-reduce, by each of ours, and by the
tuned choice, in turn in one run; next to the times of P5's formulas. Their alpha, beta and gamma
are probed in the same turns, by messages of 1 KiB and of the formulas' n/p (64 KiB to 2 MiB).
Then the tuned choice against gloo's own call without anything of ours around it, on 2, 4 and 8
hosts, 4 KiB to 64 MiB, taking turns at going first (own_sums.py; --own for that only). Then P2's
segmented sums: four segments of two ranks against one group of eight. Where the cores of this
machine are busier than the links, the same is repeated with slower links. As root on Linux.
Aims: round-robin numbering 1.5x faster than consecutive where bandwidth dominates; tuned nowhere
slower than gloo's own and 1.5x faster somewhere; measured times within 15 % of the formulas.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import own_sums
from results import save
from shardwise.cluster.cluster import Cluster, Link
from shardwise.cluster.schedules import ALGORITHMS
from shardwise.comm import Communicator, SumRules
from shardwise.launch.emulate import Wiring, run_on_hosts
from shardwise.launch.launchers import init_from_environment, launched_switches, under_launcher
from shardwise.measure.racing import (
    Figures,
    Segments,
    Way,
    figures_of,
    lane_of,
    measure_sums,
    probe_messages,
    race,
)
from shardwise.planner.links import Network

HOSTS, PER_SWITCH = 8, 4
SIZES = tuple(4096 << shift for shift in (0, 4, 8, 12, 16))
QUICK, SLOWER = SIZES[:4], SIZES[2:4]
WAYS: tuple[Way, ...] = ("backend", *ALGORITHMS, None)
LABELS = ("gloo", "ring", "consecutive", "round-robin", "two-level", "tuned")
LAYER = 4 << 20  # bytes of the weights whose gradients are summed in segments
SMALLEST, LARGEST = 64 << 10, 2 << 20  # bytes of messages whose rate is probed
BANDWIDTH = 8 << 20  # bytes from which on it is bandwidth that counts
GOAL, NOISE, AGREE = 1.5, 1.1, 0.15
BUSY = 0.9  # of all cores' time: more, and they decide rather than the links


# -- on every host ---------------------------------------------------------------------------------


def measure(sizes: list[int], runs: list[int]) -> dict[str, Any]:
    """All figures of one wiring; the same on every rank."""
    comm = Communicator()
    switches = launched_switches(comm.size)
    everybody = (tuple(range(comm.size)),)
    pairs = tuple((rank, rank + 1) for rank in range(0, comm.size, 2))
    tuned = [nbytes for nbytes in sizes if nbytes <= QUICK[-1]]
    count = dict(zip(sizes, runs, strict=True))
    winners = measure_sums(comm, switches, tuned, [everybody], runs=count.__getitem__)
    winners += measure_sums(comm, switches, [LAYER // 4, LAYER], [pairs], runs=lambda _: runs[0])
    lane = lane_of(comm, switches, [everybody, pairs])
    lane.sums = SumRules(switches, winners)
    rows = []
    for nbytes in sizes:
        start, before, idle = time.perf_counter(), time.process_time(), _idle()
        times, figures = race_and_probe(lane, everybody, switches, nbytes, count[nbytes])
        wall = time.perf_counter() - start
        own = sum(comm.gather_objects(time.process_time() - before))
        rows.append(
            {
                "bytes": nbytes,
                "seconds": dict(zip(LABELS, times.values(), strict=True)),
                "busy": 1.0 - (_idle() - idle) / wall / _cores(),
                "own": own / wall / _cores(),
                "winner": lane.sums.algorithm(everybody[0], nbytes),
                "figures": vars(figures),
                "predicted": predictions(figures, switches, nbytes),
            }
        )
    group = race(lane, everybody, LAYER, (None,), 7)[None]
    segments = {
        nbytes: race(lane, pairs, nbytes, (None,), 7)[None] for nbytes in (LAYER // 4, LAYER)
    }
    return {
        "rows": rows,
        "segmented": {"group": group, "split": segments[LAYER // 4], "same": segments[LAYER]},
    }


def race_and_probe(
    lane: Communicator, everybody: Segments, switches: tuple[int, ...], nbytes: int, runs: int
) -> tuple[dict[Way, list[float]], Figures]:
    """Seconds of every way to sum, and what messages cost in the same minutes."""
    times: dict[Way, list[float]] = {way: [] for way in WAYS}
    probed, message = [], min(max(nbytes // lane.size, SMALLEST), LARGEST)
    warm_up = runs > 2
    for _ in range(runs + warm_up):
        for way, seconds in race(lane, everybody, nbytes, WAYS, 1).items():
            times[way] += seconds
        probed.append(probe_messages(lane, switches, message))
    kept = {way: seconds[warm_up:] for way, seconds in times.items()}
    return kept, figures_of(lane, probed[warm_up:], message)


def _cores() -> int:
    return os.cpu_count() or 1


def _idle() -> float:
    """Seconds that the cores of this machine had nothing to do."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def predictions(figures: Figures, switches: tuple[int, ...], nbytes: int) -> dict[str, float]:
    """P5's model of each algorithm: rounds of alpha + beta n, and gamma for what is added.

    For halving and doubling this is P5, eq. 2 to 6; tests compare it with the closed formulas.
    """
    per_switch = switches.count(0)
    links = (
        Link(
            name="switch", count=per_switch, latency=figures.latency, bandwidth=1 / figures.inside
        ),
        Link(name="uplink", latency=figures.latency, bandwidth=per_switch / figures.across),
    )
    device = Cluster.load("local").device.model_copy(update={"adding": 1 / figures.adding})
    cluster = Cluster(name="probed", device=device, links=links, workers=len(switches))
    everybody = np.zeros(len(switches), dtype=np.int64)
    return {
        label: Network(cluster.model_copy(update={"schedules": (algorithm,)})).sum_seconds(
            everybody, nbytes
        )
        for label, algorithm in zip(LABELS[1:], ALGORITHMS, strict=False)
    }


def worker(arguments: argparse.Namespace) -> None:
    init_from_environment()
    torch.set_num_threads(1)
    if arguments.own:
        found = own_sums.measure(arguments.sizes, arguments.runs)
    else:
        found = measure(arguments.sizes, arguments.runs)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(found))
    dist.destroy_process_group()


# -- the table -------------------------------------------------------------------------------------


def emulated(
    link: str, sizes: tuple[int, ...], runs: list[int], hosts: int = HOSTS, own: bool = False
) -> dict[str, Any]:
    """The figures of hosts on two switches at this rate; uplinks are as fast as links."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, __file__, "--out", str(out)]
        command += ["--sizes", *map(str, sizes), "--runs", *map(str, runs)]
        command += ["--own"] if own else []
        code = run_on_hosts(Wiring.of(hosts, link, hosts // 2, link), command)
        if code:
            sys.exit(code)
        return {"link": link, "hosts": hosts, **json.loads(out.read_text())}


def medians(row: dict[str, Any]) -> dict[str, float]:
    return {label: statistics.median(times) for label, times in row["seconds"].items()}


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def show(found: dict[str, Any]) -> None:
    print(f"\n{HOSTS} hosts, {PER_SWITCH} per switch, links and uplinks of {found['link']}")
    print("median ms (spread: half the range between quartiles), and the formula's\n")
    print(f"{'':<9}" + "".join(f"{label:>20}" for label in LABELS) + "  cores busy (ours)")
    for row in found["rows"]:
        cells = [_cell(times) for times in row["seconds"].values()]
        busy = f"{row['busy']:>8.0%} ({row['own']:.0%})"
        print(f"{_size(row['bytes']):<9}" + "".join(f"{cell:>20}" for cell in cells) + busy)
        formula = row["predicted"]
        cells = [f"{1e3 * formula[label]:.1f}" if label in formula else "" for label in LABELS[:-1]]
        cells.append(row["winner"] or "")
        print(f"{'  formula':<9}" + "".join(f"{cell:>20}" for cell in cells))
    print("\nprobed with each size:")
    for row in found["rows"]:
        print(f"{_size(row['bytes']):<9}{_figures(row['figures'])}")
    segmented = {name: statistics.median(times) for name, times in found["segmented"].items()}
    group, split, same = (1e3 * segmented[name] for name in ("group", "split", "same"))
    print(
        f"\nsegmented sums of a layer of {_size(LAYER)}: one group of 8 {group:.1f} ms; 4 segments "
        f"of 2, each a quarter of the layer, {split:.1f} ms: {group / split:.1f}x; segments with "
        f"as many bytes per rank as the group, {same:.1f} ms: {group / same:.1f}x"
    )
    for line in verdicts(found):
        print(line)


def _figures(figures: dict[str, float]) -> str:
    return (
        f"{figures['latency'] * 1e3:.2f} ms a message, {1e-6 / figures['inside']:.0f} MB/s inside, "
        f"{1e-6 / figures['across']:.0f} MB/s across, adding {figures['adding'] * 1e9:.2f} ns/byte"
    )


def _cell(times: list[float]) -> str:
    spread = 0.0
    if len(times) > 1:
        first, _, third = statistics.quantiles(times, n=4, method="inclusive")
        spread = (third - first) / 2
    return f"{1e3 * statistics.median(times):.1f} (±{1e3 * spread:.1f})"


def verdicts(found: dict[str, Any]) -> list[str]:
    """One line per aim."""
    rows = [(row, medians(row)) for row in found["rows"]]
    lines, large = [], [pair for pair in rows if pair[0]["bytes"] >= BANDWIDTH]
    for row, times in large:
        ratio = times["consecutive"] / times["round-robin"]
        lines.append(
            _verdict(
                ratio >= GOAL,
                f"{_size(row['bytes'])}: round-robin {ratio:.2f}x faster than consecutive",
            )
        )
    gains = {_size(row["bytes"]): times["gloo"] / times["tuned"] for row, times in rows}
    least = min(gains, key=gains.__getitem__)
    text = f"tuned is at least {gains[least]:.2f}x as fast as gloo's own ({least})"
    lines.append(_verdict(gains[least] >= 1 / NOISE, text))
    # Where the tuned choice is gloo's own, a difference is noise.
    other = [_size(row["bytes"]) for row, _ in rows if row["winner"] != "backend"]
    most = max(other, key=gains.__getitem__, default=least)
    text = f"tuned is up to {gains[most]:.2f}x as fast as gloo's own ({most})"
    lines.append(_verdict(gains[most] >= GOAL, text))
    for row, times in rows:
        formula = row["predicted"]
        off = {label: times[label] / seconds - 1 for label, seconds in formula.items()}
        text = ", ".join(f"{label} {error:+.0%}" for label, error in off.items())
        good = all(abs(error) <= AGREE for error in off.values())
        lines.append(_verdict(good, f"{_size(row['bytes'])}: measured against the formula: {text}"))
    return lines


def _verdict(reached: bool, text: str) -> str:
    return f"{'reached    ' if reached else 'not reached'} {text}"


def limited(found: dict[str, Any]) -> bool:
    """Whether the cores rather than the links decide how long large sums take."""
    return any(row["busy"] > BUSY for row in found["rows"] if row["bytes"] >= 1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="up to 16 MiB, few runs")
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--slow-link", default="200mbit", help="where cores are too busy")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--sizes", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--own", action="store_true", help="only against gloo's own call")
    arguments = parser.parse_args()
    if under_launcher():
        worker(arguments)
        return
    against = []
    for hosts in own_sums.HOSTS:
        runs = [own_sums.runs_of(nbytes, arguments.quick) for nbytes in own_sums.SIZES]
        against.append(emulated(arguments.link, own_sums.SIZES, runs, hosts, own=True))
        own_sums.show(against[-1])
    print(_verdict(*own_sums.verdict(against)))
    save(arguments.json, against)
    if arguments.own:
        return
    sizes, runs = (QUICK, [5, 5, 3, 2]) if arguments.quick else (SIZES, [15, 15, 9, 3, 2])
    found = [emulated(arguments.link, sizes, runs)]
    show(found[0])
    if limited(found[0]) and not arguments.quick:
        print(
            f"\nthe cores of this machine limit these sums; with {arguments.slow_link} they do not:"
        )
        found.append(emulated(arguments.slow_link, SLOWER, [3, 2]))
        show(found[1])
    save(arguments.json, [*found, *against])


if __name__ == "__main__":
    main()

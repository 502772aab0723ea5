"""A cluster: what one worker computes with, and the levels of links that join the workers.

Levels go from the inside out. The children of level 0 are the workers; a group of level l is a
child of level l + 1. Ranks fill the innermost groups first, in order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from shardwise.cluster.measured_sums import Schedule, Winner, check_winners
from shardwise.errors import ShardwiseError
from shardwise.files import first_mistake, system_errors_as, write_whole
from shardwise.units import parse_flops, parse_rate, parse_ratio, parse_seconds, parse_size

PRESETS = Path(__file__).parent / "presets"
MAX_WORKERS = 1_000_000
ETHERNET_LATENCY = 50e-6  # seconds; what a small message over TCP takes
MAX_RATIO = 60  # YAML reads an unquoted 4:1 as 4 * 60 + 1

# Counts of the levels from the outside in, the rate of a host, ratios of uplinks inside out.
_SHORTHAND = re.compile(
    r"(?P<counts>\d{1,7}(?:x\d{1,7})*)[x@](?P<rate>[\d.]+[a-zA-Z]+(?:/s)?)(?P<ratios>(?:/[^/]+)*)",
    re.ASCII,
)

# -- values a person writes ------------------------------------------------------------------------


def _reads(parse: Callable[[str], float | str]) -> BeforeValidator:
    """Numbers pass, text is parsed, and true or false is no number."""

    def read(value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("Input should be a number, not true or false")
        return parse(value) if isinstance(value, str) else value

    return BeforeValidator(read)


def _plausible(ratio: float) -> float:
    if ratio > MAX_RATIO:
        raise ValueError(f'{ratio:g} is more than {MAX_RATIO}:1; write 4:1 as 4 or as "4:1"')
    return ratio


Flops = Annotated[float, _reads(parse_flops), Field(ge=1e6, le=1e18)]
Rate = Annotated[float, _reads(parse_rate), Field(ge=1e3, le=1e15)]
Size = Annotated[int, _reads(parse_size), Field(ge=2**20, le=2**60)]
Seconds = Annotated[float, _reads(parse_seconds), Field(ge=0, le=10)]
Ratio = Annotated[float, _reads(parse_ratio), Field(ge=1), AfterValidator(_plausible)]
Part = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, _reads(str), Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]

# -- the description -------------------------------------------------------------------------------


class Device(BaseModel):
    """What one worker computes with."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    flops: Flops  # flop/s that convolutions and matrix products reach in practice, float32
    memory_bandwidth: Rate  # bytes/s
    memory: Size  # bytes a worker may use
    launch: Seconds = 0.0  # seconds to start one operator
    adding: Rate | None = None  # bytes/s of gradients that it adds up in a sum (P5's 1/gamma)
    name: str = ""  # what the measured times of its layers are kept under, where there are any


class Link(BaseModel):
    """One level of the hierarchy: how the children of a group are joined."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Name
    count: Count | None = None  # children in a group; None, outermost only: as many as there are
    latency: Seconds  # seconds per message
    bandwidth: Rate  # bytes/s of one child's port, each way; of the whole medium where shared
    bandwidths: tuple[Rate, ...] = ()  # of each child's port, in order, where they differ
    shared: bool = False  # one medium for all children of a group
    staged: bool = False  # tensors are put together in the host's memory: own parts cross too
    adding: Rate | None = None  # where staged: bytes/s of gradients that are added up per port
    oversubscription: Ratio = 1.0  # how much slower a child's port is when all want it
    sum_latency: Seconds | None = None  # measured for all-reduce, where it was measured
    sum_bandwidth: Rate | None = None
    post: Seconds = 0.0  # of a rank's own time to send or receive one message
    overlap: Part = 1.0  # of a sum's time that computation can hide; less where it needs the cores

    @property
    def rate(self) -> float:
        """Bytes/s that a port keeps up when all want it."""
        return self.bandwidth / self.oversubscription

    def rates(self, children: np.ndarray) -> np.ndarray | float:
        """The same of each of these children, or of all where ports are alike."""
        if not self.bandwidths:
            return self.rate
        return np.array(self.bandwidths)[children] / self.oversubscription


class Cluster(BaseModel):
    """Workers of one kind and the levels of links between them, innermost first.

    >>> cluster = Cluster.load("2x4@1Gb/4:1")
    >>> cluster.world, cluster.groups(0).tolist()
    (8, [0, 0, 0, 0, 1, 1, 1, 1])
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Name
    device: Device
    links: tuple[Link, ...] = Field(min_length=1)
    workers: Count | None = None
    sums: tuple[Winner, ...] = ()  # the fastest measured way to sum, by group and size
    schedules: tuple[Schedule, ...] = ()  # the only ways to sum that are predicted; () for all

    @model_validator(mode="after")
    def _check(self) -> Cluster:
        check_winners(self.sums)
        for level, link in enumerate(self.links[:-1]):
            if link.count is None:
                raise ValueError(
                    f"links.{level}.count is missing; only the outermost level may leave it out"
                )
        capacity = prod(link.count or 1 for link in self.links)
        if self.links[-1].count is not None and self.world > capacity:
            counts = " x ".join(str(link.count) for link in reversed(self.links))
            raise ValueError(f"{self.world} workers are more than its levels hold: {counts}")
        if self.world > MAX_WORKERS:
            raise ValueError(f"{self.world} workers are more than the limit of {MAX_WORKERS}")
        for level in range(len(self.links)):
            self._check_ports(level)
        return self

    def _check_ports(self, level: int) -> None:
        """Where ports differ, every child of the level has one of its own."""
        link, children = self.links[level], int(self.units(level)[-1]) + 1
        if link.bandwidths and link.shared:
            raise ValueError(f"links.{level}.bandwidths: a shared medium has no ports that differ")
        if link.bandwidths and len(link.bandwidths) != children:
            raise ValueError(
                f"links.{level}.bandwidths has {len(link.bandwidths)} rates for {children} ports"
            )

    @property
    def world(self) -> int:
        """The number of workers; an outermost level without a count has one child."""
        return self.workers or prod(link.count or 1 for link in self.links)

    def with_workers(self, n: int) -> Cluster:
        """The same cluster with n workers: the outermost level grows, or levels stay part empty."""
        try:
            return Cluster(**{**dict(self), "workers": n})
        except ValidationError as error:
            raise _refused(f"cluster {self.name!r}", error) from None

    def units(self, level: int) -> np.ndarray:
        """The child of `level` that each rank lies in; of level 0 that is the rank itself.

        The level above the outermost one has one child, the whole cluster.
        """
        if not 0 <= level <= len(self.links):
            raise ShardwiseError(f"cluster {self.name!r} has no level {level}: {self._levels()}")
        ranks = np.arange(self.world, dtype=np.int64)
        if level == len(self.links):
            return np.zeros_like(ranks)
        return ranks // prod(link.count or 1 for link in self.links[:level])

    def groups(self, level: int) -> np.ndarray:
        """The group of `level` that each rank lies in: the child of the level above."""
        if not 0 <= level < len(self.links):
            raise ShardwiseError(f"cluster {self.name!r} has no level {level}: {self._levels()}")
        return self.units(level + 1)

    @property
    def switches(self) -> tuple[int, ...]:
        """The switch of each rank: the child of the outermost level; one where that is all."""
        top = len(self.links) - 1
        return tuple(self.units(top).tolist()) if top else (0,) * self.world

    def _levels(self) -> str:
        return ", ".join(f"{level} is {link.name}" for level, link in enumerate(self.links))

    # -- files -------------------------------------------------------------------------------------

    @classmethod
    def load(cls, text: str | Path) -> Cluster:
        """The cluster of a preset's name, a shorthand or a .yaml, .yml or .json file."""
        name, known = str(text), presets()
        if _is_file_name(name):
            return _read_file(Path(name))
        if name in known:
            return _read_file(known[name])
        if match := _SHORTHAND.fullmatch(name):
            return _from_shorthand(name, match)
        raise ShardwiseError(f"{name!r} is not a cluster; {_choices()}")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self._fields(), sort_keys=False)

    def save(self, path: str | Path) -> None:
        """Writes a .yaml, .yml or .json file that `load` reads back."""
        if not _is_file_name(str(path)):
            raise ShardwiseError(f"cluster file {str(path)!r} must end in .yaml, .yml or .json")
        is_json = Path(path).suffix.lower() == ".json"
        text = json.dumps(self._fields(), indent=2) + "\n" if is_json else self.to_yaml()
        with system_errors_as(f"cluster file {str(path)!r}"):
            write_whole(path, text)

    def _fields(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_defaults=True)


def presets() -> dict[str, Path]:
    """The files of the clusters that come with the package, by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


# -- reading ---------------------------------------------------------------------------------------


def _read_file(path: Path) -> Cluster:
    where = f"cluster file {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ShardwiseError(f"{where} does not exist; {_choices()}") from None
    except (OSError, ValueError) as error:
        raise ShardwiseError(_one_line(f"{where} cannot be read: {error}")) from None
    data = _parse(text, path.suffix.lower(), where)
    if not isinstance(data, dict):
        raise ShardwiseError(f"{where} must hold a mapping with name, device and links")
    try:
        return Cluster.model_validate(data)
    except ValidationError as error:
        raise _refused(where, error) from None


def _parse(text: str, suffix: str, where: str) -> Any:
    kind = "JSON" if suffix == ".json" else "YAML"
    try:
        return json.loads(text) if kind == "JSON" else yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ShardwiseError(
            _one_line(f"{where} is not valid YAML{line}: {error.problem}")
        ) from None
    except Exception as error:  # a tag such as !!bool on other text raises what it likes
        raise ShardwiseError(_one_line(f"{where} is not valid {kind}: {error}")) from None


def _from_shorthand(name: str, match: re.Match[str]) -> Cluster:
    """4x10Gb, 8@600mbit, 2x4@1Gb/4:1: hosts with one `local` worker each, and their switches."""
    counts = [int(count) for count in reversed(match["counts"].split("x"))]
    texts = match["ratios"].split("/")[1:]
    if len(texts) >= len(counts):
        raise ShardwiseError(
            f"cluster {name!r} has {len(texts)} ratios for {len(counts) - 1} levels of uplinks"
        )
    try:
        rate = parse_rate(match["rate"])
        ratios = [1.0, *map(parse_ratio, texts)]
        ratios += [1.0] * (len(counts) - len(ratios))
        links: list[Link] = []
        for level, (count, ratio) in enumerate(zip(counts, ratios, strict=True)):
            link = Link(
                name=f"uplink{level}" if level else "switch",
                count=count,
                latency=ETHERNET_LATENCY,
                bandwidth=rate,
                oversubscription=ratio,
            )
            links.append(link)
            rate = count * link.rate  # all children of a group at once fill the uplink
        return Cluster(name=name, device=Cluster.load("local").device, links=tuple(links))
    except ValidationError as error:
        raise _refused(f"cluster {name!r}", error) from None
    except ShardwiseError as error:
        raise ShardwiseError(f"cluster {name!r}: {error}") from None


def _is_file_name(name: str) -> bool:
    return Path(name).suffix.lower() in (".yaml", ".yml", ".json")


def _choices() -> str:
    return (
        f"give a preset ({', '.join(presets())}), a shorthand (4x10Gb: 4 hosts at 10 Gbit/s; "
        f"2x4@1Gb/4:1: 2 switches of 4 hosts, uplinks oversubscribed 4:1) or a .yaml or .json file"
    )


def _refused(where: str, error: ValidationError) -> ShardwiseError:
    """The first thing wrong, as one sentence that names the place and the field."""
    return ShardwiseError(f"{where}: {first_mistake(error, whole='')}")


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""A plan as a JSON file that a person can edit: reading it names the field that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.errors import PlanError
from shardwise.files import first_mistake
from shardwise.geometry.grid import AXES, Config

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan

FORMAT = "shardwise-plan-2"
FLOAT = "float"  # an input of the same type as the parameters


def plan_text(plan: Plan) -> str:
    """The plan as text: degrees of 1 and obvious ranks are left out."""
    head = {
        "format": FORMAT,
        "world": plan.world,
        "inputs": [list(shape) for shape in plan.inputs],
        "signature": plan.signature,
        "whole": list(plan.whole),
    }
    if any(name != FLOAT for name in plan.dtypes):
        head["dtypes"] = list(plan.dtypes)
    if not plan.training:
        head["training"] = False
    if plan.recompute:
        head["recompute"] = [list(names) for names in plan.recompute]
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines += ['  "layers": {', _rows(plan.layers, "    "), "  }" + "," * bool(plan.others)]
    sizes = [
        f'    {{"inputs": {json.dumps(other.inputs)}, {_again(other)}"layers": {{\n'
        f"{_rows(other.layers, '      ')}\n    }}}}"
        for other in plan.others
    ]
    lines += ['  "sizes": [', ",\n".join(sizes), "  ]"] if sizes else []
    return "\n".join(["{", *lines, "}", ""])


def _rows(layers: Mapping[str, Config], indent: str) -> str:
    entries = ((json.dumps(name), json.dumps(_entry(c))) for name, c in layers.items())
    return ",\n".join(f"{indent}{name}: {entry}" for name, entry in entries)


def _again(plan: Plan) -> str:
    return f'"recompute": {json.dumps(plan.recompute)}, ' if plan.recompute else ""


def _entry(config: Config) -> dict[str, Any]:
    """A config as a file has it."""
    pairs = zip(AXES, config.degrees, strict=True)
    entry: dict[str, Any] = {axis: degree for axis, degree in pairs if degree > 1}
    if config.ranks != tuple(range(config.num_workers)):
        entry["ranks"] = list(config.ranks)
    if config.gradient != "sum":
        entry["gradient"] = config.gradient
    return entry


# -- reading ---------------------------------------------------------------------------------------


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    n: int = Field(1, ge=1)
    d: int = Field(1, ge=1)
    h: int = Field(1, ge=1)
    w: int = Field(1, ge=1)
    f: int = Field(1, ge=1)
    c: int = Field(1, ge=1)
    ranks: tuple[int, ...] = ()
    gradient: str = "sum"


class _Size(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    inputs: list[list[int]]
    layers: dict[str, _Entry]
    recompute: list[list[str]] = []


class _PlanFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    format: str
    world: int = Field(ge=1)
    inputs: list[list[int]]
    signature: str
    layers: dict[str, _Entry]
    whole: list[str] = []
    dtypes: list[
        Literal[
            "float", "bool", "int8", "int16", "int32", "int64", "uint8", "complex64", "complex128"
        ]
    ] = []
    sizes: list[_Size] = []
    training: bool = True
    recompute: list[list[str]] = []


def parsed_plans(text: str, where: str) -> list[dict[str, Any]]:
    """The fields of a plan, and after it of those for other sizes of inputs."""
    try:
        data = _PlanFile.model_validate_json(text)
    except ValidationError as error:
        raise PlanError(f"{where}: {first_mistake(error)}") from None
    if data.format != FORMAT:
        raise PlanError(f"{where}: format {data.format!r} is not {FORMAT!r}; make it again")
    dtypes = tuple(data.dtypes) or (FLOAT,) * len(data.inputs)
    if len(dtypes) != len(data.inputs):
        raise PlanError(f"{where}: dtypes names {len(dtypes)} of {len(data.inputs)} inputs")
    same: dict[str, Any] = {"world": data.world, "signature": data.signature}
    same |= {"whole": tuple(data.whole), "dtypes": dtypes, "training": data.training}
    found = [same | _of_size(data, where)]
    for number, size in enumerate(data.sizes):
        place = f"{where}: sizes.{number}"
        if list(map(len, size.inputs)) != list(map(len, data.inputs)):
            raise PlanError(f"{place}: inputs have other dimensions than the plan's")
        found.append(same | _of_size(size, place))
    return found


def _layers(data: _Size | _PlanFile, where: str) -> dict[str, Config]:
    """Configs of all layers that a file names."""
    layers = {}
    for name, entry in data.layers.items():
        try:
            layers[name] = Config(**entry.model_dump())
        except ValueError as error:
            raise PlanError(f"{where}: layer {name!r}: {error}") from None
    return layers


def _of_size(data: _Size | _PlanFile, where: str) -> dict[str, Any]:
    """What a plan says for one size of inputs."""
    return {
        "layers": _layers(data, where),
        "inputs": tuple(map(tuple, data.inputs)),
        "recompute": tuple(map(tuple, data.recompute)),
    }

"""The settings of a training run: read from YAML, from the command line, or given in code.

A field's description is its help on the command line, its panel the heading it stands under.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shardwise.errors import ShardwiseError
from shardwise.files import system_errors_as


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as text, since it has no dot."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Real = Annotated[float, BeforeValidator(_number)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[Real, Field(gt=0)]
Share = Annotated[Real, Field(ge=0, lt=1)]


def _field(default: Any, panel: str, description: str, **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"panel": panel}, **limits)


class Settings(BaseModel):
    """What a run is made of; the defaults train the digits on two local workers.

    >>> Settings(model="resnet34_cifar", data="cifar-10-batches-bin", epochs=90).lr
    0.05
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = _field(
        "digits", "Model", "A zoo name, package.module:callable, file.py:callable or net.prototxt."
    )
    options: dict[str, Any] = _field(
        {}, "Model", "KEY=VALUE for the callable that builds the model."
    )
    weights: str | None = _field(
        None, "Model", "Start from these weights: .pt, .safetensors or .caffemodel."
    )

    data: str = _field(
        "digits", "Data", "digits, synthetic:100x3x32x32, or a file or folder of samples."
    )
    test_data: str | None = _field(
        None, "Data", "Samples to test on. (default: those that belong to the data)"
    )
    num_classes: Count | None = _field(None, "Data", "Of arrays, volumes and synthetic samples.")
    size: tuple[Count, Count] | None = _field(None, "Data", "Resize images to height,width.")
    on_error: Literal["raise", "skip"] = _field(
        "raise", "Data", "What a sample that cannot be read does."
    )
    flip: str = _field("", "Data", "Mirror samples by chance along these dims, of d, h and w.")
    crop: tuple[Count, ...] | None = _field(None, "Data", "Cut windows of this size, by chance.")
    padding: int = _field(0, "Data", "Zeros around samples that are cut.", ge=0)
    mean: tuple[Real, ...] = _field((), "Data", "Subtract these, one per channel.")
    std: tuple[Positive, ...] = _field((), "Data", "Divide by these, one per channel.")
    mixup: Real = _field(0.0, "Data", "Mix pairs of samples, by Beta(a, a); 0: do not.", ge=0, le=8)
    prefetch: int = _field(2, "Data", "Batches that are read ahead.", ge=0)

    workers: Count | None = _field(
        None, "Workers", "Processes of this machine. (default: as split or plan need, or 2)"
    )
    cluster: str = _field("local", "Workers", "For planning: a preset, a shorthand or a file.")
    plan: str = _field("auto", "Workers", "auto (the best found), owt, or a plan file.")
    split: str | None = _field(None, "Workers", "One split for every layer instead: n=2,h=2.")
    memory: str | None = _field(None, "Workers", "What a worker may use, such as 8GiB.")
    gradients: str = _field(
        "buckets:8MiB",
        "Workers",
        "When they are summed: end, layer, chunks:K, chunks:auto or buckets:SIZE.",
    )
    output: Literal["full", "local"] = _field(
        "full", "Workers", "full: every rank gets the whole output; local: its part, for volumes."
    )
    kernels: Literal["stock", "tuned"] = _field(
        "stock", "Workers", "Convolutions of PyTorch, or the fastest by timing (CPU)."
    )
    precision: Literal["float32", "bf16", "float64"] = _field(
        "float32", "Workers", "What layers compute in; weights stay float32 with bf16."
    )
    compile: bool = _field(False, "Workers", "Compile the layers between messages (torch.compile).")
    timeout: Positive = _field(1800.0, "Workers", "Seconds that a rank waits for another.")

    optimizer: Literal["sgd", "adam", "adamw", "lars"] = _field(
        "sgd", "Optimizer", "The optimizer."
    )
    lr: Positive = _field(0.05, "Optimizer", "Learning rate at its highest.")
    lr_batch: Count | None = _field(
        None, "Optimizer", "Scale the learning rate by batch over this many samples."
    )
    momentum: Share = _field(0.9, "Optimizer", "Of sgd and lars.")
    nesterov: bool = _field(True, "Optimizer", "Nesterov's momentum, of sgd.")
    betas: tuple[Share, Share] = _field((0.9, 0.999), "Optimizer", "Of adam and adamw.")
    weight_decay: Real = _field(5e-4, "Optimizer", "The optimizer's weight decay.", ge=0)
    trust: Positive = _field(0.001, "Optimizer", "The coefficient of lars.")
    shard_state: bool = _field(
        False,
        "Optimizer",
        "Workers with the same weights share what the optimizer keeps, a part each (ZeRO-1).",
    )
    clip: Positive | None = _field(
        None, "Optimizer", "The largest norm that all gradients together may have."
    )

    schedule: Literal["constant", "step", "cosine"] = _field(
        "cosine", "Schedule", "How the learning rate falls."
    )
    warmup_epochs: Real = _field(0.0, "Schedule", "Epochs in which the learning rate rises.", ge=0)
    milestones: tuple[Real, ...] = _field((30, 60, 80), "Schedule", "Epochs at which step falls.")
    gamma: Positive = _field(0.1, "Schedule", "By which factor step falls.")

    epochs: Count = _field(10, "Run", "Passes over the training samples.")
    steps: Count | None = _field(None, "Run", "Train for so many steps instead of epochs.")
    batch: Count = _field(64, "Run", "Samples per step, over all workers.")
    label_smoothing: Share = _field(0.0, "Run", "Part of a label that is spread over all classes.")
    seed: int = _field(0, "Run", "Of the weights and of the shuffle.", ge=0, lt=2**32)
    check_finite: bool = _field(
        True, "Run", "Stop at a loss that is not finite, and name the layer."
    )
    out: str | None = _field(None, "Run", "The folder to write. (default: runs/MODEL-NUMBER)")
    resume: bool = _field(False, "Run", "Go on from the last checkpoint of the run.")
    checkpoint_every: Count | None = _field(None, "Run", "Steps. (default: once per epoch)")
    keep: Count = _field(3, "Run", "How many checkpoints are kept.")
    log_every: Count = _field(10, "Run", "Steps between lines of metrics.")
    test_every: Count = _field(1, "Run", "Epochs between tests.")
    report: bool = _field(True, "Run", "Write report.html at the end.")

    @field_validator("size", "crop", "mean", "std", "betas", "milestones", mode="before")
    @classmethod
    def _several(cls, value: Any, info: ValidationInfo) -> Any:
        """Lists are tuples; on the command line they are numbers with commas (or x) between."""
        if isinstance(value, str):
            value = [part.strip() for part in value.replace("x", ",").split(",") if part.strip()]
            if info.field_name in ("size", "crop"):
                value = [int(part) if part.isdigit() else part for part in value]
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if self.split is not None and self.plan != "auto":
            raise ValueError("plan and split are both given; give one of them")
        if self.nesterov and self.optimizer == "sgd" and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; set nesterov to false")
        if self.mixup and self.output == "local":
            raise ValueError("mixup needs output full: it mixes labels of whole samples")
        return self


def read_settings(path: str | Path | None, given: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a YAML file, and those given beside it, which count more.

    >>> read_settings(None, {"epochs": "3"}).epochs
    3
    """
    from_file = _from_yaml(Path(path)) if path is not None else {}
    place = f"{str(path)!r}" if path is not None else "settings"
    known = _validated(from_file, place, strict=True).model_dump(exclude_unset=True)
    return _validated(known | dict(given or {}), "settings", strict=False)


def _from_yaml(path: Path) -> dict[str, Any]:
    with system_errors_as(f"the settings {str(path)!r} cannot be read"):
        written = path.read_bytes()
    try:
        data = yaml.safe_load(written.decode())
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        first = " ".join(str(error).split())
        raise ShardwiseError(f"{str(path)!r} is not YAML: {first}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ShardwiseError(f"{str(path)!r} must hold settings, such as 'epochs: 10'")
    return data


def _validated(data: Mapping[str, Any], place: str, strict: bool) -> Settings:
    try:
        return Settings.model_validate(dict(data), strict=strict)
    except ValidationError as error:
        raise ShardwiseError(f"{place}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    """What is wrong with the first wrong field."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        close = get_close_matches(name, list(Settings.model_fields), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"there is no setting {name!r}{hint}"
    message = first["msg"].removeprefix("Value error, ")
    if not name:
        return message
    return f"{name}={first['input']!r}: {message[0].lower()}{message[1:]}"

"""`export`: a checkpoint as a plain state_dict, for the original nn.Module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.step_folders import StepFolders
from shardwise.errors import ShardwiseError
from shardwise.files import replacing

SUBFOLDER = "checkpoints"
Tensors = dict[str, torch.Tensor]


def export(run: str | Path, out: str | Path, step: int | None = None) -> Path:
    """Writes the newest checkpoint of a run, or that of a step, as a plain state_dict.

    The file is .pt, for `torch.load(out, weights_only=True)`, or .safetensors.

    >>> export("run", "model.pt")
    """
    out = Path(out)
    if out.suffix not in KINDS:
        raise ShardwiseError(f"{out} must end in {' or '.join(KINDS)}")
    folders = StepFolders(Path(run) / SUBFOLDER)
    state = read_state(folders.of_step(step, folders.complete()))
    try:
        with replacing(out) as new:
            KINDS[out.suffix](state, new)
    except (OSError, RuntimeError, MemoryError) as error:
        raise ShardwiseError(f"{out} cannot be written: {_reason(error)}") from None
    return out


def _reason(error: BaseException) -> str:
    """What the system refused; torch covers that up with what it meant for its file."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.strerror or str(cause)
        cause = cause.__context__
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    return (str(error).splitlines() or [type(error).__name__])[0]


def read_state(folder: Path) -> Tensors:
    """The whole tensors of a checkpoint by their names; tied ones are one tensor."""
    reader = Reader(folder)
    names = reader.document.names
    tensors = {key: reader.read(key) for key in dict.fromkeys(names.values())}
    return {name: tensors[key] for name, key in names.items()}


def _save_torch(state: Tensors, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)


def _save_safetensors(state: Tensors, path: Path) -> None:
    seen: set[int] = set()
    apart = {}
    for name, tensor in state.items():  # the format has no tied tensors
        apart[name] = tensor.clone() if id(tensor) in seen else tensor
        seen.add(id(tensor))
    save_file(apart, path)


KINDS: dict[str, Callable[[Tensors, Path], None]] = {
    ".pt": _save_torch,
    ".safetensors": _save_safetensors,
}

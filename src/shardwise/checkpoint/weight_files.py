"""Plain files of weights: each rank reads its own blocks, and a checkpoint becomes such a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

import torch
from safetensors.torch import save_file

from shardwise.checkpoint.dcp_folder import DcpFolder, is_dcp, open_dcp, tensor_readers
from shardwise.checkpoint.dcp_writing import write_dcp
from shardwise.checkpoint.held_tensors import Held, described, held_tensors
from shardwise.checkpoint.manifest import DTYPES, NAME, SAFETENSORS, Reader
from shardwise.checkpoint.optimizer_state import PREFIX
from shardwise.checkpoint.safetensors_file import read_box, read_header
from shardwise.checkpoint.step_folders import StepFolders
from shardwise.errors import ShardwiseError, one_line, some
from shardwise.files import replacing, system_errors_as
from shardwise.geometry.box import Box
from shardwise.runtime.agreement import agree_on, agree_to_start
from shardwise.runtime.parallel import ParallelModel, of

SUBFOLDER = "checkpoints"
Tensors = dict[str, torch.Tensor]
INDEX = ".safetensors.index.json"  # how a file ends that lists in which files tensors lie
WINDOWS, WINDOW = 64, 4096  # parts of a file that tell it from others, and their bytes


def export(run: str | Path, out: str | Path, step: int | None = None) -> Path:
    """Writes the newest checkpoint of a run, or that of a step, for plain torch.

    A file is .pt, for `torch.load(out, weights_only=True)`, or .safetensors: a state_dict. A name
    without ending is a folder for torch.distributed.checkpoint, with the optimizer's state too.

    >>> export("run", "model.pt")
    """
    out = Path(out)
    if out.suffix not in ("", *KINDS):
        raise ShardwiseError(
            f"{out} must end in {' or '.join(KINDS)}, or be a folder for torch.distributed."
            "checkpoint, without an ending"
        )
    folders = StepFolders(Path(run) / SUBFOLDER)
    folder = folders.of_step(step, folders.complete())
    state = read_state(folder)
    try:
        if out.suffix:
            with replacing(out) as new:
                KINDS[out.suffix](state, new)
        else:
            _export_dcp(Reader(folder), state, out)
    except (OSError, RuntimeError, MemoryError) as error:
        raise ShardwiseError(f"{out} cannot be written: {_reason(error)}") from None
    return out


def _export_dcp(reader: Reader, state: Tensors, out: Path) -> None:
    tensors = reader.document.tensors
    kept = {key: reader.read(key) for key in tensors if key.startswith(f"{PREFIX}/")}
    write_dcp(out, state, reader.document.optimizer, kept)


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


# -- from a file to a model ------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """A whole tensor in a file, of which any box can be read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """The tensors that a file or folder holds, by their names."""

    place: Path
    tensors: Mapping[str, Whole]
    checksum: int  # tells its content from that of others


def load_weights(model: ParallelModel, path: str | Path, *, strict: bool = True) -> None:
    """Loads parameters and buffers; every rank reads its own blocks only, and all ranks call it.

    `path` is a .safetensors file, the folder or index of one in several files, a state_dict that
    torch.save wrote (.pt, .pth), a folder of torch.distributed.checkpoint, or a checkpoint of a
    run. Nothing is changed on any rank where something is wrong with it. With strict=False, tensors
    that it lacks stay as they are, and others that it holds are left out.

    >>> load_weights(model, "unet.safetensors")
    """
    handle = of(model)
    handle.flush()
    with handle.comm.doing("load_weights"):
        blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        weights, refusal = None, None
        try:
            with system_errors_as(f"{path} cannot be read"):
                weights = open_weights(Path(path))
                blocks = read_blocks(weights, held_tensors(model), strict)
        except Exception as error:  # all ranks must hear of it before they wait for this one
            refusal = error
        agree_to_start(refusal, {}, handle.comm)
        assert weights is not None
        agree_on(weights.checksum, f"finds other weights in {path}", handle.comm)
    put(blocks)


def put(blocks: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Puts what was read in its place."""
    with torch.no_grad():
        for tensor, block in blocks:
            tensor.copy_(block)


def read_blocks(
    weights: Weights, held: Iterable[Held], strict: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is held here, each with what is to be put there."""
    held = list(held)
    if strict:
        _check_names(weights, held)
    found = []
    for tensor in held:
        names = [name for name in tensor.names if name in weights.tensors]
        for name in names:
            _check_kind(weights, name, tensor)
        if names and tensor.here:
            block, *others = (weights.tensors[name].read(tensor.box) for name in names)
            for name, other in zip(names[1:], others, strict=True):
                if not torch.equal(block, other):
                    raise ShardwiseError(
                        f"{weights.place}: {names[0]!r} and {name!r} are one tensor in the model, "
                        "and differ there"
                    )
            found.append((tensor.tensor, block))
    return found


def _check_names(weights: Weights, held: Iterable[Held]) -> None:
    missing = [t.names[0] for t in held if not any(n in weights.tensors for n in t.names)]
    known = {name for tensor in held for name in tensor.names}
    unknown = [name for name in weights.tensors if name not in known]
    if missing and unknown:
        raise ShardwiseError(
            f"{weights.place} is of another model: it lacks {some(missing)}, and has "
            f"{some(unknown)}, which this one has not"
        )
    if missing:
        raise ShardwiseError(f"{weights.place} is of another model: it lacks {some(missing)}")
    if unknown:
        raise ShardwiseError(
            f"{weights.place} is of another model: it has {some(unknown)}, which this one has not"
        )


def _check_kind(weights: Weights, name: str, tensor: Held) -> None:
    whole = weights.tensors[name]
    there = described(whole.shape, whole.dtype)
    here = described(tensor.shape, tensor.tensor.dtype)
    if there != here:
        raise ShardwiseError(f"{weights.place}: {name!r} is {there}, and {here} in the model")


# -- what holds weights ----------------------------------------------------------------------------


def open_weights(path: Path) -> Weights:
    """Looks into a file or a folder; nothing but names and shapes is read."""
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(INDEX):
        return _open_index(path)
    kinds = {".safetensors": _open_safetensors, ".pt": _open_torch, ".pth": _open_torch}
    if path.suffix not in kinds:
        raise ShardwiseError(
            f"{path} is nothing that weights are read from: give a .safetensors, .pt or .pth file, "
            f"a *{INDEX}, or the folder of a checkpoint"
        )
    return kinds[path.suffix](path)


def _open_folder(folder: Path) -> Weights:
    if (folder / NAME).exists():
        return _open_checkpoint(folder)
    if is_dcp(folder):
        return as_weights(open_dcp(folder))
    for steps in (StepFolders(folder), StepFolders(folder / SUBFOLDER)):
        complete = steps.complete()
        if complete:
            return _open_checkpoint(steps.of_step(None, complete))
    found = sorted(folder.glob(f"*{INDEX}")) or sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        wrong = "several files of weights: name one" if found else "no checkpoint and no weights"
        raise ShardwiseError(f"{folder} holds {wrong}")
    return open_weights(found[0])


def as_weights(folder: DcpFolder) -> Weights:
    """The model's tensors in a folder of torch.distributed.checkpoint."""
    tensors = {name: Whole(*found) for name, found in tensor_readers(folder).items()}
    return Weights(folder.place, tensors, folder.checksum)


def _open_safetensors(path: Path) -> Weights:
    entries, begin = read_header(path)
    tensors = {
        name: Whole(
            tuple(entry.shape), SAFETENSORS[entry.dtype], partial(read_box, path, entry, begin)
        )
        for name, entry in entries.items()
    }
    return Weights(path, tensors, _checksum(path))


def _open_index(path: Path) -> Weights:
    """Several files, and a list of which tensor lies in which."""
    with system_errors_as(f"{path} cannot be read"):
        written = path.read_bytes()
    try:
        content = json.loads(written.decode())
        files = {name: str(file) for name, file in content["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ShardwiseError(f"{path} is no index of safetensors files") from None
    parts = {}
    for file in dict.fromkeys(files.values()):
        if Path(file).name != file:
            raise ShardwiseError(f"{path}: {file!r} must be a file beside it")
        parts[file] = _open_safetensors(path.parent / file)
    for name, file in files.items():
        if name not in parts[file].tensors:
            raise ShardwiseError(f"{path}: there is no {name!r} in {file}")
    tensors = {name: parts[file].tensors[name] for name, file in files.items()}
    checksum = crc32(repr([part.checksum for part in parts.values()]).encode())
    return Weights(path, tensors, checksum)


def _open_torch(path: Path) -> Weights:
    """A file of torch.save, mapped into memory; nothing pickled is run."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise ShardwiseError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        raise ShardwiseError(f"{path} cannot be read: {one_line(error)}") from None
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(x, torch.Tensor) for name, x in state.items()
    ):
        raise ShardwiseError(
            f"{path} holds more than the state of a model; give load_state_dict the part of "
            "torch.load(path) that is one"
        )

    def reader(tensor: torch.Tensor) -> Callable[[Box], torch.Tensor]:
        return lambda box: tensor.detach()[box.slices_in(Box.whole(tuple(tensor.shape)))].clone()

    tensors = {n: Whole(tuple(t.shape), t.dtype, reader(t)) for n, t in state.items()}
    return Weights(path, tensors, _checksum(path))


def _open_checkpoint(folder: Path) -> Weights:
    reader, tensors = Reader(folder), {}
    for name, key in reader.document.names.items():
        stored = reader.document.tensors[key]
        tensors[name] = Whole(tuple(stored.shape), DTYPES[stored.dtype], partial(reader.read, key))
    checksum = crc32(reader.path.read_bytes())  # which has all checksums
    return Weights(folder, tensors, checksum)


def _checksum(path: Path) -> int:
    """A number that tells files apart, by parts from all over them."""
    with system_errors_as(f"{path} cannot be read"), path.open("rb") as file:
        size = file.seek(0, 2)
        found = crc32(repr(size).encode())
        for window in range(WINDOWS):
            file.seek(max(size - WINDOW, 0) * window // (WINDOWS - 1))
            found = crc32(file.read(WINDOW), found)
    return found

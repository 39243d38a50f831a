"""Write and read checkpoints that a kill at any moment cannot damage, without pickle.

A checkpoint is a folder `checkpoint-NNNNNN`, where the number is that of completed epochs, with safetensors
for tensors and JSON for the rest. A folder with this name is complete, because it was renamed after it was
written.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

STATE = "state.json"
T = TypeVar("T")


def name_of(epochs_done: int) -> str:
    """Return the folder name of the checkpoint after that many epochs."""
    return f"checkpoint-{epochs_done:06d}"


def epochs_of(folder: Path) -> int:
    """Return the number in a checkpoint's name."""
    return int(folder.name.rpartition("-")[2])


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [path for path in run_dir.glob("checkpoint-*") if re.fullmatch("checkpoint-[0-9]+", path.name)]
    return sorted([path for path in found if (path / STATE).is_file()], key=epochs_of)


def write(
    run_dir: Path, epochs_done: int, tensors: dict[str, dict[str, torch.Tensor]], state: dict[str, Any]
) -> Path:
    """Write a checkpoint under another name, flush it to disk, rename it, and return its folder.

    Each safetensors file, by its stem, has a dictionary of tensors; `state` is the rest, which JSON can hold.
    One that a run has of these epochs already says the same, and stays.
    Raises OSError if the disk is full or the folder cannot be written; what was written of the checkpoint is
    deleted, and those before it are untouched.
    """
    target = run_dir / name_of(epochs_done)
    if target in list_checkpoints(run_dir):
        return target
    files = {f"{stem}.safetensors": save(_plain(group)) for stem, group in tensors.items()}
    files[STATE] = json.dumps({"tensors": list(tensors), **state}).encode()
    aside = run_dir / f".{target.name}.new"
    try:
        remove_leftovers(run_dir)
        _write_files(aside, files)
        if target.exists():  # half of one, which was copied or deleted by hand
            remove(target)
        aside.rename(target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)  # on a full disk its space is needed
        raise OSError(
            error.errno,
            f"cannot write {target.name} ({error.strerror}): make room in {run_dir}, or make it writable, "
            f"then {how_to_go_on(run_dir)}",
        ) from error
    return target


def how_to_go_on(run_dir: Path) -> str:
    """Return how to restart a run that could not write."""
    if list_checkpoints(run_dir):
        return "continue with resume_from='latest'"
    return "start again with overwrite=True"


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, data in files.items():
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def remove(folder: Path) -> None:
    """Delete a checkpoint, so that a kill leaves no incomplete checkpoint."""
    shutil.rmtree(folder.rename(folder.with_name(f".{name_of(epochs_of(folder))}.gone")))


def remove_leftovers(run_dir: Path) -> None:
    """Delete leftovers of kills during `write` and `remove`."""
    for path in run_dir.glob(".checkpoint-*"):
        if re.fullmatch(r"\.checkpoint-[0-9]+\.(new|gone)", path.name):  # and nothing of the user's
            shutil.rmtree(path)


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Move tensors to the CPU, and copy those that share memory, as 8-bit Adam's tables do."""
    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        plain[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in seen else tensor
        seen.add(plain[name].untyped_storage().data_ptr())
    return plain


def read(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Read a checkpoint: the tensors of each safetensors file by its stem, and the state.

    A ValueError says that the folder is no checkpoint, or that a file is missing, cut or of another format.
    """
    state = read_state(folder)
    return {stem: _read_file(folder / f"{stem}.safetensors", load) for stem in state.pop("tensors")}, state


def read_state(folder: Path) -> dict[str, Any]:
    """Read only a checkpoint's state, with the stems of its tensor files; errors are those of `read`."""
    if not (folder / STATE).is_file():
        newest = list_checkpoints(folder)[-1:]  # where the folder of the run was given
        hint = f"; give one of its checkpoints, such as {newest[0]}" if newest else ""
        raise ValueError(f"{folder} holds no {STATE}: it is not a complete checkpoint of this package{hint}")
    state = _read_file(folder / STATE, json.loads)
    if not isinstance(state, dict) or "tensors" not in state:
        raise ValueError(
            f"checkpoint {folder} does not list its files in {STATE}: resume with the version that wrote it, "
            "or from another checkpoint"
        )
    return state


def _read_file(path: Path, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"checkpoint {path.parent} is damaged: {path.name} cannot be read ({reason}); "
            f"{_instead_of(path.parent)}"
        ) from error


def _instead_of(folder: Path) -> str:
    """Return how to continue without a damaged checkpoint: from the one before it, or else the newest."""
    found = list_checkpoints(folder.parent)
    others = [other for other in found if other != folder]
    if others:
        best = found[found.index(folder) - 1] if folder in found[1:] else others[-1]
        return f"resume from another, with resume_from={str(best)!r}"
    return "there is no other: start again with overwrite=True"


def prune(run_dir: Path, limit: int) -> None:
    """Delete the oldest checkpoints beyond `limit`."""
    for path in list_checkpoints(run_dir)[:-limit]:
        remove(path)


# -------------------------------------------------------------------------------- optimizer and model
def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, torch.Tensor]:
    """Return the optimizer's state as tensors named "parameter|entry"; numbers become 0-d tensors."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{name}|{entry}": torch.as_tensor(value)
        for name, param in zip(names, params, strict=True)
        for entry, value in optimizer.state.get(param, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, torch.Tensor]
) -> None:
    """Load the result of `optimizer_tensors`; entries keep their dtype and use the parameter's device."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, entry = key.rsplit("|", 1)
        state.setdefault(names.index(name), {})[entry] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


# ------------------------------------------------------------------------- what a checkpoint belongs to
RESUMED = "resume with what it was made with, or start a new run from its LoRA weights (train_lora_from)"


def check_identity(
    folder: Path, saved: Mapping[str, Any], mine: Mapping[str, Any], remedy: str = RESUMED
) -> None:
    """Raise a ValueError with all settings that affect the weights and differ from those of a checkpoint."""
    mine = json.loads(json.dumps(mine))
    changed = [
        f"{name}: {saved.get(name)!r} there, {value!r} here"
        for name, value in mine.items()
        if saved.get(name) != value
    ]
    if changed:
        raise ValueError(f"checkpoint {folder} belongs to another run ({'; '.join(changed)}): {remedy}")

"""Checkpoints that a kill at any moment cannot spoil: written aside, hashed, renamed; no pickle anywhere.

A checkpoint is a folder `checkpoint-NNNNNN`, the number being the epochs done, with safetensors for tensors,
JSON for the rest, and a manifest of SHA-256 sums that is checked before anything is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn

MANIFEST = "manifest.json"


def name_of(epochs_done: int) -> str:
    """Return the folder name of the checkpoint after that many epochs."""
    return f"checkpoint-{epochs_done:06d}"


# What `write` moves aside until its successor is in place; a kill in between leaves it under this name.
_REPLACED = re.compile(r"\.(checkpoint-[0-9]+)\.old")


def epochs_of(folder: Path) -> int:
    """Return the number in a checkpoint's name."""
    return int(folder.name.removesuffix(".old").rpartition("-")[2])


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [path for path in run_dir.glob("checkpoint-*") if re.fullmatch("checkpoint-[0-9]+", path.name)]
    found += [path for path in run_dir.glob(".*.old") if _place_of_replaced(path) is not None]
    return sorted([path for path in found if (path / MANIFEST).is_file()], key=epochs_of)


def _place_of_replaced(folder: Path) -> Path | None:
    """Return where a checkpoint belongs that a kill left moved aside, unless its successor is there."""
    match = _REPLACED.fullmatch(folder.name)
    place = folder.with_name(match[1]) if match else None
    return None if place is None or place.exists() else place


def write(
    run_dir: Path,
    epochs_done: int,
    tensors: dict[str, dict[str, torch.Tensor]],
    state: dict[str, Any],
) -> Path:
    """Write a checkpoint beside its place, flush it to disk, and rename it into place.

    Args:
        run_dir: folder of the run.
        epochs_done: number of the checkpoint.
        tensors: a dictionary of tensors for each safetensors file, by the file's stem.
        state: JSON-able rest.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: if the disk is full or the folder cannot be written; what was written of the checkpoint is
            deleted, and those before it are untouched.
    """
    files = {f"{stem}.safetensors": save(_plain(group)) for stem, group in tensors.items()}
    files["state.json"] = json.dumps(state).encode()
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files[MANIFEST] = json.dumps({"sha256": sums}, indent=1).encode()
    target = run_dir / name_of(epochs_done)
    aside = run_dir / f".{target.name}.new"
    try:
        remove_leftovers(run_dir)
        _write_files(aside, files)
        if target.exists():
            target.rename(target.with_name(f".{target.name}.old"))
        aside.rename(target)
        remove_leftovers(run_dir)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)  # on a full disk its space is needed
        raise OSError(
            error.errno,
            f"cannot write {target.name} ({error.strerror}): make room in {run_dir}, or make it writable, "
            "then continue with resume_from='latest'",
        ) from error
    return target


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, data in files.items():
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def remove(folder: Path) -> None:
    """Delete a checkpoint; what a kill leaves of it is no checkpoint any more."""
    shutil.rmtree(folder.rename(folder.with_name(f".{name_of(epochs_of(folder))}.gone")))


def remove_leftovers(run_dir: Path) -> None:
    """Delete what kills during `write` and `remove` have left; put back what has no successor yet."""
    for path in run_dir.glob(".checkpoint-*.old"):
        place = _place_of_replaced(path)
        if place is not None:
            path.rename(place)
    for suffix in ("new", "old", "gone"):
        for path in run_dir.glob(f".checkpoint-*.{suffix}"):
            shutil.rmtree(path)


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def read(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Read a checkpoint after checking every byte of it.

    Args:
        folder: a checkpoint's folder.

    Returns:
        The tensors of each safetensors file by its stem, and the state.

    Raises:
        ValueError: if the folder is no checkpoint, or a file of it is missing, cut or changed.
    """
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} holds no {MANIFEST}: it is not a complete checkpoint of this package")
    try:
        sums = json.loads((folder / MANIFEST).read_text())["sha256"]
        contents = {name: (folder / name).read_bytes() for name in sums}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"checkpoint {folder} is damaged ({error}): resume from an earlier one") from error
    for name, data in contents.items():
        if hashlib.sha256(data).hexdigest() != sums[name]:
            raise ValueError(
                f"checkpoint {folder} is damaged: {name} is truncated or changed; resume from an earlier one"
            )
    if "state.json" not in contents:
        raise ValueError(
            f"checkpoint {folder} is damaged: state.json is not listed; resume from an earlier one"
        )
    state = json.loads(contents.pop("state.json"))
    return {Path(name).stem: load(data) for name, data in contents.items()}, state


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
    """Put back what `optimizer_tensors` took; entries keep dtype and follow their parameter's device."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, entry = key.rsplit("|", 1)
        state.setdefault(names.index(name), {})[entry] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


# ------------------------------------------------------------------------- what a checkpoint belongs to
def fingerprints(pipeline: Any) -> dict[str, str]:
    """Return a hash of each part of a pipeline that decides what a run does; adapters do not count."""
    rules = {k: v for k, v in pipeline.scheduler.config.items() if not k.startswith("_")}
    text = json.dumps(rules, sort_keys=True, default=str)
    hashes = {f"{part} weights": _hash(getattr(pipeline, part)) for part in _PARTS}
    return {**hashes, "scheduler": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}


_PARTS = ("unet", "vae", "text_encoder")


def adapter_fingerprint(unet: nn.Module) -> str:
    """Return a hash of the UNet's adapter, or "none"."""
    return _hash(unet, adapter=True) if any("lora_" in name for name in unet.state_dict()) else "none"


def _hash(module: nn.Module, adapter: bool = False) -> str:
    """Hash names, shapes and some values, rounded to bfloat16: loading in float32 or bfloat16 is the same."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(module.state_dict().items()):
        if ("lora_" in name) == adapter:
            digest.update(f"{name.replace('.base_layer', '')}{tuple(tensor.shape)}".encode())
            digest.update(tensor.flatten()[:8].bfloat16().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def check_identity(folder: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    """Refuse a checkpoint whose run differs from this one in anything that decides the weights.

    Raises:
        ValueError: naming every field that differs, with both values.
    """
    mine = json.loads(json.dumps(mine))
    changed = [name for name in mine if name not in saved or saved[name] != mine[name]]
    if changed:
        detail = "; ".join(f"{name}: {saved.get(name)!r} there, {mine[name]!r} here" for name in changed)
        raise ValueError(
            f"checkpoint {folder} belongs to another run ({detail}): resume with what it was made with"
        )

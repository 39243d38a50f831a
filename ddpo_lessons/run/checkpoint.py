"""Checkpoints that a kill at any moment cannot spoil: written aside, hashed, renamed; no pickle anywhere.

A checkpoint is a folder `checkpoint-NNNNNN`, the number being the epochs done, with safetensors for tensors,
JSON for the rest, and a manifest of SHA-256 sums that is checked before anything is read.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load, save
from torch import nn

from ddpo_lessons.families import Family

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
    run_dir: Path, epochs_done: int, tensors: dict[str, dict[str, torch.Tensor]], state: dict[str, Any]
) -> Path:
    """Write a checkpoint beside its place, flush it to disk, rename it into place, and return its folder.

    Each safetensors file, by its stem, has a dictionary of tensors; `state` is the rest, which JSON can hold.
    Raises OSError if the disk is full or the folder cannot be written; what was written of the checkpoint is
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
            f"then {how_to_go_on(run_dir)}",
        ) from error
    return target


def how_to_go_on(run_dir: Path) -> str:
    """Say how to start a run again that could not write."""
    return (
        "continue with resume_from='latest'"
        if list_checkpoints(run_dir)
        else "begin anew with overwrite=True"
    )


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
            if re.fullmatch(rf"\.checkpoint-[0-9]+\.{suffix}", path.name):  # and nothing of the user's
                shutil.rmtree(path)


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bring tensors to the CPU; those that share memory, as 8-bit Adam's tables do, get copies."""
    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        plain[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in seen else tensor
        seen.add(plain[name].untyped_storage().data_ptr())
    return plain


def read(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Read a checkpoint after checking every byte of it.

    Returns the tensors of each safetensors file by its stem, and the state; a ValueError says that the folder
    is no checkpoint, or that a file of it is missing, cut or changed.
    """
    contents = _read_files(folder)
    state = json.loads(contents.pop("state.json"))
    return {Path(name).stem: load(data) for name, data in contents.items()}, state


def read_state(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's state alone; a ValueError as in `read`."""
    return json.loads(_read_files(folder, only="state.json")["state.json"])


def _read_files(folder: Path, only: str = "") -> dict[str, bytes]:
    """Read all files of a checkpoint, or one, and compare them with the manifest."""
    if not (folder / MANIFEST).is_file():
        newest = list_checkpoints(folder)[-1:]  # where the folder of the run was given
        hint = f"; give one of its checkpoints, such as {newest[0]}" if newest else ""
        raise ValueError(
            f"{folder} holds no {MANIFEST}: it is not a complete checkpoint of this package{hint}"
        )
    try:
        sums = json.loads((folder / MANIFEST).read_text())["sha256"]
        contents = {name: (folder / name).read_bytes() for name in sums if only in ("", name)}
        changed = [name for name, data in contents.items() if hashlib.sha256(data).hexdigest() != sums[name]]
        reason = "state.json is not listed" if "state.json" not in contents else ""
        reason = f"{changed[0]} is truncated or changed" if changed else reason
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        reason = str(error)
    if reason:
        raise ValueError(f"checkpoint {folder} is damaged: {reason}; resume from an earlier one")
    return contents


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
VALUES = 4  # of each tensor that a fingerprint looks at


def fingerprints(family: Family) -> dict[str, Any]:
    """Return what tells models apart: of each network shapes and some values, without a trained adapter's."""
    rules = {k: v for k, v in family.pipeline.scheduler.config.items() if not k.startswith("_")}
    text = json.dumps(rules, sort_keys=True, default=str)
    prints: dict[str, Any] = {"denoiser weights": fingerprint(family.denoiser)}
    for part, network in family.frozen.items():  # an adapter of theirs is part of them
        prints[f"{part} weights"] = fingerprint(network, "all")
    zeros = family.pipeline.config.get("force_zeros_for_empty_prompt")
    if zeros is not None:  # what guidance leads away from, in Stable Diffusion XL
        prints["force_zeros_for_empty_prompt"] = zeros
    return {**prints, "scheduler": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}


def fingerprint(module: nn.Module, which: Literal["base", "adapter", "all"] = "base") -> dict[str, Any]:
    """Return {"shapes": hash of names and shapes, "values": first ones} of a network, its adapter or both."""
    digest, values = hashlib.blake2b(digest_size=8), []
    for name, tensor in sorted(module.state_dict().items()):
        if which in ("all", "adapter" if "lora_" in name else "base"):
            digest.update(f"{name.replace('.base_layer', '')}{tuple(tensor.shape)}".encode())
            values.append(tensor.flatten()[:VALUES].float())
    flat = torch.cat(values).tolist() if values else []
    return {"shapes": digest.hexdigest(), "values": [float(f"{value:.6g}") for value in flat]}


def is_same(saved: Any, mine: Any) -> bool:
    """Compare two entries of an identity; weights that differ by the rounding of a load are the same.

    A model loaded in float16 or bfloat16, or cast from one to the other, is off by at most one place of
    bfloat16, and nearly always by none; another fine-tune of it is not.
    """
    if not (isinstance(saved, dict) and isinstance(mine, dict) and {"shapes", "values"} <= saved.keys()):
        return saved == mine
    if saved["shapes"] != mine["shapes"] or len(saved["values"]) != len(mine["values"]):
        return False
    if not mine["values"]:
        return True
    a, b = torch.tensor(saved["values"]), torch.tensor(mine["values"])
    is_near = torch.allclose(a, b, rtol=2**-7, atol=2**-23)
    agree = (a.bfloat16() == b.bfloat16()).float().mean()
    return is_near and bool(agree > 0.9)


def check_identity(
    folder: Path, saved: dict[str, Any], mine: dict[str, Any], changed_sources: Sequence[str] = ()
) -> None:
    """Refuse a checkpoint whose run differs from this one in anything that decides the weights.

    `changed_sources` says which of reward, prompts and images differ. A ValueError names all that differs,
    with both values.
    """
    mine = json.loads(json.dumps(mine))
    names = [name for name in mine if name not in saved or not is_same(saved[name], mine[name])]
    changed = [f"{name}: {_show(saved.get(name))} there, {_show(mine[name])} here" for name in names]
    if not changed and not changed_sources:
        return
    remedy = "start a new run from its LoRA weights (train_lora_from)"
    if not changed:
        remedy = "say with resume_anyway=True that you mean it"
    raise ValueError(
        f"checkpoint {folder} belongs to another run ({'; '.join([*changed, *changed_sources])}): resume "
        f"with what it was made with, or {remedy}"
    )


def _show(value: Any) -> str:
    if isinstance(value, dict) and "shapes" in value:
        return f"{value['shapes']} {value['values'][:2]}..."
    return repr(value)

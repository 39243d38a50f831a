import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_pipeline, make_xl_pipeline
from peft import LoraConfig

from ddpo_lessons.families import family_of
from ddpo_lessons.run import checkpoint

TENSORS = {
    "policy": {"layer.weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([1e-30, -0.0])},
    "optimizer": {"layer.weight|step": torch.tensor(3.0), "bias|exp_avg": torch.zeros(2).half()},
}
STATE = {"epochs_done": 2, "note": "é", "numbers": [0.1, 1e-17]}


def write(folder: Path, epochs_done: int = 2) -> Path:
    return checkpoint.write(folder, epochs_done, TENSORS, {**STATE, "epochs_done": epochs_done})


def test_what_is_read_is_what_was_written_to_the_bit(tmp_path):
    folder = write(tmp_path)
    assert folder.name == "checkpoint-000002"
    tensors, state = checkpoint.read(folder)
    assert state == STATE
    for stem, group in TENSORS.items():
        assert tensors[stem].keys() == group.keys()
        for name, tensor in group.items():
            assert tensors[stem][name].dtype == tensor.dtype
            assert tensors[stem][name].numpy().tobytes() == tensor.numpy().tobytes()


def test_only_safetensors_and_json_are_written(tmp_path):
    folder = write(tmp_path)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000002"]


@pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove"])
def test_a_damaged_file_is_found(tmp_path, name, damage):
    path = write(tmp_path) / name
    data, generator = bytearray(path.read_bytes()), random.Random(f"{name} {damage}")
    if damage == "remove":
        path.unlink()
    else:
        place = generator.randrange(len(data))
        data[place] ^= 1 << generator.randrange(8)
        path.write_bytes({"truncate": data[:place], "flip": data, "empty": b""}[damage])
    with pytest.raises(ValueError, match=rf"checkpoint .* is damaged.*{name}.*earlier one"):
        checkpoint.read(path.parent)


def test_no_flip_of_a_bit_of_the_manifest_changes_what_is_read(tmp_path):
    manifest = write(tmp_path) / checkpoint.MANIFEST
    whole, refused = manifest.read_bytes(), 0
    for bit in range(0, 8 * len(whole), 5):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(data)
        try:
            assert checkpoint.read(manifest.parent)[1] == STATE  # white space holds nothing
        except ValueError:
            refused += 1
    assert refused > 0.9 * 8 * len(whole) / 5
    manifest.write_bytes(whole[:40])
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.read(manifest.parent)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.read(tmp_path)


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("operation", range(12))
@pytest.mark.parametrize("epochs_done", [2, 3])
def test_a_kill_at_any_file_operation_leaves_a_usable_checkpoint(
    tmp_path, monkeypatch, operation, epochs_done
):
    """Kills the writing of number 3, or the rewriting of 2, and the deletion of 1 before every step."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    count = 0

    def killing(function):
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count == operation + 1:
                raise KilledError
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        for owner, name in (
            (os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"),
            (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"),
        ):  # fmt: skip
            patch.setattr(owner, name, killing(getattr(owner, name)))
        try:
            write(tmp_path, epochs_done)
            checkpoint.prune(tmp_path, 2 if epochs_done == 3 else 1)
        except KilledError:
            pass
    for path in checkpoint.list_checkpoints(tmp_path):
        assert checkpoint.read(path)[1]["epochs_done"] == checkpoint.epochs_of(path)
    assert checkpoint.list_checkpoints(tmp_path)
    write(tmp_path, epochs_done)  # the next try is not disturbed by what the kill left
    assert checkpoint.read(tmp_path / checkpoint.name_of(epochs_done))[1]["epochs_done"] == epochs_done
    assert not list(tmp_path.glob(".checkpoint*"))


@pytest.mark.parametrize("operation", range(3))
def test_a_kill_while_the_only_checkpoint_is_replaced_leaves_the_old_one_or_the_new_one(
    tmp_path, monkeypatch, operation
):
    """Replacing takes two renames; between them there is no folder of the checkpoint's name."""
    write(tmp_path)
    left = operation

    def rename(path, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KilledError
        return os.replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        try:
            checkpoint.write(tmp_path, 2, TENSORS, {**STATE, "note": "new"})
            notes = {"new"}
        except KilledError:
            notes = {STATE["note"]}
    assert (operation == 2) == (notes == {"new"})
    (found,) = checkpoint.list_checkpoints(tmp_path)
    assert checkpoint.epochs_of(found) == 2
    assert checkpoint.read(found)[1]["note"] in notes
    checkpoint.remove_leftovers(tmp_path)  # the next run does so before it trains
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000002"]
    assert checkpoint.read(tmp_path / "checkpoint-000002")[1]["note"] in notes


@pytest.mark.parametrize("file_number", range(4))
def test_a_full_disk_costs_no_space_and_no_older_checkpoint(tmp_path, monkeypatch, file_number):
    write(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    left = file_number

    def fsync(descriptor):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(
            OSError, match=r"cannot write checkpoint-000002 \(No space left .*make room.*resume_from='latest'"
        ) as caught:
            write(tmp_path, 2)
    assert caught.value.errno == errno.ENOSPC
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_oldest_checkpoints_are_deleted_by_number(tmp_path):
    for number in (999_999, 1_000_000, 8, 10):
        write(tmp_path, number)
    shutil.copytree(tmp_path / "checkpoint-000008", tmp_path / "checkpoint-old")
    shutil.copytree(tmp_path / "checkpoint-000008", tmp_path / "checkpoint-\N{SUPERSCRIPT TWO}")
    (tmp_path / "checkpoint-000011").mkdir()  # no manifest: not complete
    checkpoint.prune(tmp_path, 2)
    kept = checkpoint.list_checkpoints(tmp_path)
    assert [checkpoint.epochs_of(path) for path in kept] == [999_999, 1_000_000]
    assert (tmp_path / "checkpoint-old").is_dir()


def test_an_optimizer_continues_to_the_bit():
    def make(seed: int) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        torch.manual_seed(seed)
        layer = torch.nn.Linear(3, 2)
        return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)

    def step(layer: torch.nn.Linear, optimizer: torch.optim.AdamW, number: int) -> None:
        optimizer.zero_grad()
        layer(torch.full((1, 3), float(number))).square().sum().backward()
        optimizer.step()

    names = ["weight", "bias"]
    layer, optimizer = make(0)
    for number in range(3):
        step(layer, optimizer, number)
    saved = {name: t.clone() for name, t in checkpoint.optimizer_tensors(optimizer, names).items()}
    other, resumed = make(1)
    other.load_state_dict(layer.state_dict())
    checkpoint.load_optimizer_tensors(resumed, names, saved)
    for number in range(3, 6):
        step(layer, optimizer, number)
        step(other, resumed, number)
    assert torch.equal(layer.weight, other.weight)
    assert torch.equal(layer.bias, other.bias)


# ------------------------------------------------------------------------------------------- identity
def prints(pipeline: Any) -> dict[str, Any]:
    return checkpoint.fingerprints(family_of(pipeline))


def test_fingerprints_know_the_model_but_not_its_adapter_or_precision():
    pipeline = make_pipeline()
    before = prints(pipeline)
    assert set(before) == {"denoiser weights", "vae weights", "text_encoder weights", "scheduler"}
    pipeline.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    assert prints(pipeline) == before
    for precisions in ((torch.bfloat16,), (torch.float16,), (torch.float16, torch.bfloat16)):
        pipeline = make_pipeline()
        for precision in precisions:
            torch.nn.Module.to(pipeline.unet, dtype=precision)
        checkpoint.check_identity(Path("x"), before, prints(pipeline))
        checkpoint.check_identity(Path("x"), prints(pipeline), before)


def test_another_fine_tune_is_another_model():
    pipeline, before = make_pipeline(), prints(make_pipeline())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in pipeline.unet.parameters():
            weight *= 1 + 2e-3 * torch.randn(weight.shape, generator=generator)
    with pytest.raises(ValueError, match="denoiser weights"):
        checkpoint.check_identity(Path("x"), before, prints(pipeline))


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "text_encoder_2"])
def test_fingerprints_notice_other_weights(part):
    pipeline = make_xl_pipeline()
    before = prints(pipeline)
    list(getattr(pipeline, part).parameters())[-1].data.add_(0.5)
    after = prints(pipeline)
    differ = [name for name in before if before[name] != after[name]]
    assert differ == [f"{part} weights".replace("unet", "denoiser")]


def test_fingerprints_notice_another_schedule():
    before = prints(make_pipeline())
    after = prints(make_pipeline(prediction_type="epsilon"))
    assert [name for name in before if before[name] != after[name]] == ["scheduler"]


def test_every_field_that_differs_is_named_with_both_values():
    saved = json.loads(json.dumps({"seed": 1, "modules": ("a", "b"), "eta": 1.0}))
    checkpoint.check_identity(Path("x"), saved, {"seed": 1, "modules": ("a", "b"), "eta": 1.0})
    with pytest.raises(ValueError, match=r"seed: 1 there, 2 here; new: None there, 3 here\)"):
        checkpoint.check_identity(Path("x"), saved, {"seed": 2, "modules": ["a", "b"], "new": 3})

import contextlib
import errno
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from ddpo_lessons.training import checkpoint

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
    assert list(tensors) == list(TENSORS)
    for stem, group in TENSORS.items():
        assert tensors[stem].keys() == group.keys()
        for name, tensor in group.items():
            assert tensors[stem][name].dtype == tensor.dtype
            assert tensors[stem][name].numpy().tobytes() == tensor.numpy().tobytes()


def test_only_safetensors_and_json_are_written(tmp_path):
    folder = write(tmp_path)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000002"]


class Payload:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: data + b"more",
        lambda data: pickle.dumps(Payload()),
    ],
    ids=["cut by a byte", "cut in half", "cut to its head", "emptied", "more", "a pickle"],
)
def test_a_damaged_file_is_one_error_with_its_name_and_the_remedy(tmp_path, monkeypatch, name, damage):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path) / name
    path.write_bytes(damage(path.read_bytes()))
    message = rf"^checkpoint .*000002 is damaged: {name} cannot be read \(.+\); {{}}$"
    with pytest.raises(ValueError, match=message.format("there is no other: start again .*")):
        checkpoint.read(path.parent)
    earlier = tmp_path / checkpoint.name_of(1)
    shutil.copytree(path.parent, earlier)
    remedy = f"resume from another, with resume_from={str(earlier)!r}"
    with pytest.raises(ValueError, match=message.format(re.escape(remedy))):
        checkpoint.read(path.parent)
    assert not (tmp_path / "unpickled").exists()


def test_a_missing_file_is_named_and_a_folder_without_its_state_is_no_checkpoint(tmp_path):
    folder = write(tmp_path)
    assert checkpoint.read_state(folder)["tensors"] == ["policy", "optimizer"]
    (folder / "notes.txt").touch()  # of the user
    (folder / "optimizer.safetensors").unlink()
    with pytest.raises(ValueError, match=r"damaged: optimizer\.safetensors cannot be read \(No such file"):
        checkpoint.read(folder)
    for other in ("[]", "5", '{"epochs_done": 2}'):  # the last is that of an older version
        (folder / "state.json").write_text(other)
        with pytest.raises(ValueError, match=r"does not list its files.*resume with the version"):
            checkpoint.read(folder)
    (folder / "state.json").unlink()
    assert checkpoint.list_checkpoints(tmp_path) == []


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.read(tmp_path)


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("operation", range(11))
def test_a_kill_at_any_file_operation_leaves_a_usable_checkpoint(tmp_path, monkeypatch, operation):
    """Kills the writing of number 3 and the deletion of 1 before every step."""
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
        operations = {os: ("fsync", "unlink", "rmdir"), Path: ("rename", "mkdir"), shutil: ("rmtree",)}
        for owner, name in ((owner, name) for owner, names in operations.items() for name in names):
            patch.setattr(owner, name, killing(getattr(owner, name)))
        with contextlib.suppress(KilledError):
            write(tmp_path, 3)
            checkpoint.prune(tmp_path, 2)
    assert count == operation + 1  # all of these were killed
    found = checkpoint.list_checkpoints(tmp_path)
    assert [checkpoint.read(path)[1]["epochs_done"] for path in found] == [*map(checkpoint.epochs_of, found)]
    assert {1, 2, 3} - {*map(checkpoint.epochs_of, found)} in ({3}, {1}, set())
    write(tmp_path, 3)  # the next try is not disturbed by what the kill left
    assert checkpoint.read(tmp_path / "checkpoint-000003")[1]["epochs_done"] == 3
    write(tmp_path, 4)
    assert not list(tmp_path.glob(".checkpoint*"))


def test_a_checkpoint_that_is_there_stays_and_half_of_one_is_replaced(tmp_path):
    folder = write(tmp_path)
    checkpoint.write(tmp_path, 2, TENSORS, {**STATE, "note": "again"})
    assert checkpoint.read(folder)[1]["note"] == "é"
    (folder / "state.json").unlink()
    checkpoint.write(tmp_path, 2, TENSORS, {**STATE, "note": "again"})
    assert checkpoint.read(folder)[1]["note"] == "again"


@pytest.mark.parametrize("file_number", range(3))
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
    (tmp_path / "checkpoint-000011").mkdir()  # not complete
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


def test_every_field_that_differs_is_named_with_both_values():
    saved = {"seed": 1, "modules": ["a", "b"], "eta": 1.0}
    checkpoint.check_identity(Path("x"), saved, {"seed": 1, "modules": ("a", "b"), "eta": 1.0})
    with pytest.raises(ValueError, match=r"seed: 1 there, 2 here; new: None there, 3 here\)"):
        checkpoint.check_identity(Path("x"), saved, {"seed": 2, "modules": ["a", "b"], "new": 3})

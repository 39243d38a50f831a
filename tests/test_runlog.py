import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import brightness, make_config, make_trainer, run
from PIL import Image

from ddpo_lessons import Validation
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.runlog import METRICS, RunLog, hold, read_metrics, varied

pytestmark = pytest.mark.usefixtures("one_thread")


# --------------------------------------------------------------------------------------- damaged records
RECORDS = b'{"kind": "step", "epoch": 1}\n{"kind": "epoch", "epoch": 1}\n'


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (RECORDS.replace(b'p",', b'p"'), 1),
        (RECORDS.replace(b"\n{", b"\x0b{"), 1),
        (RECORDS.replace(b'epoch"', b'ep\xffch"', 1), 1),
        (RECORDS.replace(b'"kind": "e', b'"kine": "e'), 2),
        (RECORDS + b"[1]\n", 3),
        (RECORDS + b'{"kind": "step"\n' + RECORDS, 3),
        (b"\x80\x04.", 1),  # what follows the last line break, and is not the beginning of a record
        (RECORDS[:-4] + bytes(4), 2),
    ],
)
def test_a_damaged_line_is_named(tmp_path, data, line):
    (tmp_path / METRICS).write_bytes(data)
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line {line} is damaged: restore"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("cut", [1, 2, 10, 29])
def test_a_last_line_that_a_kill_cut_off_is_left_out(tmp_path, cut):
    (tmp_path / METRICS).write_bytes(RECORDS[:-cut])
    kinds = ["step", "epoch"] if cut == 1 else ["step"]  # without its line break a record is still whole
    assert [record["kind"] for record in read_metrics(tmp_path)] == kinds
    assert read_metrics(tmp_path / "nowhere") == []


def line(kind: str, epoch: int | None) -> bytes:
    return json.dumps({"kind": kind} | ({} if epoch is None else {"epoch": epoch})).encode() + b"\n"


FIRST = [line("step", 1), line("epoch", 1), line("validation", 0), line("mine", None)]
SECOND = [line("step", 2), line("epoch", 2), line("validation", 2), line("mine", None)]


@pytest.mark.parametrize("later", [b"", b"".join(SECOND), SECOND[0] + b'{"kind": "ep', SECOND[0] + b"\0\n"])
def test_a_resume_keeps_the_records_of_its_epochs_and_drops_later_ones(tmp_path, later):
    """Also what a user wrote without an epoch; what follows may be damaged."""
    run(tmp_path)
    (tmp_path / METRICS).write_bytes(b"".join(FIRST) + later)
    config = make_config(tmp_path, resume_from="latest")
    RunLog(config, tmp_path / "checkpoint-000001", 1)
    assert (tmp_path / METRICS).read_bytes() == b"".join(FIRST)
    RunLog(make_config(tmp_path, overwrite=True), None, 0)
    assert (tmp_path / METRICS).read_bytes() == b""


def test_damaged_records_are_not_continued(tmp_path):
    run(tmp_path, num_epochs=2)
    path = tmp_path / METRICS
    whole = path.read_bytes()
    first = b"".join(whole.splitlines(keepends=True)[:2])
    for damaged, message in (
        (whole.replace(b'"epoch": 1', b'"epoch": ,', 1), "line 1 is damaged: restore the file, or delete"),
        (first, "ends with epoch 1, and the checkpoint has 2; restore the file, or move it away"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"metrics\.jsonl.* {message}"):
            run(tmp_path, num_epochs=3, resume_from="latest")
        assert path.read_bytes() == damaged
        assert len(checkpoint.list_checkpoints(tmp_path)) == 2
    path.unlink()  # the remedy
    run(tmp_path, num_epochs=3, resume_from="latest")
    assert [record["epoch"] for record in read_metrics(tmp_path, "epoch")] == [3]
    run(tmp_path, num_epochs=4, resume_from="latest")
    assert [record["epoch"] for record in read_metrics(tmp_path, "epoch")] == [3, 4]


def test_a_damaged_file_does_not_stop_a_run_that_replaces_it(tmp_path):
    run(tmp_path)
    path = tmp_path / METRICS
    path.write_bytes(b"z" + path.read_bytes()[1:])
    with pytest.raises(ValueError, match="already holds a run"):
        make_trainer(tmp_path)
    run(tmp_path, overwrite=True)
    assert len(read_metrics(tmp_path)) == 2


@pytest.mark.parametrize("resume_from", ["", "auto"])
def test_files_of_the_user_are_refused_where_a_run_would_change_them(resume_from, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")  # stays, since no run writes a file of this name
    make_trainer(tmp_path, resume_from=resume_from)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no run, but config\.json, .*: choose another output_dir"):
        make_trainer(tmp_path, resume_from=resume_from)
    make_trainer(tmp_path, overwrite=True)


def test_a_run_without_its_records_goes_on_in_its_folder(tmp_path):
    """As lesson 13 says after a disconnect: move damaged records away, and run again."""
    run(tmp_path, save_freq=5)
    (tmp_path / METRICS).unlink()
    shutil.rmtree(tmp_path / "checkpoint-000001")
    assert (tmp_path / "config.json").is_file()
    run(tmp_path, resume_from="auto")
    assert len(read_metrics(tmp_path, "epoch")) == 1


def test_records_hold_the_distribution_of_rewards(tmp_path):
    """Quantiles by hand: of 0, 1, 2, 10 that of q lies at place 3 q."""
    quantiles = {"q05": 0.15, "q25": 0.75, "q50": 1.5, "q75": 2 + 0.25 * 8, "q95": 2 + 0.85 * 8}
    trainer = make_trainer(tmp_path, lambda *_: [0.0, 1.0, 2.0, 10.0], sample_batch_size=4)
    trainer.image_samples_hook = Validation(trainer, [("", {})] * 4)
    trainer.train()
    records = read_metrics(tmp_path, "epoch") + read_metrics(tmp_path, "validation")
    assert len(records) == 3
    for record, name in zip(records, ["reward", "validation_reward", "validation_reward"], strict=True):
        found = {key.removeprefix(f"{name}_"): value for key, value in record.items() if "_q" in key}
        assert found == pytest.approx(quantiles)
        assert record[f"{name}_std"] == pytest.approx((62.75 / 4) ** 0.5)  # around 3.25


# --------------------------------------------------------------------------------------------- full disk
class FullDisk:
    """Stands for an open file on a disk with room for so many more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data[: self.room])


@pytest.mark.parametrize("room", [0, 1, 20])
def test_a_record_that_does_not_fit_leaves_those_before_it_whole(tmp_path, monkeypatch, room):
    log = RunLog(make_config(tmp_path), None, 0)
    log.record("step", {"epoch": 1})

    def full(*arguments: Any, **settings: Any) -> FullDisk:
        file = open(*arguments, **settings)  # noqa: SIM115 - FullDisk closes it
        return FullDisk(file, room)

    with monkeypatch.context() as patch:
        patch.setattr("ddpo_lessons.training.runlog.open", full, raising=False)
        with pytest.raises(
            OSError, match=r"cannot write .*metrics\.jsonl \(No space left.*make room.*overwrite=True"
        ):
            log.record("step", {"epoch": 2})
    assert (tmp_path / METRICS).read_bytes() == b'{"kind": "step", "epoch": 1}\n'
    log.record("step", {"epoch": 2})
    assert [record["epoch"] for record in read_metrics(tmp_path)] == [1, 2]


# -------------------------------------------------------------------------------------- a second trainer
def test_a_second_trainer_in_the_folder_is_refused_while_the_first_trains(tmp_path):
    messages = []

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        with pytest.raises(RuntimeError) as caught:
            run(tmp_path, overwrite=True)
        messages.append(str(caught.value))
        return brightness(images, prompts, metadata)

    trainer = run(tmp_path, reward)
    assert messages == [
        f"another trainer is at work in {tmp_path}: wait for its end, or choose another output_dir"
    ]
    other = run(tmp_path / "other")
    assert all(map(torch.equal, trainer.learner.trainable.values(), other.learner.trainable.values()))


@pytest.mark.slow
def test_a_process_that_was_killed_frees_its_folder(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from ddpo_lessons.training.runlog import hold\n"
        "with hold(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RuntimeError, match="another trainer is at work"), hold(tmp_path):
            pass
        process.kill()
        process.wait()
    with hold(tmp_path):
        pass


@pytest.mark.parametrize("resume", ["", "latest"])
def test_a_trainer_does_not_drop_what_another_did_since_it_was_made(tmp_path, resume):
    if resume:
        run(tmp_path)
    late = make_trainer(tmp_path, resume_from=resume, num_epochs=3)
    run(tmp_path, resume_from=resume, num_epochs=2)
    with pytest.raises((RuntimeError, ValueError), match=r"resume_from='(latest|auto)'"):
        late.train()
    assert [checkpoint.epochs_of(path) for path in checkpoint.list_checkpoints(tmp_path)] == [1, 2]
    assert [record["epoch"] for record in read_metrics(tmp_path, "epoch")] == [1, 2]


def test_a_trainer_stops_when_another_has_gone_on_with_its_run(tmp_path):
    first = run(tmp_path)
    run(tmp_path, resume_from="latest", num_epochs=2)
    with pytest.raises(RuntimeError, match="another trainer uses the folder"):
        first.save()
    first.config.num_epochs = 2
    with pytest.raises(RuntimeError, match="another trainer uses the folder"):
        first.train()
    assert [record["epoch"] for record in read_metrics(tmp_path, "epoch")] == [1, 2]


@pytest.mark.parametrize(
    ("keys", "count", "numbers"),
    [("aaabbc", 3, [0, 3, 5]), ("aaabbc", 5, [0, 1, 3, 4, 5]), ("ab", 3, [0, 1]), ("aaaa", 2, [0, 1])],
)
def test_samples_are_chosen_with_as_many_keys_as_possible(keys, count, numbers):
    assert varied(keys, count) == numbers


@pytest.mark.parametrize(("side", "ending"), [(128, "png"), (256, "jpg")])
def test_a_grid_of_large_images_is_a_jpeg(side, ending, tmp_path):
    log = RunLog(make_config(tmp_path), None, 0)
    log.images(3, torch.full((9, 3, side, side), 0.5))
    (path,) = (tmp_path / "images").iterdir()
    assert path.name == f"epoch-000003.{ending}"
    with Image.open(path) as grid:
        assert grid.size == (8 * side, 2 * side)
        assert grid.format == {"png": "PNG", "jpg": "JPEG"}[ending]
        assert abs(grid.getpixel((5, 5))[0] - 128) <= 1


@pytest.mark.parametrize(
    ("count", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (6, 6, 1), (8, 8, 1), (10, 8, 2)]
)
def test_a_grid_has_no_empty_column_and_pairs_stay_in_one_row(count, columns, rows, tmp_path):
    log = RunLog(make_config(tmp_path), None, 0)
    grid = log.images(1, torch.zeros(count, 3, 96, 96))
    assert grid.size == (columns * 96, rows * 96)
    assert columns % 2 == count % 2  # an even number of tiles, as pairs are, has an even number of columns


def test_grids_that_cannot_be_written_cost_a_warning_and_no_epoch(tmp_path):
    (tmp_path / "images").write_text("a file where the folder would be")
    with pytest.warns(UserWarning, match=r"cannot write .*images/epoch-000001 \(.+\): make") as caught:
        run(tmp_path, num_epochs=2, image_grid_freq=1, overwrite=True)
    assert len(caught) == 1
    assert [record["epoch"] for record in read_metrics(tmp_path, "epoch")] == [1, 2]
    assert len(checkpoint.list_checkpoints(tmp_path)) == 2


def test_going_on_from_an_earlier_checkpoint_drops_what_came_after_it(tmp_path):
    run(tmp_path, num_epochs=3)
    (tmp_path / "images").mkdir()
    kept = ["epoch-000001.jpg", "validation-000000.png", "notes-000009.png"]
    for name in [*kept, "epoch-000002.jpg", "validation-000002.png"]:
        (tmp_path / "images" / name).touch()
    run(tmp_path, num_epochs=2, num_checkpoint_limit=2, resume_from=str(tmp_path / "checkpoint-000001"))
    assert [checkpoint.epochs_of(path) for path in checkpoint.list_checkpoints(tmp_path)] == [1, 2]
    assert [record["epoch"] for record in read_metrics(tmp_path, "epoch")] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted(kept)

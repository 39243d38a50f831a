"""resume_from="auto": the same script, started again and again, gives the run that never stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Remembering, brightness, make_config, make_pipeline, records_of

from ddpo_lessons.cli.main import main
from ddpo_lessons.trainer import DDPOTrainer
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved."""


def train(folder: Path, die: Callable[[], None] | None = None, epoch: int = 0, **changes: Any) -> None:
    """Train four epochs, of a call of the reward each, with two checkpoints; `die` in the given epoch."""
    scored: list[None] = []

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        scored.append(None)
        if die is not None and len(scored) == epoch:
            die()
        return brightness(images, prompts, metadata)

    settings = {"num_epochs": 4, "save_freq": 2, "image_grid_freq": 1, "resume_from": "auto"}
    config = make_config(folder, **{**settings, **changes})
    DDPOTrainer(config, reward, Remembering(), make_pipeline()).train()


def kill() -> None:
    raise Killed


def check_equal(folder: Path, whole: Path) -> None:
    """Check that weights, optimizer and records of two runs are bitwise the same."""
    assert records_of(folder) == records_of(whole)
    ours, theirs = (checkpoint.read(place / "checkpoint-000004")[0] for place in (folder, whole))
    for kind, tensors in theirs.items():
        assert ours[kind].keys() == tensors.keys()
        assert all(torch.equal(ours[kind][name], tensor) for name, tensor in tensors.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, resume_from="")
    return folder


@pytest.mark.parametrize(("epoch", "saved"), [(1, []), (2, []), (3, [2]), (4, [2])])
def test_a_run_that_ended_in_any_epoch_goes_on_by_the_same_script(epoch, saved, tmp_path, whole):
    with pytest.raises(Killed):
        train(tmp_path, kill, epoch)
    assert [checkpoint.epochs_of(path) for path in checkpoint.list_checkpoints(tmp_path)] == saved
    assert len(read_metrics(tmp_path, "epoch")) == epoch - 1
    (tmp_path / "notes.txt").write_text("mine")
    train(tmp_path)
    check_equal(tmp_path, whole)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_complete_run_has_nothing_to_do(tmp_path, capsys):
    train(tmp_path, num_epochs=2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    train(tmp_path, num_epochs=2)
    assert capsys.readouterr().out == (
        "nothing to do: the run has 2 epochs, and 2 are asked for; raise num_epochs to train further\n"
    )
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_command_line_takes_it(tmp_path, model, capsys):
    sizes = "--sample-num-steps 3 --sample-batch-size 2 --sample-num-batches-per-epoch 1 --train-batch-size 2"
    flags = ["train", *sizes.split(), "--model", model, "--reward", "colorfulness", "--prompt", "a three"]
    flags += ["--output-dir", str(tmp_path / "run"), "--resume-from", "auto"]
    for epochs in (1, 2, 2):
        assert main([*flags, "--num-epochs", str(epochs)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert [record["epoch"] for record in read_metrics(tmp_path / "run", "epoch")] == [1, 2]


def test_what_is_replaced_is_said_and_what_is_no_run_s_is_refused(tmp_path, capsys):
    with pytest.raises(Killed):
        train(tmp_path / "killed", kill, 2)
    train(tmp_path / "killed", seed=9)
    assert "2 records of a run that ended before its first checkpoint are replaced" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1 is damaged"):
        train(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"loss": 1}\n'
    with pytest.raises(ValueError, match=r"resume_from='auto' continues .* overwrite=True replaces it"):
        train(tmp_path / "new", overwrite=True)

"""The cells of a notebook that trains, run again: after an interrupt, a new kernel, or the end of the run."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import brightness, make_config, make_pipeline, noisy_image, records_of

from ddpo_lessons import Highest, Hooks, ImageDDPOTrainer, Validation, cost, preflight, smoke_run
from ddpo_lessons.training import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


class Notebook:
    """A notebook's cells; `run_all` runs them in their order and returns what the last ones show."""

    def __init__(self, folder: Path, interrupt_at: int = 0) -> None:
        self.folder, self.interrupt_at = folder, interrupt_at
        self.scored = 0

    def reward(self, images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        if self.is_training:
            self.scored += len(images) == 4
            if self.scored == self.interrupt_at:
                signal.raise_signal(signal.SIGINT)
        return brightness(images, prompts, metadata)

    def run_all(self) -> dict[str, Any]:
        self.is_training = False
        config = make_config(
            self.folder, num_epochs=3, sample_batch_size=4, train_batch_size=4, resume_from="auto",
            train_learning_rate_schedule="linear",
        )  # fmt: skip
        trainer = ImageDDPOTrainer(config, self.reward, noisy_image, make_pipeline(), noise_strength=0.7)
        held_out = [("", torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1)), {})] * 2
        validation = Validation(trainer, held_out, every=1, evaluator=brightness)
        baseline = validation.untrained(0.4, 0.7)
        findings = preflight(trainer)
        predicted = smoke_run(trainer)
        trainer.image_samples_hook = Hooks(validation, Highest(trainer))
        self.is_training = True
        trainer.train()
        self.is_training = False
        trainer.save_pretrained(self.folder / "lora")
        shown = {"table": validation.table(), "baseline": baseline, "failed": findings.failed}
        return {"trainer": trainer, "cost": cost(trainer, predicted), **shown}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, Notebook(folder).run_all()


def check_same(folder: Path, found: dict[str, Any], whole: tuple[Path, dict[str, Any]]) -> None:
    assert found["failed"] == []
    assert found["trainer"].epochs_done == 3
    assert records_of(folder) == records_of(whole[0])
    ours, theirs = (checkpoint.read(place / "checkpoint-000003")[0]["policy"] for place in (folder, whole[0]))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert repr(found["table"]) == repr(whole[1]["table"])
    assert repr(found["baseline"]) == repr(whole[1]["baseline"])
    assert (found["cost"].epochs, found["cost"].images) == (3, 12)


@pytest.mark.parametrize("epoch", [1, 2, 3])
@pytest.mark.parametrize("is_new_kernel", [False, True])
def test_after_an_interrupt(epoch, is_new_kernel, tmp_path, whole):
    notebook = Notebook(tmp_path, interrupt_at=epoch)
    if epoch == 1:
        with pytest.raises(ValueError, match="no record of an epoch"):  # there is no cost yet
            notebook.run_all()
    else:
        assert notebook.run_all()["trainer"].epochs_done == epoch - 1
    if is_new_kernel:
        notebook = Notebook(tmp_path)
    check_same(tmp_path, notebook.run_all(), whole)


def test_after_the_end(tmp_path, whole, capsys):
    notebook = Notebook(tmp_path)
    notebook.run_all()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for again in (notebook, Notebook(tmp_path)):
        capsys.readouterr()
        check_same(tmp_path, again.run_all(), whole)
        assert "nothing to do: the run has 3 epochs, and 3 are asked for" in capsys.readouterr().out
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

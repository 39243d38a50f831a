"""Trackers get every record and every grid; one that fails costs nothing but itself."""

import errno
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate import tracking
from helpers import PROMPTS, brightness, make_config, make_pipeline, noisy_image, records_of, red_three
from PIL import Image

from ddpo_lessons import Hooks, Validation
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

HELD_OUT = [(prompt, {}) for prompt in PROMPTS[:3]]
TWO_EPOCHS = {"num_epochs": 2, "image_grid_freq": 1, "log_with": "tensorboard"}


def make_trainer(folder: Path, hook: Any = None, **changes: Any) -> DDPOTrainer:
    return DDPOTrainer(make_config(folder, **changes), brightness, red_three, make_pipeline(), hook)


def train(folder: Path, hook: Any = None, **changes: Any) -> DDPOTrainer:
    trainer = make_trainer(folder, **{**TWO_EPOCHS, **changes})
    own = () if hook is None else (hook,)
    trainer.image_samples_hook = Hooks(*own, Validation(trainer, HELD_OUT, every=1))
    trainer.train()
    return trainer


def check_whole(folder: Path, reference: Path) -> None:
    """Check that a run has all records, grids and checkpoints of another one, which had no tracker."""
    assert records_of(folder) == records_of(reference)
    grids = [sorted(path.name for path in (place / "images").iterdir()) for place in (folder, reference)]
    assert grids[0] == grids[1]
    assert [checkpoint.epochs_of(path) for path in checkpoint.list_checkpoints(folder)] == [1, 2]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a tracker."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, log_with=None)
    return folder


# ------------------------------------------------------------------------------------------ TensorBoard
def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "ddpo_lessons"), size_guidance={"images": 0, "scalars": 0})
    return events.Reload()


def test_tensorboard_gets_every_record_and_every_grid(tmp_path):
    """The writer is left open, as at the end of a program: what is not flushed by now is lost."""
    trainer = ImageDDPOTrainer(
        make_config(tmp_path, **TWO_EPOCHS), brightness, noisy_image, make_pipeline(), noise_strength=1.0
    )
    trainer.image_samples_hook = Validation(trainer, [noisy_image()], every=1)
    trainer.train()
    events = read_events(tmp_path)
    for kind, count in (("step", 2), ("epoch", 2), ("validation", 3)):
        records = read_metrics(tmp_path, kind)
        assert len(records) == count
        for name in records[0].keys() - {"kind", "rewards"}:  # of each image
            values = [event.value for event in events.Scalars(f"{kind}/{name}")]
            expected = [record[name] for record in records if name in record]
            assert values == pytest.approx(expected, rel=1e-6, abs=1e-30), name
    assert [event.step for event in events.Scalars("validation/epoch")] == [1, 1, 2]
    for kind, epochs, tiles in (("epoch", (1, 2), 4), ("validation", (0, 1, 2), 2)):
        seen = events.Images(f"{kind}/images")
        assert len(seen) == len(epochs)
        for event, epoch in zip(seen, epochs, strict=True):
            shown = np.array(Image.open(io.BytesIO(event.encoded_image_string)))
            assert shown.shape == (96, 96 * tiles, 3)  # 32 pixels to a side are shown as 96
            saved = Image.open(tmp_path / "images" / f"{kind}-{epoch:06d}.png")
            assert np.array_equal(shown, np.array(saved))


def test_a_folder_that_tensorboard_cannot_make_costs_one_warning(tmp_path, plain):
    (tmp_path / "ddpo_lessons").write_text("a file where its folder would be")
    with pytest.warns(UserWarning, match=r"^tensorboard failed \(.*ddpo_lessons") as caught:
        trainer = train(tmp_path)
    assert len(caught) == 1
    assert trainer.accelerator.trackers == []
    check_whole(tmp_path, plain)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of its own thread
def test_a_disk_that_is_full_for_tensorboard_costs_one_warning(tmp_path, plain, monkeypatch):
    from tensorboard.summary.writer.record_writer import RecordWriter

    write, written = RecordWriter.write, []

    def fill_up(self: Any, data: bytes) -> None:
        written.append(data)
        if len(written) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", fill_up)
    with pytest.warns(UserWarning, match=r"^tensorboard failed \(OSError: .*No space left") as caught:
        train(tmp_path)
    assert len([warning for warning in caught if "tensorboard" in str(warning.message)]) == 1
    check_whole(tmp_path, plain)


# ------------------------------------------------------------------------------------------------- W&B
def test_weights_and_biases_gets_every_record_and_every_grid(tmp_path, monkeypatch):
    """By accelerate's own tracker; its package is a stand-in."""
    logged: list[tuple[dict[str, Any], int]] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    package = SimpleNamespace(
        init=lambda project: run, Image=np.asarray, config=SimpleNamespace(update=lambda *_, **__: None)
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [tracking.LoggerType.WANDB])
    hooked: list[str] = []
    train(tmp_path, lambda batches, step, tracker: hooked.append(tracker.name), log_with="wandb")
    assert hooked == ["wandb", "wandb"]
    kinds = [(next(iter(values)).partition("/")[0], "images" in next(iter(values)), step)
             for values, step in logged]  # fmt: skip
    assert kinds == [
        ("step", False, 1), ("epoch", True, 1), ("epoch", False, 1),
        ("validation", True, 1), ("validation", False, 1), ("validation", True, 1), ("validation", False, 1),
        ("step", False, 2), ("epoch", True, 2), ("epoch", False, 2),
        ("validation", True, 2), ("validation", False, 2),
    ]  # fmt: skip
    (shown,) = logged[1][0]["epoch/images"]
    assert np.array_equal(shown, np.array(Image.open(tmp_path / "images" / "epoch-000001.png")))


# ----------------------------------------------------------------------------------- one that fails
def make_failing(method: str, error: BaseException, calls: list[str]) -> type:
    """Make a tracker that notes its calls and raises in one of its methods."""

    class Failing(tracking.GeneralTracker):
        name = "tensorboard"
        requires_logging_directory = False
        tracker = None

        def __init__(self, run_name: str, **settings: Any) -> None:
            super().__init__()

        def note(self, called: str) -> None:
            calls.append(called)
            if called == method:
                raise error

        def start(self) -> None:
            self.note("start")

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.note("store_init_configuration")

        def log(self, values: dict[str, Any], step: int, **settings: Any) -> None:
            self.note("log")

        def log_images(self, values: dict[str, Any], step: int, **settings: Any) -> None:
            self.note("log_images")

    return Failing


def install(monkeypatch: pytest.MonkeyPatch, tracker: type) -> None:
    available = [tracking.LoggerType.TENSORBOARD]
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: available)
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", tracker)


@pytest.mark.parametrize(
    ("method", "made"),
    [
        ("start", ["start"]),
        ("store_init_configuration", ["start", "store_init_configuration"]),
        ("log", ["start", "store_init_configuration", "log"]),
        ("log_images", ["start", "store_init_configuration", "log", "log_images"]),
    ],
)
def test_a_tracker_that_fails_is_warned_of_and_left_out(method, made, tmp_path, plain, monkeypatch):
    calls: list[str] = []
    install(monkeypatch, make_failing(method, ConnectionError("the server\nis away"), calls))
    expected = r"^tensorboard failed \(ConnectionError: the server is away\) .*metrics\.jsonl"
    with pytest.warns(UserWarning, match=expected) as caught:
        train(tmp_path)
    assert len(caught) == 1
    assert calls == made
    check_whole(tmp_path, plain)


def test_an_interrupt_within_a_tracker_is_no_fault_of_the_tracker(tmp_path, monkeypatch):
    install(monkeypatch, make_failing("log", KeyboardInterrupt(), []))
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, log_with="tensorboard").train()


def test_the_error_of_a_users_hook_still_ends_the_run(tmp_path):
    def hook(batches: Any, step: int, tracker: Any) -> None:
        raise ConnectionError("mine")

    with pytest.raises(ConnectionError, match="mine"):
        make_trainer(tmp_path, hook).train()
    assert read_metrics(tmp_path) == []

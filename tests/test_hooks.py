"""Hooks: several as one, a figure that is redrawn in its place, the images with the highest rewards."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import brightness, make_config, make_pipeline, noisy_image, red_three
from IPython.core.interactiveshell import InteractiveShell
from PIL import Image

from ddpo_lessons import Highest, Hooks, LivePlot, Validation
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer
from ddpo_lessons.training.runlog import as_numbers, read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def make_trainer(folder: Path, reward: Any = brightness, **changes: Any) -> DDPOTrainer:
    return DDPOTrainer(make_config(folder, **changes), reward, red_three, make_pipeline())


@pytest.fixture
def shown(monkeypatch) -> list[tuple[str, bytes]]:
    """What a notebook displays: "new" or "update" with the PNG."""
    found: list[tuple[str, bytes]] = []

    class Place:
        def update(self, image: Any) -> None:
            found.append(("update", image.data))

    def display(image: Any, display_id: bool) -> Place:
        assert display_id
        found.append(("new", image.data))
        return Place()

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr("IPython.core.getipython.get_ipython", InteractiveShell)
    return found


def test_hooks_are_called_in_their_order(tmp_path):
    calls: list[tuple[str, int]] = []
    first, second = (lambda *batch, name=name: calls.append((name, batch[1])) for name in "ab")
    trainer = make_trainer(tmp_path, num_epochs=2)
    trainer.image_samples_hook = Hooks(first, Validation(trainer, [("", {})]), second)
    trainer.train()
    assert calls == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert len(read_metrics(tmp_path, "validation")) == 2
    with pytest.raises(TypeError, match="Hooks takes functions, not NoneType: leave it out"):
        Hooks(first, None)  # type: ignore[arg-type]


def test_the_live_plot_stays_in_one_place_and_ends_with_the_last_epoch(tmp_path, shown):
    trainer = make_trainer(tmp_path, num_epochs=5)
    trainer.image_samples_hook = LivePlot(trainer, every=2)
    assert shown == []
    trainer.train()
    assert [how for how, _ in shown] == ["new", "update", "update"]  # epochs 2, 4 and 5
    assert len({data for _, data in shown}) == 3
    assert all(data.startswith(b"\x89PNG") for _, data in shown)


def test_the_live_plot_of_a_resumed_run_has_its_old_epochs(tmp_path, shown):
    make_trainer(tmp_path, num_epochs=2).train()
    resumed = make_trainer(tmp_path, num_epochs=3, resume_from="auto")
    resumed.image_samples_hook = LivePlot(resumed)
    assert [how for how, _ in shown] == ["new"]
    resumed.train()
    assert [how for how, _ in shown] == ["new", "update"]
    before = len(shown)
    LivePlot(make_trainer(tmp_path, num_epochs=3, resume_from="auto"))  # of a run that is complete
    assert shown[before:] == [("new", shown[before - 1][1])]


def test_the_live_plot_costs_little(tmp_path, shown):
    """Of 100 epochs of 64 images with their rewards."""
    trainer = make_trainer(tmp_path, num_epochs=1)
    trainer.train()
    step, epoch = read_metrics(tmp_path)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for number in range(1, 101):
            file.write(json.dumps({**step, "epoch": number}) + "\n")
            file.write(json.dumps({**epoch, "epoch": number, "rewards": [0.123456] * 64}) + "\n")
    plot = LivePlot(trainer)
    started = time.process_time()
    plot.draw()
    assert time.process_time() - started < 1.0  # 0.2 s on an idle machine


def test_the_live_plot_asks_for_a_notebook(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(RuntimeError, match=r"needs a notebook: leave it out, and look at plot\.png"):
        LivePlot(trainer)


def test_the_highest_rewards_are_kept_with_images_and_prompts(tmp_path):
    """Rewards by hand: 1, 4, 2 and 3, so that the second and the fourth image are kept."""
    trainer = ImageDDPOTrainer(
        make_config(tmp_path, num_epochs=3, sample_batch_size=4, train_batch_size=4),
        lambda images, prompts, metadata: [1.0, 4.0, 2.0, 3.0],
        noisy_image,
        make_pipeline(),
        noise_strength=0.7,
    )
    seen: list[torch.Tensor] = []
    trainer.image_samples_hook = Hooks(
        Highest(trainer, count=2, every=2), lambda batches, *_: seen.append(batches[0][0])
    )
    trainer.train()
    names = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert names == [f"highest-00000{n}.{kind}" for n in (2, 3) for kind in ("json", "png")]
    captions = json.loads((tmp_path / "images" / "highest-000003.json").read_text())
    assert captions == ["input", "4 · ", "input", "3 · "]
    grid = Image.open(tmp_path / "images" / "highest-000003.png")
    size = grid.width // 4 if grid.width > grid.height else grid.width // 2
    middle = grid.getpixel((size + size // 2, size // 2))  # of the first result
    side = seen[2].shape[-1]
    expected = seen[2][1, :, side // 2, side // 2] * 255
    assert torch.tensor(middle).float() == pytest.approx(expected.numpy(), abs=1)
    image, captions = Highest(trainer).read()
    assert (image.size, captions[2:]) == (grid.size, ["input", "3 · "])
    make_trainer_again = make_config(tmp_path, overwrite=True)
    DDPOTrainer(make_trainer_again, brightness, red_three, make_pipeline()).train()
    with pytest.raises(ValueError, match="holds no images of Highest"):
        Highest(trainer).read()


@pytest.mark.parametrize("settings", [{"count": 0}, {"every": 0}], ids=str)
def test_nothing_to_keep_is_refused(settings, tmp_path):
    with pytest.raises(ValueError, match="give 1 or more of both"):
        Highest(make_trainer(tmp_path), **settings)


def test_records_hold_the_rewards_of_all_images_in_their_order(tmp_path):
    rewards = iter([[0.1, 2.0], [3.0, -0.5]])
    trainer = make_trainer(tmp_path, lambda *_: torch.tensor(next(rewards)), sample_num_batches_per_epoch=2)
    trainer.train()
    (record,) = read_metrics(tmp_path, "epoch")
    assert record["rewards"] == [0.1, 2.0, 3.0, -0.5]


def test_a_thousand_rewards_take_kilobytes_and_milliseconds(tmp_path):
    made = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    trainer = make_trainer(
        tmp_path, lambda *_: made, sample_batch_size=1024, train_batch_size=1024, sample_num_steps=1
    )
    trainer.log = None
    trainer._open_log()
    started = time.process_time()
    trainer.write_record("epoch", {"epoch": 1, "rewards": as_numbers(made)})
    assert time.process_time() - started < 0.1
    (record,) = read_metrics(tmp_path, "epoch")
    assert torch.equal(torch.tensor(record["rewards"]), made)  # exactly
    assert (tmp_path / "metrics.jsonl").stat().st_size < 16_000

"""The demo's task without RL: the grid, a program, and best-of-n."""

import sys

import pytest
import torch

from benchmarks.common import read_rows, where
from benchmarks.zoo import demo as zoo_demo
from benchmarks.zoo import edit, edit_credit, live
from ddpo_lessons.cli.options import Demo
from ddpo_lessons.lessons import demo
from ddpo_lessons.lessons.demo import Img2Img
from ddpo_lessons.worlds import animals, load_tiny_zoo

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_best_of_a_grid_is_the_first_of_equals():
    names = ("strength", "guidance", "steps", "eta", "all")
    texts = ("0.5 1.0 8 0.0 0.1", "0.75 3.0 8 1.0 0.4", "1.0 6.0 16 0.0 0.4")
    rows = [dict(zip(names, text.split(), strict=True)) for text in texts]
    assert edit.best_of_grid(rows, "all") == Img2Img(0.75, 3.0, 8, 1.0)


def test_the_live_runs_pass_the_best_untrained_setting_with_most_seeds():
    rows = read_rows(live.RESULT)
    for algorithm in ("DDPO", "branching"):
        own = where(rows, algorithm=algorithm, evaluations="640")
        assert sorted(int(row["seed"]) for row in own) == list(live.SEEDS)
        above = {row["seed"] for row in own if float(row["correct"]) > float(row["untrained"])}
        assert "0" in above  # as the lesson asserts
        assert len(above) >= 4
    begin = {(row["reward"], row["correct"]) for row in where(rows, evaluations="0")}
    assert len(begin) == 1  # all runs begin as the same pipeline does


def test_the_committed_grid_holds_every_setting_once_and_the_demo_has_its_best():
    rows = read_rows(edit.GRID)
    settings = {(row["strength"], row["guidance"], row["steps"], row["eta"]) for row in rows}
    assert len(rows) == len(settings) == 5 * 4 * 2 * 2
    assert edit.best_of_grid(rows, "all") == demo.UNTRAINED_BEST
    for row in rows:
        assert float(row["all"]) <= min(float(row[name]) for name in ("animal", "artist", "background"))


def test_a_picture_has_its_own_noise_and_at_low_strength_hardly_changes():
    evaluation, pipeline = demo.Evaluation(animals.draw_edits(2, demo.VALIDATION)), load_tiny_zoo()
    low, again, other, high = (
        evaluation.images(pipeline, Img2Img(strength, 1.0, 8, 0.0), seed)
        for strength, seed in ((0.125, 0), (0.125, 0), (0.125, 5), (1.0, 0))
    )
    assert torch.equal(low, again)
    assert not torch.equal(low, other)
    changes = [(made - evaluation.edits.images).abs().mean().item() for made in (low, high)]
    assert changes[0] < 0.1 < changes[1]


def test_the_program_paints_over_what_reaches_the_frame_and_keeps_the_largest_piece():
    edits = animals.draw_edits(1, 0)
    image = torch.zeros(1, 3, 64, 64)  # one color, which reaches the frame
    image[:, :, 20:40, 20:40] = 0.7  # the animal, in two colors
    image[:, :, 25:30, 25:30] = 0.2
    image[:, :, 50:53, 50:53] = 0.4  # a leftover
    made = edit.by_program(animals.Edits(image, edits.wanted))
    background = torch.tensor(animals.BACKGROUNDS[edits.wanted.descriptions[0].background])[:, None, None]
    expected = background.repeat(1, 64, 64)
    expected[:, 20:40, 20:40] = image[0, :, 20:40, 20:40]
    assert torch.equal(made[0], expected)


def test_best_of_n_keeps_what_the_reward_likes_best(monkeypatch):
    def draw(evaluation, pipeline, setting, seed):
        number = (seed - 1_000_000) // 3  # the draw's
        return torch.full((3, 3, 64, 64), number / 10)

    def likes(images, prompts, metadata):
        assert metadata[0].keys() == {"animal", "artist", "background_mask"}
        return -(images.mean((1, 2, 3)) - torch.tensor([0.0, 0.1, 0.3])).abs(), {}

    monkeypatch.setattr(demo.Evaluation, "images", draw)
    monkeypatch.setattr(edit, "make_reward", lambda: likes)
    best = edit.best_of(4, animals.draw_edits(3, 0))
    assert best.mean((1, 2, 3)).tolist() == pytest.approx([0.0, 0.1, 0.3])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_demo_that_is_stopped_gives_no_verdict(is_terminal, monkeypatch, tmp_path, capsys):
    def stop(trainer):
        trainer.stopped_by = 2  # SIGINT

    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(demo.Evaluation, "images", lambda *_: torch.zeros(2, 3, 64, 64))
    monkeypatch.setattr(demo.Trainer, "train", stop)
    assert demo.run(Demo(epochs=3, eval_images=2, output_dir=tmp_path / "demo-run")) == 130
    printed, shown = capsys.readouterr()
    assert "stopped after epoch 0 of 3" in printed
    # Twelve times all pictures, which are two here
    assert ("images:   0%|          | 0/24 " in shown) == is_terminal
    assert "after RL" not in printed
    assert not (tmp_path / "demo-run" / "lora").exists()


def test_one_network_call_is_decoded_without_any_step():
    edits, pipeline = animals.draw_edits(2, demo.VALIDATION), load_tiny_zoo()
    calls, predict = [], pipeline.unet.forward
    pipeline.unet.forward = lambda *args, **kwargs: calls.append(1) or predict(*args, **kwargs)
    images = zoo_demo.in_one_call(pipeline, edits, demo.FAST_POLICY)
    assert (len(calls), images.shape) == (1, (2, 3, 64, 64))
    assert 0.02 < (images - edits.images).abs().mean() < 0.25  # changed, and still the picture


@pytest.mark.parametrize("algorithm", demo.SCHEDULES)
def test_the_demos_schedule_is_the_one_that_was_measured(algorithm):
    rows = where(read_rows(zoo_demo.RESULT), algorithm=algorithm, images="test")
    schedule = demo.SCHEDULES[algorithm]
    assert sorted(int(row["seed"]) for row in rows) == [*zoo_demo.SEEDS[algorithm]]
    assert {int(row["done"]) for row in rows} == {schedule["num_epochs"] * schedule["sample_batch_size"]}
    assert all(float(row["all"]) <= min(float(row["animal"]), float(row["background"])) for row in rows)


def test_the_last_step_explains_the_least_of_the_reward_in_every_draw():
    rows = read_rows(edit_credit.RESULT)
    assert {row["draw"] for row in rows} == {str(draw) for draw in range(edit_credit.DRAWS)}
    for draw in range(edit_credit.DRAWS):
        found = {row["step"]: float(row["variance"]) for row in where(rows, draw=str(draw))}
        assert found["4"] == min(found.values())
        assert found["all four"] == max(found.values())


def test_a_group_that_parts_at_the_last_step_alone_differs_less(monkeypatch):
    monkeypatch.setattr(edit_credit, "IMAGES", 1)
    monkeypatch.setattr(edit_credit, "PARTS", {"all four": (0, 4), "4": (3, 4)})
    every, last = edit_credit.measure({"draw": 0})
    assert 0 < last["variance"] < every["variance"] / 2


def test_best_of_8_draws_eight_and_an_unknown_alternative_is_refused(monkeypatch):
    monkeypatch.setattr(edit, "IMAGES", 1)
    counts = []
    monkeypatch.setattr(edit, "best_of", lambda count, edits: counts.append(count) or edits.images)
    rows = edit.compare({"what": "best-of-8", "seed": 0})
    assert counts == [8, 8]  # for animals of the training and new ones
    assert [row["background"] for row in rows] == [0, 0]  # of the input images, which stand for the best
    with pytest.raises(ValueError, match="what='best of 8' is no alternative"):
        edit.compare({"what": "best of 8", "seed": 0})

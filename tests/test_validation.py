"""Validation: the same noise each time, a record and a grid, and nothing of the training changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PROMPTS, brightness, make_config, make_pipeline, noisy_image, records_of, red_three
from PIL import Image

from ddpo_lessons import Hooks, Validation
from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.rollout import SamplingSettings, sample_seed, text2img_rollout
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Trainer
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.training.sampler import NO_EPOCH
from ddpo_lessons.validation import Measured, with_error
from ddpo_lessons.worlds import load_tiny_sd3

pytestmark = pytest.mark.usefixtures("one_thread")

HELD_OUT = [(prompt, {}) for prompt in PROMPTS[:3]]


def make_trainer(folder: Path, every: int | None, **changes: Any) -> DDPOTrainer:
    trainer = DDPOTrainer(make_config(folder, **changes), brightness, red_three, make_pipeline())
    if every is not None:
        trainer.image_samples_hook = Validation(trainer, HELD_OUT, every)
    return trainer


def test_training_is_the_same_with_and_without(tmp_path):
    for name, every in (("without", None), ("with", 2)):
        make_trainer(tmp_path / name, every, num_epochs=3).train()
    found = records_of(tmp_path / "with")
    assert [r for r in found if r["kind"] != "validation"] == records_of(tmp_path / "without")
    validated = [record for record in found if record["kind"] == "validation"]
    assert [(record["epoch"], record["step"]) for record in validated] == [(0, 0), (2, 2), (3, 3)]
    names = {path.name for path in (tmp_path / "with" / "images").iterdir()}
    assert names == {f"validation-00000{n}.{kind}" for n in (0, 2, 3) for kind in ("json", "png")}


def test_a_resumed_run_validates_as_the_one_that_never_stopped(tmp_path):
    make_trainer(tmp_path / "whole", 2, num_epochs=4).train()
    make_trainer(tmp_path / "parts", 2, num_epochs=2).train()
    make_trainer(tmp_path / "parts", 2, num_epochs=4, resume_from="latest").train()
    assert records_of(tmp_path / "whole") == records_of(tmp_path / "parts")


def test_the_noise_is_the_same_each_time_and_what_differs_was_learned(tmp_path):
    trainer = make_trainer(tmp_path, None, train_learning_rate=0.05)
    validation = Validation(trainer, HELD_OUT)
    before, rewards, _ = validation.measure()
    again, *_ = validation.measure()
    assert torch.equal(before, again)
    torch.testing.assert_close(rewards, before.mean(dim=(1, 2, 3)))
    trainer.train()
    after = validation.measure()[0]
    assert not torch.equal(before, after)
    torch.testing.assert_close(validation.images(1), after[:1])
    torch.testing.assert_close(validation.images(1, trained=False), before[:1])


def test_images_stand_beside_their_results(tmp_path):
    trainer = ImageDDPOTrainer(
        make_config(tmp_path, num_epochs=1), brightness, noisy_image, make_pipeline(), noise_strength=0.7
    )
    red = torch.zeros(3, 32, 32)
    red[0] = 1
    calls: list[int] = []
    validation = Validation(trainer, [("", red, {})], every=5)
    trainer.image_samples_hook = Hooks(lambda batches, step, tracker: calls.append(step), validation)
    trainer.train()
    assert calls == [1]
    grid = Image.open(tmp_path / "images" / "validation-000000.png")
    assert grid.size == (2 * 96, 96)  # no column is empty
    assert grid.getpixel((48, 48)) == (255, 0, 0)
    assert grid.getpixel((96 + 48, 48)) != (255, 0, 0)


@pytest.mark.parametrize(
    ("samples", "every", "named"), [([], 1, "samples of the validation is empty"), (HELD_OUT, 0, "every=0")]
)
def test_nothing_to_validate_is_refused(samples, every, named, tmp_path):
    trainer = make_trainer(tmp_path, None)
    with pytest.raises(ValueError, match=named):
        Validation(trainer, samples, every)


def test_a_prompt_function_is_not_taken_for_samples(tmp_path):
    with pytest.raises(TypeError, match=r"a list of samples, not function: give ImagePrompts\(...\)\.every"):
        Validation(make_trainer(tmp_path, None), red_three)


def test_a_flow_model_is_validated_by_the_steps_that_training_samples_by(tmp_path):
    """The ODE of AWM."""
    changes = {"train_clip_range": 1e-4, "sample_guidance_scale": 1.0}
    trainer = Trainer(
        make_config(tmp_path, **changes), brightness, red_three, load_tiny_sd3(), algorithm=AWM()
    )
    images, *_ = Validation(trainer, HELD_OUT, 1).measure()
    generators = [
        torch.Generator().manual_seed(sample_seed(0, NO_EPOCH, row)) for row in range(len(HELD_OUT))
    ]
    expected, _ = text2img_rollout(
        load_tiny_sd3(),
        [prompt for prompt, _ in HELD_OUT],
        SamplingSettings(num_inference_steps=3, guidance_scale=1.0, eta=0.0),
        generator=generators,
    )
    assert torch.allclose(images, expected, atol=1e-5)


# ------------------------------------------------------------------------------------ a second evaluator
def redness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return images[:, 0].mean(dim=(1, 2))


def img2img_trainer(folder: Path, **changes: Any) -> ImageDDPOTrainer:
    settings = {"num_epochs": 4, "train_learning_rate": 0.01, **changes}
    config = make_config(folder, **settings)
    return ImageDDPOTrainer(config, brightness, noisy_image, make_pipeline(), noise_strength=0.7)


def held_out() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [("", torch.rand(3, 32, 32, generator=generator), {}) for _ in range(5)]


def test_means_with_standard_errors_by_hand():
    """Of 1, 2, 3, 6 the deviations' squares sum to 14: the error is the root of 14 / 3 / 4."""
    scores = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert with_error(scores) == "3.0 ± 1.1"  # the root of 14 / 12
    found = Measured("untrained", scores, scores / 2)
    assert " ".join(str(found).split()) == "untrained reward 3.0 ± 1.1 evaluator 1.50 ± 0.54"
    worse = Measured("fog", scores - 13, found.evaluations)
    assert str(worse).index("evaluator") == str(found).index("evaluator")
    assert len(str(worse)) == len(str(found)) <= 88
    assert with_error(torch.tensor([0.1234])) == "0.123 ± nan"
    assert with_error(torch.tensor([0.0123, 0.0123])) == "0.0123 ± 0"
    assert with_error(100 * scores) == "300 ± 108"


def test_before_and_after_stay_in_the_folder_of_a_resumed_run(tmp_path):
    def make(name: str, epochs: int) -> tuple[ImageDDPOTrainer, Validation]:
        trainer = img2img_trainer(tmp_path / name, num_epochs=epochs, resume_from="auto")
        trainer.image_samples_hook = validation = Validation(trainer, held_out(), 2, evaluator=redness)
        return trainer, validation

    trainer, validation = make("whole", 4)
    images, rewards, _ = validation.measure()
    trainer.train()
    table = validation.table()
    assert [row.name for row in table] == ["epoch 0", "epoch 2", "epoch 4"]
    assert torch.equal(table[0].rewards.float(), rewards)
    assert table[0].evaluations is not None
    torch.testing.assert_close(table[0].evaluations.float(), redness(images, (), ()))  # scored in batches
    assert not torch.equal(table[0].rewards, table[2].rewards)
    (first, *_) = read_metrics(tmp_path / "whole", "validation")
    assert first["validation_evaluation"] == pytest.approx(redness(images, (), ()).mean().item())
    make("parts", 3)[0].train()
    trainer, validation = make("parts", 4)
    trainer.train()
    again = make("parts", 4)[1]  # of a run that is complete
    assert [row.name for row in again.table()] == ["epoch 0", "epoch 2", "epoch 3", "epoch 4"]
    assert [str(again.table()[row]) for row in (0, 1, 3)] == list(map(str, table))


def test_the_untrained_policy_is_measured_by_strength_and_best_of_n(tmp_path):
    trainer = img2img_trainer(tmp_path)
    validation = Validation(trainer, held_out(), evaluator=redness)
    _, rewards, _ = validation.measure()
    (own,) = validation.untrained()
    assert torch.equal(own.rewards, rewards)
    weak, strong, same = validation.untrained(0.4, 1.0, 0.7)
    assert [row.name for row in (weak, strong)] == ["untrained, strength 0.4", "untrained, strength 1"]
    assert torch.equal(same.rewards, rewards)
    assert not torch.equal(weak.rewards, strong.rewards)
    one, two = (validation._draw(validation.sampler, validation.contexts, n) for n in (0, 1))
    (best,) = validation.untrained(best_of=2)
    assert best.name == "untrained, best-of-2"
    assert torch.equal(best.rewards, one[1].maximum(two[1]))
    assert one[2] is not None
    assert two[2] is not None
    assert torch.equal(best.evaluations, torch.where(one[1] >= two[1], one[2], two[2]))
    assert 0 < (one[1] >= two[1]).sum() < 5  # each is the better one for some
    trainer.train()
    (after,) = validation.untrained()
    torch.testing.assert_close(after.rewards, rewards)
    assert not torch.allclose(validation.measure()[1], rewards, atol=1e-4)


def test_a_restart_reads_the_untrained_results_if_they_still_hold(tmp_path, monkeypatch):
    """One batch of each line is generated again, and shows that reward, evaluator and model are the same."""
    drawn: list[int] = []
    draw = Validation._batches

    def counted(self: Validation, sampler: Any, contexts: Any, number: int = 0) -> Any:
        drawn.append(len(contexts))
        return draw(self, sampler, contexts, number)

    def measure(reward: Any = brightness, evaluator: Any = redness, **changes: Any) -> Any:
        samples, strength = changes.pop("samples", held_out()), changes.pop("strength", 0.7)
        config = make_config(tmp_path, sample_batch_size=2, resume_from="auto", **changes)
        trainer = ImageDDPOTrainer(config, reward, noisy_image, make_pipeline(), noise_strength=strength)
        validation = Validation(trainer, samples, evaluator=evaluator)
        drawn.clear()
        return validation.untrained(0.4), validation.untrained(best_of=2), [*drawn]

    def darkness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return 1 - brightness(images, prompts, metadata)

    monkeypatch.setattr(Validation, "_batches", counted)
    *first, whole = measure()
    assert whole == [5, 5, 5]
    *again, few = measure()
    assert few == [2, 2]
    assert [list(map(str, lines)) for lines in again] == [list(map(str, lines)) for lines in first]
    last_differs = [*held_out()[:4], ("", torch.zeros(3, 32, 32), {})]
    for changes in ({"reward": darkness}, {"evaluator": darkness}, {"evaluator": None}):
        assert measure(**changes)[2] == [2, 5, 2, 5, 5], changes
        assert measure(**changes)[2] == [2, 2]
    for changes in (
        {"seed": 1}, {"sample_num_steps": 5}, {"samples": last_differs}, {"samples": held_out()[:3]}
    ):  # fmt: skip
        count = len(changes.get("samples", held_out()))
        assert measure(**changes)[2] == [count] * 3, changes
        assert measure(**changes)[2] == [2, 2]
    measure()
    assert measure(strength=0.5)[2] == [2, 5, 5]  # the first line has a strength of its own
    (kept,) = tmp_path.rglob("untrained.json")
    for damaged in ('{"untrained', "[]", '{"untrained": 1}'):
        kept.write_text(damaged)
        with pytest.raises(ValueError, match=r"untrained\.json is damaged: delete it"):
            measure()


def test_strengths_are_for_runs_that_start_from_images(tmp_path):
    validation = Validation(make_trainer(tmp_path, None), HELD_OUT)
    with pytest.raises(ValueError, match="start from images: leave them out"):
        validation.untrained(0.5)

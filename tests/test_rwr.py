"""Reward-weighted regression: weights by hand, and a loss that an independent calculation gives too."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import helpers
import pytest
import torch
from helpers import NOT_CLIPPED, brightness, make_pipeline, noisy_image, red_three

from ddpo_lessons.algorithms.algorithm import Samples
from ddpo_lessons.algorithms.rwr import RWR, rwr_weights, sparse_rwr_weights
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.rollout import Trajectory
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")
make_config = functools.partial(helpers.make_config, **NOT_CLIPPED)


def test_soft_weights_by_hand():
    """The rewards 0 and 1 have a standard deviation of 1/2; at temperature 2 the logits are 0 and 1."""
    expected = torch.tensor([2 / (1 + math.e), 2 * math.e / (1 + math.e)])
    torch.testing.assert_close(rwr_weights(torch.tensor([0, 1]), temperature=2.0), expected)


def test_soft_weights_do_not_depend_on_the_scale_of_rewards_and_are_one_where_all_are_equal():
    rewards = torch.tensor([1.0, 2.0, 4.0])
    torch.testing.assert_close(rwr_weights(rewards, 0.5), rwr_weights(100 * rewards - 7, 0.5))
    assert rwr_weights(torch.full((3,), 5.0), 0.2).tolist() == [1, 1, 1]


def test_sparse_weights_by_hand():
    rewards = torch.tensor([3.0, 9.0, 1.0, 7.0, 5.0])
    assert sparse_rwr_weights(rewards, 0.4).tolist() == [0, 2.5, 0, 2.5, 0]
    assert sparse_rwr_weights(rewards, 0.01).tolist() == [0, 5, 0, 0, 0]


def first_step(folder, **changes) -> tuple[dict[str, float], torch.Tensor]:
    """One epoch of sparse RWR in one optimizer step: its record and the weights after it."""
    settings = {"sample_num_batches_per_epoch": 2, "train_batch_size": 4, **changes}
    trainer = Trainer(
        make_config(folder, **settings), brightness, red_three, make_pipeline(),
        algorithm=RWR(top_fraction=0.25),
    )  # fmt: skip
    trainer.step(0)
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.learner.trainable.values()])
    return read_metrics(folder, "step")[0], weights


def test_grouping_changes_nothing(tmp_path):
    """Timesteps and noise belong to the pair, not to the forward pass; a group weighs by its pairs."""
    one, weights_one = first_step(tmp_path / "one", sample_num_steps=2, train_micro_batch_size=8)
    for size in (3, 1):  # eight pairs in groups of 3, 3 and 2, and each by itself
        many, weights_many = first_step(tmp_path / str(size), sample_num_steps=2, train_micro_batch_size=size)
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        torch.testing.assert_close(weights_many, weights_one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strength", [0.7, 1.0])
def test_timesteps_are_drawn_up_to_the_first_that_sampling_visits(tmp_path, strength):
    trainer = Trainer(
        make_config(tmp_path, sample_num_steps=10), brightness, noisy_image, make_pipeline(),
        algorithm=RWR(), start=FromImages(strength),
    )  # fmt: skip
    trajectory = trainer.sampler.sample(0, trainer.contexts.draw(0))[1]
    samples = Samples(0, 0, 0, torch.arange(4000), trajectory, torch.zeros(4000), score=None)
    pairs = {"rows": torch.arange(4000), "columns": torch.zeros(4000, dtype=torch.long)}
    # 4,000 draws of at most 1,000 miss an end in two cases of a hundred; these do not.
    timesteps = trainer.algorithm.denoising_examples(samples, pairs, step=0)["timesteps"]
    assert (timesteps.min(), timesteps.max()) == (0, trajectory.schedule.timesteps[0])


def test_record_names_the_denoising_error_and_no_ratio(tmp_path):
    record, _ = first_step(tmp_path)
    assert record["denoising_error"] > 0
    assert not {"max_ratio_error", "first_replay_max_ratio_error", "clip_fraction"} & set(record)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_loss_is_the_weighted_error_of_a_denoiser(tmp_path, prediction_type):
    """The network is replaced by one that predicts zeros, so the error is the target's mean square."""
    pipeline = make_pipeline(prediction_type=prediction_type)
    config = make_config(tmp_path, sample_num_batches_per_epoch=2, train_batch_size=4)
    trainer = Trainer(config, brightness, red_three, pipeline, algorithm=RWR())
    trajectory = Trajectory(
        latents=torch.zeros(2, 2, 4, 8, 8),
        timesteps=torch.zeros(2, 1, dtype=torch.long),
        log_probs=torch.zeros(2, 1),
        conditioning={"prompt_embeds": torch.zeros(2, 1, 1)},
        guidance_scale=1.0,
        schedule=trainer.start.schedule(trainer.family, config),
        final_latents=torch.full((2, 4, 8, 8), 3.0),
    )
    samples = Samples(0, 0, 0, torch.tensor([0, 1]), trajectory, torch.tensor([0.0, 2.0]), score=None)
    pairs = {"rows": torch.tensor([0, 1]), "columns": torch.tensor([0, 0])}
    examples = trainer.algorithm.denoising_examples(samples, pairs, step=0)
    timesteps, noise = examples["timesteps"], examples["noise"]
    trainer.family.predict = lambda unet, latents, *_, **__: torch.zeros_like(latents)
    loss, _ = trainer.algorithm.loss(samples, None, None, {**pairs, **examples})
    alpha_bar = pipeline.scheduler.alphas_cumprod[timesteps[1]]
    target = {
        "epsilon": noise[1],
        "v_prediction": alpha_bar.sqrt() * noise[1] - (1 - alpha_bar).sqrt() * 3,
        "sample": torch.full((4, 8, 8), 3.0),
    }[prediction_type]
    assert loss.item() == pytest.approx(target.square().mean().item(), rel=1e-5)  # (0 + 2 e) / 2


def test_another_temperature_is_another_run(tmp_path):
    config = make_config(tmp_path)
    Trainer(config, brightness, red_three, make_pipeline(), algorithm=RWR(temperature=0.5)).train()
    resumed = make_config(tmp_path, resume_from="latest")
    with pytest.raises(ValueError, match="temperature"):
        Trainer(resumed, brightness, red_three, make_pipeline(), algorithm=RWR(temperature=0.4))


def test_a_sample_has_its_noise_in_whatever_process_it_is(tmp_path):
    trainer = Trainer(make_config(tmp_path), brightness, red_three, make_pipeline(), algorithm=RWR())
    schedule = trainer.start.schedule(trainer.family, trainer.config)
    trajectory: Any = SimpleNamespace(final_latents=torch.zeros(2, 4, 8, 8), schedule=schedule)
    columns = torch.tensor([0, 1])

    def examples(numbers: torch.Tensor, rows: list[int]) -> Any:
        samples = Samples(0, 0, 0, numbers, trajectory, torch.zeros(2), score=None)
        pairs = {"rows": torch.tensor(rows), "columns": columns}
        return trainer.algorithm.denoising_examples(samples, pairs, step=3)

    one = examples(torch.arange(6), rows=[4, 5])
    again = examples(torch.tensor([4, 5]), rows=[0, 1])  # of the second of two processes
    assert all(torch.equal(one[name], again[name]) for name in ("timesteps", "noise"))

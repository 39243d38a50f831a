"""Credit for each action: trees of rollouts, their advantages, and what they share."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from helpers import SCHEDULE, brightness, check_resume, make_config, make_pipeline, make_sd3_pipeline

from ddpo_lessons.advantages import normalize_groups
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.branching import Branching, branch_advantages
from ddpo_lessons.algorithms.ddpo import replay, share_predictions
from ddpo_lessons.ddim import DDIMSchedule
from ddpo_lessons.models import family_of
from ddpo_lessons.named_prompts import digit_world_prompts
from ddpo_lessons.rollout import sample_trajectory
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def ddim_schedule(steps: int, **scheduler: Any) -> DDIMSchedule:
    made = DDIMScheduler(**{**SCHEDULE, **scheduler})
    made.set_timesteps(steps)
    return DDIMSchedule(made, made.timesteps, 1.0, "cpu")


# ---------------------------------------------------------------------------------------- advantages
def test_advantages_of_a_tree_by_hand():
    # Two trees of four leaves: root (4) -> nodes 2 and 6 -> leaves; the second tree is flat but for a leaf.
    rewards = torch.tensor([1.0, 3.0, 6.0, 6.0, 0.0, 0.0, 0.0, 4.0])
    first = torch.tensor([-2.0, -2.0, 2.0, 2.0, -1.0, -1.0, 1.0, 1.0])
    second = torch.tensor([-1.0, 1.0, 0.0, 0.0, 0.0, 0.0, -2.0, 2.0])
    expected = torch.stack([first / 2.5**0.5, second / 1.25**0.5], dim=1)
    assert torch.allclose(branch_advantages(rewards, 2, 2), expected)


def test_a_window_of_one_step_has_the_advantages_of_groups():
    rewards = torch.rand(24, generator=torch.Generator().manual_seed(0))
    found = branch_advantages(rewards, 8, 1)[:, 0]
    assert torch.allclose(found, normalize_groups(rewards, 8), atol=1e-6)


def test_values_along_a_path_add_up_to_the_leaf():
    rewards = torch.rand(27, generator=torch.Generator().manual_seed(1)).double()
    values = [rewards.view(-1, 3**k).mean(1).repeat_interleave(3**k) for k in (3, 2, 1, 0)]
    stds = [(after - before).std(correction=0) for before, after in itertools.pairwise(values)]
    added = (branch_advantages(rewards, 3, 3).double() * torch.stack(stds)).sum(1)
    assert torch.allclose(added, rewards - rewards.mean(), atol=1e-6)


# --------------------------------------------------------------------------------------------- steps
def test_all_noise_but_that_of_actions_is_common_to_a_group():
    """Two rollouts whose generators agree nowhere, with the same action, would be one rollout."""
    family, trajectory = rollout((1, 2), 4, 4)
    schedule, finals = trajectory.schedule, trajectory.final_latents
    assert trajectory.timesteps.shape == (8, 1)
    # From each action on: plain steps with the noise of the group's first member.
    conditioning = family.condition(["a red three"] * 8, "", 1.0, None)
    generators = [torch.Generator().manual_seed(number) for number in range(8)]
    noise = torch.stack([torch.randn(5, *finals.shape[1:], generator=g) for g in generators], dim=1)
    latents = trajectory.latents[:, 1]
    for k in range(2, 5):
        timesteps = schedule.timesteps[k].expand(8)
        with torch.no_grad():
            output = family.predict(family.denoiser, latents, timesteps, conditioning, 1.0)
        common = noise[k][[0, 0, 0, 0, 4, 4, 4, 4]]
        latents = schedule.step(output, timesteps, latents, noise=common).prev_sample
    torch.testing.assert_close(latents, finals, rtol=1e-4, atol=1e-4)


MODELS: dict[str, Callable[[], Any]] = {
    "diffusion": lambda: make_pipeline(set_alpha_to_one=True),  # the last step has no noise
    "flow": make_sd3_pipeline,
}
every_model = pytest.mark.parametrize("model", MODELS)


def rollout(window: tuple[int, int], branches: int, group_size: int, model: str = "diffusion") -> Any:
    family = family_of(MODELS[model]())
    schedule = family.schedule(5, eta=1.0).with_actions(*window)
    count = 2 * group_size
    first = torch.randn(2, *family.latents_shape(), generator=torch.Generator().manual_seed(3))
    latents = first.repeat_interleave(group_size, dim=0)
    conditioning = family.condition(["a red three"] * count, "", 1.0, None)
    generators = [torch.Generator().manual_seed(number) for number in range(count)]
    return family, sample_trajectory(
        family, latents, schedule, conditioning, 1.0, generators, "mean", group_size, branches
    )


def test_a_group_is_a_tree():
    _, trajectory = rollout((1, 3), 2, 4)
    assert trajectory.timesteps.shape == (8, 2)
    for depth, alike in enumerate((4, 2, 1)):  # so many side by side are in one state, and no more
        states = trajectory.latents[:, depth].flatten(1)
        same = (states[:, None] == states[None]).all(2)
        blocks = torch.block_diag(*[torch.ones(alike, alike)] * (8 // alike)).bool()
        assert torch.equal(same, blocks)
    assert len(trajectory.final_latents.flatten(1).unique(dim=0)) == 8


@every_model
def test_replayed_with_shared_predictions_the_ratio_is_one(model):
    family, trajectory = rollout((1, 3), 2, 4, model)
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(2), indexing="ij")
    pairs = {"rows": rows.flatten(), "columns": columns.flatten()}
    shared = share_predictions(pairs, trajectory.group_size, trajectory.branches)
    assert len(shared["distinct"]) == 2 + 4  # two roots and their four children
    with torch.no_grad():
        new = replay(family, family.denoiser, trajectory, shared, "mean").log_prob
    assert torch.allclose(new, trajectory.log_probs[pairs["rows"], pairs["columns"]], atol=1e-5)


# ---------------------------------------------------------------------------------------------- runs
@every_model
def test_with_one_action_it_is_ddpo_in_groups_to_the_bit(tmp_path, model):
    """Two steps, the last without noise: DDPO's groups are the trees that part at the first step."""
    shape = {"sample_num_steps": 2, "sample_batch_size": 4, "train_batch_size": 4, "sample_group_size": 4}
    weights = []
    for name in ("ddpo", "branching"):
        task = make_config(tmp_path / name, num_epochs=2, **shape), brightness, digit_world_prompts(0)
        trainer = Trainer(*task, MODELS[model](), algorithm=make_algorithm(name))
        before = [weight.detach().clone() for weight in trainer.learner.trainable.values()]
        trainer.train()
        weights.append(list(trainer.learner.trainable.values()))
        assert not all(map(torch.equal, before, weights[-1]))
    assert all(map(torch.equal, *weights))


@every_model
def test_it_trains_on_trees_and_resumes_to_the_bit(tmp_path, model):
    shape = {"sample_num_steps": 4, "sample_batch_size": 4, "train_batch_size": 4, "sample_group_size": 4}

    def make(folder: Path, **changes: Any) -> Trainer:
        parts = (make_config(folder, **shape, **changes), brightness, digit_world_prompts(0))
        return Trainer(*parts, MODELS[model](), algorithm=make_algorithm("branching:window=2"))

    whole = check_resume(make, tmp_path, epochs=3)
    errors = [record["first_replay_max_ratio_error"] for record in read_metrics(whole, "step")]
    assert len(errors) == 3
    assert max(errors) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_group_size": 1}, "sample_group_size=1 must be .*: set sample_group_size to 4 or 9"),
        ({"sample_group_size": 6, "sample_batch_size": 6, "train_batch_size": 6}, "b\\^2"),
        ({"sample_group_size": 4, "sample_batch_size": 2, "train_batch_size": 2}, "whole groups"),
    ],
)
def test_groups_that_are_no_trees_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_algorithm("branching:window=2").check(make_config(tmp_path, **changes))


def test_the_window_visits_every_step_with_noise():
    algorithm, schedule = make_algorithm("branching"), ddim_schedule(5, set_alpha_to_one=True)
    config = make_config("unused")
    seen = {algorithm.sampling_schedule(schedule, config, epoch).actions for epoch in range(40)}
    assert seen == {(0, 1), (1, 2), (2, 3), (3, 4)}
    assert schedule.actions is None


def test_each_action_of_a_sample_has_its_own_advantage():
    samples: Any = SimpleNamespace(advantages=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    pairs = {"rows": torch.tensor([1, 0, 1]), "columns": torch.tensor([0, 1, 1])}
    assert Branching(window=2).weights(samples, pairs).tolist() == [3.0, 2.0, 4.0]

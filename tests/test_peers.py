"""Our functions beside numbers recorded from TRL 0.21 and imageddpo (golden/peers.json).

docs/peers.md lists the peers' defects; the test of a defect shows what the peer gave and what we give. The
other tests cover what the peers get right, where we must agree.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from helpers import ddim_step

from ddpo_lessons.advantages import PerPromptStatTracker, normalize
from ddpo_lessons.batching import EpochPlan
from ddpo_lessons.ddim import DDIMStep
from ddpo_lessons.ppo import clipped_surrogate
from tests.peer_inputs import (
    DDIMCase,
    fifty_steps,
    make_tiny_folder,
    moved_output,
    steps_of_size,
    tiny_noise_pred,
)

PEERS: dict[str, Any] = json.loads((Path(__file__).parent / "golden/peers.json").read_text("utf-8"))
CLIP_RANGE = 1e-4  # the peers' default


def case_of(row: dict[str, Any]) -> DDIMCase:
    case = row["case"]
    return DDIMCase(**{**case, "timesteps": tuple(case["timesteps"]), "shape": tuple(case["shape"])})


def replay(case: DDIMCase, prev_sample: torch.Tensor, **arguments: Any) -> DDIMStep:
    model_output, timesteps, sample, _ = case.tensors()
    return ddim_step(
        case.make_scheduler(),
        arguments.pop("model_output", model_output),
        timesteps,
        sample,
        eta=case.eta,
        prev_sample=prev_sample,
        **arguments,
    )


def draw(case: DDIMCase) -> DDIMStep:
    """Take the step whose noise is the case's, not a generator's."""
    _, _, sample, noise = case.tensors()
    step = replay(case, sample)  # for mean and std only
    return replay(case, step.mean + step.std.view(-1, 1, 1, 1) * noise)


def close(actual: torch.Tensor, recorded: Any, **tolerances: float) -> None:
    torch.testing.assert_close(
        actual.float(), torch.tensor(recorded).float(), **({"rtol": 1e-6, "atol": 1e-6} | tolerances)
    )


def test_the_page_of_defects_names_every_recording_and_tests_that_exist():
    tests = Path(__file__).parent
    page = (tests.parent / "docs/peers.md").read_text("utf-8")
    held = re.findall(r"`(test_\w+\.py)`(?:: `(\w+)`)?", page)
    assert len(held) > 20
    for file, name in held:
        assert f"def test_{name}" in (tests / file).read_text("utf-8"), (file, name)
    right = {"tiny_model", "ddim_steps", "surrogate", "global_advantages", "tracker", "batching"}
    assert set(re.findall(r"\(`([a-z0-9_]+)`\)", page)) == PEERS.keys() - right - {"made_with"}


def test_the_tiny_folder_is_the_peers_model(tmp_path):
    pipeline = StableDiffusionPipeline.from_pretrained(make_tiny_folder(tmp_path / "tiny"))
    close(tiny_noise_pred(pipeline), PEERS["tiny_model"]["noise_pred"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "row", PEERS["ddim_steps"], ids=lambda row: f"{row['case']['scheduler']}-{row['case']['eta']}"
)
def test_ddim_step_gives_trls_outcome_and_log_prob(row):
    step = draw(case_of(row))
    close(step.prev_sample, row["prev_sample"])
    close(step.log_prob, row["log_prob"])


@pytest.mark.parametrize("row", PEERS["surrogate"], ids=lambda row: f"clip={row['clip_range']}")
def test_clipped_surrogate_gives_trls_loss_and_statistics(row):
    tensors = (torch.tensor(row[key]) for key in ("log_prob", "old_log_prob", "advantages"))
    loss, stats = clipped_surrogate(*tensors, clip_range=row["clip_range"])
    close(loss, row["loss"])
    close(stats.approx_kl, row["approx_kl"], rtol=1e-5, atol=0)
    close(stats.clip_fraction, row["clip_fraction"])


def test_normalize_gives_the_advantages_that_trl_trains_on():
    row = PEERS["global_advantages"]
    close(normalize(row["rewards"]).sort().values, row["sorted_advantages"])


def test_tracker_gives_trls_advantages_below_and_above_min_count():
    row = PEERS["tracker"]
    tracker = PerPromptStatTracker(row["buffer_size"], row["min_count"])
    for update in row["updates"]:
        # TRL keeps float32, we keep float64: hence the tolerance
        close(tracker.update(update["keys"], update["rewards"]), update["advantages"], atol=5e-6)


@pytest.mark.parametrize("row", PEERS["batching"])
def test_epoch_plan_counts_what_trl_runs(row):
    plan = EpochPlan(
        sample_batch_size=row["sample_batch_size"],
        num_batches_per_epoch=row["sample_num_batches_per_epoch"],
        train_batch_size=row["train_batch_size"],
        gradient_accumulation_steps=row["train_gradient_accumulation_steps"],
        num_inner_epochs=row["train_num_inner_epochs"],
        num_timesteps=row["num_timesteps"],
    )
    assert plan.optimizer_steps == row["optimizer_steps"]
    assert plan.total_pairs == row["forward_passes"]


def test_last_step_uses_final_alpha_cumprod():
    clamped, final = PEERS["last_step_ignores_final_alpha"]  # set_alpha_to_one False, then True
    close(draw(case_of(clamped)).prev_sample, clamped["scheduler_prev_sample"])
    close(torch.tensor(clamped["prev_sample"]), clamped["scheduler_prev_sample"])

    model_output, timesteps, sample, _ = case_of(final).tensors()
    scheduler = case_of(final).make_scheduler()
    step = ddim_step(scheduler, model_output, timesteps, sample)
    close(step.prev_sample, final["scheduler_prev_sample"])
    # TRL: the same step whatever set_alpha_to_one says, noise and all
    assert final["prev_sample"] == clamped["prev_sample"]
    trl_error = step.prev_sample - torch.tensor(final["prev_sample"])
    assert trl_error.abs().max() > 0.01


def test_a_step_without_density_gives_no_nan():
    row = PEERS["last_step_without_noise_is_nan"]["step"]
    assert row["log_prob"][-1] is None  # imageddpo: NaN on the last step, t = 1
    case = case_of(row)
    model_output, timesteps, sample, noise = case.tensors()
    scheduler = case.make_scheduler()

    sampled = ddim_step(scheduler, model_output, timesteps, sample)
    assert sampled.log_prob.isfinite().all()
    assert sampled.log_prob[-1] == 0
    assert sampled.std[-1] == 0
    assert replay(case, noise).log_prob[-1] == 0

    noisy = slice(0, -1)  # the steps that a trainer keeps
    kept = ddim_step(
        scheduler, model_output[noisy], timesteps[noisy], sample[noisy], prev_sample=noise[noisy]
    )
    close(kept.log_prob, row["log_prob"][noisy])


def test_eta_zero_is_an_error_and_not_a_nan():
    recorded = PEERS["eta_zero_is_trained"]
    assert recorded["trl"]["losses_nan"] > 0
    assert not recorded["trl"]["weights_finite"]
    assert "does not require grad" in recorded["imageddpo"]["error"]["message"]
    model_output, timesteps, sample, _ = DDIMCase(seed=0).tensors()
    with pytest.raises(ValueError, match="eta=0"):
        ddim_step(DDIMCase(seed=0).make_scheduler(), model_output, timesteps, sample, eta=0.0)


def test_integer_rewards_keep_their_fractions():
    recorded = PEERS["integer_rewards_cut_advantages"]
    row = recorded["tracker"]
    rewards = np.array(row["rewards"])
    advantages = PerPromptStatTracker(16, 16).update(["a"] * len(rewards), rewards)
    close(advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-6))
    assert advantages.int().tolist() == row["advantages"]  # TRL: the same, cut to integers
    assert row["advantages"].count(0) == 5
    assert (advantages != 0).all()
    close(normalize(rewards), (rewards - rewards.mean()) / rewards.std())
    assert recorded["run"]["sorted_advantages"] == [0, 0, 0, 1]  # what TRL trains on


def test_float32_latents_replay_exactly_where_bfloat16_leaves_the_clip_range():
    row = PEERS["bf16_latents_leave_the_clip_range"]["step"]
    case = fifty_steps()
    model_output, timesteps, sample, noise = case.tensors()
    steps = {"model_output": model_output.bfloat16(), "sample": sample.bfloat16()}
    scheduler = case.make_scheduler()

    def score(prev_sample: torch.Tensor) -> DDIMStep:
        return ddim_step(scheduler, timestep=timesteps, prev_sample=prev_sample, **steps)

    moments = score(steps["sample"])
    outcome = moments.mean + moments.std.view(-1, 1, 1, 1) * noise
    drawn = score(outcome)
    assert drawn.prev_sample.dtype == torch.float32
    assert torch.equal(score(drawn.prev_sample).log_prob, drawn.log_prob)

    # What TRL stores is rounded; its error comes back when we round too.
    rounded = score(outcome.bfloat16())
    error = (torch.exp(rounded.log_prob - drawn.log_prob) - 1).abs()
    close(error, row["ratio_errors"], rtol=1e-3, atol=2e-6)
    assert row["steps_outside_clip_range"] == 4  # of 50, before any update
    assert error.max() > 10 * CLIP_RANGE


def test_clip_fraction_and_kl_of_the_mean_shrink_with_the_latent():
    for row in PEERS["clip_range_depends_on_latent_size"]:
        case = steps_of_size(row["latent_size"])
        outcome = draw(case).prev_sample
        log_ratio, log_ratio_sum = (
            replay(case, outcome, reduction=reduction, model_output=moved_output(case)).log_prob
            - replay(case, outcome, reduction=reduction).log_prob
            for reduction in ("mean", "sum")
        )
        close(log_ratio, row["log_ratio"], atol=2e-6)
        dimensions = 4 * row["latent_size"] ** 2
        close(log_ratio_sum / dimensions, row["log_ratio"], atol=2e-6)
        stats = clipped_surrogate(
            log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio), CLIP_RANGE
        )[1]
        close(stats.approx_kl, row["approx_kl"], rtol=0.2, atol=0)
        close(stats.clip_fraction, row["clip_fraction"])
    small, medium, large = PEERS["clip_range_depends_on_latent_size"]  # 16 times as many dimensions each
    assert small["approx_kl"] > 10 * medium["approx_kl"] > 100 * large["approx_kl"]
    assert small["clip_fraction"] > 0.5
    assert large["clip_fraction"] == 0


def test_bias_of_a_stale_mean_is_shown():
    row = PEERS["stale_mean_biases_advantages"]
    tracker = PerPromptStatTracker(row["buffer_size"], row["min_count"])
    biases = []
    for update in row["updates"]:
        keys = ["a"] * len(update["rewards"])
        advantages = tracker.update(keys, update["rewards"])
        close(advantages, update["advantages"], atol=5e-6)
        biases.append(advantages.mean().item())
    assert biases[:3] == pytest.approx([0, 0, 0], abs=1e-6)  # below min_count: the batch's mean
    assert biases[3:] == pytest.approx([1.27] * 9, abs=0.11)


def test_a_buffer_below_min_count_is_refused():
    small = PEERS["stale_mean_biases_advantages"]["small"]
    # TRL: the better prompt's samples all look good, the other's bad, though each has 24 rewards
    assert small["mean_advantage_by_prompt"] == pytest.approx([-0.98, 0.98], abs=0.01)
    with pytest.raises(ValueError, match=r"buffer_size=8 .* min_count=16"):
        PerPromptStatTracker(small["buffer_size"], small["min_count"])

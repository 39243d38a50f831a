"""Lesson 06: reward-weighted regression (RWR), the method that DDPO is measured against.

RWR treats the reward as a weight: it samples, and then trains on its own samples with the ordinary
denoising loss, the better ones more (Peters and Schaal 2007; for diffusion models Lee et al. 2023, arXiv
2302.12192, and Black et al. 2023, arXiv 2305.13301, section 4.2). It never looks at the denoising steps that
were taken.
"""

from __future__ import annotations

from typing import Any

import torch

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import PromptFunction, RewardFunction
from ddpo_lessons.rollout import Trajectory, predict, sample_seed
from ddpo_lessons.trainer import DDPOTrainer, ImageSamplesHook


def rwr_weights(rewards: torch.Tensor, temperature: float) -> torch.Tensor:
    """Weights of RWR: ``w = N softmax(r / (temperature std(r)))``, so that their mean is 1.

    Source: Black et al. 2023, section 4.2, w_RWR, with rewards in standard deviations so that one temperature
    serves every reward.

    Args:
        rewards: (N,).
        temperature: small values train on the best samples only, large ones on all alike.

    Returns:
        (N,) float32.

    Raises:
        ValueError: if the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; 1 is a usual value")
    rewards = rewards.float()
    std = rewards.std(correction=0).clamp(min=1e-8)
    return len(rewards) * (rewards / (temperature * std)).softmax(dim=0)


def sparse_rwr_weights(rewards: torch.Tensor, top_share: float) -> torch.Tensor:
    """Weights of sparse RWR: 1 / top_share for the best samples, 0 for the others; their mean is 1.

    Source: Black et al. 2023, section 4.2, w_sparse, with the threshold put at a quantile of the epoch.

    Args:
        rewards: (N,).
        top_share: share of the samples that is trained on, in (0, 1]; at least one sample is.

    Returns:
        (N,) float32.

    Raises:
        ValueError: if top_share is outside (0, 1].
    """
    if not 0 < top_share <= 1:
        raise ValueError(f"top_share={top_share} must lie in (0, 1]")
    count = max(1, round(top_share * len(rewards)))
    weights = torch.zeros(len(rewards))
    weights[rewards.float().topk(count).indices.cpu()] = len(rewards) / count
    return weights


class RWRTrainer(DDPOTrainer):
    """Reward-weighted regression on the same rollouts, prompts, rewards and settings as DDPO.

    Every (sample, timestep) pair of DDPO becomes one denoising example here, at a random timestep of the
    whole schedule, so that both methods train on equally many. Guidance samples, as in DDPO, and is not
    trained, as in ordinary fine-tuning. Clip range and advantages are not used; samples of a group share
    their start, as in DDPO.

    Args:
        config: the settings.
        reward_function: as in `DDPOTrainer`.
        prompt_function: as in `DDPOTrainer`.
        sd_pipeline: as in `DDPOTrainer`.
        image_samples_hook: as in `DDPOTrainer`.
        temperature: of `rwr_weights`; not used with top_share.
        top_share: of `sparse_rwr_weights`, or None for RWR's soft weights.

    Raises:
        ValueError: as in `DDPOTrainer`, if temperature or top_share does not fit, or if the config asks for a
            KL penalty or per-prompt statistics, which are DDPO's.
    """

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: Any,
        image_samples_hook: ImageSamplesHook | None = None,
        temperature: float = 0.2,
        top_share: float | None = None,
    ) -> None:
        """Check the weights' settings, then everything else."""
        self.temperature, self.top_share = temperature, top_share
        self._weights(torch.zeros(1))  # refuses wrong settings before anything is loaded
        for name in ("train_kl_coefficient", "per_prompt_stat_tracking"):
            if getattr(config, name):
                raise ValueError(f"RWRTrainer does not use {name}={getattr(config, name)}: leave it out")
        super().__init__(config, reward_function, prompt_function, sd_pipeline, image_samples_hook)

    def _weights(self, rewards: torch.Tensor) -> torch.Tensor:
        if self.top_share is not None:
            return sparse_rwr_weights(rewards, self.top_share)
        return rwr_weights(rewards, self.temperature)

    def _advantages(self, rewards: torch.Tensor, keys: list[Any]) -> torch.Tensor:
        """Return the weight of each sample (N,) where DDPO has its advantage."""
        return self._weights(rewards)

    def _denoising_examples(
        self, clean: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw timestep (N,) and noise (N, C, h, w) of each pair from its own seed, whatever the grouping."""
        steps = self.pipeline.scheduler.config.num_train_timesteps
        samples = self._own_rows().flatten()[rows]  # by number in the epoch: processes change nothing
        place = (self.config.seed, 3, self.global_step, 0)
        seeds = [sample_seed(*place, *pair) for pair in zip(samples.tolist(), columns.tolist(), strict=True)]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        timesteps = torch.cat([torch.randint(0, steps, (1,), generator=g) for g in generators])
        noise = torch.stack([torch.randn(clean.shape[1:], generator=g) for g in generators])
        return timesteps.to(clean.device), noise.to(clean.device)

    def _loss(
        self,
        trajectory: Trajectory,
        advantages: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted denoising loss of some pairs: mean of w (target - prediction)^2."""
        clean = trajectory.final_latents[rows]  # (N, C, h, w)
        timesteps, noise = self._denoising_examples(clean, rows, columns)
        noisy = self.pipeline.scheduler.add_noise(clean, noise, timesteps)
        with self.accelerator.autocast():
            embeds = trajectory.prompt_embeds[rows]
            output = predict(self.unet, noisy, timesteps, embeds, None, guidance_scale=1.0)
        error = (output - self._target(clean, noise, timesteps)).square().flatten(1).mean(1)  # (N,)
        weights = advantages[rows].to(error.device)  # (N,)
        return (weights * error).mean(), {"denoising_error": error.detach().mean()}

    def _probe(self, trajectory: Trajectory, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return self._loss(trajectory, torch.ones(len(trajectory.latents)), rows, columns)[0]

    def _target(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return what the network is trained to predict."""
        scheduler = self.pipeline.scheduler
        match scheduler.config.prediction_type:
            case "epsilon":
                return noise
            case "v_prediction":
                return scheduler.get_velocity(clean, noise, timesteps)
            case _:
                return clean

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "temperature": self.temperature, "top_share": self.top_share}

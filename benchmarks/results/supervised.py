"""Supervised fine-tuning of the adapter that RL trains, on pairs of an input image and its correct result.

Layers, rank, schedule, batches and number of samples are those of RL. Supervised training also has the
correct results, so the difference between the two is the cost of having only a reward.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import PromptFunction
from ddpo_lessons.ddim import predict_x0_and_noise
from ddpo_lessons.models import Family, family_of
from ddpo_lessons.models.policy import make_optimizer, prepare_policy

Pair = tuple[str, torch.Tensor, dict[str, Any]]  # prompt, input (3, H, W), and the "target" of the same shape


def train_supervised(
    pipeline: Any, prompt_function: PromptFunction, noise_strength: float, config: DDPOConfig
) -> list[float]:
    """Train an adapter on as many pairs as a run of RL has samples, each used once; return the losses.

    The prompt function has the correct result in `metadata["target"]`. Fields of the config that only RL uses
    are ignored.
    """
    torch.manual_seed(config.seed)  # decides the adapter's first weights
    family = family_of(pipeline)
    policy = prepare_policy(family.denoiser, family.frozen, config, True, torch.device("cpu"))
    optimizer = make_optimizer(config, list(policy.values()))
    timesteps = family.schedule(config.sample_num_steps, noise_strength).timesteps  # (T,)
    generator = torch.Generator().manual_seed(config.seed)
    samples = config.num_epochs * config.sample_num_batches_per_epoch * config.sample_batch_size
    losses = []
    for _ in range(samples // config.train_batch_size):
        pairs = [prompt_function() for _ in range(config.train_batch_size)]
        loss = pair_loss(family, pairs, timesteps, config, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.values(), config.train_max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def pair_loss(
    family: Family,
    pairs: Sequence[Pair],
    timesteps: torch.Tensor,
    config: DDPOConfig,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return the mean squared error of the clean latents that the policy predicts, over all timesteps.

    A rollout starts from its noised input, and a correct one has come to the noised target from the second
    timestep on. There are B pairs and T timesteps, those that a rollout runs; guidance is part of the policy.
    """
    prompts, images, metadata = zip(*pairs, strict=True)
    both = (images, [m["target"] for m in metadata])
    inputs, targets = (family.encode(torch.stack(list(part))) for part in both)  # (B, C, h, w)
    steps = timesteps.repeat_interleave(len(pairs))  # (T*B,)
    clean = torch.cat([inputs, *[targets] * (len(timesteps) - 1)])  # (T*B, C, h, w)
    noise = torch.randn(clean.shape, generator=generator)
    states = family.add_noise(clean, noise, steps)  # (T*B, C, h, w)
    guidance, scheduler = config.sample_guidance_scale, family.pipeline.scheduler
    conditioning = family.condition(prompts * len(timesteps), config.negative_prompts, guidance)
    output = family.predict(family.denoiser, states, steps, conditioning, guidance)
    alpha_bar = scheduler.alphas_cumprod[steps][:, None, None, None]
    predicted, _ = predict_x0_and_noise(scheduler, output, states, alpha_bar)
    return F.mse_loss(predicted, targets.repeat(len(timesteps), 1, 1, 1))

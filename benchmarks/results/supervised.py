"""Supervised fine-tuning of the adapter that RL trains, on pairs of an input and what it should become.

It has what RL has, layers, rank, schedule, batches and number of samples, and the answers besides. The
difference between the two is what it costs to know a reward only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import PromptFunction
from ddpo_lessons.ddim import predict_x0_and_noise
from ddpo_lessons.families.policy import check_pipeline, make_optimizer, prepare_policy
from ddpo_lessons.rollout import PromptEncoder, encode, make_schedule, predict

Pair = tuple[str, torch.Tensor, dict[str, Any]]  # prompt, input (3, H, W), and the "target" of the same shape


def train_supervised(
    pipeline: Any, prompt_function: PromptFunction, noise_strength: float, config: DDPOConfig
) -> list[float]:
    """Train an adapter on as many pairs as a run of RL has samples, each used once; return the losses.

    Args:
        pipeline: gets the adapter.
        prompt_function: returns `(prompt, image, metadata)`, with the right result in `metadata["target"]`.
        noise_strength: as of RL.
        config: of the run of RL; what only RL has is not read.
    """
    torch.manual_seed(config.seed)  # decides the adapter's first weights
    policy = prepare_policy(check_pipeline(pipeline), config, True, torch.device("cpu"))
    optimizer = make_optimizer(config, list(policy.values()))
    timesteps = make_schedule(pipeline.scheduler, config.sample_num_steps, noise_strength)  # (T,)
    encoder, generator = PromptEncoder(pipeline), torch.Generator().manual_seed(config.seed)
    samples = config.num_epochs * config.sample_num_batches_per_epoch * config.sample_batch_size
    losses = []
    for _ in range(samples // config.train_batch_size):
        pairs = [prompt_function() for _ in range(config.train_batch_size)]
        loss = pair_loss(pipeline, encoder, pairs, timesteps, config, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.values(), config.train_max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def pair_loss(
    pipeline: Any,
    encoder: PromptEncoder,
    pairs: Sequence[Pair],
    timesteps: torch.Tensor,
    config: DDPOConfig,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return the mean squared error of the clean latents that the policy predicts, over all timesteps.

    A rollout starts from its noised input, and a right one has come to the noised target from the second
    timestep on. There are B pairs and T timesteps, those that a rollout runs; guidance is part of the policy.
    """
    prompts, images, metadata = zip(*pairs, strict=True)
    pictures = (images, [m["target"] for m in metadata])
    inputs, targets = (encode(pipeline.vae, torch.stack(list(p))) for p in pictures)  # (B, C, h, w)
    steps = timesteps.repeat_interleave(len(pairs))  # (T*B,)
    clean = torch.cat([inputs, *[targets] * (len(timesteps) - 1)])  # (T*B, C, h, w)
    noise = torch.randn(clean.shape, generator=generator)
    states = pipeline.scheduler.add_noise(clean, noise, steps)  # (T*B, C, h, w)
    embeds = encoder(prompts * len(timesteps))  # (T*B, L, D)
    guided = config.sample_guidance_scale > 1
    negative = encoder([config.negative_prompts] * len(steps)) if guided else None
    output = predict(pipeline.unet, states, steps, embeds, negative, config.sample_guidance_scale)
    alpha_bar = pipeline.scheduler.alphas_cumprod[steps][:, None, None, None]
    predicted, _ = predict_x0_and_noise(pipeline.scheduler, output, states, alpha_bar)
    return F.mse_loss(predicted, targets.repeat(len(timesteps), 1, 1, 1))

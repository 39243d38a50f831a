"""Lesson 02: what the order of time changes in DDPO's gradients, and what a torn card does to the ratios.

    python -m benchmarks.results.clocks

Weights stay as they come. A rollout is eight samples of one prompt in eight denoising steps, of which seven
have noise; a forward pass takes a column, one pair of every sample. Of every rollout's passes, in time order
and after `shuffle_time`, it writes to `clocks.json`:

- neighbours: the mean cosine of the gradients of consecutive passes; control: the same for ordinary denoising
  training on the finished pictures, with one noise per sample, where nothing is luck;
- lengths of the passes' gradients; shares, their cosines with the sum of all; first_three, that of the sum of
  the first three.

"across" has the mean cosine of two rollouts' whole gradients, which share the policy and not the luck. "torn"
has the ratios of three batches of the lesson's own rollout; `clocks.png` the states of one of its samples.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, parse, write_json
from ddpo_lessons.advantages import normalize
from ddpo_lessons.batching import Samples, shuffle_samples, shuffle_time
from ddpo_lessons.data.images import image_grid
from ddpo_lessons.families import Family, family_of
from ddpo_lessons.rollout import Trajectory, text2img_rollout
from ddpo_lessons.tiny import load_tiny_sd

HERE = Path(__file__).parent
SEED = 0  # the notebook's
PROMPT, SAMPLES, STEPS = "a three", 8, 8
ROLLOUTS, CONTROLS = 16, 8
TIME_KEYS = ["timesteps", "latents", "next_latents", "log_probs", "noise"]
Gradient = Callable[[Samples], torch.Tensor]


class Policy:
    """tiny-sd with the weights that it comes with."""

    def __init__(self) -> None:
        pipeline = load_tiny_sd()
        pipeline.unet.eval()
        self.family: Family = family_of(pipeline)
        self.weights = list(pipeline.unet.parameters())

    def rollout(self, seed: int) -> tuple[torch.Tensor, Trajectory, Samples]:
        """Sample; the samples' rewards say how red a picture is."""
        generator = torch.Generator().manual_seed(SEED + seed)
        images, trajectory = text2img_rollout(
            self.family,
            [PROMPT] * SAMPLES,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            generator=generator,
        )
        rewards = (images[:, 0] - (images[:, 1] + images[:, 2]) / 2).mean((1, 2))  # (B,)
        final = trajectory.final_latents  # (B, C, h, w)
        noise = torch.randn(final.shape, generator=generator)
        return (
            images,
            trajectory,
            {
                "timesteps": trajectory.timesteps,
                "latents": trajectory.latents[:, :-1],
                "next_latents": trajectory.latents[:, 1:],
                "log_probs": trajectory.log_probs,
                "noise": noise[:, None].expand(-1, trajectory.num_steps, -1, -1, -1),
                "id": torch.arange(SAMPLES),
                "rewards": rewards,
                "advantages": normalize(rewards),
                "final": final,
                "prompt_embeds": trajectory.conditioning["prompt_embeds"],
            },
        )

    def predict(self, latents: torch.Tensor, batch: Samples) -> torch.Tensor:
        told = {"prompt_embeds": batch["prompt_embeds"]}
        return self.family.predict(self.family.denoiser, latents, batch["timesteps"], told, 1.0)

    def log_ratio(self, trajectory: Trajectory, batch: Samples) -> torch.Tensor:
        """Return log ρ of the pairs of a batch, (N,)."""
        output = self.predict(batch["latents"], batch)
        step = trajectory.schedule.step(
            output, batch["timesteps"], batch["latents"], prev_sample=batch["next_latents"]
        )
        return step.log_prob - batch["log_probs"]

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.weights)])

    def ddpo(self, trajectory: Trajectory) -> Gradient:
        """Return the gradient of the mean of −A ρ as a function of a batch."""
        return lambda batch: self.gradient(
            -(batch["advantages"] * self.log_ratio(trajectory, batch).exp()).mean()
        )

    def denoising(self, batch: Samples) -> torch.Tensor:
        """Return the gradient of the control."""
        clean, noise, t = batch["final"], batch["noise"], batch["timesteps"]
        target = self.family.denoising_target(clean, noise, t)
        noisy = self.family.add_noise(clean, noise, t)
        return self.gradient((self.predict(noisy, batch) - target).square().mean())


def column(samples: Samples, j: int) -> Samples:
    return {key: value[:, j] if key in TIME_KEYS else value for key, value in samples.items()}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def neighbours(gradients: torch.Tensor) -> float:
    pairs = itertools.pairwise(gradients)
    return sum(cosine(a, b) for a, b in pairs) / (len(gradients) - 1)


def of_passes(gradient: Gradient, samples: Samples) -> torch.Tensor:
    """Return the gradient of each column, (T, P)."""
    return torch.stack([gradient(column(samples, j)) for j in range(samples["timesteps"].shape[1])])


def measure(policy: Policy, seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return what a rollout says, and its whole gradient (P,)."""
    _, trajectory, samples = policy.rollout(100 + seed)
    shuffled = shuffle_time(samples, TIME_KEYS, torch.Generator().manual_seed(SEED + 200 + seed))
    found: dict[str, Any] = {}
    whole = torch.empty(0)
    for order, batch in (("time order", samples), ("shuffled", shuffled)):
        gradients = of_passes(policy.ddpo(trajectory), batch)
        whole = gradients.sum(0)
        found[order] = {
            "neighbours": round(neighbours(gradients), 4),
            "lengths": [round(float(g.norm()), 5) for g in gradients],
            "shares": [round(cosine(g, whole), 4) for g in gradients],
            "first_three": round(cosine(gradients[:3].sum(0), whole), 4),
        }
        if seed < CONTROLS:
            found[order]["control"] = round(neighbours(of_passes(policy.denoising, batch)), 4)
    return found, whole


@torch.no_grad()
def torn(policy: Policy) -> dict[str, Any]:
    """Return timesteps and ratios of one sample: whole, its timesteps forgotten, its advantage forgotten."""
    images, trajectory, samples = policy.rollout(0)
    number = int(samples["rewards"].argmax())
    mixed = shuffle_samples(samples, torch.Generator().manual_seed(SEED + 6))
    row = mixed["id"].tolist().index(number)
    whole = shuffle_time(mixed, TIME_KEYS, torch.Generator().manual_seed(SEED))
    cases = {
        "whole": whole,
        "timesteps": whole | {"timesteps": mixed["timesteps"]},
        "advantages": whole | {"advantages": samples["advantages"]},
    }
    states = policy.family.decode(trajectory.latents[number, :-1])  # (T, 3, 32, 32)
    image_grid(torch.cat([states, images[number : number + 1]]), columns=STEPS, scale=1).save(
        HERE / "clocks.png"
    )
    step = torch.arange(STEPS - 1).expand(SAMPLES, -1)
    order = shuffle_time({"step": step}, ["step"], torch.Generator().manual_seed(SEED))["step"][row]
    found: dict[str, Any] = {"order": order.tolist()}
    for name, batch in cases.items():
        log_ratio = torch.stack([policy.log_ratio(trajectory, column(batch, j)) for j in range(STEPS - 1)], 1)
        found[name] = {
            "timesteps": batch["timesteps"][row].tolist(),
            "distance": [float(f"{x:.2e}") for x in (log_ratio[row].exp() - 1).abs().tolist()],
            "advantage": round(float(batch["advantages"][row]), 2),
        }
    return found


def across(alike: torch.Tensor) -> tuple[float, float]:
    """Return the mean of a symmetric (R, R) without its diagonal, and the jackknife's standard error."""

    def mean(kept: torch.Tensor) -> float:
        part, count = alike[kept][:, kept], len(kept)
        return float(part.sum() - part.trace()) / (count * (count - 1))

    numbers = torch.arange(len(alike))
    without = torch.tensor([mean(numbers[numbers != n]) for n in numbers])
    error = (without.var(correction=0) * (len(alike) - 1)).sqrt()
    return round(mean(numbers), 4), round(float(error), 4)


def rollouts(policy: Policy) -> dict[str, Any]:
    """Return what every rollout says, and how alike their whole gradients are."""
    found, wholes = [], []
    for seed in range(ROLLOUTS):
        one, whole = measure(policy, seed)
        found.append(one)
        wholes.append(whole / whole.norm())
        print(seed, one["time order"]["neighbours"], one["shuffled"]["neighbours"], flush=True)
    alike = torch.stack(wholes) @ torch.stack(wholes).T  # (R, R)
    schedule = policy.family.schedule(STEPS)
    actions = slice(0, STEPS - 1)
    return {
        "machine": machine(),
        "timesteps": schedule.timesteps[actions].tolist(),
        "sigma": [round(float(std), 4) for std in schedule.stds[actions]],
        "across": dict(zip(("mean", "error"), across(alike), strict=True)),
        "rollouts": found,
    }


def main() -> None:
    arguments = parse(__doc__, parts=["torn", "rollouts"])
    policy, path = Policy(), HERE / "clocks.json"
    result = json.loads(path.read_text()) if path.exists() else {"prompt": PROMPT}
    if "torn" in arguments.parts:
        result["torn"] = torn(policy)
    if "rollouts" in arguments.parts:
        result |= rollouts(policy)
    write_json(path, result)


if __name__ == "__main__":
    main()

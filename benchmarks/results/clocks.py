"""Lesson 02: the order of time in DDPO's gradients, and ratios with another sample's timesteps or advantages.

    python -m benchmarks.results.clocks

Weights stay as they come. A rollout is eight samples of one prompt in eight denoising steps, of which seven
have noise; a forward pass takes a column, one pair of every sample. Of every rollout's passes, in time order
and after `shuffle_time`, it writes to `clocks.json`:

- neighbors: the mean cosine of the gradients of consecutive passes; control: the same for ordinary denoising
  training on the finished images, with one noise per sample, where nothing depends on chance;
- lengths of the passes' gradients; shares, their cosines with the sum of all; first_three, that of the sum of
  the first three;
- last: how many of a pass's samples are at their last timestep, whose gradient is the longest.

"across" has the mean cosine of two rollouts' whole gradients, which share the policy and no random number.
"torn" has the ratios of three batches of the lesson's own rollout; `clocks.png` the states of one of its
samples.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import Row, machine, redness, write_json
from ddpo_lessons.advantages import normalize
from ddpo_lessons.batching import Samples, shuffle_samples, shuffle_time
from ddpo_lessons.image import image_grid
from ddpo_lessons.models import Family, family_of
from ddpo_lessons.rollout import SamplingSettings, Trajectory, text2img_rollout
from ddpo_lessons.worlds import load_tiny_sd

HERE = Path(__file__).parent
SEED = 0  # the notebook's
PROMPT, SAMPLES, STEPS = "a three", 8, 8
ROLLOUTS, CONTROLS = 16, 8
TIME_KEYS = ["timesteps", "latents", "next_latents", "log_probs", "noise"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + seed)


class Policy:
    def __init__(self) -> None:
        pipeline = load_tiny_sd()
        pipeline.unet.eval()
        self.family: Family = family_of(pipeline)
        self.weights = list(pipeline.unet.parameters())

    def rollout(self, seed: int, count: int = SAMPLES) -> tuple[torch.Tensor, Trajectory, Samples]:
        """Sample so many images; their reward is redness."""
        settings = SamplingSettings(num_inference_steps=STEPS, guidance_scale=1.0)
        draws = seeded(seed)
        images, made = text2img_rollout(self.family, [PROMPT] * count, settings, generator=draws)
        rewards = redness(images)  # (B,)
        noise = torch.randn(made.final_latents.shape, generator=draws)  # (B, C, h, w)
        samples = {
            "timesteps": made.timesteps, "latents": made.latents[:, :-1], "next_latents": made.latents[:, 1:],
            "log_probs": made.log_probs, "noise": noise[:, None].expand(-1, made.num_steps, -1, -1, -1),
            "id": torch.arange(count), "rewards": rewards, "advantages": normalize(rewards),
            "final": made.final_latents, "prompt_embeds": made.conditioning["prompt_embeds"],
        }  # fmt: skip
        return images, made, samples

    def predict(self, latents: torch.Tensor, batch: Samples) -> torch.Tensor:
        conditioning = {"prompt_embeds": batch["prompt_embeds"]}
        return self.family.predict(self.family.denoiser, latents, batch["timesteps"], conditioning, 1.0)

    def log_ratio(self, made: Trajectory, batch: Samples) -> torch.Tensor:
        """Return log ρ of the pairs of a batch, (N,)."""
        output, outcome = self.predict(batch["latents"], batch), batch["next_latents"]
        step = made.schedule.step(output, batch["timesteps"], batch["latents"], prev_sample=outcome)
        return step.log_prob - batch["log_probs"]

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.weights, retain_graph=True)])

    def ddpo(self, made: Trajectory, batch: Samples) -> torch.Tensor:
        return self.gradient(-(batch["advantages"] * self.log_ratio(made, batch).exp()).mean())

    def denoising(self, batch: Samples) -> torch.Tensor:
        given = batch["final"], batch["noise"], batch["timesteps"]
        target, noisy = self.family.denoising_target(*given), self.family.add_noise(*given)
        return self.gradient((self.predict(noisy, batch) - target).square().mean())


def column(samples: Samples, j: int) -> Samples:
    return {key: value[:, j] if key in TIME_KEYS else value for key, value in samples.items()}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def neighbors(gradients: torch.Tensor) -> float:
    pairs = itertools.pairwise(gradients)
    return round(sum(cosine(a, b) for a, b in pairs) / (len(gradients) - 1), 4)


def of_passes(gradient: Callable[[Samples], torch.Tensor], samples: Samples) -> torch.Tensor:
    """Return the gradient of each column, (T, P)."""
    return torch.stack([gradient(column(samples, j)) for j in range(samples["timesteps"].shape[1])])


def measure(policy: Policy, seed: int) -> tuple[Row, torch.Tensor]:
    """Return the measurements of a rollout, and its whole gradient (P,)."""
    _, made, samples = policy.rollout(100 + seed)
    orders = {"time order": samples, "shuffled": shuffle_time(samples, TIME_KEYS, seeded(200 + seed))}
    found: Row = {}
    for order, batch in orders.items():
        gradients = of_passes(partial(policy.ddpo, made), batch)
        whole = gradients.sum(0)
        found[order] = {
            "neighbors": neighbors(gradients),
            "lengths": [round(float(g.norm()), 5) for g in gradients],
            "shares": [round(cosine(g, whole), 4) for g in gradients],
            "first_three": round(cosine(gradients[:3].sum(0), whole), 4),
            "last": (batch["timesteps"] == samples["timesteps"].min()).sum(0).tolist(),
        }
        if seed < CONTROLS:
            found[order]["control"] = neighbors(of_passes(policy.denoising, batch))
    return found, whole


@torch.no_grad()
def torn(policy: Policy) -> Row:
    """Return timesteps and ratios of one sample: whole, without its timesteps, without its advantage."""
    images, made, samples = policy.rollout(0)
    number = int(samples["rewards"].argmax())
    states = policy.family.decode(made.latents[number, :-1])  # (T, 3, 32, 32)
    shown = torch.cat([states, images[number : number + 1]])
    image_grid(shown, columns=STEPS, scale=1).save(HERE / "clocks.png")
    mixed = shuffle_samples(samples, seeded(6))
    row = mixed["id"].tolist().index(number)
    whole = shuffle_time(mixed, TIME_KEYS, seeded(0))
    cases = {
        "whole": whole,
        "timesteps": whole | {"timesteps": mixed["timesteps"]},
        "advantages": whole | {"advantages": samples["advantages"]},
    }
    step = torch.arange(STEPS - 1).expand(SAMPLES, -1)
    found: Row = {"order": shuffle_time({"step": step}, ["step"], seeded(0))["step"][row].tolist()}
    for name, batch in cases.items():
        log_ratio = torch.stack([policy.log_ratio(made, column(batch, j))[row] for j in range(STEPS - 1)])
        found[name] = {
            "timesteps": batch["timesteps"][row].tolist(),
            "distance": [float(f"{x:.2e}") for x in (log_ratio.exp() - 1).abs().tolist()],
            "advantage": round(float(batch["advantages"][row]), 2),
        }
    return found


def across(alike: torch.Tensor) -> Row:
    """Return the mean of a symmetric (R, R) without its diagonal, and the jackknife's standard error."""

    def mean(kept: torch.Tensor) -> float:
        part, count = alike[kept][:, kept], len(kept)
        return float(part.sum() - part.trace()) / (count * (count - 1))

    numbers = torch.arange(len(alike))
    without = torch.tensor([mean(numbers[numbers != n]) for n in numbers])
    error = (without.var(correction=0) * (len(alike) - 1)).sqrt()
    return {"mean": round(mean(numbers), 4), "error": round(float(error), 4)}


if __name__ == "__main__":
    policy, found, wholes = Policy(), list[Row](), list[torch.Tensor]()
    tears = torn(policy)
    for seed in range(ROLLOUTS):
        one, whole = measure(policy, seed)
        found.append(one)
        wholes.append(whole / whole.norm())
        print(seed, one["time order"]["neighbors"], one["shuffled"]["neighbors"], flush=True)
    result = {
        "torn": tears, "machine": machine(),
        "timesteps": policy.family.schedule(STEPS).timesteps[: STEPS - 1].tolist(),
        "across": across(torch.stack(wholes) @ torch.stack(wholes).T), "rollouts": found,
    }  # fmt: skip
    write_json(HERE / "clocks.json", result)

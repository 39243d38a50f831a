"""Train tiny-sd3 by Flow-GRPO to write in italics: `python -m benchmarks.results.flow`.

The reward is `prompt_alignment`, less ten times the distance of `digits.lean` from 0.25. Each method is
trained with three learning rates on one seed, and evaluated on validation prompts (flow_search.csv). The
learning rate with the highest reward is then used for five seeds, which are evaluated on test prompts:
flow.csv has a row per evaluation, and "flow" also has five seeds at each of the other two learning rates. An
evaluation samples 25 prompts from 8 noises each, by the ODE without guidance. `spread` is the standard
deviation of pixels over the noises of a prompt, and `rough` the mean difference of neighboring pixels.
flow_untrained.csv has what needs no training: other numbers of steps, guidance, best-of-8, and images that
are sheared afterwards. flow_floor.csv has the mean |Δ log p| of 256 rollouts that are replayed in another
precision, with 1, 4, 16, … latents joined into one, and the means of its two terms. flow_timing.csv has the
standard deviation of the lean within groups of eight rollouts from a common first noise, for five draws of 24
prompts, if only some actions have noise (`first` to `last`): as much as `flow` gives them, or σ = 0.35 in
each. Finished runs are skipped.
"""

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import common
from benchmarks.common import Row
from benchmarks.results.equal_tasks import COMMON
from ddpo_lessons.algorithms.flow_grpo import FlowGRPO
from ddpo_lessons.models import family_of
from ddpo_lessons.named_prompts import digit_world_prompts
from ddpo_lessons.rewards import prompt_alignment
from ddpo_lessons.rollout import sample_trajectory
from ddpo_lessons.worlds import digits, load_tiny_sd3
from ddpo_lessons.worlds.digits import score_prompts

RESULT = Path(__file__).with_suffix(".csv")
SEARCH = RESULT.with_name("flow_search.csv")
COLUMNS = (
    "method", "learning_rate", "seed", "epoch", "queries", "reward", "lean", "obeyed", "spread", "rough",
)  # fmt: skip
# Attention of images and of words, and feed-forward layers.
OF_SD3 = ("to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
OF_SD3 += ("net.0.proj", "net.2")
STEPS, EPOCHS, SEARCH_EPOCHS, SEARCH_SEED, WANTED = 10, 16, 12, 100, 0.25
NEIGHBORS = (1e-3, 1e-2)  # of the learning rate that the search chose for "flow"
PROMPTS, NOISES = 25, 8
GROUPS, GROUP_SIZE, SAME_STD = 24, 8, 0.35  # of flow_timing.csv
EARLY = (0, 4)  # the window
# SDE and η of each method.
METHODS: dict[str, tuple[Any, float]] = {"flow": ("flow", 0.7), "CPS": ("cps", 0.8)}
SETTINGS: Row = {
    **COMMON, "sample_num_steps": STEPS, "sample_guidance_scale": 1.0, "sample_batch_size": 64,
    "sample_group_size": 8, "train_batch_size": 16, "train_clip_range": 5e-3,
    "train_lora_target_modules": OF_SD3, "accelerator_kwargs": {"cpu": True},
}  # fmt: skip
ALIGNMENT = prompt_alignment()


def italics(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """The reward: what the prompt names, leaning by 0.25; (B,), 0 at best."""
    return ALIGNMENT(images, prompts, metadata)[0] - 10 * (digits.lean(images) - WANTED).abs()


class Evaluation:
    """Evaluates any policy, in any steps, on the same prompts from the same noise."""

    def __init__(self, split: str) -> None:
        number = {"validation": 10_001, "test": 10_002}[split]
        draw = digit_world_prompts(number)
        self.prompts = [prompt for prompt, _ in (draw() for _ in range(PROMPTS)) for _ in range(NOISES)]
        shape = (PROMPTS * NOISES, 4, 8, 8)
        self.noise = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        self.described, self.judge = (
            [digits.parse_prompt(prompt) for prompt in self.prompts],
            digits.Judge.load(),
        )

    def images(
        self, family: Any, steps: int = STEPS, guidance: float = 1.0, sde: Any = "flow", eta: float = 0.0
    ) -> torch.Tensor:
        schedule = family.schedule(steps, eta=eta).with_noise(sde=sde)
        draws = torch.Generator().manual_seed(1)
        return common.denoised(family, self.noise, self.prompts, schedule, guidance, draws)

    def reward(self, images: torch.Tensor) -> torch.Tensor:
        return italics(images, self.prompts, [{}] * len(images))

    def measure(self, images: torch.Tensor) -> Row:
        return {
            "reward": self.reward(images).mean().item(),
            "lean": digits.lean(images).mean().item(),
            "obeyed": score_prompts(self.judge, images, self.described)["all three"],
            "spread": images.unflatten(0, (-1, NOISES)).std(dim=1).mean().item(),
            "rough": images.diff(dim=-1).abs().mean().item(),
        }


class Windowed(FlowGRPO):
    def sampling_schedule(self, schedule: Any, config: Any, epoch: int) -> Any:
        return schedule.with_noise(sde=self.sde, window=EARLY)


def train(run: Row, split: str, epochs: Collection[int]) -> list[Row]:
    """Train, and return the measurements after so many epochs."""
    evaluation, (sde, eta) = Evaluation(split), METHODS[run["method"]]
    own = {"train_learning_rate": run["learning_rate"], "seed": run["seed"], "sample_eta": eta}
    task = (italics, digit_world_prompts(run["seed"]), load_tiny_sd3())
    with common.trainer_of(task, SETTINGS, own, algorithm=Windowed(sde)) as trainer:
        rows = common.readings(trainer, epochs, lambda: evaluation.measure(evaluation.images(trainer.family)))
    return [{**row, "queries": 64 * row["epoch"]} for row in rows]


def search(run: Row) -> list[Row]:
    return train(run, "validation", [SEARCH_EPOCHS])


def compare(run: Row) -> list[Row]:
    return train(run, "test", range(0, EPOCHS + 1, 4))


def chosen(method: str) -> float:
    return common.best_rate(SEARCH, "reward", method=method)


def sheared(images: torch.Tensor) -> torch.Tensor:
    """Shear finished images (B, 3, H, W) until they lean as wanted."""
    theta = torch.eye(2, 3).repeat(len(images), 1, 1)
    theta[:, 0, 1] = WANTED - digits.lean(images)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def untrained() -> list[Row]:
    evaluation, family = Evaluation("test"), family_of(load_tiny_sd3())
    found = {f"{steps} steps": evaluation.images(family, steps) for steps in (1, 2, 3, 4, 5, 8, STEPS, 20)}
    found |= {f"guidance {scale:g}": evaluation.images(family, guidance=scale) for scale in (2.0, 4.0, 8.0)}
    etas = {"flow": 0.7, "dance": 0.3, "cps": 0.8}
    found |= {f"SDE {sde}": evaluation.images(family, sde=sde, eta=eta) for sde, eta in etas.items()}
    found["sheared"] = sheared(found[f"{STEPS} steps"])
    rows = [{"setting": name, **evaluation.measure(images)} for name, images in found.items()]
    # The eight noises of a prompt are the eight samples of best-of-8, which keeps one image without a spread.
    images = found[f"{STEPS} steps"]
    best = evaluation.reward(images).view(-1, NOISES).argmax(dim=1) + NOISES * torch.arange(PROMPTS)
    described, kept = [evaluation.described[n] for n in best], images[best]
    obeyed = score_prompts(evaluation.judge, kept, described)["all three"]
    measured = {
        "reward": evaluation.reward(images)[best].mean().item(),
        "lean": digits.lean(kept).mean().item(),
    }
    rough = kept.diff(dim=-1).abs().mean().item()
    return [*rows, {"setting": "best-of-8", **measured, "obeyed": obeyed, "spread": "", "rough": rough}]


@torch.no_grad()
def floor() -> list[Row]:
    """Return |Δ log p| of rollouts in bfloat16 autocast, replayed in two other ways before any update."""
    pipeline, rows = load_tiny_sd3(), list[Row]()
    family, half = family_of(pipeline), load_tiny_sd3().transformer.to(torch.bfloat16)
    draw = digit_world_prompts(0)
    conditioning = family.condition([draw()[0] for _ in range(256)], "", 1.0)
    start = torch.randn(256, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    schedule = family.schedule(STEPS, eta=0.7)
    with torch.autocast("cpu", torch.bfloat16):
        done = sample_trajectory(family, start, schedule, conditioning, 1.0, torch.Generator().manual_seed(1))

    def rounded(timestep: Any, **inputs: Any) -> Any:
        return half(timestep=timestep, **{name: part.to(torch.bfloat16) for name, part in inputs.items()})

    for name, network in (("bfloat16 weights", rounded), ("float32", family.denoiser)):
        for k in range(done.num_steps):
            x, action, t = done.latents[:, k], done.latents[:, k + 1], done.timesteps[:, k]
            with torch.autocast("cpu", torch.bfloat16):
                old = schedule.step(
                    family.predict(family.denoiser, x, t, conditioning, 1.0), t, x, prev_sample=action
                )
            new = schedule.step(family.predict(network, x, t, conditioning, 1.0), t, x, prev_sample=action)
            std = old.std[0]
            d, z = (new.mean - old.mean).double() / std, (action - old.mean).double() / std
            for together in (1, 4, 16, 64, 256):
                first, second = (
                    (part.flatten().view(256 // together, -1)).mean(dim=1) for part in (d * z, d**2 / 2)
                )
                rows.append({
                    "replayed": name, "action": k + 1, "dims": 256 * together,
                    "difference": (first - second).abs().mean().item(),
                    "first_term": first.abs().mean().item(), "second_term": second.mean().item(),
                })  # fmt: skip
    return [
        {**row, **{name: f"{value:.3g}" for name, value in row.items() if isinstance(value, float)}}
        for row in rows
    ]


def timing() -> list[Row]:
    """Return the spread of the lean within groups, with noise in three actions at a time and in all nine."""
    family, judge, rows = family_of(load_tiny_sd3()), digits.Judge.load(), list[Row]()
    schedule = family.schedule(STEPS, eta=0.7)
    lengths = (schedule.sigmas[:-2] - schedule.sigmas[1:-1]).tolist()  # of the nine actions
    torch.testing.assert_close(lengths, [lengths[0]] * 9)  # so "dance" has one σ = η √Δ
    noises: dict[str, Row] = {
        "flow": {"eta": 0.7, "sde": "flow"},
        "same": {"eta": SAME_STD / lengths[0] ** 0.5, "sde": "dance"},
    }
    for seed in range(5):
        draw, generator = digit_world_prompts(seed), torch.Generator().manual_seed(seed)
        prompts = [prompt for prompt, _ in (draw() for _ in range(GROUPS)) for _ in range(GROUP_SIZE)]
        start = torch.randn(GROUPS, 4, 8, 8, generator=generator).repeat_interleave(GROUP_SIZE, dim=0)
        described = [digits.parse_prompt(prompt) for prompt in prompts]
        for (name, noise), (first, end) in itertools.product(
            noises.items(), ((0, 3), (3, 6), (6, 9), (0, 9))
        ):
            steps = schedule.with_noise(**noise, window=(first, end))
            images = common.denoised(family, start, prompts, steps, draws=generator)
            rows.append({
                "noise": name, "first": first + 1, "last": end, "seed": seed,
                "spread": digits.lean(images).view(GROUPS, GROUP_SIZE).std(dim=1).mean().item(),
                "obeyed": score_prompts(judge, images, described)["all three"],
            })  # fmt: skip
    return rows


if __name__ == "__main__":
    processes = common.parse(__doc__).processes
    tried = common.product(seed=(SEARCH_SEED,), learning_rate=(3e-3, 1e-2, 1e-3), method=METHODS)
    common.run_all(search, tried, COLUMNS, SEARCH, processes)
    runs = common.product(seed=range(5), method=METHODS)
    runs = [{**run, "learning_rate": chosen(run["method"])} for run in runs]
    runs += common.product(seed=range(5), method=("flow",), learning_rate=NEIGHBORS)
    common.run_all(compare, runs, COLUMNS, RESULT, processes)
    for measure in (untrained, floor, timing):
        common.write_once(RESULT.with_name(f"flow_{measure.__name__}.csv"), measure)

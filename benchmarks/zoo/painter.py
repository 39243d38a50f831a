"""Lesson 06: training on two rewards for file size, and what happens to the foxes of the prompt.

    python -m benchmarks.zoo.painter --processes 1

The prompt is "a fox". For small files the reward is minus the size of a JPEG: DDPO, DDPO with a KL penalty,
and RWR train with the same number of reward evaluations, five seeds; DDPO also at learning rates that are
usual for larger models. For large files the reward is that
size: DDPO with the same settings, seven seeds, 16 epochs. "six steps" is DDPO for small files in six
denoising steps, of which the last has almost no noise, with and without that action in training; also seven,
six epochs. Large files and six steps are repeated at the next learning rates down and up. painter.csv has the
mean reward of test images, which are drawn from fixed noise, and the fraction in which the evaluator
recognizes a fox; also for best-of-n and longer prompts, which need no training. Finished runs are skipped.
Images of one seed go into painter/, and three samples of an epoch from noise to advantage.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Row
from ddpo_lessons.advantages import normalize_groups
from ddpo_lessons.algorithms.algorithm import Algorithm
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.algorithms.rwr import RWR
from ddpo_lessons.image import to_pil
from ddpo_lessons.lessons.demo import EVERYWHERE
from ddpo_lessons.rewards import RewardFunction, jpeg_compressibility, jpeg_incompressibility
from ddpo_lessons.rollout import SamplingSettings, text2img_rollout
from ddpo_lessons.worlds import animals, load_tiny_zoo
from ddpo_lessons.worlds.judges import named

RESULT = Path(__file__).with_suffix(".csv")
COLUMNS = ("method", "seed", "learning_rate", "epoch", "queries", "reward", "fox", "prompt")
Reward = Callable[[], RewardFunction]
PROMPT, TEST, VALIDATION = "a fox", 1_000, 2_000
SEEDS, NEW_SEEDS = (0, 1, 2, 3, 4), (3, 4, 5, 6, 7, 13, 14)
IMAGES, SHOWN = 48, 10
STEPS = 5  # four actions, because the last step has no noise
SETTINGS: Row = {
    "sample_guidance_scale": 1.0, "sample_batch_size": 64,
    "sample_num_batches_per_epoch": 1, "sample_group_size": 8,
    "train_timestep_fraction": 0.5,  # two actions of each sample
    "train_batch_size": 32,  # two optimizer steps
    "train_lora_rank": 16, "train_lora_alpha": 16, "train_lora_target_modules": EVERYWHERE,
    "image_grid_freq": 0,
}  # fmt: skip
CLIPPED: Row = {"train_clip_range": 5e-3}
RATES = (3e-3, 1e-3, 1e-2)  # of learning: the lesson's, and its neighbors


@dataclass(frozen=True)
class Method:
    """How a policy is trained."""

    algorithm: Callable[[], Algorithm]
    settings: Row
    seeds: tuple[int, ...] = SEEDS
    reward: Reward = jpeg_compressibility
    steps: int = STEPS
    learning_rates: tuple[float, ...] = RATES[:1]
    tested: tuple[int, ...] = (0, 2, 4, 6, 8, 10)  # after so many epochs
    shown: tuple[int, ...] = ()  # epochs whose images the lesson shows, of the first seed and learning rate


class LastActionLeftOut(DDPO):
    """DDPO that does not train the last of the steps with noise."""

    def sampling_schedule(self, schedule: Any, config: Any, epoch: int) -> Any:
        return schedule.with_actions(0, int((schedule.stds > 0).sum()) - 1)


SIX: Row = {"seeds": NEW_SEEDS, "steps": 6, "tested": (0, 6), "learning_rates": RATES}
LARGE: Row = {"seeds": NEW_SEEDS, "reward": jpeg_incompressibility, "learning_rates": RATES}
METHODS = {
    "DDPO": Method(DDPO, CLIPPED, shown=(0, 4, 6, 10)),
    "low rates": Method(DDPO, CLIPPED, learning_rates=(3e-4, 1e-4)),
    "KL 0.03": Method(DDPO, {**CLIPPED, "train_kl_coefficient": 0.03}),
    "KL 0.1": Method(DDPO, {**CLIPPED, "train_kl_coefficient": 0.1}, shown=(10,)),
    "RWR": Method(RWR, {}, learning_rates=(2e-3,)),
    "large files": Method(DDPO, CLIPPED, tested=(0, 4, 8, 12, 16), shown=(0, 16), **LARGE),
    # Two actions of each sample, as in five steps.
    "six steps": Method(DDPO, {**CLIPPED, "train_timestep_fraction": 0.34}, **SIX),
    "six steps, five trained": Method(LastActionLeftOut, {**CLIPPED, "train_timestep_fraction": 0.4}, **SIX),
}


# -------------------------------------------------------------------------------------------- testing
def paint(
    pipeline: Any, noise: int, prompt: str = PROMPT, count: int = IMAGES, steps: int = STEPS
) -> torch.Tensor:
    """Generate the test images, (N, 3, 64, 64)."""
    return common.draw(pipeline, [prompt] * count, noise, num_inference_steps=steps)


def rewards(images: torch.Tensor, reward: Reward = jpeg_compressibility) -> torch.Tensor:
    """Return the reward of each image, (N,): the size in kB, or minus that."""
    scored = reward()(images, [PROMPT] * len(images), [{}] * len(images))
    assert isinstance(scored, torch.Tensor)
    return scored


def verdict(images: torch.Tensor, reward: Reward = jpeg_compressibility) -> Row:
    """Return the mean reward, and the fraction of the images in which the evaluator recognizes a fox."""
    seen = named(animals.Judge.load(), images)[:, 0] == animals.ANIMALS.index("fox")  # (N,)
    return {"reward": rewards(images, reward).mean().item(), "fox": seen.float().mean().item()}


# ------------------------------------------------------------------------------------------- training
def train(run: Row) -> list[Row]:
    """Train a policy; return its test results after some of the epochs."""
    method, pipeline, images = METHODS[run["method"]], load_tiny_zoo(), list[torch.Tensor]()
    own = {"seed": run["seed"], "num_epochs": max(method.tested), "sample_num_steps": method.steps}
    own["train_learning_rate"] = run["learning_rate"]
    is_first = (run["seed"], run["learning_rate"]) == (method.seeds[0], method.learning_rates[0])

    def test() -> Row:
        images.append(paint(pipeline, TEST, steps=method.steps))
        return verdict(images[-1], method.reward)

    task, settings = (method.reward(), lambda: (PROMPT, {}), pipeline), (SETTINGS, method.settings, own)
    with common.trainer_of(task, *settings, algorithm=method.algorithm()) as trainer:
        assert trainer.num_train_timesteps == 2
        rows = common.readings(trainer, method.tested, test)
    for epoch in method.shown if is_first else ():
        name = f"{run['method'].replace(' ', '_')}_{epoch:02d}"
        shown = images[method.tested.index(epoch)][:SHOWN]
        common.save_grid(shown, SHOWN, RESULT.with_suffix("") / f"{name}.png")
    return [{"queries": row["epoch"] * SETTINGS["sample_batch_size"], **row} for row in rows]


# ----------------------------------------------------------------------------------- without training
def best_of(count: int, reward: Reward = jpeg_compressibility) -> list[Row]:
    """Generate each test image so many times, and keep the one with the highest reward."""
    draws = [paint(load_tiny_zoo(), TEST + n) for n in range(count)]  # (N, 3, 64, 64) each
    return [verdict(common.best_draws(draws, [rewards(images, reward) for images in draws]), reward)]


def more_words(reward: Reward = jpeg_compressibility) -> list[Row]:
    """Name the artist and the background with the highest reward on other noise."""
    said = itertools.product(animals.ARTISTS, animals.BACKGROUND_NAMES)
    prompts = [animals.make_prompt("fox", *words) for words in said]
    pipeline = load_tiny_zoo()
    scores = [rewards(paint(pipeline, VALIDATION, prompt, 16), reward).mean().item() for prompt in prompts]
    best = prompts[max(range(len(prompts)), key=scores.__getitem__)]
    return [{"prompt": best, **verdict(paint(pipeline, TEST, best), reward)}]


WITHOUT: dict[str, Callable[[], list[Row]]] = {
    f"best-of-{count}": functools.partial(best_of, count) for count in (2, 4, 8)
}
WITHOUT["more words"] = more_words
WITHOUT["best-of-8, large files"] = functools.partial(best_of, 8, jpeg_incompressibility)
WITHOUT["more words, large files"] = functools.partial(more_words, jpeg_incompressibility)


# ------------------------------------------------------------------------------ an epoch in images
def draw_loop() -> None:
    """Keep the highest, the median and the lowest reward of an untrained group, with their trajectories.

    loop.png has a row for each: x_T to x_0 as three of the latent's four channels, and the image.
    """
    settings = SamplingSettings(num_inference_steps=STEPS, guidance_scale=1.0, group_size=8)
    generator = torch.Generator().manual_seed(0)
    images, trajectory = text2img_rollout(load_tiny_zoo(), [PROMPT] * 64, settings, generator=generator)
    scored = rewards(images)  # (64,)
    advantages = normalize_groups(scored, 8)
    order = scored[:8].argsort(descending=True).tolist()  # of the first group
    shown, rows = [order[0], order[4], order[7]], []
    for n in shown:
        colors = (trajectory.latents[n, :, :3] / 6 + 0.5).clamp(0, 1)  # (T + 1, 3, 16, 16)
        tiles = colors.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        rows.append(torch.cat([*tiles, images[n]], dim=2))  # (3, 64, 64 (T + 2))
    folder = RESULT.with_suffix("")
    to_pil(torch.cat(rows, dim=1)).save(folder / "loop.png")
    numbers = [
        {"reward": round(scored[n].item(), 2), "advantage": round(advantages[n].item(), 2)} for n in shown
    ]
    common.write_json(folder / "loop.json", {"mean": round(scored[:8].mean().item(), 2), "shown": numbers})


def measure(run: Row) -> list[Row]:
    return WITHOUT[run["method"]]() if run["method"] in WITHOUT else train(run)


if __name__ == "__main__":
    runs = common.product(method=WITHOUT, learning_rate=[""], seed=[0])
    for name, method in METHODS.items():
        runs += common.product(method=[name], learning_rate=method.learning_rates, seed=method.seeds)
    runs.sort(key=lambda run: run["seed"])
    common.run_all(measure, runs, COLUMNS, RESULT, common.parse(__doc__).processes)
    common.quiet_thread()
    draw_loop()

"""Lesson 06: what a reward teaches a painter of foxes, and what it forgets.

`python -m benchmarks.zoo.painter`: the sentence is "a fox", the reward minus the size of a JPEG. DDPO, DDPO
with a price on the KL and RWR train with as many queries, three seeds. painter.csv has, every other epoch,
the mean reward of test pictures drawn from fixed noise and the share in which the judge sees a fox; and what
the best of n and more words do without training. What the file holds already is not run again. Pictures of
the first seed go into painter/, and three samples of an epoch from noise to advantage.
"""

import functools
import itertools
from collections.abc import Callable
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
from ddpo_lessons.rewards import jpeg_compressibility
from ddpo_lessons.rollout import SamplingSettings, text2img_rollout
from ddpo_lessons.worlds import animals, load_tiny_zoo
from ddpo_lessons.worlds.judges import named

RESULT = Path(__file__).with_suffix(".csv")
COLUMNS = ("method", "seed", "epoch", "queries", "reward", "fox", "prompt")
PROMPT, SEEDS, TEST, VALIDATION = "a fox", (0, 1, 2), 1_000, 2_000
PICTURES, SHOWN, EPOCHS = 48, 10, 10
STEPS = 5  # four actions: the last step has no noise; of six it would have a little, and drown the others
SETTINGS: Row = {
    "num_epochs": EPOCHS, "sample_num_steps": STEPS, "sample_guidance_scale": 1.0, "sample_batch_size": 64,
    "sample_num_batches_per_epoch": 1, "sample_group_size": 8,
    "train_timestep_fraction": 0.5,  # two actions of each sample
    "train_batch_size": 32,  # two optimizer steps
    "train_lora_rank": 16, "train_lora_alpha": 16, "train_lora_target_modules": EVERYWHERE,
    "image_grid_freq": 0,
}  # fmt: skip
CLIPPED: Row = {"train_learning_rate": 3e-3, "train_clip_range": 5e-3}
METHODS: dict[str, tuple[Callable[[], Algorithm], Row]] = {
    "DDPO": (DDPO, CLIPPED), "KL 0.03": (DDPO, {**CLIPPED, "train_kl_coefficient": 0.03}),
    "KL 0.1": (DDPO, {**CLIPPED, "train_kl_coefficient": 0.1}), "RWR": (RWR, {"train_learning_rate": 2e-3}),
}  # fmt: skip


KEPT = {"DDPO": (0, 4, 6, 10), "KL 0.1": (10,)}  # epochs of the first seed whose pictures the lesson shows


# -------------------------------------------------------------------------------------------- testing
def paint(pipeline: Any, noise: int, prompt: str = PROMPT, count: int = PICTURES) -> torch.Tensor:
    """Draw the test pictures, (N, 3, 64, 64)."""
    return common.draw(pipeline, [prompt] * count, noise, num_inference_steps=STEPS)


def rewards(images: torch.Tensor) -> torch.Tensor:
    """Return minus kB of each picture, (N,)."""
    scored = jpeg_compressibility()(images, [PROMPT] * len(images), [{}] * len(images))
    assert isinstance(scored, torch.Tensor)
    return scored


def verdict(images: torch.Tensor) -> Row:
    seen = named(animals.Judge.load(), images)[:, 0] == animals.ANIMALS.index("fox")  # (N,)
    return {"reward": rewards(images).mean().item(), "fox": seen.float().mean().item()}


# ------------------------------------------------------------------------------------------- training
def train(run: Row) -> list[Row]:
    """Train a policy; return what the test says of it every other epoch."""
    (algorithm, settings), pipeline = METHODS[run["method"]], load_tiny_zoo()
    tested, epochs = list[torch.Tensor](), (*range(0, EPOCHS, 2), EPOCHS)

    def test() -> Row:
        tested.append(paint(pipeline, TEST))
        return verdict(tested[-1])

    task = (jpeg_compressibility(), lambda: (PROMPT, {}), pipeline)
    with common.trainer_of(task, SETTINGS, settings, {"seed": run["seed"]}, algorithm=algorithm()) as trainer:
        rows = common.readings(trainer, epochs, test)
    for epoch in KEPT.get(run["method"], ()) if run["seed"] == 0 else ():
        name = f"{run['method'].replace(' ', '_')}_{epoch:02d}"
        common.save_grid(tested[epochs.index(epoch)][:SHOWN], SHOWN, RESULT.with_suffix("") / f"{name}.png")
    return [{"queries": row["epoch"] * SETTINGS["sample_batch_size"], **row} for row in rows]


# ----------------------------------------------------------------------------------- without training
def best_of(count: int) -> list[Row]:
    """Draw each test picture so many times, and keep the smallest file."""
    draws = [paint(load_tiny_zoo(), TEST + n) for n in range(count)]  # (N, 3, 64, 64) each
    return [verdict(common.best_draws(draws, [rewards(images) for images in draws]))]


def more_words() -> list[Row]:
    """Name the artist and the ground with the smallest files on other noise."""
    said = itertools.product(animals.ARTISTS, animals.GROUND_NAMES)
    prompts = [animals.make_prompt("fox", *words) for words in said]
    pipeline = load_tiny_zoo()
    scores = [rewards(paint(pipeline, VALIDATION, prompt, 16)).mean().item() for prompt in prompts]
    best = prompts[max(range(len(prompts)), key=scores.__getitem__)]
    return [{"prompt": best, **verdict(paint(pipeline, TEST, best))}]


WITHOUT: dict[str, Callable[[], list[Row]]] = {
    f"best of {count}": functools.partial(best_of, count) for count in (2, 4, 8)
}
WITHOUT["more words"] = more_words


# ------------------------------------------------------------------------------ an epoch in pictures
def draw_loop() -> None:
    """Keep the highest, the median and the lowest reward of an untrained group, with all that led there.

    loop.png has a row for each: x_T to x_0 as three of the latent's four channels, and the picture.
    """
    settings = SamplingSettings(num_inference_steps=STEPS, guidance_scale=1.0, group_size=8)
    generator = torch.Generator().manual_seed(0)
    images, trajectory = text2img_rollout(load_tiny_zoo(), [PROMPT] * 64, settings, generator=generator)
    scored = rewards(images)  # (64,)
    advantages = normalize_groups(scored, 8)
    order = scored[:8].argsort(descending=True).tolist()  # of the first group
    shown, rows = [order[0], order[4], order[7]], []
    for n in shown:
        colours = (trajectory.latents[n, :, :3] / 6 + 0.5).clamp(0, 1)  # (T + 1, 3, 16, 16)
        tiles = colours.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
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
    runs = common.product(seed=SEEDS, method=METHODS) + common.product(method=WITHOUT, seed=(0,))
    common.run_all(measure, runs, COLUMNS, RESULT, common.parse(__doc__).processes)
    common.quiet_thread()
    draw_loop()

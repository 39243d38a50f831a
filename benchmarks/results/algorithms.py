"""RWR, sparse RWR, DDPO-SF and DDPO-IS at equal reward queries, and what else lesson 06 varies.

`python -m benchmarks.results.algorithms` trains tiny-sd once per (experiment, variant, reward, seed) and
appends a row per epoch to algorithms.csv, run by run; what the file already holds is not run again. Then it
samples one epoch for lesson 06's picture of the loop, into algorithms/loop.png and loop.json.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, quiet_thread, run_all, scratch_config, write_json
from ddpo_lessons.advantages import normalize
from ddpo_lessons.algorithms.ddpo import DDPO, replay, share_predictions
from ddpo_lessons.algorithms.rwr import RWR
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import PromptFunction
from ddpo_lessons.data.prompts import PromptSampler, digit_world_prompts
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.ddim import gaussian_kl
from ddpo_lessons.families import family_of
from ddpo_lessons.rewards import RewardFunction, colourfulness, jpeg_compressibility, prompt_alignment
from ddpo_lessons.rollout import Trajectory, sample_seed, text2img_rollout
from ddpo_lessons.tiny import load_judge, load_reward_model, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import accuracy
from ddpo_lessons.trainer import Runner

PICTURES = Path(__file__).parent / "algorithms"  # what `Run.snapshots` keeps
COLUMNS = (
    "experiment", "variant", "reward", "seed", "learning_rate", "epoch", "queries", "reward_mean", "judge",
    "test_reward", "test_judge", "left_out_reward", "left_out_judge", "distance", "test_kl",
)  # fmt: skip
SEEDS, TEST_IMAGES = (0, 1, 2), 32
SETTINGS: Row = {
    "sample_num_steps": 5,  # four actions; the fifth step of this schedule has no noise
    "sample_guidance_scale": 1.0,
    "sample_batch_size": 64,
    "sample_num_batches_per_epoch": 1,
    "train_batch_size": 16,  # four optimizer steps
    "train_clip_range": 5e-3,
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
    "image_grid_freq": 0,
}


class OnlyPraise(DDPO):
    """DDPO without negative advantages (lesson 06, exercise 3)."""

    name = "only praise"

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        """Return DDPO's advantages where they are above 0, and 0 elsewhere."""
        return super().advantages(rewards, keys).clamp(min=0)


@dataclass(frozen=True)
class Run:
    """One training run: what it is called, and what it changes."""

    experiment: str
    variant: str
    reward: str
    seed: int
    learning_rate: float
    config: Row = field(default_factory=dict)
    algorithm: Callable[[], Any] = DDPO
    prompts: str = ""  # "" for the reward's own, "few" for eight of unequal difficulty
    epochs: int = 8
    test_guidance: float | None = None  # test with this scale too
    snapshots: tuple[int, ...] = ()  # after these epochs the first test pictures are kept


NOT_CLIPPED: Row = {"train_clip_range": DDPOConfig.train_clip_range}
METHODS: dict[str, Row] = {
    "RWR": {"algorithm": partial(RWR, temperature=0.2), "config": NOT_CLIPPED},
    "sparse RWR": {"algorithm": partial(RWR, top_share=0.1), "config": NOT_CLIPPED},
    "DDPO-SF": {"config": {"train_batch_size": 64}},  # one step on all samples: the ratio is 1
    "DDPO-IS": {},
}
# With these rates DDPO-IS did well on seed 100 for six and ten epochs; the other methods' are not tuned.
CHOSEN = {"compressibility": 1e-2, "alignment": 3e-3, "colourfulness": 3e-3}
REWARDS: dict[str, Callable[[], RewardFunction]] = {
    "compressibility": jpeg_compressibility,
    "alignment": lambda: prompt_alignment(load_reward_model()),
    "colourfulness": colourfulness,
}
# (guidance, learning rate), the most telling first
GUIDANCE_RATES = ((3.0, 1e-2), (3.0, 3e-3), (1.0, 3e-3), (3.0, 3e-2), (1.0, 1e-2), (3.0, 1e-3))


def prompts_of(run: Run, split: str, seed: int) -> PromptFunction:
    """Return the prompt function of a run; for alignment it asks for fog: else nothing is to gain."""
    if run.prompts == "few":
        return few_prompts(seed)
    return digit_world_prompts(seed, split, "foggy" if run.reward == "alignment" else None)


def few_prompts(seed: int) -> PromptSampler:
    """Eight prompts, four of them without any colour, in which colourfulness can hardly rise."""
    pairs = [("red", "blue"), ("yellow", "green"), ("black", "white"), ("white", "black")]
    drawn = [(digit, *pair) for pair, digits in zip(pairs, ((3, 5), (2, 7), (4, 8), (1, 6)), strict=True)
             for digit in digits]  # fmt: skip

    def draw(generator: Any) -> tuple[str, Row]:
        digit, ink, background = generator.choice(drawn)
        metadata = {"digit": digit, "ink": ink, "background": background}
        return world.make_prompt(digit, ink, background), metadata

    return PromptSampler(draw, seed)


def draw_prompts(prompt_function: PromptFunction, count: int) -> tuple[list[str], list[Row]]:
    """Call a prompt function so many times."""
    drawn = [prompt_function() for _ in range(count)]
    return [prompt for prompt, _ in drawn], [metadata for _, metadata in drawn]


def paint(pipeline: Any, prompts: list[str], guidance: float, generator: Any) -> tuple[Any, Trajectory]:
    """Roll out with SETTINGS' number of steps."""
    settings = {"num_inference_steps": SETTINGS["sample_num_steps"], "guidance_scale": guidance}
    return text2img_rollout(pipeline, prompts, **settings, generator=generator)


def judge_accuracy(judge: Any, images: torch.Tensor, metadata: Sequence[Row]) -> float:
    """Return the share of images whose digit the judge reads as the prompt says."""
    return accuracy(judge, images, torch.tensor([m["digit"] for m in metadata]))


@torch.no_grad()
def kl_to_start(pipeline: Any, trajectory: Trajectory) -> float:
    """Return the KL from a policy to untrained tiny-sd, averaged over the actions of a trajectory."""
    rows, columns = torch.meshgrid(*map(torch.arange, trajectory.log_probs.shape), indexing="ij")
    pairs = share_predictions({"rows": rows.flatten(), "columns": columns.flatten()}, trajectory.group_size)
    family = family_of(pipeline)
    now, start = (replay(family, p.unet, trajectory, pairs, "mean") for p in (pipeline, load_tiny_sd()))
    return gaussian_kl(now, start).mean().item()


def test(
    run: Run, pipeline: Any, judge: Any, split: str, guidance: float
) -> tuple[torch.Tensor, Trajectory, float, float]:
    """Sample test prompts from fixed noise; return images, trajectory, mean reward, the judge's accuracy."""
    prompts, metadata = draw_prompts(prompts_of(run, split, seed=1_000), TEST_IMAGES)
    generators = [torch.Generator().manual_seed(sample_seed(1_000, n)) for n in range(TEST_IMAGES)]
    images, trajectory = paint(pipeline, prompts, guidance, generators)
    returned = REWARDS[run.reward]()(images, prompts, metadata)
    rewards = returned[0] if isinstance(returned, tuple) else returned
    return images, trajectory, rewards.mean().item(), judge_accuracy(judge, images, metadata)


def keep(run: Run, images: torch.Tensor, epoch: int) -> None:
    """Write the first ten test pictures side by side."""
    name = f"{run.experiment}_{run.variant}_{run.reward}_{epoch:02d}.png".replace(" ", "-")
    save(torch.cat(list(images[:10]), dim=2), name)  # (3, 32, 320)


def save(image: torch.Tensor, name: str) -> None:
    """Write an image (3, H, W) beside the others."""
    PICTURES.mkdir(exist_ok=True)
    world.to_pil(image).save(PICTURES / name)


def train(run: Run) -> list[Row]:
    """Train one run and return its rows."""
    pipeline, judge, read, rows = load_tiny_sd(), load_judge(), list[float](), list[Row]()
    guidance = {**SETTINGS, **run.config}["sample_guidance_scale"]
    before, *_ = test(run, pipeline, judge, "seen", guidance)
    if run.snapshots:
        keep(run, before, 0)

    def hook(batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        (images, _, metadata, *_), *_ = batches
        read.append(judge_accuracy(judge, images, metadata))

    with scratch_config(SETTINGS, run.config, seed=run.seed, train_learning_rate=run.learning_rate) as config:
        task = (REWARDS[run.reward](), prompts_of(run, "seen", run.seed), pipeline, hook)
        trainer = Runner(config, *task, algorithm=run.algorithm(), start=FromNoise())
        for epoch in range(run.epochs):
            metrics = trainer.step(epoch)
            row = {name: getattr(run, name) for name in COLUMNS[:5]}
            row |= {"epoch": metrics["epoch"], "reward_mean": metrics["reward_mean"]}
            rows.append({**row, "queries": metrics["samples_seen"], "judge": read[-1]})
            if epoch + 1 in run.snapshots:
                keep(run, test(run, pipeline, judge, "seen", guidance)[0], epoch + 1)
    rows[-1] |= end_readings(run, pipeline, judge, guidance, before)
    if run.test_guidance:
        *_, reward, share = test(run, pipeline, judge, "seen", run.test_guidance)
        row = {name: value for name, value in rows[-1].items() if name in COLUMNS[:9]}
        rows.append({**row, "variant": f"{run.variant}, tested at {run.test_guidance:g}"})
        rows[-1] |= {"test_reward": reward, "test_judge": share}
    return rows


def end_readings(run: Run, pipeline: Any, judge: Any, guidance: float, before: torch.Tensor) -> Row:
    """Return what test prompts say of a trained policy, and left-out prompts where there are some."""
    after, trajectory, reward, share = test(run, pipeline, judge, "seen", guidance)
    found: Row = {"test_reward": reward, "test_judge": share}
    found |= {"distance": (after - before).square().mean().item()}
    found |= {"test_kl": kl_to_start(pipeline, trajectory)}
    if run.prompts != "few":
        *_, reward, share = test(run, pipeline, judge, "left_out", guidance)
        found |= {"left_out_reward": reward, "left_out_judge": share}
    return found


# ------------------------------------------------------------------------------------- what is run
def methods() -> list[Run]:
    """The four methods at equal queries; all methods of a seed before the next seed."""
    compared = itertools.product(SEEDS, ("compressibility", "alignment"), METHODS)
    return [Run("methods", name, reward, seed, CHOSEN[reward], **METHODS[name])
            for seed, reward, name in compared]  # fmt: skip


def statistics() -> list[Run]:
    """Advantages of all prompts, and of each prompt by itself."""
    tracking = {"per_prompt_stat_tracking": True, "per_prompt_stat_tracking_buffer_size": 16}
    tracking |= {"per_prompt_stat_tracking_min_count": 8}
    rate, few = CHOSEN["colourfulness"], {"prompts": "few", "epochs": 15}
    return [
        Run("statistics", name, "colourfulness", seed, rate, config, **few)
        for seed in SEEDS
        for name, config in (("global", {}), ("per prompt", tracking))
    ]


def guidance() -> list[Run]:
    """Trained at scale 1 and tested at 3 too; learning rates."""
    runs = [Run("guidance", "trained at 1", "alignment", 0, 3e-3, epochs=15, test_guidance=3.0)]
    for seed, (scale, rate) in itertools.product(SEEDS, GUIDANCE_RATES):
        config = {"sample_guidance_scale": scale}
        runs.append(Run("guidance", f"at {scale:g}", "alignment", seed, rate, config))
    return runs


PRICES = (0.0, 0.1, 1.0, 10.0)
OTHERS = [Run("kl", f"{p:g}", "compressibility", 0, 1e-2, {"train_kl_coefficient": p}) for p in PRICES]
OTHERS += [Run("only praise", "DDPO-IS", "alignment", seed, 3e-3, algorithm=OnlyPraise) for seed in SEEDS]
OTHERS += [Run("pictures", "DDPO-IS", "alignment", 0, 3e-3, epochs=12, snapshots=(4, 8, 12))]


# ------------------------------------------------------------------------------ an epoch in pictures
def tiles(latents: torch.Tensor) -> torch.Tensor:
    """Turn latents (T+1, 4, 8, 8) into pictures (T+1, 3, 32, 32): three channels as colours, from -3 to 3."""
    colours = (latents[:, :3] / 6 + 0.5).clamp(0, 1)
    return colours.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)


def draw_loop() -> None:
    """Keep the samples of an untrained epoch with the highest, the median and the lowest reward.

    loop.png has a row for each (x_T to x_0 as three of the latent's four channels, and the picture).
    """
    prompts, metadata = draw_prompts(digit_world_prompts(0, damage="foggy"), SETTINGS["sample_batch_size"])
    images, trajectory = paint(load_tiny_sd(), prompts, 1.0, torch.Generator().manual_seed(0))
    rewards = prompt_alignment(load_reward_model())(images, prompts, metadata)[0]  # (64,)
    told = {"reward": rewards, "advantage": normalize(rewards)}
    order = rewards.argsort(descending=True).tolist()
    shown = [order[0], order[len(order) // 2], order[-1]]
    rows = [torch.cat([*tiles(trajectory.latents[n]), images[n]], dim=2) for n in shown]  # (3, 32, 192) each
    save(torch.cat(rows, dim=1), "loop.png")
    numbers = [{"prompt": prompts[n], **{k: round(v[n].item(), 2) for k, v in told.items()}} for n in shown]
    epoch = {"samples": len(prompts), "mean": round(rewards.mean().item(), 2)}
    write_json(PICTURES / "loop.json", {**epoch, "std": round(rewards.std().item(), 2), "shown": numbers})


def main() -> None:
    """Run the experiments that were asked for."""
    runs = [*methods(), *statistics(), *guidance(), *OTHERS]
    arguments = parse(__doc__, experiments=list(dict.fromkeys(run.experiment for run in runs)))
    chosen = [run for run in runs if run.experiment in arguments.experiments]
    run_all(train, chosen, COLUMNS, 5, Path(__file__).with_suffix(".csv"), arguments.processes)
    quiet_thread()
    draw_loop()


if __name__ == "__main__":
    main()

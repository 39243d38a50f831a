"""RWR, sparse RWR, DDPO-SF and DDPO-IS at equal reward queries, and what else lesson 06 varies.

`python -m benchmarks.results.algorithms` trains tiny-sd once per (experiment, variant, reward, seed) and
appends a row per epoch to algorithms.csv, run by run; what the file already holds is not run again.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.common import parse, run_all
from ddpo_lessons.algorithms.ddpo import DDPO, replay, share_predictions
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import PromptFunction
from ddpo_lessons.data.prompts import PromptSampler, digit_world_prompts
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.ddim import gaussian_kl
from ddpo_lessons.families import family_of
from ddpo_lessons.rewards import (
    RewardFunction,
    colourfulness,
    jpeg_compressibility,
    jpeg_incompressibility,
    prompt_alignment,
)
from ddpo_lessons.rollout import Trajectory, sample_seed, text2img_rollout
from ddpo_lessons.run.runlog import read_metrics
from ddpo_lessons.tiny import load_judge, load_reward_model, load_tiny_sd, world
from ddpo_lessons.trainer import DDPOTrainer, Runner, RWRTrainer

RESULT = Path(__file__).parent / "algorithms.csv"
PICTURES = Path(__file__).parent / "algorithms"  # what `Run.snapshots` keeps
COLUMNS = (
    "experiment", "variant", "reward", "seed", "learning_rate", "epoch", "queries", "reward_mean",
    "reward_std", "judge", "kl_reference", "clip_fraction", "seconds", "test_reward", "test_judge",
    "left_out_reward", "left_out_judge", "distance", "test_kl",
)  # fmt: skip
EPOCHS = 8
SEEDS = (0, 1, 2)
TEST_IMAGES = 32
SETTINGS: dict[str, Any] = {
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


@dataclass(frozen=True)
class Run:
    """One training run: what it is called, and what it changes."""

    experiment: str
    variant: str
    reward: str
    seed: int
    learning_rate: float
    config: dict[str, Any] = field(default_factory=dict)
    rwr: dict[str, Any] | None = None  # arguments of RWRTrainer; None for DDPO
    algorithm: Callable[[], DDPO] | None = None  # of its own
    prompts: str = ""  # "" for the reward's own, "few" for eight of unequal difficulty
    epochs: int = EPOCHS
    test_guidance: tuple[float, ...] = ()
    snapshots: tuple[int, ...] = ()  # after these epochs the first test pictures are kept

    @property
    def key(self) -> tuple[str, ...]:
        """What names the run in the CSV."""
        return (self.experiment, self.variant, self.reward, str(self.seed), f"{self.learning_rate:g}")


class OnlyPraise(DDPO):
    """DDPO without negative advantages (lesson 06, exercise 3)."""

    name = "only praise"

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        """Return DDPO's advantages where they are above 0, and 0 elsewhere."""
        return super().advantages(rewards, keys).clamp(min=0)


METHODS: dict[str, dict[str, Any]] = {
    "RWR": {"rwr": {"temperature": 0.2}},
    "sparse RWR": {"rwr": {"top_share": 0.1}},
    "DDPO-SF": {"config": {"train_batch_size": 64}},  # one step on all samples: the ratio is 1
    "DDPO-IS": {},
}
# With these rates DDPO-IS did well on seed 100 for six and ten epochs; the other methods' are not tuned.
CHOSEN = {"compressibility": 1e-2, "incompressibility": 1e-2, "alignment": 3e-3, "colourfulness": 3e-3}
REWARDS: dict[str, Callable[[], RewardFunction]] = {
    "compressibility": jpeg_compressibility,
    "incompressibility": jpeg_incompressibility,
    "alignment": lambda: prompt_alignment(load_reward_model()),
    "colourfulness": colourfulness,
}
COMPARED = ("compressibility", "alignment")
# tiny-sd draws what it is asked for; in fog there is something left to gain.
DAMAGE = {"alignment": "foggy"}
KL_COEFFICIENTS = (0.0, 0.1, 1.0, 10.0)
NAMES = ["methods", "kl", "statistics", "guidance", "larger files", "only praise", "pictures"]
# (guidance, learning rate), the most telling first
GUIDANCE_RATES = ((3.0, 1e-2), (3.0, 3e-3), (1.0, 3e-3), (3.0, 3e-2), (1.0, 1e-2), (3.0, 1e-3))


def prompts_of(run: Run, split: str, seed: int) -> PromptFunction:
    """Return the prompt function of a run."""
    if run.prompts == "few":
        return few_prompts(seed)
    return digit_world_prompts(seed, split, DAMAGE.get(run.reward))


def few_prompts(seed: int) -> PromptSampler:
    """Eight prompts, four of them without any colour, in which colourfulness can hardly rise."""
    pairs = [("red", "blue"), ("yellow", "green"), ("black", "white"), ("white", "black")]
    drawn = [(digit, *pair) for pair, digits in zip(pairs, ((3, 5), (2, 7), (4, 8), (1, 6)), strict=True)
             for digit in digits]  # fmt: skip

    def draw(generator: Any) -> tuple[str, dict[str, Any]]:
        digit, ink, background = generator.choice(drawn)
        metadata = {"digit": digit, "ink": ink, "background": background}
        return world.make_prompt(digit, ink, background), metadata

    return PromptSampler(draw, seed)


@torch.no_grad()
def judge_accuracy(judge: Any, images: torch.Tensor, metadata: Iterable[dict[str, Any]]) -> float:
    """Return the share of images whose digit the judge reads as the prompt says."""
    digits = torch.tensor([m["digit"] for m in metadata])
    return (judge(images).argmax(dim=1) == digits).float().mean().item()


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
) -> tuple[Any, Trajectory, float, float]:
    """Sample test prompts from fixed noise; return images, trajectory, mean reward, the judge's accuracy."""
    prompts, metadata = draw_prompts(prompts_of(run, split, seed=1_000), TEST_IMAGES)
    generators = [torch.Generator().manual_seed(sample_seed(1_000, n)) for n in range(TEST_IMAGES)]
    images, trajectory = text2img_rollout(
        pipeline,
        prompts,
        num_inference_steps=SETTINGS["sample_num_steps"],
        guidance_scale=guidance,
        generator=generators,
    )
    returned = REWARDS[run.reward]()(images, prompts, metadata)
    rewards = returned[0] if isinstance(returned, tuple) else returned
    return images, trajectory, rewards.mean().item(), judge_accuracy(judge, images, metadata)


def draw_prompts(prompt_function: PromptFunction, count: int) -> tuple[list[str], list[dict[str, Any]]]:
    """Call a prompt function so many times."""
    drawn = [prompt_function() for _ in range(count)]
    return [prompt for prompt, _ in drawn], [metadata for _, metadata in drawn]


def keep(run: Run, images: torch.Tensor, epoch: int) -> None:
    """Write the first ten test pictures side by side."""
    PICTURES.mkdir(exist_ok=True)
    row = torch.cat(list(images[:10]), dim=2).permute(1, 2, 0)  # (32, 320, 3)
    name = f"{run.experiment}_{run.variant}_{run.reward}_{epoch:02d}.png".replace(" ", "-")
    Image.fromarray((row * 255).round().byte().numpy()).save(PICTURES / name)


def train(run: Run) -> list[dict[str, Any]]:
    """Train one run and return its rows."""
    torch.set_num_threads(1)
    pipeline, judge = load_tiny_sd(), load_judge()
    guidance = run.config.get("sample_guidance_scale", SETTINGS["sample_guidance_scale"])
    before = test(run, pipeline, judge, "seen", guidance)[0]
    if run.snapshots:
        keep(run, before, 0)
    read: list[float] = []

    def hook(batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        (images, _, metadata, *_), *_ = batches
        read.append(judge_accuracy(judge, images, metadata))

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = DDPOConfig(
            **{**SETTINGS, **run.config},
            num_epochs=run.epochs,
            save_freq=run.epochs,
            seed=run.seed,
            train_learning_rate=run.learning_rate,
            output_dir=folder,
            overwrite=True,
        )
        arguments = (config, REWARDS[run.reward](), prompts_of(run, "seen", run.seed), pipeline, hook)
        trainer: Runner = RWRTrainer(*arguments, **run.rwr) if run.rwr else DDPOTrainer(*arguments)
        if run.algorithm:
            trainer = Runner(*arguments, algorithm=run.algorithm(), start=FromNoise())
        started = time.perf_counter()
        for epoch in range(run.epochs):
            metrics = trainer.step(epoch)
            steps = [r for r in read_metrics(folder, "step") if r["epoch"] == epoch + 1]
            rows.append(
                dict(zip(COLUMNS[:5], run.key, strict=True))
                | {name: metrics[name] for name in ("epoch", "reward_mean", "reward_std")}
                | {"queries": metrics["samples_seen"], "judge": read[-1]}
                | {name: _mean(steps, name) for name in ("kl_reference", "clip_fraction")}
                | {"seconds": time.perf_counter() - started}
            )
            if epoch + 1 in run.snapshots:
                keep(run, test(run, pipeline, judge, "seen", guidance)[0], epoch + 1)
        after, trajectory, reward, accuracy = test(run, pipeline, judge, "seen", guidance)
        rows[-1] |= {"test_reward": reward, "test_judge": accuracy}
        rows[-1]["distance"] = (after - before).square().mean().item()
        rows[-1]["test_kl"] = kl_to_start(pipeline, trajectory)
        if run.prompts != "few":
            *_, reward, accuracy = test(run, pipeline, judge, "left_out", guidance)
            rows[-1] |= {"left_out_reward": reward, "left_out_judge": accuracy}
        for other in run.test_guidance:
            *_, reward, accuracy = test(run, pipeline, judge, "seen", other)
            rows.append({**rows[-1], "variant": f"{run.variant}, tested at {other:g}"})
            rows[-1] |= {"test_reward": reward, "test_judge": accuracy}
            rows[-1] |= dict.fromkeys(("distance", "test_kl", "left_out_reward", "left_out_judge"), "")
    return rows


def _mean(records: list[dict[str, Any]], name: str) -> float | str:
    values = [record[name] for record in records if name in record]
    return sum(values) / len(values) if values else ""


# ------------------------------------------------------------------------------------- what is run
def comparison_runs() -> list[Run]:
    """The four methods at equal queries; all methods of a seed before the next seed."""
    return [
        Run("methods", name, reward, seed, CHOSEN[reward], **METHODS[name])
        for seed, reward, name in itertools.product(SEEDS, COMPARED, METHODS)
    ]


def further_runs() -> list[Run]:
    """KL to the reference, statistics per prompt, guidance, larger files, and the pictures of one run."""
    tracking = {
        "per_prompt_stat_tracking": True,
        "per_prompt_stat_tracking_buffer_size": 16,
        "per_prompt_stat_tracking_min_count": 8,
    }
    runs = [
        Run("kl", f"{c:g}", "compressibility", 0, 1e-2, {"train_kl_coefficient": c}) for c in KL_COEFFICIENTS
    ]
    rate, few = CHOSEN["colourfulness"], {"prompts": "few", "epochs": 15}
    for seed in SEEDS:
        for name, config in (("global", {}), ("per prompt", tracking)):
            runs.append(Run("statistics", name, "colourfulness", seed, rate, config, **few))
    for guidance, other in ((1.0, 3.0), (3.0, 1.0)):
        what, config = ("guidance", f"trained at {guidance:g}"), {"sample_guidance_scale": guidance}
        long = {"epochs": 15, "test_guidance": (other,)}
        runs.append(Run(*what, "alignment", 0, CHOSEN["alignment"], config, **long))
    for seed, (guidance, rate) in itertools.product(SEEDS, GUIDANCE_RATES):
        config = {"sample_guidance_scale": guidance}
        runs.append(Run("guidance", f"at {guidance:g}", "alignment", seed, rate, config))
    for seed in SEEDS:  # what the prompt explains is taken out of the advantages
        config = {"sample_guidance_scale": 3.0, "sample_group_size": 8}
        runs.append(Run("guidance", "at 3, groups of 8", "alignment", seed, CHOSEN["alignment"], config))
    runs += [
        Run("larger files", "DDPO-IS", "incompressibility", s, CHOSEN["incompressibility"]) for s in SEEDS
    ]
    runs += [
        Run("only praise", "DDPO-IS", "alignment", seed, CHOSEN["alignment"], algorithm=OnlyPraise)
        for seed in SEEDS
    ]
    kept = {"epochs": 12, "snapshots": (4, 8, 12)}
    runs.append(Run("pictures", "DDPO-IS", "alignment", 0, CHOSEN["alignment"], **kept))
    return runs


def main() -> None:
    """Run the experiments that were asked for."""
    arguments = parse(__doc__, experiments=NAMES)
    runs = [r for r in comparison_runs() + further_runs() if r.experiment in arguments.experiments]
    run_all(train, runs, COLUMNS, 5, RESULT, arguments.processes)


if __name__ == "__main__":
    main()

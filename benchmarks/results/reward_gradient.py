"""Lesson 11: how far to follow a reward's gradient: `python -m benchmarks.results.reward_gradient`.

tiny-sd3 generates the digits in colors that its pre-training left out, and the reward is `prompt_alignment`.
DRaFT-K through the last 3 or all 10 steps, ReFL, and Flow-GRPO, which uses only the reward's value, train on
512 scored images each, with five seeds. reward_gradient.csv has a row per evaluation, after so many reward
evaluations (`queries`): 150 images, three of each prompt, always from the same noise. Diversity is the mean
of `apart` over images of one prompt. The Fréchet distances, in the features of either evaluator's last
layer, are to handwriting of the training split in the same colors. No training uses them.

reward_gradient_rates.csv has the same for the other learning rates, without Flow-GRPO.
reward_gradient_noises.csv has policies that are evaluated from other noise: DRaFT-3 after 256 reward
evaluations, and the untrained policy with guidance.

reward_gradient_points.csv has what needs no training, on the same prompts: handwriting of the test split
(three samples), guidance, four steps, and best-of-n by the reward. Learning rates come from
reward_gradient_search.csv, which has the highest reward after 256 evaluations, with seed 100 and validation
noise. reward_gradient/*.png are images of seed 0, a row per evaluation, and of points. Finished runs are
skipped. Twenty CPU minutes on one thread.
"""

import functools
import itertools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Row
from benchmarks.results.flow import OF_SD3
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.models import family_of
from ddpo_lessons.named_prompts import digit_world_prompts
from ddpo_lessons.rewards import prompt_alignment
from ddpo_lessons.worlds import digits, load_tiny_sd3
from ddpo_lessons.worlds.digits import score_prompts

RESULT = Path(__file__).with_suffix(".csv")
SEARCH, POINTS, OTHER_RATES, OTHER_NOISES = (
    RESULT.with_name(f"reward_gradient_{name}.csv") for name in ("search", "points", "rates", "noises")
)
IMAGES = RESULT.with_suffix("")  # a folder
MEASURES = ("reward", "judge", "second_judge", "diversity", "frechet", "second_frechet")
SEEDS, SEARCH_SEED, RATES, BATCH = (0, 1, 2, 3, 4), 100, (1e-3, 3e-3, 1e-2), 64
READINGS, SEARCHED = (64, 128, 256, 512), 256  # reward evaluations
NOISES, STEPS, GUIDANCE, BEST_OF = 3, 10, (1.5, 2.0, 4.0), (2, 3, 4)
HANDWRITTEN, CANDIDATES = 3, range(10, 15)  # draws of handwriting, and of other noise
COLUMNS = ("method", "learning_rate", "seed", "queries", *MEASURES)
SETTINGS: Row = {
    "sample_num_steps": STEPS, "sample_guidance_scale": 1.0, "sample_batch_size": BATCH,
    "sample_num_batches_per_epoch": 1, "train_batch_size": 16, "train_lora_rank": 16,
    "train_lora_alpha": 16, "train_lora_target_modules": OF_SD3, "image_grid_freq": 0, "num_epochs": 8,
    "accelerator_kwargs": {"cpu": True},
}  # fmt: skip
OF_GROUPS: Row = {"sample_eta": 0.7, "sample_group_size": 8, "train_clip_range": 1e-2}
# Each method: the algorithm, its changes to the config, and the method whose learning rate it uses.
METHODS: dict[str, tuple[str, Row, str]] = {
    "DRaFT-3": ("draft:last_steps=3", {}, "DRaFT-3"),
    "Flow-GRPO": ("flow_grpo:window=3", OF_GROUPS, "Flow-GRPO"),
    "DRaFT-10": ("draft:last_steps=10", {}, "DRaFT-3"),
    "ReFL": ("refl:last_steps=5", {}, "DRaFT-3"),
}


def left_out() -> list[digits.Description]:
    """Return the descriptions of the fifty prompts whose digit and ink pre-training left out."""
    pairs = itertools.product(digits.LEFT_OUT, digits.COLOR_NAMES)
    return [
        digits.Description(digit, ink, background) for (digit, ink), background in pairs if background != ink
    ]


class Evaluation:
    """Evaluates a policy on 150 images, always with the same prompts and noise."""

    def __init__(self, split: str) -> None:
        self.asked = [description for description in left_out() for _ in range(NOISES)]
        self.prompts = [digits.make_prompt(d.digit, d.ink, d.background) for d in self.asked]
        self.noise_seed = {"validation": 20_001, "test": 20_002}[split]
        self.reward, self.judges = prompt_alignment(), (digits.Judge.load(), digits.SecondJudge.load())
        named = [[d.digit, *digits.color_indices([d])[0].tolist()] for d in self.asked]
        self.truth = torch.tensor(named)  # (150, 3)
        known = torch.cat([handwritten(self.asked, "train", 1000 + n) for n in range(8)])  # (1200, 3, 32, 32)
        self.known = self.features(known)

    def images(self, pipeline: Any, steps: int = STEPS, guidance: float = 1.0, candidate: int = 0) -> Any:
        """Sample by the ODE, (150, 3, 32, 32); another candidate has other noise."""
        family, generator = family_of(pipeline), torch.Generator().manual_seed(self.noise_seed + candidate)
        noise = torch.randn(len(self.asked), *family.latents_shape(), generator=generator)
        return common.denoised(family, noise, self.prompts, family.schedule(steps, eta=0.0), guidance)

    @torch.no_grad()
    def scores(self, images: torch.Tensor) -> torch.Tensor:
        return self.reward(images, self.prompts, [{}] * len(self.prompts))[0]  # (150,)

    @torch.no_grad()
    def features(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features of each evaluator's last layer, (N, 64) each."""
        judge, second = self.judges
        whole = judge.features(images - 0.5).flatten(1)
        return judge.head[:2](whole), second.features(images - 0.5).mean((2, 3))

    @torch.no_grad()
    def measure(self, images: torch.Tensor) -> Row:
        judge, second = self.judges
        seen = torch.stack([logits.argmax(1) for logits in second(images)], dim=1)  # (150, 3)
        by_prompt = images.unflatten(0, (-1, NOISES))
        pairs = itertools.combinations(by_prompt.unbind(1), 2)
        near = [frechet(*two) for two in zip(self.features(images), self.known, strict=True)]
        values = (
            self.scores(images).mean().item(), score_prompts(judge, images, self.asked)["all three"],
            (seen == self.truth).all(1).float().mean().item(),
            torch.stack([apart(*pair) for pair in pairs]).mean().item(), *near,
        )  # fmt: skip
        return dict(zip(MEASURES, values, strict=True))


make_evaluation = functools.cache(Evaluation)


def apart(images: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each image's difference from the other, (N,)."""
    return (images - others).square().mean((1, 2, 3)).sqrt()


def frechet(features: torch.Tensor, others: torch.Tensor) -> float:
    """Return the squared Fréchet distance of two Gaussians that fit features (N, D) and others (M, D).

    |μ - μ'|² + tr(C + C' - 2 (C C')^½), as Heusel et al. 2017 (arXiv 1706.08500) have it.
    """
    means, covariances = zip(
        *((x.mean(0), x.T.cov()) for x in (features.double(), others.double())), strict=True
    )
    root = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    gap = (means[0] - means[1]).square().sum()
    return (gap + covariances[0].trace() + covariances[1].trace() - 2 * root).item()


def handwritten(asked: list[digits.Description], split: str, seed: int) -> torch.Tensor:
    """Render handwriting of a split, each time other digits: (N, 3, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    bitmaps, labels = digits.handwriting(split)
    drawn, wanted = [], torch.tensor([d.digit for d in asked])
    for start in range(0, len(asked), NOISES):
        pool = (labels == wanted[start]).nonzero()[:, 0]
        drawn.append(pool[torch.randperm(len(pool), generator=generator)[:NOISES]])
    inks, backgrounds = digits.two_colors(asked)
    return digits.render(
        bitmaps[torch.cat(drawn)], inks, backgrounds, digits.placements(len(asked), generator)
    )


def keep(name: str, rows: list[torch.Tensor]) -> None:
    """Save two images of one prompt of every digit, in rows."""
    shown = [5 * NOISES * digit + NOISES * (digit % 5) + n for digit in range(10) for n in range(2)]
    common.save_grid(torch.cat([images[shown] for images in rows]), 20, IMAGES / f"{name}.png")


def trainer_of(run: Row) -> AbstractContextManager[Any]:
    name, changes, _ = METHODS[run["method"]]
    own: Row = {"train_learning_rate": run["learning_rate"], "seed": run["seed"]}
    task = (prompt_alignment(), digit_world_prompts(run["seed"], "left_out"), load_tiny_sd3())
    return common.trainer_of(task, SETTINGS, changes, own, algorithm=make_algorithm(name))


def train(run: Row) -> list[Row]:
    searched = run["seed"] == SEARCH_SEED
    evaluation = make_evaluation("validation" if searched else "test")
    seen = list[torch.Tensor]()

    def measure() -> Row:
        seen.append(evaluation.images(trainer.pipeline))
        return evaluation.measure(seen[-1])

    with trainer_of(run) as trainer:
        at = (SEARCHED,) if searched else READINGS
        rows = common.readings(trainer, [queries // BATCH for queries in at], measure)
    if run["seed"] == SEEDS[0] and run["learning_rate"] == chosen(run["method"]):
        keep(run["method"], seen)
    return [{"queries": BATCH * row.pop("epoch"), **row} for row in rows]


def other_noises(run: Row) -> list[Row]:
    """Train, and evaluate the same policy from other draws of noise."""
    evaluation = make_evaluation("test")
    with trainer_of(run) as trainer:
        for epoch in range(run["queries"] // BATCH):
            trainer.step(epoch)
        drawn = {
            n: evaluation.images(trainer.pipeline, guidance=run["guidance"], candidate=n) for n in CANDIDATES
        }
    return [{"candidate": n, **evaluation.measure(images)} for n, images in drawn.items()]


def chosen(method: str) -> float:
    return common.best_rate(SEARCH, "reward", method=METHODS[method][2])


def points() -> list[Row]:
    evaluation, pipeline = make_evaluation("test"), load_tiny_sd3()
    candidates = torch.stack([evaluation.images(pipeline, candidate=n) for n in range(max(BEST_OF))])
    scores, numbers = (
        torch.stack([evaluation.scores(images) for images in candidates]),
        range(len(evaluation.asked)),
    )
    found = {"untrained": candidates[0]}
    found |= {f"guidance {scale:g}": evaluation.images(pipeline, guidance=scale) for scale in GUIDANCE}
    found |= {f"best-of-{n}": candidates[scores[:n].argmax(0), numbers] for n in BEST_OF}
    found["four steps"] = evaluation.images(pipeline, steps=4)
    found |= {f"handwriting {n}": handwritten(evaluation.asked, "test", n) for n in range(HANDWRITTEN)}
    keep("points", list(found.values()))
    return [{"point": name, **evaluation.measure(images)} for name, images in found.items()]


if __name__ == "__main__":
    processes = common.parse(__doc__).processes
    trials = common.product(method=("DRaFT-3", "Flow-GRPO"), learning_rate=RATES, seed=(SEARCH_SEED,))
    common.run_all(train, trials, COLUMNS, SEARCH, processes)
    runs = common.product(seed=SEEDS, method=METHODS)
    runs = [{**run, "learning_rate": chosen(run["method"])} for run in runs]
    common.run_all(train, runs, COLUMNS, RESULT, processes)
    gradients = [method for method in METHODS if method != "Flow-GRPO"]
    others = [rate for rate in RATES if rate != chosen("DRaFT-3")]
    runs = common.product(seed=SEEDS, learning_rate=others, method=gradients)
    common.run_all(train, runs, COLUMNS, OTHER_RATES, processes)
    policy: Row = {"method": "DRaFT-3", "learning_rate": chosen("DRaFT-3")}
    runs = [{**policy, "seed": seed, "queries": 256, "guidance": 1.0} for seed in SEEDS]
    runs += [{**policy, "seed": SEEDS[0], "queries": 0, "guidance": GUIDANCE[0]}]
    columns = (*runs[0], "candidate", *MEASURES)
    common.run_all(other_noises, runs, columns, OTHER_NOISES, processes)
    common.write_once(POINTS, points)

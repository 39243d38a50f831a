"""The tasks and the methods of equal_terms.py.

- "taste": tiny-zoo draws animals from noise. The reward is a rater that was fitted to a persona's choices
  (zoo/taste.py). Training never asks the judge whether the animal is still there, nor the persona herself.
  A method's one searched setting is the learning rate. Optimizer steps, rank and layers are the same for
  all, a sample has two trained actions or examples, and DRaFT and ReFL reach into the second half of the
  steps. All else are the package's defaults, and AWM's are its authors'.
- "few": the taste with a third of its queries, and a search of its own.
- "edit": the demo's task (lessons/demo.py). tiny-zoo frees an animal from confetti, and a sentence names the
  background. The reward is the demo's, and so are strength, steps, rank and layers; "judge" is the share of
  pictures that the judges find right in all. Searched and set as for the taste.
- "prompts", a check: tiny-sd3 draws the ten digit-ink pairs that its pre-training left out. The judge says
  whether digit, ink and background are right. It is a flow model, as Flow-GRPO needs. All methods have the
  rate 3e-3: a search over 1e-3, 3e-3 and 1e-2, after 768 of the 1,920 queries, had chosen it for all but
  CPS, branching and PEPG, and had chosen clip ranges, beta and K. RWR is also run at lower rates.
"""

import abc
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.common import Row, denoised, draw
from benchmarks.zoo import taste
from benchmarks.zoo.edit import by_program
from ddpo_lessons.data.prompts import animals as animal_prompts
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.lessons import demo
from ddpo_lessons.models import family_of
from ddpo_lessons.named_prompts import digit_world_prompts, hidden_animals
from ddpo_lessons.rewards import RewardFunction, animal_alignment, prompt_alignment
from ddpo_lessons.rewards.reward import split_info
from ddpo_lessons.worlds import animals, digits, load_tiny_sd3, load_tiny_zoo
from ddpo_lessons.worlds.digits import score_prompts
from ddpo_lessons.worlds.judges import named

BEST_OF = (2, 4, 8)
STRENGTHS = (0.45, 0.625, 0.75, 0.875)  # of edits by the untrained policy


# ---------------------------------------------------------------------------------------------- exams
class Exam(abc.ABC):
    """The same questions again and again, from the same noise."""

    reward: RewardFunction
    prompts: list[str]
    metadata: list[Row]
    noises: int  # with which everything is asked

    @abc.abstractmethod
    def draw(self, pipeline: Any, noise: int) -> torch.Tensor:
        """Return the policy's answers (N, 3, H, W) from noise of that number."""

    @abc.abstractmethod
    def judged(self, images: torch.Tensor) -> dict[str, float]:
        """Return what training does not see of images (N, 3, H, W): "judge", a share, and "second"."""

    @abc.abstractmethod
    def turned(self, pipeline: Any) -> dict[str, Callable[[int], torch.Tensor]]:
        """Return what a user of the untrained policy can do else: names, and answers from a noise."""

    def real(self) -> dict[str, torch.Tensor]:
        """Return what the world itself would answer, where that is known, by name: (n, N, 3, H, W)."""
        return {}

    def to_choose_from(self, pipeline: Any) -> Callable[[int], torch.Tensor]:
        """Return answers from a noise of which a user would keep the best."""
        return functools.partial(self.draw, pipeline)

    def images(self, pipeline: Any) -> torch.Tensor:
        """Return all answers, (noises, N, 3, H, W)."""
        return torch.stack([self.draw(pipeline, noise) for noise in range(self.noises)])

    @torch.no_grad()
    def rewards(self, images: torch.Tensor) -> torch.Tensor:
        """Return the rewards (N,) of images (N, 3, H, W)."""
        return split_info(self.reward(images, self.prompts, self.metadata))[0]

    def measure(self, images: torch.Tensor) -> Row:
        """Return mean reward, what the judges say, and diversity of images (noises, N, 3, H, W).

        Diversity, where there are several noises, is the standard deviation over those of a question, a mean
        over pixels in [0, 1].
        """
        judged = [self.judged(part) for part in images]
        seen = {name: sum(part[name] for part in judged) / len(judged) for name in judged[0]}
        reward = torch.stack([self.rewards(part) for part in images]).mean().item()
        spread = {"diversity": images.std(dim=0).mean().item()} if len(images) > 1 else {}
        return {"reward": reward, **seen, **spread}

    def best_of(self, draw: Callable[[int], torch.Tensor]) -> dict[int, torch.Tensor]:
        """For each n of BEST_OF keep the one of n answers with the highest reward, `noises` times."""
        draws = torch.stack([draw(noise) for noise in range(self.noises * max(BEST_OF))])  # (draws, N, ...)
        rewards = torch.stack([self.rewards(images) for images in draws])  # (draws, N)
        found = {}
        for count in BEST_OF:
            tries = rewards[: self.noises * count].view(self.noises, count, -1)  # (noises, n, N)
            best = tries.argmax(dim=1) + count * torch.arange(self.noises)[:, None]  # (noises, N) of draws
            found[count] = draws[best, torch.arange(rewards.shape[1])]
        return found


class TasteExam(Exam):
    """All 45 animals; the judge is asked for the animal, and the persona for her liking."""

    noises = 2

    def __init__(self, split: str) -> None:
        self.first_seed = {"validation": 20_000, "test": 10_000}[split]
        self.prompts = [animals.make_prompt(animal) for animal in animals.ANIMALS]
        self.metadata = [{} for _ in self.prompts]
        self.reward, self.judge = taste.rating(), animals.Judge.load()

    def draw(self, pipeline: Any, noise: int, prompts: Sequence[str] = ()) -> torch.Tensor:
        steps = TASKS["taste"].settings["sample_num_steps"]
        return draw(pipeline, prompts or self.prompts, self.first_seed + noise, num_inference_steps=steps)

    def judged(self, images: torch.Tensor) -> dict[str, float]:
        seen = (named(self.judge, images)[:, 0] == torch.arange(len(images))).double()
        return {"judge": seen.mean().item(), "second": taste.utility(images, self.judge).mean().item()}

    def turned(self, pipeline: Any) -> dict[str, Callable[[int], torch.Tensor]]:
        ways = {}
        for artist, background in itertools.product(animals.ARTISTS, animals.BACKGROUND_NAMES):
            prompts = [animals.make_prompt(animal, artist, background) for animal in animals.ANIMALS]
            ways[f'"by {artist} on {background}"'] = functools.partial(self.draw, pipeline, prompts=prompts)
        return ways


class EditExam(Exam):
    """The demo's edits; both judges are asked whether all is right, and no answer is asked for twice."""

    noises = 1

    def __init__(self, split: str) -> None:
        count, seed = {"validation": (100, demo.VALIDATION), "test": (200, demo.TEST)}[split]
        self.exam = demo.Exam(animals.draw_edits(count, seed))
        self.prompts, self.metadata = self.exam.edits.prompts, self.exam.edits.metadata
        self.reward = animal_alignment(background_weight=demo.BACKGROUND_WEIGHT)

    def draw(self, pipeline: Any, noise: int, setting: demo.Img2Img = demo.POLICY) -> torch.Tensor:
        return self.exam.images(pipeline, setting, noise * len(self.prompts))

    def judged(self, images: torch.Tensor) -> dict[str, float]:
        shares = self.exam.shares(images)
        return {"judge": shares["all"], "second": shares["second_judge"]}

    def turned(self, pipeline: Any) -> dict[str, Callable[[int], torch.Tensor]]:
        return {
            f"strength {strength:g}, guidance {guidance:g}, {steps} steps": functools.partial(
                self.draw, pipeline, setting=demo.Img2Img(strength, guidance, steps)
            )
            for strength, guidance, steps in itertools.product(STRENGTHS, (1.0, 3.0), (8, 12))
        }

    def to_choose_from(self, pipeline: Any) -> Callable[[int], torch.Tensor]:
        """Return answers of the setting that got most right of all pictures of zoo/edit_grid.csv."""
        return functools.partial(self.draw, pipeline, setting=demo.UNTRAINED_BEST)

    def real(self) -> dict[str, torch.Tensor]:
        return {"a program": by_program(self.exam.edits)[None]}


def left_out() -> list[digits.Description]:
    """Return what the fifty prompts of the pairs say that pre-training left out."""
    pairs = itertools.product(digits.LEFT_OUT, digits.COLOUR_NAMES)
    return [
        digits.Description(digit, ink, background) for (digit, ink), background in pairs if background != ink
    ]


class PromptExam(Exam):
    """The fifty prompts of the left-out pairs, by the ODE."""

    noises = 6

    def __init__(self, split: str) -> None:
        self.descriptions = left_out()
        self.prompts = [digits.make_prompt(d.digit, d.ink, d.background) for d in self.descriptions]
        self.metadata = [{} for _ in self.prompts]
        self.reward, self.judge = prompt_alignment(), digits.Judge.load()
        self.seed = {"validation": 10_001, "test": 10_002}[split]

    def draw(self, pipeline: Any, noise: int, steps: int = 10, guidance: float = 1.0) -> torch.Tensor:
        family = family_of(pipeline)
        generator = torch.Generator().manual_seed(self.seed + 1_000 * (noise // self.noises))
        shape = len(self.prompts), self.noises, *family.latents_shape()
        latents = torch.randn(shape, generator=generator)[:, noise % self.noises]
        return denoised(family, latents, self.prompts, family.schedule(steps, eta=0.0), guidance)

    def real(self) -> dict[str, torch.Tensor]:
        """Return handwriting of the test split in the colours that the prompts name."""
        bitmaps, labels = digits.handwriting("test")
        generator = torch.Generator().manual_seed(self.seed)
        drawn = []
        for _ in range(self.noises):
            by_digit = [torch.nonzero(labels == d.digit).flatten() for d in self.descriptions]
            chosen = [int(own[torch.randint(len(own), (1,), generator=generator)]) for own in by_digit]
            ink, background = digits.two_colours(self.descriptions)
            theta = digits.placements(len(chosen), generator)
            drawn.append(digits.render(bitmaps[chosen], ink, background, theta))
        return {"handwriting": torch.stack(drawn)}

    def judged(self, images: torch.Tensor) -> dict[str, float]:
        return {"judge": score_prompts(self.judge, images, self.descriptions)["all three"]}

    def turned(self, pipeline: Any) -> dict[str, Callable[[int], torch.Tensor]]:
        return {
            f"guidance {guidance:g}, {steps} steps": functools.partial(
                self.draw, pipeline, steps=steps, guidance=guidance
            )
            for guidance, steps in itertools.product((1.0, 2.0, 4.0), (4, 10))
        }


# -------------------------------------------------------------------------------------------- methods
@dataclass(frozen=True)
class Method:
    """An algorithm as `make_algorithm` reads it, what it changes of the config, and a rate of its own."""

    algorithm: str
    config: Row
    rate: float | None = None


@dataclass(frozen=True)
class Task:
    """A task with its settings, methods and length.

    Attributes:
        limit: the measure that must not fall in a search, and how low it may become, as a share of the
            untrained value.
        rate: of all methods, in place of a search.
        points: after so many queries there is a test; queries are images that are scored to be learned from.
    """

    load: Callable[[], Any]
    prompts: Callable[[int], Any]
    exam: Callable[[str], Exam]
    settings: Row
    methods: dict[str, Method]
    points: tuple[int, ...]
    limit: tuple[str, float] = ("judge", 0.0)
    start: FromNoise = field(default_factory=FromNoise)
    rate: float | None = None


COMMON: Row = {
    "sample_guidance_scale": 1.0, "sample_num_batches_per_epoch": 1, "train_lora_rank": 16,
    "train_lora_alpha": 16, "image_grid_freq": 0, "num_epochs": 10_000,  # the last point ends a run
}  # fmt: skip
GROUPS: Row = {"sample_group_size": 8}


def settings(steps: int, samples: int, layers: Sequence[str]) -> Row:
    """Return settings of an epoch of so many samples in four optimizer steps."""
    own = {"sample_num_steps": steps, "sample_batch_size": samples, "train_batch_size": samples // 4}
    return {**COMMON, **own, "train_lora_target_modules": layers}


TWO: Row = {"train_timestep_fraction": 0.5}  # of the steps


def awm(batch: int, *more: str) -> Method:
    """Return AWM with its authors' settings and more; they take one step of `batch` queries an epoch."""
    settings = ",".join(("time_power=1", "error_power=0.25", "lag_coefficient=5", *more))
    return Method(f"awm:{settings}", {**TWO, **GROUPS, "sample_batch_size": batch})


def denoising_methods(batch: int) -> dict[str, Method]:
    """Return those for a model with DDIM steps; `batch` queries belong to an optimizer step."""
    clip = {"train_clip_range": 5e-3}
    return {
        "DDPO": Method("ddpo", {**TWO, **GROUPS, **clip}),
        "branching": Method("branching", {**GROUPS, **clip}),  # trains on one action of each sample
        "RWR": Method("rwr", TWO), "AWM": awm(batch), "DiffusionNFT": Method("nft", {**TWO, **GROUPS}),
        "PEPG": Method("pepg", {**TWO, **GROUPS}), "online DPO": Method("dpo", {**TWO, **GROUPS}),
        "DRaFT": Method("draft:last_steps=3", {}), "ReFL": Method("refl:last_steps=3", {}),
    }  # fmt: skip


# Attention of pictures and of words, and feed-forward layers.
OF_SD3 = ("to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
OF_SD3 += ("net.0.proj", "net.2")


def prompt_methods() -> dict[str, Method]:
    third, noise = {"train_timestep_fraction": 0.34}, {"sample_eta": 0.7}  # Flow-GRPO's own noise
    return {
        "Flow-GRPO": Method("flow_grpo", {**noise, **third, **GROUPS, "train_clip_range": 2e-3}),
        "Flow-GRPO, window": Method("flow_grpo:window=3", {**noise, **GROUPS, "train_clip_range": 1e-2}),
        "Flow-GRPO, CPS in a window": Method(
            "flow_grpo:window=3,sde=cps", {**noise, **GROUPS, "train_clip_range": 1e-2}
        ),
        "branching": Method("branching", {**noise, **GROUPS, "train_clip_range": 1e-2}),
        "RWR": Method("rwr", {**noise, **third}),
        "RWR at 0.001": Method("rwr", {**noise, **third}, 1e-3),
        "RWR at 0.0003": Method("rwr", {**noise, **third}, 3e-4),
        "AWM": Method("awm", {**third, **GROUPS, "train_clip_range": 1e-2}),
        "DiffusionNFT": Method("nft:beta=0.1", {**third, **GROUPS}),
        "PEPG": Method("pepg", {**third, **GROUPS}),
        "online DPO": Method("dpo:beta=100", {**third, **GROUPS}),
        "DRaFT": Method("draft:last_steps=5", {}),
        "ReFL": Method("refl:last_steps=7", {}),
    }


TASKS = {
    "taste": Task(
        load=load_tiny_zoo,
        prompts=animal_prompts,
        exam=TasteExam,
        # Five steps: of six the last keeps a noise of 0.0064, see NOTES.md.
        settings=settings(5, 32, demo.EVERYWHERE),
        methods=denoising_methods(8),
        points=(0, 64, 128, 256, 384),
        limit=("judge", 0.9),
    ),
    "edit": Task(
        load=load_tiny_zoo,
        prompts=hidden_animals,
        exam=EditExam,
        settings=settings(demo.POLICY.steps, 128, demo.EVERYWHERE),  # five steps are run
        methods={**denoising_methods(32), "AWM, visited states": awm(32, "visited_states=true")},
        points=(0, 256, 512, 768, 1024),
        start=FromImages(demo.POLICY.strength),
    ),
    "prompts": Task(
        load=load_tiny_sd3,
        prompts=lambda seed: digit_world_prompts(seed, "left_out"),
        exam=PromptExam,
        settings=settings(10, 64, OF_SD3),
        methods=prompt_methods(),
        points=(0, 512, 960, 1472, 1920),
        rate=3e-3,
    ),
}
TASKS["few"] = replace(TASKS["taste"], points=(0, 32, 64, 96, 128))

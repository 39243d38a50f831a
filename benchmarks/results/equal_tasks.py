"""The two tasks and the methods of equal_terms.py.

- "prompts": tiny-sd3 draws the ten digit-ink pairs that its pre-training left out, from noise, without
  guidance, in ten steps. The reward is `prompt_alignment`; the judge asks for digit, ink and background. DDPO
  is Flow-GRPO without groups here.
- "edit": tiny-sd edits pictures, as in recolour.py; it is not a flow model, so the variants of Flow-GRPO are
  out. The reward is `recolouring`; the judge asks for digit and colours. DDPO has groups.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import Row
from benchmarks.results import recolour
from benchmarks.tiny.requests import edit_requests
from ddpo_lessons.app.demo import EVERYWHERE
from ddpo_lessons.data.prompts import digit_world_prompts
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.families import family_of
from ddpo_lessons.rewards import prompt_alignment, recolouring
from ddpo_lessons.rollout import sample_trajectory
from ddpo_lessons.tiny import load_judge, load_tiny_sd, load_tiny_sd3, world
from ddpo_lessons.tiny.classifier import score_prompts

NOISES = 6  # with which an exam asks everything
PICTURES = 80  # of an exam of edits
STEPS = 10  # of the prompts' task


class Exam(abc.ABC):
    """The same questions to a policy again and again, from the same noise."""

    prompts: list[str]
    metadata: list[Row]
    reward: Any
    before: torch.Tensor | None = None  # what the policy that was asked first answered

    @abc.abstractmethod
    def images(self) -> torch.Tensor:
        """Return the policy's images (questions * NOISES, 3, 32, 32), those of a question side by side."""

    @abc.abstractmethod
    def untrained(self) -> dict[str, torch.Tensor]:
        """Return what a user of the untrained policy gets by turning settings."""

    @abc.abstractmethod
    def judged(self, images: torch.Tensor) -> float:
        """Return the share of images in which the judge finds all that was asked for."""

    def marks(self) -> Row:
        """Return the measures of the policy as it is; distance is from the policy that was asked first."""
        images = self.images()
        if self.before is None:
            self.before = images
        return self.measure(images)

    @torch.no_grad()
    def measure(self, images: torch.Tensor) -> Row:
        """Return the measures of images, whose pixel values lie in [0, 1].

        Diversity is the standard deviation over the noises of a question, distance the mean absolute
        difference to `before`: both means over pixels.
        """
        rewards, _ = self.reward(images, self.prompts, self.metadata)
        by_question = images.view(-1, NOISES, *images.shape[1:])  # (questions, noises, 3, H, W)
        return {
            "reward": rewards.mean().item(),
            "judge": self.judged(images),
            "diversity": by_question.std(dim=1).mean().item(),
            "distance": (images - self.before).abs().mean().item(),
        }


class PromptExam(Exam):
    """The fifty prompts of the left-out pairs, by the ODE."""

    def __init__(self, pipeline: Any, split: str) -> None:
        said = [
            world.Description(digit, ink, background)
            for digit, ink in world.LEFT_OUT
            for background in world.COLOUR_NAMES
            if background != ink
        ]
        self.descriptions = [description for description in said for _ in range(NOISES)]
        self.prompts = [world.make_prompt(d.digit, d.ink, d.background) for d in self.descriptions]
        self.metadata: list[Row] = [{} for _ in self.prompts]
        self.family, self.reward, self.judge = family_of(pipeline), prompt_alignment(), load_judge()
        generator = torch.Generator().manual_seed({"validation": 10_001, "test": 10_002}[split])
        self.noise = torch.randn(len(said) * NOISES, *self.family.latents_shape(), generator=generator)

    def images(self, steps: int = STEPS, guidance: float = 1.0) -> torch.Tensor:
        schedule = self.family.schedule(steps, eta=0.0)
        conditioning = self.family.condition(self.prompts, "", guidance)
        return self.family.decode(
            sample_trajectory(self.family, self.noise, schedule, conditioning, guidance).final_latents
        )

    def untrained(self) -> dict[str, torch.Tensor]:
        return {"guidance 4": self.images(guidance=4.0), "four steps": self.images(steps=4)}

    def judged(self, images: torch.Tensor) -> float:
        return score_prompts(self.judge, images, self.descriptions)["all three"]


class EditExam(Exam):
    """Pictures of a split and their sentences, by the policy that is trained."""

    def __init__(self, pipeline: Any, split: str) -> None:
        edits = repeat(world.draw_edits(PICTURES, split, 0))
        self.pipeline, self.exam, self.reward = pipeline, recolour.Exam(edits), recolouring()
        self.prompts, pictures = edits.prompts, edits.pictures
        asked = zip(pictures.digits.tolist(), pictures.images, strict=True)
        self.metadata = [{"digit": digit, "image": image} for digit, image in asked]

    def images(self) -> torch.Tensor:
        return self.exam.images(self.pipeline, recolour.POLICY)

    def untrained(self) -> dict[str, torch.Tensor]:
        best = recolour.UNTRAINED_BEST  # of a grid
        name = f"strength {best.strength:g}, guidance {best.guidance:g}, {best.steps} steps"
        return {name: recolour.untrained(self.pipeline, self.exam.edits, best)}

    def judged(self, images: torch.Tensor) -> float:
        return self.exam.shares(images)["both"]


def repeat(edits: world.Edits) -> world.Edits:
    """Return every edit NOISES times, one after the other."""
    again = [n for n in range(len(edits.wanted)) for _ in range(NOISES)]

    def rows(part: Any) -> Any:
        return part[again] if isinstance(part, torch.Tensor) else [part[n] for n in again]

    pictures = world.Pictures(*map(rows, vars(edits.pictures).values()))
    return world.Edits(pictures, rows(edits.wanted), edits.targets[again])


@dataclass(frozen=True)
class Method:
    """An algorithm, and the setting that is searched beside the learning rate.

    Attributes:
        algorithm: as `make_algorithm` reads it.
        setting: of the config, or else of the algorithm.
        values: two to try.
        config: what else it changes.
    """

    algorithm: str
    setting: str
    values: tuple[float, float]
    config: Row


@dataclass(frozen=True)
class Task:
    """A task with its settings, methods and budgets."""

    load: Callable[[], Any]
    reward: Callable[[], Any]
    prompts: Callable[[int], Any]
    start: FromNoise
    exam: Callable[[Any, str], Exam]
    settings: Row
    methods: dict[str, Method]
    learning_rates: tuple[float, ...]
    search_epochs: int
    queries: int
    passes: int


CLIP, CLIPS = "train_clip_range", (2e-3, 1e-2)
COMMON: Row = {
    "sample_num_batches_per_epoch": 1,
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
    "image_grid_freq": 0,
    "num_epochs": 10_000,  # budgets end a run
}


# Attention of pictures and of words, and feed-forward layers.
OF_SD3 = ("to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
OF_SD3 += ("net.0.proj", "net.2")
A_THIRD: Row = {"train_timestep_fraction": 0.34}  # of the steps is trained on
GROUPS: Row = {"sample_group_size": 8}
NOISE: Row = {"sample_eta": 0.7}  # Flow-GRPO's own, of the methods that need noise


def without_log_probs(
    config: Row, rwr: Row, last: tuple[int, int], late: tuple[int, int]
) -> dict[str, Method]:
    """Return the methods that serve every model, given what those without gradients have, and two K each."""
    return {
        "RWR": Method("rwr", "temperature", (0.2, 1.0), {**config, **rwr}),
        "AWM": Method("awm", CLIP, (0.01, 0.1), {**config, **GROUPS}),
        "DiffusionNFT": Method("nft", "beta", (0.1, 1.0), {**config, **GROUPS}),
        "online DPO": Method("dpo", "beta", (100.0, 1000.0), {**config, **GROUPS}),
        "DRaFT-K": Method("draft", "last_steps", last, {}),
        "ReFL": Method("refl", "last_steps", late, {}),
    }


TASKS = {
    "prompts": Task(
        load=load_tiny_sd3,
        reward=prompt_alignment,
        prompts=lambda seed: digit_world_prompts(seed, "left_out"),
        start=FromNoise(),
        exam=PromptExam,
        settings={
            **COMMON,
            "sample_num_steps": STEPS,
            "sample_guidance_scale": 1.0,
            "sample_batch_size": 64,
            "train_batch_size": 16,  # four optimizer steps an epoch
            "train_lora_target_modules": OF_SD3,
        },
        methods={
            "DDPO": Method("flow_grpo", CLIP, CLIPS, {**NOISE, **A_THIRD}),  # no groups
            "Flow-GRPO": Method("flow_grpo", CLIP, CLIPS, {**NOISE, **A_THIRD, **GROUPS}),
            "Flow-GRPO, CPS": Method("flow_grpo:sde=cps", CLIP, CLIPS, {**NOISE, **A_THIRD, **GROUPS}),
            "Flow-GRPO, window": Method("flow_grpo:window=3", CLIP, CLIPS, {**NOISE, **GROUPS}),
            **without_log_probs(A_THIRD, rwr=NOISE, last=(2, 5), late=(3, 7)),
        },
        learning_rates=(1e-3, 3e-3, 1e-2),
        search_epochs=12,
        queries=1920,
        passes=40_000,
    ),
    "edit": Task(
        load=load_tiny_sd,
        reward=recolouring,
        prompts=edit_requests,
        start=FromImages(recolour.POLICY.strength),
        exam=EditExam,
        settings={
            **COMMON,
            "sample_num_steps": recolour.POLICY.steps,
            "sample_guidance_scale": recolour.POLICY.guidance,
            "sample_batch_size": 128,
            "train_batch_size": 64,  # two optimizer steps an epoch
            "train_lora_target_modules": EVERYWHERE,
        },
        methods={
            "DDPO": Method("ddpo", CLIP, CLIPS, GROUPS),
            **without_log_probs({}, rwr={}, last=(1, 2), late=(1, 2)),
        },
        learning_rates=(6e-4, 2e-3, 6e-3),
        search_epochs=20,
        queries=3840,
        passes=36_000,
    ),
}

"""The tasks and the methods of equal_terms.py.

- "preference": tiny-zoo generates animals from noise. The reward is a reward model that was fitted to the
  choices of a simulated annotator (zoo/preference.py). A held-out evaluator, which training does not use,
  measures whether the animal is still there, and the annotator's formula whether the annotator would prefer
  the images.
- "edit": the demo's task (lessons/demo.py). tiny-zoo frees an animal from confetti, and the prompt names the
  background. The reward is the demo's, and so are strength, steps, rank and layers; "judge" is the fraction
  of images that the held-out evaluator finds correct in every respect.

The learning rate, the images per epoch and the optimizer steps per epoch are searched. Rank and layers are
the same for all methods, a sample has two trained actions or examples, and DRaFT and ReFL reach into the
second half of the steps. All else are the package's defaults; AWM has its authors' settings.
"""

import abc
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.common import Row, draw
from benchmarks.zoo import preference
from benchmarks.zoo.edit import by_program
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.data.prompts import animals as animal_prompts
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.lessons import demo
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.rewards import RewardFunction, animal_alignment
from ddpo_lessons.rewards.reward import split_info
from ddpo_lessons.worlds import animals, load_tiny_zoo
from ddpo_lessons.worlds.judges import named

BEST_OF = (2, 4, 8)
STRENGTHS = (0.45, 0.625, 0.75, 0.875)  # of edits by the untrained policy


# ---------------------------------------------------------------------------------------------- evaluations
class Evaluation(abc.ABC):
    """An evaluation with always the same prompts and the same noise."""

    reward: RewardFunction
    prompts: list[str]
    metadata: list[Row]
    noises: int  # images of every prompt, each from noise of its own
    noises_untrained: int  # the same of the untrained policy, whose accuracy decides the limit

    @abc.abstractmethod
    def draw(self, pipeline: Any, noise: int) -> torch.Tensor:
        """Return the policy's image of each prompt (N, 3, H, W), from noise of that number."""

    @abc.abstractmethod
    def judged(self, images: torch.Tensor) -> dict[str, float]:
        """Return the held-out measures of images (N, 3, H, W): "judge", a fraction, and "second"."""

    @abc.abstractmethod
    def turned(self, pipeline: Any) -> dict[str, Callable[[int], torch.Tensor]]:
        """Return the sampling settings and prompts that a user can try without training, by name."""

    def real(self) -> dict[str, torch.Tensor]:
        """Return the images of a program that was written for this world, by name: (n, N, 3, H, W)."""
        return {}

    def to_choose_from(self, pipeline: Any) -> Callable[[int], torch.Tensor]:
        """Return the function of a noise whose images best-of-n chooses from."""
        return functools.partial(self.draw, pipeline)

    def images(self, pipeline: Any, noises: int = 0) -> torch.Tensor:
        """Return all images (noises, N, 3, H, W) from so many noises, or from the usual number."""
        return torch.stack([self.draw(pipeline, noise) for noise in range(noises or self.noises)])

    @torch.no_grad()
    def rewards(self, images: torch.Tensor) -> torch.Tensor:
        """Return the rewards (N,) of images (N, 3, H, W)."""
        return split_info(self.reward(images, self.prompts, self.metadata))[0]

    def measure(self, images: torch.Tensor) -> Row:
        """Return mean reward, held-out measures and diversity of images (noises, N, 3, H, W).

        Diversity, where there are several noises, is the standard deviation over the noises of a prompt, a
        mean over pixels in [0, 1].
        """
        judged = [self.judged(part) for part in images]
        seen = {name: sum(part[name] for part in judged) / len(judged) for name in judged[0]}
        reward = torch.stack([self.rewards(part) for part in images]).mean().item()
        spread = {"diversity": images.std(dim=0).mean().item()} if len(images) > 1 else {}
        return {"reward": reward, **seen, **spread}

    def best_of(self, draw: Callable[[int], torch.Tensor]) -> dict[int, torch.Tensor]:
        """For each n of BEST_OF keep the one of n images with the highest reward, `noises` times."""
        draws = torch.stack([draw(noise) for noise in range(self.noises * max(BEST_OF))])  # (draws, N, ...)
        rewards = torch.stack([self.rewards(images) for images in draws])  # (draws, N)
        found = {}
        for count in BEST_OF:
            tries = rewards[: self.noises * count].view(self.noises, count, -1)  # (noises, n, N)
            best = tries.argmax(dim=1) + count * torch.arange(self.noises)[:, None]  # (noises, N) of draws
            found[count] = draws[best, torch.arange(rewards.shape[1])]
        return found


class PreferenceEvaluation(Evaluation):
    """All 45 animals; the evaluator looks for the animal, and "second" is the annotator's own formula."""

    noises_untrained = 20  # times 45 animals: the accuracy has a standard error of one point

    def __init__(self, split: str) -> None:
        self.noises, self.first_seed = {"validation": (4, 20_000), "test": (8, 10_000)}[split]
        self.prompts = [animals.make_prompt(animal) for animal in animals.ANIMALS]
        self.metadata = [{} for _ in self.prompts]
        self.reward, self.judge = preference.learned_reward(), animals.Judge.load()

    def draw(self, pipeline: Any, noise: int, prompts: Sequence[str] = ()) -> torch.Tensor:
        steps = TASKS["preference"].settings["sample_num_steps"]
        return draw(pipeline, prompts or self.prompts, self.first_seed + noise, num_inference_steps=steps)

    def judged(self, images: torch.Tensor) -> dict[str, float]:
        seen = (named(self.judge, images)[:, 0] == torch.arange(len(images))).double()
        return {"judge": seen.mean().item(), "second": preference.utility(images, self.judge).mean().item()}

    def turned(self, pipeline: Any) -> dict[str, Callable[[int], torch.Tensor]]:
        ways = {}
        for artist, background in itertools.product(animals.ARTISTS, animals.BACKGROUND_NAMES):
            prompts = [animals.make_prompt(animal, artist, background) for animal in animals.ANIMALS]
            ways[f'"by {artist} on {background}"'] = functools.partial(self.draw, pipeline, prompts=prompts)
        return ways


class EditEvaluation(Evaluation):
    """The demo's edits; both evaluators measure whether all is correct. Each image is edited once."""

    noises = noises_untrained = 1

    def __init__(self, split: str) -> None:
        count, seed = {"validation": (100, demo.VALIDATION), "test": (200, demo.TEST)}[split]
        self.evaluation = demo.Evaluation(animals.draw_edits(count, seed))
        self.prompts, self.metadata = self.evaluation.edits.prompts, self.evaluation.edits.metadata
        self.reward = animal_alignment(background_weight=demo.BACKGROUND_WEIGHT)

    def draw(self, pipeline: Any, noise: int, setting: demo.Img2Img = demo.POLICY) -> torch.Tensor:
        return self.evaluation.images(pipeline, setting, noise * len(self.prompts))

    def judged(self, images: torch.Tensor) -> dict[str, float]:
        fractions = self.evaluation.fractions(images)
        return {"judge": fractions["all"], "second": fractions["second_judge"]}

    def turned(self, pipeline: Any) -> dict[str, Callable[[int], torch.Tensor]]:
        return {
            f"strength {strength:g}, guidance {guidance:g}, {steps} steps": functools.partial(
                self.draw, pipeline, setting=demo.Img2Img(strength, guidance, steps)
            )
            for strength, guidance, steps in itertools.product(STRENGTHS, (1.0, 3.0), (8, 12))
        }

    def to_choose_from(self, pipeline: Any) -> Callable[[int], torch.Tensor]:
        """Return images of the settings with the most correct ones of zoo/edit_grid.csv."""
        return functools.partial(self.draw, pipeline, setting=demo.UNTRAINED_BEST)

    def real(self) -> dict[str, torch.Tensor]:
        return {"a program": by_program(self.evaluation.edits)[None]}


# -------------------------------------------------------------------------------------------- methods
class Setting(NamedTuple):
    """What is searched for every method: `images` per epoch are trained on in so many optimizer steps."""

    learning_rate: float
    images: int
    steps: int

    def config(self) -> Row:
        """Return the fields of the config."""
        return {
            "train_learning_rate": self.learning_rate,
            "sample_batch_size": self.images,
            "train_batch_size": self.images // self.steps,
        }


@dataclass(frozen=True)
class Method:
    """An algorithm as `make_algorithm` reads it, its changes to the config, and whose setting it uses.

    Attributes:
        like: the method whose search found this one's setting and length; empty for a search of its own.
    """

    algorithm: str
    config: Row
    like: str = ""


@dataclass(frozen=True)
class Task:
    """A task with its settings, methods and lengths.

    Attributes:
        points: a run is evaluated after so many reward evaluations.
        trials: so many settings of each method are tried.
        details: methods that differ from another one in one detail, and use its setting.
        limit: the fraction of the untrained accuracy of the held-out evaluator that must be left.
    """

    load: Callable[[], Any]
    prompts: Callable[[int], Any]
    evaluation: Callable[[str], Evaluation]
    settings: Row
    methods: dict[str, Method]
    points: tuple[int, ...]
    trials: int
    limit: float = 0.0
    start: FromNoise = field(default_factory=FromNoise)
    details: dict[str, Method] = field(default_factory=dict)

    def method(self, name: str) -> Method:
        """Return a method by its name, or a user's algorithm, which is named as FILE.py:CLASS.

        It gets DDPO's settings, without the clip range if it has none. Raises a ValueError for other names.
        """
        known = {**self.methods, **self.details}
        if name in known:
            return known[name]
        unused = make_algorithm(name).unused
        return Method(name, {key: value for key, value in DDPO.items() if key not in unused})


COMMON: Row = {
    "sample_guidance_scale": 1.0, "sample_num_batches_per_epoch": 1, "train_lora_rank": 16,
    "train_lora_alpha": 16, "train_lora_target_modules": demo.EVERYWHERE, "image_grid_freq": 0,
    "num_epochs": 10_000, "save_freq": 10**6,  # the last point ends a run
}  # fmt: skip
GROUPS: Row = {"sample_group_size": 8}
TWO: Row = {"train_timestep_fraction": 0.5}  # of the denoising steps
CLIP: Row = {"train_clip_range": 5e-3}
DDPO: Row = {**TWO, **GROUPS, **CLIP}
AWM = "awm:time_power=1,error_power=0.25,ema_kl_coefficient=5"  # its authors'

METHODS = {
    "DDPO": Method("ddpo", DDPO),
    "branching": Method("branching", {**GROUPS, **CLIP}),  # trains on one action of each sample
    "RWR": Method("rwr", TWO),
    "AWM": Method(AWM, {**TWO, **GROUPS}),
    "DiffusionNFT": Method("nft", {**TWO, **GROUPS}),
    "PEPG": Method("pepg", {**TWO, **GROUPS}),
    "online DPO": Method("dpo", {**TWO, **GROUPS}),
    "DRaFT": Method("draft:last_steps=3", {}),
    "ReFL": Method("refl:last_steps=3", {}),
}


def detail(changes: Row, like: str = "DDPO") -> Method:
    """Return a method with changes, which come after the setting of the other one."""
    return Method(METHODS[like].algorithm, {**METHODS[like].config, **changes}, like)


DETAILS = {
    "DDPO, 16 images per epoch": detail({"sample_batch_size": 16, "train_batch_size": 16}),
    "DDPO, 64 images per epoch": detail({"sample_batch_size": 64, "train_batch_size": 64}),
    "DDPO, four optimizer steps per epoch": detail({"train_batch_size": 8}),
    "DDPO, learning rate 0.0003": detail({"train_learning_rate": 3e-4}),
    "DDPO, learning rate 0.003": detail({"train_learning_rate": 3e-3}),
    "DDPO, no groups": detail({"sample_group_size": 1}),
    "DDPO, all actions": detail({"train_timestep_fraction": 1.0}),
    "DDPO, LoRA in attention only": detail({"train_lora_target_modules": demo.EVERYWHERE[:4]}),
    # Their coefficient is 0.001 for advantages in [-1, 1], and ours reach 5.
    "AWM, with its authors' KL penalty": detail({"train_kl_coefficient": 5e-3}, "AWM"),
}

TASKS = {
    "preference": Task(
        load=load_tiny_zoo,
        prompts=animal_prompts,
        evaluation=PreferenceEvaluation,
        # Five steps: of six the last keeps a noise of 0.0064, see NOTES.md.
        settings={**COMMON, "sample_num_steps": 5},
        methods=METHODS,
        points=(0, 128, 256, 384),
        trials=7,
        limit=0.9,
        details=DETAILS,
    ),
    "edit": Task(
        load=load_tiny_zoo,
        prompts=hidden_animals,
        evaluation=EditEvaluation,
        settings={**COMMON, "sample_num_steps": demo.POLICY.steps},  # five steps are run
        # Re-noised samples do not fit a start from images: see lesson 10.
        methods={name: METHODS[name] for name in ("DDPO", "branching", "DRaFT", "ReFL")},
        points=(0, 256, 512, 1024),
        trials=5,
        start=FromImages(demo.POLICY.strength),
    ),
}

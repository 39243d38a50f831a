"""The four experiments of DDPO's paper, in the world of animals: `python -m benchmarks.zoo.paper`.

The rewards are compressibility, incompressibility, alignment with the prompt, and a learned preference. Each
is trained by DDPO, branching and RWR with as many reward evaluations (`queries`), three seeds; without
training there are the best prompts and settings, and best-of-8. paper.csv has the reward of test images,
sampled from fixed noise, their accuracy by the held-out evaluator, and the simulated annotator's utility. The
learning rates are searched first, on other noise, until the best lies between two others or ends the ladder.
Finished runs are skipped.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Row
from benchmarks.zoo import preference
from ddpo_lessons.algorithms.algorithm import Algorithm
from ddpo_lessons.algorithms.branching import Branching
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.algorithms.rwr import RWR
from ddpo_lessons.data.contexts import PromptFunction
from ddpo_lessons.data.prompts import animals as animal_prompts
from ddpo_lessons.image import measure_background
from ddpo_lessons.lessons.demo import EVERYWHERE
from ddpo_lessons.named_prompts import zoo_prompts
from ddpo_lessons.rewards import (
    RewardFunction,
    animal_alignment,
    jpeg_compressibility,
    jpeg_incompressibility,
)
from ddpo_lessons.rewards.reward import split_info
from ddpo_lessons.worlds import animals, load_tiny_zoo
from ddpo_lessons.worlds.animals import NAMES
from ddpo_lessons.worlds.judges import named, nearest

RESULT = Path(__file__).with_suffix(".csv")
SEARCH = Path(__file__).with_name("paper_search.csv")
COLUMNS = (
    "reward", "method", "seed", "learning_rate", "epoch", "queries", "setting",
    "score", "animal", "all", "utility",
)  # fmt: skip
SEEDS, TEST, VALIDATION = (0, 1, 2), 1_000, 2_000
IMAGES = 90  # of a test: 45 animals in two images each, or 30 combinations in three
EPOCHS = 16
LADDER = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # of learning rates
BEGIN = (3, 4)  # places on it
EVERY = 4  # epochs between tests
SHOWN = 8  # images of the test that are kept
SEARCH_SEED = 100
SETTINGS: Row = {
    "sample_num_steps": 5,  # of six the last keeps a noise of 0.0064, see NOTES.md
    "sample_guidance_scale": 1.0, "sample_batch_size": 128, "sample_num_batches_per_epoch": 1,
    "sample_group_size": 8,  # sixteen prompts per epoch
    "train_batch_size": 32,  # four optimizer steps
    "train_lora_rank": 16, "train_lora_alpha": 16, "train_lora_target_modules": EVERYWHERE,
    "image_grid_freq": 0,
}  # fmt: skip


SOME = {"train_timestep_fraction": 0.5}  # two of each sample's actions or examples
CLIP = {"train_clip_range": 5e-3}
METHODS: dict[str, tuple[Callable[[], Algorithm], Row]] = {
    "DDPO": (DDPO, {**SOME, **CLIP}),
    "branching": (Branching, CLIP),  # trains on one action of each sample
    "RWR": (RWR, SOME),
}
# Rewards, and the prompts of training.
EXPERIMENTS: dict[str, tuple[Callable[[], RewardFunction], Callable[[int], PromptFunction]]] = {
    "compressibility": (jpeg_compressibility, animal_prompts),
    "incompressibility": (jpeg_incompressibility, animal_prompts),
    "alignment": (animal_alignment, lambda seed: zoo_prompts(seed, "left_out")),
    "preference": (preference.learned_reward, animal_prompts),
}


# -------------------------------------------------------------------------------------------- testing
def descriptions(reward: str) -> list[animals.Description]:
    """Return the test's descriptions: all animals, or training's combinations, each equally often."""
    if EXPERIMENTS[reward][1] is animal_prompts:
        described = [animals.Description(animal) for animal in animals.ANIMALS]
        return described * (IMAGES // len(described))
    backgrounds = itertools.cycle(animals.BACKGROUND_NAMES)
    pairs = animals.LEFT_OUT * (IMAGES // len(animals.LEFT_OUT))
    return [animals.Description(animals.ANIMALS[a], animals.ARTISTS[b], next(backgrounds)) for a, b in pairs]


def prompt_of(described: animals.Description) -> str:
    return animals.make_prompt(described.animal, described.artist, described.background)


def paint(pipeline: Any, prompts: Sequence[str], seed: int, **settings: Any) -> torch.Tensor:
    """Generate an image of each prompt, with the steps of training unless settings change them."""
    steps = {"num_inference_steps": SETTINGS["sample_num_steps"]}
    return common.draw(pipeline, prompts, seed, **{**steps, **settings})


def scores(reward: str, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Return the reward of each image, (N,)."""
    returned, _ = split_info(EXPERIMENTS[reward][0]()(images, prompts, [{}] * len(prompts)))
    return returned


def verdict(reward: str, images: torch.Tensor, described: Sequence[animals.Description]) -> Row:
    """Return mean reward, fractions with the correct animal and with all correct, and mean utility."""
    judge = animals.Judge.load()
    seen = named(judge, images)  # (N, 3)
    seen[:, 2] = nearest(measure_background(images), animals.BACKGROUNDS)
    said = [[getattr(part, name) for name in NAMES] for part in described]
    words = (animals.ANIMALS, animals.ARTISTS, animals.BACKGROUND_NAMES)
    hits = torch.tensor(
        [
            [name is None or known[n] == name for name, known, n in zip(names, words, row, strict=True)]
            for names, row in zip(said, seen.tolist(), strict=True)
        ]
    )
    found = {"score": scores(reward, images, [prompt_of(part) for part in described]), "animal": hits[:, 0]}
    found |= {"all": hits.all(dim=1), "utility": preference.utility(images, judge)}
    return {name: values.double().mean().item() for name, values in found.items()}


# ------------------------------------------------------------------------------------------- training
def train(run: Row, rate: float, noise: int = TEST) -> list[Row]:
    reward, method, seed = run["reward"], run["method"], run["seed"]
    pipeline, described, tested = load_tiny_zoo(), descriptions(reward), list[torch.Tensor]()
    prompts = [prompt_of(part) for part in described]

    def test() -> Row:
        images = paint(pipeline, prompts, noise)
        tested.append(images[:SHOWN])
        return verdict(reward, images, described)

    (make, of_seed), (algorithm, settings) = EXPERIMENTS[reward], METHODS[method]
    own = {"seed": seed, "num_epochs": EPOCHS, "train_learning_rate": rate}
    task = (make(), of_seed(seed), pipeline)
    rows = [{"epoch": 0, **test()}]  # by the pipeline without an adapter
    with common.trainer_of(task, SETTINGS, settings, own, algorithm=algorithm()) as trainer:
        rows += common.readings(trainer, range(EVERY, EPOCHS + 1, EVERY), test)
    if seed == 0:
        for images, name in ((tested[0], "before"), (tested[-1], method)):
            common.save_grid(images, SHOWN, RESULT.with_suffix("") / f"{reward}_{name}.png")
    size = SETTINGS["sample_batch_size"]
    return [{"learning_rate": rate, "queries": size * row["epoch"], **row} for row in rows]


# ----------------------------------------------------------------------------------- without training
def best_of(reward: str) -> list[Row]:
    """Generate each test image eight times, and keep the one with the highest reward."""
    described = descriptions(reward)
    prompts = [prompt_of(part) for part in described]
    draws = [paint(load_tiny_zoo(), prompts, TEST + n) for n in range(8)]  # (N, 3, 64, 64) each
    kept = common.best_draws(draws, [scores(reward, images, prompts) for images in draws])
    return [verdict(reward, kept, described)]


def turned(reward: str) -> list[Row]:
    """Choose what the prompt leaves open, then guidance and steps, by the reward on other noise."""
    pipeline, described = load_tiny_zoo(), descriptions(reward)

    def prompts_of(words: tuple[str | None, str | None]) -> list[str]:
        artist, background = words
        return [
            prompt_of(replace(a, artist=a.artist or artist, background=a.background or background))
            for a in described
        ]

    def reward_of(words: tuple[str | None, str | None], settings: Row) -> float:
        some = prompts_of(words)[: len(animals.ANIMALS)]
        return scores(reward, paint(pipeline, some, VALIDATION, **settings), some).mean().item()

    added = [(None, None), *itertools.product(animals.ARTISTS, animals.BACKGROUND_NAMES)]
    words = max(added, key=lambda words: reward_of(words, {})) if described[0].artist is None else added[0]
    turns = common.product(guidance_scale=(1.0, 3.0), num_inference_steps=(5, 20))
    settings = max(turns, key=lambda settings: reward_of(words, settings))
    guidance, steps = settings.values()
    said = f"by {words[0]}, {words[1]}, " if words[0] else ""
    images = paint(pipeline, prompts_of(words), TEST, **settings)
    return [{"setting": f"{said}guidance {guidance:g}, {steps} steps", **verdict(reward, images, described)}]


WITHOUT = {"best-of-8": best_of, "turned": turned}


def measure(run: Row) -> list[Row]:
    reward, method = run["reward"], run["method"]
    return WITHOUT[method](reward) if method in WITHOUT else train(run, chosen(reward, method))


# --------------------------------------------------------------------------------------------- search
def next_rate(tried: dict[float, float]) -> float | None:
    """Return the next learning rate to try, given the rewards of others; None if the best lies inside.

    Of equal rewards the lowest learning rate counts as best: where none helps, the search goes down.
    """
    for place in BEGIN:
        if LADDER[place] not in tried:
            return LADDER[place]
    best = LADDER.index(max(tried, key=lambda rate: (tried[rate], -rate)))
    beside = [LADDER[place] for place in (best - 1, best + 1) if 0 <= place < len(LADDER)]
    return next((rate for rate in beside if rate not in tried), None)


def climb(train: Callable[[float], list[Row]], mark: Callable[[list[Row]], float]) -> list[Row]:
    """Try learning rates until the best lies between two others; return the rows of all runs."""
    rows, tried = list[Row](), dict[float, float]()
    while (rate := next_rate(tried)) is not None:
        own = [{"learning_rate": rate, **row} for row in train(rate)]
        tried[rate] = mark(own)
        rows += own
    return rows


def search(run: Row) -> list[Row]:
    """Try learning rates, compared by the reward when training ends; return the rows of all runs."""
    return climb(lambda rate: train(run, rate, VALIDATION), lambda rows: rows[-1]["score"])


def chosen(reward: str, method: str) -> float:
    """Return the learning rate with the highest reward on other noise when training ends."""
    return common.best_rate(SEARCH, "score", reward=reward, method=method, epoch=str(EPOCHS))


if __name__ == "__main__":
    processes = common.parse(__doc__).processes
    searches = common.product(reward=EXPERIMENTS, method=METHODS, seed=(SEARCH_SEED,))
    common.run_all(search, searches, COLUMNS, SEARCH, processes)
    runs = common.product(seed=SEEDS, reward=EXPERIMENTS, method=METHODS)
    runs += common.product(method=WITHOUT, reward=EXPERIMENTS, seed=(0,))
    common.run_all(measure, runs, COLUMNS, RESULT, processes)

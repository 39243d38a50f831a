"""The four experiments of DDPO's paper, in the world of animals: `python -m benchmarks.zoo.paper`.

Compressibility, incompressibility, alignment with the sentence and a taste: each by DDPO, branching and RWR
with as many reward queries, three seeds, and without training by a setting turned and by the best of eight.
paper.csv has the reward of test pictures, drawn from fixed noise, what the judge finds right in them, and
the persona's own liking. The learning rates are searched first, on other noise, until the best lies between
two others or ends the ladder of equal_terms.py. What the files hold already is not run again.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, read_rows, run_all, scratch_config
from benchmarks.results.equal_terms import next_rate
from benchmarks.zoo import taste
from ddpo_lessons.algorithms.base import Algorithm
from ddpo_lessons.algorithms.branching import Branching
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.algorithms.rwr import RWR
from ddpo_lessons.app.demo import EVERYWHERE
from ddpo_lessons.data.contexts import PromptFunction
from ddpo_lessons.data.prompts import animals as animal_prompts
from ddpo_lessons.image import measure_background, to_pil
from ddpo_lessons.named_prompts import zoo_prompts
from ddpo_lessons.rewards import (
    RewardFunction,
    animal_alignment,
    jpeg_compressibility,
    jpeg_incompressibility,
)
from ddpo_lessons.rewards.base import checked_reward, split_info
from ddpo_lessons.rollout import SamplingSettings, sample_seed, text2img_rollout
from ddpo_lessons.trainer import Trainer
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
PICTURES = 90  # of a test: 45 animals in two pictures each, or 30 combinations in three
EPOCHS = 16
EVERY = 4  # epochs between tests
PICTURE_FOLDER = Path(__file__).with_suffix("")  # of the first seed's pictures, before and after
SHOWN = 8  # pictures of the test that are kept
SEARCH_SEED = 100
SETTINGS: Row = {
    "sample_num_steps": 5,  # of six the last keeps a noise of 0.0064, see NOTES.md
    "sample_guidance_scale": 1.0,
    "sample_batch_size": 128,
    "sample_num_batches_per_epoch": 1,
    "sample_group_size": 8,  # sixteen sentences an epoch
    "train_batch_size": 32,  # four optimizer steps
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
    "train_lora_target_modules": EVERYWHERE,
    "image_grid_freq": 0,
}


@dataclass(frozen=True)
class Method:
    """An algorithm, and settings of its own."""

    algorithm: Callable[[], Algorithm]
    settings: Row


SOME = {"train_timestep_fraction": 0.5}  # two of each sample's actions or examples
CLIP = {"train_clip_range": 5e-3}
METHODS = {
    "DDPO": Method(DDPO, {**SOME, **CLIP}),
    "branching": Method(Branching, CLIP),  # trains on one action of each sample
    "RWR": Method(RWR, SOME),
}


@dataclass(frozen=True)
class Experiment:
    """A reward, and the sentences that it is practised on."""

    reward: Callable[[], RewardFunction]
    prompts: Callable[[int], PromptFunction] = animal_prompts


@functools.cache
def rating() -> RewardFunction:
    """Return the score of a rater that saw two thousand choices."""
    rater = taste.fit_rater(*taste.draw_choices(2_000, seed=0))
    return checked_reward(lambda images, prompts, metadata: rater(images))


EXPERIMENTS = {
    "compressibility": Experiment(jpeg_compressibility),
    "incompressibility": Experiment(jpeg_incompressibility),
    "alignment": Experiment(animal_alignment, lambda seed: zoo_prompts(seed, "left_out")),
    "taste": Experiment(rating),
}


@dataclass(frozen=True)
class Run:
    """A training run, or something else than training."""

    reward: str
    method: str
    seed: int = 0
    learning_rate: float = 0.0
    noise: int = TEST


# -------------------------------------------------------------------------------------------- testing
def questions(reward: str) -> list[animals.Description]:
    """Return what a test asks for: all animals or combinations of training, equally often, on any ground."""
    if EXPERIMENTS[reward].prompts is animal_prompts:
        asked = [animals.Description(animal) for animal in animals.ANIMALS]
        return asked * (PICTURES // len(asked))
    grounds = itertools.cycle(animals.GROUND_NAMES)
    pairs = animals.LEFT_OUT * (PICTURES // len(animals.LEFT_OUT))
    return [animals.Description(animals.ANIMALS[a], animals.ARTISTS[b], next(grounds)) for a, b in pairs]


def sentence(asked: animals.Description) -> str:
    """Return the prompt of a question."""
    return animals.make_prompt(asked.animal, asked.artist, asked.ground)


def draw(pipeline: Any, prompts: Sequence[str], seed: int, **settings: Any) -> torch.Tensor:
    """Draw a picture for each sentence as training samples them, from noise that the seed decides."""
    told = {"num_inference_steps": SETTINGS["sample_num_steps"], "guidance_scale": 1.0, **settings}
    noise = [torch.Generator().manual_seed(sample_seed(seed, n)) for n in range(len(prompts))]
    return text2img_rollout(pipeline, prompts, SamplingSettings(**told), generator=noise)[0]


def scores(reward: str, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Return the reward of each picture, (N,)."""
    returned, _ = split_info(EXPERIMENTS[reward].reward()(images, prompts, [{}] * len(prompts)))
    return returned


def verdict(reward: str, images: torch.Tensor, asked: Sequence[animals.Description]) -> Row:
    """Return mean reward, shares with the animal and with all that was asked for, the persona's utility."""
    judge = animals.Judge.load()
    seen = named(judge, images)  # (N, 3)
    seen[:, 2] = nearest(measure_background(images), animals.GROUNDS)
    said = [[getattr(part, name) for name in NAMES] for part in asked]
    words = (animals.ANIMALS, animals.ARTISTS, animals.GROUND_NAMES)
    hits = torch.tensor(
        [
            [name is None or known[n] == name for name, known, n in zip(names, words, row, strict=True)]
            for names, row in zip(said, seen.tolist(), strict=True)
        ]
    )
    found = {"score": scores(reward, images, [sentence(part) for part in asked]), "animal": hits[:, 0]}
    found |= {"all": hits.all(dim=1), "utility": taste.utility(images, judge)}
    return {name: values.double().mean().item() for name, values in found.items()}


# ------------------------------------------------------------------------------------------- training
def train(run: Run) -> list[Row]:
    """Train a policy; return what the test says of it every so many epochs."""
    pipeline, asked = load_tiny_zoo(), questions(run.reward)
    prompts = [sentence(part) for part in asked]
    about = {"reward": run.reward, "method": run.method, "seed": run.seed, "learning_rate": run.learning_rate}

    def test(epoch: int) -> Row:
        images = draw(pipeline, prompts, run.noise)
        if run.seed == 0 and epoch in (0, EPOCHS):
            keep(images, f"{run.reward}_{run.method if epoch else 'before'}.png")
        queries = epoch * SETTINGS["sample_batch_size"]
        return {**about, "epoch": epoch, "queries": queries, **verdict(run.reward, images, asked)}

    rows = [test(0)]
    own = {"seed": run.seed, "num_epochs": EPOCHS, "train_learning_rate": run.learning_rate}
    experiment, method = EXPERIMENTS[run.reward], METHODS[run.method]
    with scratch_config(SETTINGS, method.settings, own) as config:
        task = (experiment.reward(), experiment.prompts(run.seed), pipeline)
        trainer = Trainer(config, *task, algorithm=method.algorithm())
        for epoch in range(EPOCHS):
            trainer.step(epoch)
            if (epoch + 1) % EVERY == 0:
                rows.append(test(epoch + 1))
    return rows


def keep(images: torch.Tensor, name: str) -> None:
    """Write the first pictures of a test side by side."""
    PICTURE_FOLDER.mkdir(exist_ok=True)
    to_pil(torch.cat(list(images[:SHOWN]), dim=2)).save(PICTURE_FOLDER / name)


# ----------------------------------------------------------------------------------- without training
def best_of(run: Run) -> list[Row]:
    """Draw each test picture eight times, and keep what the reward likes best."""
    asked = questions(run.reward)
    prompts = [sentence(part) for part in asked]
    draws = torch.stack(
        [draw(load_tiny_zoo(), prompts, run.noise + n) for n in range(8)]
    )  # (8, N, 3, 64, 64)
    best = torch.stack([scores(run.reward, images, prompts) for images in draws]).argmax(dim=0)
    images = draws[best, torch.arange(len(prompts))]
    return [{"reward": run.reward, "method": run.method, "seed": 0, **verdict(run.reward, images, asked)}]


def turned(run: Run) -> list[Row]:
    """Turn what the sentence leaves open, then guidance and steps; other noise than the test's chooses."""
    pipeline, asked = load_tiny_zoo(), questions(run.reward)

    def told(words: tuple[str | None, str | None]) -> list[str]:
        artist, ground = words
        return [sentence(replace(a, artist=a.artist or artist, ground=a.ground or ground)) for a in asked]

    def liking(words: tuple[str | None, str | None], settings: Row) -> float:
        some = told(words)[: len(animals.ANIMALS)]
        return scores(run.reward, draw(pipeline, some, VALIDATION, **settings), some).mean().item()

    added = [(None, None), *itertools.product(animals.ARTISTS, animals.GROUND_NAMES)]
    words = max(added, key=lambda words: liking(words, {})) if asked[0].artist is None else added[0]
    turns = [
        {"guidance_scale": guidance, "num_inference_steps": steps}
        for guidance, steps in itertools.product((1.0, 3.0), (5, 20))
    ]
    settings = max(turns, key=lambda settings: liking(words, settings))
    guidance, steps = settings.values()
    said = f"by {words[0]}, {words[1]}, " if words[0] else ""
    row = {"reward": run.reward, "method": run.method, "seed": 0}
    row["setting"] = f"{said}guidance {guidance:g}, {steps} steps"
    return [{**row, **verdict(run.reward, draw(pipeline, told(words), run.noise, **settings), asked)}]


WITHOUT = {"best of 8": best_of, "turned": turned}


def measure(run: Run) -> list[Row]:
    """Return the rows of a run."""
    return WITHOUT.get(run.method, train)(run)


# --------------------------------------------------------------------------------------------- search
def search(run: Run) -> list[Row]:
    """Try learning rates, judged by the reward when training ends; return the rows of all runs."""
    rows, tried = list[Row](), dict[float, float]()
    while (rate := next_rate(tried)) is not None:
        own = train(replace(run, learning_rate=rate))
        tried[rate] = own[-1]["score"]
        rows += own
    return rows


def chosen(reward: str, method: str) -> float:
    """Return the learning rate with the highest reward on other noise when training ends."""
    ends = [row for row in read_rows(SEARCH) if (row["reward"], row["method"]) == (reward, method)]
    last = [row for row in ends if row["epoch"] == str(EPOCHS)]
    return float(max(last, key=lambda row: float(row["score"]))["learning_rate"])


def main() -> None:
    """Search the learning rates, then train with three seeds, then do without training."""
    processes = parse(__doc__).processes
    searches = [
        Run(reward, method, SEARCH_SEED, noise=VALIDATION)
        for reward, method in itertools.product(EXPERIMENTS, METHODS)
    ]
    run_all(search, searches, COLUMNS, 3, SEARCH, processes)
    runs = [
        Run(reward, method, seed, chosen(reward, method))
        for seed, reward, method in itertools.product(SEEDS, EXPERIMENTS, METHODS)
    ]
    runs += [Run(reward, method) for method, reward in itertools.product(WITHOUT, EXPERIMENTS)]
    run_all(measure, runs, COLUMNS, 3, RESULT, processes)


if __name__ == "__main__":
    main()

"""Why losses on the forward process do badly in img2img: `python -m benchmarks.results.forward_starts`.

The task is digits in other colors, as in recolor.py. The examples of a loss are varied: final latents that
are re-noised to any timestep up to the first of sampling ("re-noised"), the states that sampling visited
("visited states"), or fresh noise at the timesteps of these states ("visited timesteps").

First come directions before training: the cosine of each loss's descent with the gradient of the mean reward
through both steps of sampling, on 256 images, with guidance and without. "all alike" weighs every sample by
1, whatever its reward. They go into forward_starts.csv.

Then training runs on 2,560 images with guidance, three learning rates (equal weights: one) and three seeds,
with DDPO for comparison. Five new seeds use the learning rate whose mean reward on validation images is
highest; the directions have all eight seeds. Reward and accuracy on validation images during training, and on
test images at the end, go into forward_starts_runs.csv; the rows "untrained" are the policy before training
and the best setting of edit_grid.csv. Measurements that the files already contain are skipped.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import Row, parse, product, read_rows, run_all, trainer_of, where
from benchmarks.results import recolor
from benchmarks.tiny.requests import edit_requests
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.algorithm import Algorithm, Pairs, Samples
from ddpo_lessons.algorithms.forward_process import ForwardProcess
from ddpo_lessons.data.contexts import check_rewards
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.rewards import recoloring
from ddpo_lessons.training.sampler import scorer
from ddpo_lessons.worlds import digits, load_tiny_sd

DIRECTIONS, RESULTS = (Path(__file__).with_name(f"forward_starts{end}.csv") for end in ("", "_runs"))

COLUMNS = (
    "method", "examples", "learning_rate", "seed", "epoch", "split", "reward", "right", "digit", "colors",
)  # fmt: skip
SEEDS, NEW_SEEDS, EPOCHS, WATCH_EVERY = (0, 1, 2), (3, 4, 5, 6, 7), 20, 5
DIRECTION_EPOCHS = 2  # of 128 images
VALIDATION, TEST = (100, "validation", 1), (200, "test", 1)  # arguments of digits.draw_edits
EXAMPLES = ("re-noised", "visited states", "visited timesteps")
RATES, LOW_RATES = (2e-3, 6e-3, 6e-4), (6e-4, 2e-4, 2e-3)
# Algorithm, settings and learning rates of each method, in the order of the runs.
METHODS: dict[str, tuple[str, Row, tuple[float, ...]]] = {
    "AWM": ("awm", {"train_clip_range": 0.1}, RATES), "RWR": ("rwr", {"sample_group_size": 1}, LOW_RATES),
    "all alike": ("rwr:temperature=1e9", {"sample_group_size": 1}, LOW_RATES[:1]),
    "DDPO": ("ddpo", {"train_clip_range": 0.01}, RATES), "NFT": ("nft", {}, RATES),
    "PEPG": ("pepg", {}, RATES),
}  # fmt: skip
START = FromImages(recolor.POLICY.strength)
SETTINGS: Row = {
    **{name: value for name, value in recolor.SETTINGS.items() if name != "train_clip_range"},
    "num_epochs": EPOCHS,
    "sample_num_batches_per_epoch": 1,  # of 128 images
    "train_batch_size": 64,  # two optimizer steps an epoch
}


class AtTimesteps(ForwardProcess):
    """Examples with fresh noise at the timesteps that sampling visited."""

    def visited_examples(self, trajectory: Any, rows: torch.Tensor, generators: Any) -> Pairs:
        examples = super().visited_examples(trajectory, rows, generators)
        shape = trajectory.final_latents.shape[1:]
        return {**examples, "noise": torch.stack([torch.randn(shape, generator=g) for g in generators])}


def make(name: str, examples: str) -> Algorithm:
    """Make an algorithm, with these examples if it has any."""
    if examples not in EXAMPLES[1:]:
        return make_algorithm(name)
    algorithm = make_algorithm(name, visited_states=True)
    if examples == EXAMPLES[2]:
        algorithm.__class__ = type("AtTimesteps", (AtTimesteps, type(algorithm)), {})
    return algorithm


# -------------------------------------------------------------------------------------------- directions
def gradient(algorithm: Algorithm, samples: Samples, learner: Any, config: Any) -> torch.Tensor:
    """Return the gradient of an algorithm's loss on samples as one vector; no step is taken."""
    algorithm.begin(config, learner.family, 1)
    weights = list(learner.trainable.values())
    stand_in = SimpleNamespace(
        split=lambda pairs: [pairs],
        update_old_policy=lambda decay: None,  # it is the newest one
        old_policy=learner.old_policy,
    )
    advantages = algorithm.advantages(samples.advantages, [None] * len(samples.advantages))
    found = []
    for loss, groups in algorithm.steps(replace(samples, advantages=advantages), stand_in):
        value, _ = loss(learner.denoiser, groups[0])
        parts = torch.autograd.grad(value, weights)
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found).mean(0)


def directions(run: Row) -> list[Row]:
    """Return the cosine of each loss's descent with the gradient of the mean reward, before training."""
    kinds = {(name, kind): make(name.lower(), kind) for name in ("AWM", "NFT", "RWR") for kind in EXAMPLES}
    for kind in EXAMPLES:
        alike = make("rwr", kind)
        alike.temperature = math.inf  # type: ignore[attr-defined]
        kinds["all alike", kind] = alike
    kinds |= {
        ("DDPO", "actions"): make_algorithm("ddpo"),
        ("reward", ""): make_algorithm("draft", last_steps=2),
    }
    own: Row = {"seed": run["seed"], "sample_guidance_scale": run["guidance"]}
    task = (recoloring(), edit_requests(run["seed"]), load_tiny_sd())
    with trainer_of(task, SETTINGS, own, algorithm=make_algorithm("awm"), start=START) as trainer:
        learner = SimpleNamespace(
            denoiser=trainer.learner.denoiser, trainable=trainer.learner.trainable,
            old_policy=trainer.learner.old_policy, family=trainer.family,
        )  # fmt: skip
        sums: dict[Any, Any] = dict.fromkeys(kinds, 0.0)
        for epoch in range(DIRECTION_EPOCHS):
            contexts = trainer.contexts.draw(epoch)
            batches, trajectory, _ = trainer.sampler.sample(epoch, contexts)
            rows, scored = torch.arange(len(contexts)), scorer(trainer.reward_function, [*contexts.values()])
            samples = Samples(epoch, 2 * epoch, 0, rows, trajectory, check_rewards(batches), scored)
            for name, algorithm in kinds.items():
                sums[name] = sums[name] + gradient(algorithm, samples, learner, trainer.config)
    climb = sums.pop(("reward", ""))
    cosines = {name: torch.cosine_similarity(found, climb, dim=0).item() for name, found in sums.items()}
    return [{"method": m, "examples": e, "cosine": c} for (m, e), c in cosines.items()]


# ---------------------------------------------------------------------------------------------- training
class Evaluation:
    """Evaluates a policy on the same images and prompts, always from the same noise."""

    def __init__(self, split: str) -> None:
        self.split = split
        self.edits = digits.draw_edits(*(TEST if split == "test" else VALIDATION))
        self.evaluation, self.reward = recolor.Evaluation(self.edits), recoloring()
        inputs = self.edits.inputs
        given = zip(inputs.digits.tolist(), inputs.images, strict=True)
        self.metadata: Sequence[Row] = [{"digit": digit, "image": image} for digit, image in given]

    def values(self, images: torch.Tensor) -> Row:
        rewards, _ = self.reward(images, self.edits.prompts, self.metadata)
        fractions = self.evaluation.fractions(images)
        found = {"right": fractions["both"], "digit": fractions["digit"], "colors": fractions["colors"]}
        return {"split": self.split, "reward": rewards.mean().item(), **found}

    def measure(self, pipeline: Any, setting: Any = None) -> Row:
        """Measure a policy, or the untrained one with another setting."""
        if setting is None:
            return self.values(self.evaluation.images(pipeline, recolor.POLICY))
        return self.values(recolor.untrained(pipeline, self.edits, setting))


def train(run: Row) -> list[Row]:
    """Train a run; return its measurements, up to the epoch in which gradients are not finite, if any."""
    pipeline, rows = load_tiny_sd(), list[Row]()
    watch, test = Evaluation("validation"), Evaluation("test")
    if run["method"] == "untrained":
        setting = None if run["examples"] == "before training" else recolor.UNTRAINED_BEST
        return [{"epoch": 0, **evaluation.measure(pipeline, setting)} for evaluation in (watch, test)]
    name, config, _ = METHODS[run["method"]]
    own: Row = {"train_learning_rate": run["learning_rate"], "seed": run["seed"]}
    task, algorithm = (recoloring(), edit_requests(run["seed"]), pipeline), make(name, run["examples"])
    with trainer_of(task, SETTINGS, config, own, algorithm=algorithm, start=START) as trainer:
        for epoch in range(1, EPOCHS + 1):
            try:
                trainer.step(epoch - 1)
            except RuntimeError as error:
                if "finite" not in str(error):
                    raise
                return [*rows, {"epoch": epoch, "reward": math.nan}]
            if epoch % WATCH_EVERY == 0:
                rows.append({"epoch": epoch, **watch.measure(pipeline)})
    return [*rows, {"epoch": EPOCHS, **test.measure(pipeline)}]


def chosen(method: str, examples: str) -> float:
    """Return the learning rate with the highest mean reward on validation images at the end of training."""
    rows = where(read_rows(RESULTS), method=method, examples=examples, split="validation", epoch=str(EPOCHS))
    ends = {rate: where(rows, learning_rate=str(rate)) for rate in METHODS[method][2]}
    means = {
        rate: sum(float(row["reward"]) for row in found if row["seed"] in map(str, SEEDS))
        for rate, found in ends.items()
        if len({row["seed"] for row in found} & set(map(str, SEEDS))) == len(SEEDS)  # none broke off
    }
    return max(means, key=means.__getitem__)


if __name__ == "__main__":
    processes = parse(__doc__).processes
    columns = ("guidance", "seed", "method", "examples", "cosine")
    run_all(directions, product(guidance=(2.0, 1.0), seed=SEEDS + NEW_SEEDS), columns, DIRECTIONS, processes)
    places = ("before training", "best of a grid")
    runs = product(method=("untrained",), examples=places, learning_rate=(0.0,), seed=(0,))
    for place, method in itertools.product(range(len(RATES)), METHODS):  # what decides comes first
        kinds, rates = ("actions",) if method == "DDPO" else EXAMPLES, METHODS[method][2][place : place + 1]
        runs += product(method=(method,), learning_rate=rates, seed=SEEDS, examples=kinds)
    run_all(train, runs, COLUMNS, RESULTS, processes)
    runs = product(seed=NEW_SEEDS, method=METHODS, examples=("actions", *EXAMPLES))
    runs = [run for run in runs if (run["examples"] == "actions") == (run["method"] == "DDPO")]
    runs = [{**run, "learning_rate": chosen(run["method"], run["examples"])} for run in runs]
    run_all(train, runs, COLUMNS, RESULTS, processes)

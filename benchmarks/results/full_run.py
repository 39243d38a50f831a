"""Lesson 13's run in small, with five seeds: `python -m benchmarks.results.full_run`.

Runs the notebook's own cells with another SEED, which decides images, damage, noise and training, and then
with other learning rates and other weights of the penalty. Writes full_run.csv: after each evaluation the
mean reward of the held-out images and the fraction that the evaluator recognizes, and the same of the
untrained pipeline over noise strengths and with best-of-4. For clean, damaged, contrast-stretched, untrained
and trained images it also has the fraction that the reward's classifier recognizes, and the distance from the
clean ones. `hits` has an x for each image that the evaluator recognizes, so that results can be compared
image by image. Finished runs are skipped. The images of the first seed go into full_run.png.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, Row, parse, run_all, save_grid
from benchmarks.speed.lessons import play
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.rewards import animal_margin, pixel_penalty, weighted_sum
from ddpo_lessons.worlds import animals

LESSON = ROOT / "notebooks" / "13_full_run.ipynb"
RESULT = Path(__file__).with_suffix(".csv")
SEEDS = (20, 21, 22, 23, 24)
LESSONS = (2e-3, 40.0)  # learning rate and weight of the penalty
OTHERS = ((1e-3, 40.0), (4e-3, 40.0), (2e-3, 10.0), (2e-3, 0.0))
# Doctor, baselines, preflight, smoke run and disconnect, which do not change the run.
LEFT_OUT = ("13-003", "13-021", "13-022", "13-026", "13-028", "13-033")
SHOWN = 8


def train(run: Row) -> list[Row]:
    """Run the lesson with a seed, a learning rate and a penalty; return a row for each measurement."""

    def config_of(**settings: Any) -> DDPOConfig:
        return DDPOConfig(**{**settings, "train_learning_rate": run["learning_rate"]})

    parts = {"margin": (1.0, animal_margin()), "penalty": (run["penalty"], pixel_penalty())}
    changes = {
        "13-001": {"SEED": run["seed"], "DDPOConfig": config_of}, "13-014": {"reward": weighted_sum(parts)}
    }  # fmt: skip
    played = play(LESSON, changes, last="13-036", without=LEFT_OUT)
    contexts, validation = played["held_out"], played["validation"]
    asked = [context[0] for context in contexts], [context[2] for context in contexts]
    judges = {"judge": animal_margin(model=animals.Judge.load()), "second_judge": played["other"]}

    def of(what: str, images: torch.Tensor) -> Row:
        found = {name: judge(images, *asked) > 0 for name, judge in judges.items()}  # (N,) each
        row: Row = {name: hits.double().mean().item() for name, hits in found.items()}
        distance = -pixel_penalty()(images, *asked).mean().item()
        return {"what": what, **row, "distance": distance, "hits": marks(found["second_judge"])}

    rows, measured = list[Row](), list(validation.table())
    if (run["learning_rate"], run["penalty"]) == LESSONS:
        rows += [of(name, played[name]) for name in ("clean", "damaged", "stretched")]
        rows.append(of("untrained", played["before"]))
        measured = [*validation.untrained(0.3, 0.45, 0.6), *validation.untrained(best_of=4), *measured]
        if run["seed"] == SEEDS[0]:
            strip = [played[name][:SHOWN] for name in ("clean", "damaged", "before", "after")]
            save_grid(torch.cat(strip), SHOWN, RESULT.with_suffix(".png"))
    rows.append(of("trained", played["after"]))
    for found in measured:
        row: Row = {"what": found.name, "reward": found.rewards.mean().item()}
        row["second_judge"] = found.evaluations.mean().item() / 100  # the lesson's evaluations are 0 or 100
        rows.append({**row, "hits": marks(found.evaluations)})
    return rows


def marks(hits: torch.Tensor) -> str:
    """Write hits (N,) as text, "x" for an image that is recognized and "." for another one."""
    return "".join("x" if hit else "." for hit in hits.tolist())


if __name__ == "__main__":
    columns = (
        "seed", "learning_rate", "penalty", "what", "reward", "judge", "second_judge", "distance", "hits"
    )  # fmt: skip
    settings = [(seed, *LESSONS) for seed in SEEDS]
    settings += [(seed, *other) for seed in SEEDS for other in OTHERS]
    runs = [dict(zip(columns[:3], values, strict=True)) for values in settings]
    run_all(train, runs, columns, RESULT, parse(__doc__).processes)

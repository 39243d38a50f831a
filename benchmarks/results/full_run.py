"""Lesson 13's run in small, with five seeds: `python -m benchmarks.results.full_run`.

Runs the notebook's own cells with another SEED, which decides images, damage, noise and training. Writes
full_run.csv: after each evaluation the mean reward of the held-out images and the fraction that the evaluator
recognizes, and for comparison the same of the untrained pipeline over noise strengths and with best-of-4. For
clean, damaged, contrast-stretched, untrained and trained images it also has the fraction by another
evaluator, and the distance from the clean ones. The images of the first seed go into full_run.png.
"""

from pathlib import Path

import torch

from benchmarks.common import ROOT, Row, parse, product, run_all, save_grid
from benchmarks.speed.lessons import play
from ddpo_lessons.rewards import animal_margin, pixel_penalty
from ddpo_lessons.worlds import animals

LESSON = ROOT / "notebooks" / "13_full_run.ipynb"
RESULT = Path(__file__).with_suffix(".csv")
SEEDS = (20, 21, 22, 23, 24)
SHOWN = 8


def train(run: Row) -> list[Row]:
    """Run the lesson with a seed; return a row for each thing that was measured."""
    played = play(LESSON, {"13-001": {"SEED": run["seed"]}})
    contexts, validation = played["held_out"], played["validation"]
    judges = {"judge": animal_margin(model=animals.Judge.load()), "second_judge": played["other"]}

    def of(what: str, images: torch.Tensor) -> Row:
        asked = [context[0] for context in contexts], [context[2] for context in contexts]
        found = {name: (judge(images, *asked) > 0).double().mean().item() for name, judge in judges.items()}
        return {"what": what, **found, "distance": -pixel_penalty()(images, *asked).mean().item()}

    rows = [of(name, played[name]) for name in ("clean", "damaged", "stretched")]
    rows.append(of("untrained", validation.images(len(contexts), trained=False)))
    rows.append(of("trained", validation.images(len(contexts))))
    untrained = [*validation.untrained(0.3, 0.45, 0.6), *validation.untrained(best_of=4)]
    for measured in [*untrained, *validation.table()]:
        row: Row = {"what": measured.name, "reward": measured.rewards.mean().item()}
        rows.append({**row, "second_judge": measured.evaluations.mean().item()})
    if run["seed"] == SEEDS[0]:
        strip = [played[name][:SHOWN] for name in ("clean", "damaged", "before", "after")]
        save_grid(torch.cat(strip), SHOWN, RESULT.with_suffix(".png"))
    return rows


if __name__ == "__main__":
    columns = ("seed", "what", "reward", "judge", "second_judge", "distance")
    run_all(train, product(seed=SEEDS), columns, RESULT, parse(__doc__).processes)

"""Lesson 07's live runs of DDPO and branching, with five seeds: `python -m benchmarks.zoo.live`.

Plays the notebook's own cells with another SEED, which decides prompts, images and noise of the training.
Writes live.csv: before, half-way through and after each run the mean reward of the validation images and the
fraction of them that is correct, beside the best untrained setting's and the seconds that the run took.
"""

from pathlib import Path

from benchmarks.common import ROOT, Row, parse, product, run_all
from benchmarks.speed.lessons import play

LESSON = ROOT / "notebooks" / "07_img2img_ddpo.ipynb"
RESULT = Path(__file__).with_suffix(".csv")
SEEDS = (0, 1, 2, 3, 4)  # 0 is the lesson's
COLUMNS = ("seed", "algorithm", "evaluations", "reward", "correct", "untrained", "seconds")


def train(run: Row) -> list[Row]:
    """Play the lesson with a seed to the runs' plot; return a row for each evaluation of each algorithm."""
    played = play(LESSON, {"l07-001": {"SEED": run["seed"]}}, last="l07-054")
    return [
        dict(zip(COLUMNS[1:], (name, *row, played["best"], played["seconds"][name]), strict=True))
        for name, rows in played["runs"].items()
        for row in rows
    ]


if __name__ == "__main__":
    run_all(train, product(seed=SEEDS), COLUMNS, RESULT, parse(__doc__).processes)

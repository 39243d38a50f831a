"""Play lessons with other seeds: `python -m benchmarks.results.other_seeds --lessons 03 04`.

Runs cells of the notebooks with another `ddpo_lessons.lessons.SEED`, so their assertions have to hold for
these seeds as well. other_seeds.csv has a row for each number that a lesson quotes of such runs. "01-wrong"
are the hundred wrong runs of lesson 01; "08-preflight" is whether preflight finds fault I, with ten seeds.
Without `--lessons` all of them are measured; what is already in the CSV is skipped.
"""

import io
import math
import re
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Row, parse, product, run_all
from benchmarks.speed.lessons import play
from ddpo_lessons import checks, lessons
from ddpo_lessons.lessons.faults import FAULTS, put_in
from ddpo_lessons.lessons.run_sets import make_trainer

RESULT = Path(__file__).with_suffix(".csv")
COLUMNS = ("lesson", "seed", "quantity", "value")
SEEDS = (11_000, 12_000, 13_000, 14_000, 15_000)  # far apart, because a cell adds its own number to the seed
RATES = (0.025, 0.05, 0.1, 0.2, 0.4)  # of lesson 04's toy; the lesson has 0.05 and 0.2
Found = dict[str, float]
CELLS = {  # of each lesson, by id
    "03": "l03-01 l03-03 l03-09 l03-20 l03-31 l03-31a",
    "04": "04-001 04-003 04-007 04-011 04-013 04-019 04-020 04-022 04-024 04-025 04-025b 04-027 04-036 "
          "04-037 04-038 04-046 04-047 04-047b",
    "06": "l06-01 l06-03 l06-03b l06-07 l06-09 l06-11 l06-12 l06-14 l06-17 l06-22 l06-25 l06-37",
    "08": "l08-01 l08-10a l08-60",
}  # fmt: skip


def played(lesson: str, seed: int, last: str | None = None) -> tuple[dict[str, Any], str]:
    """Play a lesson's CELLS, or the whole lesson; return its variables, and what it printed."""
    lessons.SEED = seed
    (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    with redirect_stdout(io.StringIO()) as printed:
        return play(path, last=last, only=CELLS.get(lesson, "").split()), printed.getvalue()


def numbers(pattern: str, printed: str) -> list[list[float]]:
    """Return the numbers of each line that has this pattern, which occurs at least once."""
    found = [[*map(float, groups)] for groups in re.findall(pattern, printed)]
    assert found, f"no line has {pattern}"
    return found


def stale_samples(seed: int) -> Found:
    names, _ = played("01", seed, last="c42")
    return {"ESS ratio": names["share_left"](names["ratio"]), "by formula": math.exp(-(names["d"] ** 2))}


def wrong_runs(seed: int) -> Found:
    names, _ = played("01", seed, last="c31")
    return {f"wrong run, seed {n}": names["learn"](names["red_phase"], n) for n in range(1_000, 1_100)}


def log_probs(seed: int) -> Found:
    names, printed = played("03", seed)
    counts = numbers(r"other starts change (\d+), other noise (\d+)", printed)
    found = {f"changed by other {what}, {n}": count[k] for n, count in enumerate(counts)
             for k, what in enumerate(("starts", "noise"))}  # fmt: skip
    red = [names["redness"](names["rows"][step]).mean().item() for step in (0, 6)]
    return {**found, "rise of redness": red[1] - red[0]}


def clipping(seed: int) -> Found:
    names, printed = played("04", seed)
    errors = [abs(aimed - measured) for aimed, measured in numbers(
        r"A = [+-]1: ([\d.]+), without aim [\d.]+, measured ([\d.]+)", printed)]  # fmt: skip
    found = {"largest error of the formula with aim": max(errors)}
    found["timesteps beyond the limit"] = (names["one_step"] > math.sqrt(2e-4)).sum().item()
    for name, (_, moved, advantages) in names["live"].items():
        shift, log_ratio = moved[16]
        center = shift.square().mean().item() / 2
        found[f"mean shift, {name}"] = math.sqrt(2 * center)
        found[f"center / predicted, {name}"] = -log_ratio.mean().item() / center
        outside = log_ratio.expm1().abs() > 5e-3
        found[f"outside, {name}"] = outside.float().mean().item()
        stopped = outside & (log_ratio * advantages[:, None] > 0)
        found[f"no gradient, {name}"] = stopped.float().mean().item()
    for toy, setting in names["TOYS"].items():
        for rate in RATES:
            losses = names["SURROGATES"].values()  # clipped, not clipped
            clipped, free = (names["run_toy"](loss, rate, **setting)[0].mean().item() for loss in losses)
            found[f"times as far, {toy}, {rate}"] = free / clipped
    return found


def foxes(seed: int) -> Found:
    names, _ = played("06", seed)
    found = {f"kB of others, {when}": sizes[1] for when, sizes in names["sizes"].items()}
    found["recognized foxes"], found["recognized others"] = names["right"]["after"]
    return {**found, **{f"times the KL, action {n}": x for n, x in enumerate(names["ratio"].tolist())}}


def rounding(seed: int) -> Found:
    names, _ = played("08", seed)
    return {f"outside in {str(dtype).removeprefix('torch.')}": n for dtype, n in names["outside"].items()}


def preflight(seed: int) -> Found:
    """Whether preflight finds lesson 08's fault I."""
    with tempfile.TemporaryDirectory() as folder, put_in(FAULTS["0 to 255"]):
        found = checks.preflight(make_trainer(folder, seed=seed), plain=False)
    return {"finds fault I": float(not all(finding.passed for finding in found))}


MEASURED: dict[str, tuple[Callable[[int], Found], Any]] = {
    "01": (stale_samples, SEEDS), "01-wrong": (wrong_runs, (0,)), "03": (log_probs, SEEDS),
    "04": (clipping, SEEDS), "06": (foxes, SEEDS), "08": (rounding, SEEDS),
    "08-preflight": (preflight, range(11, 21)),
}  # fmt: skip


def measure(run: Row) -> list[Row]:
    found = MEASURED[run["lesson"]][0](run["seed"])
    return [{"quantity": quantity, "value": value} for quantity, value in found.items()]


if __name__ == "__main__":
    chosen = parse(__doc__, lessons=[*MEASURED])
    runs = [run for lesson in chosen.lessons for run in product(lesson=[lesson], seed=MEASURED[lesson][1])]
    run_all(measure, runs, COLUMNS, RESULT, chosen.processes)

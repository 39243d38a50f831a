"""Write the measured tables into the pages from committed results: `python -m benchmarks.tables`."""

import itertools
import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Row, read_rows, where
from benchmarks.gallery import SECTIONS as GALLERY
from benchmarks.gallery import Section, shown
from benchmarks.recipes import markdown
from benchmarks.results.equal_tasks import TASKS as EQUAL_TASKS
from benchmarks.results.equal_terms import LADDERS, Setting, found
from benchmarks.speed.gpu import EPOCHS
from benchmarks.speed.gpu import RESULT as GPU_RESULT
from benchmarks.speed.time_to_result import first_reached
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.lessons.demo import UNTRAINED_BEST
from images.lessons import lesson_rows, module_rows, setup_cell

PAGES = (
    "README.md", "benchmarks/NOTES.md", "docs/architecture.md", "docs/beside-peers.md",
    "docs/tiny-sd.md", "docs/tiny-sd3.md", "docs/tiny-zoo.md", "docs/which-algorithm.md",
    "docs/howto/your-card.md", "docs/gallery.md",
    "notebooks/07_img2img_ddpo.ipynb", "notebooks/12_which_algorithm.ipynb",
)  # fmt: skip
ANIMAL_SHARES = {"animal": "animal", "artist": "artist", "background": "background"}
ANIMAL_SHARES |= {"all": "all three", "second_judge": "second evaluator"}
SHARES = {"digit": "digit kept", "colors": "colors obeyed", "both": "both"}
SHARES |= {"second_judge": "second evaluator"}


def table(titles: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown; `align` has an l or an r for every column."""
    marks = {"l": "---", "r": "---:"}
    lines = ["| " + " | ".join(cells) + " |" for cells in (titles, [marks[side] for side in align], *rows)]
    return "\n".join(lines).replace("|  |", "| |", not titles[0])  # of an empty title, not of empty cells


def percent(share: Any) -> str:
    return f"{100 * float(share):.1f}%"


def shares(row: Row, columns: Iterable[str]) -> list[str]:
    return [percent(row[name]) for name in columns]


def mean(rows: Sequence[Row], column: str) -> float:
    return statistics.mean(float(row[column]) for row in rows)


def best_setting(best: Row) -> str:
    return f"strength {best['strength']:g}, guidance {best['guidance']:g}, {best['steps']} steps"


def edit_table(found: Mapping[str, Sequence[Row]], columns: Mapping[str, str] = SHARES) -> str:
    """Return the table of ways to edit: means over the seeds, and the range of those that are all correct."""
    lines = []
    for name, measured in found.items():
        cells = [percent(mean(measured, key)) for key in columns]
        if len(measured) > 1:
            right = [100 * float(row[list(columns)[-2]]) for row in measured]
            cells[-2] += f" ({min(right):.1f} to {max(right):.1f})"
        lines.append([name, *cells])
    return table(["", *columns.values()], "l" + "r" * len(columns), lines)


def finding(images: str) -> dict[str, Sequence[Row]]:
    """Return the measurements of each way to do the demo's task, on test images or on new animals."""
    animals = {"test": "practised", "new animals": "new"}[images]
    own = by(where(read("benchmarks/zoo/edit.csv"), animals=animals), "what")
    trained = by(where(read("benchmarks/zoo/demo.csv"), images=images), "algorithm")
    return {
        "the input image": own["untouched"], "a program for this world": own["program"],
        "untrained, RL's settings": own["as RL begins"],
        f"untrained, best settings ({best_setting(asdict(UNTRAINED_BEST))})": own["turned"],
        "best-of-8 at these settings, by RL's reward": own["best-of-8"],
        "supervised training on 2,560 pairs": own["supervised"],
        "DDPO, from a reward": trained["ddpo"], "branching, from a reward": trained["branching"],
    }  # fmt: skip


def demo_table() -> str:
    """Return the demo's table: before RL, and after it by either algorithm."""
    before, best, *_, ddpo, branching = list(finding("test").items())[2:]
    return edit_table(dict([before, best, ddpo, branching]), ANIMAL_SHARES)


def short_table() -> str:
    """Return the README's table of results: what is correct without training, and after it."""
    before, best, best_of_8, supervised, ddpo, branching = list(finding("test").values())[2:]
    ways = {
        "untrained, RL's settings": before, "untrained, best settings": best,
        "untrained, best-of-8": best_of_8, "DDPO": ddpo, "branching": branching,
        "supervised training on pairs": supervised,
    }  # fmt: skip
    best_without_pairs = max([*ways][:-1], key=lambda name: mean(ways[name], "all"))
    lines = []
    for name, rows in ways.items():
        right = [100 * float(row["all"]) for row in rows]
        seeds = f"<br>({min(right):.1f} to {max(right):.1f})".replace(" ", "\xa0") if len(rows) > 1 else ""
        cells = [name, percent(mean(rows, "all")), percent(mean(rows, "second_judge"))]
        cells = [f"**{cell}**" for cell in cells] if name == best_without_pairs else cells
        lines.append([cells[0], cells[1] + seeds, cells[2]])
    return table(["", "correct<br>(lowest to highest seed)", "second evaluator"], "lrr", lines)


def by(rows: list[Row], column: str) -> dict[str, list[Row]]:
    return {name: where(rows, **{column: name}) for name in unique(rows, column)}


def unique(rows: list[Row], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def paper_table(rows: list[Row]) -> str:
    """Return the table of the paper's experiments: how each method ends, mean and range over the seeds."""
    titles = ["reward", "", "reward of test images", "correct", "annotator's utility"]
    lines = []
    for reward, own in by(rows, "reward").items():
        ways = {"untrained": where(own, epoch="0", method="DDPO")}
        for method in ("DDPO", "branching", "RWR", "best-of-8", "turned"):
            measured = where(own, method=method)
            ways[method] = where(measured, epoch=measured[-1]["epoch"])
        turned = ways.pop("turned")
        ways[f"best without training: {turned[0]['setting']}"] = turned
        for way, measured in ways.items():
            score, utility = (spread(measured, name) for name in ("score", "utility"))
            lines.append([reward, way, score, spread(measured, "all", ".0%"), utility])
    return table(titles, "llrrr", lines)


def spread(rows: Sequence[Row], column: str, form: str = ".2f") -> str:
    """Return a mean, with the least and the most where they differ."""
    values = [float(row[column]) for row in rows]
    low, middle, high = (format(value, form) for value in (min(values), statistics.mean(values), max(values)))
    return (middle if low == high else f"{middle} ({low} to {high})").replace("-", "−")


def lesson_table(times: Row) -> str:
    lessons = table(["lesson, your time", "what you learn"], "ll", lesson_rows())
    seconds = times["seconds"].values()
    return (
        f"{lessons}\n\nThe minutes include the exercises. The computer needs {min(seconds):.0f} to "
        f"{max(seconds):.0f} seconds for all cells of a lesson ({times['machine']})."
    )


# Title and form of equal_terms.csv's "second", by task.
SECOND = {"preference": ("annotator", ".2f"), "edit": ("second evaluator", ".1%")}


def at_the_end(task: str, method: str) -> list[Row]:
    """Return the rows of equal_terms.csv at the length that the search chose."""
    rows = where(read(f"{EQUAL}.csv"), task=task, method=method)
    return [row for row in rows if row["evaluations"] == row["length"]]


def equal_table(task: str) -> str:
    """Return a task's methods at the settings that `search_table` has, and what there is without training."""
    second, form = SECOND[task]
    titles = ["", "passes", "reward", "evaluator", second, "diversity"]
    forms = {"reward": ".2f", "judge": ".1%" if task == "edit" else ".0%", "second": form, "diversity": ".3f"}

    def measured(rows: list[Row]) -> list[str]:
        return [spread(rows, name, form) if rows[0][name] else "" for name, form in forms.items()]

    untrained = where(read(f"{EQUAL}_untrained.csv"), task=task)
    lines = [[row["setting"], "", *measured([row])] for row in untrained]
    for method in EQUAL_TASKS[task].methods:
        at = at_the_end(task, method)
        lines.append([method, f"{mean(at, 'passes'):,.0f}", *measured(at)])
    kept = [n for n in range(len(titles)) if n == 0 or any(line[n] for line in lines)]
    cells = [[line[n] for n in kept] for line in lines]
    return table([titles[n] for n in kept], "l" + "r" * (len(kept) - 1), cells)


def search_table(task: str) -> str:
    """Return the two best trials of each method's search."""
    lines = []
    for method in EQUAL_TASKS[task].methods:
        trials = sorted(found(task, method).items(), key=lambda one: -one[1][0])
        lines.append([method, *(_trial(*one) for one in trials[:2])])
    return table(["", "chosen", "second"], "lll", lines)


def _trial(setting: Setting, best: tuple[float, int]) -> str:
    where = f"{setting.learning_rate:g}, {setting.images} in {setting.steps}"
    return f"{where}: {best[0]:.2f} after {best[1]}"


def epochs_table() -> str:
    """Return the search's results for epochs of different sizes: one step at 0.001, means of two seeds."""
    rows = where(read(f"{EQUAL}_search.csv"), learning_rate="0.001", steps="1")
    lines = []
    for task, method, length, column, form in (
        ("preference", "DDPO", "384", "reward", ".2f"),
        ("edit", "DDPO", "1024", "judge", ".0%"),
        ("edit", "branching", "512", "judge", ".0%"),
        ("edit", "branching", "1024", "judge", ".0%"),
        ("edit", "DRaFT", "256", "judge", ".0%"),
        ("edit", "ReFL", "256", "judge", ".0%"),
    ):
        own = where(rows, task=task, method=method, evaluations=length)
        found = {images: format(mean(runs, column), form) for images, runs in by(own, "images").items()}
        name = {"reward": "reward", "judge": "correct images"}[column]
        about = f"{task}, {method}: {name} after {length} evaluations"
        lines.append([about, *(found.get(str(images), "") for images in LADDERS.images)])
    return table(["images per epoch", *map(str, LADDERS.images)], "l" + "r" * len(LADDERS.images), lines)


def details_table(task: str) -> str:
    """Return what changes with each detail: the difference in reward to the method it belongs to, by seed."""
    lines = []
    for name, detail in EQUAL_TASKS[task].details.items():
        own, other = (
            {row["seed"]: float(row["reward"]) for row in at_the_end(task, method)}
            for method in (name, detail.like)
        )
        gains = [reward - other[seed] for seed, reward in own.items()]
        gain = f"{statistics.mean(gains):+.2f} ± {statistics.stdev(gains) / len(gains) ** 0.5:.2f}"
        at = at_the_end(task, name)
        lines.append([name, spread(at, "reward"), gain.replace("-", "−"), spread(at, "judge", ".0%")])
    return table(["", "reward", "difference", "evaluator"], "lrrr", lines)


def results_table() -> str:
    """Return lesson 12's table: the two tasks side by side, untrained and at chosen settings."""
    titles = ["", "preference: reward", "animals", "passes", "edit: correct", "passes"]
    forms = {"preference": {"reward": ".2f", "judge": ".0%"}, "edit": {"judge": ".0%"}}

    def measured(task: str, own: list[Row]) -> list[str]:
        if not own:
            return [""] * (len(forms[task]) + 1)
        passes = f"{mean(own, 'passes'):,.0f}" if "passes" in own[0] else ""
        return [*(spread(own, name, form) for name, form in forms[task].items()), passes]

    lines = []
    before = [where(read(f"{EQUAL}_untrained.csv"), task=task) for task in forms]
    for one, other in zip(*before, strict=False):  # the edit's program stands alone, on the page
        name = one["setting"] if one["setting"] == other["setting"] else "best prompt; best sampling setting"
        lines.append([name, *measured("preference", [one]), *measured("edit", [other])])
    for method in EQUAL_TASKS["preference"].methods:
        lines.append([method, *(cell for task in forms for cell in measured(task, at_the_end(task, method)))])
    found = table(titles, "l" + "r" * (len(titles) - 1), lines)
    return found.replace(" to ", "\xa0to\xa0")  # JupyterLab would break ranges over lines


def guide_table() -> str:
    """Return one result for each answer of lesson 12's guide, beside the result of the untrained model.

    An answer that names two methods has the method with the higher mean over the seeds.
    """
    untrained = {(row["task"], row["setting"]): row for row in read(f"{EQUAL}_untrained.csv")}
    plain = f"{float(untrained['preference', 'as the runs begin']['reward']):.2f}"
    prompt = next(row for (task, name), row in untrained.items() if task == "preference" and '"' in name)
    sampled = next(row for (task, name), row in untrained.items() if task == "edit" and "guidance" in name)
    settings = f"{float(sampled['judge']):.0%}"
    pairs, _, branching = (f"{mean(found, 'all'):.0%}" for found in [*finding("test").values()][-3:])

    def best(task: str, column: str, form: str, *methods: str) -> tuple[str, str]:
        means = {method: mean(at_the_end(task, method), column) for method in methods}
        method = max(means, key=lambda name: means[name])
        return method, format(means[method], form)

    through, correct = best("edit", "judge", ".0%", "ReFL", "DRaFT")
    other, reward = best("preference", "reward", ".2f", "online DPO", "branching")
    rows = [
        ["do not train", "*preference*, best prompt", f"reward {float(prompt['reward']):.2f}", plain],
        ["train on the pairs", "*edit*, 2,560 pairs", f"{pairs} correct", settings],
        ["ReFL or DRaFT", f"*edit*, {through}, 1,024 rewards", f"{correct} correct", settings],
        ["branching or DDPO, small epochs", "*edit*, branching, 5,984 rewards", f"{branching} correct",
         settings],
        ["online DPO or branching, several seeds", f"*preference*, {other}, 384 rewards", f"reward {reward}",
         plain],
    ]  # fmt: skip
    return table(["answer", "measured", "result", "baseline"], "llrr", rows)


def views_table() -> str:
    """Return what fewer steps and a reward of six views bring, on validation images: means of two seeds."""
    rows = read("benchmarks/zoo/edit_views.csv")
    ways = {"12": "five of 12, strength 0.45", "8": "three of 8, strength 0.4"}
    lines = []
    for views, (steps, name) in itertools.product(("1", "6"), ways.items()):
        cells = []
        for algorithm in ("branching", "ddpo"):
            own = where(rows, algorithm=algorithm, steps=steps, views=views)
            cells += [percent(mean(own, "all")), percent(mean(own, "second_judge"))]
        lines.append([name, views, *cells])
    titles = ["steps that are run", "views", "branching", "second evaluator", "DDPO", "second evaluator"]
    return table(titles, "lrrrrr", lines)


def gallery_table(section: Section) -> str:
    titles, *rows = shown(section)
    return table(titles, "l" + "r" * (len(titles) - 1), rows)


def measured_on(days: Iterable[str]) -> str:
    """Return how many days of measurement there are, and which; `days` are ISO dates."""
    first, *others = sorted(days)
    if not others:
        return f"one day, {first}"
    words = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
    count = words[len(others) - 1] if len(others) <= len(words) else f"{1 + len(others)}"
    return f"{count} days, {first} to {others[-1]}"


def speed_ranges(runs: Sequence[Row]) -> dict[str, str]:
    """Return how many times as long an epoch takes as one of this package, as ranges over all runs.

    The names are those of the other trainers in the batches that they document, "large" for both in batches
    of 16, and "floor" for this package's own epoch in epochs of the UNet alone. Only cases count in which
    both trainers have equal gradients.
    """
    rows = [row for run in runs for row in run["rows"] if row.get("gradient_difference")]
    documented = {"TRL": "TRL", "imageddpo": "gaussian-glasses"}
    chosen = {
        name: [row for row in rows if (row["against"], row["size"]) == (name, size)]
        for name, size in documented.items()
    }
    chosen["documented"] = [row for name in documented for row in chosen[name]]
    chosen["large"] = [row for row in rows if row["size"] == "large"]

    def span(rows: Sequence[Row], slow: str, fast: str) -> str:
        ratios = [row[slow]["whole"][0] / row[fast]["whole"][0] for row in rows]
        return f"{min(ratios):.1f} to {max(ratios):.1f}"

    ranges = {name: span(rows, "peer", "ours") for name, rows in chosen.items()}
    return {**ranges, "floor": span(rows, "ours", "floor")}


def speed_table(runs: Sequence[Row]) -> str:
    """Return the README's table of speed: a row for each size of batches."""
    ranges = speed_ranges(runs)
    rows = [
        ["TRL 0.21, in batches of 6 as in its example", f"{ranges['TRL']} times"],
        ["imageddpo, in batches of 4 as in its example", f"{ranges['imageddpo']} times"],
        ["either, in batches of 16", f"{ranges['large']} times"],
    ]
    days = measured_on(run["day"] for run in runs)
    found = table(["an epoch of", "takes, relative to ours"], "lr", rows)
    return f"{found}\n\nThe gradients are equal. Measured on {days} ({runs[-1]['machine']})."


def speed_answer(runs: Sequence[Row]) -> str:
    """Return the answer of the page on speed: the ranges over all days, and the day of its table."""
    ranges, days = speed_ranges(runs), measured_on(run["day"] for run in runs)
    return (
        f"**On a CPU an epoch of TRL or imageddpo takes {ranges['documented']} times as long as an epoch of "
        "this package, with equal gradients.**\n\n"
        "- This holds for the batch sizes that the two projects document. In batches of 16 their epochs take "
        f"{ranges['large']} times as long.\n"
        f"- An epoch of this package takes {ranges['floor']} times as long as the forward and backward "
        "passes of the UNet alone.\n"
        f"- These ranges cover {days}. The figure and the table below have one of these days, "
        f"{runs[-1]['day']}, on which the compiled UNet was also measured."
    )


# Of side_by_side.py.
RATIOS = (("peer", "ours"), ("peer", "compiled"), ("ours", "floor"), ("compiled", "floor"))


def _outcome(row: Row) -> str:
    """Return how much the other trainer's gradients differ from ours and our compiled ones, or an error."""
    if "error" in row:
        return textwrap.shorten(row["error"].replace("|", "/"), 72, placeholder=" …")
    if row["gradient_difference"] is None:
        return f"wrong policy: clip fraction {row['first_clip_fraction']:.2f} before any update"
    return " and ".join(f"{value:.0e}" for value in row["gradient_difference"].values()) + " apart"


def _ratio(row: Row, one: str, other: str) -> str:
    """Return the ratio of two medians, or a dash where the other trainer fails."""
    return f"{row[one]['whole'][0] / row[other]['whole'][0]:.2f}" if {one, other} <= row.keys() else "–"


def peers_table(result: Row) -> str:
    """Return the comparison with other trainers: a row per case and size, the medians of whole epochs."""
    names = ("peer", "ours", "compiled")
    titles = ["case", "batches", "other trainer", "other, s", "ours, s", "compiled, s"]
    titles += ["other / ours", "other / compiled", "ours / floor", "compiled / floor", "gradients"]
    rows = []
    for row in result["rows"]:
        seconds = [f"{row[name]['whole'][0]:.2f}" if name in row else "fails" for name in names]
        ratios = [_ratio(row, *pair) for pair in RATIOS]
        rows.append([row["case"], row["size"], row["against"], *seconds, *ratios, _outcome(row)])
    how = f"median of {result['rounds']} rounds, {result['threads']} threads, {result['machine']}"
    versions = f"Other trainers: {_versions(result['peers'])}. Ours: {_versions(result['ours'])}."
    return table(titles, "lll" + 7 * "r" + "l", rows) + f"\n\nSeconds per epoch ({how}). {versions}"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def gpu_table(result: Row) -> str:
    """Return the epochs of `make gpu`, estimated and measured, or "not run"."""
    titles = ["epoch", "precision", "micro batch", "GB, estimated", "GB", "sampling, s", "training, s"]
    titles += ["first epoch, s", "TFLOP/s", "waits", "ratio error", "result"]
    forms = {"paper_gb": ".1f", "peak_gb": ".1f", "sampling_s": ".1f", "training_s": ".1f"}
    forms |= {"first_epoch_s": ".1f", "rate": ".0f", "waits": "d", "ratio_error": ".0e"}
    rows = []
    for name, epoch in EPOCHS.items():
        row = result.get("parts", {}).get(name, {"result": "not run"})
        passes = f"{epoch.size}, checkpointing" if epoch.checkpointing else f"{epoch.size}"
        if {"sampling_s", "training_s"} <= row.keys():
            work = row["sampling_tflop"] + row["training_tflop"]
            row = {**row, "rate": work / (row["sampling_s"] + row["training_s"])}
        cells = [format(row[key], form) if key in row else "–" for key, form in forms.items()]
        rows.append([name, epoch.precision, passes, *cells, row["result"]])
    return f"{table(titles, 'lll' + 8 * 'r' + 'l', rows)}\n\n{gpu_about(result)}"


def gpu_about(result: Row) -> str:
    """Return the GPU of `make gpu`, and the results of its tests, the lessons and the demo."""
    if not result:
        return "Not run on a GPU yet."
    outcomes, missing = [f"Measured on one GPU ({result['hardware']})."], []
    for name in ("tests", "lessons", "demo"):
        row = result["parts"].get(name)
        if row is None:
            missing.append(f"the {name}")
            continue
        passed = f"{row['passed']} passed, " if "passed" in row else ""
        lasted = f"{row['seconds']:.0f} s, " if "seconds" in row else ""
        outcomes.append(f"{name.capitalize()}: {passed}{lasted}{row['result']}.")
    if missing:
        *others, last = missing
        names = f"{', '.join(others)} or {last}" if others else last
        outcomes.append(f"`make gpu` has not completed {names} yet.")
    return " ".join(outcomes)


def read_gpu() -> Row:
    """Return the results of `make gpu`, which may be none yet."""
    found: Row = json.loads(GPU_RESULT.read_text("utf-8")) if GPU_RESULT.exists() else {}
    return found


NEVER = {"seconds": "inf", "samples": "inf"}  # a run that never gains 15 points


def result_table(rows: list[Row], about: Row) -> str:
    """Return the table of seconds until 15 percentage points more images are correct, per variant."""
    titles = "trainer, settings | seconds, median | seconds, each seed | samples, median | samples per second"
    lines = []
    for variant, own in by(rows, "variant").items():
        runs = list(by(own, "seed").values())
        ends = [first_reached(run) or NEVER for run in runs]
        median = {key: statistics.median(float(end[key]) for end in ends) for key in NEVER}
        trained = {key: sum(float(run[-1][key]) for run in runs) for key in NEVER}
        in_vain = [float(run[-1]["seconds"]) for run in runs if first_reached(run) is None]
        seconds = f"{median['seconds']:,.0f}".replace("inf", f"not within {min(in_vain, default=0):,.0f}")
        each = ", ".join(f"{float(end['seconds']):.0f}" for end in ends).replace("inf", "–")
        samples = f"{median['samples']:,.0f}".replace("inf", "–")
        pace = f"{trained['samples'] / trained['seconds']:.1f}"
        before, best = own[0]["both"], max(float(row["both"]) for row in own)
        lines.append([variant, seconds, each, samples, pace, percent(before), percent(best)])
    found = table([*titles.split(" | "), "correct before", "best"], "lrrrrrr", lines)
    measured = (
        f"Measured on: {about['machine']}, one thread per run. Other trainers: {_versions(about['peers'])}."
    )
    return f"{found}\n\n{measured}"


def read(name: str) -> Any:
    path = ROOT / name
    return read_rows(path) if path.suffix == ".csv" else json.loads(path.read_text("utf-8"))


EQUAL = "benchmarks/results/equal_terms"
SPEED = "benchmarks/speed/side_by_side.json"  # the last of its runs has also the compiled UNet
TABLES: dict[str, Callable[[], str]] = {  # by the name between the marks
    "lessons": lambda: lesson_table(read("benchmarks/speed/lesson_times.json")),
    "lesson-modules": lambda: table(["lesson", "modules"], "ll", module_rows()),
    "steps": lambda: edit_table(by(read("benchmarks/results/recolor_steps.csv"), "sampled")),
    "paper": lambda: paper_table(read("benchmarks/zoo/paper.csv")),
    "demo": demo_table,
    "edit-views": views_table,
    "results": short_table,
    "demo-practised": lambda: edit_table(finding("test"), ANIMAL_SHARES),
    "demo-new": lambda: edit_table(finding("new animals"), ANIMAL_SHARES),
    **{
        name: lambda folder=folder: markdown(json.loads((folder / "evaluation.json").read_text()))
        for name, folder in CHECKPOINTS.items()
    },
    **{f"equal-{task}": lambda task=task: equal_table(task) for task in EQUAL_TASKS},
    **{
        f"gallery-{name}": lambda section=section: gallery_table(section) for name, section in GALLERY.items()
    },
    "guide": guide_table,
    "equal-results": results_table,
    "equal-epochs": epochs_table,
    "equal-details": lambda: details_table("preference"),
    **{f"equal-search-{task}": lambda task=task: search_table(task) for task in EQUAL_TASKS},
    "speed": lambda: speed_table(read(SPEED)["runs"]),
    "speed-answer": lambda: speed_answer(read(SPEED)["runs"]),
    "peers": lambda: peers_table(read(SPEED)["runs"][-1]),
    "gpu": lambda: gpu_table(read_gpu()),
    "gpu-about": lambda: gpu_about(read_gpu()),
    "time-to-result": lambda: result_table(
        read("benchmarks/speed/time_to_result.csv"), read("benchmarks/speed/time_to_result.json")
    ),
}


def filled(text: str) -> str:
    for name, table in TABLES.items():
        if f"<!-- {name} -->" in text:
            block = f"<!-- {name} -->\n{table()}\n<!-- /{name} -->"
            pattern = rf"<!-- {name} -->.*?<!-- /{name} -->"
            text = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def filled_page(path: Path) -> str:
    """Return a page, or a notebook with its set-up cell, with every table made again."""
    text = path.read_text("utf-8")
    if path.suffix != ".ipynb":
        return filled(text)
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = filled("".join(cell["source"])).splitlines(keepends=True)
    setup = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    own = re.split(r"%pip install .*\n", "".join(setup["source"]), maxsplit=1)[1]  # what this lesson imports
    setup["source"] = (setup_cell() + own).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for path in {*(ROOT / page for page in PAGES), *(ROOT / "notebooks").glob("*.ipynb")}:
        path.write_text(filled_page(path), "utf-8")

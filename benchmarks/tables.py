"""Write the measured tables into the pages from committed results: `python -m benchmarks.tables`."""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.speed.time_to_result import first_reached
from ddpo_lessons.tiny import CHECKPOINT
from ddpo_lessons.tiny.recipe import markdown

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "benchmarks/README.md", "benchmarks/NOTES.md", "docs/damage.md")
# What each lesson teaches, the modules that it builds, and its figure in images/.
LESSONS = {
    "01_batching": (
        "the loop of DDPO: samples, minibatches, inner epochs, accumulation, processes",
        ("batching",),
        "01-travel",
    ),
    "02_time_shuffling": (
        "shuffling every sample's timesteps on their own, what must move with them, pairs for speed",
        ("batching",),
        "02-clocks",
    ),
    "03_ddim_log_probs": (
        "a denoising step is an action: its log-probability, replaying it, and where it has none",
        ("ddim",),
        "03-mdp",
    ),
    "04_ppo_clipping": (
        "from REINFORCE to the clipped surrogate; advantages and their traps; a first live run",
        ("ppo", "advantages"),
        "04-rollouts",
    ),
    "05_text_ppo_with_gae": (
        "RLHF's PPO for text from its parts, GAE, reward hacking, TRL's PPO; tokens beside denoising steps",
        ("text/ppo", "text/trainer"),
        "05-two-mdps",
    ),
    "06_text_to_image_ddpo": (
        "the whole loop, DDPO beside RWR, reward hacking and the KL that holds it back, a table of symptoms",
        ("rollout", "trainer", "rwr"),
        "06-loop",
    ),
    "07_img2img_ddpo": (
        "obey the prompt and keep the picture: prompts, reward and hook of your own, and honest baselines",
        ("rollout", "prompts", "rewards"),
        "07-dilemma",
    ),
    "08_full_gpu_run": (
        "Stable Diffusion's size: memory and time on paper, one command, several GPUs, kill and resume",
        ("budget", "presets", "folders"),
        "08-memory",
    ),
}
TASKS = {  # of benchmarks/results/img2img.csv and baselines.csv, with how the table calls them
    "fog": "fog",
    "darkness": "darkness",
    "fading": "faded ink",
    "camouflage": "camouflage",
    "blur": "blur, severity 5",
    "noise": "noise, severity 5",
    "four corruptions": "noise, blur, fog, JPEG, severities 1 to 5",
}
SHARES = {"digit": "digit kept", "colours": "colours obeyed", "both": "both", "second_judge": "second judge"}


def demo_table(result: dict[str, Any]) -> str:
    """Return the demo's table: the untrained pipeline, a row per seed, and the mean."""
    runs = result["runs"]
    lines = ["| | " + " | ".join(SHARES.values()) + " | minutes |", "| --- |" + " ---: |" * (len(SHARES) + 1)]
    best, before = (runs[0][name] for name in ("untrained_best", "before"))
    turned = f"strength {best['strength']:g}, guidance {best['guidance']:g}, {best['steps']} steps"
    rows = [(f"untrained, the best setting: {turned}", best, ""), ("untrained, as RL begins", before, "")]
    rows += [(f"after RL, seed {run['seed']}", run["after"], f"{run['seconds'] / 60:.1f}") for run in runs]
    mean = {key: statistics.mean(run["after"][key] for run in runs) for key in SHARES}
    minutes = f"{statistics.mean(run['seconds'] for run in runs) / 60:.1f}"
    for name, shares, time in [*rows, ("**after RL, mean**", mean, minutes)]:
        lines.append(
            f"| {name} | " + " | ".join(f"{100 * shares[key]:.1f}%" for key in SHARES) + f" | {time} |"
        )
    return "\n".join(lines) + f"\n\nMeasured on: {result['machine']}."


def edit_table(result: dict[str, Any], rows: list[dict[str, str]]) -> str:
    """Return what else does the demo's task: means of the seeds, for "both" the lowest and highest too."""
    runs = result["runs"]
    best = runs[0]["untrained_best"]
    turned = f"strength {best['strength']:g}, guidance {best['guidance']:g}, {best['steps']} steps"
    found = {
        "nothing": [row for row in rows if row["what"] == "untouched"],
        f"turning the knobs ({turned})": [best],
        "a program for this world": [row for row in rows if row["what"] == "program"],
        "supervised on pairs, as many samples": [row for row in rows if row["what"] == "supervised"],
        "RL, from a score": [run["after"] for run in runs],
    }
    lines = ["| | " + " | ".join(SHARES.values()) + " |", "| --- |" + " ---: |" * len(SHARES)]
    for name, own in found.items():
        cells = [f"{100 * statistics.mean(float(row[key]) for row in own):.1f}%" for key in SHARES]
        if len(own) > 1:
            both = [100 * float(row["both"]) for row in own]
            cells[2] += f" ({min(both):.1f} to {max(both):.1f})"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ablation_table(rows: list[dict[str, str]]) -> str:
    """Return what each choice of the demo is worth: the last reading of every variant."""
    lines = ["| variant | " + " | ".join(SHARES.values()) + " |", "| --- |" + " ---: |" * len(SHARES)]
    last = {row["variant"]: row for row in rows}
    for name, row in last.items():
        cells = [f"{100 * float(row[key]):.1f}%" for key in SHARES]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def lesson_table(times: dict[str, Any]) -> str:
    """Return the table of lessons, with the time that each took."""
    lines = ["| lesson | what you learn | time | figure |", "| --- | --- | ---: | --- |"]
    for name, (teaches, modules, figure) in LESSONS.items():
        title = name.replace("_", " ")
        links = ", ".join(f"[`{module}.py`](ddpo_lessons/{module}.py)" for module in modules)
        picture = f'<img src="images/{figure}.svg" alt="{title}" width="240">'
        cells = [
            f"[{title}](notebooks/{name}.ipynb)<br>{links}",
            teaches,
            f"{times['seconds'][name]:.0f} s",
            picture,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\nTimes: in a fresh kernel on {times['machine']}."


def task_table(rows: list[dict[str, str]], baselines: list[dict[str, str]]) -> str:
    """Return the table of img2img tasks: RL beside what does without a reward, on the same test pictures."""
    titles = ["untouched", "best pixel operation", "untrained, best strength", "RL", "supervised, on pairs"]
    lines = [f"| task | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for name, title in TASKS.items():
        own = [row for row in baselines if row["task"] == name and row["test"]]
        chosen = {
            what: [row for row in own if row["what"] == what]
            for what in ("untouched", "operation", "untrained", "supervised")
        }
        trained = [row for row in rows if row["variant"] == name and row["damage"]]
        cells = [_at_best(chosen[what]) for what in ("untouched", "operation", "untrained")]
        cells += [_seeds(trained, "judge"), _seeds(chosen["supervised"], "test")]
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return "\n".join(lines)


def _percent(shares: list[float]) -> str:
    return f"{100 * statistics.mean(shares):.1f}%"


def _at_best(rows: list[dict[str, str]]) -> str:
    """Return what the judge reads with the chosen setting, over all kinds of pictures, and the setting."""
    if not rows:
        return "–"
    (setting, *others) = [row["setting"] for row in rows]
    names = "each kind's own" if others and setting else setting
    return _percent([float(row["test"]) for row in rows]) + (f" ({names})" if names else "")


def _seeds(rows: list[dict[str, str]], column: str) -> str:
    """Return the mean of the seeds, each over all kinds of pictures, and the lowest and highest."""
    if not rows:
        return "–"
    seeds = sorted({row["seed"] for row in rows})
    shares = [statistics.mean(float(row[column]) for row in rows if row["seed"] == seed) for seed in seeds]
    if len(seeds) == 1:
        return f"{_percent(shares)} (one seed)"
    spread = f"{100 * min(shares):.1f} to {100 * max(shares):.1f}"
    return f"{_percent(shares)} ({spread}, {len(seeds)} seeds)"


def torture_table(result: dict[str, Any]) -> str:
    """Return the table of fault experiments: what was done, how often, what came of it."""
    lines = ["| experiment | cases | what came of them | seconds |", "| --- | ---: | --- | ---: |"]
    for name, report in result["experiments"].items():
        outcomes = "<br>".join(f"{count:,} × {outcome}" for outcome, count in report["outcomes"].items())
        cells = [f"`{name}`: {report['what']}", f"{report['cases']:,}", outcomes, f"{report['seconds']:,.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def torture_totals(result: dict[str, Any]) -> str:
    """Return how many cases there were, how long they took and how many failed."""
    reports = result["experiments"].values()
    cases, seconds = (sum(report[key] for report in reports) for key in ("cases", "seconds"))
    totals = f"{cases:,} cases in {seconds / 60:.0f} minutes, {result['failures']} failures"
    return f"{totals}. Measured on: {result['machine']}."


OWN = ("ours", "compiled", "floor", "ordered floor")  # of benchmarks.speed.side_by_side, beside the peer
RATIOS = (
    *(("peer", "ours"), ("peer", "compiled")),
    *(("ours", "floor"), ("ours", "ordered floor"), ("compiled", "floor")),
)


def _outcome(row: dict[str, Any]) -> str:
    """Say how far the peer's gradients and ours, and our compiled ones, are apart, or why they cannot be."""
    if "error" in row:
        return textwrap.shorten(row["error"].replace("|", "/"), 72, placeholder=" …")
    if row["gradient_difference"] is None:
        return f"wrong policy: clip fraction {row['first_clip_fraction']:.2f} before any update"
    apart = " and ".join(f"{value:.0e}" for value in row["gradient_difference"].values())
    return f"gradients {apart} apart"


def peers_table(result: dict[str, Any]) -> str:
    """Return the comparison with the peers: a row per case and size, the medians of whole epochs."""
    lines = [
        "| case | batches | peer | peer, s | ours, s | compiled, s | peer / ours "
        "| peer / compiled | ours / floor | ours / ordered floor | compiled / floor | outcome |",
        "| --- | --- | --- |" + " ---: |" * 8 + " --- |",
    ]
    for row in result["rows"]:
        seconds = {name: row[name]["whole"][0] for name in ("peer", *OWN) if name in row}
        runs = "peer" in seconds
        cells = [row["case"], row["size"], row["against"]]
        cells += [f"{seconds['peer']:.2f}" if runs else "fails"]
        cells += [f"{seconds[name]:.2f}" for name in ("ours", "compiled")]
        cells += [f"{seconds['peer'] / seconds[name]:.2f}" if runs else "–" for name in ("ours", "compiled")]
        cells += [f"{seconds[one] / seconds[other]:.2f}" for one, other in RATIOS[2:]]
        cells += [_outcome(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _measured_on(result)])


def peers_phase_table(result: dict[str, Any]) -> str:
    """Return seconds of every phase (the median; in brackets the smallest and largest), and their ratios."""
    phases = ("sampling", "reward", "training", "whole")
    lines = [
        "| case | batches | who | " + " | ".join(phases) + " |",
        "| --- | --- | --- |" + " ---: |" * len(phases),
    ]
    for row in result["rows"]:
        for name, who in {"peer": row["against"], **{name: name for name in OWN}}.items():
            if name in row:
                spread = [row[name][phase] for phase in phases]
                cells = [f"{middle:.2f} ({low:.2f}–{high:.2f})" for middle, low, high in spread]
                lines.append("| " + " | ".join([row["case"], row["size"], who, *cells]) + " |")
        for one, other in (pair for pair in RATIOS if pair[0] in row):
            cells = [_ratio(row[one][phase][0], row[other][phase][0]) for phase in phases]
            lines.append("| " + " | ".join([row["case"], row["size"], f"{one} / {other}", *cells]) + " |")
    return "\n".join([*lines, "", _measured_on(result)])


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if min(one, other) > 0.001 else "–"  # no reward model is asked here


def _measured_on(result: dict[str, Any]) -> str:
    versions = {
        side: ", ".join(f"{name} {version}" for name, version in result[side].items())
        for side in ("peers", "ours")
    }
    return (
        f"Seconds per epoch, {result['rounds']} rounds, {result['threads']} thread(s), {result['machine']}. "
        f"Peers: {versions['peers']}. Ours: {versions['ours']}."
    )


def result_table(rows: list[dict[str, str]], about: dict[str, Any]) -> str:
    """Return the table of seconds until 15 points more pictures are right, per variant."""
    columns = (
        "seconds, median | seconds, each seed | samples, median | samples a second | right before | best"
    )
    lines = [f"| trainer, settings | {columns} |", "| --- |" + " ---: |" * 6]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        runs = [[row for row in own if row["seed"] == seed] for seed in sorted({row["seed"] for row in own})]
        in_vain = [float(run[-1]["seconds"]) for run in runs if first_reached(run) is None]
        cells = [_median(runs, "seconds", f"not within {min(in_vain, default=0):,.0f}")]
        cells += [", ".join(f"{_reached(run, 'seconds'):.0f}".replace("inf", "–") for run in runs)]
        cells += [_median(runs, "samples", "–")]
        samples, seconds = (sum(float(run[-1][key]) for run in runs) for key in ("samples", "seconds"))
        cells += [f"{samples / seconds:.1f}", f"{100 * float(own[0]['both']):.1f}%"]
        cells += [f"{100 * max(float(row['both']) for row in own):.1f}%"]
        lines.append("| " + " | ".join([variant, *cells]) + " |")
    peers = ", ".join(f"{name} {version}" for name, version in about["peers"].items())
    return "\n".join(lines) + (f"\n\nMeasured on: {about['machine']}, one thread a run. Peers: {peers}.")


def _reached(run: list[dict[str, str]], column: str) -> float:
    """Return a column of the first reading of 15 points more; infinity if there is none."""
    row = first_reached(run)
    return float(row[column]) if row else math.inf


def _median(runs: list[list[dict[str, str]]], column: str, never: str) -> str:
    """Return the median of the runs, of which those that never get there are the last."""
    median = statistics.median(_reached(run, column) for run in runs)
    return f"{median:,.0f}" if median < math.inf else never


def read(name: str) -> Any:
    """Return a committed result of benchmarks/."""
    return json.loads((ROOT / "benchmarks" / name).read_text())


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a committed CSV of benchmarks/."""
    with open(ROOT / "benchmarks" / name, newline="") as file:
        return list(csv.DictReader(file))


def img2img_tasks() -> list[dict[str, str]]:
    return [row for row in read_rows("results/img2img.csv") if row["experiment"] == "tasks"]


TABLES: dict[str, Callable[[], str]] = {  # by the name between the marks
    "tasks": lambda: task_table(img2img_tasks(), read_rows("results/baselines.csv")),
    "lessons": lambda: lesson_table(read("speed/lesson_times.json")),
    "demo": lambda: demo_table(read("results/demo.json")),
    "ablations": lambda: ablation_table(read_rows("results/demo_ablations.csv")),
    "edit": lambda: edit_table(read("results/demo.json"), read_rows("results/edit.csv")),
    "tiny-sd": lambda: markdown(json.loads((CHECKPOINT / "evaluation.json").read_text())),
    "torture": lambda: torture_table(read("torture/counts.json")),
    "torture-totals": lambda: torture_totals(read("torture/counts.json")),
    "peers": lambda: peers_table(read("speed/side_by_side.json")),
    "peers-phases": lambda: peers_phase_table(read("speed/side_by_side.json")),
    "time-to-result": lambda: result_table(
        read_rows("speed/time_to_result.csv"), read("speed/time_to_result.json")
    ),
}


def filled(text: str) -> str:
    """Return the text with every table between its marks made anew."""
    for name, table in TABLES.items():
        if f"<!-- {name} -->" in text:
            block = f"<!-- {name} -->\n{table()}\n<!-- /{name} -->"
            pattern = rf"<!-- {name} -->.*?<!-- /{name} -->"
            text = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for path in (ROOT / page for page in PAGES):
        path.write_text(filled(path.read_text()))

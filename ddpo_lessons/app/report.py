"""`ddpo-lessons report`: runs as one page that needs nothing else, from what their folders hold.

Training writes RUN/report.html whenever it writes a checkpoint.
"""

import base64
import functools
import html
import io
import json
import re
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ddpo_lessons.app.options import Report
from ddpo_lessons.config import RUN, DDPOConfig
from ddpo_lessons.data.images import grid_columns
from ddpo_lessons.run.record import CONFIG
from ddpo_lessons.run.runlog import PREFLIGHT, read_metrics

FILE = "report.html"
JUDGE = "reward/judge"  # as the records call it
MOST_GRIDS = 12  # of a run: the first, the last, and some between them
COLORS = ("#3568b0", "#c04f12", "#2e7d4f", "#8a3f96", "#86660f", "#22262e")
# Of the records of optimizer steps: what they are called, and a heading.
STEP_CURVES = (
    ("approx_kl", "KL from the policy that sampled (0 in an epoch's first step)"),
    ("kl_reference", "KL from the policy before training"),
    ("clip_fraction", "share of ratios outside the clip range (0 in the first step)"),
)


@dataclass(frozen=True)
class Run:
    """What the folder of a run holds."""

    folder: Path
    settings: dict[str, Any]  #: fields of the config
    record: dict[str, Any]  #: what else the run was made with
    epochs: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    findings: list[dict[str, Any]]  #: of its first epoch

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name


def run(arguments: Report) -> int:
    """Write the page, and say where it is."""
    runs = [read(folder) for folder in arguments.runs]
    path = arguments.output or arguments.runs[0] / FILE
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--output {path}: name a page in a folder that is there, such as {FILE}")
    write(path, runs)
    print(f"{path}: open it in a browser")
    return 0


def read(folder: Path) -> Run:
    """Read the folder of a run; a ValueError says that it is none, or what is damaged."""
    try:
        made_with = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{folder} holds no {CONFIG}: give the folder of a run") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / CONFIG} is damaged ({error}): restore it") from error
    kinds = defaultdict(list)
    for record in read_metrics(folder):
        kinds[record["kind"]].append(record)
    seen = folder / PREFLIGHT
    return Run(
        folder,
        {name: value for name, value in made_with.items() if name != RUN},
        made_with.get(RUN, {}),
        kinds["epoch"],
        kinds["step"],
        kinds["validation"],
        json.loads(seen.read_text(encoding="utf-8")) if seen.is_file() else [],
    )


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write the page of one or more runs."""
    title = " · ".join(run.name for run in runs)
    body = [f"<h1>{_text(title)}</h1>", curves(runs), '<div class="runs">']
    body += [f'<section style="--run:{color}">{_of_run(run)}</section>' for run, color in _colored(runs)]
    body += ["</div>", "<h2>Settings</h2>", settings(runs)]
    page = (Path(__file__).with_name("report.template.html")).read_text(encoding="utf-8")
    parts = {"TITLE": _text(title), "BODY": "\n".join(body)}
    page = re.sub("TITLE|BODY", lambda found: parts[found[0]], page)  # in one pass: a title may hold BODY
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(page, encoding="utf-8")
    aside.replace(path)


def _colored(runs: Sequence[Run]) -> Iterable[tuple[Run, str]]:
    return ((run, COLORS[number % len(COLORS)]) for number, run in enumerate(runs))


def _text(value: object) -> str:
    return html.escape(str(value))


# ------------------------------------------------------------------------------------------- curves
def curves(runs: Sequence[Run]) -> str:
    """Draw what the records hold over epochs, a color a run, as inline SVG."""
    if not any(run.epochs for run in runs):
        return "<p>No epoch is done yet.</p>"
    seen = {key for run in runs for row in (*run.epochs, *run.steps) for key in row}
    panels = [_panel(runs, "reward: mean, and the middle 90% of the samples", _draw_rewards)]
    if JUDGE in seen:
        panels.append(_panel(runs, "judge: a second reward, which is not trained on", _draw_judge))
    for key, text in STEP_CURVES:
        if key in seen:
            panels.append(_panel(runs, text, functools.partial(_draw_steps, key=key)))
    return f'<div class="curves">{"".join(panels)}</div>'


def _panel(runs: Sequence[Run], title: str, draw: Callable[[Any, Run, str], None]) -> str:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    axis = figure.subplots()
    for run, color in _colored(runs):
        draw(axis, run, color)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("epoch", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    return svg[svg.index("<svg") :]


def _draw_rewards(axis: Any, run: Run, color: str) -> None:
    """Draw mean and band of training's rewards, and the mean of validation.

    Records that are older than quantiles have a band of one standard deviation.
    """
    x, mean = ([row[key] for row in run.epochs] for key in ("epoch", "reward_mean"))
    low = [row.get("reward_q05", row["reward_mean"] - row["reward_std"]) for row in run.epochs]
    high = [row.get("reward_q95", row["reward_mean"] + row["reward_std"]) for row in run.epochs]
    axis.plot(x, mean, ".-", color=color, label=run.name)
    axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    if run.validations:
        points = [(row["epoch"], row["validation_reward"]) for row in run.validations]
        label = f"{run.name}, validation"
        axis.plot(*zip(*points, strict=True), "o--", color=color, markersize=4, label=label)


def _draw_judge(axis: Any, run: Run, color: str) -> None:
    points = [(row["epoch"], row[JUDGE]) for row in run.epochs if JUDGE in row]
    axis.plot([x for x, _ in points], [y for _, y in points], ".-", color=color, label=run.name)


def _draw_steps(axis: Any, run: Run, color: str, key: str) -> None:
    """Draw an epoch's mean over its optimizer steps."""
    epochs = defaultdict(list)
    for step in run.steps:
        if step.get(key) is not None:
            epochs[step["epoch"]].append(step[key])
    means = [statistics.fmean(values) for values in epochs.values()]
    axis.plot(list(epochs), means, ".-", color=color, label=run.name)


# -------------------------------------------------------------------------------------------- a run
def _of_run(run: Run) -> str:
    done, asked = len(run.epochs), run.settings.get("num_epochs", 0)
    parts = [f"<h2>{_text(run.name)}</h2>", f"<p>{done} of {asked} epochs{_rewards(run)}</p>"]
    if done < asked:
        words = ["ddpo-lessons", "train", "--config", str(run.folder / CONFIG)]
        words += ["--output-dir", str(run.folder), "--resume-from", "latest"]
        parts.append(f"<p>To go on:</p><pre>{_text(shlex.join(words))}</pre>")
    if run.findings:
        parts += ["<h3>The first epoch</h3><ul class=findings>", *map(_finding, run.findings), "</ul>"]
    for kind, heading in (("validation", "Validation"), ("epoch", "Training")):
        grids = find_grids(run.folder, kind)
        if grids:
            parts.append(f"<h3>{heading}</h3>{slider(grids)}")
    return "\n".join(parts)


def _rewards(run: Run) -> str:
    if not run.epochs:
        return ""
    first, last = (run.epochs[place] for place in (0, -1))
    says = f"; reward {first['reward_mean']:.4g} → {last['reward_mean']:.4g}"
    if JUDGE in last:
        says += f", judge {first[JUDGE]:.4g} → {last[JUDGE]:.4g}"
    return f"{says} (means of the first and of the last epoch, each over its own samples)"


def _finding(finding: dict[str, Any]) -> str:
    mark = "ok" if finding["passed"] else "fail"
    return f'<li class="{mark}"><b>{_text(finding["check"])}</b>: {_text(finding["says"])}</li>'


def find_grids(folder: Path, kind: str) -> list[Path]:
    """Return a run's grids of a kind in order: the first, the last, and some between."""
    found = sorted(p for p in folder.glob(f"images/{kind}-*") if p.suffix in (".png", ".jpg"))
    if len(found) <= MOST_GRIDS:
        return found
    places = {round(n * (len(found) - 1) / (MOST_GRIDS - 1)) for n in range(MOST_GRIDS)}
    return [found[place] for place in sorted(places)]


def slider(grids: Sequence[Path]) -> str:
    """Show grids one at a time, by a slider over their epochs; without scripts, the last."""
    last = len(grids) - 1
    shown = "".join(_grid(path, number == last) for number, path in enumerate(grids))
    control = f'<input type="range" min="0" max="{last}" value="{last}" aria-label="epoch">' if last else ""
    return f'<div class="slider">{control}{shown}</div>'


def _grid(path: Path, is_shown: bool) -> str:
    """Cut a grid into its images, each with its caption; one without captions is shown as it is."""
    epoch = int(re.findall(r"\d+", path.stem)[-1])
    kind = "jpeg" if path.suffix == ".jpg" else "png"
    data = f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    aside = path.with_suffix(".json")
    head = f'<div class="grid"{"" if is_shown else " hidden"}><p>epoch {epoch}</p>'
    if not aside.is_file():
        return f'{head}<img src="{data}" alt="epoch {epoch}"></div>'
    captions = json.loads(aside.read_text(encoding="utf-8"))
    columns = grid_columns(len(captions))
    with Image.open(path) as picture:
        rows = -(-len(captions) // columns)
        ratio = (picture.width / columns) / (picture.height / rows)
    tiles = []
    for number, caption in enumerate(captions):
        row, column = divmod(number, columns)
        place = f"{100 * column / max(1, columns - 1):.4g}% {100 * row / max(1, rows - 1):.4g}%"
        tiles.append(
            f'<figure><div class="tile" style="background-position:{place}"></div>'
            f"<figcaption>{_text(caption)}</figcaption></figure>"
        )
    style = f"--grid:url({data});--columns:{columns};--rows:{rows};--ratio:{ratio:.4g}"
    return f'{head}<div class="tiles" style="{style}">{"".join(tiles)}</div></div>'


# ----------------------------------------------------------------------------------------- settings
def settings(runs: Sequence[Run]) -> str:
    """Show what the runs were made with, but for defaults that all have; what differs is marked."""
    rows = [_facts(run) for run in runs]
    defaults, lines = DDPOConfig().to_dict(), []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        differ = any(value != values[0] for value in values)
        if differ or name not in defaults or values[0] != defaults[name]:
            cells = "".join(f"<td>{_text('' if value is None else value)}</td>" for value in values)
            lines.append(f"<tr{' class=differs' if differ else ''}><th>{_text(name)}</th>{cells}</tr>")
    head = "".join(f"<th>{_text(run.name)}</th>" for run in runs)
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(lines)}</table></div>'


def _facts(run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, value in run.record.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {part}" for key, part in value.items())
        facts[name] = value
    return {**facts, **run.settings}

"""Draw seconds per epoch of other trainers and this package (speed/side_by_side)."""

import json
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from plots import BENCHMARKS, plain
from style import CARD, INK, MUTED, PALETTE, label, main

BLUE, ORANGE, *_, RED = PALETTE
RESULT = BENCHMARKS / "speed/side_by_side.json"
PHASES = {"sampling": BLUE, "training": ORANGE}  # the reward's time is too short to be seen
RUNS = ("peer", "ours")  # the table has the others
SIZES = {"TRL": "TRL's example", "gaussian-glasses": "imageddpo's example", "large": "large"}
HEIGHT, PITCH = 0.24, 0.31  # of bars, where a case is 1 high
SIZE = 12  # of the text at the bars


def draw_bar(axes: Axes, y: float, seconds: dict[str, list[float]]) -> None:
    """Draw the phases' medians one after the other, and the spread of the whole as a whisker."""
    at = 0.0
    for phase, color in PHASES.items():
        axes.barh(y, seconds[phase][0], left=at, height=HEIGHT, color=color)
        at += seconds[phase][0]
    middle, low, high = seconds["whole"]
    axes.errorbar(middle, y, xerr=[[middle - low], [high - middle]], color=INK, capsize=2.5, linewidth=1.2)


def remark(row: dict[str, Any], run: str) -> str:
    """Return the text after a bar: its seconds, and whether the other trainer's policy is wrong."""
    text = f"{row[run]['whole'][0]:.1f} s"
    if run == "ours":
        return text
    text += f", {row['peer']['whole'][0] / row['ours']['whole'][0]:.1f} × ours"
    return text if row["gradient_difference"] is not None else f"{text}, wrong policy"


def draw_case(axes: Axes, place: int, row: dict[str, Any]) -> None:
    """Draw the bars of a case below its name, each with its own name and a remark."""
    names = {"peer": row["against"]}
    label(axes, 0, place - 0.38, f" {row['case']}", size=SIZE, align="left", weight="bold")
    for number, run in enumerate(RUNS):
        y = place - 0.07 + PITCH * number
        axes.text(-0.015, y, names.get(run, run), transform=axes.get_yaxis_transform(), ha="right",
                  va="center", fontsize=SIZE, color=MUTED)  # fmt: skip
        if run in row:
            draw_bar(axes, y, row[run])
            text = f" {remark(row, run)}"
            ink = RED if "wrong" in text else INK
            label(axes, row[run]["whole"][2], y, text, ink=ink, size=SIZE, align="left")
        else:
            text = f" fails: {row['error'].partition(':')[0]}"
            label(axes, 0, y, text, ink=RED, size=SIZE, align="left")


def peers() -> Figure:
    """Draw a panel for every choice of batch sizes, with two bars for every case."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))["runs"][-1]
    panel_rows = [[row for row in result["rows"] if row["size"] == size] for size in SIZES]
    heights = [len(rows) for rows in panel_rows]
    figure = Figure(figsize=(6, 2.4 + 0.66 * sum(heights)), facecolor=CARD, layout="constrained")
    panels = figure.subplots(len(SIZES), 1, sharex=True, height_ratios=heights)
    for axes, title, rows in zip(panels, SIZES.values(), panel_rows, strict=True):
        for place, row in enumerate(rows):
            draw_case(axes, place, row)
        axes.set_title(f"batches: {title}", color=INK)
        plain(axes)
        axes.set_yticks([])
        axes.tick_params(axis="x", labelsize=SIZE, colors=INK)
        axes.set_ylim(len(rows) - 0.5, -0.55)
        longest = max(row[run]["whole"][2] for row in result["rows"] for run in RUNS if run in row)
        axes.set_xlim(0, 1.65 * longest)  # the rest is for remarks
    panels[-1].set_xlabel("seconds per epoch: median, smallest and largest")
    handles = [Patch(color=color, label=phase) for phase, color in PHASES.items()]
    figure.legend(handles=handles, frameon=False, ncols=2, loc="outside lower center")
    return figure


if __name__ == "__main__":
    main({"peers": peers})

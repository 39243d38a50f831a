"""Draw seconds per epoch of other trainers, this package and the UNet alone (speed/side_by_side)."""

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
RUNS = ("peer", "ours", "compiled", "floor")
SIZES = {"TRL": "TRL's example", "gaussian-glasses": "gaussian-glasses", "large": "large"}
HEIGHT = 0.155  # of a bar, where a case is 1 high


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
    if run == "floor":
        return text
    if run in ("ours", "compiled"):
        return f"{text}, {row[run]['whole'][0] / row['floor']['whole'][0]:.2f} × floor"
    text += f", {row['peer']['whole'][0] / row['ours']['whole'][0]:.1f} × ours"
    return text if row["gradient_difference"] is not None else f"{text}, wrong policy"


def draw_case(axes: Axes, place: int, row: dict[str, Any]) -> None:
    """Draw the bars of a case, each with its name and a remark."""
    names = {"peer": row["against"]}
    for number, run in enumerate(RUNS):
        y = place + 0.18 * (number - 2)
        axes.text(-0.01, y, names.get(run, run), transform=axes.get_yaxis_transform(), ha="right",
                  va="center", fontsize=9, color=MUTED)  # fmt: skip
        if run in row:
            draw_bar(axes, y, row[run])
            text = f"  {remark(row, run)}"
            ink = RED if "wrong" in text else INK
            label(axes, row[run]["whole"][2], y, text, ink=ink, size=9, align="left")
        else:
            label(axes, 0, y, f"  fails: {row['error'].partition(':')[0]}", ink=RED, size=9, align="left")


def peers() -> Figure:
    """Draw a panel for every choice of batch sizes, with four bars for every case."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))["runs"][-1]
    panel_rows = [[row for row in result["rows"] if row["size"] == size] for size in SIZES]
    heights = [len(rows) for rows in panel_rows]
    figure = Figure(figsize=(9.4, 1.5 + 1.1 * sum(heights)), facecolor=CARD, layout="constrained")
    panels = figure.subplots(len(SIZES), 1, sharex=True, height_ratios=heights)
    for axes, title, rows in zip(panels, SIZES.values(), panel_rows, strict=True):
        for place, row in enumerate(rows):
            draw_case(axes, place, row)
        axes.set_title(f"batches: {title}", fontsize=10.5, color=INK)
        plain(axes)
        axes.set_yticks(range(len(rows)), [row["case"].replace(", ", "\n") for row in rows], fontsize=9.5)
        axes.tick_params(axis="y", length=0, pad=68, colors=INK)
        axes.tick_params(axis="x", labelsize=9, colors=INK)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        longest = max(row[run]["whole"][2] for row in result["rows"] for run in RUNS if run in row)
        axes.set_xlim(0, 1.45 * longest)  # the rest is for remarks
    text = "seconds per epoch: median, and the smallest and largest of the rounds"
    panels[-1].set_xlabel(text, fontsize=9.5)
    handles = [Patch(color=color, label=phase) for phase, color in PHASES.items()]
    below = {"frameon": False, "ncols": 2, "loc": "outside lower center"}
    figure.legend(handles=handles, fontsize=9.5, **below)
    figure.suptitle("Seconds per epoch for the same work", fontsize=12, color=INK)
    return figure


if __name__ == "__main__":
    main({"peers": peers})

"""Draw pictures right over seconds of training, beside imageddpo (benchmarks/speed/time_to_result.py)."""

import json

from matplotlib.figure import Figure
from plots import BENCHMARKS, panels, read_rows
from style import INK, MUTED, PALETTE, main

Rows = list[dict[str, str]]


def read_runs() -> dict[tuple[str, str], Rows]:
    """Return the rows of every variant and seed."""
    runs: dict[tuple[str, str], Rows] = {}
    for row in read_rows("speed/time_to_result.csv"):
        runs.setdefault((row["variant"], row["seed"]), []).append(row)
    return dict(sorted(runs.items()))


def time_to_result() -> Figure:
    """Draw a line for every seed; it ends where 15 points are gained, or at the limit."""
    runs = read_runs()
    about = json.loads((BENCHMARKS / "speed/time_to_result.json").read_text(encoding="utf-8"))
    figure, (axes,) = panels(1, (9, 4))
    colors = dict(zip(dict.fromkeys(variant for variant, _ in runs), PALETTE, strict=False))
    named = set()
    for (variant, _), rows in runs.items():
        before = float(rows[0]["both"])  # guidance differs, and with it what the untrained policy gets
        seconds = [float(row["seconds"]) for row in rows[1:]]
        gained = [float(row["both"]) - before for row in rows[1:]]
        name = variant if variant not in named else None
        axes.plot(seconds, gained, color=colors[variant], linewidth=1.6, label=name)
        axes.plot(seconds[-1:], gained[-1:], "o", color=colors[variant], markersize=5)
        named.add(variant)
    for height, text in ((0.0, "before RL"), (about["gain"], f"+{100 * about['gain']:.0f} points")):
        axes.axhline(height, color=INK, linestyle=":", linewidth=1.2)
        place = axes.get_yaxis_transform()  # x in widths of the panel
        axes.text(1.01, height, text, transform=place, va="center", fontsize=9, color=MUTED)
    axes.set_xscale("log")
    axes.set_xticks([3, 10, 30, 100, 300], ["3", "10", "30", "100", "300"])
    axes.minorticks_off()
    axes.set_xlabel("seconds of training, without the readings", fontsize=9, color=INK)
    axes.set_ylabel("share of pictures right, gained", fontsize=9, color=INK)
    axes.set_facecolor(axes.figure.get_facecolor())
    axes.tick_params(labelsize=8.5, colors=INK)
    figure.legend(fontsize=8.5, frameon=False, ncols=3, loc="outside lower center")
    seeds = len({seed for _, seed in runs})
    title = f"Digit and colours right; a line ends at +15 points or at the limit; seeds: {seeds}"
    axes.set_title(title, fontsize=10.5, color=INK)
    return figure


if __name__ == "__main__":
    main({"time_to_result": time_to_result})

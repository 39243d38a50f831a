"""Draw the gain in correct images over seconds of training (benchmarks/speed/time_to_result.py)."""

import json

from matplotlib.figure import Figure
from plots import BENCHMARKS, of_seeds, panels, plain, read_rows, where
from style import INK, PALETTE, main

STYLES = {  # imageddpo's lines are nearly equal, so one of them is wide, and the other lies on it
    "ddpo-lessons, recolor.py": {"color": PALETTE[0]},
    "ddpo-lessons, the defaults": {"color": PALETTE[1]},
    "imageddpo, gaussian-glasses": {"color": "#8fc7a4", "linewidth": 6, "markersize": 11, "zorder": 1.5},
    "imageddpo, recolor.py's settings": {"color": PALETTE[3], "linestyle": (0, (3, 1.5))},
}


def time_to_result() -> Figure:
    """Draw a line for every seed; it ends where 15 points are gained, or at the limit."""
    rows = read_rows("speed/time_to_result.csv")
    about = json.loads((BENCHMARKS / "speed/time_to_result.json").read_text(encoding="utf-8"))
    figure, (axes,) = panels(1, (6, 5.9))
    for variant, style in STYLES.items():
        runs = of_seeds(where(rows, variant=variant), "seconds", "both")
        for number, run in enumerate(runs):
            # Guidance differs between the settings, and so does the untrained policy's accuracy.
            seconds, gained = run[1:, 0], 100 * (run[1:, 1] - run[0, 1])
            look = {"marker": "o", "markersize": 6, "linewidth": 1.8, **style}
            name = None if number else variant
            axes.plot(seconds, gained, markevery=[-1], label=name, **look)
    for height, text in ((0, "before RL"), (100 * about["gain"], "goal")):
        axes.axhline(height, color=INK, linestyle=":", linewidth=1.2, zorder=1)
        place = axes.get_yaxis_transform()  # x in widths of the panel
        axes.text(1.01, height, text, transform=place, va="center", color=INK)
    axes.set_xscale("log")
    axes.set_xticks([3, 10, 30, 100], ["3", "10", "30", "100"])
    axes.set_yticks([0, 5, 10, 15], ["0", "+5", "+10", "+15"])
    axes.minorticks_off()
    axes.set_xlabel("seconds of training, without evaluation", color=INK)
    plain(axes, colors=INK)
    figure.legend(frameon=False, loc="outside lower center")
    axes.set_title(f"percentage points more correct images, {len(runs)} seeds", color=INK, pad=10)
    return figure


if __name__ == "__main__":
    main({"time_to_result": time_to_result})

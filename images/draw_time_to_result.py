"""Draw the gain in correct images over seconds of training (benchmarks/speed/time_to_result.py)."""

import json

from matplotlib.figure import Figure
from plots import BENCHMARKS, of_seeds, panels, read_rows, where
from style import INK, MUTED, PALETTE, main


def time_to_result() -> Figure:
    """Draw a line for every seed; it ends where 15 points are gained, or at the limit."""
    rows = read_rows("speed/time_to_result.csv")
    about = json.loads((BENCHMARKS / "speed/time_to_result.json").read_text(encoding="utf-8"))
    figure, (axes,) = panels(1, (6, 5.9))
    lines = zip(PALETTE, ("-", "-", "-", "--"), strict=False)  # the last one lies on the line before
    for variant, (color, style) in zip(sorted({row["variant"] for row in rows}), lines, strict=False):
        runs = of_seeds(where(rows, variant=variant), "seconds", "both")
        for number, run in enumerate(runs):
            # Guidance differs between the settings, and so does the untrained policy's accuracy.
            seconds, gained = run[1:, 0], run[1:, 1] - run[0, 1]
            name = None if number else variant
            axes.plot(seconds, gained, style, color=color, linewidth=1.6, label=name)
            axes.plot(seconds[-1:], gained[-1:], "o", color=color, markersize=5)
    for height, text in ((0.0, "before RL"), (about["gain"], f"+{100 * about['gain']:.0f} points")):
        axes.axhline(height, color=INK, linestyle=":", linewidth=1.2)
        place = axes.get_yaxis_transform()  # x in widths of the panel
        axes.text(1.01, height, text, transform=place, va="center", color=MUTED)
    axes.set_xscale("log")
    axes.set_xticks([3, 10, 30, 100, 300], ["3", "10", "30", "100", "300"])
    axes.minorticks_off()
    axes.set_xlabel("seconds of training, without evaluation", color=INK)
    axes.set_ylabel("gain in correct images", color=INK)
    axes.set_facecolor(axes.figure.get_facecolor())
    axes.tick_params(colors=INK)
    figure.legend(frameon=False, loc="outside lower center")
    title = "Images with correct digit and colors;\na line ends at +15 points or the limit; "
    axes.set_title(f"{title}{len(runs)} seeds", color=INK, loc="left")
    return figure


if __name__ == "__main__":
    main({"time_to_result": time_to_result})

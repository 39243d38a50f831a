"""`ddpo-lessons plot`: the figure of one or several runs as a file."""

from pathlib import Path

from ddpo_lessons.cli.options import Plot
from ddpo_lessons.cli.runs import GIVE_A_RUN, lack
from ddpo_lessons.training import figure
from ddpo_lessons.training.record import METRICS
from ddpo_lessons.training.trackers import PLOT


def run(arguments: Plot) -> int:
    """Write the figure, and print its path."""
    if not arguments.runs:
        raise ValueError("plot needs at least one folder of a run: `ddpo-lessons plot FOLDER`")
    for run_dir in arguments.runs:
        if not run_dir.is_dir():
            raise ValueError(f"{lack(run_dir, METRICS)}: {GIVE_A_RUN}")
    folder = arguments.runs[0] if len(arguments.runs) == 1 else Path()
    path = arguments.output or folder / PLOT
    if arguments.output and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"--output {path}: name a file in a folder that exists, such as {PLOT}")
    figure.write(path, *arguments.runs)
    print(path)
    return 0

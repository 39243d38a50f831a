"""The figure of runs: its lines are the records, and drawing it disturbs neither a run nor pyplot."""

import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import numpy as np
import pytest
import torch
from helpers import brightness, make_config, make_pipeline, noisy_image, printed_error
from matplotlib.figure import Figure
from matplotlib.text import Text
from nbclient import NotebookClient
from PIL import Image

from ddpo_lessons import plot_run
from ddpo_lessons.cli.main import main
from ddpo_lessons.image import image_grid, save_grid
from ddpo_lessons.rewards import weighted_sum
from ddpo_lessons.trainer import ImageDDPOTrainer
from ddpo_lessons.training import checkpoint, figure, grids, ticks
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.validation import Validation

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = [
    {"epoch": 1, "max_ratio_error": 0.5, "first_replay_max_ratio_error": 0.0, "clip_fraction": 0.0},
    {"epoch": 1, "max_ratio_error": 0.25, "clip_fraction": 0.5},
    {"epoch": 2, "max_ratio_error": None, "first_replay_max_ratio_error": 0.125, "clip_fraction": None},
    {"epoch": 2, "max_ratio_error": 0.75, "clip_fraction": 1.0},
]
QUANTILES = {
    "reward_q05": -3.0, "reward_q25": 0.0, "reward_q50": 1.5, "reward_q75": 2.0, "reward_q95": 4.0,
}  # fmt: skip
EPOCHS = [
    {"epoch": 1, "reward_mean": 1.0, "reward/clip": 7.0, **QUANTILES},
    {"epoch": 2, "reward_mean": 3.0, "reward/clip": 8.0, **QUANTILES},
]


def write_records(folder: Path, *, rest: str = "", **kinds: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"kind": kind, **row}) + "\n" for kind, rows in kinds.items() for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines) + rest)
    return folder


def write_grid(
    folder: Path, name: str, colors: Sequence[float], side: int = 8, captions: Sequence[str] = ("0 · ",)
) -> None:
    """Write a grid of gray images, with captions unless there are none; one is the caption of all."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images = torch.tensor(colors)[:, None, None, None].expand(-1, 3, side, side)
    save_grid(image_grid(images, min(8, len(colors))), folder / "images" / name, side)
    if captions:
        texts = list(captions) if len(captions) == len(colors) else list(captions) * len(colors)
        (folder / "images" / f"{name}.json").write_text(json.dumps(texts))


def lines(drawn: Figure, key: str) -> list[tuple[list[float], list[float]]]:
    """Return x and y of each run's line of a key."""
    found = [line for axis in drawn.axes for line in axis.lines if line.get_label() == key]
    return [(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) for line in found]


def titles(drawn: Figure) -> list[str]:
    return [axis.get_title() or axis.get_title(loc="left") for axis in drawn.axes]


def legend(drawn: Figure, number: int = 0) -> list[str]:
    """Return the names of the runs, or with number 1 what the lines and bands of the reward are."""
    texts = [text.get_text() for text in drawn.texts if text.get_color() != figure.GRAY]
    texts += [text.get_text() for row in drawn.legends for text in row.get_texts()]
    return [text for text in texts if ("(epoch " in text) == (number == 0)]


def notes(drawn: Figure) -> str:
    """Return the text below the panels."""
    return " ".join(text.get_text() for text in drawn.texts if text.get_color() == figure.GRAY)


def test_lines_are_the_records_and_an_epoch_s_optimizer_steps_one_point(tmp_path):
    validation = [{"epoch": epoch, "validation_reward": epoch + 0.5} for epoch in (0, 2)]
    drawn = plot_run(write_records(tmp_path / "run", validation=validation, step=STEPS, epoch=EPOCHS))
    assert {
        key: lines(drawn, key) for key in ("reward_mean", "reward_q50", "validation_reward", "reward/clip")
    } == {
        "reward_mean": [([1, 2], [1.0, 3.0])],
        "reward_q50": [([1, 2], [1.5, 1.5])],
        "validation_reward": [([0, 2], [0.5, 2.5])],
        "reward/clip": [([1, 2], [7.0, 8.0])],
    }
    assert lines(drawn, "max_ratio_error") == [([1, 2], [0.5, 0.75])]  # the maximum, without what is NaN
    assert lines(drawn, "first_replay_max_ratio_error") == [([1, 2], [0.0, 0.125])]
    assert lines(drawn, "clip_fraction") == [([1, 2], [0.25, 1.0])]  # the mean
    assert titles(drawn) == [
        "reward", "mean reward term: clip", "largest |ratio − 1| (dashed: first step)", "clip fraction",
    ]  # fmt: skip
    assert legend(drawn) == ["run (epoch 2)"]
    bands = ["25% to 75% quantile", "5% to 95%"]
    assert legend(drawn, 1) == ["median", "mean", *bands, "validation"]
    assert notes(drawn) == ""


def test_one_run_has_its_median_and_two_bands_and_several_have_their_means(tmp_path):
    runs = [write_records(tmp_path / name, epoch=EPOCHS) for name in "ab"]
    alone, both = plot_run(runs[0]), plot_run(*runs)
    heights = [
        (band.get_label(), {y for _, y in band.get_paths()[0].vertices.tolist()})
        for band in alone.axes[0].collections
    ]
    assert heights == [("reward_q25", {0.0, 2.0}), ("reward_q05", {-3.0, 4.0})]
    assert [line.get_label() for line in alone.axes[0].lines] == ["reward_mean", "reward_q50"]
    mean, median = alone.axes[0].lines
    assert mean.get_linewidth() < median.get_linewidth()
    assert mean.get_color() != median.get_color()
    assert legend(alone, 1) == ["median", "mean", "25% to 75% quantile", "5% to 95% (−3.0 to 4.0)"]
    assert not both.axes[0].collections
    assert [line.get_label() for line in both.axes[0].lines] == ["reward_mean"] * 2
    assert legend(both, 1) == []
    older = [{"epoch": 1, "reward_mean": 1.0}]
    assert legend(plot_run(write_records(runs[0], epoch=older)), 1) == ["mean"]


def test_the_bands_of_one_epoch_are_bars(tmp_path):
    drawn = plot_run(write_records(tmp_path / "run", epoch=EPOCHS[:1]))
    sizes = [np.ptp(band.get_paths()[0].vertices, axis=0).tolist() for band in drawn.axes[0].collections]
    assert sizes == [[pytest.approx(0.2), 2.0], [pytest.approx(0.2), 7.0]]


@pytest.mark.parametrize(
    ("changes", "expected", "ends"),
    [
        ({}, (-3.35, 4.35), ""),
        ({"reward_q05": -5.0, "reward_q95": 4.0}, (-5.45, 4.45), ""),  # three times the inner band
        ({"reward_q05": -5.5}, (-3.0, 4.35), " (−5.5 to 4.0)"),
        ({"reward_q95": 400.0}, (-3.45, 6.0), " (−3 to 400)"),
        ({"reward_q05": -300.0, "reward_q95": 400.0}, (-3.0, 6.0), " (−300 to 400)"),
        ({"reward_mean": -20.0, "reward_q05": -30.0}, (-31.7, 5.7), ""),  # the mean has the height anyway
        ({"reward_mean": -20.0, "reward_q05": -300.0}, (-20.0, 5.2), " (−300 to 4)"),
        ({"reward_q25": 3.0, "reward_q50": 3.0, "reward_q75": 3.0, "reward_mean": 3.0}, (-3.35, 4.35), ""),
        ({"reward_q05": None, "reward_q95": None}, (-0.15, 3.15), None),
    ],
)  # fmt: skip
def test_the_outer_band_is_whole_unless_the_inner_one_had_less_than_a_third(
    tmp_path, changes, expected, ends
):
    """The validation is 3; a side that is not cut has a margin of 5%."""
    row = {**EPOCHS[0], **changes}
    drawn = plot_run(
        write_records(tmp_path, epoch=[row], validation=[{"epoch": 1, "validation_reward": 3.0}])
    )
    assert drawn.axes[0].get_ylim() == pytest.approx(expected)
    named = [] if ends is None else [f"5% to 95%{ends}"]
    assert [text for text in legend(drawn, 1) if text.startswith("5%")] == named


def test_two_bands_are_as_different_as_the_wide_one_and_the_background(tmp_path):
    """In brightness: at epoch 1.1 the mean is 1.2, the bands begin at 1.5 and 0, and the axis at -0.15."""
    rows = [{**row, "reward_q05": 0.0, "reward_q25": 1.5} for row in (*EPOCHS, {**EPOCHS[0], "epoch": 3})]
    rows[2]["reward_mean"] = 0.0
    drawn = plot_run(write_records(tmp_path / "run", epoch=rows))
    pixels = np.asarray(Image.open(io.BytesIO(drawn._repr_png_())))  # type: ignore[attr-defined]
    axis = drawn.axes[0]
    places = [axis.transData.transform((1.1, y)) for y in (1.75, 0.6, -0.08)]
    inner, outer, around = (float(pixels[len(pixels) - round(y), round(x), 0]) for x, y in places)
    assert around - outer > 20
    assert outer - inner > 30


@pytest.mark.parametrize("rest", ["", '{"kind": "epo', '{"kind": "epoch", "epoch": 3, "rewa'])
def test_a_run_that_goes_on_is_drawn_up_to_its_last_whole_record(tmp_path, rest):
    step = {"epoch": 3, "clip_fraction": 0.5}
    drawn = plot_run(write_records(tmp_path, epoch=EPOCHS, step=[step], rest=rest))
    assert lines(drawn, "reward_mean") == [([1, 2], [1.0, 3.0])]
    assert lines(drawn, "clip_fraction") == [([3], [0.5])]


def test_missing_and_infinite_numbers_leave_gaps_and_no_panel_is_empty(tmp_path):
    text = '{"kind": "epoch", "epoch": 4, "reward_mean": NaN}\n'
    rows = [
        {"epoch": 1, "reward_mean": 1.0, "reward/none": None},  # an older record, without quantiles
        {"epoch": 2, "reward_mean": None, "reward/none": None, "reward/late": 2.0, **QUANTILES},
        {"epoch": 3, "reward_mean": 3.0, "reward/none": None},
    ]
    drawn = plot_run(write_records(tmp_path, epoch=rows, mine=[{"reward_mean": 9.0}], rest=text))
    ((x, y),) = lines(drawn, "reward_mean")
    assert x == [1, 2, 3, 4]
    assert [None if math.isnan(value) else value for value in y] == [1.0, None, 3.0, None]
    assert lines(drawn, "reward/late") == [([2], [2.0])]
    assert titles(drawn)[1:] == ["mean reward term: late"]
    drawn.savefig(tmp_path / "gaps.png")


def test_measures_that_are_zero_in_every_epoch_are_named_in_a_line_below_the_panels(tmp_path):
    step = {"loss": 0.0, "max_ratio_error": 0.0, "clip_fraction": 0.0, "approx_kl": 0.0, "kl_reference": 0.0}

    def drawn(*steps: dict[str, Any], **terms: float | None) -> tuple[list[str], str]:
        rows = [{**row, **{f"reward/{name}": value for name, value in terms.items()}} for row in EPOCHS]
        figure = plot_run(write_records(tmp_path, epoch=rows, step=[{"epoch": 1, **each} for each in steps]))
        return titles(figure)[2:], notes(figure)

    error, clip, kl, reference = figure.TITLES.values()
    assert error == "largest |ratio − 1|"
    zero = "0 in every epoch"
    once = f"{zero}, because each has one optimizer step."
    also = f"{reference} is {zero}."
    assert drawn(step) == ([], f"Largest |ratio − 1|, {clip} and {kl} are {once} {also}")
    assert drawn({**step, "clip_fraction": 0.5}) == (
        [clip], f"Largest |ratio − 1| and {kl} are {once} {also}",
    )  # fmt: skip
    assert drawn({**step, "kl_reference": 0.5}) == (
        [reference], f"Largest |ratio − 1|, {clip} and {kl} are {once}",
    )  # fmt: skip
    assert drawn(step, step) == ([], f"Largest |ratio − 1|, {clip}, {kl} and {reference} are {zero}.")
    assert drawn({**step, "first_replay_max_ratio_error": 1e-4}, step)[0] == [f"{error} (dashed: first step)"]
    others = {"max_ratio_error": 0.5, "approx_kl": 0.5, "kl_reference": None}
    assert drawn({**step, **others}, {**step, **others}, none=0.0) == (
        [error, kl], f"Mean reward term: none and {clip} are {zero}.",
    )  # fmt: skip
    assert drawn({**step, **others, "clip_fraction": None}, gone=None) == ([error, kl], "")


@pytest.mark.parametrize("key", ["clip_fraction", "approx_kl"])
def test_a_measure_that_is_zero_in_one_of_two_runs_or_not_always_finite_has_a_panel(tmp_path, key):
    zero = write_records(tmp_path / "zero", epoch=EPOCHS, step=[{"epoch": 1, key: 0.0}])
    other = write_records(tmp_path / "other", epoch=EPOCHS, step=[{"epoch": 1, key: 0.5}])
    gaps = [{"epoch": 1, key: 0.0}, {"epoch": 2, key: None}]
    for drawn in (plot_run(zero, other), plot_run(write_records(tmp_path / "gap", epoch=EPOCHS, step=gaps))):
        assert titles(drawn)[2:] == [figure.TITLES[key]]
        assert notes(drawn) == ""


def write_config(folder: Path, **record: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"run": record}))
    return folder


def test_runs_of_different_rewards_have_a_panel_of_the_reward_each(tmp_path):
    a, b, c, d = (write_records(tmp_path / name, epoch=EPOCHS) for name in "abcd")
    assert titles(plot_run(a, b)) == ["mean reward", "mean reward term: clip"]  # nothing is known
    for folder, reward in ((a, "warm"), (b, {"warm": 0.5}), (c, "warm")):
        write_config(folder, reward=reward, reward_function="same")
    assert titles(plot_run(a, c)) == ["mean reward", "mean reward term: clip"]
    drawn = plot_run(a, b, c)
    assert titles(drawn) == ["mean reward of a, c", "mean reward of b", "mean reward term: clip"]
    colors = [[line.get_color() for line in axis.lines] for axis in drawn.axes]
    assert colors[0] == colors[2][::2]
    assert colors[1] == colors[2][1::2]
    widths = [axis.get_position().width for axis in drawn.axes]
    assert widths[0] == pytest.approx(widths[1])
    assert widths[2] > 2 * widths[0]
    write_config(d, reward_function="other")  # not of the command line
    assert titles(plot_run(a, d))[:2] == ["mean reward of a", "mean reward of d"]
    write_config(d, reward_function="same")
    assert titles(plot_run(a, d))[:1] == ["mean reward"]
    write_records(d, epoch=[{**EPOCHS[0], "reward/other": 1.0}])
    assert titles(plot_run(a, d))[:2] == ["mean reward of a", "mean reward of d"]
    for text in ("damaged", "{}", "[]"):
        (d / "config.json").write_text(text)
        write_records(d, epoch=EPOCHS)
        assert titles(plot_run(a, d))[:1] == ["mean reward"]


def test_a_run_without_an_epoch_and_the_order_of_a_sum_do_not_split_the_rewards(tmp_path):
    a, b = (write_records(tmp_path / name, epoch=EPOCHS) for name in "ab")
    write_config(a, reward={"warm": 1.0, "clip": 2.0})
    write_config(b, reward={"clip": 2.0, "warm": 1.0})
    assert titles(plot_run(a, b))[:1] == ["mean reward"]
    write_records(b, epoch=[])
    assert titles(plot_run(a, b))[:1] == ["mean reward"]


def test_titles_name_the_weight_of_a_term_if_it_is_known_and_the_same_in_all_runs(tmp_path):
    row = {"epoch": 1, "reward_mean": 1.0, "reward/red": 1.0, "reward/clip_score": 1.0, "reward/judge": 1.0}
    runs = [write_records(tmp_path / name, epoch=[row]) for name in "abcd"]
    write_config(runs[0], reward={"my.py:red": -0.5, "clip_score@folder:1/clip": 1.0})
    write_config(runs[1], reward={"my.py:red": 0.5, "clip_score": 1.0})
    write_config(runs[2], reward={"my.py:red": 0, "other": 1.0})
    write_config(runs[3], reward="edit")
    clip, red = "mean reward term: clip_score", "mean reward term: red"

    def shown(*numbers: int) -> list[str]:
        return sorted(title for title in titles(plot_run(*[runs[n] for n in numbers])) if "term" in title)

    assert shown(0) == [f"{clip} (weight 1)", f"{red} (weight −0.5)"]
    assert shown(0, 1) == [f"{clip} (weight 1)", red]
    assert shown(2) == [clip, f"{red} (weight 0)"]
    assert shown(3) == shown(0, 3) == [clip, red]


def dotted(drawn: Figure) -> list[list[float]]:
    """Return where the dotted lines of each panel stand."""
    panels = [axis for axis in drawn.axes if axis.axison]
    return [[line.get_xdata()[0] for line in axis.lines if line.get_linestyle() == ":"] for axis in panels]


def test_a_resume_that_changed_settings_has_a_dotted_line_in_every_panel(tmp_path):
    function, name = "reward_function a:f → b:g", "reward red → blue"
    changes = [{"epoch": 1, "changes": [function, name, "train_learning_rate 0.1 → 0.2"]}]
    run = write_records(tmp_path / "a", step=STEPS, epoch=EPOCHS, changes=changes)
    drawn = plot_run(run)
    assert dotted(drawn) == [[1.5]] * len(dotted(drawn))
    sentence = "after epoch 1: reward red → blue; train_learning_rate 0.1 → 0.2."
    assert f"Dotted line {sentence}" in notes(drawn)
    changes = [{"epoch": 1, "changes": [function]}]  # of Python, where rewards have no other name
    other = write_records(tmp_path / "b", step=STEPS, epoch=EPOCHS, changes=changes)
    drawn = plot_run(run, other)
    assert f"Dotted line of a {sentence} Dotted line of b after epoch 1: {function}." in notes(drawn)


def test_a_png_has_every_pixel_that_savefig_draws(tmp_path):
    run = write_records(tmp_path / "run", epoch=EPOCHS, step=STEPS)
    figure.write(tmp_path / "a.png", run)
    plot_run(run).savefig(tmp_path / "b.png")
    ours, theirs = (np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB")) for name in "ab")
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_run_that_has_just_begun_is_drawn(tmp_path, epochs):
    older = [{"epoch": 1, "reward_mean": 1.0}][:epochs]
    drawn = plot_run(write_records(tmp_path / "run", epoch=older))
    assert titles(drawn) == ["reward"]
    assert lines(drawn, "reward_mean") == [([1], [1.0])][:epochs]
    assert legend(drawn) == [f"run (epoch {epochs})"]
    drawn.savefig(tmp_path / "begun.png")


def test_names_of_runs_are_in_one_row_of_the_legend_if_they_fit(tmp_path):
    runs = [
        write_records(tmp_path / name, epoch=EPOCHS) for name in ("warm", "cold", "a-much-longer-name" * 4)
    ]
    for count, rows in ((1, 1), (2, 1), (3, 2)):
        drawn = plot_run(*runs[:count])
        assert len(drawn.legends) == rows
        assert (drawn.texts[0].get_text() if drawn.texts else "") == ("warm (epoch 2)" if count == 1 else "")


def test_each_run_has_one_color_in_all_panels_and_a_name_that_tells_it_apart(tmp_path):
    runs = [write_records(tmp_path / f"{n}/run", epoch=EPOCHS, step=STEPS) for n in range(8)]
    drawn = plot_run(*runs)
    by_panel = [[line.get_color() for line in axis.lines] for axis in drawn.axes]
    in_legend = [line.get_color() for row in drawn.legends for line in row.get_lines()]
    assert by_panel[0] == by_panel[1] == by_panel[3] == in_legend
    assert len(set(by_panel[0])) == 8
    assert [name[-60:] for name in legend(drawn)] == [f"{folder} (epoch 2)"[-60:] for folder in runs]


@pytest.mark.parametrize("name", ["_hidden", "$x^$", "a<b & c", "W" * 200])
def test_any_name_of_a_folder_and_of_a_term_is_drawn_as_it_is_and_cut_if_it_is_long(tmp_path, name):
    row = {"epoch": 1, "reward_mean": 1.0, f"reward/{name}": 2.0}
    drawn = plot_run(write_records(tmp_path / name, epoch=[row]))
    drawn.draw_without_rendering()
    if len(name) < 200:
        assert legend(drawn) == [f"{name} (epoch 1)"]
        assert titles(drawn)[1] == f"mean reward term: {name}"
    else:
        assert re.fullmatch(r"…W{9,}W \(epoch 1\)", legend(drawn)[0])
        assert re.fullmatch(r"mean reward term: W{9,}…", titles(drawn)[1])
    assert drawn.axes[1].get_tightbbox().x1 <= 900
    assert drawn.texts[0].get_tightbbox().x1 <= 900
    drawn = plot_run(tmp_path / name, tmp_path / name)
    drawn.draw_without_rendering()
    assert max(row.get_tightbbox().x1 for row in drawn.legends) <= 900


def test_the_rewards_of_the_evaluator_are_no_term_of_the_reward(tmp_path):
    rows = [{**row, "reward/judge": 0.5} for row in EPOCHS]
    assert titles(plot_run(write_records(tmp_path, epoch=rows)))[1:] == [
        "mean reward term: clip",
        "mean of the held-out evaluator",
    ]


def write_whole_run(
    folder: Path, *, terms: int = 2, images: int = 8, epochs: int = 40, **changes: Any
) -> Path:
    """Write the records of a run with all measures, and two grids of images beside their inputs."""
    numbers = range(1, epochs + 1)
    rows = [
        {"epoch": n, "reward_mean": n / 7, **QUANTILES}
        | {f"reward/term {m}": -1234.5 * 10.0 ** (-4 * m) * (1 + 0.001 * n) for m in range(terms)}
        for n in numbers
    ]
    step = {
        "loss": 0.0,
        "max_ratio_error": 0.01,
        "clip_fraction": 0.3,
        "approx_kl": 2e-5,
        "kl_reference": 0.1,
    }
    first = {"first_replay_max_ratio_error": 1e-7}
    steps = [{"epoch": n, **step, **each, **changes} for n in numbers for each in (first, {})]
    run = write_records(folder, epoch=rows, step=steps)
    for epoch in (1, epochs) if images else ():
        captions = [text for n in range(images) for text in ("input", f"{n / 7:.4g} · an animal")]
        write_grid(run, f"epoch-{epoch:06d}", [0.5] * len(captions), captions=captions)
    return run


@pytest.mark.parametrize(("terms", "images"), [(0, 0), (0, 8), (1, 1), (2, 3), (3, 8), (10, 8)])
def test_panels_are_equally_wide_without_a_gap_and_nothing_overlaps(tmp_path, terms, images):
    """The reward has the whole width if a cell would be empty otherwise."""
    drawn = plot_run(write_whole_run(tmp_path, terms=terms, images=images))
    drawn.draw_without_rendering()
    panels = drawn.axes[: 1 + terms + 4]
    boxes = [axis.get_position() for axis in panels]
    widths = [round(box.width, 6) for box in boxes]
    assert len(set(widths[1:])) == 1
    assert (widths[0] > 2 * widths[1]) == (terms % 2 == 0)
    assert (widths[0] == widths[1]) == (terms % 2 == 1)
    assert round(boxes[-1].x1, 6) == round(boxes[0].x1, 6) or terms % 2 == 1  # the last row is full
    assert len({round(box.height, 6) for box in boxes}) == 1
    outer = [axis.get_tightbbox() for axis in drawn.axes]
    outer += [each.get_tightbbox() for each in (*drawn.legends, *drawn.texts)]
    height = drawn.get_size_inches()[1] * drawn.dpi
    assert [box for box in outer if box.x0 < 0 or box.x1 > 900 or box.y0 < 0 or box.y1 > height] == []
    for number, box in enumerate(outer):
        assert [other for other in outer[:number] if box.overlaps(other)] == []


@pytest.mark.parametrize("prompts", [["an animal"], ["a fox in the snow at dawn", "two otters in a river"]])
@pytest.mark.parametrize(
    ("changes", "panels"), [({}, 7), ({"kl_reference": None}, 6), ({"approx_kl": 0.0}, 6)]
)
def test_a_run_with_two_terms_and_images_fits_a_screen_with_text_of_nine_points(
    tmp_path, changes, panels, prompts
):
    run = write_whole_run(tmp_path, images=0, **changes)
    captions = [text for n in range(8) for text in ("input", f"{n} · {prompts[n % len(prompts)]}")]
    for epoch in (1, 40):
        write_grid(run, f"epoch-{epoch:06d}", [0.5] * 16, captions=captions)
    drawn = plot_run(run)
    assert len(drawn.axes) == panels + 2
    assert drawn.get_size_inches()[1] * drawn.dpi <= 900.5
    sizes = {text.get_fontsize() for text in drawn.findobj(Text) if text.get_text()}
    assert min(sizes) >= 9


@pytest.mark.parametrize(
    ("first", "last", "numbers"),
    [
        (1, 1, [1]), (0, 1, [0, 1]), (1, 2, [1, 2]), (1, 6, [1, 2, 3, 4, 5, 6]), (0, 6, [0, 2, 4, 6]),
        (1, 7, [1, 2, 4, 6, 7]), (0, 48, [0, 10, 20, 30, 40, 48]), (0, 41, [0, 10, 20, 30, 41]),
        (0, 400, [0, 100, 200, 300, 400]), (1, 2000, [1, 500, 1000, 1500, 2000]),
        (1500, 2010, [1500, 1600, 1800, 2010]),
    ],
)  # fmt: skip
def test_ticks_are_the_first_the_last_and_round_epochs_between(first, last, numbers):
    assert ticks.of_epochs(first, last) == numbers


def test_all_panels_have_ticks_at_the_first_and_the_last_epoch(tmp_path):
    run = write_whole_run(tmp_path, epochs=48)
    write_records(
        run, rest=(run / "metrics.jsonl").read_text(), validation=[{"epoch": 0, "validation_reward": 1.0}]
    )
    drawn = plot_run(run)
    drawn.draw_without_rendering()
    assert {tuple(axis.get_xticks()) for axis in drawn.axes[:7]} == {(0, 10, 20, 30, 40, 48)}
    assert len({axis.get_xlim() for axis in drawn.axes[:7]}) == 1
    labels = [[label.get_text() for label in axis.get_xticklabels()] for axis in drawn.axes[:7]]
    numbered = ["0", "10", "20", "30", "40", "48"]
    assert labels == [numbered, *[[""] * 6] * 4, numbered, numbered]  # of a column, below the last panel
    assert [bool(axis.get_xlabel()) for axis in drawn.axes[:7]] == [any(each) for each in labels]


@pytest.mark.parametrize(
    ("low", "high", "labels", "unit"),
    [
        (0.07, 0.26, ["0.10", "0.15", "0.20", "0.25"], ""),
        (0.0, 1.05, ["0.0", "0.5", "1.0"], ""),
        (-0.05, 0.04, ["−0.05", "0.00"], ""),
        (-23.0, 11.0, ["−20", "−10", "0", "10"], ""),
        (0.0, 1.1e-4, ["0.0", "0.5", "1.0"], "in 1e−4"),
        (0.0, 5e-7, ["0", "2", "4"], "in 1e−7"),
        (-3.2e7, 1e6, ["−3", "−2", "−1", "0"], "in 1e7"),
        (-1237.0, -1235.7, ["−1237.0", "−1236.5", "−1236.0"], ""),
        (1234.5009, 1234.5051, ["0.000", "0.002"], "minus 1234.502"),
        (1 - 1e-9, 1 + 1e-9, ["0", "1", "2"], "minus 0.999999999, in 1e−9"),
    ],
)  # fmt: skip
def test_ticks_of_an_axis_have_equally_many_decimals(low, high, labels, unit):
    positions, found, note = ticks.of_values(low, high)
    assert found == labels
    assert note == unit
    assert len(positions) == len(labels)
    assert all(low <= position <= high for position in positions)


@pytest.mark.parametrize(
    ("high", "labels"),
    [
        (3e-6, ["0", "1e−7", "1e−6"]), (4e-3, ["0", "1e−5", "1e−3"]), (0.5, ["0", "1e−4", "1e−1"]),
        (20.0, ["0", "1e−5", "1e−2", "1e1"]), (1.5, ["0", "1e−3", "1"]),
    ],
)  # fmt: skip
def test_ticks_of_the_ratio_are_powers_of_ten_with_room_between(high, labels):
    positions, found = ticks.of_powers(high)
    assert found == labels
    assert positions == [float(label.replace("−", "-")) for label in labels]


def captioned(drawn: Figure, title: str) -> list[str]:
    """Return the text below each image, with | between lines: from row to row, and from left to right."""
    (axis,) = (axis for axis in drawn.axes if axis.get_title(loc="left").startswith(title))
    places: dict[float, list[tuple[float, str]]] = {}
    for text in axis.texts:
        x, y = text.get_position()
        places.setdefault(x, []).append((y, text.get_text()))
    assert all(len({y for y, _ in column}) == len(column) for column in places.values())
    return ["|".join(text for _, text in sorted(column)) for _, column in sorted(places.items())]


LONG = "a photograph of a macaw on a branch in the rainforest at dawn, soft light, very detailed, " * 3


@pytest.mark.parametrize("count", [1, 3, 4, 8])
@pytest.mark.parametrize("inputs", [False, True])
def test_each_image_has_its_reward_and_prompt_below_it(tmp_path, count, inputs):
    run = write_records(tmp_path, epoch=EPOCHS)
    prompts = ["a fox", LONG, "an otter in the snow", "x" * 99, "$x^2$", "", "two\nlines", "WWWW MMMM WWWW"]
    captions = [
        caption
        for n, prompt in enumerate(prompts[:count])
        for caption in (["input"] if inputs else []) + [f"{n + 0.12345:.4g} · {prompt}"]
    ]
    for epoch in (1, 2):
        write_grid(run, f"epoch-{epoch:06d}", [0.5] * len(captions), captions=captions)
    drawn = plot_run(run)
    what = ("input and result, " if inputs else "") + "reward and prompt below"
    what = f"({what})" if count > 1 else f"({what.replace(' and prompt', '')}), prompt: a fox"
    same = "same input images" if inputs else "same prompt" + "s" * (count > 1)
    assert titles(drawn)[2:] == [f"training images of epoch 1 {what}", f"training images of epoch 2 ({same})"]
    axis = drawn.axes[-2]
    drawn.draw_without_rendering()
    texts = {text: text.get_window_extent() for text in axis.texts}
    by_text = {text.get_text(): box for text, box in texts.items()}
    count = min(count, 4) if inputs else count  # what a row has room for
    for n in range(count):
        assert f"{n + 0.12345:.{3 if count == 1 else 2}f}" in by_text  # three digits of the difference
    assert ("an otter in the snow" in by_text) == (count > 1 and inputs)
    assert sum(text.startswith("xx") and text.endswith("x…") for text in by_text) == (count > 3)
    assert ("$x^2$" in by_text) == (count > 4)
    assert sum(text.endswith("…") and not text.startswith("xx") for text in by_text) == (count > 1)
    latest = [text.get_text() for text in drawn.axes[-1].texts]
    assert sorted(latest) == sorted(text for text in by_text if re.fullmatch(r"\d\.\d+", text))
    assert ("a fox" in by_text) == (count > 1)  # else it is in the title
    panel = axis.get_window_extent()
    for text, box in texts.items():
        assert panel.x0 - 1 <= box.x0 <= box.x1 <= panel.x1 + 1, text
        assert panel.y0 <= box.y0, text
        assert [other for other, place in texts.items() if other is not text and place.overlaps(box)] == []


@pytest.mark.parametrize("later", ["an animal", "a bird"])
def test_one_prompt_of_all_images_appears_once(tmp_path, later):
    run = write_records(tmp_path, epoch=EPOCHS)
    for epoch, prompt in ((1, "an animal"), (2, later)):
        write_grid(run, f"epoch-{epoch:06d}", [0.5] * 4, captions=[f"{n} · {prompt}" for n in range(4)])
    drawn = plot_run(run)
    about = "(reward below), prompt:"
    assert titles(drawn)[2:] == [
        f"training images of epoch 1 {about} an animal",
        "training images of epoch 2 "
        + ("(same prompt)" if later == "an animal" else "(other prompt), prompt: a bird"),
    ]
    assert captioned(drawn, "training images of epoch 2") == ["0", "1", "2", "3"]


def test_a_long_prompt_of_all_images_is_cut(tmp_path):
    run = write_records(tmp_path, epoch=EPOCHS)
    write_grid(run, "epoch-000001", [0.5] * 2, captions=[f"{n} · {LONG}" for n in range(2)])
    drawn = plot_run(run)
    drawn.draw_without_rendering()
    title = titles(drawn)[-1]
    assert title.startswith("training images of epoch 1 (reward below), prompt: a photograph of a")
    assert title.endswith("…")
    assert drawn.axes[-1].get_tightbbox().x1 <= 900


def test_images_of_a_group_are_fewer_if_there_are_many_prompts(tmp_path):
    run = write_records(tmp_path, epoch=EPOCHS)
    prompts = ["fox"] * 4 + ["owl"] * 4 + ["ape"] * 24
    captions = [f"{number} · {prompt}" for number, prompt in enumerate(prompts)]
    write_grid(run, "epoch-000001", [number / 40 for number in range(32)], captions=captions)
    shown = ["0", "1", "2", "4", "5", "6", "8", "9"]
    assert [text.split("|")[0].split(".")[0] for text in captioned(plot_run(run), "training")] == shown


def test_a_prompt_in_another_script_is_drawn_without_a_warning(tmp_path, recwarn):
    run = write_records(tmp_path, epoch=EPOCHS)
    write_grid(run, "epoch-000001", [0.5], captions=["0.5 · 狐 fox"])
    drawn = plot_run(run)
    drawn.savefig(tmp_path / "fox.png")
    assert captioned(drawn, "training") == ["0.5"]
    assert titles(drawn)[-1].endswith("prompt: □ fox")
    assert [str(warning.message) for warning in recwarn if "font" in str(warning.message)] == []


@pytest.mark.parametrize(
    ("rewards", "texts"),
    [
        ("0.3 0.317 1", "0.300 0.317 1.000"), ("0 1", "0 1"), ("0.5 1", "0.5 1.0"), ("0.5", "0.5"),
        ("-12.56 5.722", "−12.6 5.7"), ("0.9991 0.9992 1", "0.9991 0.9992 1.0000"),
        ("155.2 155.2", "155 155"), ("-0.01 999.7", "0 1000"), ("1.235e+04 155.2", "12350 155"),
        ("1.2e+07 0", "1.20e7 0.00e0"),
        ("-3.611e-05", "−3.61e−5"), ("nan 0.25", "nan 0.25"), ("fox", "fox"),
    ],
)  # fmt: skip
def test_rewards_have_equally_many_decimals(rewards, texts):
    assert grids.equal_decimals(rewards.split()) == texts.split()


def write_pairs(run: Path, epoch: int, pairs: dict[float, int], prompt: str = "x") -> None:
    """Write a training grid: of each gray input image, so many results, which are black."""
    shades = [
        shade for input_shade, count in pairs.items() for _ in range(count) for shade in (input_shade, 0)
    ]
    captions = ["input", f"{epoch} · {prompt}"] * (len(shades) // 2)
    write_grid(run, f"epoch-{epoch:06d}", shades, captions=captions)


def shown_inputs(drawn: Figure, axis: int) -> list[int]:
    """Return the shades of the input images of a row in tenths, from left to right."""
    row = np.asarray(drawn.axes[axis].get_images()[0].get_array())[2]
    pairs = np.split(row, np.flatnonzero(np.diff(row[:, 3].astype(int)) > 0) + 1)
    return [round(pair[2, 0] / 25.5) for pair in pairs if pair[2, 3]]


@pytest.mark.parametrize(
    ("first", "latest", "shown", "what"),
    [
        ({0.2: 1, 0.5: 1, 0.8: 1}, {0.8: 1, 0.1: 1, 0.2: 1}, ([2, 8], [2, 8]), "same"),
        ({0.2: 4, 0.5: 4}, {0.5: 4, 0.2: 4}, ([2, 2, 5, 5], [2, 2, 5, 5]), "same"),
        ({0.2: 8}, {0.3: 6, 0.2: 2}, ([2, 2], [2, 2]), "same"),
        ({0.2: 2, 0.5: 1}, {0.3: 1, 0.6: 1}, ([2, 2, 5], [3, 6]), "other"),
    ],
)  # fmt: skip
def test_the_latest_images_are_of_the_input_images_of_the_first_if_there_are_such(
    tmp_path, first, latest, shown, what
):
    run = write_records(tmp_path, epoch=EPOCHS)
    write_pairs(run, 1, first)
    write_pairs(run, 2, latest)
    drawn = plot_run(run)
    assert (shown_inputs(drawn, -2), shown_inputs(drawn, -1)) == shown
    assert titles(drawn)[-1] == f"training images of epoch 2 ({what} input images)"


def test_the_latest_images_are_of_the_prompts_of_the_first_if_there_are_such(tmp_path):
    run = write_records(tmp_path, epoch=EPOCHS)
    for epoch, prompts in ((1, ["fox", "owl", "owl", "ape"]), (2, ["ape", "bee", "owl", "owl"])):
        captions = [f"0.{number} · {prompt}" for number, prompt in enumerate(prompts)]
        write_grid(run, f"epoch-{epoch:06d}", [0.5] * 4, captions=captions)
    drawn = plot_run(run)
    assert captioned(drawn, "training images of epoch 1") == ["0.1|owl", "0.2|owl", "0.3|ape"]
    assert captioned(drawn, "training images of epoch 2 (same prompts)") == ["0.2", "0.3", "0.0"]
    write_grid(run, "epoch-000003", [0.5] * 2, captions=["0.1 · cat", "0.2 · cow"])
    drawn = plot_run(run)
    assert captioned(drawn, "training images of epoch 3 (other prompts)") == ["0.1|cat", "0.2|cow"]


def test_images_are_the_first_and_the_latest_of_validation_before_those_of_training(tmp_path):
    run = write_records(tmp_path, epoch=[{"epoch": 1, "reward_mean": 1.0}])
    for epoch in (1, 2, 10):
        write_grid(run, f"epoch-{epoch:06d}", [epoch / 10] * 2)
    drawn = plot_run(run)
    assert titles(drawn)[1:] == ["training images of epoch 1 (reward below)", "training images of epoch 10"]
    for axis, value in zip(drawn.axes[1:], (round(255 / 10), 255), strict=True):
        pixels = np.asarray(axis.get_images()[0].get_array())
        assert set(np.unique(pixels[pixels[..., 3] > 0][:, :3])) == {value}
    write_grid(run, "validation-000000", [0.0])
    assert titles(plot_run(run))[1:] == ["validation images of epoch 0 (reward below)"]
    write_grid(run, "validation-000000", [0.0, 1.0], captions=["input", "0.5 · a fox"])
    assert titles(plot_run(run))[1:] == [
        "validation images of epoch 0 (input and result, reward below), prompt: a fox"
    ]


def test_several_runs_have_their_latest_images_of_the_same_prompts(tmp_path):
    prompts = {"a": "fox owl ape bee cat", "b": "bee owl ape cow", "c": "ape owl"}
    runs = []
    for number, (name, words) in enumerate(prompts.items()):
        runs.append(write_records(tmp_path / name, epoch=EPOCHS))
        captions = [f"{number}.{n} · {word}" for n, word in enumerate(words.split())]
        write_grid(runs[-1], "epoch-000001", [0.5], captions=["0 · other"])
        write_grid(runs[-1], "epoch-000002", [0.5] * len(captions), captions=captions)
    drawn = plot_run(*runs)
    assert titles(drawn)[2:] == [
        "a: epoch 2 (reward and prompt below)",
        *[f"{n}: epoch 2 (same prompts)" for n in "bc"],
    ]
    assert captioned(drawn, "a: ") == ["0.1|owl", "0.2|ape"]
    assert [captioned(drawn, f"{name}: ") for name in "bc"] == [["1.1", "1.2"], ["2.1", "2.0"]]
    drawn.draw_without_rendering()
    boxes = [axis.get_tightbbox() for axis in drawn.axes]
    assert max(box.x1 for box in boxes) <= 900
    for number, box in enumerate(boxes):
        assert [other for other in boxes[:number] if box.overlaps(other)] == []
    write_grid(runs[1], "epoch-000003", [0.5] * 4, captions=[f"{n} · cow" for n in range(4)])
    drawn = plot_run(*runs[:2])
    assert titles(drawn)[2:] == [
        "a: epoch 2 (reward and prompt below)", "b: epoch 3 (other prompt), prompt: cow",
    ]  # fmt: skip
    assert [len(captioned(drawn, f"{name}: ")) for name in "ab"] == [4, 4]


def test_several_runs_have_no_images_if_one_has_none_or_other_ones_or_a_screen_has_no_room(tmp_path):
    runs = [write_records(tmp_path / name, epoch=EPOCHS) for name in "abcde"]
    for run in runs[1:]:
        write_grid(run, "validation-000001", [0.5] * 2, captions=["input", "0.5 · fox"])
    first = titles(plot_run(*runs[1:3]))[2]
    assert first == "b: validation, epoch 1 (reward below), prompt: fox"
    assert len(titles(plot_run(*runs[1:]))) == 6
    assert len(titles(plot_run(*runs[:2]))) == 2  # the first has none
    assert len(titles(plot_run(*runs[1:], runs[1]))) == 2  # more than four
    write_grid(runs[0], "validation-000001", [0.5] * 2, captions=["0.5 · fox"])
    assert len(titles(plot_run(*runs[:2]))) == 2  # without input images
    write_grid(runs[0], "validation-000001", [0.5] * 2, captions=())
    assert len(titles(plot_run(*runs[:2]))) == 2  # of an older run
    rows = [{**EPOCHS[0], **{f"reward/{n}": 1.0 for n in range(7)}}]
    for run in runs:
        write_records(run, epoch=rows)
    assert len(titles(plot_run(*runs[1:3]))) == 9 + 2
    rows[0] |= {f"reward/{n}": 1.0 for n in range(13)}
    write_records(runs[1], epoch=rows)
    assert not any("epoch" in title for title in titles(plot_run(*runs[1:3])))


@pytest.mark.parametrize(("epochs", "first"), [(16, 2), (15, 1), (48, 5)])
def test_the_first_images_are_of_the_early_epoch_with_the_most_prompts_of_the_latest(tmp_path, epochs, first):
    run = write_records(tmp_path, epoch=EPOCHS)
    prompts = {2: "owl bee", 5: "owl ape", 6: "owl ape fox", epochs: "owl ape fox"}
    for epoch in range(1, epochs + 1):
        words = prompts.get(epoch, "cat dog").split()
        write_grid(
            run, f"epoch-{epoch:06d}", [0.5] * len(words), captions=[f"0.5 · {word}" for word in words]
        )
    assert titles(plot_run(run))[-2].startswith(f"training images of epoch {first} (")


@pytest.mark.parametrize(
    ("count", "inputs", "tiles"),
    [
        (32, False, range(8)),
        (3, False, range(3)),
        (10, False, range(8)),
        (32, True, range(8)),
        (6, True, range(6)),
    ],
)
@pytest.mark.parametrize("side", [8, 256])
def test_the_tiles_that_are_shown_are_whole(count, inputs, tiles, side, tmp_path):
    run = write_records(tmp_path, epoch=EPOCHS)
    captions = ["input", "1 · "] * (count // 2) if inputs else ["1 · "] * count
    write_grid(run, "epoch-000001", [number / 40 for number in range(count)], side, captions)
    pixels = np.asarray(plot_run(run).axes[-1].get_images()[0].get_array())
    values, areas = np.unique(pixels[..., 0][pixels[..., 3] > 0], return_counts=True)
    found = dict(zip(np.round(values / 255 * 40, 1).tolist(), areas.tolist(), strict=True))
    large = {round(value): area for value, area in found.items() if area > 900}  # JPEG blurs the edges
    assert sorted(large) == list(tiles)
    assert max(large.values()) < 1.25 * min(large.values())
    assert sum(large.values()) > 0.9 * sum(found.values())


def test_a_grid_of_an_older_run_without_captions_is_shown_as_it_is(tmp_path):
    run = write_records(tmp_path, epoch=EPOCHS)
    write_grid(run, "epoch-000001", [number / 40 for number in range(10)], captions=())
    drawn = plot_run(run)
    assert titles(drawn)[-1] == "training images of epoch 1"
    height, width, _ = np.asarray(drawn.axes[-1].get_images()[0].get_array()).shape
    assert (width, height) == (868, 217)  # eight columns and two rows


def test_the_command_writes_a_file_or_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [str(write_records(tmp_path / name, epoch=EPOCHS)) for name in "ab"]
    for words, path in (
        (runs[:1], f"{runs[0]}/plot.png"),
        (runs, "plot.png"),
        ([*runs, "--output", "both.PNG"], "both.PNG"),
    ):
        assert main(["plot", *words]) == 0
        assert capsys.readouterr().out == f"{path}\n"
        assert Image.open(path).width == 900
    assert main(["plot", *runs, "--output", "both.svg"]) == 0
    assert "<svg" in Path("both.svg").read_text()
    Path("empty").mkdir()
    for words, message in (
        (["nowhere"], "error: nowhere does not exist: give the folder of a run"),
        (["empty"], "error: empty holds no metrics.jsonl: give the folder of a run that has begun"),
        (["."], f"the folder of a run that has begun, such as {Path('a')}"),
        ([runs[0], "--output", "no/a.png"], "name a file in a folder that exists, such as plot.png"),
        ([runs[0], "--output", "a.xyz"], "'xyz' is not supported"),
        ([], "plot needs at least one folder of a run"),
    ):
        assert main(["plot", *words]) == 2
        assert message in printed_error(capsys)
    assert list(tmp_path.glob(".*")) == []


# ------------------------------------------------------------------------------------------- in a run
def make_trainer(folder: Path, epochs: int = 2) -> ImageDDPOTrainer:
    darkness = weighted_sum({"light": (1.0, brightness), "dark": (-0.5, brightness)})
    config = make_config(folder, num_epochs=epochs, image_grid_freq=1)
    trainer = ImageDDPOTrainer(config, darkness, noisy_image, make_pipeline(), noise_strength=1.0)
    trainer.image_samples_hook = Validation(trainer, [("", torch.zeros(3, 32, 32), {})], every=1)
    return trainer


def test_a_run_draws_its_records_at_each_checkpoint(tmp_path, monkeypatch):
    drawn = []
    plot = figure.plot_run
    monkeypatch.setattr(figure, "plot_run", lambda *folders: drawn.append(plot(*folders)) or drawn[-1])
    before = dict(matplotlib.rcParams)
    trainer = make_trainer(tmp_path / "run")
    trainer.train()
    assert matplotlib.rcParams == before
    assert [legend(each) for each in drawn] == [["run (epoch 1)"], ["run (epoch 2)"]]
    records = read_metrics(tmp_path / "run", "epoch")
    for key in ("reward_mean", "reward/light", "reward/dark"):
        assert lines(drawn[-1], key) == [([1, 2], [record[key] for record in records])]
    held_out = [record["validation_reward"] for record in read_metrics(tmp_path / "run", "validation")]
    assert lines(drawn[-1], "validation_reward") == [([0, 1, 2], held_out)]
    assert titles(drawn[-1])[-2:] == [
        "validation images of epoch 0 (input and result, reward below)",
        "validation images of epoch 2 (same input images)",
    ]  # fmt: skip
    assert Image.open(tmp_path / "run" / "plot.png").width == 900


def test_a_plot_that_cannot_be_written_is_warned_of_once_and_costs_no_epoch(tmp_path):
    (tmp_path / "run" / "plot.png").mkdir(parents=True)  # where the plot would be
    with pytest.warns(
        UserWarning, match=r"cannot write .*plot\.png \(IsADirectoryError.*the run goes on"
    ) as caught:
        make_trainer(tmp_path / "run").train()
    assert len(caught) == 1
    done = [checkpoint.epochs_of(path) for path in checkpoint.list_checkpoints(tmp_path / "run")]
    assert done == [1, 2]
    assert not list((tmp_path / "run").glob(".plot*"))


@pytest.mark.slow
def test_a_notebook_shows_the_figure_once_before_and_after_pyplot_is_there(tmp_path):
    write_records(tmp_path / "run", epoch=EPOCHS)
    sources = [
        "from ddpo_lessons import plot_run\nplot_run('run')",
        "import sys; assert 'matplotlib.pyplot' not in sys.modules",
        "import matplotlib.pyplot as plt\nplt.style.use('dark_background')\nplot_run('run')",
        "plt.plot([1, 2]); figure = plot_run('run')\nassert plt.gcf() is not figure",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    place = {"metadata": {"path": tmp_path}}
    cells = NotebookClient(notebook, kernel_name="python3", resources=place).execute().cells
    shown = [[output for output in cell.outputs if "image/png" in output.get("data", {})] for cell in cells]
    assert [len(outputs) for outputs in shown] == [1, 0, 1, 1]
    assert shown[3][0]["output_type"] == "display_data"  # that of pyplot

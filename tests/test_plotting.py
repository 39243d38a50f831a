"""Grids, strips, the dilemma and sliders."""

import io
import itertools
import re
import warnings
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from ddpo_lessons.image import image_grid
from ddpo_lessons.lessons import demo, run_sets, slider
from ddpo_lessons.lessons.plotting import FRAME, draw_row, plot_dilemma, plot_strip
from ddpo_lessons.worlds import animals


def test_grid_places_images_row_by_row_and_fills_with_white():
    images = torch.stack([torch.full((3, 2, 2), value) for value in (0.0, 0.2, 0.4)])
    pixels = np.array(image_grid(images, columns=2, scale=1))
    assert pixels.shape == (4, 4, 3)
    corners = pixels[0, 0, 0], pixels[0, 2, 0], pixels[2, 0, 0], pixels[2, 2, 0]
    assert corners == (0, 51, 102, 255)


def test_small_images_are_enlarged_without_blending():
    pixels = np.array(image_grid(torch.tensor([0.0, 1.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2), columns=1))
    assert pixels.shape == (96, 192, 3)
    assert set(np.unique(pixels)) == {0, 255}


def test_grid_refuses_nothing():
    with pytest.raises(ValueError, match="N >= 1"):
        image_grid(torch.zeros(0, 3, 4, 4), columns=2)


@pytest.mark.parametrize("count", [1, 4, 6, 8, 10])
def test_labels_of_a_strip_are_readable_and_apart(count):
    """JupyterLab shows 900 pixels as 819 in a window of 1280: there they are at least 11 pixels high."""
    rows = {name: torch.full((12, 3, 2, 2), value) for name, value in (("input", 0.0), ("after RL", 0.5))}
    figure = plot_strip(rows, ["an animal on a yellow background", "seven"] * 6, count)
    width = figure.get_size_inches()[0]
    assert width <= 9
    *prompts, first, second = figure.texts
    assert [text.get_text() for text in (first, second)] == ["input", "after RL"]
    assert [" ".join(text.get_text().split()) for text in prompts[:2]] == (
        ["an animal on a yellow background", "seven"][:count]
    )
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in prompts]
    images = [axis.get_window_extent(renderer) for axis in figure.axes]
    assert len(images) == 2 * count
    for text in figure.texts:
        assert text.get_fontsize() / 72 * 819 / max(width, 9) >= 11
        assert not any(text.get_window_extent(renderer).overlaps(image) for image in images)
    for left, right in itertools.pairwise(boxes):
        assert left.x1 < right.x0
    for box in boxes:
        assert box.y1 <= figure.bbox.y1 + 1
        assert not box.overlaps(first.get_window_extent(renderer))
    assert {axis.images[0].get_array().max() for axis in figure.axes[:count]} == {0.0}
    assert {axis.images[0].get_array().max() for axis in figure.axes[count:]} == {0.5}
    assert all(image.width == pytest.approx(image.height) for image in images)


def test_a_strip_wraps_a_long_name_and_shows_no_more_than_there_is():
    images = torch.zeros(2, 3, 2, 2)
    figure = plot_strip({"a name that is longer than two images are wide": images}, ["one", "two"], 8)
    assert len(figure.axes) == 2
    assert figure.texts[-1].get_window_extent(FigureCanvasAgg(figure).get_renderer()).x1 < figure.bbox.x1 + 5


def test_a_strip_may_have_no_prompts_and_a_text_below_each_image():
    rows = {"J": torch.zeros(3, 3, 2, 2), "K": torch.ones(3, 3, 2, 2)}
    below = {"J": ["−1.000", "0.507", "3.000"], "K": ["4.000", "5.000", "6.000"]}
    figure = plot_strip(rows, (), 2, below=below)
    words = [text.get_text() for text in figure.texts]
    assert words == ["J", "−1.000", "0.507", "K", "4.000", "5.000"]
    renderer = FigureCanvasAgg(figure).get_renderer()
    images = [axis.get_window_extent(renderer) for axis in figure.axes]
    assert len(images) == 4
    numbers = [text.get_window_extent(renderer) for text in figure.texts if len(text.get_text()) > 1]
    for image, number in zip(images, numbers, strict=True):
        assert number.y1 < image.y0  # below its image,
        assert (number.x0 + number.x1) / 2 == pytest.approx(
            (image.x0 + image.x1) / 2, abs=1
        )  # in its middle,
        assert not any(number.overlaps(other) for other in images)  # and on no other
        assert number.y0 > figure.bbox.y0


def test_a_note_ends_above_the_last_image_of_a_row():
    figure = Figure(figsize=(6, 1))
    draw_row(figure, torch.zeros(4, 3, 2, 2), "DDPO", 0.1, 0.1, 0.7, size=13, note="reward 2.0")
    renderer = FigureCanvasAgg(figure).get_renderer()
    name, note = (text.get_window_extent(renderer) for text in figure.texts)
    first, *_, last = (axis.get_window_extent(renderer) for axis in figure.axes)
    assert name.x0 == pytest.approx(first.x0, abs=2)
    assert note.x1 == pytest.approx(last.x1, abs=2)
    assert min(name.y0, note.y0) > last.y1
    assert not name.overlaps(note)


def test_a_strip_warns_of_nothing_in_the_style_of_the_lessons():
    """The style turns a layout on, which warns if it finds nothing to arrange."""
    with plt.style.context("ddpo_lessons.lessons.lesson"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plot_strip({"input": torch.zeros(1, 3, 2, 2)}, ["one"], 1).savefig(io.BytesIO())


def test_images_of_a_strip_have_the_same_light_line_on_all_sides():
    """The style of the lessons hides two sides of a plot."""
    with plt.style.context("ddpo_lessons.lessons.lesson"):
        figure = plot_strip({"input": torch.zeros(2, 3, 2, 2)}, ["one", "two"], 2)
    for axis in figure.axes:
        assert {side.get_visible() for side in axis.spines.values()} == {True}
        assert {side.get_edgecolor() for side in axis.spines.values()} == {to_rgba(FRAME)}


def test_the_dilemma_draws_every_curve_and_path():
    """More of them than there are colors, too."""
    point = {"animal": 0.7, "background": 0.5, "strength": 0.4}
    curves, paths = {f"curve {n}": [point] for n in range(5)}, {f"path {n}": [point] for n in range(4)}
    figure = plot_dilemma(curves, paths, correct="background", kept="animal")
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("background correct (%)", "animal kept (%)")
    assert axes.lines[0].get_xydata().tolist() == [[50.0, 70.0]]
    _, names = axes.get_legend_handles_labels()
    assert names == [f"curve {n}" for n in range(5)] + [f"after path {n}" for n in range(4)]


def test_a_slider_holds_a_frame_for_each_value_and_loads_nothing():
    figure, axis = plt.subplots(figsize=(1, 1))
    page = slider(figure, axis.set_title, ["one", "two", "three"], "number").data
    assert page.count("data:image/png;base64") == 4
    shown, first = re.findall(r'<img src="(.*?)"|frames\[0\] = "(.*?)"', page, re.DOTALL)
    assert shown[0] == first[1].replace("\\\n", "")  # where scripts do not run
    assert page.count('type="range"') == 1
    assert re.search(r"<label>number <input [^>]*>\s<output [^>]*>one</output></label>", page)
    assert "value = [&quot;one&quot;, &quot;two&quot;, &quot;three&quot;][this.value]; anim" in page
    assert "<button" not in page
    assert "http" not in page
    assert figure.number not in plt.get_fignums()


def test_before_after_marks_what_is_correct_and_counts_it():
    edits = animals.draw_edits(demo.SHOWN + 1, 0)
    evaluation, wanted = demo.Evaluation(edits), edits.wanted.images
    figure = demo.before_after(evaluation, {"untrained_best": edits.images, "after": wanted})
    hits = [evaluation.hits(images)["all"][: demo.SHOWN].tolist() for images in (edits.images, wanted)]
    marked = [bool(axis.lines) for axis in figure.axes]
    assert marked == [*[False] * demo.SHOWN, *hits[0], *hits[1]]
    _, *words, before, after = (text.get_text() for text in figure.texts)
    assert words == [prompt.split()[-2] for prompt in edits.prompts[: demo.SHOWN]]
    assert (before, after) == (
        f"untrained, best settings: {sum(hits[0])} of 8 correct",
        f"after RL: {sum(hits[1])} of 8 correct",
    )


@pytest.mark.parametrize(
    ("norms", "ticks", "zero"),
    [([0.1, 0.0], [1, 2], "0"), ([0.1, 0.2, 0.3, 0.2, 0.1], [1, 4], None)],
)
def test_records_name_few_steps_and_a_gradient_of_zero(norms, ticks, zero):
    """A logarithmic axis has no zero, so it stands where 1e-9 would."""
    steps = [
        {"epoch": 1, "step": n, "max_ratio_error": 0.0, "grad_norm": norm} for n, norm in enumerate(norms, 1)
    ]
    trainer = mock.Mock(**{"config.train_clip_range": 0.1})
    run = run_sets.Run(trainer, [{"reward_mean": 0.5}], steps, [], [], [])
    _, ratio, gradient = run_sets.show_records({"A": run}).axes
    assert gradient.get_xticks().tolist() == ratio.get_xticks().tolist() == ticks
    labels = dict(
        zip(gradient.get_yticks(), (text.get_text() for text in gradient.get_yticklabels()), strict=True)
    )
    assert labels.get(1e-9) == zero

"""Grids, the dilemma and sliders."""

import re

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from ddpo_lessons.image import image_grid
from ddpo_lessons.lessons import slider
from ddpo_lessons.lessons.plotting import plot_dilemma


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


def test_the_dilemma_draws_every_curve_and_path():
    """More of them than there are colors, too."""
    point = {"animal": 0.7, "background": 0.5, "strength": 0.4}
    curves, paths = {f"curve {n}": [point] for n in range(5)}, {f"path {n}": [point] for n in range(4)}
    figure = plot_dilemma(curves, paths, correct="background", kept="animal")
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("background correct (%)", "animal kept (%)")
    assert axes.lines[0].get_xydata().tolist() == [[50.0, 70.0]]
    _, names = axes.get_legend_handles_labels()
    assert names == [f"curve {n}" for n in range(5)] + [f"path {n}" for n in range(4)]


def test_a_slider_holds_a_frame_for_each_value_and_loads_nothing():
    figure, axis = plt.subplots(figsize=(1, 1))
    page = slider(figure, axis.set_title, ["one", "two", "three"]).data
    assert page.count("data:image/png;base64") == 4
    shown, first = re.findall(r'<img src="(.*?)"|frames\[0\] = "(.*?)"', page, re.DOTALL)
    assert shown[0] == first[1].replace("\\\n", "")  # where scripts do not run
    assert page.count('type="range"') == 1
    assert "<button" not in page
    assert "http" not in page
    assert figure.number not in plt.get_fignums()

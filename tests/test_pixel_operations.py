"""Pixel operations, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.results import pixel_operations
from benchmarks.results.pixel_operations import OPERATIONS
from ddpo_lessons.tiny import world


@pytest.fixture(scope="module")
def pictures():
    return world.draw_pictures(4, "train", 0, "foggy", 3).images


def two_colours(ink: tuple[float, ...], ground: tuple[float, ...]) -> torch.Tensor:
    """A picture (1, 3, 8, 8) whose upper left quarter is ink."""
    image = torch.tensor(ground)[None, :, None, None].repeat(1, 1, 8, 8)
    image[0, :, :4, :4] = torch.tensor(ink)[:, None, None]
    return image


@pytest.mark.parametrize("name", OPERATIONS)
def test_shape_range_and_determinism(name, pictures):
    before = pictures.clone()
    result = OPERATIONS[name](pictures)
    assert result.shape == pictures.shape
    assert result.dtype == torch.float32
    assert result.min() >= 0
    assert result.max() <= 1
    assert torch.equal(result, OPERATIONS[name](pictures))
    assert torch.equal(pictures, before)
    assert torch.allclose(result[2:3], OPERATIONS[name](pictures[2:3]), atol=1e-5)  # picture by picture
    assert not torch.equal(result, pictures)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_picture_of_one_colour_stays_finite(name):
    assert OPERATIONS[name](torch.full((1, 3, 8, 8), 0.3)).isfinite().all()


def test_stretch_of_a_ramp():
    ramp = torch.linspace(0.2, 0.6, 101)  # the quantiles of 1% and 99% are 0.204 and 0.596
    image = torch.stack([ramp, 0.5 * ramp, ramp.flip(0)])[None, :, None]  # (1, 3, 1, 101)
    expected = ((ramp - 0.204) / 0.392).clamp(0, 1)
    result = OPERATIONS["stretch"](image)[0, :, 0]  # (3, 101)
    assert torch.allclose(result, torch.stack([expected, expected, expected.flip(0)]), atol=1e-5)
    whole = OPERATIONS["min-max stretch"](image)[0, 0, 0]
    assert torch.allclose(whole, torch.linspace(0, 1, 101), atol=1e-5)


def test_median_takes_away_a_single_pixel_and_keeps_an_edge():
    image = torch.zeros(1, 3, 8, 8)
    image[..., 4:] = 1.0
    spoilt = image.clone()
    spoilt[..., 2, 1] = 1.0
    assert torch.equal(OPERATIONS["median 3"](spoilt), image)
    assert torch.equal(OPERATIONS["median 5"](spoilt), image)


def test_gaussian_spreads_a_pixel_and_keeps_its_sum():
    image = torch.zeros(1, 3, 21, 21)
    image[..., 10, 10] = 1.0
    blurred = pixel_operations.gaussian(image, 1.0)
    assert blurred.sum().item() == pytest.approx(3.0, abs=1e-4)
    # Variance 1: a pixel beside the middle has exp(-1/2) of it, one diagonally beside it exp(-1).
    middle = blurred[0, 0, 10, 10]
    assert (blurred[0, 0, 10, 11] / middle).item() == pytest.approx(0.6065, abs=1e-4)
    assert (blurred[0, 0, 11, 11] / middle).item() == pytest.approx(0.3679, abs=1e-4)


def test_unsharp_mask_and_subtraction_of_a_blurred_copy():
    image = torch.zeros(1, 3, 21, 21)
    image[..., 10, 10] = 1.0
    blurred = pixel_operations.gaussian(image, 2.0)
    assert torch.allclose(pixel_operations.unsharp(image), 3 * image - 2 * blurred, atol=1e-6)
    even = torch.full((1, 3, 8, 8), 0.3)
    assert pixel_operations.without_blurred(even, 4).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("ink", "ground"), [((0.9, 0.1, 0.1), (0.1, 0.1, 0.8)), ((0.3, 0.5, 0.4), (0.4,) * 3)]
)
def test_principal_axis_of_two_colours_has_two_levels(ink, ground):
    result = OPERATIONS["principal axis"](two_colours(ink, ground))
    is_ink = torch.zeros(8, 8, dtype=torch.bool)
    is_ink[:4, :4] = True
    levels = (result[0, :, is_ink], result[0, :, ~is_ink])
    brighter = sum(ink) > sum(ground)
    assert torch.allclose(levels[0], torch.tensor(float(brighter)), atol=1e-4)
    assert torch.allclose(levels[1], torch.tensor(float(not brighter)), atol=1e-4)


def test_principal_axis_is_the_longest_one():
    """Colours at (±3, 0, 0) and (0, ±1, 0) from their mean: the projection is the red channel."""
    colours = torch.tensor([[3.0, 0, 0], [-3, 0, 0], [0, 1, 0], [0, -1, 0]]) / 10 + 0.5  # (4, 3)
    image = colours.T[None, :, None]  # (1, 3, 1, 4)
    projected = pixel_operations.principal_axis(image)
    assert torch.allclose(projected[0, :, 0], torch.tensor([0.3, -0.3, 0, 0]).expand(3, -1), atol=1e-6)

"""The paper's four experiments: what a test asks, how it is judged, and what is committed."""

import itertools
import math

import pytest
import torch

from benchmarks.common import read_rows
from benchmarks.zoo import paper
from ddpo_lessons.worlds import animals

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("reward", paper.EXPERIMENTS)
def test_a_test_asks_for_all_that_training_asks_for_equally_often(reward):
    asked, prompts = paper.descriptions(reward), paper.EXPERIMENTS[reward][1](0)
    shown = {(animals.parse_prompt(prompt).animal, animals.parse_prompt(prompt).artist)
             for prompt, _ in (prompts() for _ in range(400))}  # fmt: skip
    counts = [sum((part.animal, part.artist) == pair for part in asked) for pair in shown]
    assert len(asked) == paper.IMAGES
    assert set(counts) == {paper.IMAGES // len(shown)}


def test_the_right_pictures_are_judged_right_and_shuffled_ones_wrong():
    asked = paper.descriptions("alignment")
    pairs = torch.tensor([[animals.ANIMALS.index(a.animal), animals.ARTISTS.index(a.artist)] for a in asked])
    backgrounds = torch.tensor([animals.BACKGROUND_NAMES.index(a.background) for a in asked])
    images = animals.render(
        pairs, backgrounds, animals.placements(len(asked), torch.Generator().manual_seed(0))
    )
    right, wrong = (paper.verdict("alignment", made, asked) for made in (images, images.roll(1, dims=0)))
    assert right["animal"] == right["all"] == 1
    assert wrong["animal"] == wrong["all"] == 0
    assert right["score"] > -0.3
    # What is not asked for is not judged: the same pictures, asked for by their animals alone.
    open_asked = [animals.Description(part.animal) for part in asked]
    assert paper.verdict("compressibility", images, open_asked)["all"] == 1


def test_noise_belongs_to_the_picture_and_the_seed():
    pipeline = paper.load_tiny_zoo()
    first, again, other = (paper.paint(pipeline, ["a fox"] * 2, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_every_way_and_seed_is_committed_with_the_rate_that_the_search_chose():
    rows = read_rows(paper.RESULT)
    trained = {(row["reward"], row["method"], int(row["seed"])) for row in rows if row["epoch"]}
    assert trained == set(itertools.product(paper.EXPERIMENTS, paper.METHODS, paper.SEEDS))
    without = [(row["reward"], row["method"]) for row in rows if not row["epoch"]]
    assert sorted(without) == sorted(itertools.product(paper.EXPERIMENTS, paper.WITHOUT))
    for row in rows:
        if row["epoch"]:
            assert float(row["learning_rate"]) == paper.chosen(row["reward"], row["method"])
            assert int(row["queries"]) == 128 * int(row["epoch"])


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        ({}, 1e-3),
        ({1e-3: 5.0}, 3e-3),
        ({1e-3: 1.0, 3e-3: 2.0}, 1e-2),
        ({1e-3: 2.0, 3e-3: 1.0}, 3e-4),
        ({3e-4: 3.0, 1e-3: 2.0, 3e-3: 1.0}, 1e-4),
        ({3e-4: 1.0, 1e-3: 2.0, 3e-3: 1.0}, None),
        ({1e-3: 1.0, 3e-3: 2.0, 1e-2: 1.5}, None),
        ({1e-3: 1.0, 3e-3: 1.0, 3e-4: 1.0}, 1e-4),
        (dict.fromkeys(paper.LADDER[:5], 1.0), None),
    ],
)
def test_the_search_goes_on_until_the_best_rate_lies_inside(tried, expected):
    assert paper.next_rate(tried) == expected


@pytest.mark.parametrize("peak", paper.LADDER[1:-1])
def test_wherever_one_best_rate_lies_it_is_found_from_the_same_beginning(peak):
    tried: dict[float, float] = {}
    while (rate := paper.next_rate(tried)) is not None:
        tried[rate] = -abs(math.log(rate / peak))
    assert max(tried, key=lambda rate: tried[rate]) == peak
    assert list(tried)[:2] == [1e-3, 3e-3]

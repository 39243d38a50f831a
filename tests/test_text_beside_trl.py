"""Lesson 05's comparison with TRL's live trainer, and the package that its set-up cell brings for it."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from ddpo_lessons.lessons.text_trl import train_on_its_texts, train_with_trl
from ddpo_lessons.text import grammar
from ddpo_lessons.text.text_trainer import TextPPOConfig

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_our_trainer_repeats_trls_numbers_where_responses_fill_the_batch() -> None:
    queries = [query for query in grammar.queries(200, "train", seed=1) if len(query.split()) <= 4]
    config = TextPPOConfig(batch_size=8, minibatch_size=8, max_new_tokens=2, learning_rate=1e-3)
    _, records = train_with_trl(config, 2, queries)
    ours = train_on_its_texts(config, records)
    assert len(records) == len(ours) == 2
    assert abs(ours[1]["objective/kl"]) > 1e-3  # the weights have moved
    for theirs, mine in zip(records, ours, strict=True):
        assert mine == pytest.approx({name: theirs[name] for name in mine}, abs=1e-4)


def test_lesson_05_alone_installs_the_trl_that_tests_have() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (pinned,) = [line for line in extras["test"] if line.startswith("trl")]
    brought = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        source = json.loads(path.read_text("utf-8"))["cells"][1]["source"]
        brought[path.stem[:2]] = re.findall(r'%pip install -q "(trl[^"]*)"', "".join(source))
    assert brought.pop("05") == [pinned]
    assert not any(brought.values())

"""The hub of random weights that lesson 13's rehearsal loads, here with small networks."""

from unittest import mock

import pytest
import torch
from helpers import make_pipeline
from huggingface_hub import constants

from benchmarks.speed import random_hub
from ddpo_lessons.cli.presets import PRESETS
from ddpo_lessons.models import load_pipeline
from ddpo_lessons.rewards.learned import CLIP_MODEL, clip_margin, distance_penalty, load_clip

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    clip = {"projection_dim": 8, "text": SMALL, "vision": {**SMALL, "patch_size": 32}}
    monkeypatch.setattr(random_hub, "CLIPS", dict.fromkeys(random_hub.CLIPS, clip))
    monkeypatch.setattr(random_hub, "RESNET_18", {"depths": [1], "hidden_sizes": [16], "layer_type": "basic"})
    monkeypatch.setattr(random_hub, "published", lambda *_: make_pipeline())
    load_clip.cache_clear()
    with mock.patch.multiple(constants, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE=True):
        yield random_hub.write_models(tmp_path)
    load_clip.cache_clear()


@pytest.mark.usefixtures("hub")
def test_every_model_of_lesson_13_loads_by_its_published_name():
    assert type(load_pipeline(PRESETS["restore"].model)) is type(make_pipeline())
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    metadata = [{"label": label, "target": torch.zeros(3, 64, 64)} for label in ("fox", "owl")]
    for name in (CLIP_MODEL, random_hub.EVALUATOR):
        texts = load_clip(name).embed_texts(["a fox", "an owl"])
        assert (texts[0] - texts[1]).abs().max() > 1e-3  # it reads the text up to its end
        margins = clip_margin(name, ("fox", "owl"))(images, ["", ""], metadata)
        assert margins.shape == (2,)
        assert margins.abs().min() > 0
    assert distance_penalty()(images, ["", ""], metadata).max() < 0

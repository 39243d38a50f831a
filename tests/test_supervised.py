"""Supervised fine-tuning: the loss's gradient by hand, and that the loss falls."""

from typing import Any

import pytest
import torch
from helpers import make_config, make_pipeline, stir_adapter

from benchmarks.results.supervised import Pair, pair_loss, train_supervised
from ddpo_lessons.models import family_of
from ddpo_lessons.models.policy import prepare_policy

pytestmark = pytest.mark.usefixtures("one_thread")


def invert(seed: int) -> Any:
    """Make a prompt function of pairs: a picture of one gray, and the opposite gray."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Pair:
        image = torch.rand(1, generator=generator).expand(3, 32, 32).clone()
        return "a red three", image, {"target": 1 - image}

    return draw


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_gradient_by_hand(tmp_path, guidance):
    """By the chain rule: the loss's derivative by v is -2 sqrt(1 - ab) (x0 - z) / elements, of each pair."""
    pipeline, config = make_pipeline(), make_config(tmp_path, sample_guidance_scale=guidance)
    family = family_of(pipeline)
    policy = prepare_policy(pipeline.unet, family.frozen, config, True, torch.device("cpu"))
    stir_adapter(pipeline.unet)
    draw = invert(0)

    def embed(text: str) -> torch.Tensor:
        return family.condition([text], "", 1.0)["prompt_embeds"]

    pairs = [draw() for _ in range(2)]
    timesteps = family.schedule(3, 0.67).timesteps  # two of three steps
    loss = pair_loss(family, pairs, timesteps, config, torch.Generator().manual_seed(5))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in policy.items()}
    pipeline.unet.zero_grad()

    noise = torch.randn(2, 2, 4, 8, 8, generator=torch.Generator().manual_seed(5))  # step, pair, latent
    expected = 0.0
    for k, t in enumerate(timesteps.tolist()):
        signal = pipeline.scheduler.alphas_cumprod[t].sqrt()
        sigma = (1 - pipeline.scheduler.alphas_cumprod[t]).sqrt()
        for n, (prompt, image, metadata) in enumerate(pairs):
            target = family.encode(metadata["target"][None])
            start = family.encode(image[None]) if k == 0 else target
            x = signal * start + sigma * noise[k, n]
            v = pipeline.unet(x, t, encoder_hidden_states=embed(prompt)).sample
            if guidance > 1:
                empty = pipeline.unet(x, t, encoder_hidden_states=embed("")).sample
                v = guidance * v - (guidance - 1) * empty
            error = (signal * x - sigma * v - target).detach()
            expected += error.square().sum().item() / noise.numel()
            v.backward(-2 * sigma * error / noise.numel())
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    largest = max(p.grad.abs().max() for p in policy.values())
    for name, p in policy.items():
        assert torch.allclose(p.grad, gradients[name], rtol=1e-3, atol=1e-5 * largest.item()), name


@pytest.mark.slow
def test_loss_falls_and_each_pair_is_drawn_once(tmp_path):
    drawn: list[None] = []

    def blacken() -> Pair:
        drawn.append(None)
        return "", torch.rand(3, 32, 32), {"target": torch.zeros(3, 32, 32)}

    config = make_config(
        tmp_path, num_epochs=20, sample_batch_size=8, train_batch_size=4, train_learning_rate=1e-2
    )
    losses = train_supervised(make_pipeline(), blacken, 0.67, config)
    assert len(losses) == 40
    assert len(drawn) == 160
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_the_same_seed_gives_the_same_policy(tmp_path):
    losses = [
        train_supervised(make_pipeline(), invert(1), 0.67, make_config(tmp_path, seed=seed))
        for seed in (3, 3, 4)
    ]
    assert losses[0] == losses[1] != losses[2]

"""Lesson 10's family: where training begins, all of its gradients are those of signed weights."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.algorithms.dpo import DPO
from ddpo_lessons.algorithms.forward_process import Example
from ddpo_lessons.algorithms.nft import NFT, mirrored_loss

COUNT, BOUND = 6, 5.0
FAMILY = SimpleNamespace(  # a flow: timesteps are noise levels here
    num_train_timesteps=1,
    add_noise=lambda clean, noise, t: (1 - wide(t)) * clean + wide(t) * noise,
    predict=lambda denoiser, noisy, t, told, guidance_scale: denoiser(noisy),
    predict_clean=lambda noisy, output, t: noisy - wide(t) * output,
    denoising_target=lambda clean, noise, t: noise - clean,
)


def wide(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1, 1, 1, 1)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def layer() -> torch.nn.Module:
    """A denoiser in float64."""
    torch.manual_seed(0)
    return torch.nn.Conv2d(2, 2, 3, padding=1).double()


def make(algorithm, layer, advantages):
    """An algorithm that has begun, and what its loss takes."""
    settings = {"train_clip_range": 0.2, "train_adv_clip_max": BOUND, "train_kl_coefficient": 0.0}
    algorithm.config, algorithm.family = SimpleNamespace(**settings), FAMILY
    trajectory = SimpleNamespace(final_latents=draw(COUNT, 2, 4, 4, seed=1), conditioning={})
    samples = SimpleNamespace(trajectory=trajectory, advantages=advantages)
    weights = lambda: contextlib.nullcontext(layer)  # noqa: E731
    learner = SimpleNamespace(old_policy=weights, reference=weights)
    levels = torch.linspace(0.1, 0.9, COUNT, dtype=torch.float64)
    pairs = {"rows": torch.arange(COUNT), "timesteps": levels, "noise": draw(COUNT, 2, 4, 4, seed=2)}
    return samples, learner, layer, pairs


def gradient(loss: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(layer.parameters()))])


def by_weights(example: Example, layer: torch.nn.Module, weights: torch.Tensor) -> torch.Tensor:
    return gradient((weights * example.error(layer)).mean(), layer)


@pytest.mark.parametrize("beta", [0.1, 1.0, 10.0])
def test_nft_begins_as_signed_weights_whatever_beta_is(layer, beta):
    advantages, algorithm = draw(COUNT, seed=3), NFT(beta=beta)
    given = make(algorithm, layer, advantages)
    loss, _ = algorithm.loss(*given)
    example = algorithm.example(given[0], given[3])
    with torch.no_grad():
        gap = wide(example.times) * (layer(example.noisy) - example.noise + example.clean)
    expected = by_weights(example, layer, advantages * example.times**2 / gap.abs().mean((1, 2, 3)))
    torch.testing.assert_close(gradient(loss, layer), expected, rtol=1e-10, atol=1e-12)


def test_nfts_value_says_nothing_there_and_its_gradient_does(layer):
    found = []
    for sign in (1, -1, 0):
        algorithm = NFT()
        loss, _ = algorithm.loss(*make(algorithm, layer, sign * draw(COUNT, seed=3)))
        found.append((loss.detach(), gradient(loss, layer)))
    (value, praise), (value_of_blame, blame), (value_of_nothing, nothing) = found
    torch.testing.assert_close(value, value_of_blame)
    torch.testing.assert_close(value, value_of_nothing)
    torch.testing.assert_close(praise, -blame)
    assert praise.norm() > 1e-3
    assert nothing.norm() < 1e-12 * praise.norm()


def test_awm_begins_as_signed_weights(layer):
    advantages, algorithm = draw(COUNT, seed=3), AWM(time_power=2.0)
    given = make(algorithm, layer, advantages)
    loss, stats = algorithm.loss(*given)
    example = algorithm.example(given[0], given[3])
    expected = by_weights(example, layer, advantages * example.times**2)
    torch.testing.assert_close(gradient(loss, layer), expected, rtol=1e-5, atol=1e-7)  # ρ is float32
    assert stats["max_ratio_error"] == 0


def test_dpo_begins_as_weights_of_one_and_minus_one(layer):
    algorithm = DPO(beta=1000.0)
    samples, learner, _, pairs = make(algorithm, layer, torch.zeros(COUNT))
    pairs["worst"] = torch.arange(COUNT).flip(0)
    loss, _ = algorithm.loss(samples, learner, layer, pairs)
    best, worst = algorithm.example(samples, pairs), algorithm.example(samples, pairs, rows="worst")
    expected = gradient(1000 / 4 * (best.error(layer) - worst.error(layer)).mean(), layer)
    torch.testing.assert_close(gradient(loss, layer), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("goodness", "expected"), [(1.0, 0.5), (0.0, -0.5)])
def test_mirror_image_by_hand(goodness, expected):
    """At σ̄ = 1 with x₀ = 0, ε = 1: v* = 1; ζ = 2 has its best output at ± (v* - v_old) / 2."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    example = Example(FAMILY, 0 * one, one, one.flatten(), {})
    at_best, _at_old, away = (
        mirrored_loss(example, v * one, 0 * one, goodness * one.flatten(), beta=2.0).item()
        for v in (expected, 0.0, -expected)
    )
    assert at_best == pytest.approx(0.0, abs=1e-12)
    assert away == pytest.approx(1.0)  # an error of 2, squared, over its size 2, over ζ = 2

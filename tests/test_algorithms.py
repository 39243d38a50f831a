"""Algorithms beyond DDPO and RWR: against their authors' formulas, and in runs of random models."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from helpers import (
    brightness,
    check_resume,
    each_prompt,
    make_config,
    make_pipeline,
    make_sd3_pipeline,
    stir_adapter,
    weights_of,
)
from torch import nn

from ddpo_lessons.algorithms import ALGORITHMS, make_algorithm
from ddpo_lessons.algorithms.algorithm import Algorithm, Samples
from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.algorithms.ddpo import share_predictions, shuffled_pairs
from ddpo_lessons.algorithms.dpo import DPO
from ddpo_lessons.algorithms.draft import DRaFT
from ddpo_lessons.algorithms.flow_grpo import FlowGRPO
from ddpo_lessons.algorithms.nft import NFT
from ddpo_lessons.algorithms.pepg import PEPG, proximal_loss
from ddpo_lessons.algorithms.refl import ReFL
from ddpo_lessons.algorithms.rwr import RWR
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.flow import FlowSchedule
from ddpo_lessons.models.stable_diffusion_3 import StableDiffusion3
from ddpo_lessons.rewards.pixels import jpeg_compressibility
from ddpo_lessons.rewards.reward import checked_reward
from ddpo_lessons.rollout import Trajectory
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.training.sampler import scorer

pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------ a model of two weights
class World(StableDiffusion3):
    """A flow model whose network is any function of latents and timesteps, and whose latents are images."""

    def __init__(self) -> None:
        self.pipeline = SimpleNamespace(scheduler=FlowMatchEulerDiscreteScheduler())

    def predict(self, denoiser, latents, timesteps, conditioning, guidance_scale):
        return denoiser(latents, timesteps)

    def decode_with_gradient(self, latents):
        return latents


class Net(nn.Module):
    """v = tanh(a x + b t), in the precision of x."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([a, b], dtype=torch.float64))

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.weights[0] * x + self.weights[1] * timesteps.view(-1, 1, 1, 1) / 1000)


def wave(*shape: int, phase: float = 0.0) -> torch.Tensor:
    """Numbers in [-1, 1] that no generator decides, float64."""
    return torch.sin(1.7 * torch.arange(math.prod(shape), dtype=torch.float64) + phase).view(shape)


NEW, OLD, FIRST = Net(0.5, 0.3), Net(0.3, 0.1), Net(0.1, -0.2)
X0, NOISE = wave(3, 2, 2, 2), wave(3, 2, 2, 2, phase=1.0)
TIMES = torch.tensor([0.1, 0.45, 0.9], dtype=torch.float64)
PAIRS: dict[str, Any] = {
    "rows": torch.arange(3), "columns": torch.zeros(3), "timesteps": 1000 * TIMES, "noise": NOISE,
}  # fmt: skip
ADVANTAGES = [1.5, -0.5, -7.0]  # the last one is clipped to -5


# What the authors' formulas below give for these numbers.
AWM_LOSS, DRAFT_LOSS = 1.298835, -0.403132
PEPG_LOSS = -0.210686
NFT_LOSS = {1.0: 1.847612, 0.1: 17.900454}
GRPO_LOSS = {True: (-1.462770, 0.015882), False: (-1.461759, 0.041143)}  # with Δ and without
REFL_LOSS = {0.3: 0.0404, math.inf: -0.3376}


def begun(algorithm: Any, **changes: Any) -> Any:
    algorithm.begin(make_config("unused", **changes), World(), 1)
    return algorithm


def learner_with(old: nn.Module = OLD, reference: nn.Module = FIRST) -> Any:
    return SimpleNamespace(old_policy=lambda: nullcontext(old), reference=lambda: nullcontext(reference))


def samples_of(advantages: list[float], latents: torch.Tensor = X0) -> Samples:
    trajectory: Any = SimpleNamespace(
        final_latents=latents, conditioning={}, log_probs=torch.zeros(len(latents), 2)
    )
    weights = torch.tensor(advantages, dtype=torch.float64)
    return Samples(0, 0, 0, torch.arange(len(latents)), trajectory, weights, score=None)


def per_sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1).mean(1)


def at_times() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the examples as the authors write them: t (N, 1, 1, 1), and x_t = (1 - t) x0 + t ε."""
    t = TIMES.view(-1, 1, 1, 1)
    return t, (1 - t) * X0 + t * NOISE


def gradient(loss: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, NEW.weights)[0]


# ------------------------------------------------------------------------------- matching: AWM and NFT
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nft_begins_with_the_gradient_of_awm_with_t2_over_w(beta):
    samples, learner = samples_of(ADVANTAGES), learner_with(old=NEW)
    loss, _ = begun(NFT(beta)).loss(samples, learner, NEW, PAIRS)
    awm = begun(AWM(time_power=2))
    t, noisy = at_times()
    weight = per_sample((noisy - t * NEW(noisy, 1000 * TIMES) - X0).abs()).detach()
    example = awm.example(samples, PAIRS)
    weighed = samples.advantages.clamp(-5, 5) * awm.log_prob(example, example.predict(NEW)) / weight
    found, expected = gradient(loss), gradient(-weighed.mean())
    assert (found - expected).norm() < 1e-12 * expected.norm()
    assert expected.norm() > 0.1


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_what_nft_costs_at_the_beginning_says_nothing_of_rewards_but_its_gradient_does(beta):
    learner, nft = learner_with(old=NEW), begun(NFT(beta))
    good, bad = (nft.loss(samples_of([sign * 2.0] * 3), learner, NEW, PAIRS)[0] for sign in (1, -1))
    assert good.item() == pytest.approx(bad.item(), rel=1e-14)
    torch.testing.assert_close(gradient(good), -gradient(bad), rtol=1e-12, atol=0)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_first_step_of_awm_is_weighted_pre_training(power):
    loss, record = begun(AWM(power)).loss(samples_of(ADVANTAGES), learner_with(old=NEW), NEW, PAIRS)
    _, noisy = at_times()
    error = per_sample((NEW(noisy, 1000 * TIMES) - (NOISE - X0)).square())
    weights = torch.tensor([1.5, -0.5, -5.0]) * TIMES**power
    torch.testing.assert_close(gradient(loss), gradient((weights * error).mean()), rtol=1e-5, atol=1e-7)
    assert record["max_ratio_error"] == 0


def test_the_loss_of_awm_is_its_authors():
    """scripts/train_sd3_awm.py of scxue/advantage_weighted_matching, with its weighting t²."""
    changes = {"train_clip_range": 0.02, "train_kl_coefficient": 0.003}
    loss, record = begun(AWM(), **changes).loss(samples_of(ADVANTAGES), learner_with(), NEW, PAIRS)
    _, noisy = at_times()
    new, old, first = (net(noisy, 1000 * TIMES) for net in (NEW, OLD, FIRST))
    log_p, log_p_old = (-(TIMES**2) * per_sample((v - (NOISE - X0)) ** 2) for v in (new, old))
    ratio = torch.exp(log_p - log_p_old)
    advantages = torch.tensor(ADVANTAGES).clamp(-5, 5)
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(0.98, 1.02)
    theirs = torch.maximum(unclipped, clipped).mean() + 0.003 * ((new - first) ** 2).mean()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert theirs.item() == pytest.approx(AWM_LOSS, abs=1e-6)
    assert 0 < record["clip_fraction"] < 1


def test_awm_with_an_ema_policy_is_its_authors():
    """Their presets: weighting "ghuber", ema_beta = 1, one step an epoch, advantages scaled to [-1, 1]."""
    changes = {"train_clip_range": DDPOConfig.train_clip_range, "train_kl_coefficient": 5 * 0.003}
    awm = begun(AWM(time_power=1, error_power=0.25, ema_kl_coefficient=5.0), **changes)
    loss, record = awm.loss(samples_of(ADVANTAGES), learner_with(), NEW, PAIRS)
    _, noisy = at_times()
    new, average, first = (net(noisy, 1000 * TIMES) for net in (NEW, OLD, FIRST))
    mse = per_sample((new - (NOISE - X0)) ** 2)
    log_p = -((mse + 1e-10) ** 0.25 - 1e-10**0.25) * TIMES / 0.25
    policy_loss = -(torch.tensor(ADVANTAGES).clamp(-5, 5) / 5 * torch.exp(log_p - log_p.detach())).mean()
    theirs = policy_loss + 0.003 * ((new - first) ** 2).mean() + ((new - average) ** 2).mean()
    assert loss.item() == pytest.approx(5 * theirs.item(), rel=1e-5)
    torch.testing.assert_close(gradient(loss), 5 * gradient(theirs), rtol=1e-5, atol=1e-7)
    assert record["max_ratio_error"] == 0
    assert record["distance_old"] > 1e-3


def check_the_old_policy_keeps(trainer: Trainer, *decays: float) -> None:
    """Check that epoch after epoch such a share of the old policy stays."""
    for epoch, decay in enumerate(decays):
        old = old_weights_of(trainer)
        trainer.step(epoch)
        expected = decay * old + (1 - decay) * weights_of(trainer)
        torch.testing.assert_close(old_weights_of(trainer), expected, atol=1e-6, rtol=0)


def test_the_policy_to_which_awm_is_held_lags_by_steps(tmp_path):
    """Step s keeps min(s / 5, 0.3) of it; the newest policy samples."""
    awm = AWM(ema_kl_coefficient=1.0, decay_rate=0.2)
    trainer = make_trainer(tmp_path, awm, train_clip_range=DDPOConfig.train_clip_range)
    check_the_old_policy_keeps(trainer, 0.2, 0.3, 0.3)
    first, *later = (row["distance_old"] for row in read_metrics(tmp_path, "step"))
    assert first == 0
    assert min(later) > 0


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_loss_of_nft_is_its_authors(beta):
    """scripts/train_nft_sd3.py of NVlabs/DiffusionNFT; their train.beta is our `train_kl_coefficient`."""
    nft = begun(NFT(beta), train_kl_coefficient=1e-4)
    loss, _ = nft.loss(samples_of(ADVANTAGES), learner_with(), NEW, PAIRS)
    t, noisy = at_times()
    v, v_old, v_ref = (net(noisy, 1000 * TIMES) for net in (NEW, OLD, FIRST))
    r = (torch.tensor(ADVANTAGES).clamp(-5, 5) / 5 / 2 + 0.5).clamp(0, 1)
    positive = beta * v + (1 - beta) * v_old
    negative = (1 + beta) * v_old - beta * v
    parts = []
    for prediction in (positive, negative):
        x0 = noisy - t * prediction
        weight = (x0 - X0).abs().mean(dim=(1, 2, 3), keepdim=True).clip(min=1e-5)
        parts.append(((x0 - X0) ** 2 / weight).mean(dim=(1, 2, 3)))
    theirs = 5 * (r * parts[0] / beta + (1 - r) * parts[1] / beta).mean() + 1e-4 * ((v - v_ref) ** 2).mean()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-9)
    assert theirs.item() == pytest.approx(NFT_LOSS[beta], abs=1e-6)


def elbo(net: nn.Module) -> torch.Tensor:
    """compute_elbo of jaemoo-choi/rethinking-diffusion-rl, "adaptive": (N,)."""
    t, noisy = at_times()
    x0 = noisy - t * net(noisy, 1000 * TIMES)
    weight = (x0 - X0).abs().mean(dim=(1, 2, 3), keepdim=True).clip(min=1e-5).detach()
    return -((x0 - X0) ** 2 / weight).mean(dim=(1, 2, 3))


def test_the_loss_of_pepg_is_its_authors():
    """compute_policy_loss, "pepg", and compute_kl_loss, "girsanov"; their train.beta is our penalty's."""
    pepg = begun(PEPG(scale=0.2), train_kl_coefficient=1e-4)
    loss, record = pepg.loss(samples_of(ADVANTAGES), learner_with(), NEW, PAIRS)
    log_ratio = elbo(NEW).detach() - elbo(OLD).detach()
    advantages = 0.2 * torch.tensor(ADVANTAGES, dtype=torch.float64).clamp(-5, 5)
    noisy = at_times()[1]
    distance = (NEW(noisy, 1000 * TIMES) - FIRST(noisy, 1000 * TIMES)).square().mean()
    theirs = -(log_ratio.exp() * (advantages - log_ratio) * elbo(NEW)).mean() + 1e-4 * distance
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-9)
    assert theirs.item() == pytest.approx(PEPG_LOSS, abs=1e-6)
    assert record["log_ratio_size"].item() == pytest.approx(log_ratio.abs().mean().item(), rel=1e-9)
    assert record["log_ratio_size"] > 0.01


def test_pepg_by_hand():
    """E from -1 to -1/2: log ρ = 1/2, and an advantage of 1 leaves half a nat to go."""
    new, old, one = (torch.tensor([value], dtype=torch.float64) for value in (-0.5, -1.0, 1.0))
    assert proximal_loss(new, old, one).item() == pytest.approx(math.exp(0.5) * 0.5 * 0.5)
    assert proximal_loss(new, old, one / 2).item() == 0  # it has arrived


def test_pepg_is_a_regression_on_the_advantage():
    samples, learner = samples_of(ADVANTAGES), learner_with()
    loss, _ = begun(PEPG(scale=0.2)).loss(samples, learner, NEW, PAIRS)
    log_ratio = elbo(NEW) - elbo(OLD).detach()
    gap = 0.2 * samples.advantages.clamp(-5, 5) - log_ratio
    found, expected = gradient(loss), gradient((log_ratio.detach().exp() * gap.square() / 2).mean())
    assert (found - expected).norm() < 1e-12 * expected.norm()
    assert expected.norm() > 1e-3


def test_pepg_begins_as_nft_does():
    samples, learner = samples_of(ADVANTAGES), learner_with(old=NEW)
    pepg, nft = (begun(kind).loss(samples, learner, NEW, PAIRS)[0] for kind in (PEPG(scale=0.2), NFT()))
    found, expected = gradient(pepg), 0.2 * gradient(nft)
    assert (found - expected).norm() < 1e-12 * expected.norm()


# ------------------------------------------------------------------------------------------- Flow-GRPO
@pytest.mark.parametrize("kl_times_length", [True, False])
def test_the_loss_of_flow_grpo_is_its_authors(kl_times_length):
    """sd3_sde_with_logprob.py and train_sd3.py of yifan123/flow_grpo; the KL has no Δt there."""
    sigmas, level, beta = torch.tensor([0.9, 0.6, 0.2, 0.0]), 0.7, 0.04
    schedule = FlowSchedule(sigmas, level, "cpu")

    def step(net: Net, x: torch.Tensor, number: int) -> tuple[torch.Tensor, float, float]:
        sigma, dt = sigmas[number].item(), (sigmas[number + 1] - sigmas[number]).item()
        std_dev_t = level * math.sqrt(sigma / (1 - sigma))
        v = net(x, torch.tensor([1000 * sigma]))
        drift = 1 + std_dev_t**2 / (2 * sigma) * dt
        mean = x * drift + v * (1 + std_dev_t**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, std_dev_t, dt

    def log_prob(net: Net, x: torch.Tensor, after: torch.Tensor, number: int) -> torch.Tensor:
        mean, std_dev_t, dt = step(net, x, number)
        std = std_dev_t * math.sqrt(-dt)
        density = -((after - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi))
        return density.mean()

    states = [wave(1, 2, 2, 2)]
    for number in (0, 1):
        mean, std_dev_t, dt = step(OLD, states[-1], number)
        states.append(mean + std_dev_t * math.sqrt(-dt) * wave(1, 2, 2, 2, phase=2.0 + number))
    moves = [(states[0], states[1], 0), (states[1], states[2], 1)]
    old = torch.stack([log_prob(OLD, *move) for move in moves]).detach()
    ratio = (torch.stack([log_prob(NEW, *move) for move in moves]) - old).exp()
    policy_loss = torch.maximum(-1.5 * ratio, -1.5 * ratio.clamp(0.99, 1.01)).mean()
    kl = torch.tensor(0.0)
    for x, _, number in moves:
        (mean, std_dev_t, dt), (mean_ref, *_) = step(NEW, x, number), step(FIRST, x, number)
        length = 1 if kl_times_length else -dt
        kl = kl + ((mean - mean_ref) ** 2).mean() / (2 * std_dev_t**2 * length) / 2
    theirs = policy_loss + beta * kl

    trajectory = Trajectory(
        torch.stack(states, dim=1).detach().float(), schedule.timesteps[None, :2], old.float()[None], {}, 1.0,
        schedule, states[-1].float(),
    )  # fmt: skip
    samples = Samples(0, 0, 0, torch.arange(1), trajectory, torch.tensor([1.5]), score=None)
    pairs = share_predictions({"rows": torch.zeros(2).long(), "columns": torch.arange(2)}, 1)
    algorithm = begun(FlowGRPO(kl_times_length=kl_times_length), train_kl_coefficient=beta)
    loss, record = algorithm.loss(samples, learner_with(), NEW, pairs)
    assert record["kl_reference"].item() == pytest.approx(kl.item(), rel=1e-4)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert (theirs.item(), kl.item()) == pytest.approx(GRPO_LOSS[kl_times_length], abs=1e-6)
    torch.testing.assert_close(gradient(loss), gradient(theirs), rtol=1e-3, atol=1e-6)


# ------------------------------------------------------------------------------------------------- DPO
def test_the_loss_of_dpo_by_hand():
    """Latents 0 and 1 without noise have the velocities 0 and -1.

    Output 1/2 has the errors 1/4 and 9/4, output 0 before training 0 and 1: the best has gained 2 - 1 = 1,
    which β = 2 makes log(1 + 1/e); Wallace et al., eq. 14.
    """
    latents = torch.stack([torch.zeros(2, 2, 2), torch.ones(2, 2, 2)])
    pairs = {"rows": torch.tensor([0]), "worst": torch.tensor([1]), "timesteps": torch.tensor([300])}
    pairs["noise"] = torch.zeros(1, 2, 2, 2)
    learner = learner_with(reference=lambda x, t: torch.zeros_like(x))
    loss, record = begun(DPO(beta=2.0)).loss(
        samples_of([1, -1], latents), learner, lambda x, t: torch.full_like(x, 0.5), pairs
    )
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert record["preferred"] == 1


def test_dpo_begins_with_weights_of_one_and_minus_one():
    dpo, samples, pairs = (
        begun(DPO(beta=1000.0)), samples_of([0, 0, 0]), {**PAIRS, "worst": PAIRS["rows"].flip(0)},
    )  # fmt: skip
    loss, _ = dpo.loss(samples, learner_with(reference=NEW), NEW, pairs)
    best, worst = (dpo.example(samples, pairs, rows=rows).error(NEW) for rows in ("rows", "worst"))
    torch.testing.assert_close(gradient(loss), gradient(1000 / 4 * (best - worst).mean()), rtol=1e-9, atol=0)


def test_dpo_compares_best_and_worst_of_each_group_in_every_step():
    dpo = begun(DPO(), sample_group_size=3)
    dpo.num_train_timesteps = 2
    advantages = dpo.advantages(torch.tensor([3.0, 1, 2, 5, 5, 5, 0, 0, 1]), keys=())
    assert advantages.tolist() == [1, -1, 0, 0, 0, 0, -1, 0, 1]
    samples = samples_of(advantages.tolist(), torch.zeros(9, 2, 2, 2))
    steps = dpo.pairs(samples, samples_per_step=3, generator=torch.Generator().manual_seed(0))
    found = [
        set(zip(*(step[n].tolist() for n in ("rows", "worst", "columns")), strict=True)) for step in steps
    ]
    expected = [{(best, worst, 0), (best, worst, 1)} for best, worst in ((0, 1), (3, 3), (8, 6))]
    assert sorted(found, key=min) == expected


def test_a_tie_teaches_dpo_nothing():
    pairs = {**PAIRS, "worst": PAIRS["rows"]}
    loss, _ = begun(DPO()).loss(samples_of([0, 0, 0]), learner_with(), NEW, pairs)
    assert loss.item() == pytest.approx(math.log(2))
    assert not gradient(loss).any()


# ----------------------------------------------------------------------------------- the reward's gradient
def squares(images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return images.square().mean(dim=(1, 2, 3)) * (rows + 1)


def last_states() -> tuple[Samples, torch.Tensor]:
    """Two samples with the states of four steps of an ODE, and the noise levels."""
    sigmas = torch.tensor([1.0, 0.8, 0.5, 0.3, 0.0])
    schedule = FlowSchedule(sigmas, 0.0, "cpu")
    latents = wave(2, 5, 2, 2, 2).float()
    actions = schedule.timesteps.expand(2, -1), torch.zeros(2, 4)
    trajectory = Trajectory(latents, *actions, {}, 1.0, schedule, latents[:, -1])
    return Samples(0, 0, 0, torch.arange(2), trajectory, torch.zeros(2), squares), sigmas


def test_the_loss_of_draft_is_its_authors():
    """Two Euler steps; the penalty is that of DRaFT+ in NVIDIA/NeMo-Aligner."""
    samples, sigmas = last_states()
    pairs = {"rows": torch.tensor([1, 0]), "noise": torch.zeros(2, 2, 2, 2, 2)}
    draft = begun(DRaFT(2), train_kl_coefficient=0.5)
    loss, _ = draft.loss(samples, learner_with(), 2, NEW, pairs)
    x, distances = samples.trajectory.latents[[1, 0], 2].double(), []
    for number in (2, 3):
        v, before = (net(x, 1000 * sigmas[number].expand(2)) for net in (NEW, FIRST))
        distances.append(((v - before.detach()) ** 2).mean())
        x = x + (sigmas[number + 1] - sigmas[number]).double() * v
    theirs = -squares(x, torch.tensor([1, 0])).mean() + 0.5 * sum(distances) / 2
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert theirs.item() == pytest.approx(DRAFT_LOSS, abs=1e-6)
    torch.testing.assert_close(gradient(loss), gradient(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("margin", [0.3, math.inf])
def test_the_loss_of_refl_is_its_authors(margin):
    """ImageReward/ReFL.py of THUDM has margin 2, and a factor of 1e-3 besides."""
    samples, sigmas = last_states()
    loss, _ = begun(ReFL(4, margin)).loss(samples, learner_with(), 3, NEW, {"rows": torch.arange(2)})
    x = samples.trajectory.latents[:, 1].double()
    clean = x - sigmas[1] * NEW(x, 1000 * sigmas[1].expand(2))
    rewards = squares(clean, torch.arange(2))
    theirs = -rewards.mean() if margin == math.inf else torch.relu(margin - rewards).mean()
    assert (rewards > 0.3).tolist() == [False, True]  # beyond the margin
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert theirs.item() == pytest.approx(REFL_LOSS[margin], abs=1e-4)
    torch.testing.assert_close(gradient(loss), gradient(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [lambda: DRaFT(3, draws_steps=True), lambda: ReFL(3)])
def test_the_number_of_last_steps_is_drawn_and_the_seed_decides_it(make):
    def drawn(seed: int) -> list[int]:
        algorithm = begun(make(), seed=seed)
        return [algorithm.steps_with_gradient(step) for step in range(40)]

    assert set(drawn(0)) == {1, 2, 3}
    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


# ---------------------------------------------------------------------------------------- in whole runs
MODELS = {"sd": make_pipeline, "sd3": make_sd3_pipeline}


def make_trainer(
    folder: Path, algorithm: Algorithm, model: str = "sd3", reward: Any = brightness, hook: Any = None,
    **changes: Any,
) -> Trainer:  # fmt: skip
    unused = {name: getattr(DDPOConfig, name) for name in algorithm.unused}
    return Trainer(
        make_config(folder, **{**unused, **changes}), reward, each_prompt(), MODELS[model](), hook,
        algorithm=algorithm,
    )  # fmt: skip


def old_weights_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in trainer.learner.old.values()])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_learns_an_epoch_from_every_kind_of_model(tmp_path, name, model):
    if (name, model) == ("flow_grpo", "sd"):
        with pytest.raises(ValueError, match="algorithm='flow_grpo' needs a flow model, such as tiny-sd3"):
            make_trainer(tmp_path, make_algorithm(name), model)
        return
    trainer = make_trainer(tmp_path, make_algorithm(name), model, sample_group_size=2)
    assert trainer.algorithm.name == name
    before = weights_of(trainer)
    trainer.train()
    (record,) = read_metrics(tmp_path, "step")
    assert math.isfinite(record["loss"])
    assert record["grad_norm"] > 0
    assert not torch.equal(weights_of(trainer), before)
    assert bool(trainer.learner.old) == (name in ("awm", "nft", "pepg"))


def test_a_flow_model_trains_on_timesteps_as_often_as_sampling_takes_steps_there():
    schedule = FlowSchedule(torch.tensor([0.9, 0.8, 0.7, 0.0]), 0.0, "cpu")  # two of three steps: above 700
    timesteps = AWM().draw_timesteps(schedule, [torch.Generator().manual_seed(0)] * 4000)
    assert 0 < timesteps.min() < 10
    assert 899 < timesteps.max() <= 900
    assert timesteps.unique().numel() > 3900  # between the steps, too
    for low, high, share in ((800, 900, 1 / 3), (700, 800, 1 / 3), (0, 700, 1 / 3), (0, 350, 1 / 6)):
        assert ((timesteps > low) & (timesteps <= high)).float().mean() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("name", ["awm", "nft", "pepg", "dpo", "draft", "refl"])
def test_what_follows_the_ode_refuses_noise(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} samples a flow model by its ODE, without noise: leave"):
        make_trainer(tmp_path, make_algorithm(name), "sd3", sample_eta=0.7, sample_group_size=2)


@pytest.mark.parametrize("model", MODELS)
def test_examples_of_img2img_have_no_more_noise_than_its_first_state(tmp_path, model):
    seen = []

    class Watched(AWM):
        def loss(self, samples, learner, denoiser, pairs):
            seen.append((pairs["timesteps"], samples.trajectory.schedule.timesteps[0]))
            return super().loss(samples, learner, denoiser, pairs)

    prompts = each_prompt()
    images = [(*prompts()[:1], torch.full((3, 32, 32), 0.5), {}) for _ in range(16)]
    config = make_config(tmp_path, sample_num_steps=4, sample_num_batches_per_epoch=8, train_batch_size=16)
    parts = (config, brightness, lambda: images.pop(), MODELS[model]())
    Trainer(*parts, algorithm=Watched(), start=FromImages(0.5)).train()
    ((timesteps, first),) = seen
    assert first < 760
    assert timesteps.max() <= math.ceil(first)
    assert timesteps.max() > 0.75 * first  # and the whole range below


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("start", ["noise", "images"])
def test_visited_states_are_what_sampling_passed(tmp_path, model, start):
    """The forward process leads there, by the noise that the loss gets; the last step's state, too."""
    pipeline = make_pipeline(set_alpha_to_one=True) if model == "sd" else make_sd3_pipeline()  # no noise last
    prompts = each_prompt()
    images = [(*prompts()[:1], torch.full((3, 32, 32), 0.5), {}) for _ in range(16)]
    config = make_config(tmp_path, sample_num_steps=4, sample_num_batches_per_epoch=8, train_batch_size=16)
    trainer = Trainer(
        config, brightness, (lambda: images.pop()) if start == "images" else prompts, pipeline,
        algorithm=AWM(visited_states=True), start=FromImages(0.75) if start == "images" else FromNoise(),
    )  # fmt: skip
    trajectory = trainer.sampler.sample(0, trainer.contexts.draw(0))[1]
    samples = Samples(0, 0, 0, torch.arange(16), trajectory, torch.ones(16), score=None)
    pairs = {"rows": torch.arange(16).repeat(8), "columns": torch.arange(8).repeat_interleave(16)}
    examples = {**pairs, **trainer.algorithm.denoising_examples(samples, pairs, step=0)}
    timesteps = trajectory.schedule.timesteps
    columns = (examples["timesteps"][:, None] == timesteps).nonzero()[:, 1]  # (128,)
    assert columns.unique().tolist() == list(range(len(timesteps)))
    noisy = trainer.algorithm.example(samples, examples).noisy
    torch.testing.assert_close(noisy, trajectory.latents[pairs["rows"], columns], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [
        NFT(decay_rate=0.4, visited_states=True),
        AWM(ema_kl_coefficient=1.0, decay_rate=0.4, visited_states=True),
    ],
)
def test_an_ema_policy_resumes_bitwise_identical(tmp_path, algorithm):
    def make(folder: Path, **changes: Any) -> Trainer:
        return make_trainer(folder, algorithm, train_clip_range=DDPOConfig.train_clip_range, **changes)

    check_resume(make, tmp_path, epochs=3)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_gradient_of_draft_is_that_of_finite_differences(tmp_path, steps):
    def precise(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return images.double().mean(dim=(1, 2, 3))

    draft = DRaFT(steps)
    trainer = make_trainer(tmp_path, draft, reward=precise)
    stir_adapter(trainer.family.denoiser)
    contexts = trainer.contexts.draw(0)
    batches, trajectory, _ = trainer.sampler.sample(0, contexts)
    score = scorer(trainer.reward_function, list(contexts.values()))
    samples = Samples(0, 0, 0, torch.arange(2), trajectory, torch.zeros(2), score)
    pairs = {"rows": torch.arange(2)}
    pairs["noise"] = draft.draw_noise(samples, pairs, steps, 0)

    def loss() -> torch.Tensor:
        return draft.loss(samples, trainer.learner, steps, trainer.family.denoiser, pairs)[0]

    trainable = list(trainer.learner.trainable.values())
    gradients = torch.autograd.grad(loss(), trainable)
    assert loss().item() == pytest.approx(-batches[0].images.mean().item(), abs=1e-6)  # the sampled images
    parameter, slope = max(zip(trainable, gradients, strict=True), key=lambda pair: pair[1].abs().max())
    place, h = slope.abs().argmax(), 0.2  # less drowns the slope of one short step in rounding
    values = []
    for moved in (h, -2 * h):
        parameter.data.view(-1)[place] += moved
        values.append(loss().item())
    assert slope.flatten()[place].item() == pytest.approx((values[0] - values[1]) / (2 * h), rel=0.03)


def test_how_draft_is_grouped_changes_nothing_where_steps_have_noise(tmp_path):
    """The noise belongs to the sample."""
    weights = []
    for size in (1, 2):
        changes = {"train_micro_batch_size": size, "train_adam_epsilon": 1e-2}  # Adam would magnify rounding
        trainer = make_trainer(tmp_path / str(size), DRaFT(2), "sd", **changes)
        trainer.train()
        weights.append(weights_of(trainer))
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("reward", [torch.no_grad()(brightness), jpeg_compressibility()])
@pytest.mark.parametrize("algorithm", [DRaFT(), ReFL()])
def test_a_reward_without_a_gradient_is_one_clear_error(tmp_path, algorithm, reward):
    trainer = make_trainer(tmp_path, algorithm, reward=reward)
    before = weights_of(trainer)
    with pytest.raises(ValueError, match="returns rewards without a gradient"):
        trainer.train()
    assert torch.equal(weights_of(trainer), before)
    assert trainer.epochs_done == 0


def test_a_checked_reward_hands_on_a_gradient_and_makes_none():
    scale = torch.ones(1, requires_grad=True)  # as the weights of a reward model may be
    reward = checked_reward(lambda images, prompts, metadata: scale * brightness(images, prompts, metadata))
    images = torch.full((2, 3, 4, 4), 0.5, requires_grad=True)
    about = ["", ""], [{}, {}]
    reward(images, *about).sum().backward()
    torch.testing.assert_close(images.grad, torch.full((2, 3, 4, 4), 1 / 48))
    assert not reward(images.detach(), *about).requires_grad
    with torch.no_grad():
        assert not reward(images, *about).requires_grad


def test_samples_are_scored_anew_by_their_own_contexts(tmp_path):
    def length(images: torch.Tensor, prompts: Any, metadata: Any) -> Any:
        return torch.tensor([len(prompt) for prompt in prompts]) + images[:, 0, 0, 0], {"about": metadata}

    trainer = make_trainer(tmp_path, DRaFT(), reward=length)
    score = scorer(trainer.reward_function, list(trainer.contexts.draw(0).values()))  # "a red three" and ""
    images = torch.zeros(3, 3, 32, 32, requires_grad=True)
    rewards = score(images, torch.tensor([1, 0, 0]))
    assert rewards.tolist() == [0, 11, 11]
    assert rewards.requires_grad


# --------------------------------------------------------------------------------------- the old policy
@pytest.mark.parametrize("visited_states", [False, True])
def test_awm_begins_every_epoch_at_the_policy_that_sampled(tmp_path, visited_states):
    trainer = make_trainer(tmp_path, AWM(visited_states=visited_states), train_batch_size=1)
    assert trainer.record["algorithm"]["visited_states"] is visited_states
    trainer.step(0)
    trainer.step(1)
    first, last, again, _ = (row["max_ratio_error"] for row in read_metrics(tmp_path, "step"))
    assert first == again == 0
    assert last > 0


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_old_policy_and_the_new_one_differ_within_one_forward_pass(tmp_path, precision):
    """Autocast keeps low-precision copies of weights, and would give one policy those of the other."""
    trainer = make_trainer(tmp_path, AWM(), mixed_precision=precision)
    stir_adapter(trainer.family.denoiser)
    learner, seen = trainer.learner, []

    def output(denoiser: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        shape, config = (1, 4, 8, 8), trainer.family.denoiser.config
        noisy, embeds, pooled = (
            torch.randn(*size, generator=generator)
            for size in (shape, (1, 5, config.joint_attention_dim), (1, config.pooled_projection_dim))
        )
        return denoiser(noisy, embeds, pooled, torch.tensor([500.0])).sample

    with trainer.autocast(), torch.no_grad():
        for _ in range(2):
            with learner.old_policy() as old_policy:
                seen.append(output(old_policy))
            seen.append(output(learner.denoiser))
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert (seen[0] - seen[1]).abs().max() > 1e-2


def test_the_old_policy_follows_and_lends_its_weights(tmp_path):
    trainer = make_trainer(tmp_path, NFT())
    learner, start = trainer.learner, weights_of(trainer)

    def is_at(weights: torch.Tensor, moved: float) -> bool:
        return torch.allclose(weights, start + moved, atol=1e-6)

    with torch.no_grad():
        for parameter in learner.trainable.values():
            parameter.add_(2)
    learner.update_old_policy(decay=0.25)  # 0 / 4 + 3 · 2 / 4
    assert is_at(old_weights_of(trainer), 1.5)
    with learner.old_policy() as policy:
        assert policy is trainer.family.denoiser
        assert is_at(weights_of(trainer), 1.5)
    assert is_at(weights_of(trainer), 2)
    with pytest.raises(RuntimeError, match="broken"), learner.old_policy():
        raise RuntimeError("broken")
    assert is_at(weights_of(trainer), 2)
    learner.update_old_policy(decay=0.0)
    assert torch.equal(old_weights_of(trainer), weights_of(trainer))


@pytest.mark.parametrize("algorithm", [DRaFT(), ReFL()])
def test_a_reward_whose_gradient_is_nan_is_told_so(tmp_path, algorithm):
    def root_at_zero(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return images.mean((1, 2, 3)) + (0 * images).square().sum((1, 2, 3)).sqrt()

    trainer = make_trainer(tmp_path, algorithm, reward=root_at_zero)
    with pytest.raises(ValueError, match="gradient of the reward with respect to the images is NaN"):
        trainer.step(0)


@pytest.mark.parametrize("algorithm", [DRaFT(), ReFL()])
def test_the_reward_computes_in_full_precision_in_training_as_in_sampling(tmp_path, algorithm):
    weight, seen = torch.ones(3, 1), []

    def product(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        rewards = (images.mean((2, 3)) @ weight)[:, 0]
        seen.append(rewards.dtype)
        return rewards

    make_trainer(tmp_path, algorithm, reward=product, mixed_precision="bf16").step(0)
    assert len(seen) > 1
    assert set(seen) == {torch.float32}


def test_an_interruption_while_the_old_weights_are_lent_leaves_the_new_ones(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, NFT())
    learner = trainer.learner
    lend, calls = learner._use, []

    def interrupted(weights):
        calls.append(weights)
        if len(calls) == 1:  # some of them are in place
            lend({**{name: p.data for name, p in learner.trainable.items()}, **dict([*weights.items()][:1])})
            raise KeyboardInterrupt
        lend(weights)

    stir_adapter(trainer.family.denoiser)
    before = weights_of(trainer)
    monkeypatch.setattr(learner, "_use", interrupted)
    with pytest.raises(KeyboardInterrupt), learner.old_policy():
        pass
    assert torch.equal(weights_of(trainer), before)
    old = {tensor.data_ptr() for tensor in learner.old.values()}
    assert old.isdisjoint(parameter.data_ptr() for parameter in learner.trainable.values())


def test_nft_samples_with_the_old_policy_and_awm_with_the_new_one(tmp_path):
    for algorithm, is_old in ((NFT(), True), (AWM(), False)):
        trainer = make_trainer(tmp_path / algorithm.name, algorithm)
        contexts = trainer.contexts.draw(0)
        _, before, _ = trainer.sampler.sample(0, contexts)
        stir_adapter(trainer.family.denoiser)
        _, after, _ = trainer.sampler.sample(0, contexts)
        assert torch.equal(before.final_latents, after.final_latents) == is_old
    assert not after.schedule.stds.any()  # by the ODE


def test_nft_moves_the_old_policy_by_the_share_of_its_epoch(tmp_path):
    """Epoch e keeps min(e / 5, 0.3) of it: nothing, a fifth, and then three tenths."""
    check_the_old_policy_keeps(make_trainer(tmp_path, NFT(decay_rate=0.2, max_decay=0.3)), 0.0, 0.2, 0.3)


def test_an_epoch_that_fails_leaves_the_old_weights_as_they_were(tmp_path):
    broken: list[bool] = []

    def hook(batches: Any, step: int, tracker: Any) -> None:
        if broken:
            raise RuntimeError("broken")

    trainer = make_trainer(tmp_path, NFT(decay_rate=0.4), hook=hook)
    trainer.step(0)
    before = old_weights_of(trainer), weights_of(trainer)
    broken.append(True)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.step(1)
    assert torch.equal(old_weights_of(trainer), before[0])
    assert torch.equal(weights_of(trainer), before[1])
    broken.clear()
    trainer.step(1)
    assert not torch.equal(old_weights_of(trainer), before[0])


@pytest.mark.parametrize(("algorithm", "shares"), [(FlowGRPO(), True), (AWM(), False), (DRaFT(), False)])
def test_a_group_begins_in_one_state_only_where_steps_have_noise(tmp_path, algorithm, shares):
    trainer = make_trainer(tmp_path, algorithm, sample_group_size=2)
    _, trajectory, _ = trainer.sampler.sample(0, trainer.contexts.draw(0))
    assert torch.equal(*trajectory.latents[:, 0]) == shares
    assert not torch.equal(*trajectory.final_latents)


def test_with_cps_the_kl_has_no_length_as_with_the_authors():
    """Their CPS has std_dev_t = σ̄' sin(η π / 2), which is the step's whole deviation."""
    schedule = FlowSchedule(torch.tensor([0.9, 0.6, 0.2, 0.0]), 0.7, "cpu", "cps")
    x = wave(1, 2, 2, 2)
    latents = torch.stack([x, x, x], dim=1).float()
    parts = (latents, schedule.timesteps[None, :2], torch.zeros(1, 2), {}, 1.0, schedule, x.float())
    samples = Samples(0, 0, 0, torch.arange(1), Trajectory(*parts), torch.tensor([1.5]), score=None)
    pairs = share_predictions({"rows": torch.zeros(2).long(), "columns": torch.arange(2)}, 1)
    expected = 0.0
    for sigma, after in ((0.9, 0.6), (0.6, 0.2)):
        std = after * math.sin(0.7 * math.pi / 2)
        times = torch.tensor([1000 * sigma])
        v, v_ref = NEW(x, times), FIRST(x, times)
        # mean = (1 - σ̄') x̂₀ + sqrt(σ̄'² - std²) ε̂ with x̂₀ = x - σ̄ v and ε̂ = x + (1 - σ̄) v
        weight = -(1 - after) * sigma + math.sqrt(after**2 - std**2) * (1 - sigma)
        expected += ((weight * (v - v_ref)) ** 2).mean().item() / (2 * std**2) / 2
    for times_length in (True, False):
        algorithm = begun(FlowGRPO(sde="cps", kl_times_length=times_length), train_kl_coefficient=0.04)
        _, record = algorithm.loss(samples, learner_with(), NEW, pairs)
        assert record["kl_reference"].item() == pytest.approx(expected, rel=1e-4)


# --------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ppo", {}, "algorithm='ppo' does not exist .perhaps dpo.: use one of ddpo, branching, rwr"),
        ("flow_grpo", {"window": -1}, "window=-1 must be a whole number"),
        ("branching", {"window": 0}, "window=0 must be a whole number"),
        ("branching", {"window": 1.0}, "window=1.0 must be a whole number"),
        ("rwr", {"temperature": 0.0}, "temperature=0.0 must be"),
        ("rwr", {"top_fraction": 0.0}, "top_fraction=0.0 must"),
        ("rwr", {"top_fraction": 1.5}, "top_fraction=1.5 must"),
        ("awm", {"time_power": -1.0}, r"time_power=-1\.0 must not be negative"),
        ("awm", {"error_power": 0.0}, r"error_power=0\.0 must be a number above 0"),
        ("awm", {"ema_kl_coefficient": -1.0}, r"ema_kl_coefficient=-1\.0 must be a number, 0 or more"),
        ("awm", {"max_decay": 0.5}, r"max_decay=0\.5 do nothing without an ema_kl_coefficient"),
        (
            "awm",
            {"ema_kl_coefficient": 1.0, "decay_rate": 0.0},
            "decay_rate=0.0, max_decay=0.3: an EMA policy",
        ),
        ("nft", {"beta": 0.0}, r"beta=0\.0 must be above 0"),
        ("nft", {"decay_rate": -0.1}, r"decay_rate=-0\.1 must not be negative"),
        ("nft", {"max_decay": 1.0}, r"max_decay=1\.0 must lie in \[0, 1\)"),
        ("dpo", {"beta": -1.0}, r"beta=-1\.0 must be above 0"),
        ("draft", {"last_steps": 0}, "last_steps=0 must be a whole number, at least 1"),
        ("draft", {"last_steps": 2.0}, r"last_steps=2\.0 must be a whole number"),
        ("flow_grpo", {"window": 2.0}, r"window=2\.0 must be a whole number"),
        ("refl", {"last_steps": 0}, "last_steps=0 must be a whole number, at least 1"),
        ("nft", {"beta": "small"}, "algorithm='nft' cannot be made of {'beta': 'small'}"),
        ("draft:draws_steps=no", {}, "draws_steps=no must be true or false"),
        ("draft:last_steps=1.5", {}, "last_steps=1.5 must be a whole number"),
        ("nft:beta=small", {}, "beta=small must be a number"),
        ("nft:beta=nan", {}, "beta=nan must be above 0"),
        ("pepg", {"scale": 0.0}, r"scale=0\.0 must be a number above 0"),
        ("pepg", {"scale": math.nan}, "scale=nan must be a number above 0"),
        ("refl:margin=nan", {}, "margin=nan must be a number"),
        ("flow_grpo", {"windw": 2}, r"'flow_grpo' has no setting 'windw' \(perhaps window"),
    ],
)
def test_settings_that_do_not_fit_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make_algorithm(name, **settings)


def test_settings_in_words_are_read_by_their_types():
    assert make_algorithm("draft:draws_steps=false").draws_steps is False
    assert make_algorithm("draft:draws_steps=True,last_steps=2").draws_steps is True
    assert make_algorithm("flow_grpo:kl_times_length=false,sde=cps").kl_times_length is False
    assert make_algorithm("refl:margin=inf").margin == float("inf")
    assert make_algorithm("rwr:top_fraction=none").top_fraction is None
    assert make_algorithm("rwr:top_fraction=1e-1").top_fraction == 0.1


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        (FlowGRPO(window=3), {}, "window=3 of 2 steps with noise"),
        (FlowGRPO(sde="ddim"), {}, "sde='ddim' does not exist"),
        (FlowGRPO(sde="cps"), {"sample_eta": 1.5}, r"eta=1\.5 is too large"),
        (DRaFT(4), {}, "last_steps=4 of 3 steps"),
        (DPO(), {}, "set sample_group_size to 2 or more"),
        (DPO(), {"sample_group_size": 2, "train_batch_size": 1}, "must be multiples of 2"),
        (
            DPO(),
            {"sample_group_size": 2, "sample_batch_size": 1, "sample_num_batches_per_epoch": 2},
            "must be multiples of 2",
        ),
        (AWM(), {"per_prompt_stat_tracking": True}, "awm does not use per_prompt_stat_tracking"),
        (
            AWM(ema_kl_coefficient=1.0),
            {"train_batch_size": 1},
            "ema_kl_coefficient is for one optimizer step an epoch",
        ),
        (AWM(ema_kl_coefficient=1.0), {}, r"train_clip_range=0\.01 does nothing with one optimizer step"),
        (NFT(), {"train_clip_range": 0.1}, "nft does not use train_clip_range"),
        (RWR(), {"train_clip_range": 0.1}, "rwr does not use train_clip_range"),
        (RWR(), {"train_kl_coefficient": 0.1}, "rwr does not use train_kl_coefficient"),
        (RWR(), {"per_prompt_stat_tracking": True}, "rwr does not use per_prompt_stat_tracking"),
        (RWR(), {"train_adv_clip_max": 3.0}, "rwr does not use train_adv_clip_max"),
        (RWR(), {"log_prob_reduction": "sum"}, "rwr does not use log_prob_reduction"),
        (
            DPO(),
            {"sample_group_size": 2, "train_kl_coefficient": 0.1},
            "dpo does not use train_kl_coefficient",
        ),
        (DRaFT(), {"train_timestep_fraction": 0.5}, "draft does not use train_timestep_fraction"),
        (ReFL(), {"train_kl_coefficient": 0.1}, "refl does not use train_kl_coefficient"),
    ],
)
def test_settings_that_an_algorithm_cannot_use_are_refused_before_anything_is_drawn(
    tmp_path, algorithm, changes, message
):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, algorithm, **changes)
    assert not list(tmp_path.iterdir())


def test_as_many_actions_of_each_sample_as_are_trained_make_a_step():
    steps = shuffled_pairs((4, 5), 2, samples_per_step=2, generator=torch.Generator().manual_seed(0))
    for step in steps:
        assert len(step["rows"]) == 4
        assert len(set(zip(step["rows"].tolist(), step["columns"].tolist(), strict=True))) == 4
    assert torch.cat([step["rows"] for step in steps]).bincount().tolist() == [2, 2, 2, 2]

"""The budget: counts by hand, and against what real tensors and real trainers hold and compute."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import StableDiffusionPipeline
from helpers import (
    brightness,
    make_config,
    make_pipeline,
    make_sd3_pipeline,
    make_xl_pipeline,
    noisy_image,
    red_three,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.app import budget
from ddpo_lessons.app.memory import like, published
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.families import FAMILIES, family_of, policy
from ddpo_lessons.families.policy import prepare_policy
from ddpo_lessons.families.stable_diffusion import StableDiffusion
from ddpo_lessons.tiny import load_tiny_sd3
from ddpo_lessons.trainer import ImageDDPOTrainer, Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def sizes(pipeline: Any) -> dict[str, int]:
    parts = pipeline.components.items()
    return {name: count(part) for name, part in parts if isinstance(part, nn.Module)}


# ------------------------------------------------------------------------------------------ networks
CLIP_VAE = {"vae": 83_653_863, "text_encoder": 123_060_480}
SD3_ENCODERS = {"text_encoder": 123_650_304, "text_encoder_2": 694_659_840, "text_encoder_3": 4_762_310_656}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sd15", {"unet": 859_520_964, **CLIP_VAE}),
        ("sdxl", {"unet": 2_567_463_684, **CLIP_VAE, "text_encoder_2": 694_659_840}),
        ("sd35_medium", {"transformer": 2_243_171_520, "vae": 83_819_683, **SD3_ENCODERS}),
    ],
)
def test_published_models_have_their_sizes_and_take_no_memory(name, expected):
    pipeline = published(name)
    assert sizes(pipeline) == expected
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            assert {p.device.type for p in part.parameters()} == {"meta"}
    if name == "sd35_medium":
        positions = 384**2 * 1536  # a table, and no parameter
        transformer = pipeline.transformer
        assert sum(w.numel() for w in budget.weights(transformer)) == count(transformer) + positions


def test_lora_of_stable_diffusion_by_hand():
    """Rank 4 on to_q, to_k, to_v, to_out.0 of both attentions of sixteen blocks."""
    unet = published("sd15").unet
    trained = prepare_policy(unet, {}, DDPOConfig(), use_lora=True, device=budget.META)
    widths = [320] * 2 + [640] * 2 + [1280] * 2 + [1280] + [1280] * 3 + [640] * 3 + [320] * 3
    square, cross = [4 * 2 * (w + w) for w in widths], [4 * 2 * (w + 768) for w in widths]
    # self-attention: four square matrices; cross-attention: q and out square, k and v from the text
    expected = sum(2 * s + s + c for s, c in zip(square, cross, strict=True))
    assert sum(p.numel() for p in trained.values()) == expected == 797_184
    assert {p.dtype for p in trained.values()} == {torch.float32}


# -------------------------------------------------------------------------------------------- counts
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_peak_by_hand(device):
    weight = torch.zeros(1000, device=device)
    with budget.Counter(device) as counter:
        one = torch.zeros(100, device=device)  # 400
        two = one + 1  # 800
        del one  # 400
        two.view(10, 10).mul_(2)  # no memory: a view, and in place
        weight.view(2, 500)  # was there before
        torch.zeros(50, device=device)  # 600 for a moment
        torch.zeros(5000, device="meta" if device == "cpu" else "cpu")  # elsewhere
    assert (counter.peak, counter.live) == (800, 400)


def test_a_network_runs_once_for_each_shape():
    with torch.device("meta"):
        network, rows = nn.Linear(6, 7), torch.zeros(3, 6)
    with budget.Counter() as counter, counter.once(network):
        with torch.no_grad():
            assert [network(rows).shape for _ in range(3)] == [(3, 7)] * 3
            network(rows[:2])
        network(rows)
    assert counter.flops == 2 * 6 * 7 * (3 * 3 + 2 + 3)
    assert counter.passes == {False: 3 * 3 + 2, True: 3}
    assert network.forward.__func__ is nn.Linear.forward


def test_moments_in_eight_bits_where_tensors_are_large_enough():
    small, large = torch.zeros(4095), torch.zeros(4096)
    assert budget.moment_bytes([small, large]) == 2 * 4 * (4095 + 4096)
    assert budget.moment_bytes([small, large], eight_bit=True) == 2 * (4 * 4095 + 4096)


# ------------------------------------------------------------------------------- against real tensors
def plain_attention(query: Any, key: Any, value: Any, **unused: Any) -> torch.Tensor:
    """The same operations on every device."""
    return (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1) @ value


def test_fused_attention_saves_what_the_cpu_kernel_saves():
    """The outcome and a number per row of scores; on CUDA a random state of bytes as well."""
    query, kept = torch.zeros(2, 4, 64, 8, requires_grad=True), []
    for device, way in (("cpu", contextlib.nullcontext()), ("meta", budget.as_on_cuda())):
        moved = query.detach().to(device).requires_grad_()
        with way, budget.Counter(device) as counter:
            out = F.scaled_dot_product_attention(moved, moved, moved)
            kept.append(counter.live)
        assert out.requires_grad
    assert kept[0] == 2 * 4 * 64 * 8 * 4 + 2 * 4 * 64 * 4
    assert kept[0] <= kept[1] <= kept[0] + 64


def kept(unet: Any, device: str) -> int:
    """Bytes that live between forward and backward."""
    made = {"device": device, "dtype": torch.bfloat16}
    prepare_policy(unet, {}, DDPOConfig(mixed_precision="bf16"), use_lora=True, device=torch.device(device))
    latents, told = torch.zeros(2, 4, 8, 8, **made), torch.zeros(2, 16, 64, **made)
    with budget.Counter(device) as counter:
        out = unet(latents, 1, encoder_hidden_states=told).sample
        return counter.live if out.requires_grad else 0


def test_autocast_of_products_is_that_of_the_cpu(monkeypatch):
    """Its list of products is CUDA's; normalisations stay as they are on the CPU."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    monkeypatch.setattr(budget, "_TO_LOW", ("linear", "conv2d"))
    monkeypatch.setattr(budget, "_TO_FLOAT32", ())
    with torch.autocast("cpu", torch.bfloat16):
        expected = kept(make_pipeline().unet, "cpu")
    with budget.as_on_cuda():
        F.scaled_dot_product_attention = lambda *a, **kw: plain_attention(*(t.bfloat16() for t in a))
        plain = kept(like(make_pipeline()).unet, "meta")
        with torch.autocast("meta", torch.bfloat16):
            counted = kept(like(make_pipeline()).unet, "meta")
    assert counted == pytest.approx(expected, rel=0.01)
    assert counted != pytest.approx(plain, rel=0.01)


def test_functions_are_put_back():
    usual = (F.linear, F.conv2d, F.group_norm, F.layer_norm, F.scaled_dot_product_attention, torch.autocast)
    with budget.as_on_cuda(), torch.autocast("meta", torch.bfloat16):
        assert F.group_norm(torch.zeros(2, 4, 3, dtype=torch.bfloat16), 2).dtype == torch.float32
        assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == torch.bfloat16
        with torch.autocast("meta", enabled=False):  # as SDXL's family does around its autoencoder
            assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == torch.float32
        assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == torch.bfloat16
    with contextlib.suppress(ZeroDivisionError), budget.as_on_cuda():
        F.linear(torch.zeros(2, 4), torch.zeros(3, 4 // 0))
    now = (F.linear, F.conv2d, F.group_norm, F.layer_norm, F.scaled_dot_product_attention, torch.autocast)
    assert now == usual


# ----------------------------------------------------------------------------------- against real runs
def record(trainer: Any) -> list[Any]:
    """Keep what an epoch has: its trajectory, then its batches."""
    seen: list[Any] = []
    trainer.image_samples_hook = lambda *arguments: seen.append(arguments[0])
    steps = trainer.algorithm.steps

    def recorded(samples: Any, learner: Any) -> Any:
        seen.append(samples.trajectory)
        return steps(samples, learner)

    trainer.algorithm.steps = recorded
    return seen


def bytes_of(trajectory: Any) -> int:
    return sum(t.nbytes for t in vars(trajectory).values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("use_lora", [True, False])
def test_bytes_of_a_trainer(tmp_path, use_lora):
    config = make_config(
        tmp_path, sample_num_batches_per_epoch=2, sample_num_steps=4, train_use_lora=use_lora
    )
    pipeline, start = make_pipeline(), FromImages(noise_strength=0.5)
    found = budget.estimate(like(pipeline), config, DDPO(), start)
    trainer = ImageDDPOTrainer(config, brightness, noisy_image, pipeline, noise_strength=0.5)
    seen = record(trainer)
    trainer.step(0)
    trajectory, batches = seen
    # two steps: three states and the final latents, each four by eight by eight
    assert trajectory.latents.nbytes + trajectory.final_latents.nbytes == 4 * (3 + 1) * (4 * 8 * 8) * 4
    assert found.latents == bytes_of(trajectory)
    assert found.images == sum(batch[0].nbytes for batch in batches)
    embeds = trajectory.conditioning["prompt_embeds"]
    assert found.embeddings == embeds.nbytes * 2  # guided; the empty prompt is not doubled
    assert found.trained == sum(p.nbytes for p in trainer.learner.trainable.values())
    moments = trainer.learner.tensors()["optimizer"]
    assert found.moments == sum(t.nbytes for name, t in moments.items() if not name.endswith("|step"))
    parts = (pipeline.unet, pipeline.vae, pipeline.text_encoder)
    total = sum(p.nbytes for part in parts for p in part.parameters())
    assert found.frozen == total - found.trained
    assert found.resident == found.networks + found.samples + found.pairs
    assert found.networks == total + found.trained + found.moments
    assert found.peak == found.resident + max(found.sampling.peak, found.training.peak)


def test_bytes_of_a_flow_trainer(tmp_path):
    config = make_config(tmp_path, sample_num_steps=3, sample_eta=0.7, mixed_precision="bf16")
    pipeline = load_tiny_sd3()
    algorithm = make_algorithm("flow_grpo")
    found = budget.estimate(like(pipeline), config, algorithm, FromNoise())
    trainer = Trainer(config, brightness, red_three, pipeline, algorithm=algorithm)
    seen = record(trainer)
    trainer.step(0)
    trajectory = seen[0]
    assert found.latents == bytes_of(trajectory)
    # 16 tokens of CLIP and one for T5, 64 numbers each, and 64 of the pooled embedding; guided
    assert found.embeddings == sum(t.nbytes for t in trajectory.conditioning.values())
    assert found.embeddings == 2 * 2 * (17 * 64 + 64) * 2
    parts = (pipeline.transformer, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2)
    assert found.frozen == sum(w.nbytes for part in parts for w in budget.weights(part)) - found.trained
    assert found.trained == sum(p.nbytes for p in trainer.learner.trainable.values())


@pytest.fixture
def like_the_cpu(monkeypatch):
    """Let the budget count what the CPU computes in float32, and the CPU compute what is counted."""
    monkeypatch.setattr(policy, "use_summed_weights", lambda config: None)  # a GPU has peft's adapters
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    monkeypatch.setattr(budget, "as_on_cuda", contextlib.nullcontext)
    monkeypatch.setattr(torch, "autocast", lambda *unused, **enabled: contextlib.nullcontext())


GROUPS = {"sample_group_size": 2}


@pytest.mark.parametrize(
    ("text", "make", "changes"),
    [
        ("ddpo", make_pipeline, {"train_timestep_fraction": 0.5}),
        ("ddpo", make_xl_pipeline, {"train_kl_coefficient": 0.1, "train_use_lora": False}),
        pytest.param("rwr", make_pipeline, {}, marks=pytest.mark.slow),  # passes are those of nft
        ("branching:window=1", make_pipeline, GROUPS),
        ("flow_grpo:window=2", make_sd3_pipeline, {"train_num_inner_epochs": 2}),
        ("nft", make_pipeline, {}),
        pytest.param("pepg", make_pipeline, {}, marks=pytest.mark.slow),
        ("dpo", make_pipeline, GROUPS),
        ("draft:last_steps=2", make_pipeline, {}),
        ("refl", make_sd3_pipeline, {}),
    ],
)
def test_flops_are_those_of_an_epoch_that_runs(text, make, changes, tmp_path, like_the_cpu):
    """Every algorithm, and every family: counted with memory, and without."""
    fields = {"sample_num_steps": 3, "sample_num_batches_per_epoch": 2, "train_batch_size": 2}
    unused = {"train_clip_range": DDPOConfig.train_clip_range}  # by some of them
    config = make_config(tmp_path, **fields, **unused, **changes, train_gradient_accumulation_steps=2)
    found = budget.estimate(like(make()), config, make_algorithm(text), FromNoise())
    algorithm = make_algorithm(text)
    algorithm.shares_starts = False  # what groups share is left out of the count
    trainer = Trainer(config, brightness, red_three, make(), algorithm=algorithm)
    trainer.family.condition(["a red three"], "", 2.0)  # embedding prompts is not counted
    with FlopCounterMode(display=False) as counter:
        trainer.step(0)
    assert found.sampling.flops + found.training.flops == counter.get_total_flops()


@pytest.mark.parametrize(
    ("text", "checkpointing"), [("ddpo", True), ("nft", False), ("draft:last_steps=2", False)]
)
def test_the_peak_of_training_is_that_of_a_step_that_runs(text, checkpointing, tmp_path, like_the_cpu):
    fields = {"sample_num_batches_per_epoch": 2, "train_clip_range": DDPOConfig.train_clip_range}
    fields |= {"train_forward_size": 2, "train_gradient_checkpointing": checkpointing}
    config = make_config(tmp_path, **fields)
    found = budget.estimate(like(make_pipeline()), config, make_algorithm(text), FromNoise())
    task = (brightness, red_three, make_pipeline())
    trainer = Trainer(config, *task, algorithm=make_algorithm(text))
    for weight in trainer.learner.trainable.values():
        weight.grad = torch.zeros_like(weight)
    peaks = []

    def step(loss: Any, groups: Any) -> dict[str, float]:
        with budget.Counter("cpu") as counter:
            loss(trainer.learner.denoiser, groups[0])[0].backward()
        peaks.append(counter.peak)
        return {}

    trainer.learner.step = step
    trainer.step(0)
    assert found.training.peak == pytest.approx(peaks[0], rel=0.005)


# ----------------------------------------------------------------------------------------- the budget
class TwicePipeline(StableDiffusionPipeline):
    """A model of another kind."""


class Twice(StableDiffusion):
    """A family that asks its UNet about every latent twice, and embeds half of each prompt."""

    def predict(self, *arguments: Any) -> torch.Tensor:
        return (super().predict(*arguments) + super().predict(*arguments)) / 2

    def condition(self, *arguments: Any) -> dict[str, torch.Tensor]:
        told = super().condition(*arguments)
        return {name: value[:, :8] for name, value in told.items()}


def test_a_new_family_is_counted_without_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "TwicePipeline", Twice)
    config = make_config(tmp_path, sample_num_steps=5)
    pipeline = make_pipeline()
    parts = {**pipeline.components, "requires_safety_checker": False}
    once, twice = (
        budget.estimate(like(made), config, DDPO(), FromNoise())
        for made in (pipeline, TwicePipeline(**parts))
    )
    assert twice.embeddings == once.embeddings / 2
    assert twice.frozen == once.frozen
    # 2 samples, 5 steps, guided: 20 latents
    assert (once.sampling.passes, once.training.passes) == (20, 20)
    assert (twice.sampling.passes, twice.training.passes) == (40, 40)
    assert 1.5 < twice.training.peak / once.training.peak < 2  # both passes are kept


def test_copies_of_the_policy_are_counted(tmp_path):
    """An older policy, and the one before training where no adapter can be switched off for it."""
    pipeline = make_pipeline()

    def held(text: str = "ddpo", **changes: Any) -> int:
        task = make_config(tmp_path, **changes), make_algorithm(text), FromNoise()
        return budget.nbytes(budget.Rehearsal(family_of(like(pipeline)), *task).copies())

    def frozen(text: str) -> int:
        return budget.estimate(
            like(pipeline), make_config(tmp_path), make_algorithm(text), FromNoise()
        ).frozen

    task = (make_config(tmp_path / "run"), brightness, red_three, make_pipeline())
    trainer = Trainer(*task, algorithm=AWM())
    old = sum(weight.nbytes for weight in trainer.learner.old.values())
    assert frozen("awm") - frozen("ddpo") == held("awm") == old > 0
    penalty = {"train_kl_coefficient": 0.1}
    assert held(**penalty) == held() == 0
    whole = sum(weight.nbytes for weight in pipeline.unet.parameters())
    lora = str(tmp_path / "lora")  # the reference is the adapter as it was loaded
    assert (held(**penalty, train_lora_from=lora), held(train_lora_from=lora)) == (old, 0)
    assert (held(**penalty, train_use_lora=False), held(train_use_lora=False)) == (whole, 0)


def test_pairs_are_held_with_their_noise(tmp_path):
    """Numbers of rows, columns, distinct states and pairs; or rows, columns, timesteps and noise."""
    fields = {"sample_num_steps": 5, "sample_num_batches_per_epoch": 2, "train_batch_size": 2}
    config = make_config(tmp_path, **fields)
    ddpo, awm = (
        budget.estimate(like(make_pipeline()), config, make_algorithm(text), FromNoise()).pairs
        for text in ("ddpo", "awm")
    )
    assert ddpo == 2 * 5 * 4 * 8
    assert awm == 2 * 5 * (3 * 8 + 4 * 8 * 8 * 4)


def test_the_most_steps_that_may_be_drawn_are_counted(tmp_path):
    config = make_config(tmp_path)
    drawn, fixed = (
        budget.estimate(
            like(make_pipeline()), config, make_algorithm(f"draft:last_steps=2{end}"), FromNoise()
        )
        for end in (",draws_steps=true", "")
    )
    assert drawn == fixed


def test_checkpointing_computes_more_and_holds_less():
    unet = published("sd15").unet
    prepare_policy(unet, {}, DDPOConfig(mixed_precision="bf16"), use_lora=True, device=budget.META)
    made = {"device": "meta", "dtype": torch.bfloat16}
    latents, told, step = torch.zeros(1, 4, 64, 64, **made), torch.zeros(1, 77, 768, **made), 1
    run = lambda: unet(latents, step, encoder_hidden_states=told).sample.float().mean()  # noqa: E731
    with torch.no_grad():
        forward = budget.cost(run, torch.bfloat16)
    assert 0.79e12 < forward.flops < 0.82e12  # published: 0.4 tera multiply-adds
    usual = budget.cost(lambda: run().backward(), torch.bfloat16)
    assert 2.1 < usual.flops / forward.flops < 2.3  # LoRA: no gradient of frozen weights
    unet.enable_gradient_checkpointing()
    recomputed = budget.cost(lambda: run().backward(), torch.bfloat16)
    assert usual.flops < recomputed.flops <= usual.flops + forward.flops
    assert recomputed.peak < usual.peak / 3


def test_joining_trajectories_may_be_the_peak():
    nothing, counted = budget.Cost(0, 0), dict.fromkeys(budget.Budget.__dataclass_fields__, 0)
    parts: dict[str, Any] = {**counted, "latents": 3, "embeddings": 4, "sampling": nothing}
    found = [budget.Budget(**{**parts, "training": budget.Cost(0, peak)}) for peak in (1, 9)]
    assert [each.peak for each in found] == [7 + 7, 7 + 9]


def test_seconds_are_flops_over_speed():
    parts: dict[str, Any] = dict.fromkeys(budget.Budget.__dataclass_fields__, 0)
    work = {"sampling": budget.Cost(3 * 10**12, 0), "training": budget.Cost(6 * 10**12, 0)}
    found = budget.Budget(**{**parts, **work})
    assert found.seconds(peak_tflops=10, utilisation=0.5) == pytest.approx((0.6, 1.2))
    with pytest.raises(ValueError, match="utilisation=0"):
        found.seconds(10, 0)


def test_a_pipeline_with_memory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="like"):
        budget.estimate(make_pipeline(), make_config(tmp_path), DDPO(), FromNoise())

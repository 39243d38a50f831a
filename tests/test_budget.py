"""The budget: counts by hand, and against what real tensors and a real trainer hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from helpers import brightness, make_config, make_pipeline, noisy_image, red_three
from torch import nn

from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.app import budget
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.families import policy
from ddpo_lessons.families.policy import prepare_policy
from ddpo_lessons.tiny import load_tiny_sd3
from ddpo_lessons.trainer import FlowGRPOTrainer, ImageDDPOTrainer, Runner

pytestmark = pytest.mark.usefixtures("one_thread")


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# ------------------------------------------------------------------------------------------ networks
def test_stable_diffusion_has_its_published_sizes_and_takes_no_memory() -> None:
    networks = budget.sd15()
    assert count(networks.unet) == 859_520_964
    assert count(networks.vae) == 83_653_863
    assert count(networks.text_encoder) == 123_060_480
    for network in vars(networks).values():
        assert {p.device.type for p in network.parameters()} == {"meta"}


def test_lora_of_stable_diffusion_by_hand() -> None:
    """Rank 4 on to_q, to_k, to_v, to_out.0 of both attentions of sixteen blocks."""
    networks = budget.sd15()
    trained = prepare_policy(networks.unet, {}, DDPOConfig(), use_lora=True, device=torch.device("meta"))
    widths = [320] * 2 + [640] * 2 + [1280] * 2 + [1280] + [1280] * 3 + [640] * 3 + [320] * 3
    square, cross = [4 * 2 * (w + w) for w in widths], [4 * 2 * (w + 768) for w in widths]
    # self-attention: four square matrices; cross-attention: q and out square, k and v from the text
    expected = sum(2 * s + s + c for s, c in zip(square, cross, strict=True))
    assert sum(p.numel() for p in trained.values()) == expected == 797_184
    assert {p.dtype for p in trained.values()} == {torch.float32}


def test_like_has_the_pipelines_architecture() -> None:
    pipeline = make_pipeline()
    networks = budget.like(pipeline)
    for name, network in vars(networks).items():
        mine = {key: tensor.shape for key, tensor in network.state_dict().items()}
        assert mine == {key: t.shape for key, t in getattr(pipeline, name).state_dict().items()}
        assert {t.device.type for t in network.parameters()} == {"meta"}


@pytest.mark.slow
def test_stable_diffusion_35_has_its_published_sizes() -> None:
    networks = budget.sd35_medium()
    assert {name: count(network) for name, network in networks.frozen.items()} == {
        "vae": 83_819_683,
        "text_encoder": 123_650_304,
        "text_encoder_2": 694_659_840,
        "text_encoder_3": 4_762_310_656,
    }
    assert count(networks.transformer) == 2_243_171_520
    positions = 384**2 * 1536  # a table, and no parameter
    assert sum(w.numel() for w in budget.weights(networks.transformer)) == 2_243_171_520 + positions
    assert networks.tokens == 77 + 256


# -------------------------------------------------------------------------------------------- counts
def test_flops_of_layers_by_hand() -> None:
    with torch.device("meta"):
        conv, image = nn.Conv2d(3, 8, 3, padding=1), torch.zeros(2, 3, 10, 10)
        query = torch.zeros(2, 4, 16, 5)  # 2 samples, 4 heads, 16 positions, 5 dimensions
    # every one of 2*8*10*10 outputs takes 3*3*3 multiply-adds
    assert budget.count_flops(lambda: conv(image)) == 2 * (2 * 8 * 10 * 10) * 27
    with budget.as_on_cuda():
        flops = budget.count_flops(lambda: F.scaled_dot_product_attention(query, query, query))
    # 2*4 matrices of 16*16 scores, and as many products of scores and values
    assert flops == 2 * (2 * 4) * (16 * 16 * 5) * 2


def test_backward_of_a_linear_layer_is_two_forwards_and_one_where_it_is_frozen() -> None:
    with torch.device("meta"):
        first, second = nn.Linear(6, 7, bias=False), nn.Linear(7, 5, bias=False)
        rows = torch.zeros(3, 6)
    forward = [2 * 3 * 6 * 7, 2 * 3 * 7 * 5]
    # no gradient of the data: the first layer needs that of its weights alone
    both = budget.count_flops(lambda: second(first(rows)).sum().backward())
    assert both == 2 * forward[0] + 3 * forward[1]
    second.requires_grad_(False)
    assert budget.count_flops(lambda: second(first(rows)).sum().backward()) == 2 * sum(forward)


def test_saved_bytes_by_hand() -> None:
    first, second = nn.Linear(6, 7), nn.Linear(7, 5)
    weights = [*first.parameters(), *second.parameters()]
    rows = torch.zeros(3, 6)

    def run() -> torch.Tensor:
        return second(first(rows).relu())

    # the input (3, 6) for the first weight; the outcome of relu (3, 7), which the second weight shares
    assert budget.saved_bytes(run, weights) == 4 * (3 * 6 + 3 * 7)
    with_weights = 4 * (7 * 5)  # the second weight, for the gradient of its input
    assert budget.saved_bytes(run) == 4 * (3 * 6 + 3 * 7) + with_weights
    first.requires_grad_(False)
    second.requires_grad_(False)
    assert budget.saved_bytes(run) == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_peak_bytes_by_hand(device: str) -> None:
    def chain() -> None:
        one = torch.zeros(100, device=device)  # 400
        two = one + 1  # 800
        del one  # 400
        two.view(10, 10).mul_(2)  # no memory: a view, and in place
        torch.zeros(50, device=device)  # 600 for a moment

    assert budget.peak_bytes(chain) == 800
    weight = torch.zeros(1000, device=device)
    assert budget.peak_bytes(lambda: weight.view(2, 500), [weight]) == 0


def test_moments_in_eight_bits_where_tensors_are_large_enough() -> None:
    small, large = torch.zeros(4095), torch.zeros(4096)
    assert budget.moment_bytes([small, large]) == 2 * 4 * (4095 + 4096)
    assert budget.moment_bytes([small, large], eight_bit=True) == 2 * (4 * 4095 + 4096)


# ------------------------------------------------------------------------------- against real tensors
def policies(**changes: Any) -> tuple[Any, Any]:
    """The same policy with memory and without."""
    config = DDPOConfig(**changes)
    real, meta = make_pipeline(), budget.like(make_pipeline())
    for networks, device in ((real, "cpu"), (meta, "meta")):
        frozen = {"vae": networks.vae, "text_encoder": networks.text_encoder}
        prepare_policy(networks.unet, frozen, config, use_lora=True, device=torch.device(device))
    return real.unet, meta.unet


def plain_attention(query: Any, key: Any, value: Any, **unused: Any) -> torch.Tensor:
    """The same operations on every device."""
    return (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1) @ value


def passing(unet: Any, rows: int = 2) -> Callable[[], torch.Tensor]:
    latents, timesteps, embeds = budget.unet_inputs(unet, rows, tokens=16)
    return lambda: unet(latents, timesteps, encoder_hidden_states=embeds).sample


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_meta_tensors_save_live_and_compute_as_real_ones_do(
    precision: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    # The meta device stands for a GPU, where adapters are peft's own.
    monkeypatch.setattr(policy, "use_summed_weights", lambda config: None)
    counts = []
    for unet in policies(mixed_precision=precision, train_gradient_checkpointing=checkpointing):
        run, weights = passing(unet), list(unet.parameters())
        both_ways = lambda run=run: run().float().mean().backward()  # noqa: E731
        saved = budget.saved_bytes(run, weights)
        counts.append((saved, budget.peak_bytes(both_ways, weights), budget.count_flops(both_ways)))
    real, meta = counts
    # In bf16 the CPU's normalisations keep their statistics in another precision than others.
    assert meta == pytest.approx(real, rel=0.01 if precision == "bf16" else 0)
    assert meta[2] == real[2]


def test_fused_attention_saves_what_the_cpu_kernel_saves() -> None:
    """Query, key, value, outcome and a number per row of scores; on CUDA a random state of bytes as well."""
    query = torch.zeros(2, 4, 64, 8, requires_grad=True)
    real = budget.saved_bytes(lambda: F.scaled_dot_product_attention(query, query, query))
    assert real == 2 * 4 * 64 * 8 * 4 * 2 + 2 * 4 * 64 * 4
    with budget.as_on_cuda():
        query = query.detach().to("meta").requires_grad_()
        counted = budget.saved_bytes(lambda: F.scaled_dot_product_attention(query, query, query))
    assert real <= counted <= real + 64


def test_autocast_of_products_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list of products is CUDA's; normalisations stay as they are on the CPU."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    monkeypatch.setattr(budget, "_TO_LOW", ("linear", "conv2d"))
    monkeypatch.setattr(budget, "_TO_FLOAT32", ())
    real, meta = policies(mixed_precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = budget.saved_bytes(passing(real), real.parameters())
    with budget.as_on_cuda(torch.bfloat16):
        F.scaled_dot_product_attention = lambda *a, **kw: plain_attention(*(t.bfloat16() for t in a))
        counted = budget.saved_bytes(passing(meta), meta.parameters())
    assert counted == pytest.approx(expected, rel=0.01)
    assert counted != pytest.approx(budget.saved_bytes(passing(meta), meta.parameters()), rel=0.01)


def test_functions_are_put_back() -> None:
    usual = (F.linear, F.conv2d, F.group_norm, F.layer_norm, F.scaled_dot_product_attention)
    with budget.as_on_cuda(torch.bfloat16):
        assert F.group_norm(torch.zeros(2, 4, 3, dtype=torch.bfloat16), 2).dtype == torch.float32
        assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == torch.bfloat16
    with contextlib.suppress(ZeroDivisionError), budget.as_on_cuda(torch.bfloat16):
        F.linear(torch.zeros(2, 4), torch.zeros(3, 4 // 0))
    assert (F.linear, F.conv2d, F.group_norm, F.layer_norm, F.scaled_dot_product_attention) == usual


# ----------------------------------------------------------------------------------------- the budget
@pytest.mark.parametrize("use_lora", [True, False])
def test_bytes_of_a_trainer(tmp_path: Path, use_lora: bool) -> None:
    config = make_config(
        tmp_path, sample_num_batches_per_epoch=2, sample_num_steps=4, train_use_lora=use_lora
    )
    pipeline = make_pipeline()
    networks = budget.like(pipeline)
    trainer = ImageDDPOTrainer(config, brightness, noisy_image, pipeline, noise_strength=0.5)
    found = budget.estimate(networks, config, num_timesteps=2, from_images=True)
    seen: list[Any] = []
    trainer.image_samples_hook = lambda *arguments: seen.append(arguments[0])
    update = trainer.algorithm.update
    trainer.algorithm.update = lambda samples, learner: (
        seen.append(samples.trajectory),
        update(samples, learner),
    )
    trainer.step(0)
    trajectory, batches = seen
    assert found.latents == trajectory.latents.nbytes == 4 * 3 * (4 * 8 * 8) * 4
    assert found.images == sum(batch[0].nbytes for batch in batches)
    embeds = trajectory.conditioning["prompt_embeds"]
    assert found.embeddings == embeds.nbytes * 2  # guided; the empty prompt is not doubled
    assert found.trained == found.gradients == sum(p.nbytes for p in trainer.learner.trainable.values())
    moments = trainer.learner.tensors()["optimizer"]
    assert found.moments == sum(t.nbytes for name, t in moments.items() if not name.endswith("|step"))
    parts = (pipeline.unet, pipeline.vae, pipeline.text_encoder)
    total = sum(p.nbytes for part in parts for p in part.parameters())
    assert found.frozen == total - found.trained
    assert found.resident == sum(
        getattr(found, name)
        for name in ("frozen", "trained", "gradients", "moments", "latents", "images", "embeddings")
    )
    assert found.peak == found.resident + max(found.activations_sampling, found.activations_training)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_bytes_of_a_flow_trainer(tmp_path: Path, precision: str) -> None:
    config = make_config(tmp_path, sample_num_steps=3, sample_eta=0.7, mixed_precision=precision)
    pipeline = load_tiny_sd3()
    networks = budget.like(pipeline)
    trainer = FlowGRPOTrainer(config, brightness, red_three, pipeline)
    found = budget.estimate(networks, config, num_timesteps=2, from_images=False)
    seen: list[Any] = []
    update = trainer.algorithm.update
    trainer.algorithm.update = lambda samples, learner: (
        seen.append(samples.trajectory),
        update(samples, learner),
    )
    trainer.step(0)
    (trajectory,) = seen
    assert found.latents == trajectory.latents.nbytes == 2 * 3 * (4 * 8 * 8) * 4
    size = 2 if precision == "bf16" else 4
    # 16 tokens of CLIP and one for T5, 64 numbers each, and 64 of the pooled embedding; guided
    assert found.embeddings == sum(t.nbytes for t in trajectory.conditioning.values())
    assert found.embeddings == 2 * 2 * (17 * 64 + 64) * size
    parts = (pipeline.transformer, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2)
    assert found.frozen == sum(w.nbytes for part in parts for w in budget.weights(part)) - found.trained
    assert found.trained == sum(p.nbytes for p in trainer.learner.trainable.values())


def test_flops_of_a_transformer_by_hand() -> None:
    """One block: two streams of 16 and 17 tokens, whose attention is joint."""
    rows, width, heads = 3, 16, 2
    with torch.device("meta"):
        network = SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, out_channels=4, pos_embed_max_size=4, num_layers=1,
            num_attention_heads=heads, attention_head_dim=width // heads, joint_attention_dim=24,
            caption_projection_dim=width, pooled_projection_dim=20,
        )  # fmt: skip
    image, text = 16, 17
    each = [
        image * 4 * 4 * width,  # patches of 2 x 2 in four channels
        256 * width + width * width + 20 * width + width * width,  # time, and the pooled embedding
        text * 24 * width,
        width * 6 * width + width * 2 * width,  # modulations of the picture; of the text, which then ends
        3 * (image + text) * width * width,  # query, key, value
        2 * (image + text) ** 2 * width,  # scores and values, all heads
        image * width * width,  # out
        2 * image * width * 4 * width,  # the feed-forward network
        width * 2 * width + image * width * 4 * 4,  # out of the transformer
    ]
    assert budget.sampling_cost(network, rows, text).flops == 2 * rows * sum(each)


def test_flops_of_an_epoch_are_those_of_its_passes(tmp_path: Path) -> None:
    pipeline = make_pipeline()
    changes = {"sample_num_batches_per_epoch": 3, "train_batch_size": 3, "sample_num_steps": 8}
    plain = make_config(tmp_path, **changes, sample_guidance_scale=1.0)
    found = budget.estimate(budget.like(pipeline), plain, 4, from_images=True, reward_bytes=7)
    networks = budget.like(pipeline)
    prepare_policy(networks.unet, {}, plain, use_lora=True, device=torch.device("meta"))
    step, pair = budget.sampling_cost(networks.unet, 1, 16), budget.training_cost(networks.unet, 1, 16)
    code = budget.decoding_cost(networks.vae, 1, 32).flops + budget.encoding_cost(networks.vae, 1, 32).flops
    assert found.flops_sampling == 6 * (4 * step.flops + code)
    assert found.flops_training == 6 * 4 * pair.flops
    assert found.reward == 7
    changed = {"sample_guidance_scale": 2.0, "train_num_inner_epochs": 2, "train_kl_coefficient": 1.0}
    guided = budget.estimate(
        budget.like(pipeline), make_config(tmp_path, **changes, **changed), 4, from_images=False
    )
    assert guided.flops_sampling == 6 * (4 * 2 * step.flops + budget.decoding_cost(networks.vae, 1, 32).flops)
    assert guided.flops_training == 2 * 6 * 4 * 2 * (pair.flops + step.flops)


def test_copies_of_the_policy_are_counted(tmp_path: Path) -> None:
    """An older policy, and the one before training where no adapter can be switched off for it."""
    pipeline = make_pipeline()

    def held(keeps_old: bool = False, **changes: Any) -> int:
        config, networks = make_config(tmp_path, **changes), budget.like(pipeline)
        return budget.estimate(networks, config, 2, from_images=False, keeps_old=keeps_old).frozen

    task = (make_config(tmp_path / "run"), brightness, red_three, make_pipeline())
    runner = Runner(*task, algorithm=AWM(), start=FromNoise())
    old = sum(weight.nbytes for weight in runner.learner.old.values())
    assert held(keeps_old=True) - held() == old > 0
    penalty = {"train_kl_coefficient": 0.1}
    assert held(**penalty) == held()
    lora = tmp_path / "lora"
    assert held(**penalty, train_lora_from=str(lora)) - held(train_lora_from=str(lora)) == old
    whole = sum(weight.nbytes for weight in pipeline.unet.parameters())
    assert held(**penalty, train_use_lora=False) - held(train_use_lora=False) == whole


def test_checkpointing_computes_more_and_holds_less(tmp_path: Path) -> None:
    config = make_config(tmp_path, train_batch_size=1, sample_batch_size=1, mixed_precision="bf16")
    networks = budget.sd15()
    frozen = {"vae": networks.vae, "text_encoder": networks.text_encoder}
    prepare_policy(networks.unet, frozen, config, use_lora=True, device=torch.device("meta"))
    forward = budget.sampling_cost(networks.unet, 1, autocast=torch.bfloat16)
    assert 0.79e12 < forward.flops < 0.82e12  # published: 0.4 tera multiply-adds
    usual = budget.training_cost(networks.unet, 1, autocast=torch.bfloat16)
    assert 2.1 < usual.flops / forward.flops < 2.3  # LoRA: no gradient of frozen weights
    networks.unet.enable_gradient_checkpointing()
    recomputed = budget.training_cost(networks.unet, 1, autocast=torch.bfloat16)
    assert usual.flops < recomputed.flops <= usual.flops + forward.flops
    assert recomputed.peak < usual.peak / 3


def test_seconds_are_flops_over_speed() -> None:
    parts = dict.fromkeys(budget.Budget.__dataclass_fields__, 0)
    found = budget.Budget(**{**parts, "flops_sampling": 3 * 10**12, "flops_training": 6 * 10**12})
    assert found.seconds(peak_tflops=10, utilisation=0.5) == pytest.approx((0.6, 1.2))
    with pytest.raises(ValueError, match="utilisation=0"):
        found.seconds(10, 0)


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="like\\(pipeline\\)"):
        budget.estimate(make_pipeline(), make_config(tmp_path), 2, from_images=True)
    with pytest.raises(ValueError, match="num_timesteps=0"):
        budget.estimate(budget.like(make_pipeline()), make_config(tmp_path), 0, from_images=True)

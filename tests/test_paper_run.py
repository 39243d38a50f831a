"""Estimates of full-size runs: counts by hand, and against what real tensors and trainers hold."""

import contextlib
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import brightness, make_config, make_pipeline, make_sd3_pipeline, on_meta, red_three
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed import paper_run
from benchmarks.speed.paper_run import META, Counter, as_on_cuda, estimate, published
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.models import policy
from ddpo_lessons.models.policy import prepare_policy
from ddpo_lessons.trainer import Trainer

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
        buffers = [b for b in transformer.buffers() if b.is_floating_point()]
        assert sum(b.numel() for b in buffers) == positions
        assert count(transformer) == expected["transformer"]


def test_lora_of_stable_diffusion_by_hand():
    """Rank 4 on to_q, to_k, to_v, to_out.0 of both attentions of sixteen blocks."""
    unet = published("sd15").unet
    trained = prepare_policy(unet, {}, DDPOConfig(), use_lora=True, device=META)
    widths = [320] * 2 + [640] * 2 + [1280] * 2 + [1280] + [1280] * 3 + [640] * 3 + [320] * 3
    square, cross = [4 * 2 * (w + w) for w in widths], [4 * 2 * (w + 768) for w in widths]
    # self-attention: four square matrices; cross-attention: q and out square, k and v from the text
    expected = sum(2 * s + s + c for s, c in zip(square, cross, strict=True))
    assert sum(p.numel() for p in trained.values()) == expected == 797_184
    assert {p.dtype for p in trained.values()} == {torch.float32}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_peak_by_hand(device):
    weight = torch.zeros(1000, device=device)
    with Counter(device) as counter:
        one = torch.zeros(100, device=device)  # 400
        two = one + 1  # 800
        del one  # 400
        two.view(10, 10).mul_(2)  # no memory: a view, and in place
        weight.view(2, 500)  # was there before
        torch.zeros(50, device=device)  # 600 for a moment
        torch.zeros(5000, device="meta" if device == "cpu" else "cpu")  # elsewhere
    assert (counter.peak, counter.live) == (800, 400)


# ------------------------------------------------------------------------------- against real tensors
def plain_attention(query: Any, key: Any, value: Any, **unused: Any) -> torch.Tensor:
    """The same operations on every device."""
    return (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1) @ value


def test_fused_attention_saves_what_the_cpu_kernel_saves():
    """The outcome and a number per row of scores; on CUDA a random state of bytes as well."""
    query, kept = torch.zeros(2, 4, 64, 8, requires_grad=True), []
    for device, way in (("cpu", contextlib.nullcontext()), ("meta", as_on_cuda())):
        moved = query.detach().to(device).requires_grad_()
        with way, Counter(device) as counter:
            out = F.scaled_dot_product_attention(moved, moved, moved)
            kept.append(counter.live)
        assert out.requires_grad
    assert kept[0] == 2 * 4 * 64 * 8 * 4 + 2 * 4 * 64 * 4
    assert kept[0] <= kept[1] <= kept[0] + 64


def kept(unet: Any, device: str) -> int:
    """Bytes that live between forward and backward."""
    made = {"device": device, "dtype": torch.bfloat16}
    prepare_policy(unet, {}, DDPOConfig(mixed_precision="bf16"), use_lora=True, device=torch.device(device))
    latents, embeds = torch.zeros(2, 4, 8, 8, **made), torch.zeros(2, 16, 64, **made)
    with Counter(device) as counter:
        out = unet(latents, 1, encoder_hidden_states=embeds).sample
        return counter.live if out.requires_grad else 0


def test_autocast_of_products_is_that_of_the_cpu(monkeypatch):
    """Its list of products is CUDA's; normalizations stay as they are on the CPU."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    monkeypatch.setattr(paper_run, "PRODUCTS", ("linear", "conv2d"))
    monkeypatch.setattr(paper_run, "NORMS", ())
    with torch.autocast("cpu", torch.bfloat16):
        expected = kept(make_pipeline().unet, "cpu")
    with as_on_cuda():
        F.scaled_dot_product_attention = lambda *a, **kw: plain_attention(*(t.bfloat16() for t in a))
        plain = kept(on_meta(make_pipeline()).unet, "meta")
        with torch.autocast("meta", torch.bfloat16):
            counted = kept(on_meta(make_pipeline()).unet, "meta")
    assert counted == pytest.approx(expected, rel=0.01)
    assert counted != pytest.approx(plain, rel=0.01)


def test_functions_are_put_back():
    usual = (F.linear, F.conv2d, F.group_norm, F.layer_norm, F.scaled_dot_product_attention, torch.autocast)
    with as_on_cuda(), torch.autocast("meta", torch.bfloat16):
        assert F.group_norm(torch.zeros(2, 4, 3, dtype=torch.bfloat16), 2).dtype == torch.float32
        assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == torch.bfloat16
        with torch.autocast("meta", enabled=False):  # as SDXL's family does around its autoencoder
            assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == torch.float32
        assert F.linear(torch.zeros(2, 4), torch.zeros(3, 4)).dtype == torch.bfloat16
    with contextlib.suppress(ZeroDivisionError), as_on_cuda():
        F.linear(torch.zeros(2, 4), torch.zeros(3, 4 // 0))
    now = (F.linear, F.conv2d, F.group_norm, F.layer_norm, F.scaled_dot_product_attention, torch.autocast)
    assert now == usual


# ----------------------------------------------------------------------------------- against real runs
@pytest.fixture
def like_the_cpu(monkeypatch):
    """Count what the CPU computes in float32, and let the CPU compute what is counted."""
    monkeypatch.setattr(policy, "use_summed_weights", lambda config: None)  # a GPU has peft's adapters
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    monkeypatch.setattr(paper_run, "as_on_cuda", contextlib.nullcontext)
    monkeypatch.setattr(torch, "autocast", lambda *unused, **enabled: contextlib.nullcontext())


@pytest.mark.parametrize(
    ("method", "make", "changes"),
    [
        ("ddpo", make_pipeline, {"train_timestep_fraction": 0.5}),
        ("ddpo", make_pipeline, {"train_gradient_checkpointing": True, "train_use_lora": False}),
        ("flow_grpo:window=2", make_sd3_pipeline, {"train_num_inner_epochs": 2}),
        ("flow_grpo", make_sd3_pipeline, {"train_kl_coefficient": 0.1}),
        ("ddpo", make_pipeline, {"train_kl_coefficient": 0.1}),
    ],
)
def test_bytes_and_flops_are_those_of_an_epoch_that_runs(method, make, changes, tmp_path, like_the_cpu):
    fields = {"sample_num_steps": 3, "sample_num_batches_per_epoch": 2, "train_batch_size": 2}
    config = make_config(tmp_path, **fields, **changes, train_micro_batch_size=2)
    found = estimate(on_meta(make()), config, method)
    algorithm = make_algorithm(method)
    algorithm.shares_starts = False  # what groups share is left out of the count
    trainer, peaks, seen = Trainer(config, brightness, red_three, make(), algorithm=algorithm), [], []
    trainer.family.condition(["a red three"], "", 2.0)  # embedding prompts is not counted
    trainer.image_samples_hook = lambda batches, *_: seen.extend(batch[0] for batch in batches)
    steps = trainer.algorithm.steps

    def recorded(samples: Any, learner: Any) -> Any:
        trajectory = samples.trajectory
        tensors = [*vars(trajectory).values(), *trajectory.conditioning.values()]
        assert found.latents == sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        for loss, groups in steps(samples, learner):
            for weight in learner.trainable.values():
                weight.grad = torch.zeros_like(weight)
            with Counter("cpu") as counter:
                loss(learner.denoiser, groups[0])[0].backward()
            peaks.append(counter.peak)
            yield loss, groups

    with FlopCounterMode(display=False) as counter:
        trainer.step(0)
    flops = found.sampling_flops + found.training_flops
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.002)
    trainer.algorithm.steps = recorded
    trainer.step(1)
    assert found.training_peak == pytest.approx(peaks[0], rel=0.05)
    assert found.images == sum(image.nbytes for image in seen) // 2  # of two epochs
    trained = sum(p.nbytes for p in trainer.learner.trainable.values())
    moments = trainer.learner.tensors()["optimizer"]
    assert 2 * trained == sum(t.nbytes for name, t in moments.items() if not name.endswith("|step"))
    networks = [trainer.family.denoiser, *trainer.family.frozen.values()]
    weights = [w for part in networks for w in (*part.parameters(), *part.buffers()) if w.is_floating_point()]
    assert found.networks == sum(w.nbytes for w in weights) + 3 * trained
    assert found.peak == found.resident + max(found.training_peak, found.sampling_peak, found.latents)


@pytest.mark.parametrize("inner_epochs", [1, 2])
def test_in_low_precision_an_epoch_also_rescores_each_pair_once(inner_epochs, tmp_path, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    shape = {"sample_num_batches_per_epoch": 2, "train_batch_size": 2, "train_micro_batch_size": 2}
    shape |= {"train_num_inner_epochs": inner_epochs}
    config = make_config(tmp_path, **shape, mixed_precision="bf16")
    found = estimate(on_meta(make_pipeline()), config)
    algorithm = make_algorithm("ddpo")
    algorithm.shares_starts = False
    trainer = Trainer(config, brightness, red_three, make_pipeline(), algorithm=algorithm)
    trainer.family.condition(["a red three"], "", 2.0)
    with FlopCounterMode(display=False) as counter:
        trainer.step(0)
    flops = found.sampling_flops + found.training_flops
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.02)  # without rescoring, a sixth less


def cost(run: Any, dtype: torch.dtype) -> Counter:
    with as_on_cuda(), torch.autocast("meta", dtype), Counter() as counter:
        run()
    return counter


def test_checkpointing_computes_more_and_holds_less():
    unet = published("sd15").unet
    prepare_policy(unet, {}, DDPOConfig(mixed_precision="bf16"), use_lora=True, device=META)
    made = {"device": "meta", "dtype": torch.bfloat16}
    latents, embeds, step = torch.zeros(1, 4, 64, 64, **made), torch.zeros(1, 77, 768, **made), 1
    run = lambda: unet(latents, step, encoder_hidden_states=embeds).sample.float().mean()  # noqa: E731
    with torch.no_grad():
        forward = cost(run, torch.bfloat16)
    assert 0.79e12 < forward.flops < 0.82e12  # published: 0.4 tera multiply-adds
    usual = cost(lambda: run().backward(), torch.bfloat16)
    assert 2.1 < usual.flops / forward.flops < 2.3  # LoRA: no gradient of frozen weights
    unet.enable_gradient_checkpointing()
    recomputed = cost(lambda: run().backward(), torch.bfloat16)
    assert usual.flops < recomputed.flops <= usual.flops + forward.flops
    assert recomputed.peak < usual.peak / 3


def test_the_committed_table_is_what_the_script_makes_now():
    """A pass of DDPO and of the preset `edit`, which every table builds on."""
    committed = json.loads(paper_run.RESULT.read_text("utf-8"))
    config = DDPOConfig(mixed_precision="bf16", train_micro_batch_size=1)
    peak = paper_run.training_peak("sd15", config, 1) / 1e9
    assert peak == pytest.approx(committed["methods"]["DDPO"], abs=1e-3)
    found = paper_run.in_passes("smoke", 4, False)[1]
    (row,) = [row for row in committed["runs"] if (row["run"], row["card"]) == ("smoke", "RTX 4090")]
    assert (row["pairs"], row["checkpointing"]) == (4, False)
    assert found.peak / 1e9 == pytest.approx(row["peak_gb"], abs=1e-3)
    # 165.2 TFLOP/s, of which 0.3 are reached
    seconds = (found.sampling_flops + found.training_flops) / (165.2e12 * 0.3)
    assert 10 * seconds / 3600 == pytest.approx(row["hours"], abs=1e-3)
    for row in committed["runs"]:
        assert row["peak_gb"] <= 0.85 * row["gpu_memory"] - 1

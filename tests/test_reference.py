"""The KL penalty to the policy before training: its value, its reference, and that it holds back."""

import pytest
import torch
from helpers import brightness, make_config, make_pipeline, red_three, stir_adapter

from ddpo_lessons.ddim import DDIMStep, gaussian_kl
from ddpo_lessons.models.policy import adapter_off, prepare_policy
from ddpo_lessons.trainer import DDPOTrainer
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def step(mean: torch.Tensor, std: torch.Tensor) -> DDIMStep:
    return DDIMStep(prev_sample=mean, log_prob=torch.zeros(len(mean)), mean=mean, std=std)


def test_kl_agrees_with_torch_distributions():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(3, 4, 2, 2, generator=generator) for _ in range(2))
    std = torch.tensor([0.1, 1.0, 2.0])
    wide = std.view(3, 1, 1, 1)
    normals = torch.distributions.Normal(first, wide), torch.distributions.Normal(second, wide)
    expected = torch.distributions.kl_divergence(*normals).flatten(1)  # (3, 16)
    torch.testing.assert_close(gaussian_kl(step(first, std), step(second, std)), expected.mean(1))
    torch.testing.assert_close(gaussian_kl(step(first, std), step(second, std), "sum"), expected.sum(1))


def test_kl_of_a_deterministic_step_is_zero_and_so_is_its_gradient():
    mean = torch.ones(1, 2, requires_grad=True)
    kl = gaussian_kl(step(mean, torch.zeros(1)), step(torch.zeros(1, 2), torch.zeros(1)))
    kl.sum().backward()
    assert kl.tolist() == [0]
    assert mean.grad.tolist() == [[0, 0]]


def run(folder, use_lora: bool, coefficient: float) -> tuple[DDPOTrainer, list[dict[str, float]]]:
    config = make_config(
        folder, num_epochs=6, train_use_lora=use_lora, train_kl_coefficient=coefficient,
        train_learning_rate=1e-2 if use_lora else 1e-3, save_freq=6,
    )  # fmt: skip
    trainer = DDPOTrainer(config, brightness, red_three, make_pipeline())
    trainer.train()
    return trainer, read_metrics(folder, "step")


@pytest.mark.parametrize("use_lora", [True, False])
def test_penalty_starts_at_zero_and_holds_the_policy_back(tmp_path, use_lora):
    _, weak = run(tmp_path / "weak", use_lora, 1e-6)
    _, strong = run(tmp_path / "strong", use_lora, 1e4)
    assert weak[0]["kl_reference"] == strong[0]["kl_reference"] == 0
    assert weak[-1]["kl_reference"] > 0
    assert strong[-1]["kl_reference"] < 0.5 * weak[-1]["kl_reference"]


def test_without_a_coefficient_nothing_is_measured_or_copied(tmp_path):
    trainer, steps = run(tmp_path, True, 0.0)
    assert "kl_reference" not in steps[0]
    assert trainer.learner.start == {}


def outputs(unet: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    width = unet.config.cross_attention_dim
    latents, embeds = (torch.randn(*s, generator=generator) for s in ((2, 4, 8, 8), (2, 5, width)))
    with torch.no_grad():
        return unet(latents, 10, encoder_hidden_states=embeds).sample


@pytest.mark.parametrize("use_lora", [True, False])
def test_the_reference_is_the_policy_before_training(tmp_path, use_lora):
    before = outputs(make_pipeline().unet)
    trainer, _ = run(tmp_path, use_lora, 1e-3)
    after = outputs(trainer.pipeline.unet)
    assert not torch.allclose(after, before, atol=1e-6)
    with trainer.learner.reference() as unet:
        torch.testing.assert_close(outputs(unet), before)
        assert all(parameter.requires_grad for parameter in trainer.learner.trainable.values())
    assert torch.equal(outputs(trainer.pipeline.unet), after)


def test_an_adapter_that_was_there_before_is_part_of_the_reference(tmp_path):
    pipeline = make_pipeline()
    DDPOTrainer(make_config(tmp_path / "first"), brightness, red_three, pipeline)  # adds the adapter
    stir_adapter(pipeline.unet)
    before = outputs(pipeline.unet)
    config = make_config(tmp_path / "second", train_kl_coefficient=1.0)
    trainer = DDPOTrainer(config, brightness, red_three, pipeline)
    trainer.train()
    with trainer.learner.reference() as unet:
        torch.testing.assert_close(outputs(unet), before)


def test_adapters_are_on_again_after_an_error():
    pipeline = make_pipeline()
    config = make_config("unused")
    prepare_policy(pipeline.unet, {}, config, True, torch.device("cpu"))
    stir_adapter(pipeline.unet)
    before = outputs(pipeline.unet)
    with pytest.raises(RuntimeError), adapter_off(pipeline.unet):
        raise RuntimeError("the network failed")
    torch.testing.assert_close(outputs(pipeline.unet), before)


def test_a_resumed_run_needs_the_reference_that_it_had(tmp_path):
    """The same pipeline again carries the trained adapter, which would become the reference."""
    trainer, _ = run(tmp_path, True, 1e-3)
    config = make_config(tmp_path, **{**vars(trainer.config), "resume_from": "latest"})
    with pytest.raises(ValueError, match=r"not the reference of the KL penalty.*with a fresh pipeline"):
        DDPOTrainer(config, brightness, red_three, trainer.pipeline)
    DDPOTrainer(config, brightness, red_three, make_pipeline())


def test_a_resumed_run_needs_the_adapter_that_is_its_reference(tmp_path):
    """With a penalty; without one the checkpoint has all that is needed."""
    first = DDPOTrainer(make_config(tmp_path / "first"), brightness, red_three, make_pipeline())
    stir_adapter(first.learner.denoiser)
    first.save_pretrained(folder := tmp_path / "start")

    def train(epochs: int, **changes: object) -> None:
        config = make_config(tmp_path / "run", num_epochs=epochs, train_kl_coefficient=0.1, **changes)
        DDPOTrainer(config, brightness, red_three, make_pipeline()).train()

    train(1, train_lora_from=str(folder))
    with pytest.raises(ValueError, match=r"train_lora_from: '.*start' there, '' here"):
        train(2, resume_from="latest")
    train(2, resume_from="latest", train_lora_from=str(folder))
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"train_lora_from='.*start' holds no"):
        train(3, resume_from="latest", train_lora_from=str(folder))

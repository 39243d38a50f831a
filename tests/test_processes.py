"""Two processes of `accelerate launch`, on the CPU with gloo, against one."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from helpers import (
    PROMPTS,
    brightness,
    each_prompt,
    launch,
    make_config,
    make_flux_pipeline,
    make_pipeline,
    make_sd3_pipeline,
    make_xl_pipeline,
    noisy_image,
    red_three,
    rounding_pipeline,
)
from safetensors.torch import load_file, save_file

from ddpo_lessons import compat
from ddpo_lessons.algorithms.branching import Branching
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.algorithms.flow_grpo import FlowGRPO
from ddpo_lessons.algorithms.nft import NFT
from ddpo_lessons.config import LORA_FILE, DDPOConfig
from ddpo_lessons.data.contexts import Context
from ddpo_lessons.data.prompts import PromptSampler
from ddpo_lessons.data.starts import FromNoise, WithImages
from ddpo_lessons.models.policy import save_policy
from ddpo_lessons.trainer import ImageDDPOTrainer, Trainer
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.validation import Validation

pytestmark = pytest.mark.slow

TRACKING = {
    "per_prompt_stat_tracking": True,
    "per_prompt_stat_tracking_buffer_size": 4,
    "per_prompt_stat_tracking_min_count": 2,
}
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1", "conv2")
# Settings of each of two processes, which sample two of the epoch's four images.
SCENARIOS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"train_use_lora": False},
    "grouped": {
        "train_batch_size": 1, "train_gradient_accumulation_steps": 2, "train_micro_batch_size": 1,
        "train_num_inner_epochs": 2, **TRACKING,
    },
    "skipped": {**TRACKING},
    "own key": {},
    "image": {"sample_group_size": 2, "sample_batch_size": 1, "sample_num_batches_per_epoch": 2},
    "branching": {"sample_group_size": 2},
    # In the third epoch neither the new policy samples nor the first one.
    "nft": {"num_epochs": 3, "train_clip_range": DDPOConfig.train_clip_range},
    "flux": {"sample_eta": 0.7, "sample_group_size": 2},
    "kontext": {"sample_eta": 0.7},
    "xl": {"train_lora_target_modules": TARGETS},
    "xl images": {"train_use_lora": False},
}  # fmt: skip


# Of each of two processes in bf16, whose networks round differently in every batch of another size.
BF16 = {
    "mixed_precision": "bf16", "sample_batch_size": 8, "sample_num_steps": 4, "train_batch_size": 4,
    "train_clip_range": 1e-4,
}  # fmt: skip
LOW_PRECISION: dict[str, dict[str, Any]] = {
    "equal passes": {"train_micro_batch_size": 8},
    "groups": {"sample_group_size": 4},
    "smaller passes": {"train_micro_batch_size": 3},
    "groups and smaller passes": {
        "sample_group_size": 4, "train_micro_batch_size": 3, "train_batch_size": 2,
        "train_gradient_accumulation_steps": 2,
    },
    "branching": {"sample_group_size": 4, "train_micro_batch_size": 3},
}  # fmt: skip


# Adam would turn the rounding of a gradient of nearly nothing into a step of full size.
COMMON = {"num_epochs": 2, "train_adam_epsilon": 1e-2}


class AboveItsLike(DDPO):
    """Compares a sample with those whose prompts are long, or short."""

    def key(self, context: Context) -> bool:
        return len(context.prompt) > 12

    def advantages(self, rewards: torch.Tensor, keys: Sequence[bool]) -> torch.Tensor:
        longs = torch.tensor(keys)  # (N,)
        alike = (longs[:, None] == longs).double()  # (N, N)
        return rewards - (alike @ rewards.double() / alike.sum(dim=1)).float()


class Sampler(PromptSampler):
    """Prompts of the package's kind, which a process can skip; counts those that were made."""

    def __init__(self) -> None:
        self.made = 0
        super().__init__(self._make, seed=3)

    def _make(self, generator: random.Random) -> tuple[str, dict[str, Any]]:
        self.made += 1
        return generator.choice(PROMPTS), {"id": generator.randrange(2)}


def bright_and_red(images: torch.Tensor, prompts: Any, metadata: Any) -> Any:
    """Reward of the mean pixel, and how red the images are beside it."""
    return brightness(images, prompts, metadata), {"red": images[:, 0].mean(dim=(1, 2))}


def train(folder: Path, name: str, **changes: Any) -> Trainer:
    config = make_config(folder / name, **{**COMMON, **SCENARIOS[name], **changes})
    if name == "image":
        trainer: Trainer = ImageDDPOTrainer(
            config, brightness, noisy_image, make_pipeline(), noise_strength=0.7
        )
        trainer.image_samples_hook = Validation(trainer, [("", torch.full((3, 32, 32), 0.5), {})], every=1)
    elif name == "xl images":
        trainer = ImageDDPOTrainer(
            config, bright_and_red, noisy_image, make_xl_pipeline(), noise_strength=0.7
        )
    elif name == "nft":
        trainer = Trainer(
            config, bright_and_red, each_prompt(), make_sd3_pipeline(),
            algorithm=NFT(decay_rate=0.4, visited_states=True),
        )  # fmt: skip
    elif name in ("flux", "kontext"):
        edits = name == "kontext"
        trainer = Trainer(
            config, bright_and_red, noisy_image if edits else each_prompt(),
            make_flux_pipeline(kind=FluxKontextPipeline if edits else FluxPipeline), algorithm=FlowGRPO(),
            start=WithImages() if edits else FromNoise(resolution=48),
        )  # fmt: skip
    else:
        skips = name in ("skipped", "own key")
        trainer = Trainer(
            config, bright_and_red, Sampler() if skips else each_prompt(),
            make_xl_pipeline() if name == "xl" else make_pipeline(),
            algorithm={"own key": AboveItsLike, "branching": Branching}.get(name, DDPO)(),
        )  # fmt: skip
    trainer.train()
    return trainer


def in_each_process(folder: Path) -> None:
    """What `accelerate launch` runs twice."""
    torch.set_num_threads(1)
    for name in SCENARIOS:
        trainer = train(folder, name)
        rank = trainer.accelerator.process_index
        assert trainer.accelerator.num_processes == 2
        weights = dict(trainer.learner.trainable.items())
        save_file(weights, folder / f"{name}-{rank}.safetensors")
        if name == "xl":
            save_policy(trainer.family, folder / f"export-{rank}")
        if name in ("skipped", "own key"):
            assert (trainer.prompt_function.made, trainer.prompt_function.drawn) == (4, 8)  # of two epochs
    for name, changes in LOW_PRECISION.items():
        config = make_config(folder / f"bf16 {name}", **{**BF16, **changes})
        algorithm = Branching(window=2) if name == "branching" else DDPO()
        Trainer(config, brightness, red_three, rounding_pipeline(), algorithm=algorithm).train()
    try:
        train(folder, "lora")
    except ValueError as error:
        (folder / f"refused-{rank}.json").write_text(json.dumps(str(error)))
    config = make_config(folder / "compat", **COMMON)
    old = compat.DDPOTrainer(config, brightness, each_prompt(), make_pipeline())
    old.train()
    old.save_model()  # called by every process, as by TRL's example
    save_file({**old.learner.trainable}, folder / f"compat-{rank}.safetensors")
    resumed = train(folder, "lora", num_epochs=3, resume_from="latest")
    resumed.save()  # once more, after training: nothing hangs
    resumed.save_pretrained(folder / "lora-weights")
    straight = train(folder / "straight", "lora", num_epochs=3)
    pairs = (trainer.learner.trainable.values() for trainer in (resumed, straight))
    assert all(map(torch.equal, *pairs))


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    process = launch(__file__, folder, processes=2)
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-4000:]
    return folder


def test_compat_trains_the_same_weights_in_each_process(launched):
    ours, *compats = (
        load_file(launched / f"{name}.safetensors") for name in ("lora-0", "compat-0", "compat-1")
    )
    assert all(torch.equal(weights[key], ours[key]) for weights in compats for key in ours)
    assert (launched / "compat" / "model_index.json").is_file()


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_two_processes_train_the_weights_of_one(launched, tmp_path, name, one_thread):
    ranks = [load_file(launched / f"{name}-{rank}.safetensors") for rank in (0, 1)]
    changes: dict[str, Any] = {
        "sample_num_batches_per_epoch": 4 // SCENARIOS[name].get("sample_batch_size", 2)
    }
    if name == "grouped":
        changes["train_gradient_accumulation_steps"] = 4
    else:
        changes["train_batch_size"] = 4
    alone = train(tmp_path, name, **changes)
    for key, parameter in alone.learner.trainable.items():
        assert torch.equal(ranks[0][key], ranks[1][key])
        # The statistics of "skipped" divide by small spreads.
        tolerance = {"skipped": 2e-6, "xl": 3e-6, "xl images": 3e-6}.get(name, 1e-6)
        torch.testing.assert_close(ranks[0][key], parameter.detach(), atol=tolerance, rtol=0)

    def records(kind: str) -> Any:
        """Pair the records of two epochs; "lora" was then resumed for a third."""
        found = [read_metrics(folder / name, kind) for folder in (launched, tmp_path)]
        return zip(*([r for r in run if r["epoch"] <= 2] for run in found), strict=True)

    for two, one in records("epoch"):
        assert two["samples_seen"] == one["samples_seen"]
        assert two["reward_mean"] == pytest.approx(one["reward_mean"], abs=1e-6)
        assert two["advantage_mean"] == pytest.approx(one["advantage_mean"], abs=1e-3)
        if name != "image":
            assert two["reward/red"] == pytest.approx(one["reward/red"], abs=1e-6)
    for two, one in records("validation"):
        assert two["validation_reward"] == pytest.approx(one["validation_reward"], abs=1e-5)
    for two, one in records("step"):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("name", list(LOW_PRECISION))
def test_in_bf16_the_first_ratio_is_within_a_tenth_of_the_clip_range(launched, name):
    """A record's maximum is that of both processes."""
    first, *_ = read_metrics(launched / f"bf16 {name}", "step")
    assert first["first_replay_max_ratio_error"] <= 1e-5
    assert (first["max_sampling_error"] > 5e-5) == (name != "equal passes")


def test_two_exports_are_equal_to_the_byte(launched):
    """Each process hashes names otherwise, and so has another order of a set of them."""
    files = [(launched / f"export-{rank}" / LORA_FILE).read_bytes() for rank in (0, 1)]
    assert files[0] == files[1]


def test_saving_from_every_process_returns(launched):
    found = [path.name for path in checkpoint.list_checkpoints(launched / "lora")]
    assert found == ["checkpoint-000001", "checkpoint-000002", "checkpoint-000003"]
    assert (launched / "lora-weights" / "pytorch_lora_weights.safetensors").is_file()


def test_every_process_refuses_a_folder_that_holds_a_run(launched):
    for rank in (0, 1):
        assert "already holds a run" in json.loads((launched / f"refused-{rank}.json").read_text())


if __name__ == "__main__":
    in_each_process(Path(sys.argv[1]))

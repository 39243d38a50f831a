"""Two processes that share the weights by FSDP2, on the CPU with gloo, against one that has them all."""

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState
from helpers import (
    brightness,
    each_prompt,
    launch,
    make_config,
    make_flux_pipeline,
    make_pipeline,
    make_sd3_pipeline,
    stir_adapter,
)
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from ddpo_lessons import compat
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.models.policy import prepare_policy
from ddpo_lessons.models.sharded import forget_gathered, whole
from ddpo_lessons.trainer import DDPOTrainer, Trainer
from ddpo_lessons.training import checkpoint, processes
from ddpo_lessons.training.processes import check_sharding
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.validation import Validation

ODE = {"sample_num_steps": 4, "sample_guidance_scale": 1.0}
SDE = {**ODE, "sample_eta": 0.7}
# Algorithm, pipeline, and settings of each of two processes, which sample two of the epoch's four images.
SCENARIOS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ddpo": (make_algorithm("ddpo"), make_pipeline, {}),
    "parts": (make_algorithm("ddpo"), make_pipeline, {
        "train_batch_size": 1, "train_gradient_accumulation_steps": 2, "train_micro_batch_size": 1,
        "train_num_inner_epochs": 2, "train_gradient_checkpointing": True,
    }),
    "flow_grpo": (make_algorithm("flow_grpo"), make_sd3_pipeline, {**SDE, "train_kl_coefficient": 1.0}),
    "from an adapter": (make_algorithm("ddpo"), make_pipeline, {"train_kl_coefficient": 1.0}),
    "awm": (make_algorithm("awm"), make_sd3_pipeline, {**ODE, "train_kl_coefficient": 1.0}),
    # The last layer is in no block, so FSDP keeps what it has gathered of it from one pass to the next.
    "nft": (make_algorithm("nft", decay_rate=0.4), make_sd3_pipeline, {
        **ODE, "num_epochs": 3, "train_lora_target_modules": ("to_q", "to_v", "proj_out"),
    }),
    "draft": (make_algorithm("draft", last_steps=2), make_sd3_pipeline, ODE),
    "flux": (make_algorithm("flow_grpo"), make_flux_pipeline, {
        "sample_num_steps": 4, "sample_eta": 0.7, "train_kl_coefficient": 1.0,
    }),
    "rank 1": (make_algorithm("flow_grpo"), make_sd3_pipeline, {**SDE, "train_lora_rank": 1}),
    "bf16": (make_algorithm("awm"), make_sd3_pipeline, {**ODE, "mixed_precision": "bf16"}),
}  # fmt: skip
COMMON = {"num_epochs": 2, "train_adam_epsilon": 1e-2, "train_learning_rate": 1e-2}


def train(folder: Path, name: str, **changes: Any) -> Trainer:
    algorithm, make, settings = SCENARIOS[name]
    unused = {field: getattr(DDPOConfig, field) for field in algorithm.unused}
    config, pipeline = make_config(folder / name, **{**COMMON, **settings, **unused, **changes}), make()
    if name == "from an adapter":
        prepare_policy(pipeline.unet, {}, config, use_lora=True, device=torch.device("cpu"))
        stir_adapter(pipeline.unet)
    trainer = Trainer(config, brightness, each_prompt(), pipeline, algorithm=algorithm)
    if name == "flow_grpo":
        trainer.image_samples_hook = Validation(
            trainer, [("a red three", {}), ("", {}), ("two", {})], every=1
        )
    trainer.train()
    return trainer


def outputs(denoiser: Any) -> torch.Tensor:
    """What a transformer of Stable Diffusion 3 says of something."""
    generator, config = torch.Generator().manual_seed(3), denoiser.config
    shapes = (2, 4, 8, 8), (2, 5, config.joint_attention_dim), (2, config.pooled_projection_dim)
    parts = [torch.randn(shape, generator=generator) for shape in shapes]
    with torch.no_grad():
        return denoiser(*parts, timestep=torch.tensor([500.0, 100.0])).sample


def policies(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What the newest policy says, the old one, the first one, and the newest one again."""
    learner = trainer.learner
    found = {"new": outputs(learner.denoiser)}
    with learner.old_policy() as denoiser:
        found["old"] = outputs(denoiser)
    with learner.reference() as denoiser:
        found["first"] = outputs(denoiser)
        assert all(parameter.requires_grad for parameter in learner.trainable.values())
    return {**found, "again": outputs(learner.denoiser)}


# ------------------------------------------------------------------------------------ in each process
def let_cpus_shard() -> None:
    """Do for CPUs what accelerate does for GPUs alone: make the launch's FSDP plugin count."""
    make = AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **settings: Any) -> None:
        make(self, *arguments, fsdp_plugin=fsdp_plugin, **settings)
        if fsdp_plugin is None or "fsdp_plugin" in AcceleratorState._shared_state:
            return
        if settings.get("mixed_precision") != "no":
            fsdp_plugin.set_mixed_precision(settings["mixed_precision"])
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def check_shards(trainer: Trainer, name: str) -> None:
    """All blocks are sharded, and all of the adapter; a group holds weights of two precisions in bfloat16."""
    denoiser = trainer.learner.denoiser
    assert denoiser is trainer.family.denoiser
    blocks = [
        m for m in denoiser.modules() if type(m).__name__.removeprefix("FSDP") in denoiser._no_split_modules
    ]
    assert blocks
    assert all(isinstance(module, FSDPModule) for module in (denoiser, *blocks))
    assert all(isinstance(parameter, DTensor) for parameter in trainer.learner.trainable.values())
    halves = [parameter.to_local().numel() for parameter in trainer.learner.trainable.values()]
    assert (0 in halves) == (name == "rank 1" and trainer.accelerator.process_index == 1)
    forget_gathered(denoiser)
    held, all_of_it = (
        sum(count(parameter) for parameter in denoiser.parameters())
        for count in (lambda parameter: parameter.to_local().numel(), torch.Tensor.numel)
    )
    assert held / all_of_it == pytest.approx(0.5, abs=0.01)
    kinds = {parameter.dtype for parameter in denoiser.parameters()}
    assert kinds == ({torch.float32, torch.bfloat16} if name == "bf16" else {torch.float32})
    assert all(parameter.dtype == torch.float32 for parameter in trainer.learner.trainable.values())


def check_timesteps_are_not_rounded(trainer: Trainer) -> None:
    """accelerate would cast what the denoiser is called with to bfloat16, which knows 1000 and 996 only."""
    seen: list[torch.dtype] = []
    embedder = trainer.learner.denoiser.time_text_embed
    hook = embedder.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].dtype))
    with trainer.autocast():
        outputs(trainer.learner.denoiser)
    hook.remove()
    assert seen == [torch.float32]


def fail_in_the_second_epoch(folder: Path) -> None:
    """An epoch that failed never was: weights, optimizer and old policy are as before it."""
    asked: list[int] = []

    def reward(images: torch.Tensor, *arguments: Any) -> torch.Tensor:
        asked.append(1)
        if len(asked) == 2:
            raise OSError("out of luck")
        return brightness(images, *arguments)

    algorithm, make, settings = SCENARIOS["nft"]
    settings = {**COMMON, **settings, "save_freq": 9, "train_clip_range": DDPOConfig.train_clip_range}
    config = make_config(folder / "failed", **settings)
    trainer = Trainer(config, reward, each_prompt(), make(), algorithm=algorithm)
    trainer.step(0)
    tensors, said = trainer.learner.tensors(), policies(trainer)
    steps = trainer.algorithm.steps

    def steps_and_fail(*arguments: Any) -> Any:
        yield from steps(*arguments)
        raise OSError("out of luck")

    for broken in (True, False):  # in sampling, and after all steps
        with pytest.raises(OSError, match="out of luck"):
            trainer.step(1)
        for kind, group in trainer.learner.tensors().items():
            assert all(torch.equal(tensor, tensors[kind][key]) for key, tensor in group.items())
        assert all(torch.equal(tensor, said[key]) for key, tensor in policies(trainer).items())
        trainer.algorithm.steps = steps_and_fail if broken else steps
    trainer.step(1)
    assert not torch.equal(policies(trainer)["new"], said["new"])


def in_each_process(folder: Path) -> None:
    """What `accelerate launch` runs twice."""
    torch.set_num_threads(1)
    let_cpus_shard()
    for name in SCENARIOS:
        trainer = train(folder, name)
        assert trainer.accelerator.num_processes == 2
        check_shards(trainer, name)
        weights = {key: whole(parameter).detach() for key, parameter in trainer.learner.trainable.items()}
        rank = trainer.accelerator.process_index
        save_file(weights, folder / f"{name}-{rank}.safetensors")
        if name == "bf16":
            check_timesteps_are_not_rounded(trainer)
        if name == "nft":
            save_file(policies(trainer), folder / f"policies-{rank}.safetensors")
        if name == "flow_grpo":
            trainer.save_pretrained(folder / "lora")
    fail_in_the_second_epoch(folder)
    with pytest.raises(ValueError, match=r"has loaded another model.*fsdp_cpu_ram_efficient_loading: false"):
        DDPOTrainer(make_config(folder / "other"), brightness, each_prompt(), make_pipeline(seed=rank))
    straight = train(folder / "straight", "nft", num_epochs=4)
    resumed = train(folder, "nft", num_epochs=4, resume_from="latest")
    for one, other in zip(*(t.learner.tensors().values() for t in (straight, resumed)), strict=True):
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    process = launch(__file__, folder, 2, "--use_fsdp", "--fsdp_version", "2")
    _, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-6000:]
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process, by name."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def run(name: str) -> Trainer:
        changes = {"sample_num_batches_per_epoch": 2, "train_batch_size": 4}
        if name == "parts":
            changes |= {"train_batch_size": 1, "train_gradient_accumulation_steps": 4}
        return train(folder, name, **changes)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_sharded_weights_become_those_of_one_process(launched, alone, name, one_thread):
    ranks = [load_file(launched / f"{name}-{rank}.safetensors") for rank in (0, 1)]
    trainer = alone(name)
    is_low = name == "bf16"
    tolerance = 2e-4 if is_low else 1e-5 if "unet" in trainer.pipeline.components else 1e-6
    for key, parameter in trainer.learner.trainable.items():
        assert torch.equal(ranks[0][key], ranks[1][key])
        torch.testing.assert_close(ranks[0][key], parameter.detach(), atol=tolerance, rtol=0)
    moved = [weights.abs().max() for key, weights in ranks[0].items() if "lora_B" in key]
    assert min(moved) > 2 * tolerance  # B begins at zero: every layer has had a gradient
    fields = {"reward_mean", "validation_reward", "loss", "kl_reference", "distance_old"}
    for kind in ("epoch", "step", "validation"):
        both = (read_metrics(folder, kind) for folder in (launched / name, trainer.config.run_dir))
        for two, one in zip(*([r for r in run if r["epoch"] <= 3] for run in both), strict=True):
            assert two.keys() == one.keys()
            for field in fields & two.keys():
                assert two[field] == pytest.approx(one[field], rel=1e-4, abs=1e-2 if is_low else 1e-5)
            if kind == "step":
                assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-2 if is_low else 1e-3)


@pytest.mark.slow
def test_the_old_policy_and_the_first_one_are_others_also_where_weights_are_sharded(
    launched, alone, one_thread
):
    """Swapping a shard's data changes nothing; here it does, and the newest policy comes back."""
    found = load_file(launched / "policies-1.safetensors")
    assert torch.equal(found["again"], found["new"])
    for key, output in policies(alone("nft")).items():
        torch.testing.assert_close(found[key], output, atol=1e-5, rtol=0)
    for one, other in (("new", "old"), ("new", "first"), ("old", "first")):
        assert (found[one] - found[other]).abs().max() > 1e-4


@pytest.mark.slow
def test_a_checkpoint_of_shards_is_that_of_one_process(launched, alone, one_thread):
    tensors, _ = checkpoint.read(launched / "ddpo" / "checkpoint-000002")
    mine = alone("ddpo").learner.tensors()
    assert {kind: group.keys() for kind, group in tensors.items()} == {k: g.keys() for k, g in mine.items()}
    for kind, group in tensors.items():
        for key, tensor in group.items():
            torch.testing.assert_close(tensor, mine[kind][key].detach(), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_plain_diffusers_draws_with_the_saved_adapter_what_one_process_trained(launched, alone, one_thread):
    plain, trained = make_sd3_pipeline(), alone("flow_grpo").pipeline
    before = outputs(plain.transformer)
    plain.load_lora_weights(launched / "lora")
    torch.testing.assert_close(outputs(plain.transformer), outputs(trained.transformer), atol=1e-5, rtol=0)
    assert (outputs(plain.transformer) - before).abs().max() > 1e-4
    layers = [module for module in plain.transformer.modules() if isinstance(module, LoraLayer)]
    trained_layers = [module for module in trained.transformer.modules() if isinstance(module, LoraLayer)]
    assert len(layers) == len(trained_layers)


# ---------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("changes", "plugin", "message"),
    [
        ({"train_use_lora": False}, {}, "train_use_lora=False.*: train an adapter"),
        ({"torch_compile": True}, {}, "torch_compile=True.*: leave it out"),
        ({"train_use_8bit_adam": True}, {}, "train_use_8bit_adam=True"),
        ({"mixed_precision": "fp16"}, {}, "mixed_precision='fp16'.*: use 'bf16'"),
        (
            {},
            {"activation_checkpointing": True},
            "fsdp_activation_checkpointing.*: train_gradient_checkpointing",
        ),
        ({}, {"cpu_offload": CPUOffloadPolicy()}, "fsdp_offload_params.*: take more cards"),
    ],
)
def test_what_does_not_go_with_shards_is_refused(changes, plugin, message):
    config = make_config("unused", **changes)
    settings = {"activation_checkpointing": False, "cpu_offload": None, **plugin}
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**settings))
    whole_weights = SimpleNamespace(is_fsdp2=False, state=state)
    check_sharding(whole_weights, config, config.train_use_lora)
    sharded = SimpleNamespace(is_fsdp2=True, state=state)
    with pytest.raises(ValueError, match=f"sharded by FSDP2, which {message}"):
        check_sharding(sharded, config, config.train_use_lora)


@pytest.mark.parametrize(
    "kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM]
)
def test_weights_are_sharded_by_fsdp2_alone(kind, monkeypatch):
    launched_so = SimpleNamespace(distributed_type=kind, is_fsdp2=False)
    monkeypatch.setattr(processes, "Accelerator", lambda **settings: launched_so)
    with pytest.raises(ValueError, match=rf"shards weights by {kind.value}.*--use_fsdp --fsdp_version 2"):
        processes.make_accelerator(make_config("unused"))


def test_compat_writes_no_whole_pipeline_of_shards():
    """Its main process alone would wait for the others' parts."""
    sharded: Any = SimpleNamespace(accelerator=SimpleNamespace(is_fsdp2=True))
    with pytest.raises(ValueError, match=r"no whole pipeline is written: use ddpo_lessons\.trainer"):
        compat.DDPOTrainer.save_pretrained(sharded, "unused")


if __name__ == "__main__":
    in_each_process(Path(sys.argv[1]))

import dataclasses
import json
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    NOT_CLIPPED,
    brightness,
    counted_passes,
    each_prompt,
    make_config,
    make_pipeline,
    make_trainer,
    noisy_image,
    red_three,
    run,
)

import ddpo_lessons.trainer
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.algorithms.rwr import RWR
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Trainer
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.runlog import RunLog, read_metrics
from ddpo_lessons.training.state import identity

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of one epoch, to read."""
    folder = tmp_path_factory.mktemp("finished")
    run(folder)
    return folder


def returning(*values: Any) -> Callable[[], Any]:
    """Make a prompt function that returns one value after the other, the last for ever."""
    left = list(values)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


# ------------------------------------------------------------------- bad input, before any forward pass
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"sample_group_size": 3}, ValueError, "sample_group_size=3 does not divide the 2 samples"),
        ({"sample_batch_size": 1, "train_batch_size": 1}, ValueError, "one sample .*raise sample_batch_size"),
        ({"sample_eta": 0.02}, ValueError, "sample_eta=0.02 leaves steps with noise of 1.3e-04.* raise it"),
        ({"sample_eta": 1.5}, ValueError, "sample_eta=1.5: eta=1.5 adds more noise .* lower eta"),
        ({"sample_num_steps": 1001}, ValueError, "sample_num_steps.* of 1000 timesteps"),
        ({"train_timestep_fraction": 0.1}, ValueError, "fraction=0.1 of 3 steps .* take more steps"),
        ({"train_lora_target_modules": ("to_x",)}, ValueError, "target_modules: .* no layer 'to_x'"),
        ({"train_lora_target_modules": ("to_q", "o_k")}, ValueError, "target_modules: .* no layer 'o_k'"),
        ({"train_lora_target_modules": ("to_q", "norm1")}, ValueError, "'norm1' is a .*Norm, .* no adapter"),
        ({"train_lora_target_modules": ("to_out",)}, ValueError, r"'to_out' is a ModuleList, .*'to_out\.0'"),
    ],
)
def test_settings_that_cannot_work(tmp_path, changes, error, message):
    pipeline = make_pipeline()
    with counted_passes(pipeline.unet) as sizes, pytest.raises(error, match=message):
        run(tmp_path, pipeline=pipeline, **changes)
    assert sizes == []


def test_settings_are_checked_again_when_they_were_changed_after_their_making(tmp_path):
    config = make_config(tmp_path)
    config.sample_eta = 0.0
    with pytest.raises(ValueError, match=r"sample_eta=0"):
        DDPOTrainer(config, brightness, red_three, make_pipeline())


@pytest.mark.parametrize("strength", [0.0, 1.5, -1.0, 0.3, 0.01])
def test_noise_strength_that_cannot_work_is_named_first(tmp_path, strength):
    pipeline = make_pipeline()
    with counted_passes(pipeline.unet) as sizes, pytest.raises(ValueError, match=r"^noise_strength="):
        make_trainer(tmp_path, pipeline=pipeline, noise_strength=strength)
    assert sizes == []


def test_a_schedule_without_noise_cannot_be_trained(tmp_path):
    config = make_config(tmp_path, sample_num_steps=1)
    with pytest.raises(ValueError, match=r"sample_num_steps=1, .* every step .* is deterministic"):
        DDPOTrainer(config, brightness, red_three, make_pipeline(set_alpha_to_one=True))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        *(
            (other, r"must return \(prompt, metadata\)")
            for other in ("a two", ("a two",), (2, {}), ["a", {}])
        ),
        (None, r"must return \(prompt, metadata\), not None"),
        (("a two", torch.zeros(1), {}), r"starts from noise: return \(prompt, metadata\).*start=FromImages"),
    ],
)
def test_prompt_functions_that_return_something_else(tmp_path, returned, message):
    pipeline = make_pipeline()
    with counted_passes(pipeline.unet) as sizes, pytest.raises(TypeError, match=message):
        run(tmp_path, prompts=lambda: returned, pipeline=pipeline)
    assert sizes == []


IMAGE = torch.full((3, 32, 32), 0.5)


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        ([None], TypeError, "not NoneType"),
        ([IMAGE * 255], ValueError, r"finite values in \[0, 1\]"),
        ([IMAGE, IMAGE[:, :28]], ValueError, r"sizes \[\(28, 32\), \(32, 32\)\]: resize"),
    ],
)
def test_images_that_cannot_be_used(tmp_path, images, error, message):
    pipeline = make_pipeline()
    prompts = returning(*[("", image, {}) for image in images])
    trainer = make_trainer(tmp_path, prompts=prompts, pipeline=pipeline, noise_strength=0.7)
    with counted_passes(pipeline.unet) as sizes, pytest.raises(error, match=message):
        trainer.train()
    assert sizes == []


def test_an_image_prompt_function_must_return_an_image(tmp_path):
    trainer = make_trainer(tmp_path, prompts=red_three, noise_strength=0.7)
    with pytest.raises(TypeError, match=r"\(prompt, image, metadata\)"):
        trainer.train()


@pytest.mark.parametrize(
    ("reward", "prompts", "message"),
    [
        (None, red_three, "reward_function must be callable, not NoneType"),
        (lambda images, prompts: 0, red_three, r"\(images, prompts\) .* with \(images, prompts, metadata\)"),
        (brightness, "a red three", "prompt_function must be callable, not str; get_prompts makes one"),
        ("colorfulness", red_three, "must be callable, not str; get_reward makes one by its name"),
        (brightness, lambda index: ("a three", {}), r"takes \(index\) and is called without arguments"),
        (lambda: brightness, red_three, r"if it returns a reward function, call it: NAME\(\)"),
        (red_three, brightness, r"takes \(\) .* it looks swapped with prompt_function, which takes three"),
        (lambda: brightness, lambda a=1, b=2, c=3: red_three(), r"call it: NAME\(\)"),
    ],
)
def test_functions_that_cannot_be_used(tmp_path, reward, prompts, message):
    with pytest.raises(TypeError, match=message):
        make_trainer(tmp_path, reward, prompts)


@pytest.mark.parametrize("algorithm", ["rwr", DDPO])
def test_a_name_or_a_class_is_no_algorithm(tmp_path, algorithm):
    with pytest.raises(TypeError, match=r"must be an object such as DDPO\(\), or .*make_algorithm\(NAME\)"):
        Trainer(make_config(tmp_path), brightness, red_three, make_pipeline(), algorithm=algorithm)


@pytest.mark.parametrize("start", ["noise", FromImages, None])
def test_a_name_or_a_class_is_no_start(tmp_path, start):
    parts = make_config(tmp_path), brightness, red_three, make_pipeline()
    with pytest.raises(TypeError, match=r"start=.* must be an object: FromNoise\(\), FromImages"):
        Trainer(*parts, algorithm=DDPO(), start=start)


def test_saving_into_a_file_is_refused(tmp_path):
    (tmp_path / "lora").write_text("a note")
    with pytest.raises(ValueError, match="lora, which is a file: give a folder"):
        make_trainer(tmp_path / "run").save_pretrained(tmp_path / "lora")


def test_pipelines_that_cannot_be_trained(tmp_path):
    config = make_config(tmp_path)
    with pytest.raises(TypeError, match=r"is a AutoencoderKL, .* use one of StableDiffusionPipeline"):
        DDPOTrainer(config, brightness, red_three, make_pipeline().vae)
    blind = make_pipeline()
    blind.vae = None
    with pytest.raises(TypeError, match="no vae: pass a diffusers pipeline"):
        DDPOTrainer(config, brightness, red_three, blind)
    inpainting = make_pipeline()
    inpainting.unet.register_to_config(in_channels=9)
    with pytest.raises(TypeError, match="9 channels, the latents have 4"):
        DDPOTrainer(config, brightness, red_three, inpainting)
    with pytest.raises(TypeError, match=r"must be a pipeline of diffusers: load_pipeline\('tiny-sd'\)"):
        DDPOTrainer(config, brightness, red_three, "tiny-sd")


def test_a_config_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="config must be a DDPOConfig, not dict"):
        DDPOTrainer({"num_epochs": 1}, brightness, red_three, make_pipeline())


# ------------------------------------------------------------------------------------------- bad rewards
@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (torch.ones(2, 1), ValueError, r"shape \(2, 1\) for 2 images: .*\(2,\)"),
        (torch.ones(3), ValueError, r"shape \(3,\) for 2 images"),
        (torch.tensor(1.0), ValueError, r"shape \(\) for 2 images"),
        ([0.0, float("nan")], ValueError, "nan for sample 1 of the batch, prompt '': return finite"),
        ([float("-inf"), 0.0], ValueError, "-inf for sample 0 of the batch, prompt 'a red three'"),
        (None, TypeError, r"must return numbers, not None: does it end without return\?"),
        (["good", "bad"], TypeError, "must return numbers, not 'good'$"),
        ([0.5, "bad"], TypeError, "must return numbers, not 'bad'$"),
    ],
)
def test_rewards_that_cannot_be_used_train_nothing(tmp_path, returned, error, message):
    trainer = make_trainer(tmp_path, lambda i, p, m: returned, each_prompt())
    before = [parameter.clone() for parameter in trainer.learner.trainable.values()]
    with pytest.raises(error, match=message):
        trainer.train()
    assert all(map(torch.equal, before, trainer.learner.trainable.values()))
    run(tmp_path)  # a run that did nothing does not block its folder


# ---------------------------------------------------------------------------------- the folder of a run
def test_a_folder_that_holds_a_run_is_refused_unless_told_otherwise(tmp_path):
    run(tmp_path, image_grid_freq=1, num_epochs=2)
    (tmp_path / "lora").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"already holds a run: set resume_from='auto'.*overwrite"):
        run(tmp_path)
    bad = make_config(tmp_path, overwrite=True)
    with pytest.raises(TypeError):
        DDPOTrainer(bad, brightness, lambda: None, make_pipeline()).train()
    assert len(checkpoint.list_checkpoints(tmp_path)) == 2  # still there: nothing was trained instead
    run(tmp_path, overwrite=True, seed=1)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["checkpoint-000001"]
    assert [record["epoch"] for record in read_metrics(tmp_path, "epoch")] == [1]
    assert not list((tmp_path / "images").iterdir())
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "lora").is_dir()


def test_resuming_into_the_folder_of_another_run_is_refused(tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "b")
    source = str(tmp_path / "a" / "checkpoint-000001")
    with pytest.raises(ValueError, match="already holds a run"):
        run(tmp_path / "b", resume_from=source, num_epochs=2)
    run(tmp_path / "c", resume_from=source, num_epochs=2)
    run(tmp_path / "b", resume_from=source, num_epochs=2, overwrite=True)
    for folder in (tmp_path / "b", tmp_path / "c"):
        assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["checkpoint-000002"]
        assert [record["epoch"] for record in read_metrics(folder, "epoch")] == [2]


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    log = RunLog(make_config(tmp_path), None, 0)
    log.record("step", {"epoch": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert read_metrics(tmp_path) == [{"kind": "step", "epoch": 1, "loss": None, "grad_norm": None}]


# ------------------------------------------------------------------------- checkpoints of something else
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"train_clip_range": 0.5}, "train_clip_range: 0.01 there, 0.5 here"),
        ({"train_lora_rank": 8}, "train_lora_rank: 4 there, 8 here"),
        ({"train_use_lora": False}, "train_use_lora: True there, False here"),
        ({"sample_batch_size": 4, "train_batch_size": 4}, "sample_batch_size: 2 there, 4 here"),
        ({"sample_num_steps": 4}, "sample_num_steps: 3 there, 4 here"),
        ({"mixed_precision": "bf16"}, "mixed_precision: .* there, .* here"),
    ],
)
def test_a_checkpoint_of_another_config_is_refused_by_field(finished, changes, field):
    pipeline = make_pipeline()
    config = make_config(finished, resume_from="latest", num_epochs=2, **changes)
    before = sorted(finished.rglob("*"))
    with pytest.raises(ValueError, match=field):
        DDPOTrainer(config, brightness, red_three, pipeline)
    assert sorted(finished.rglob("*")) == before
    assert not hasattr(pipeline.unet, "peft_config")  # refused before anything was changed


@pytest.mark.parametrize(
    "changes",
    [{"train_micro_batch_size": 1}, {"train_learning_rate": 1e-2}, {"torch_compile": True}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_decides_no_weight_of_the_past_may_change_in_a_continuation(tmp_path, finished, changes):
    source = str(finished / "checkpoint-000001")
    assert make_trainer(tmp_path / "b", resume_from=source, num_epochs=2, **changes).epochs_done == 1


def test_a_checkpoint_of_another_algorithm_start_or_number_of_processes_is_refused(finished, monkeypatch):
    config = make_config(finished, resume_from="latest", num_epochs=2)
    with pytest.raises(ValueError, match="algorithm: 'DDPO' there, 'RWR' here"):
        Trainer(
            dataclasses.replace(config, **NOT_CLIPPED), brightness, red_three, make_pipeline(),
            algorithm=RWR(),
        )  # fmt: skip
    with pytest.raises(ValueError, match="start: 'noise' there, 'images' here"):
        ImageDDPOTrainer(config, brightness, noisy_image, make_pipeline(), noise_strength=0.7)

    def as_two(*parts: Any, **more: Any) -> dict[str, Any]:
        return {**identity(*parts, **more), "num_processes": 2}

    monkeypatch.setattr(ddpo_lessons.trainer, "identity", as_two)
    with pytest.raises(ValueError, match="num_processes: 1 there, 2 here"):
        DDPOTrainer(config, brightness, red_three, make_pipeline())


# ------------------------------------------------------------------------------------------------- Ctrl-C
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    def impatient(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, impatient)
    assert signal.getsignal(signal.SIGINT) is handler


def test_training_runs_in_another_thread_which_gets_no_signals(tmp_path):
    thread = threading.Thread(target=run, args=(tmp_path,))
    thread.start()
    thread.join()
    assert checkpoint.list_checkpoints(tmp_path)


# --------------------------------------------------------------------- functions and folders that are wrong
@pytest.mark.parametrize("place", ["image_samples_hook", "debug_hook"])
def test_a_hook_that_is_no_function_is_refused_before_any_epoch(tmp_path, place):
    with pytest.raises(TypeError, match=f"{place} must be a function or None, not int"):
        ImageDDPOTrainer(make_config(tmp_path), brightness, noisy_image, make_pipeline(), **{place: 3})


@pytest.mark.parametrize("place", ["reward", "hook"])
def test_epochs_before_one_that_fails_are_saved(tmp_path, place):
    """`save_freq` would have lost two epochs; the run goes on where it was."""

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        if place == "reward" and trainer.epochs_done == 2:
            raise OSError("out of luck")
        return brightness(images, prompts, metadata)

    def hook(batches: Any, global_step: int, tracker: Any) -> None:
        if place == "hook" and global_step == 3:
            raise OSError("out of luck")

    trainer = make_trainer(tmp_path, reward, hook=hook, num_epochs=4, save_freq=10)
    with pytest.raises(OSError, match="out of luck"):
        trainer.train()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["checkpoint-000002"]
    tensors = checkpoint.read(tmp_path / "checkpoint-000002")[0]["policy"]
    assert all(torch.equal(tensors[name], p) for name, p in trainer.learner.trainable.items())


def test_a_run_that_ended_before_its_first_checkpoint_has_one_way_on(tmp_path):
    """The advice of either error is not the cause of the other one."""
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "epoch": 1}\n')
    with pytest.raises(ValueError, match=r"before its first checkpoint: set resume_from='auto'"):
        run(tmp_path)
    with pytest.raises(ValueError, match=r"holds no checkpoint: resume_from='auto' starts the run"):
        run(tmp_path, resume_from="latest")
    for remedy in ({"overwrite": True}, {"resume_from": "auto"}):
        (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "epoch": 1}\n')
        run(tmp_path, **remedy)
        assert [record["epoch"] for record in read_metrics(tmp_path)] == [1, 1]
        checkpoint.remove(tmp_path / "checkpoint-000001")


def test_a_folder_that_cannot_be_one_is_named_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file' is a file: choose another output_dir"):
        run(tmp_path / "file")
    with pytest.raises(ValueError, match=r"file' is a file: choose another output_dir"):
        run(tmp_path / "file" / "below")


def test_the_folder_of_a_run_is_not_a_checkpoint_but_its_checkpoints_are_named(finished):
    with pytest.raises(ValueError, match=r"give one of its checkpoints, such as .*checkpoint-000001"):
        DDPOTrainer.from_checkpoint(finished, brightness, red_three, make_pipeline())

"""The command line, called in this process with tiny settings on a tiny random pipeline."""

import dataclasses
import functools
import importlib
import inspect
import json
import logging
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import typing
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, FluxKontextPipeline, StableDiffusionPipeline
from helpers import (
    TINY,
    make_flux_pipeline,
    make_pipeline,
    pictures,
    printed_error,
    run_command,
    write_clip,
    write_resnet,
)
from PIL import Image

import ddpo_lessons
from ddpo_lessons import rewards
from ddpo_lessons.algorithms import ALGORITHMS
from ddpo_lessons.cli import doctor, options, runs, sample, train
from ddpo_lessons.cli import main as cli
from ddpo_lessons.cli.presets import PRESETS
from ddpo_lessons.config import LORA_FILE, DDPOConfig
from ddpo_lessons.damages import DAMAGES
from ddpo_lessons.data import folders
from ddpo_lessons.image import fit, to_tensor
from ddpo_lessons.lessons import demo
from ddpo_lessons.models import family_of
from ddpo_lessons.named_prompts import PROMPTS
from ddpo_lessons.rollout import sample_seed
from ddpo_lessons.training import first_epoch
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.worlds import load_tiny_sd, load_tiny_sd3

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder with images of several sizes and kinds, and a file that is none."""
    folder = tmp_path_factory.mktemp("photos")
    pictures(folder, "a.png", size=(40, 48))
    Image.new("L", (20, 20), 200).save(folder / "b.jpg")
    Image.new("RGBA", (64, 32), "blue").save(folder / "c.webp")
    (folder / "notes.txt").write_text("not an image")
    return folder


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A folder with two classes, which are digits as well."""
    folder = tmp_path_factory.mktemp("zoo")
    for label, color in (("two", "red"), ("three", "blue")):
        pictures(folder, f"{label}/a.png", color=color)
    return folder


EDITS = {"a": ("a red three",), "b": ("a blue four", "a green digit")}


@pytest.fixture(scope="module")
def captioned(tmp_path_factory):
    """Two images with captions, one of which asks for either of two edits."""
    folder = tmp_path_factory.mktemp("captioned")
    for name, lines in EDITS.items():
        pictures(folder, f"{name}.png")
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def parse_train(*words: str) -> options.Train:
    arguments = cli.parse(["train", *words])
    assert isinstance(arguments, options.Train)
    return arguments


def parse(*words: str) -> DDPOConfig:
    """Return the settings of a model without a preset."""
    return parse_train("--model", "somebody/model", *words).make_config()


# --------------------------------------------------------------------------------------------- train
def test_train_then_sample(here, model, capsys):
    run_command("train", *TINY, "--model", model, "--prompt", "a red three", "--output-dir", "a run")
    assert len(read_metrics("a run", "step")) == 1
    assert config_of(here / "a run")["train_learning_rate"] == 1e-3
    assert (here / "a run" / "lora" / LORA_FILE).is_file()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    command = shlex.split(lines[-1])
    assert command == ["ddpo-lessons", "sample", "--run", "a run"]
    run_command(*command[1:], "--count", "3")
    paths = capsys.readouterr().out.split()
    assert paths == [
        str(Path("samples", f"{n}.png")) for n in ("sample-000", "sample-001", "sample-002", "grid")
    ]
    assert [Image.open(path).size for path in paths[:3]] == [(32, 32)] * 3
    assert Image.open(paths[3]).size == (3 * 96, 96)  # small images are enlarged to 96 pixels
    again = ["train", *TINY, "--model", model, "--prompt", "a red three", "--output-dir", "a run"]
    assert cli.main(again) == 2
    flags = "set --resume-from auto to continue it, --overwrite to replace it, or choose another --output-dir"
    assert flags in printed_error(capsys)


def test_full_training_writes_a_pipeline(here, model, capsys):
    run_command("train", *TINY, "--model", model, "--prompt", "", "--no-train-use-lora")
    trained = StableDiffusionPipeline.from_pretrained(here / "run" / "pipeline").unet.state_dict()
    first = make_pipeline().unet.state_dict()
    assert any(not torch.equal(trained[name], first[name]) for name in first)
    run_command(*shlex.split(capsys.readouterr().out.splitlines()[-1])[1:], "--count", "1")
    assert (here / "samples" / "sample-000.png").is_file()


def test_train_on_images(here, model, photos, capsys):
    flags = ("--images", photos, "--noise-strength", "0.7")
    run_command("train", *TINY, "--model", model, *flags)
    (state,) = here.glob("run/checkpoint-*/state.json")
    saved = json.loads(state.read_text())
    assert saved["identity"]["noise_strength"] == 0.7
    assert saved["prompt_function"] == {"seed": 0, "drawn": 2}
    warning, found, *_, line = capsys.readouterr().out.replace("\n  ", " ", 1).splitlines()
    assert "2 samples per epoch" in warning  # of a model without a preset
    assert found == (
        f"{photos}: 3 images; labels: none; captions: none; skipped files: 1 because Pillow cannot open them "
        "(notes.txt)"
    )
    run_command(*shlex.split(line)[1:])
    names = ["a.png", "b.png", "c.png", "grid.png"]  # those that it was trained on
    assert sorted(path.name for path in (here / "samples").iterdir()) == names


@pytest.mark.parametrize(
    ("flags", "strength"),
    [
        ("--preset camouflage", 0.4),
        ("--preset corruption", 0.2),
        ("--preset camouflage --noise-strength 0.3", 0.3),
        ("", sample.NOISE_STRENGTH),
    ],
)
def test_noise_strength_is_the_flags_the_presets_or_the_default(here, model, zoo, flags, strength):
    small = ("--mixed-precision", "no", "--sample-num-steps", "5", "--train-gradient-accumulation-steps", "1")
    arguments = parse_train(*TINY, *small, *flags.split(), "--model", model, "--images", str(zoo))
    trainer = train.make_trainer(arguments, folders.find_images(zoo))
    assert getattr(trainer.start, "noise_strength", None) == strength
    damaged = trainer.contexts.draw(0)[0].metadata
    assert torch.equal(damaged["target"], damaged["image"]) == ("corruption" not in flags)


def table_of(text: str) -> dict[str, tuple[str, str]]:
    """The table of a dry run: the counts of an epoch and of the run, by name."""
    rows = re.findall(r"^(.*?) {2,}(\S+(?: epoch)?) {2,}(\S+(?: \d+ epochs?)?)$", text, flags=re.MULTILINE)
    return {name: (epoch, run) for name, epoch, run in rows}


def test_a_dry_run_counts_and_loads_no_weights(here, model, captioned, monkeypatch, capsys):
    monkeypatch.setattr(train, "load_pipeline", lambda *_, **__: pytest.fail("weights were loaded"))
    sizes = "--num-epochs 6 --sample-num-batches-per-epoch 3 --sample-guidance-scale 2 --save-freq 2"
    noise = "--noise-strength 0.7 --sample-num-steps 10"
    flags = (*TINY, *sizes.split(), *noise.split(), "--images", captioned, "--dry-run")
    run_command("train", "--model", model, *flags)
    text = capsys.readouterr().out
    assert f"model: {model}\nreward: " in text
    assert "images: 2 in" in text
    assert "prompts: captions, 3 different ones: " in text
    # 6 samples, 7 steps, two passes of each; six epochs, of which every second is saved
    assert "steps of a rollout: 7 of 10\n" in text
    assert table_of(text) == {
        "": ("per epoch", "in 6 epochs"),
        "samples": ("6", "36"),
        "network forward passes in sampling, at most": ("84", "504"),
        "reward evaluations": ("6", "36"),
        "(sample, timestep) pairs to train on, at most": ("42", "252"),
        "optimizer steps, each on 2 samples": ("3", "18"),
    }
    assert "checkpoints: 3 written, 3 kept\n" in text
    assert "output folder: run\n" in text
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "passes", "pairs", "rewards"),
    [  # 64 samples of ten steps, two passes of each
        ("--model tiny-sd3 --algorithm flow_grpo:window=3", 1280, 192, 64),
        ("--model tiny-sd3 --algorithm refl", 1280, 64, 128),
        ("--algorithm draft --train-num-inner-epochs 2", 1280, 128, 192),
        ("--train-timestep-fraction 0.5 --sample-guidance-scale 1", 640, 320, 64),
        ("--model some/model --reward colorfulness --sample-num-batches-per-epoch 64", 6400, 3200, 64),
    ],
)
def test_a_dry_run_counts_what_the_algorithm_does(words, passes, pairs, rewards, here, capsys):
    Path("prompts.txt").write_text("a red two\n\na blue three\n")
    guided = [] if "guidance" in words else ["--sample-guidance-scale", "2"]
    run_command("train", *words.split(), *guided, "--prompts", "prompts.txt", "--dry-run")
    text = capsys.readouterr().out
    assert "prompts: prompts.txt, 2 prompts: 'a red two', 'a blue three'" in text
    found = {name: epoch for name, (epoch, _) in table_of(text).items()}
    assert found["network forward passes in sampling, at most"] == f"{passes:,}"
    assert found["(sample, timestep) pairs to train on, at most"] == f"{pairs:,}"
    assert found["reward evaluations"] == str(rewards)
    assert [path.name for path in here.iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize(("model", "steps"), [("tiny-sd", 2), ("tiny-sd3", 3)])
def test_a_dry_run_counts_the_most_steps_that_a_family_runs(zoo, model, steps, capsys):
    """A quarter of ten steps is rounded down by one family, up by the other."""
    load = {"tiny-sd": load_tiny_sd, "tiny-sd3": load_tiny_sd3}[model]
    assert len(family_of(load()).schedule(10, 0.25).timesteps) == steps
    flags = ("--noise-strength", "0.25", "--sample-num-steps", "10", "--reward", "colorfulness", "--dry-run")
    run_command("train", "--model", model, "--images", str(zoo), *flags)
    assert "steps of a rollout: 3 of 10\n" in capsys.readouterr().out


def test_a_misspelled_command_is_one_error(capsys):
    run_command("trian", "--images", "photos", status=2)
    assert printed_error(capsys).startswith(
        "error: there is no command 'trian' (perhaps train): use one of demo, "
    )


def test_a_dry_run_refuses_what_the_run_would_refuse(zoo, capsys):
    flags = ("--images", str(zoo), "--reward", "colorfulness", "--sample-num-steps", "10", "--dry-run")
    run_command("train", *flags, "--noise-strength", "0.05", status=2)
    assert "use a --noise-strength of at least 0.1, or more steps" in printed_error(capsys)
    run_command("train", *flags, "--prompt", "a {lable}", status=2)
    assert "nothing replaces {lable}; only {label} becomes" in printed_error(capsys)


def test_a_dry_run_may_name_a_folder_that_holds_a_run(here, model, capsys):
    flags = ("--model", model, *TINY, "--prompt", "a")
    run_command("train", *flags)
    records = read_metrics("run")
    run_command("train", *flags, "--dry-run", status=2)
    _, folder, refused = capsys.readouterr().out.partition("\noutput folder: run\n")
    assert folder
    assert refused.startswith("but the run would end with an error: run already holds a run: set")
    assert "--overwrite to replace it" in " ".join(refused.split())
    assert max(map(len, refused.splitlines())) <= 80
    for words in (["--overwrite"], ["--resume-from", "auto"], ["--output-dir", "new"]):
        run_command("train", *flags, "--dry-run", *words)
        assert "already holds" not in capsys.readouterr().out
    assert read_metrics("run") == records


def test_a_dry_run_shortens_long_prompts(here, capsys):
    Path("prompts.txt").write_text("a very long prompt " * 40)
    run_command("train", "--prompts", "prompts.txt", "--reward", "colorfulness", "--dry-run")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("prompts:")]
    assert len(line) < 150


def test_a_dry_run_of_a_model_that_edits_counts_all_steps(here, zoo, capsys):
    make_flux_pipeline(kind=FluxKontextPipeline).save_pretrained(here / "kontext")
    flags = ("--images", str(zoo), "--reward", "colorfulness", "--sample-num-steps", "10", "--dry-run")
    with mock.patch.object(DiffusionPipeline, "load_config", wraps=DiffusionPipeline.load_config) as read:
        run_command("train", "--model", str(here / "kontext"), *flags)
    assert "steps of a rollout: 10 of 10\n" in capsys.readouterr().out
    assert read.call_count == 1


def test_an_algorithm_leaves_out_what_the_preset_has_for_another():
    def config(*words: str) -> DDPOConfig:
        return parse_train("--model", "tiny-sd3", *words).make_config()

    assert config().train_clip_range == config("--algorithm", "flow_grpo").train_clip_range == 5e-3
    assert config("--algorithm", "nft").train_clip_range == DDPOConfig().train_clip_range
    with pytest.raises(ValueError, match=r"nft does not use train_clip_range=0\.1"):
        parse_train("--model", "tiny-sd3", "--algorithm", "nft", "--train-clip-range", "0.1").check()


@pytest.mark.slow
def test_a_flow_model_is_trained_resumed_and_sampled(here, capsys):
    flags = (*TINY, "--model", "tiny-sd3", "--algorithm", "flow_grpo:window=2", "--sample-num-steps", "4")
    flags = (*flags, "--sample-group-size", "2")
    run_command("train", *flags)
    run_command("train", *flags, "--num-epochs", "2", "--resume-from", "latest")
    assert (
        f"continuing {Path('run', 'checkpoint-000001')} with changes: num_epochs" in capsys.readouterr().out
    )
    assert [record["epoch"] for record in read_metrics("run", "epoch")] == [1, 2]
    recorded = config_of(here / "run")["run"]
    assert recorded["model"] == "tiny-sd3"
    assert (recorded["algorithm"]["name"], recorded["algorithm"]["window"]) == ("FlowGRPO", 2)
    other = (*flags, "--algorithm", "awm", "--num-epochs", "3", "--resume-from", "latest")
    assert cli.main(["train", *other]) == 2
    assert "algorithm: " in printed_error(capsys)
    run_command("sample", "--run", "run", "--count", "1", "--prompt", "a red three", "--seed", "3")
    # What plain diffusers draws with the LoRA weights, by its ODE, from the same noise.
    pipeline = load_tiny_sd3()
    pipeline.load_lora_weights(str(here / "run" / "lora"))
    generator = torch.Generator().manual_seed(sample_seed(3, 0))
    noise = torch.randn(1, 4, 8, 8, generator=generator)
    drawn = pipeline("a red three", num_inference_steps=4, guidance_scale=1.0, latents=noise,
                     max_sequence_length=1).images[0]  # fmt: skip
    made = Image.open(here / "samples" / "sample-000.png")
    difference = torch.tensor(list(made.tobytes())).float() - torch.tensor(list(drawn.tobytes())).float()
    assert difference.abs().max() <= 1


def test_validation_of_images_and_of_prompts(here, model, photos):
    flags = (*TINY, "--model", model, "--validation-freq", "1")
    Path("held-out.txt").write_text("a red three\na blue four\n")
    run_command(
        "train", *flags, "--prompt", "a red three", "--validation", "held-out.txt", "--output-dir", "text"
    )
    held_out = pictures(here / "held-out", "a.png")
    images = ("--images", photos, "--validation", held_out, "--noise-strength", "0.7")
    run_command("train", *flags, *images, "--output-dir", "images")
    for folder in ("text", "images"):
        assert [r["epoch"] for r in read_metrics(folder, "validation")] == [0, 1]


def test_the_middle_of_an_image_is_kept():
    striped = Image.new("RGB", (60, 20), "white")  # 20 black, 20 white, 20 black
    striped.paste("black", (0, 0, 20, 20))
    striped.paste("black", (40, 0, 60, 20))
    assert fit(striped, 20).min() == 1


# ----------------------------------------------------------------------------------- flags, presets
def test_flags_override_the_preset(here, model):
    flags = (*TINY, "--sample-group-size", "2", "--model", model)
    run_command("train", "--preset", "digit_world", *flags)
    written, preset = config_of(here / "run"), PRESETS["digit_world"].config
    assert written["train_lora_rank"] == preset["train_lora_rank"] != DDPOConfig().train_lora_rank
    assert written["train_clip_range"] == preset["train_clip_range"]
    assert (written["train_learning_rate"], written["sample_num_steps"]) == (1e-3, 3)
    assert (preset["train_learning_rate"], preset["sample_num_steps"]) == (2e-3, 10)


def test_a_preset_is_chosen_for_tiny_sd_only():
    def chosen(*words: str) -> Any:
        return parse_train(*words).chosen

    assert chosen() == chosen("--model", "tiny-sd") == PRESETS["digit_world"]
    other = dataclasses.replace(PRESETS["aesthetic"], model="tiny-sd")
    assert chosen("--model", "tiny-sd", "--preset", "aesthetic") == other
    assert chosen("--model", "somebody/model").config == {}


def test_img2img_presets_train_on_class_folders(here, model, zoo, monkeypatch):
    """The camouflage preset's own reward, asked for the folder's classes."""
    seen: list[Any] = []

    def clip_change(classes: tuple[str, ...]) -> Any:
        def reward(images: torch.Tensor, texts: Any, metadata: Any) -> torch.Tensor:
            seen.extend((classes, entry["label"]) for entry in metadata)
            return images.mean(dim=(1, 2, 3))

        return reward

    monkeypatch.setitem(rewards.REWARDS, "clip_change", rewards.Registered(clip_change, ("image", "label")))
    penalty = functools.partial(rewards.distance_penalty, write_resnet(here / "resnet"))
    monkeypatch.setitem(rewards.REWARDS, "distance_penalty", rewards.Registered(penalty, ("target",)))
    sizes = ("--sample-num-batches-per-epoch", "1", "--train-gradient-accumulation-steps", "1")
    flags = ("--model", model, "--images", zoo, "--num-epochs", "1", "--mixed-precision", "no")
    flags = (*flags, "--sample-num-steps", "5")
    run_command("train", "--preset", "camouflage", *flags, *sizes, "--output-dir", "run")
    assert {classes for classes, _ in seen} == {("three", "two")}
    assert {label for _, label in seen} <= {"three", "two"}
    written = config_of(here / "run")
    assert written["sample_guidance_scale"] == 0
    assert (written["sample_batch_size"], written["sample_num_batches_per_epoch"]) == (4, 1)
    assert written["run"]["reward"] == {"clip_change": 1, "distance_penalty": 1.8}
    assert written["run"]["images"]["augmented"] is True


def test_the_restore_preset_restores_one_photograph_and_damage_per_group(
    here, model, zoo, monkeypatch, capsys
):
    """All but its model, precision and steps; each epoch has two groups of eight."""
    seen: list[Any] = []

    def clip_margin(classes: tuple[str, ...]) -> Any:
        def reward(images: torch.Tensor, texts: Any, metadata: Any) -> torch.Tensor:
            assert (classes, set(texts)) == (("three", "two"), {""})
            seen.extend(metadata)
            return images.mean(dim=(1, 2, 3))

        return reward

    monkeypatch.setitem(rewards.REWARDS, "clip_margin", rewards.Registered(clip_margin, ("label",)))
    penalty = functools.partial(rewards.distance_penalty, write_resnet(here / "resnet"))
    monkeypatch.setitem(rewards.REWARDS, "distance_penalty", rewards.Registered(penalty, ("target",)))
    flags = ("--preset", "restore", "--model", model, "--images", zoo, "--num-epochs", "2")
    run_command("train", *flags, "--output-dir", "run", "--dry-run")
    said = capsys.readouterr().out
    assert "algorithm: branching" in said
    assert "steps of a rollout: 8 of 20" in said
    assert table_of(said)["optimizer steps, each on 16 samples"] == ("1", "2")
    run_command("train", *flags, "--output-dir", "run", "--mixed-precision", "no", "--sample-num-steps", "6")
    groups = [seen[first : first + 8] for first in range(0, 32, 8)]
    assert len(seen) == 32
    for group in groups:
        for entry in group:
            assert torch.equal(entry["image"], group[0]["image"])  # damaged alike
            assert torch.equal(entry["target"], group[0]["target"])
        assert group[0]["damage"] == "foggy"
        assert group[0]["severity"] in (3, 4, 5)
    assert len({group[0]["image"].sum().item() for group in groups}) == 4
    assert len(read_metrics("run", "step")) == 2
    assert config_of(here / "run")["run"]["images"]["severities"] == [3, 4, 5]


def test_the_edit_preset_obeys_captions(here, model, captioned, monkeypatch, capsys):
    """All but its sizes: the reward on small random models, captions, guidance, groups, and sampling."""
    score = rewards.edit(write_clip(here / "clip"), write_resnet(here / "resnet"))
    seen: list[tuple[str, str]] = []

    def reward(images: torch.Tensor, texts: Any, metadata: Any) -> Any:
        seen.extend((entry["id"], text) for entry, text in zip(metadata, texts, strict=True))
        return score(images, texts, metadata)

    monkeypatch.setitem(rewards.REWARDS, "edit", rewards.Registered(lambda: reward, ("prompt", "image")))
    sizes = ("--sample-num-batches-per-epoch", "8", "--train-gradient-accumulation-steps", "4")
    short = ("--num-epochs", "1", "--sample-num-steps", "4", "--mixed-precision", "no")
    flags = ("--images", captioned, "--model", model, "--output-dir", "run")
    run_command("train", "--preset", "edit", *sizes, *short, *flags)

    written = config_of(here / "run")
    assert (written["sample_guidance_scale"], written["train_cfg"]) == (5, True)
    assert (written["sample_batch_size"], written["sample_num_batches_per_epoch"]) == (4, 8)
    groups = [set(seen[first : first + 4]) for first in range(0, 32, 4)]
    assert [len(group) for group in groups] == [1] * 8  # of one request
    assert {text for _, text in seen} <= {line for lines in EDITS.values() for line in lines}
    assert all(text in EDITS[place[0]] and place == f"{place[0]}.png: {text}" for place, text in seen)
    assert len(read_metrics("run", "step")) == 2

    calls: list[tuple[Any, ...]] = []
    draw = sample.img2img_rollout

    def listen(pipeline: Any, prompts: Any, images: Any, strength: float, how: Any, **others: Any) -> Any:
        calls.append((prompts, strength, how.num_inference_steps, how.guidance_scale))
        return draw(pipeline, prompts, images, strength, how, **others)

    monkeypatch.setattr(sample, "img2img_rollout", listen)
    run_command(*shlex.split(capsys.readouterr().out.splitlines()[-1])[1:])
    assert calls == [(["a red three", "a blue four"], 0.5, 4, 5.0)]  # the policy that was trained


def help_of(command: str, capsys: Any, flag: str = "--help") -> str:
    assert cli.main([command, flag]) == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_ends_with_an_example_that_works(name, here, capsys):
    example = cli.EXAMPLES[name]
    assert f"Example: {example} " in help_of(name, capsys)
    assert cli.main(["help", name]) == 0
    assert example in capsys.readouterr().out
    flags = cli.parse(shlex.split(example)[1:])
    if name in ("demo", "preflight", "train"):  # the others need a run
        flags.check()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows raises another error")
@pytest.mark.parametrize("words", ["--help", "train --help", "train --model tiny-sd --dry-run"])
def test_output_that_nobody_reads_is_no_error(words, here):
    """As after `| head`, which ends before the command does."""
    command = [sys.executable, "-W", "ignore", "-m", "ddpo_lessons.cli", *words.split()]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    run.stdout.close()
    assert run.stderr is not None
    assert run.stderr.read() == ""
    assert run.wait() == 141


def test_help_explains_every_field(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    train_help, demo_help = help_of("train", capsys, "--help-all"), help_of("demo", capsys)
    assert "--train-learning-rate FLOAT Learning rate. (default: 0.0003; for tiny-sd: 0.002)" in train_help
    for field in dataclasses.fields(DDPOConfig):
        assert f" --{field.name.replace('_', '-')}" in train_help
    for registry in (PRESETS, PROMPTS, ALGORITHMS, rewards.REWARDS, DAMAGES):
        listed = [name for name in registry if f"{name}, " in train_help or f", {name}" in train_help]
        assert listed == [*registry]
    assert "--algorithm {branching,ddpo} Algorithm of training; each has its own schedule." in demo_help
    assert "the algorithm's schedule. --eval-images" in demo_help  # no default of None beside "If left out"
    assert "--damage KIND [KIND ...] With --images" in train_help


@pytest.mark.parametrize("command", ["train", "preflight"])
@pytest.mark.parametrize("words", [["--help"], ["--preset", "edit", "-h"]])
def test_help_of_a_run_is_short_and_begins_with_what_most_runs_need(command, words, capsys):
    assert cli.main([command, *words]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 80
    flags = re.findall(r"^[│ ] --([a-z-]+)", text, re.MULTILINE)
    assert flags[:5] == ["reward", "images", "prompt", "num-epochs", "output-dir"]
    assert flags[-1] == "help-all"
    for registry in (PRESETS, ALGORITHMS, rewards.REWARDS):
        assert [name for name in registry if not re.search(rf"\b{name}\b", text)] == []
    everything = help_of(command, capsys, "--help-all")
    assert [flag for flag in flags[:-1] if f" --{flag} " not in everything.replace(",", " ")] == []
    groups = [
        everything.index(f" {group} options ") for group in ("run", "sampling", "training", "advantage")
    ]
    assert groups == sorted(groups)


def test_the_groups_of_settings_are_those_of_the_config():
    """Each begins where config.py has a heading."""
    source = inspect.getsource(DDPOConfig)
    assert re.findall(r"# --- .*\n    (\w+):", source) == [*options.GROUPS.values()]


@pytest.mark.parametrize("name", [None, *cli.COMMANDS])
def test_help_fits_a_terminal_of_80_columns(name, capsys):
    assert cli.main([name, "--help"] if name else []) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_reward_that_a_program_registered_has_a_name_here(monkeypatch):
    monkeypatch.setitem(rewards.REWARDS, "mine", rewards.Registered(rewards.colorfulness))
    assert parse_train("--reward", "mine").reward == "mine"


def test_flags_become_values_of_their_fields():
    config = parse(
        *("--train-learning-rate", "2e-4", "--num-epochs", "7", "--exp-name", "x y"),
        *("--no-train-cfg", "--sample-guidance-scale", "1", "--per-prompt-stat-tracking"),
        *("--train-lora-target-modules", "to_k", "to_q", "--tracker-kwargs", '{"wandb": {"a": 1}}'),
        *("--log-prob-reduction", "sum", "--log-with", "wandb"),
    )
    changed = {
        "train_learning_rate": 2e-4,
        "num_epochs": 7,
        "exp_name": "x y",
        "train_cfg": False,
        "sample_guidance_scale": 1.0,
        "per_prompt_stat_tracking": True,
        "train_lora_target_modules": ("to_k", "to_q"),
        "tracker_kwargs": {"wandb": {"a": 1}},
        "log_prob_reduction": "sum",
        "log_with": "wandb",
    }
    assert config == DDPOConfig(**changed)
    assert parse() == DDPOConfig()


# -------------------------------------------------------------------------------------------- sample
def test_sample_writes_results_beside_the_images(here, model, photos, capsys):
    images = [photos / name for name in ("a.png", "b.jpg", "c.webp")]
    flags = ("--model", model, "--noise-strength", "0.5", "--steps", "4", "--images", *images)
    run_command("sample", *flags, "--output-dir", "one")
    assert "one/grid.png" in capsys.readouterr().out.replace("\\", "/")
    assert [Image.open(here / "one" / f"{name}.png").size for name in "abc"] == [(32, 32)] * 3
    grid = Image.open(here / "one" / "grid.png")
    assert grid.size == (2 * 96, 3 * 96)
    assert grid.getpixel((48, 48)) == (255, 0, 0)  # the red input, left
    assert (
        grid.crop((96, 0, 192, 96)).resize((32, 32), Image.Resampling.NEAREST).tobytes()
        == Image.open(here / "one" / "a.png").tobytes()
    )
    run_command("sample", *flags, "--output-dir", "two", "--batch-size", "1")
    run_command("sample", *flags, "--output-dir", "three", "--seed", "1")
    first, second, third = (
        [Image.open(here / folder / f"{name}.png") for name in "abc"] for folder in ("one", "two", "three")
    )
    for a, b, c in zip(first, second, third, strict=True):
        difference = torch.tensor(list(a.tobytes())) - torch.tensor(list(b.tobytes()))
        assert difference.abs().max() <= 1  # rounding; batches change no image
        assert a.tobytes() != c.tobytes()


@pytest.mark.parametrize(("pairs", "columns", "lines"), [(4, 2, 4), (5, 4, 3), (16, 4, 8)])
def test_a_grid_of_many_pairs_has_two_of_them_in_a_row(pairs, columns, lines):
    pixels = torch.rand(pairs, 2, 3, 96, 96).round()
    grid = sample._grid([list(pair) for pair in pixels])
    assert grid.size == (columns * 96, lines * 96)
    assert torch.equal(to_tensor(grid)[:, :96, 192:288], pixels[1, 0]) == (columns == 4)


@pytest.mark.parametrize("count", [4, 6])
@pytest.mark.parametrize("things", ["images", "prompts"])
def test_sample_says_that_it_takes_some_of_what_was_trained_on(things, count, here, capsys):
    pictures(here / "photos", *(f"{number}.png" for number in range(count)))
    Path("prompts.txt").write_text("a fox\n" * count)
    record = {"images": {"folder": "photos"}} if things == "images" else {"prompts": {"file": "prompts.txt"}}
    few, six = options.Sample(), options.Sample(count=6)
    few.policy = six.policy = runs.Policy("tiny-sd", None, DDPOConfig(), record)
    assert len(sample.choose_jobs(few)) == 4
    said = f"4 of the run's 6 {things}; --count 6 uses all of them\n"
    assert capsys.readouterr().out == (said if count == 6 else "")
    assert len(sample.choose_jobs(six)) == (count if things == "images" else 6)
    assert capsys.readouterr().out == ""


def test_sizes_are_kept_when_asked_for(here, model, photos):
    images = (photos / "a.png", photos / "b.jpg")
    flags = ("--model", model, "--noise-strength", "0.5", "--steps", "2", "--keep-size")
    run_command("sample", *flags, "--images", *images)
    assert [Image.open(here / "samples" / f"{name}.png").size for name in "ab"] == [(40, 48), (20, 20)]
    assert Image.open(here / "samples" / "grid.png").size == (2 * 2 * 40, 2 * 2 * 48)  # twice as large


@pytest.mark.parametrize("side", [48, 64])
@pytest.mark.parametrize("of_images", [False, True])
def test_a_resolution_far_above_the_models_own_is_warned_of_before_sampling(
    of_images, side, model, here, photos
):
    flags = f"train --model {model} --prompt cat --reward colorfulness --resolution {side}".split()
    images = None
    if of_images:
        flags, images = [*flags, "--images", str(photos)], folders.find_images(photos)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train.make_trainer(cli.parse(flags), images)
    said = [str(each.message) for each in found if "resolution" in str(each.message)]
    start = "resolution=64 is 2 times the model's own 32: images are usually worse than at that size, and"
    assert [text.startswith(start) for text in said] == ([True] if side == 64 else [])


def test_a_sample_far_above_the_models_own_resolution_is_warned_of(model, here):
    flags = ("--model", model, "--prompt", "cat", "--steps", 1, "--count", 1)
    with pytest.warns(UserWarning, match=r"their 4 times as many pixels\. Leave resolution out to use 32\."):
        run_command("sample", *flags, "--resolution", 64)


def test_a_stray_config_is_not_that_of_a_run(here, model):
    shutil.copytree(model, "model")
    Path("config.json").write_text('{"sample_num_steps": 3}')
    assert runs.find_policy(None, "model", None).settings == DDPOConfig()
    Path("metrics.jsonl").touch()
    assert runs.find_policy(None, "model", None).settings == DDPOConfig(sample_num_steps=3)
    assert runs.find_policy(None, "tiny-sd", None).settings == DDPOConfig()


@pytest.mark.parametrize(
    ("key", "remedy"), [("image", ": metadata has an image only with --images FOLDER"), ("weight", "")]
)
def test_a_reward_that_misses_an_image_is_told_where_it_comes_from(key, remedy, monkeypatch, capsys):
    monkeypatch.setattr(cli, "run", lambda name, flags: {}[key])
    assert cli.main(["train"]) == 2
    error = printed_error(capsys)
    assert error.startswith(f"error: your code raised KeyError({key!r}) ({__file__}, line ")
    assert error.rpartition(")")[2] == remedy


def test_the_learning_rate_has_a_short_name():
    assert cli.parse(["train", "--lr", "1e-4"]).settings == {"train_learning_rate": 1e-4}


def test_a_finding_that_failed_is_printed_once(here, model, capsys, recwarn, monkeypatch):
    broken = first_epoch.Finding("a check", False, "it failed")
    monkeypatch.setattr(first_epoch.FirstEpoch, "findings", lambda *_: [broken])
    run_command("train", *TINY, "--model", model, "--prompt", "")
    said = capsys.readouterr()
    assert (said.out.count("FAIL  a check: it failed"), said.err.count("FAIL")) == (1, 0)
    assert [warning for warning in recwarn if "looks broken" in str(warning.message)] == []
    assert not [line for line in warnings.filters if line[1] and "looks broken" in line[1].pattern]


def test_damaged_lora_weights_are_one_error_with_its_remedy(here, model, capsys):
    run_command("train", *TINY, "--model", model, "--prompt", "")
    path = here / "run" / "lora" / LORA_FILE
    whole = path.read_bytes()
    for damaged in (whole[:-1], b""):
        path.write_bytes(damaged)
        run_command("sample", "--run", "run", status=2)
        text = f"error: the LoRA weights of {Path('run', 'lora')} cannot be read; {LORA_FILE} may be"
        assert printed_error(capsys).startswith(text)
    run_command("train", *TINY, "--model", model, "--prompt", "", "--resume-from", "auto")  # the remedy
    assert path.read_bytes() == whole


def test_lora_weights_of_another_model_are_refused(here, model, capsys, monkeypatch):
    run_command("train", *TINY, "--model", model, "--prompt", "")
    wide = make_pipeline()
    wide.unet = type(wide.unet).from_config(wide.unet.config, block_out_channels=(32, 64))
    wide.save_pretrained("wide")
    messages: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", messages.append)
    diffusers.utils.logging.add_handler(handler)
    assert cli.main(["sample", "--model", "wide", "--lora", "run/lora", "--prompt", ""]) == 2
    diffusers.utils.logging.remove_handler(handler)
    assert "do not fit the model" in printed_error(capsys)
    assert messages == []  # diffusers would list every layer
    assert cli.main(["sample", "--model", "tiny-sd3", "--lora", "run/lora", "--prompt", ""]) == 2
    assert "none of them is for a layer that a StableDiffusion3Pipeline has" in printed_error(capsys)


def test_without_a_word_the_help_is_shown(capsys):
    shown = []
    for words in ([], ["--help"]):
        assert cli.main(words) == 0
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1]
    assert shown[0].out.isascii()  # for every terminal
    for name in cli.COMMANDS:
        assert f"\n  {name} " in shown[0].out
        home = "lessons" if name == "demo" else "cli"
        assert callable(importlib.import_module(f"ddpo_lessons.{home}.{name}").run)


def test_ctrl_c_leaves_no_traceback(monkeypatch):
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    assert cli.main(["doctor"]) == 130


# ------------------------------------------------------------------------------ demo, doctor, package
def test_doctor_and_demo_are_called(monkeypatch):
    monkeypatch.setattr(doctor, "run", lambda _: 1)
    assert cli.main(["doctor"]) == 1
    calls = []
    monkeypatch.setattr(demo, "run", lambda arguments: calls.append(arguments) or 0)
    run_command("demo", "--epochs", "3", "--algorithm", "ddpo", "--output-dir", "there")
    assert calls == [options.Demo(algorithm="ddpo", epochs=3, output_dir=Path("there"))]


def test_help_version_and_doctor_do_not_wait_for_torch():
    program = (
        "import sys\nfrom ddpo_lessons.cli import doctor\nfrom ddpo_lessons.cli import main as cli\n"
        "doctor.run = lambda _: 0\n"
        "print([cli.main([word]) for word in sys.argv[1:]], {'torch', 'numpy'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, "--help", "--version", "doctor"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[0, 0, 0] set()"


def test_the_version_is_the_package_s(capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == ddpo_lessons.__version__ == project["version"]
    assert project["scripts"] == {"ddpo-lessons": "ddpo_lessons.cli.main:main"}


def test_public_names_exist():
    for name in ddpo_lessons.__all__:
        assert getattr(ddpo_lessons, name) is not None
    assert set(ddpo_lessons.__all__) <= set(dir(ddpo_lessons))
    with pytest.raises(AttributeError, match="no attribute 'PPOTrainer'"):
        ddpo_lessons.PPOTrainer  # noqa: B018


def test_type_checkers_see_the_same_names(monkeypatch):
    monkeypatch.setattr(typing, "TYPE_CHECKING", True)
    seen = runpy.run_path(ddpo_lessons.__file__)
    assert "__getattr__" not in seen  # the branch for type checkers ran
    for name in ddpo_lessons.__all__:
        assert seen[name] == getattr(ddpo_lessons, name)

"""A run from the command line, and what comes after it: sampling, stopping, continuing, starting again."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY, pictures, printed_error, run_command
from PIL import Image

from ddpo_lessons import rewards
from ddpo_lessons.cli import sample
from ddpo_lessons.config import LORA_FILE
from ddpo_lessons.damages import DAMAGES
from ddpo_lessons.data.prompts import activities
from ddpo_lessons.training.record import read_run
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def files(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.*"))


@pytest.fixture
def calls(monkeypatch):
    """What `sample` asks of the policy."""
    seen: list[dict[str, Any]] = []

    def listen(name: str) -> Any:
        draw = getattr(sample, name)

        def wrapped(family: Any, prompts: Any, *rest: Any, **settings: Any) -> Any:
            *rest_before, how = rest
            seen.append(
                {"kind": name, "prompts": list(prompts), "rest": rest_before, **vars(how), **settings}
            )
            return draw(family, prompts, *rest, **settings)

        return wrapped

    for name in ("text2img_rollout", "img2img_rollout"):
        monkeypatch.setattr(sample, name, listen(name))
    return seen


# ----------------------------------------------------------------------------- the policy that was trained
def test_a_run_is_sampled_as_it_was_trained(here, model, calls, monkeypatch):
    policy = ("--sample-guidance-scale", "2.5", "--sample-eta", "0.9", "--negative-prompts", "a foggy three")
    run_command("train", *TINY, *policy, "--model", model, "--prompt", "a red three")
    loaded: list[str] = []
    load = sample.load_pipeline
    monkeypatch.setattr(sample, "load_pipeline", lambda name, **how: loaded.append(name) or load(name, **how))
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    run_command("sample", "--run", here / "run")
    assert loaded == [str(Path(model).resolve())]
    (call,) = calls
    assert (call["kind"], call["prompts"]) == ("text2img_rollout", ["a red three"] * 4)
    assert (call["num_inference_steps"], call["guidance_scale"], call["eta"]) == (3, 2.5, 0.9)
    assert call["negative_prompt"] == "a foggy three"
    asked = ("prompts", "num_inference_steps", "guidance_scale", "eta", "negative_prompt")
    other = ("--prompt", "a blue two", "--steps", "2", "--guidance-scale", "0", "--count", "1", "--overwrite")
    run_command("sample", "--run", here / "run", *other)
    assert [calls[1][name] for name in asked] == [["a blue two"], 2, 0.0, 0.9, "a foggy three"]
    run_command("sample", "--model", model, "--lora", here / "run" / "lora", "--prompt", "", "--overwrite")
    assert [calls[2][name] for name in asked] == [[""] * 4, 3, 2.5, 0.9, "a foggy three"]


def test_prompts_are_drawn_from_where_training_drew_them(here, model, calls, monkeypatch):
    Path("mine.txt").write_text("a green five\n")
    seen: list[str] = []

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        seen.extend(prompts)
        return images.mean(dim=(1, 2, 3))

    monkeypatch.setitem(rewards.REWARDS, "colorfulness", rewards.Registered(lambda: reward))
    for number, given in enumerate(("mine.txt", "activities")):
        run_command("train", *TINY, "--output-dir", f"run{number}", "--model", model, "--prompts", given)
        run_command("sample", "--run", f"run{number}", "--output-dir", f"samples{number}")
    assert calls[0]["prompts"] == ["a green five"] * 4
    draw = activities(0)
    drawn = [draw()[0] for _ in range(4)]
    assert calls[1]["prompts"] == drawn
    assert seen == ["a green five"] * 2 + drawn[:2]


def test_images_of_a_run_get_the_damage_that_it_was_trained_on(here, model, calls):
    pictures(here / "pics", "cat/a.png", "dog/a.png")
    damage = ("--damage", "dark", "--severity", "5", "--noise-strength", "0.7")
    run_command("train", *TINY, "--model", model, "--images", "pics", *damage)
    run_command("sample", "--run", "run")
    assert files("samples") == ["cat/a.png", "dog/a.png", "grid.png"]
    images, strength = calls[0]["rest"]
    assert strength == 0.7
    clean = torch.tensor([1.0, 0, 0]).view(3, 1, 1).expand(3, 32, 32)
    dark = DAMAGES["dark"](clean[None], 5, torch.Generator())[0]
    for image in images:
        torch.testing.assert_close(image, dark, atol=0.05, rtol=0)
    # Images that are given are taken as they are.
    run_command("sample", "--run", "run", "--images", "pics", "--output-dir", "clean")
    torch.testing.assert_close(calls[1]["rest"][0][0], clean)


def test_a_label_in_the_prompt_is_the_images_folder(here, model, calls):
    pictures(here / "photos", "cat/1.png", "dog/2.png")
    prompt = ("--prompt", "a photo of a {label}")
    run_command("train", *TINY, "--model", model, "--images", "photos", "--noise-strength", "0.7", *prompt)
    run_command("sample", "--run", "run")
    assert calls[0]["prompts"] == ["a photo of a cat", "a photo of a dog"]


def test_captions_are_read_beside_images_of_a_policy_that_had_them(here, model, calls, capsys):
    pictures(here / "pics", "a.png", "b.png")
    for name in "ab":
        (here / "pics" / f"{name}.txt").write_text(f"a red {name}\na blue {name}")
    run_command("train", *TINY, "--model", model, "--images", "pics", "--noise-strength", "0.7")
    run_command("sample", "--run", "run", "--images", "pics/b.png")
    assert calls[0]["prompts"] == ["a red b"]
    pictures(here / "more", "c.png")
    run_command("sample", "--run", "run", "--images", "more", "--output-dir", "other", status=2)
    assert "write it into c.txt beside it, or give --prompt" in printed_error(capsys)
    run_command("sample", "--run", "run", "--images", "more", "--output-dir", "other", "--prompt", "a cat")
    assert calls[1]["prompts"] == ["a cat"]


def test_a_run_without_results_or_whose_images_are_gone_says_so(here, model, capsys):
    pictures(here / "pics", "a.png")
    run_command("train", *TINY, "--model", model, "--images", "pics", "--noise-strength", "0.7")
    (here / "pics").rename("gone")
    run_command("sample", "--run", "run", status=2)
    assert "no longer exists: give --images" in printed_error(capsys)
    (here / "run" / "lora" / LORA_FILE).unlink()
    run_command("sample", "--run", "run", "--images", "gone", status=2)
    assert "continue it with --resume-from latest" in printed_error(capsys)


# ------------------------------------------------------------------------------------ files of samples
def test_results_keep_their_names_and_mix_with_nothing(here, model, capsys):
    pictures(here / "pics", "a.png", "b.jpg")
    flags = ("sample", "--model", model, "--steps", "2", "--noise-strength", "0.5")
    run_command(*flags, "--images", "pics")
    assert files("samples") == ["a.png", "b.png", "grid.png"]
    before = Path("samples/b.png").read_bytes()
    run_command(*flags, "--images", "pics/b.jpg", "--seed", "1", status=2)
    assert "--output-dir samples holds files already" in printed_error(capsys)
    assert Path("samples/b.png").read_bytes() == before
    run_command(*flags, "--images", "pics/b.jpg", "--seed", "1", "--overwrite")
    assert Path("samples/b.png").read_bytes() != before
    run_command(*flags, "--images", "pics/a.png", "--output-dir", "pics", "--overwrite", status=2)
    assert "is an input" in printed_error(capsys)


def test_sizes_that_take_forever_or_do_not_divide_are_all_named_before_any_compute(
    here, model, calls, capsys
):
    pictures(here / "pics", "fits.png", size=(64, 64))  # exactly four times the model's own 32 x 32
    pictures(here / "pics", "odd.png", size=(30, 32))
    pictures(here / "pics", "huge.png", size=(4000, 3000))
    run_command("sample", "--model", model, "--images", "pics", "--keep-size", "--steps", "2", status=2)
    line = printed_error(capsys)
    assert "multiples of 4 and" in line
    assert "pics/huge.png (4000 x 3000), pics/odd.png (30 x 32), or leave out --keep-size" in line
    assert "fits.png" not in line
    assert (calls, Path("samples").exists()) == ([], False)


def test_a_transformer_takes_sizes_up_to_its_table_of_positions(here, capsys):
    pictures(here / "pics", "long.png", size=(48, 32))
    pictures(here / "pics", "odd.png", size=(20, 32))  # five latents, in patches of two
    pictures(here / "pics", "fits.png", size=(16, 32))
    run_command("sample", "--model", "tiny-sd3", "--images", "pics", "--keep-size", "--steps", "5", status=2)
    line = printed_error(capsys)
    assert "multiples of 8, up to 32," in line
    assert "pics/long.png (48 x 32), pics/odd.png (20 x 32), or" in line
    flags = ("--keep-size", "--steps", "5", "--noise-strength", "0.4")
    run_command("sample", "--model", "tiny-sd3", "--images", "pics/fits.png", *flags)
    assert Image.open("samples/fits.png").size == (16, 32)


def test_ctrl_c_leaves_the_samples_that_are_whole(here, model, monkeypatch, capsys):
    draw, made = sample.text2img_rollout, []

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        made.append(1)
        if len(made) == 3:
            raise KeyboardInterrupt
        return draw(*arguments, **settings)

    monkeypatch.setattr(sample, "text2img_rollout", interrupted)
    flags = ("--model", model, "--prompt", "", "--count", "5", "--steps", "2", "--batch-size", "1")
    run_command("sample", *flags, status=130)
    assert files("samples") == ["sample-000.png", "sample-001.png"]
    assert "stopped: 2 of 5 images are in samples" in capsys.readouterr().out


# ------------------------------------------------------------------------------- stopping and continuing
def test_a_stopped_run_says_where_it_stands_and_can_be_sampled(here, model, monkeypatch, capsys):
    scored: list[int] = []

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        scored.append(1)
        if len(scored) == 2:
            signal.raise_signal(signal.SIGTERM)
        return images.mean(dim=(1, 2, 3))

    monkeypatch.setitem(rewards.REWARDS, "colorfulness", rewards.Registered(lambda: reward))
    flags = ("train", *TINY, "--model", model, "--prompt", "", "--num-epochs", "3")
    run_command(*flags, status=128 + signal.SIGTERM)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "stopped after epoch 1 of 3; continue with the same flags and --resume-from auto"
    run_command(*flags, "--resume-from", "latest")
    assert [record["epoch"] for record in read_metrics("run", "epoch")] == [1, 2, 3]
    capsys.readouterr()
    run_command(*flags, "--resume-from", "latest", "--num-epochs", "2")
    out = capsys.readouterr().out
    assert "nothing to do: the run has 3 epochs, and 2 are asked for" in out
    run_command("sample", "--run", "run", "--count", "1")


def test_another_reward_prompt_or_folder_is_told_in_one_line(here, model, capsys):
    pictures(here / "pics", "a.png")
    pictures(here / "other", "a.png", "b.png")
    flags = ("train", *TINY, "--model", model, "--noise-strength", "0.7", "--images", "pics")
    run_command(*flags)
    run_command(*flags, "--noise-strength", "1.0", "--resume-from", "latest", status=2)
    assert "--noise-strength: 0.7 there, 1.0 here" in printed_error(capsys)
    again = (*flags, "--num-epochs", "2", "--resume-from", "latest", "--reward", "jpeg_compressibility")
    run_command(*again, "--images", "other", "--prompt", "a fox")
    printed = capsys.readouterr().out.splitlines()
    assert "continuing after epoch 1 of 2" in printed
    (line,) = (line for line in printed if line.startswith("continuing run"))
    for change in (
        "num_epochs 1 → 2", "reward colorfulness → jpeg_compressibility", "'files': 2,",
        "prompts {'prompt': ''} → {'prompt': 'a fox'}",
    ):  # fmt: skip
        assert change in line
    assert len(read_metrics("run", "epoch")) == 2


def test_a_new_run_starts_from_the_weights_of_another(here, model):
    """Of tiny-sd's preset, whose rank is 16; the adapter's is 2."""
    run_command("train", *TINY, "--model", model, "--prompt", "", "--train-lora-rank", "2")
    start = ("--preset", "digit_world", "--sample-group-size", "1", "--train-lora-from", "run/lora")
    run_command("train", *TINY, "--output-dir", "second", "--model", model, "--prompt", "", *start)
    settings, record = read_run(Path("second"))
    assert (record["preset"], record["reward"]) == ("digit_world", "colorfulness")
    assert (settings.train_lora_rank, settings.train_lora_from) == (2, str(here.resolve() / "run" / "lora"))

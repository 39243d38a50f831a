"""The shipped checkpoints, their classifiers and their recipes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline

from benchmarks.tiny import recipe, recipe_sd3
from benchmarks.zoo import recipe as zoo_recipe
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.worlds import digits, load_tiny_sd, load_tiny_sd3, load_tiny_zoo
from ddpo_lessons.worlds.digits import accuracy, judge_edits, score_prompts

LOAD = {"tiny-sd": load_tiny_sd, "tiny-sd3": load_tiny_sd3, "tiny-zoo": load_tiny_zoo}
MEGABYTES = {"tiny-sd": 12, "tiny-sd3": 12, "tiny-zoo": 16}


# ---------------------------------------------------------------------------------- every checkpoint
@pytest.mark.parametrize("name", LOAD)
def test_checkpoints_are_small_and_hold_no_pickle_and_no_folder_of_a_machine(name):
    files = [path for path in CHECKPOINTS[name].rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) <= 1e6 * MEGABYTES[name]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".txt", ".md"}
    for path in files:
        if path.suffix == ".json" and "tokenizer" not in path.parent.name:
            assert '": "/' not in path.read_text(), path


@pytest.mark.parametrize("name", LOAD)
def test_plain_diffusers_loads_it_in_float32(name):
    pipeline = LOAD[name]()
    assert type(pipeline) is (StableDiffusion3Pipeline if name == "tiny-sd3" else StableDiffusionPipeline)
    networks = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    assert len(networks) == (4 if name == "tiny-sd3" else 3)
    assert {next(part.parameters()).dtype for part in networks} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module", "scale", "header"),
    [
        ("tiny-sd", recipe, 0.001, "| test handwriting |"),
        ("tiny-sd3", recipe_sd3, 0.0005, "| generated |"),
        ("tiny-zoo", zoo_recipe, 0.0002, "| seen combinations |"),
    ],
)
def test_recipes_run_to_their_tables(name, module, scale, header, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert module.main(["--output", "made", "--scale", str(scale), "--images", "4"]) == 0
    folders = Path("made"), CHECKPOINTS[name]
    table, published = (json.loads((folder / "evaluation.json").read_text()) for folder in folders)
    assert table.keys() == published.keys()
    assert header in capsys.readouterr().out
    left_out = {"text_encoder_3": None} if name == "tiny-sd3" else {}
    type(LOAD[name]()).from_pretrained("made", local_files_only=True, **left_out)
    stages = {path.stem for path in Path("build/made").glob("*.pt")}
    assert stages >= {"autoencoder", "denoiser"} if name == "tiny-zoo" else not stages


# ------------------------------------------------------------------------------------------- tiny-sd
def test_words_of_the_world_are_one_token_each_and_other_text_is_spelt():
    tokenizer = load_tiny_sd().tokenizer
    prompt = "a foggy red three on a blue background"
    assert len(tokenizer(prompt).input_ids) == len(prompt.split()) + 2
    assert len(tokenizer("xyz").input_ids) == len("xyz") + 2
    assert tokenizer.decode(tokenizer("zebra").input_ids, skip_special_tokens=True).strip() == "zebra"


def check_prompts_decide(checkpoint: str, pipeline: Any, guidance_scale: float, **settings: Any) -> None:
    """40 pictures against the published 1,000: three standard errors."""
    right = recipe.measure_prompts(pipeline, digits.Judge.load(), digits.SEEN, 40, guidance_scale, **settings)
    published = json.loads((CHECKPOINTS[checkpoint] / "evaluation.json").read_text())
    for name, share in published["generated, seen combinations"].items():
        assert right[name] == pytest.approx(share, abs=3 * (share * (1 - share) / 40) ** 0.5 + 0.03)


@pytest.mark.slow
def test_text_decides_what_is_drawn():
    check_prompts_decide("tiny-sd", load_tiny_sd(), recipe.GUIDANCE_SCALE)


def test_judge_reads_clean_test_handwriting_and_not_what_it_never_saw():
    judge, reward_model = digits.Judge.load(), digits.RewardModel.load()
    clean, foggy = (digits.draw_pictures(200, "test", 0, damage) for damage in (None, "foggy"))
    assert accuracy(judge, clean.images, clean.digits) > 0.97
    assert accuracy(judge, foggy.images, foggy.digits) < 0.75
    assert accuracy(reward_model, foggy.images, foggy.digits) > 0.9


def test_reward_model_is_surer_the_less_damage_there_is():
    reward_model = digits.RewardModel.load()
    means = []
    for severity in (1, 3, 5):
        pictures = digits.draw_pictures(100, "test", 0, "faded", severity)
        log_probs = reward_model(pictures.images).log_softmax(1).gather(1, pictures.digits[:, None])
        means.append(log_probs.mean().item())
    assert means == sorted(means, reverse=True)


def test_targets_spread_the_rest_evenly():
    pictures = digits.draw_pictures(3, "train", 0, "foggy", 2)
    wanted = recipe.targets(pictures, recipe.LEGIBILITY)
    assert torch.allclose(wanted.sum(1), torch.ones(3))
    assert wanted[0, pictures.digits[0]].item() == pytest.approx(0.66)
    assert wanted[0].sort().values[0].item() == pytest.approx(0.34 / 9)


def test_generated_scores_by_hand():
    pictures = digits.draw_pictures(2, "test", 4, pairs=((3, "red"),))

    class ReadsThree(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.eye(10)[[3] * len(images)]

    told = [pictures.descriptions[0], digits.Description(3, "white", pictures.descriptions[1].background)]
    assert score_prompts(ReadsThree(), pictures.images, told) == {
        "digit": 1.0, "ink": 0.5, "background": 1.0, "all three": 0.5,
    }  # fmt: skip


def test_judges_of_edits_ask_for_the_digit_and_both_colours():
    edits = digits.draw_edits(100, "test", 5)
    judges = digits.Judge.load(), digits.SecondJudge.load()

    def shares(images: torch.Tensor) -> dict[str, float]:
        return {
            name: hits.float().mean().item() for name, hits in judge_edits(images, edits, *judges).items()
        }

    done = shares(edits.targets)
    assert done["colours"] == 1
    assert done["both"] == done["digit"] > 0.97
    assert done["second_judge"] > 0.95
    untouched = shares(edits.pictures.images)
    assert untouched["digit"] > 0.97
    assert untouched["colours"] == untouched["both"] == untouched["second_judge"] == 0
    other_digits = shares(edits.targets.roll(1, dims=0))  # somebody else's picture
    assert other_digits["digit"] < 0.3
    assert other_digits["both"] < 0.1


# ------------------------------------------------------------------------------------------- tiny-sd3
@pytest.mark.slow
def test_tiny_sd3_obeys_prompts():
    check_prompts_decide("tiny-sd3", load_tiny_sd3(), recipe_sd3.GUIDANCE_SCALE, max_sequence_length=1)


def test_tiny_sd3_has_the_autoencoder_of_tiny_sd():
    ours, theirs = load_tiny_sd3().vae, load_tiny_sd().vae
    for (name, weight), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(weight, other), name

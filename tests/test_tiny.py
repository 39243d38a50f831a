"""The shipped checkpoint, its classifiers and its recipe."""

import json
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline

from benchmarks.tiny import recipe, recipe_sd3
from ddpo_lessons import tiny
from ddpo_lessons.tiny import world
from ddpo_lessons.tiny.classifier import accuracy, judge_edits, score_prompts


def test_checkpoint_is_at_most_12_megabytes_and_holds_no_pickle():
    files = [path for path in tiny.CHECKPOINT.rglob("*") if path.is_file()]
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert sum(path.stat().st_size for path in weights) <= 12e6
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".txt", ".md"}


def test_plain_diffusers_loads_it_in_float32():
    pipeline = tiny.load_tiny_sd()
    assert type(pipeline) is StableDiffusionPipeline
    parts = (pipeline.unet, pipeline.vae, pipeline.text_encoder)
    assert {next(part.parameters()).dtype for part in parts} == {torch.float32}


def test_words_of_the_world_are_one_token_each_and_other_text_is_spelt():
    tokenizer = tiny.load_tiny_sd().tokenizer
    prompt = "a foggy red three on a blue background"
    assert len(tokenizer(prompt).input_ids) == len(prompt.split()) + 2
    assert len(tokenizer("xyz").input_ids) == len("xyz") + 2
    assert tokenizer.decode(tokenizer("zebra").input_ids, skip_special_tokens=True).strip() == "zebra"


def check_prompts_decide(checkpoint: str, pipeline: Any, guidance_scale: float, **settings: Any) -> None:
    """40 pictures against the published 1,000: three standard errors."""
    right = recipe.measure_prompts(pipeline, tiny.load_judge(), world.SEEN, 40, guidance_scale, **settings)
    published = json.loads((tiny.CHECKPOINTS[checkpoint] / "evaluation.json").read_text())
    for name, share in published["generated, seen combinations"].items():
        assert right[name] == pytest.approx(share, abs=3 * (share * (1 - share) / 40) ** 0.5 + 0.03)


def test_text_decides_what_is_drawn():
    check_prompts_decide("tiny-sd", tiny.load_tiny_sd(), recipe.GUIDANCE_SCALE)


def test_judge_reads_clean_test_handwriting_and_not_what_it_never_saw():
    judge, reward_model = tiny.load_judge(), tiny.load_reward_model()
    clean, foggy = (world.draw_pictures(200, "test", 0, damage) for damage in (None, "foggy"))
    assert accuracy(judge, clean.images, clean.digits) > 0.97
    assert accuracy(judge, foggy.images, foggy.digits) < 0.75
    assert accuracy(reward_model, foggy.images, foggy.digits) > 0.9


def test_reward_model_is_surer_the_less_damage_there_is():
    reward_model = tiny.load_reward_model()
    means = []
    for severity in (1, 3, 5):
        pictures = world.draw_pictures(100, "test", 0, "faded", severity)
        log_probs = reward_model(pictures.images).log_softmax(1).gather(1, pictures.digits[:, None])
        means.append(log_probs.mean().item())
    assert means == sorted(means, reverse=True)


def test_targets_spread_the_rest_evenly():
    pictures = world.draw_pictures(3, "train", 0, "foggy", 2)
    wanted = recipe.targets(pictures, recipe.LEGIBILITY)
    assert torch.allclose(wanted.sum(1), torch.ones(3))
    assert wanted[0, pictures.digits[0]].item() == pytest.approx(0.66)
    assert wanted[0].sort().values[0].item() == pytest.approx(0.34 / 9)


def test_generated_scores_by_hand():
    pictures = world.draw_pictures(2, "test", 4, pairs=((3, "red"),))

    class ReadsThree(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.eye(10)[[3] * len(images)]

    told = [pictures.descriptions[0], world.Description(3, "white", pictures.descriptions[1].background)]
    assert score_prompts(ReadsThree(), pictures.images, told) == {
        "digit": 1.0, "ink": 0.5, "background": 1.0, "all three": 0.5,
    }  # fmt: skip


@pytest.mark.slow
def test_recipe_runs_end_to_end_in_small(tmp_path, capsys):
    recipe.main(["--output", str(tmp_path), "--scale", "0.001", "--images", "20"])
    table = json.loads((tmp_path / "evaluation.json").read_text())
    assert set(table) == set(json.loads((tiny.CHECKPOINT / "evaluation.json").read_text()))
    assert "| test handwriting |" in capsys.readouterr().out
    StableDiffusionPipeline.from_pretrained(tmp_path, local_files_only=True)


def test_judges_of_edits_ask_for_the_digit_and_both_colours():
    edits = world.draw_edits(100, "test", 5)
    judges = tiny.load_judge(), tiny.load_second_judge()

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
def test_tiny_sd3_is_at_most_12_megabytes_and_holds_no_pickle():
    files = [path for path in tiny.CHECKPOINTS["tiny-sd3"].rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) <= 12e6
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".txt", ".md"}


def test_tiny_sd3_is_a_plain_pipeline_that_obeys_prompts():
    pipeline = tiny.load_tiny_sd3()
    assert type(pipeline) is StableDiffusion3Pipeline
    assert pipeline.transformer.dtype == pipeline.vae.dtype == torch.float32
    check_prompts_decide("tiny-sd3", pipeline, recipe_sd3.GUIDANCE_SCALE, max_sequence_length=1)


def test_tiny_sd3_has_the_autoencoder_of_tiny_sd():
    ours, theirs = tiny.load_tiny_sd3().vae, tiny.load_tiny_sd().vae
    for (name, weight), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(weight, other), name


@pytest.mark.slow
def test_recipe_of_tiny_sd3_runs_end_to_end_in_small(tmp_path, capsys):
    recipe_sd3.main(["--output", str(tmp_path), "--scale", "0.0005", "--images", "10"])
    table = json.loads((tmp_path / "evaluation.json").read_text())
    assert set(table) == set(json.loads((tiny.CHECKPOINTS["tiny-sd3"] / "evaluation.json").read_text()))
    assert "| generated |" in capsys.readouterr().out


def test_no_folder_of_the_machine_that_made_them_is_in_the_checkpoints():
    for folder in tiny.CHECKPOINTS.values():
        for path in folder.rglob("*.json"):
            if "tokenizer" not in path.parent.name:
                assert '": "/' not in path.read_text(), path

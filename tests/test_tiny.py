"""The shipped checkpoints, their classifiers and their recipes, whose stages go on."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline

from benchmarks import recipes
from benchmarks.tiny import recipe, recipe_sd3
from benchmarks.zoo import recipe as zoo_recipe
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.worlds import animals, digits, load_tiny_sd, load_tiny_sd3, load_tiny_zoo
from ddpo_lessons.worlds.digits import accuracy, judge_edits, score_prompts
from ddpo_lessons.worlds.judges import named

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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny-sd", ["a", "foggy", "red", "three", "on", "a", "blue", "background"]),
        ("tiny-zoo", zoo_recipe.WORDS),
    ],
)
def test_words_of_the_world_are_one_token_each_and_other_text_is_spelled(name, words):
    tokenizer = LOAD[name]().tokenizer
    assert len(tokenizer(" ".join(words[:10])).input_ids) == min(len(words), 10) + 2
    assert {len(tokenizer(word).input_ids) for word in words} == {3}
    assert len(tokenizer("xyz").input_ids) == len("xyz") + 2
    assert tokenizer.decode(tokenizer("zebra").input_ids, skip_special_tokens=True).strip() == "zebra"


def shares_of(name: str) -> dict[str, float]:
    """Draw 40 pictures of seen combinations by a checkpoint; return what is right in them."""
    pipeline = LOAD[name]()
    if name == "tiny-zoo":
        wanted = animals.draw_images(40, 11, animals.SEEN)
        images = recipes.generate(pipeline, wanted.prompts, 0, zoo_recipe.GUIDANCE_SCALE)
        hits = animals.verdicts(images, wanted.labels, animals.Judge.load(), animals.SecondJudge.load())
        return {zoo_recipe.titled(part): right.float().mean().item() for part, right in hits.items()}
    module, more = (recipe, {}) if name == "tiny-sd" else (recipe_sd3, {"max_sequence_length": 1})
    asked = digits.Judge.load(), digits.SEEN, 40, module.GUIDANCE_SCALE
    return recipe.measure_prompts(pipeline, *asked, **more)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOAD)
def test_text_decides_what_is_drawn(name):
    """40 pictures against the published 1,000: three standard errors."""
    right = shares_of(name)
    published = json.loads((CHECKPOINTS[name] / "evaluation.json").read_text())
    for part, share in published["generated, seen combinations"].items():
        assert right[part] == pytest.approx(share, abs=3 * (share * (1 - share) / 40) ** 0.5 + 0.03)


# ------------------------------------------------------------------------------------------- tiny-sd
def test_judge_reads_clean_test_handwriting_and_not_what_it_never_saw():
    judge, reward_model = digits.Judge.load(), digits.RewardModel.load()
    clean, foggy = (digits.draw_images(200, "test", 0, damage) for damage in (None, "foggy"))
    assert accuracy(judge, clean.images, clean.digits) > 0.97
    assert accuracy(judge, foggy.images, foggy.digits) < 0.75
    assert accuracy(reward_model, foggy.images, foggy.digits) > 0.9


def test_reward_model_is_surer_the_less_damage_there_is():
    reward_model = digits.RewardModel.load()
    means = []
    for severity in (1, 3, 5):
        pictures = digits.draw_images(100, "test", 0, "faded", severity)
        log_probs = reward_model(pictures.images).log_softmax(1).gather(1, pictures.digits[:, None])
        means.append(log_probs.mean().item())
    assert means == sorted(means, reverse=True)


def test_targets_spread_the_rest_evenly():
    pictures = digits.draw_images(3, "train", 0, "foggy", 2)
    wanted = recipe.targets(pictures, recipe.LEGIBILITY)
    assert torch.allclose(wanted.sum(1), torch.ones(3))
    assert wanted[0, pictures.digits[0]].item() == pytest.approx(0.66)
    assert wanted[0].sort().values[0].item() == pytest.approx(0.34 / 9)


def test_generated_scores_by_hand():
    pictures = digits.draw_images(2, "test", 4, pairs=((3, "red"),))

    class ReadsThree(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.eye(10)[[3] * len(images)]

    told = [pictures.descriptions[0], digits.Description(3, "white", pictures.descriptions[1].background)]
    assert score_prompts(ReadsThree(), pictures.images, told) == {
        "digit": 1.0, "ink": 0.5, "background": 1.0, "all three": 0.5,
    }  # fmt: skip


def test_judges_of_edits_ask_for_the_digit_and_both_colors():
    edits = digits.draw_edits(100, "test", 5)
    judges = digits.Judge.load(), digits.SecondJudge.load()

    def shares(images: torch.Tensor) -> dict[str, float]:
        found = judge_edits(images, edits, *judges)
        return {name: hits.float().mean().item() for name, hits in found.items()}

    done = shares(edits.targets)
    assert done["colors"] == 1
    assert done["both"] == done["digit"] > 0.97
    assert done["second_judge"] > 0.95
    untouched = shares(edits.inputs.images)
    assert untouched["digit"] > 0.97
    assert untouched["colors"] == untouched["both"] == untouched["second_judge"] == 0
    other_digits = shares(edits.targets.roll(1, dims=0))  # somebody else's picture
    assert other_digits["digit"] < 0.3
    assert other_digits["both"] < 0.1


# ------------------------------------------------------------------------------------------- tiny-sd3
def test_tiny_sd3_has_the_autoencoder_of_tiny_sd():
    ours, theirs = load_tiny_sd3().vae, load_tiny_sd().vae
    for (name, weight), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(weight, other), name


# ------------------------------------------------------------------------------------------- tiny-zoo
def test_neighbours_are_merged_from_the_left():
    assert zoo_recipe.merge(["o", "o", "o", "g"], "o", "o") == ["oo", "o", "g"]
    assert zoo_recipe.merge(["a", "n", "t"], "n", "t") == ["a", "nt"]


@pytest.mark.parametrize("load", [animals.RewardModel.load, animals.Judge.load, animals.SecondJudge.load])
def test_classifiers_name_what_held_out_pictures_show(load):
    pictures = animals.draw_images(400, 123_456_789)
    assert (named(load(), pictures.images) == pictures.labels).float().mean(dim=0).min() >= 0.97


def test_a_stage_that_was_stopped_ends_where_one_that_was_not_does(tmp_path):
    def trained(folder: str, *stops: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)

        def loss_of(step: int) -> torch.Tensor:
            if step in stops and not (tmp_path / folder / "stage.stopped").exists():
                (tmp_path / folder / "stage.stopped").touch()
                raise KeyboardInterrupt
            torch.manual_seed(step)
            return model(torch.randn(4, 3)).square().mean()

        (tmp_path / folder).mkdir(exist_ok=True)
        recipes.train("stage", model, loss_of, 6, 1e-2, ema_decay=0.9, folder=tmp_path / folder)
        return model.weight.detach()

    whole = trained("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "SAVE_SECONDS", -1)  # saves after every step
        with pytest.raises(KeyboardInterrupt):
            trained("parts", 4)
        assert torch.load(tmp_path / "parts" / "stage.pt", weights_only=True)["step"] == 4
        assert torch.equal(trained("parts", 4), whole)

"""The shipped checkpoint of the world of animals, its classifiers, and stages that go on."""

import json

import pytest
import torch

from benchmarks import recipes
from benchmarks.zoo import recipe
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.worlds import animals, load_tiny_zoo
from ddpo_lessons.worlds.animals import verdicts
from ddpo_lessons.worlds.judges import named


def published() -> dict[str, dict[str, float]]:
    return json.loads((CHECKPOINTS["tiny-zoo"] / "evaluation.json").read_text())


def test_words_of_the_world_are_one_token_each_and_other_text_is_spelt():
    tokenizer = load_tiny_zoo().tokenizer
    for word in recipe.WORDS:
        assert len(tokenizer(word).input_ids) == 3, word
    prompt = "a hedgehog by Twemoji on an orange background"
    assert len(tokenizer(prompt).input_ids) == len(prompt.split()) + 2
    assert len(tokenizer("xyz").input_ids) > 3


def test_neighbours_are_merged_from_the_left():
    assert recipe.merge(["o", "o", "o", "g"], "o", "o") == ["oo", "o", "g"]
    assert recipe.merge(["a", "n", "t"], "n", "t") == ["a", "nt"]


@pytest.mark.slow
def test_text_decides_what_is_drawn():
    wanted = animals.draw_pictures(40, 11, animals.SEEN)
    images = recipes.generate(load_tiny_zoo(), wanted.prompts, 0, recipe.GUIDANCE_SCALE)
    right = verdicts(images, wanted.labels, animals.Judge.load(), animals.SecondJudge.load())
    for name, share in published()["generated, seen combinations"].items():
        # 40 pictures against 1,000: three standard errors
        tolerance = 3 * (share * (1 - share) / 40) ** 0.5 + 0.03
        assert right[name.replace(" ", "_")].float().mean().item() == pytest.approx(share, abs=tolerance)


@pytest.mark.parametrize("load", [animals.RewardModel.load, animals.Judge.load, animals.SecondJudge.load])
def test_classifiers_name_what_held_out_pictures_show(load):
    pictures = animals.draw_pictures(400, 123_456_789)
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

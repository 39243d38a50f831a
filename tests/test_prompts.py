import json
import re
from collections import Counter

import pytest

from benchmarks.tiny.requests import edit_requests
from ddpo_lessons import named_prompts
from ddpo_lessons.data import prompts
from ddpo_lessons.worlds import digits
from ddpo_lessons.worlds.judges import nearest


def test_same_seed_same_sequence_and_other_seed_another():
    first, again, other = (prompts.animals(seed) for seed in (1, 1, 2))
    sequence = [first() for _ in range(30)]
    assert sequence == [again() for _ in range(30)]
    assert sequence != [other() for _ in range(30)]


@pytest.mark.parametrize("name", sorted(named_prompts.PROMPTS))
def test_resume_draws_what_the_uninterrupted_run_draws(name):
    whole = named_prompts.get_prompts(name, seed=7)
    expected = [whole() for _ in range(25)]
    stopped = named_prompts.get_prompts(name, seed=7)
    for _ in range(10):
        stopped()
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = named_prompts.get_prompts(name, seed=99)
    resumed.load_state_dict(state)
    assert [resumed() for _ in range(15)] == expected[10:]


def test_metadata_of_one_draw_is_not_shared_with_another(tmp_path):
    (tmp_path / "p.txt").write_text("only\n")
    sampler = prompts.from_file(tmp_path / "p.txt", seed=0)
    _, first = sampler()
    first["image"] = "mine"
    assert sampler()[1] == {}


def test_a_foreign_state_is_refused():
    with pytest.raises(ValueError, match=r"\['rng'\].*state_dict"):
        prompts.animals(0).load_state_dict({"rng": 3})


@pytest.mark.parametrize("split", ["seen", "left_out", "all"])
def test_digit_world_covers_its_split_and_says_what_the_metadata_says(split):
    sampler = named_prompts.digit_world_prompts(3, split)
    drawn = [sampler() for _ in range(2000)]
    pairs = {(metadata["digit"], metadata["ink"]) for _, metadata in drawn}
    left_out = set(digits.LEFT_OUT)
    assert len(pairs) == {"seen": 50, "left_out": 10, "all": 60}[split]
    assert len(pairs & left_out) == {"seen": 0, "left_out": 10, "all": 10}[split]
    for prompt, metadata in drawn[:200]:
        said = digits.parse_prompt(prompt)
        assert metadata == {"digit": said.digit, "ink": said.ink, "background": said.background}
        assert said.ink != said.background


def test_digit_world_backgrounds_are_uniform():
    sampler = named_prompts.digit_world_prompts(0)
    backgrounds = Counter(sampler()[1]["background"] for _ in range(3000))
    # Every ink appears in about a sixth of the pairs, hence so does every background.
    assert set(backgrounds) == set(digits.COLORS)
    assert max(backgrounds.values()) < 1.4 * min(backgrounds.values())


def test_another_split_is_refused():
    with pytest.raises(ValueError, match=r"split='test'.*seen.*left_out.*all"):
        named_prompts.digit_world_prompts(0, split="test")


def test_animals_are_45_and_carry_the_right_article():
    sampler = prompts.animals(0)
    drawn = dict(sampler() for _ in range(2000))  # prompt -> metadata
    assert len(set(prompts.ANIMALS)) == len(drawn) == 45
    assert drawn["an ant"] == {"label": "ant"}
    assert drawn["a cat"] == {"label": "cat"}
    assert all(re.fullmatch(r"an [aeiou]\w*|a [^aeiou]\w*", prompt) for prompt in drawn)


def test_activities_combine_every_animal_with_three_activities():
    sampler = prompts.activities(0)
    drawn = dict(sampler() for _ in range(4000))
    assert len(drawn) == 45 * 3
    assert drawn["an ant riding a bike"] == {"label": "ant", "activity": "riding a bike"}


def test_from_file_reads_one_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffa café at night\r\n\r\n  a red door  \r\n".encode())  # as Windows' editors save
    sampler = prompts.from_file(path, seed=0)
    assert {sampler()[0] for _ in range(50)} == {"a café at night", "a red door"}


@pytest.mark.parametrize(
    "text",
    [
        '["a cat", {"text": "a dog, asleep"}]',
        '[\n {"prompt": "a cat"},\n {"prompt": "a dog, asleep", "text": "no"}\n]\n',
        '{"prompt": "a cat"}\n\n{"prompt": "a dog, asleep"}\n',
        '"a cat"\n"a dog, asleep"\n',
        'prompt,id\na cat,1\n"a dog, asleep",2\n',
        "id\tText\n1\ta cat\n2\ta dog, asleep",
        'prompt\na cat\n"a dog, asleep"\n',
        "a cat\na dog, asleep",
    ],
)
@pytest.mark.parametrize("name", ["prompts.txt", "prompts"])
def test_a_file_is_known_by_what_it_holds(text, name, tmp_path):
    (tmp_path / name).write_text(text)
    assert prompts.read_prompts(tmp_path / name) == ["a cat", "a dog, asleep"]


@pytest.mark.parametrize(
    "text", ["[masterpiece] a cat", "a cat, prompt", '{"a" cat}', '"a" cat', "a dog\ntext"]
)
def test_a_line_that_looks_like_a_table_is_text(text, tmp_path):
    (tmp_path / "p.txt").write_text(text)
    assert prompts.read_prompts(tmp_path / "p.txt") == text.splitlines()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("absent.txt", None, r"absent\.txt.*not a file"),
        ("p.txt", "\n \n", r"p\.txt holds no prompt"),
        ("p.txt", "café", r"p\.txt is not UTF-8 text \(byte 3\): save it as UTF-8"),
        ("p.json", '["a cat"', "neither JSON such as"),
        ("p.csv", "", "p.csv begins with '', which is neither JSON"),
        ("p.csv", "sentence,id\na cat,1\n", "p.csv begins with 'sentence,id', which is neither JSON"),
        ("p.json", '["a cat", 3]', r"entry 2 is 3: write"),
        ("p.jsonl", '{"prompt": "a cat"}\n{"caption": "a dog"}', r"entry 2 is \{'caption'"),
        ("p.json", '{\n"prompts": ["a cat"]\n}', "entry 1 is"),
        ("p.csv", "id,prompt\n1,a cat\n2\n", "entry 2 is"),
        ("p.json", "[]", "holds no prompt"),
        ("p.csv", "prompt\n", "holds no prompt"),
    ],
)
def test_a_file_without_prompts_is_refused(name, text, says, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=says):
        prompts.read_prompts(tmp_path / name)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"prompts='cats'.*activities, animals, digit_world"):
        named_prompts.get_prompts("cats", seed=0)


def test_edit_requests_name_colors_and_leave_the_digit_to_the_picture():
    ask = edit_requests(4)
    drawn = [ask() for _ in range(20)]
    for prompt, image, metadata in drawn:
        assert digits.parse_prompt(prompt).digit is None
        assert metadata["image"] is image
        ink, background = (nearest(c, digits.COLORS) for c in digits.measure_colors(metadata["target"][None]))
        wanted = digits.Description(None, digits.COLOR_NAMES[ink], digits.COLOR_NAMES[background])
        assert digits.parse_prompt(prompt) == wanted
    again = edit_requests(4)
    again.load_state_dict({"seed": 4, "drawn": 10})
    assert again()[0] == drawn[10][0]

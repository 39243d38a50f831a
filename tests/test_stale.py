"""What pages say of defaults, of the number of lessons and of families is what the code has."""

import re
from pathlib import Path

import pytest

from ddpo_lessons.app.presets import PRESETS
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.families import FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LESSONS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
NUMBERS = ["eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen"]
# What pages call the pipelines that can be trained.
NAMES = {
    "StableDiffusionPipeline": r"Stable Diffusion 1",
    "StableDiffusionXLPipeline": r"\bXL\b",
    "StableDiffusion3Pipeline": r"\b3\b",
    "FluxPipeline": r"FLUX\.1",
    "FluxKontextPipeline": r"Kontext",
}


def text(path: Path) -> str:
    return " ".join(path.read_text("utf-8").split())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_number_of_lessons(path):
    said = re.findall(rf"\b({'|'.join(NUMBERS)}|\d+) notebooks\b", text(path), re.IGNORECASE)
    assert {NUMBERS.index(n.lower()) + 8 if n.isalpha() else int(n) for n in said} <= {len(LESSONS)}


def test_every_lesson_has_its_card_on_the_front_page():
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert re.findall(r":link: \.\./notebooks/(\w+)", index) == [path.stem for path in LESSONS]


def test_how_often_a_run_is_saved():
    every, tiny = DDPOConfig().save_freq, PRESETS["digit_world"].config["save_freq"]
    assert (every, tiny) == (1, 10)
    says = "without `--save-freq` it is every epoch, and with tiny-sd every tenth"
    assert says in text(ROOT / "docs" / "howto" / "resume.md")


def test_defaults_that_are_numbers():
    """Wherever a page says "the default of `--flag` is N"."""
    found = [
        (flag.replace("-", "_"), number)
        for path in PAGES
        for flag, number in re.findall(r"default of `--([\w-]+)` is (\d[\d.e-]*\d|\d)", text(path))
    ]
    assert "train_clip_range" in dict(found)
    assert all(float(number) == DDPOConfig().to_dict()[name] for name, number in found)


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("README.md", r"Models: (.*?)\. \*\*Not for\*\* (.*?), which are refused"),
        (
            "docs/howto/troubleshooting.md",
            r"that this package does not train` \| (?P<no>.*?) \| (?P<yes>.*?);",
        ),
        ("docs/howto/your-card.md", r"## Other models (.*?) and their fine-tunings"),
    ],
)
def test_families_are_named_where_models_are(page, sentence):
    """Every family is among those that are trained, and none among those that are refused."""
    assert {name for name in FAMILIES if "Img2Img" not in name} == NAMES.keys()
    found = re.search(sentence, text(ROOT / page))
    groups = found.groupdict() or dict(zip(("yes", "no"), (*found.groups(), ""), strict=False))
    for name in NAMES.values():
        assert re.search(name, groups["yes"]), name
    assert not re.search(r"Stable Diffusion|FLUX\.1|Kontext", groups["no"])

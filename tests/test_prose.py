"""The prose of lessons and of the most-read pages, measured: a hint for writers, never the goal."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = ["README.md", "docs/index.md", "docs/which-algorithm.md", "docs/beside-peers.md"]
PAGES += ["docs/howto/your-card.md", "docs/howto/own-reward.md"]

LINKING = r"because|since|for example|for instance|however|instead|therefore|although|whereas|suppose"
LINKING += r"|in contrast|so that"
# Words of our own where the field has a term, and how often a text may use them.
HOUSE = {
    r"pictures?": 3,  # "the big picture"
    r"purses?|pencils?|bells?|leash|desks?|personas?|raters?|rooms": 0,
    r"anew|mended|to the bit|on paper|what (?:goes|went) in": 0,
    r"in silence": 2,  # a lesson's title
    r"praise[sd]?|blame[sd]?": 2,  # as an image, once, beside the term
    r"(?<!graphics )cards?": 3,  # things on a card
    r"lagging|knobs?|best of (?:n|\$n\$|\d+)": 0,
    r"(?:is|are|be|been) told|right are|shares? (?:of|left)": 0,
    r"grounds?(?! truth)": 2,
}


def prose(path: Path) -> str:
    """Return the text of a file without code, formulas, tables, figures, HTML and targets of links."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    text = re.sub(r"^ *(`{3,}|:{3,}|~{3,}).*?^ *\1.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?: {4}| *\||#|:).*$|<!--.*?-->|</?[a-z][^>\n]*>", "", text, flags=re.MULTILINE)
    text = re.sub(r"\$\$.+?\$\$|\$[^$\n]+\$|`[^`]+`", "X", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)  # figures with their alternative texts
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(text: str) -> list[str]:
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text)
    found = [part for block in blocks for part in re.split(r"(?<=[.!?])[*_)\]”]*\s+", block)]
    return [part for part in found if len(words(part)) > 2]


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-zÀ-ÿ’'-]*[A-Za-zÀ-ÿ][A-Za-zÀ-ÿ’'-]*", text)


def numbers(sentence: str) -> list[str]:
    """Return the numbers that a reader has to compare, without those of lessons, sections and names."""
    labels = "lessons?|sections?|exercises?|figures?|formulas?|equations?|tables?|algorithms?|lines?|arxiv"
    sentence = re.sub(rf"\b(?:{labels})(?:,? (?:[\d.]+|and|to|or))+", "", sentence, flags=re.IGNORECASE)
    sentence = re.sub(r"\d+\.\d+\.\d+\S*", "", sentence)  # a version
    return re.findall(r"(?<![\w.-])\d[\d,.]*", sentence)


@pytest.fixture(params=[*(path.relative_to(ROOT).as_posix() for path in LESSONS), *PAGES])
def text(request):
    return prose(ROOT / request.param)


def test_sentences_are_linked(text):
    assert len(re.findall(rf"\b(?:{LINKING})\b", text, re.IGNORECASE)) >= 5 / 1000 * len(words(text))


def test_words_are_the_fields(text):
    found = {word: re.findall(rf"\b(?:{word})\b", text, re.IGNORECASE) for word in HOUSE}
    assert {word: len(hits) for word, hits in found.items() if len(hits) > HOUSE[word]} == {}


def test_values_stand_in_tables(text):
    crowded = [sentence for sentence in sentences(text) if len(numbers(sentence)) > 4]
    assert len(crowded) <= 3, crowded  # such as the expected values of an exercise


def test_sentences_are_short(text):
    parts = sentences(text)
    assert sum(len(words(part)) for part in parts) / len(parts) <= 22


def raw(path: Path) -> str:
    text = path.read_text("utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def test_a_lesson_is_called_by_its_title():
    """Wherever a link, a card or a figure names a lesson: by its title up to the colon."""
    found = {path: re.search(r"^# (\d\d · [^:\n]+)", raw(path), re.MULTILINE) for path in LESSONS}
    titles = {match[1] for match in found.values() if match}
    assert len(titles) == len(LESSONS)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *LESSONS]:
        names = re.findall(r'(?:\[|alt="|grid-item-card\} )(\d\d · [^\]"\n]*)', raw(path))
        assert set(names) <= titles, path.name

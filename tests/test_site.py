"""The site is built without a warning, and all that its pages point to is there, without a network."""

import pkgutil
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from bs4 import BeautifulSoup, Tag
from PIL import Image

import ddpo_lessons

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # building waits for one core
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that `make site` would write."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs"]
    command += ["-d", str(folder / "doctrees"), ".", str(folder / "html")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder / "html"


@cache
def page(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text("utf-8"), "html.parser")


@cache
def anchors(path: Path) -> set[str]:
    """What links can lead to within a page."""
    return {str(tag["id"]) for tag in page(path).find_all(id=True)}


def article(path: Path) -> Tag:
    """A page without menus."""
    found = page(path).find("article")
    assert isinstance(found, Tag)
    return found


def addresses(path: Path) -> list[str]:
    """Everything that a page links to or loads."""
    tags = page(path).find_all(["a", "link", "script", "img", "source"])
    found = [tag.get("href") or tag.get("src") for tag in tags]
    return [address for address in found if isinstance(address, str)]


def is_broken(path: Path, address: str) -> bool:
    """Say whether a page's link inside the site leads nowhere."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return False
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return True
    anchored = parts.fragment and target.suffix == ".html"
    return bool(anchored) and unquote(parts.fragment) not in anchors(target)


def dump(address: str) -> BeautifulSoup:
    """Open a page in a browser, let its scripts run, and return what has become of it."""
    assert BROWSER
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    run = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return BeautifulSoup(run.stdout, "html.parser")


def test_no_link_picture_or_anchor_is_broken(site):
    pages = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)
    assert len(pages) > 30
    broken = [
        f"{path.relative_to(site)}: {address}"
        for path in pages
        for address in addresses(path)
        if address != "#" and is_broken(path, address)
    ]
    assert broken == []
    assert is_broken(pages[0], "no-such-page.html")
    assert is_broken(site / "docs" / "index.html", "glossary.html#no-such-section")


def test_pages_load_nothing_from_a_network(site):
    for path in site.rglob("*.html"):
        loaded = page(path).find_all(["script", "img", "link"])
        remote = [str(tag) for tag in loaded if urlsplit(tag.get("src") or tag.get("href") or "").netloc]
        assert remote == [], path.name
        assert page(path).find("a", href=re.compile(r"^(?!https?:).*\.(ipynb|md)")) is None, path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_lesson_shows_all_its_figures_and_folds_its_solutions(site, path):
    import nbformat  # takes a second, also where this file is only collected

    cells = nbformat.read(path, as_version=4).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    outputs = [output for cell in cells for output in cell.get("outputs", []) if "data" in output]
    figures = [output for output in outputs if any(kind.startswith("image/") for kind in output.data)]
    lesson = article(site / "notebooks" / f"{path.stem}.html")
    pictures = lesson.select('img:not([id^="_anim"], .only-dark)')  # without the frame of a slider
    assert len(pictures) == len(re.findall(r"!\[", prose)) + len(figures)
    closed = [cell for cell in cells if {"solution", "hide-input"} & {*cell.metadata.get("tags", [])}]
    folded = lesson.select("details.hide")
    assert len(folded) == len(closed) >= 1 + 3  # the set-up and solutions
    assert not any(details.has_attr("open") for details in folded)
    titles = [cell.source.partition("\n")[0].removeprefix("# @title ").replace("`", "") for cell in closed]
    bars = [details.summary.p.get_text() for details in folded]
    assert [bar.lower() for bar in bars] == [f"show: {title.lower()}" for title in titles]
    assert bars[0] == "Show: set-up"


def test_printed_tables_are_marked(site):
    """A phone wraps the lines of outputs, but not of tables."""
    outputs = article(site / "notebooks" / "01_batching.html").select("div.output.stream")
    tables = [output.get_text() for output in outputs if "columns" in output["class"]]
    assert any("sample  last latent  reward" in table for table in tables)
    assert 0 < len(tables) < len(outputs)


def test_dark_pages_invert_plots_and_leave_images_alone(site):
    lesson = article(site / "notebooks" / "04_ppo_clipping.html")
    assert lesson.select_one('img.plot[src$="04-answer.svg"]')
    assert lesson.select_one('img.plot[src$=".png"]')
    assert lesson.select_one('img.only-light[src$="04-clipping.svg"] + img.only-dark[src$=".svg"]')
    front = article(site / "docs" / "index.html")
    light, dark = front.select('p img[src*="demo-before-after"]')
    assert (light["class"], dark["class"]) == (["only-light"], ["only-dark"])
    pixels, inverted = (
        np.asarray(Image.open(site / "docs" / tag["src"]).convert("RGB")) for tag in (light, dark)
    )
    same = (pixels == inverted).all(axis=-1).mean()
    assert 0.5 < same < 0.8  # its images, without paper and text
    assert pixels[0, 0].min() > 240
    assert inverted[0, 0].max() < 30
    assert not article(site / "docs" / "gallery.html").select('img[src*="DDPO_00"]:is(.plot, .only-light)')


def test_reference_has_every_module_of_the_package(site):
    modules = pkgutil.walk_packages(ddpo_lessons.__path__, "ddpo_lessons.")
    described = set().union(*(anchors(path) for path in site.glob("docs/api/*.html")))
    only_rooms = {f"ddpo_lessons.{name}" for name in ("cli", "data", "training", "text")}
    missing = {module.name for module in modules} - {name.removeprefix("module-") for name in described}
    assert missing == only_rooms | {"ddpo_lessons.cli.__main__"}
    assert "ddpo_lessons.ddim.DDIMSchedule" in described


def test_reference_shows_the_flags_types_alone(site):
    text = article(site / "docs" / "api" / "cli.html").get_text()
    assert "algorithm: Literal['branching', 'ddpo'] = 'branching'" in text
    assert not re.search("ArgConfig|MISSING", text)  # of tyro, for `--help`


def test_no_formula_is_left_as_text(site):
    no_prose = "code, pre, script, style, .math"
    for path in [*site.glob("notebooks/*.html"), *site.glob("docs/**/*.html")]:
        texts = article(path).find_all(string=re.compile(r"\$"))
        assert [text for text in texts if not text.parent.css.closest(no_prose)] == [], path.name


@in_a_browser
def test_every_formula_is_one_that_mathjax_can_set(site):
    """All formulas of the site on one page, with one that is wrong."""
    formulas = {str(tag) for path in site.rglob("*.html") for tag in page(path).select(".math")}
    assert len(formulas) > 200
    sheet = site / "notebooks" / "formulas.html"
    strict = "<script>MathJax = {tex: {packages: {'[-]': ['noundefined', 'noerrors']}}}</script>"
    script = '<script src="../_static/tex-svg-full.js"></script>'
    wrong = r'<span class="math">\(\nosuchmacro\)</span>'
    sheet.write_text("<meta charset=utf-8>" + strict + script + "\n".join(formulas) + wrong, "utf-8")
    shown = dump(sheet.as_uri())
    assert len(shown.select("mjx-container")) == len(formulas) + 1
    errors = {tag["data-mjx-error"] for tag in shown.select("[data-mjx-error]")}
    assert errors == {r"Undefined control sequence \nosuchmacro"}


@in_a_browser
def test_search_finds_from_a_file_system(site):
    found = dump((site / "search.html").as_uri() + "?q=clipped_surrogate")
    links = [str(tag["href"]) for tag in found.select("#search-results li a")]
    assert any("api/lessons.html" in link for link in links), links

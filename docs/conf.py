"""How `make site` builds the pages. The repository is the source folder: its links are the site's."""

from __future__ import annotations

import re
import sys
from dataclasses import is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, get_type_hints

from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ddpo_lessons.cli import options as flags  # noqa: E402
from images import dark  # noqa: E402

project = "ddpo-lessons"
copyright = "ddpo-lessons, MIT license"
release = metadata.version("ddpo-lessons")
root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/*", "benchmarks/*.md", "tests/torture/*.md"]
exclude_patterns = [".*", "build", "dist", "**/.ipynb_checkpoints"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]

nb_execution_mode = "off"  # what is committed is shown
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_dmath_allow_labels = False  # "$$…$$ (text)" is a formula and a text
myst_dmath_double_inline = True  # "$$…$$" below a line of text, as Jupyter takes it
myst_heading_anchors = 4  # as GitHub's
copybutton_selector = "div.highlight:not(.output *) pre"

# MathJax draws SVG: one file, which needs no network and no fonts, and so works from a file system.
_MATHJAX = "sphinx-mathjax-offline/static/mathjax/tex-svg-full.js"
html_static_path = ["_static", str(metadata.distribution("sphinx-mathjax-offline").locate_file(_MATHJAX))]
mathjax_path = "tex-svg-full.js"

autodoc_default_options = {"members": True, "ignore-module-all": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True  # attributes as a list
suppress_warnings = ["ref.python"]  # of a name that two modules have, as compat's DDPOConfig
default_role = "py:obj"  # docstrings have Markdown's single backticks

html_theme = "furo"
pygments_dark_style = "monokai"  # furo's own underlines modules as if they were links
html_theme_options = {"dark_css_variables": {"figure-filter": "brightness(0.8)", "plot-filter": dark.FILTER}}
html_title = "ddpo-lessons"
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_extra_path = ["_root"]
html_show_sphinx = False
html_use_index = html_domain_indices = False  # no page leads to them
html_copy_source = False


def show_plain_types(app: Sphinx) -> None:
    """Leave out of the flags' types what they hold for `--help`."""
    for shown in filter(is_dataclass, vars(flags).values()):
        plain = get_type_hints(shown)
        for annotated in (shown.__annotations__, shown.__init__.__annotations__):
            annotated |= {name: plain[name] for name in annotated if name in plain}


def link_modules(app: Sphinx, name: str, source: list[str]) -> None:
    """Lead links to a module's file to its place in the reference."""

    def module(match: re.Match[str]) -> str:
        return f"](#{match[1].replace('/', '.')})"

    source[0] = re.sub(r"\]\((?:\.\./)+(ddpo_lessons/[\w/]+?)(?:/__init__)?\.py\)", module, source[0])


def skip_member(app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, of which Python says nothing but their number."""
    return True if str(getattr(member, "__doc__", "")).startswith("Alias for field number") else None


def keep_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    r"""Put a line of nothing, "\\", before an attribute's docstring, where napoleon looks for its type."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "\\")


def darken_figures(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Mark what a dark page can invert, and give it a copy of what has images and text."""
    folder = app.doctreedir / "dark"
    folder.mkdir(exist_ok=True)
    for node in [*doctree.findall(nodes.image)]:
        path = ROOT / node["uri"]
        copy = folder / path.name
        if path.suffix == ".svg":
            text = path.read_text("utf-8")
            if "<image" in text:
                copy.write_text(dark.dark_svg(text), "utf-8")
        else:
            pixels = dark.read_pixels(path)
            if (pixels[0] != pixels[0, 0]).any():  # no paper
                continue
            if (inverted := dark.dark_png(pixels)) is not None:
                Image.fromarray(inverted).save(copy)
        if copy.exists():
            app.env.images.add_file(name, str(copy))
            twin = node.deepcopy()
            twin["uri"], twin["candidates"] = str(copy), {"*": str(copy)}
            twin["classes"] = [*node["classes"], "only-dark"]
            node["classes"] += ["only-light"]
            node.parent.insert(node.parent.index(node) + 1, twin)
        else:
            node["classes"] += ["plot"]


def name_folded_cells(app: Sphinx, doctree: nodes.document) -> None:
    """Put the title of a folded cell, its first line, on the bar that opens it."""
    for cell in doctree.findall(nodes.container):
        is_folded = cell.get("nb_element") == "cell_code" and cell.get("hide_mode")
        if is_folded and (match := re.match(r"# @title (.*)", cell.astext())):
            title = match[1].replace("`", "")
            if re.match(r"[A-Z][a-z'-]*\b", title):  # a word, and no name such as DDPO
                title = title[0].lower() + title[1:]
            cell["prompt_show"], cell["prompt_hide"] = f"Show: {title}", f"Hide: {title}"


def keep_columns(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Mark printed tables: a narrow page lets them scroll, and wraps the lines of all other outputs."""
    for block in doctree.findall(nodes.literal_block):
        if "output" in block["classes"] and len(re.findall(r"\S {2,}\S", block.astext())) > 1:
            block["classes"] += ["columns"]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", show_plain_types)
    app.connect("doctree-read", name_folded_cells)
    app.connect("doctree-resolved", keep_columns)
    app.connect("doctree-resolved", darken_figures)
    app.connect("source-read", link_modules)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon

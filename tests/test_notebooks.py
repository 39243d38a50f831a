"""The notebooks as files: executed top to bottom, built alike, and equal to the package where they say so."""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SETUP = """\
# Installs the package where it is missing, as on Colab; does nothing elsewhere.
import importlib.util

if importlib.util.find_spec("ddpo_lessons") is None:
    %pip install -q "ddpo-lessons[notebooks]"

from ddpo_lessons.app.profiles import pick_profile

print(f"profile: {pick_profile()}")"""
CHECKED = "# NBVAL_CHECK_OUTPUT"

every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def prose(path: Path) -> str:
    return "\n\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")


def texts(cell: NotebookNode) -> list[str]:
    """Everything that a cell printed or returned as text."""
    streams = [output.text for output in cell.outputs if output.output_type == "stream"]
    return streams + [output.data.get("text/plain", "") for output in cell.outputs if "data" in output]


def lines_of_code(cell: NotebookNode) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in cell.source.splitlines())


def test_lessons_are_numbered_without_a_gap():
    assert [path.name[:2] for path in PATHS] == [f"{n:02d}" for n in range(1, len(PATHS) + 1)]
    assert PATHS


@every_notebook
def test_every_cell_was_executed_once_in_order(path):
    """A cell without its count is never compared by nbval, silently."""
    nbformat.validate(read(path))
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))
    assert not [o for cell in code_cells(path) for o in cell.outputs if o.output_type == "error"]


@every_notebook
def test_no_personal_kernel_no_path_no_address_and_a_modest_size(path):
    assert read(path).metadata.kernelspec.name == "python3"
    said = "\n".join(text for cell in code_cells(path) for text in texts(cell))
    assert re.findall(r"0x[0-9a-f]{6,}|/(?:home|root|work|tmp|Users|content)/\S*|site-packages", said) == []
    assert path.stat().st_size < 700_000


@every_notebook
def test_opening_and_closing_cells(path):
    cells = read(path).cells
    opening, closing = cells[0].source, cells[-1].source
    assert opening.startswith(f"# {path.name[:2]} · ")
    for part in ("You will be able to", "You need", "Running time", "Device"):
        assert f"**{part}" in opening, part
    assert closing.startswith("## What you learned")
    assert "## Sources" in prose(path)
    assert re.search(r"^\| symbol \| in code \| shape \| meaning \|$", prose(path), re.MULTILINE)
    assert "**Predict**" in prose(path)
    assert re.search(r"^## .*break it on purpose", prose(path), re.MULTILINE | re.IGNORECASE)


@every_notebook
def test_set_up_cell_is_the_same_everywhere_and_a_seed_follows(path):
    first, second = code_cells(path)[:2]
    assert first.source == SETUP
    assert "SEED = 0" in second.source
    assert "manual_seed(SEED)" in second.source


@every_notebook
def test_cells_are_short(path):
    lengths = sorted(lines_of_code(cell) for cell in code_cells(path))
    assert lengths[-1] <= 45  # one training loop
    assert lengths[-2] <= 25
    assert statistics.median(lengths) <= 12


@every_notebook
def test_exercises_have_stub_check_and_a_collapsed_solution(path):
    parts: list[list[NotebookNode]] = []
    for cell in read(path).cells:
        if cell.cell_type == "markdown" and re.search(r"^### Exercise \d", cell.source, re.MULTILINE):
            parts.append([])
        elif cell.cell_type == "markdown" and cell.source.startswith("## Sources"):
            break
        if parts:
            parts[-1].append(cell)
    assert len(parts) >= 3
    for cells in parts:
        code = [cell for cell in cells if cell.cell_type == "code"]
        solutions = [cell for cell in code if "solution" in cell.metadata.get("tags", [])]
        assert any("NotImplementedError" in cell.source for cell in code)
        assert any(re.search(r"^def check_", cell.source, re.MULTILINE) for cell in code)
        assert len(solutions) >= 1
        assert all(cell.metadata["jupyter"]["source_hidden"] for cell in solutions)  # Jupyter
        assert all(cell.metadata["cellView"] == "form" for cell in solutions)  # Colab
        assert any("correct" in text for cell in solutions for text in texts(cell))


@every_notebook
def test_the_lesson_is_in_checked_text(path):
    checked = [cell for cell in code_cells(path) if cell.source.startswith(CHECKED)]
    assert len(checked) >= 5
    for cell in checked:
        assert any(text.strip() for text in texts(cell)), f"nothing to compare:\n{cell.source}"
        assert not [o for o in cell.outputs if o.get("name") == "stderr"], cell.source
    misplaced = [c.source for c in code_cells(path) if CHECKED in c.source and c not in checked]
    assert misplaced == []


@every_notebook
def test_links_and_pictures_exist(path):
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    local = [target.partition("#")[0] for target in targets if not re.match(r"https?://|#", target)]
    assert [target for target in local if not (path.parent / target).exists()] == []
    assert any(target.endswith(".svg") for target in local)


# ------------------------------------------------------------- what a notebook defines, the package ships
def bare(node: ast.stmt) -> str:
    """A definition as text, without docstrings and annotations."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            part.returns = None
        if isinstance(part, ast.arg):
            part.annotation = None
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part) is not None:
            part.body = part.body[1:]
    return ast.unparse(node)


def definitions(tree: ast.Module) -> list[ast.FunctionDef | ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def imported_modules(tree: ast.Module) -> set[Path]:
    """Files of the package that a piece of code imports from."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddpo_lessons"):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("ddpo_lessons")}
    stems = [ROOT / name.replace(".", "/") for name in names]
    files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py")]
    return {file for file in files if file.exists()}


def shipped(files: set[Path]) -> dict[str, set[str]]:
    """Every top-level definition of some modules, by name."""
    found: dict[str, set[str]] = {}
    for file in files:
        for node in definitions(ast.parse(file.read_text(encoding="utf-8"))):
            found.setdefault(node.name, set()).add(bare(node))
    return found


def syntax_tree(path: Path) -> ast.Module:
    transform = TransformerManager().transform_cell
    return ast.parse("\n".join(transform(cell.source) for cell in code_cells(path)))


@every_notebook
def test_what_a_notebook_defines_is_what_the_package_ships(path):
    """Of every module that a notebook imports from; drafts that differ have names of their own."""
    tree = syntax_tree(path)
    package = shipped(imported_modules(tree))
    shared = [(node.name, bare(node)) for node in definitions(tree) if node.name in package]
    assert shared, "a lesson shows at least one function as the package ships it"
    for name, text in shared:
        assert text in package[name], f"{name} differs from the package:\n{text}"


def test_comparison_sees_a_changed_line_and_no_annotation():
    one = ast.parse('def f(x: int) -> int:\n    """Text."""\n    return x + 1').body[0]
    same, other = ast.parse("def f(x): return x + 1").body[0], ast.parse("def f(x): return x + 2").body[0]
    assert bare(one) == bare(same) != bare(other)

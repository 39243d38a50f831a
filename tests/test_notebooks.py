"""The notebooks as files: executed top to bottom, built alike, and equal to the package where they say so."""

import ast
import functools
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from packaging.requirements import Requirement

from images import lessons

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHECKED = "nbval-check-output"  # a cell's tag
COLUMNS = 88  # of code that readers see: JupyterLab on a laptop, and the site
GLOSSARY = ROOT / "docs" / "glossary.md"

every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@functools.cache
def read(path: Path) -> Any:
    import nbformat  # takes a second

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def prose(path: Path) -> str:
    return "\n\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def symbols(text: str) -> list[str]:
    """The rows of a page's tables of symbols."""
    table = r"^\| symbol \| in code \| shape \| meaning \|\n\| --- .*\n((?:\|.*\n?)+)"
    return [row for rows in re.findall(table, text, re.MULTILINE) for row in rows.splitlines()]


def texts(cell: Any) -> list[str]:
    """Everything that a cell printed or returned as text."""
    streams = [output.text for output in cell.outputs if output.output_type == "stream"]
    return streams + [output.data.get("text/plain", "") for output in cell.outputs if "data" in output]


def lines_of_code(cell: Any) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in cell.source.splitlines())


def test_lessons_are_numbered_without_a_gap():
    assert [path.name[:2] for path in PATHS] == [f"{n:02d}" for n in range(1, len(PATHS) + 1)]
    assert PATHS


def test_every_lesson_has_its_card_on_the_front_page():
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert re.findall(r":link: \.\./notebooks/(\w+)", index) == [path.stem for path in PATHS]


@every_notebook
def test_every_cell_was_executed_once_in_order(path):
    """A cell without its count is never compared by nbval, silently."""
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1))
    assert not [o for cell in code_cells(path) for o in cell.outputs if o.output_type == "error"]


@every_notebook
def test_no_personal_kernel_no_path_no_address_and_a_modest_size(path):
    assert read(path).metadata.kernelspec.name == "python3"
    said = "\n".join(text for cell in code_cells(path) for text in texts(cell))
    assert re.findall(r"0x[0-9a-f]{6,}|/(?:home|root|work|tmp|Users|content)/\S*|site-packages", said) == []
    assert path.stat().st_size < 750_000


@every_notebook
def test_figures_are_pictures(path):
    """A figure that no backend shows leaves its description alone."""
    shown = [output.data for cell in code_cells(path) for output in cell.outputs if "data" in output]
    figures = [data for data in shown if "<Figure" in data.get("text/plain", "")]
    assert [data for data in figures if "image/png" not in data] == []


@every_notebook
def test_opening_and_closing_cells(path):
    cells = read(path).cells
    opening, closing = cells[0].source, cells[-1].source
    assert opening.startswith(f"# {path.name[:2]} · ")
    assert opening.index("](../images/") < opening.index("**You will be able to**")  # a picture comes first
    for part in ("You need", "Running time", "your time", "Device"):
        assert f"**{part}" in opening, part
    assert closing.startswith("## What you learned")
    assert "## Sources" in prose(path)
    assert "**Predict**" in prose(path)
    assert re.search(r"^## .*break it on purpose", prose(path), re.MULTILINE | re.IGNORECASE)


@every_notebook
def test_notation_is_the_courses(path):
    """The table comes after the exercises, and each of its rows stands in the glossary, to the letter."""
    rows = symbols(prose(path))
    assert rows
    assert [row for row in rows if row not in symbols(GLOSSARY.read_text("utf-8"))] == []
    assert prose(path).index("### Exercise 1") < prose(path).index("| symbol |")
    assert "glossary.md" in prose(path)


def test_no_symbol_has_two_meanings():
    named = [row.split("|")[1].strip() for row in symbols(GLOSSARY.read_text("utf-8"))]
    each = [symbol for cell in named for symbol in re.findall(r"\$[^$]+\$", cell)]
    assert len(each) == len(set(each)) > 30


@every_notebook
def test_one_quiet_set_up_cell_folded_everywhere(path):
    first, *others = code_cells(path)
    assert first.source.startswith(lessons.setup_cell()), "python -m benchmarks.tables writes it"
    on_gpu = path.stem == "13_full_run"
    assert f"\nset_up({'stay_on_cpu=not FULL' if on_gpu else ''})\n" in first.source  # seeds, style, silence
    assert first.outputs == []
    assert first.metadata["jupyter"] == {"source_hidden": True}  # JupyterLab
    assert first.metadata["cellView"] == "form"  # Colab
    assert tags(first) == ["hide-input"]  # the site
    assert not [cell.source for cell in others if re.search(r"plt\.style|manual_seed\(SEED\)$", cell.source)]


@pytest.mark.parametrize(
    ("there", "address", "installed"),
    [
        ([], None, None),
        ([], "https://github.com/some/where", "ddpo-lessons[lessons] @ git+https://github.com/some/where"),
        (["ddpo_lessons-1-py3-none-any.whl"], "https://github.com/some/where", "{}[lessons]"),
        (["ddpo-lessons-main.zip"], None, "{}[lessons]"),
        (["../ddpo_lessons/lessons/lesson.mplstyle", "ddpo_lessons-1-py3-none-any.whl"], None, "..[lessons]"),
    ],
)
def test_set_up_cell_installs_what_lies_nearest(there, address, installed, tmp_path, monkeypatch):
    """In a folder of its own and without the package; pip is called with one requirement, or not at all."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    for name in there:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    monkeypatch.setattr(lessons, "address", lambda: address)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    called: list[str] = []
    shell = InteractiveShell()
    shell.register_magic_function(called.append, magic_name="pip")
    outcome = shell.run_cell(lessons.setup_cell())
    if installed is None:
        assert isinstance(outcome.error_in_exec, ModuleNotFoundError)
        assert called == []
        return
    assert outcome.success
    requirement = installed.format(Path(there[-1]).resolve() if there else "")
    assert called == [f'install -q "{requirement}"']
    if address and not there:
        assert Requirement(requirement).extras == {"lessons"}


@every_notebook
def test_cells_are_short(path):
    lengths = sorted(lines_of_code(cell) for cell in code_cells(path)[1:])  # without the folded set-up
    assert lengths[-1] <= 45  # one training loop
    assert lengths[-2] <= 25
    assert statistics.median(lengths) <= 12


@every_notebook
def test_visible_code_needs_no_scrolling(path):
    shown = [cell for cell in code_cells(path) if not {"hide-input", "hide-cell"} & {*tags(cell)}]
    lines = [line for cell in shown for line in cell.source.splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []


@every_notebook
def test_exercises_have_a_stub_a_check_and_a_closed_solution(path):
    parts: list[list[Any]] = []
    for cell in read(path).cells:
        if cell.cell_type == "markdown" and re.search(r"^### Exercise \d", cell.source, re.MULTILINE):
            parts.append([])
        elif cell.cell_type == "markdown" and cell.source.startswith(("## ", "### ")):
            parts.append([])  # what follows an exercise
        if parts:
            parts[-1].append(cell)
    parts = [cells for cells in parts if re.search(r"^### Exercise \d", cells[0].source, re.MULTILINE)]
    assert len(parts) >= 3
    for cells in parts:
        stub, check, solution = (cell for cell in cells if cell.cell_type == "code")
        assert "NotImplementedError" in stub.source
        assert re.search(r"^def check_(\w+)[^§]*^check_mine\(check_\1, \1\)$", check.source, re.MULTILINE)
        assert texts(check) == ["not yet: your turn\n"]
        assert {CHECKED, "hide-input"} == {*tags(check)}  # a check may show the answer, so it is folded
        assert check.metadata["jupyter"] == {"source_hidden": True}  # JupyterLab
        assert check.metadata["cellView"] == "form"  # Colab, which shows the title
        assert re.match(r"# @title Check of exercise \d\n", check.source)
        assert re.match(r"# @title Solution of exercise \d\n", solution.source)
        assert {"solution", "hide-cell"} <= {*tags(solution)}  # hide-cell: closed on the site
        assert solution.metadata["jupyter"] == {"outputs_hidden": True, "source_hidden": True}  # JupyterLab
        assert solution.metadata["cellView"] == "form"  # Colab
        assert any("correct" in text for text in texts(solution))


@every_notebook
def test_the_lesson_is_in_checked_text(path):
    checked = [cell for cell in code_cells(path) if CHECKED in tags(cell)]
    assert len(checked) >= 5
    for cell in checked:
        assert any(text.strip() for text in texts(cell)), f"nothing to compare:\n{cell.source}"


@every_notebook
def test_readers_see_neither_stderr_nor_marks_for_tools(path):
    for cell in code_cells(path):
        assert not [output for output in cell.outputs if output.get("name") == "stderr"], cell.source
        assert not re.search(r"NBVAL|noqa|fmt: ", cell.source), cell.source


@every_notebook
def test_opening_it_in_jupyterlab_changes_nothing(path):
    """JupyterLab writes the kernel's own metadata into a file that has others."""
    metadata = read(path).metadata
    display = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    assert metadata.kernelspec == display
    assert "widgets" not in metadata  # of sliders: tests/tidy_notebooks.py
    assert not any(cell.outputs for cell in code_cells(path) if "slider" in tags(cell))
    assert {"codemirror_mode", "file_extension", "mimetype", "pygments_lexer"} < {*metadata.language_info}


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

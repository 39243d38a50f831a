"""Who may import whom: docs/architecture.md has the order, and this holds it."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from ddpo_lessons.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddpo_lessons"
# From the bottom: a module imports its own floor and those below, never one above.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "worlds", "embedded", "loading", "image", "damages", "plan", "words", "hub", "own",
        "batching", "advantages", "ppo", "ddim", "flow", "table",
    ),
    ("config", "rewards"),
    ("models",),
    ("rollout", "data", "named_prompts"),
    ("algorithms",),
    ("training", "text"),
    ("trainer",),
    ("compat", "validation", "checks", "smoke", "hooks"),
    ("cli",),
    ("lessons",),
    ("benchmarks",),
)  # fmt: skip
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    """Every module of package and benchmarks by its dotted name."""
    found = {}
    for folder in (PACKAGE, ROOT / "benchmarks"):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path], at_load: bool) -> set[str]:
    """Modules that a file imports: all of them, or those that are imported as it loads."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if at_load and id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in found if name in known}


def room(module: str) -> str:
    """The room that a module is in."""
    parts = module.split(".")
    return parts[0] if parts[0] == "benchmarks" else parts[1] if len(parts) > 1 else "ddpo_lessons"


def test_nobody_imports_from_a_floor_above():
    known = modules()
    wrong = [
        f"{name} imports {other}"
        for name, path in known.items()
        if room(name) in FLOOR
        for other in imports(path, known, at_load=False)
        if room(other) in FLOOR and FLOOR[room(other)] > FLOOR[room(name)]
    ]
    assert wrong == []


def test_every_module_has_a_floor():
    assert {room(name) for name in modules()} - FLOOR.keys() == {"ddpo_lessons"}


def test_no_two_modules_have_one_name():
    names = [path.stem for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]
    assert sorted(names) == sorted(set(names))


def test_nobody_imports_from_the_tests():
    """The attacks of tests/torture import benchmarks/, so the other way would be a circle."""
    tests = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert imports(tests["tests.torture.runs"], tests, at_load=False)
    assert [name for name, path in modules().items() if imports(path, tests, at_load=False)] == []


def test_imports_make_no_circle():
    """Neither those at load nor those in functions and for type checking: modules can be read in an order."""
    known = modules()
    # A package's __init__ hands on what its modules have, and they need nothing that it exports.
    inner = {name: path for name, path in known.items() if path.name != "__init__.py"}
    graph = {name: imports(path, inner, at_load=False) - {name} for name, path in inner.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_only_what_is_about_toy_worlds_imports_them():
    """Their rewards and prompts, the demo, a lesson's runs, and the list of names that a user may import."""
    known = modules()
    inner = {name for name in known if room(name) not in ("worlds", "benchmarks")}
    users = {
        name
        for name in inner
        if any(room(other) == "worlds" for other in imports(known[name], known, at_load=False))
    }
    assert {name.removeprefix("ddpo_lessons.") for name in users} == {
        "ddpo_lessons", "rewards.digit_world", "rewards.animal_world", "named_prompts",
        "lessons.demo", "lessons.run_sets",
    }  # fmt: skip


def test_an_algorithm_knows_no_trainer():
    """Neither by import nor by name: no process, record, checkpoint or progress bar."""
    for path in (PACKAGE / "algorithms").glob("*.py"):
        names = {
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Name | ast.Attribute)
        }
        assert not names & {"accelerator", "Accelerator", "checkpoint", "RunLog", "tqdm", "backward"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_a_page_in_the_reference(name):
    assert f"algorithms.{name}\n" in (ROOT / "docs" / "api" / "algorithms.md").read_text("utf-8")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_a_page(name):
    lines = (PACKAGE / "algorithms" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (250 if name == "ddpo" else 150)


def test_the_page_shows_the_same_order():
    """docs/architecture.md lists the floors from the bottom, one of them in several rows."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\d+) \| (.*?) \|", text, re.MULTILINE)
    rooms: dict[int, list[str]] = {}
    for number, row in shown:
        rooms.setdefault(int(number), []).extend(re.findall(r"`([a-z_]+)(?:/|\.py)`", row))
    assert [*rooms] == [*range(1, len(FLOORS) + 1)]
    assert [sorted(row) for row in rooms.values()] == [sorted(floor) for floor in FLOORS]

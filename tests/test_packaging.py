"""pyproject.toml, constraints.txt and environment.yml agree; imports stay light."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ddpo_lessons.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
TRACKERS = {"tensorboard", "wandb"}  # extras for users: what the tests need is in the extra "test"
# Torch for Linux brings these and pins them itself.
OF_TORCH = re.compile(r"nvidia-|cuda-|triton$")
PINNED = [
    PROJECT["project"]["dependencies"],
    *(lines for name, lines in EXTRAS.items() if name not in TRACKERS),
]
REQUIREMENTS = [Requirement(line) for lines in PINNED for line in lines]


def read_pins() -> dict[str, str]:
    """Read name → version from constraints.txt."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if requirement := line.partition("#")[0].strip():
            match = re.fullmatch(r"([a-z0-9-]+)==([a-z0-9.]+)( ; .+)?", requirement)
            assert match, f"not a pin: {line}"
            assert match[1] not in pins, f"pinned twice: {line}"
            pins[match[1]] = match[2]
    return pins


PINS = read_pins()


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_a_requirement_has_a_lower_bound_and_a_pin_within_its_bounds(requirement):
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])
    assert {bound.operator for bound in requirement.specifier} & {">=", "=="}


def test_constraints_name_no_index_and_nothing_that_torch_pins_itself():
    assert "://" not in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert [name for name in PINS if OF_TORCH.match(name)] == []


def test_constraints_hold_the_whole_tree():
    """Walk the installed packages: each that something requires on this platform has a pin."""
    queue, seen = list(REQUIREMENTS), set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if OF_TORCH.match(name) or (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        assert name in PINS, f"{requirement} has no pin: remake constraints.txt"
        try:
            version = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here")
        if version != PINS[name]:
            pytest.skip(f"{name} {version} is installed here, not {PINS[name]}")
        for child in map(Requirement, metadata.requires(name) or []):
            extras = requirement.extras or {""}
            if child.marker is None or any(child.marker.evaluate({"extra": e}) for e in extras):
                queue.append(child)


def test_conda_environment_installs_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == PROJECT["project"]["name"]
    python, pip, of_pip = environment["dependencies"]
    assert python.partition("=")[0] == "python"
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python.partition("=")[2])
    assert pip == "pip"
    extras = sorted({*EXTRAS} - {"lessons", *TRACKERS})  # "lessons" is for machines that have Jupyter
    assert of_pip == {"pip": ["-c constraints.txt", f"-e .[{','.join(extras)}]"]}


def test_binder_takes_torch_for_the_cpu_of_the_pinned_version():
    """Paths in the file are relative to its folder; Codespaces build the same."""
    environment = yaml.safe_load((ROOT / "binder/environment.yml").read_text("utf-8"))
    python, kernel, torch, pip, of_pip = environment["dependencies"]
    assert (python, kernel, pip) == ("python=3.12", "ipykernel", "pip")
    assert torch == f"pytorch-cpu={PINS['torch']}"
    constraints, package = of_pip["pip"]
    assert (ROOT / "binder" / constraints.removeprefix("-c ")).resolve() == ROOT / "constraints.txt"
    assert package == "-e ..[lessons]"
    assert EXTRAS["lessons"]


def test_a_codespace_s_build_is_a_script_of_things_that_are_there():
    folder = ROOT / ".devcontainer"
    container = json.loads((folder / "devcontainer.json").read_text("utf-8"))
    script = ROOT / container["postCreateCommand"].removeprefix("sh ")
    text = script.read_text("utf-8")
    assert subprocess.run(["sh", "-n", script], capture_output=True).returncode == 0
    environment = re.search(r"conda env create .*-f (\S+)", text)[1]
    name = yaml.safe_load((ROOT / environment).read_text("utf-8"))["name"]
    assert set(re.findall(r"(?:-n|activate) (\S+)", text.replace('"', " "))) == {name}
    custom = container["customizations"]
    assert [name for name in custom["codespaces"]["openFiles"] if not (ROOT / name).is_file()] == []
    python = custom["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert python.endswith(f"/envs/{name}/bin/python")
    assert set(re.findall(r"ddpo-lessons ([a-z]+)", text)) - {"ddpo"} <= set(COMMANDS)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem
)
def test_workflows_call_what_is_there(path):
    workflow = yaml.safe_load(path.read_text("utf-8"))
    targets = re.findall(r"^([a-z]+)(?: [a-z]+)*:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for job in workflow["jobs"].values():
        assert (path.parent / Path(job.get("uses", path)).name).is_file()
        needs = job.get("needs", [])
        assert {*([needs] if isinstance(needs, str) else needs)} <= set(workflow["jobs"])
        for step in job.get("steps", []):
            assert set(re.findall(r"\bmake (\w+)", step.get("run", ""))) <= set(targets)


def test_the_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == PROJECT["project"]["version"]


@pytest.mark.slow
def test_imports_stay_light():
    """Neither the package nor any module of it imports what only some functions need."""
    program = """
import importlib, pkgutil, sys
from transformers import GenerationMixin  # old releases import sklearn on the way
heavy = {"matplotlib", "sklearn", "trl"} - set(sys.modules)
import ddpo_lessons
for module in pkgutil.walk_packages(ddpo_lessons.__path__, "ddpo_lessons."):
    importlib.import_module(module.name)
    print(module.name, *sorted(heavy & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    names = run.stdout.splitlines()
    assert "ddpo_lessons.ddim" in names
    assert [name for name in names if " " in name] == []

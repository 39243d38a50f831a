"""The wheel alone, in an empty environment and far from the repository, runs the demo."""

import ast
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).parents[1]
# Colab's versions of what this package, its extras and tyro require: googlecolab/backend-info, August 2026.
COLAB = """
accelerate 1.14.0, datasets 4.0.0, diffusers 0.39.0, docstring-parser 0.18.0, filelock 3.32.3,
huggingface-hub 1.27.0, ipywidgets 7.7.1, matplotlib 3.10.0, numpy 2.1.3, pandas 2.2.3, peft 0.20.0,
pillow 11.3.0, pyarrow 18.1.0, pyyaml 6.0.3, safetensors 0.8.0, scikit-learn 1.6.1, torch 2.11.0,
torchvision 0.26.0, tqdm 4.67.3, transformers 5.15.0, typeguard 4.6.0, typing-extensions 4.16.0
"""
# Installing torch can take long on a slow network; the first test that asks for it pays.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that knows nothing of this repository, and return what it printed."""
    foreign = ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    environment["HF_HUB_OFFLINE"] = "1"
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """The folder of programs of an environment that holds the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    pip_install = (programs / "python", "-m", "pip", "install", "-q", "--no-compile")
    run(*pip_install, "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    yield programs
    shutil.rmtree(folder)  # more than a gigabyte, which pytest would keep for three runs


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        licenses = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ddpo_lessons").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files == package >= {"ddpo_lessons/py.typed"}
    assert len(licenses) == 1


def test_wheel_is_what_the_empty_environment_imports(programs, tmp_path):
    where = run(programs / "python", "-c", "import ddpo_lessons; print(ddpo_lessons.__file__)", cwd=tmp_path)
    assert programs.parent in Path(where.strip()).parents
    installed = run(programs / "python", "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    assert not {"pytest", "jupyterlab", "trl"} & {line.split("==")[0] for line in installed.split()}


def test_doctor_finds_nothing_wrong(programs, tmp_path):
    lines = run(programs / "ddpo-lessons", "doctor", cwd=tmp_path).splitlines()
    assert [line for line in lines if line.startswith("[FAIL]")] == []
    assert any("tiny-sd" in line for line in lines)


def test_demo_runs_from_an_empty_folder(programs, tmp_path):
    output = tmp_path / "output"
    assert "--output-dir" in run(programs / "ddpo-lessons", "demo", "--help", cwd=tmp_path)
    flags = ("--epochs", "1", "--eval-images", "50", "--output-dir", output)
    run(programs / "ddpo-lessons", "demo", *flags, cwd=tmp_path)
    assert (output / "metrics.jsonl").stat().st_size > 0
    assert list((output / "lora").glob("*.safetensors"))


def test_on_colab_nothing_is_replaced(wheel, tmp_path):
    """Pip prints what it would install where Colab's packages are there, here by name and version only."""
    venv.create(tmp_path / "colab", with_pip=True)
    python = tmp_path / "colab" / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    for name, version in (package.split() for package in COLAB.split(",")):
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    pip_install = (python, "-m", "pip", "install", "-q", "--dry-run", "--report", "report.json")
    run(*pip_install, f"{wheel}[lessons]", cwd=tmp_path)
    would = json.loads((tmp_path / "report.json").read_text("utf-8"))["install"]
    assert {package["metadata"]["name"] for package in would} == {"ddpo-lessons", "tyro"}


def test_the_extra_brings_what_the_notebooks_import_and_runs_one(wheel, programs, tmp_path):
    """The last test of this file: it adds Jupyter to the environment.

    `make test` executes every notebook with the packages of the tests and beside the repository. What that
    cannot show is that the extras and the files of the wheel are enough: every import (with "lessons", as on
    Colab) and the shortest lesson (with "notebooks") show it. The lesson finds the wheel, and says what is
    missing where there is none.
    """
    import nbformat  # takes a second, also where this file is only collected

    python, pins = programs / "python", ROOT / "constraints.txt"
    pip_install = (python, "-m", "pip", "install", "-q", "--no-compile", "-c", pins)
    run(*pip_install, f"{wheel}[lessons]", cwd=tmp_path)
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    transform = TransformerManager().transform_cell
    imports = {
        ast.unparse(node)
        for path in paths
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
        for node in ast.parse(transform(cell.source)).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert len(imports) > len(paths)
    run(python, "-c", "\n".join(sorted(imports)), cwd=tmp_path)
    run(*pip_install, f"{wheel}[notebooks]", cwd=tmp_path)
    run(python, "-m", "pip", "uninstall", "-q", "-y", "ddpo-lessons", cwd=tmp_path)
    notebook = Path(shutil.copy(paths[0], tmp_path))
    execute = (python, "-m", "jupyter", "nbconvert", "--to", "notebook", "--execute", "--inplace")
    before = run(python, "-m", "pip", "list", cwd=tmp_path)
    with pytest.raises(AssertionError, match="put its wheel or zip beside this notebook"):
        run(*execute, notebook, cwd=tmp_path)
    assert run(python, "-m", "pip", "list", cwd=tmp_path) == before  # nothing is installed by its name
    shutil.copy(wheel, tmp_path)
    run(*execute, notebook, cwd=tmp_path)

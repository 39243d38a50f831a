"""Lessons stay on the CPU of a machine with a GPU: nbval runs them in kernels that are on one, made up."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[1]
STARTUP = ROOT / "tests" / "kernel_on_gpu.py"


def run(*cells: str) -> str:
    """Run cells in such a kernel; return what the last one printed."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return "".join(output.get("text", "") for output in notebook.cells[-1].outputs)


def test_make_test_starts_such_kernels():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (path,) = re.findall(r"^test: export PYTHONSTARTUP = \$\(CURDIR\)/(\S+)$", makefile, re.MULTILINE)
    assert ROOT / path == STARTUP


@pytest.mark.slow
def test_a_lesson_that_would_use_the_gpu_ends_in_an_error(monkeypatch):
    monkeypatch.setenv("PYTHONSTARTUP", str(STARTUP))
    ask = "from accelerate import Accelerator; print(Accelerator().device)"
    with pytest.raises(CellExecutionError, match="a machine that is made up: stay on the CPU"):
        run(ask)
    assert run("from ddpo_lessons.lessons import set_up; set_up()", ask) == "cpu\n"
    assert run("import torch; print(torch.cuda.is_available())") == "True\n"

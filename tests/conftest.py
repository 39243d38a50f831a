"""Fixtures of many files. What is heavy is imported by whoever uses it: xdist's own process runs no test."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

gc.disable()  # until all is imported: what torch and transformers make stays, and would be searched each time


def pytest_collection_finish() -> None:
    """Leave out of every search for garbage what was imported, which took much of the tests' time."""
    gc.freeze()
    gc.set_threshold(5_000)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the notebooks and the files with slow tests first: no process ends with a long one alone."""
    slow = {item.path for item in items if item.path.suffix == ".ipynb" or item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Let every test choose its precision: accelerate keeps one for the whole process."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrap lines at 80 columns, however wide the terminal is in which the tests run."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Networks as tiny as the tests' are faster, and repeatable to the bit, on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bars() -> None:
    """Let runs print, also where another test has silenced them for its process."""
    from diffusers.utils import logging

    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a random tiny pipeline; scripts of the peers need another, and have their own."""
    from helpers import make_pipeline

    folder = tmp_path_factory.mktemp("model")
    make_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path

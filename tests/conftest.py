from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the notebooks and the files with slow tests first: no process ends with a long one alone."""
    slow = {item.path for item in items if item.path.suffix == ".ipynb" or item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Let every test choose its precision: accelerate keeps one for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Networks as tiny as the tests' are faster, and repeatable to the bit, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

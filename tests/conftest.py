from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState


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

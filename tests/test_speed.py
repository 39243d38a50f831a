"""The comparison of speed compares the same mathematics, or says that it does not."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.peers import Worker, outcome


class Answering:
    """Stands for a worker process that has compared its gradient with the peer's."""

    def __init__(self, apart: float) -> None:
        self.apart = apart

    def ask(self, line: str) -> dict[str, Any]:
        assert line == "gradient step.safetensors"
        return {"gradient_difference": self.apart}


def workers(**apart: float) -> dict[str, Worker]:
    return {name: cast(Worker, Answering(value)) for name, value in apart.items()}


def test_gradients_of_every_worker_are_compared() -> None:
    found = outcome({"first_clip_fraction": 0.0}, workers(ours=4e-5, compiled=1e-4), "step.safetensors")
    assert found == {"first_clip_fraction": 0.0, "gradient_difference": {"ours": 4e-5, "compiled": 1e-4}}


@pytest.mark.parametrize("apart", [2e-3, float("nan")])
def test_other_gradients_end_the_comparison(apart: float) -> None:
    with pytest.raises(RuntimeError, match="not the peer's"):
        outcome({"first_clip_fraction": 0.0}, workers(ours=4e-5, compiled=apart), "step.safetensors")


def test_a_peer_that_fails_or_trains_another_policy_is_not_compared() -> None:
    assert outcome({"error": "sizes differ"}, {}, "") == {"error": "sizes differ"}
    wrong = outcome({"first_clip_fraction": 0.97}, workers(ours=1.0), "")
    assert wrong == {"first_clip_fraction": 0.97, "gradient_difference": None}

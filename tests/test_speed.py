"""The comparison of speed compares the same mathematics, or says that it does not."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.speed.cases import CASES
from benchmarks.speed.our_epochs import Floor
from benchmarks.speed.peer_environment import Worker
from benchmarks.speed.side_by_side import outcome


class Answering:
    """Stands for a worker process that has compared its gradient with the peer's."""

    def __init__(self, apart: float) -> None:
        self.apart = apart

    def ask(self, line: str) -> dict[str, Any]:
        assert line == "gradient step.safetensors"
        return {"gradient_difference": self.apart}


def workers(**apart: float) -> dict[str, Worker]:
    return {name: cast(Worker, Answering(value)) for name, value in apart.items()}


def test_gradients_of_every_worker_are_compared():
    found = outcome({"first_clip_fraction": 0.0}, workers(ours=4e-5, compiled=1e-4), "step.safetensors")
    assert found == {"first_clip_fraction": 0.0, "gradient_difference": {"ours": 4e-5, "compiled": 1e-4}}


@pytest.mark.parametrize("apart", [2e-3, float("nan")])
def test_other_gradients_end_the_comparison(apart):
    with pytest.raises(RuntimeError, match="not the peer's"):
        outcome({"first_clip_fraction": 0.0}, workers(ours=4e-5, compiled=apart), "step.safetensors")


def test_a_peer_that_fails_or_trains_another_policy_is_not_compared():
    assert outcome({"error": "sizes differ"}, {}, "") == {"error": "sizes differ"}
    wrong = outcome({"first_clip_fraction": 0.97}, workers(ours=1.0), "")
    assert wrong == {"first_clip_fraction": 0.97, "gradient_difference": None}


def test_the_floor_takes_even_passes_of_the_fastest_size(monkeypatch):
    monkeypatch.setattr(Floor, "_rate", lambda self, run, count: 1 / count)  # the larger, the faster
    family = SimpleNamespace(condition=lambda *arguments, **settings: {"prompt_embeds": None})
    trainer: Any = SimpleNamespace(learner=SimpleNamespace(denoiser=None, trainable={}), family=family)
    floor = Floor(trainer, CASES["text-to-image, guidance 5"], "TRL")
    # 24 samples, 10 steps, guidance: 480 evaluations, which fall into even passes of at most 128
    assert [sizes for _, sizes in floor.passes] == [[120] * 4, [120] * 4]

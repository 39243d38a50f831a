"""What RL is compared with: how settings are chosen, and that only chosen ones see test pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.results import baselines
from benchmarks.results.img2img import Run
from ddpo_lessons.tiny import load_judge, world
from ddpo_lessons.tiny.classifier import accuracy

TASK = Run("noise", ("noisy",), (1, 5))


def reading(setting: str, validation: float) -> dict[str, Any]:
    return {"setting": setting, "validation": validation}


def test_best_is_best_over_all_kinds_and_the_first_of_equals() -> None:
    rows = [reading("a", 0.5), reading("b", 0.5), reading("c", 0.6), reading("c", 0.0)]
    assert baselines.best(rows) == "c"
    assert baselines.best([*rows, reading("a", 0.4), reading("b", 0.4)]) == "a"


@pytest.mark.parametrize(
    ("what", "expected"), [("operation", ["keep", "grey"]), ("supervised", ["grey"] * 2)]
)
def test_only_chosen_settings_see_test_pictures(
    monkeypatch: pytest.MonkeyPatch, what: str, expected: list[str]
) -> None:
    """Validation reads 0.9 and 0.2 of kept, 0.8 and 0.7 of grey pictures, at the two severities."""
    readings = iter([0.9, 0.8, 0.2, 0.7])
    seen: list[tuple[str, float]] = []

    def read(change: baselines.Change, pictures: world.Pictures) -> float:
        images = change(pictures.images)
        seen.append((str(len(images)), accuracy(load_judge(), images, pictures.digits)))
        return next(readings, seen[-1][1])

    changes = {
        "keep": lambda images: images,
        "grey": lambda images: images.mean(1, keepdim=True).expand(-1, 3, -1, -1),
    }
    monkeypatch.setattr(baselines, "read", read)
    monkeypatch.setattr(baselines, "VALIDATION_IMAGES", 10)
    monkeypatch.setattr(baselines, "TABLE_IMAGES", 20)
    monkeypatch.setitem(baselines.CHANGES, what, lambda _: changes)
    rows = baselines.measure(baselines.Baseline(TASK, what))
    assert [count for count, _ in seen] == ["10"] * 4 + ["20"] * 2
    chosen = [row for row in rows if "test" in row]
    assert [row["setting"] for row in chosen] == expected
    for row in chosen:
        pictures = world.draw_pictures(20, "test", 0, "noisy", row["severity"])
        own = changes[row["setting"]](pictures.images)
        assert row["test"] == accuracy(load_judge(), own, pictures.digits)
        assert (row["task"], row["what"], row["seed"], row["damage"]) == ("noise", what, 0, "noisy")


def test_pairs_leave_out_validation_and_test_handwriting(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = []
    draw_pictures = world.draw_pictures

    def spy(count: int, split: str, *rest: Any) -> world.Pictures:
        splits.append(split)
        return draw_pictures(count, split, *rest)

    monkeypatch.setattr(world, "draw_pictures", spy)
    one, two = (baselines.pairs_of(TASK, 3) for _ in range(2))
    for _ in range(4):
        (prompt, image, metadata), (_, again, _) = one(), two()
        assert prompt == ""
        assert torch.equal(image, again)
        assert 0.02 < (image - metadata["target"]).square().mean().sqrt() < 0.5  # the noise is the difference
    assert splits == ["practice"] * 8

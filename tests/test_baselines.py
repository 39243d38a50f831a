"""What RL is compared with: how settings are chosen, and that only chosen ones see test pictures."""

from __future__ import annotations

from benchmarks.common import read_rows
from benchmarks.results import baselines
from benchmarks.results.img2img import Run
from ddpo_lessons.tiny import load_judge, world
from ddpo_lessons.tiny.classifier import accuracy

TASK = Run("noise", "noisy")


def test_the_best_is_the_first_of_equals():
    rows = [
        {"setting": name, "validation": share} for name, share in zip("abc", (0.5, 0.6, 0.6), strict=True)
    ]
    assert baselines.best(rows) == rows[1]


def test_only_the_chosen_setting_sees_test_pictures(monkeypatch):
    """Validation reads 0.9 of kept and 0.8 of grey pictures."""
    readings = iter([0.9, 0.8])
    seen: list[tuple[int, float]] = []

    def read(change: baselines.Change, pictures: world.Pictures) -> float:
        images = change(pictures.images)
        seen.append((len(images), accuracy(load_judge(), images, pictures.digits)))
        return next(readings, seen[-1][1])

    changes = {
        "keep": lambda images: images,
        "grey": lambda images: images.mean(1, keepdim=True).expand(-1, 3, -1, -1),
    }
    monkeypatch.setattr(baselines, "read", read)
    monkeypatch.setattr(baselines, "VALIDATION_IMAGES", 10)
    monkeypatch.setattr(baselines, "TABLE_IMAGES", 20)
    monkeypatch.setitem(baselines.CHANGES, "operation", lambda: changes)
    grey, kept = baselines.measure(baselines.Baseline(TASK, "operation"))
    assert [count for count, _ in seen] == [10, 10, 20]
    assert (grey["setting"], kept["setting"]) == ("grey", "keep")
    assert "test" not in grey
    pictures = world.draw_pictures(20, "test", 0, "noisy", 3)
    assert kept["test"] == accuracy(load_judge(), pictures.images, pictures.digits)
    assert (kept["task"], kept["what"]) == ("noise", "operation")


def test_the_committed_readings_are_those_of_lesson_07():
    """Section 7: 49.2% of fog untouched, 99.4% by arithmetic. Section 8: 29.6% and 13.0% of camouflage."""
    path = baselines.Path(baselines.__file__).with_suffix(".csv")
    test = {(row["task"], row["what"]): row["test"] for row in read_rows(path) if row["test"]}
    assert (test["fog", "untouched"], test["fog", "operation"]) == ("0.492", "0.994")
    assert (test["camouflage", "untouched"], test["camouflage", "untrained"]) == ("0.296", "0.13")

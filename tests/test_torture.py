"""The fault experiments can see the faults that they look for; their table says what the report holds."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import torture_table, torture_totals
from ddpo_lessons.config import DDPOConfig
from tests.torture.damage import DAMAGES, _audit, executed
from tests.torture.harness import each_case, expect, is_clear


def test_a_failure_is_counted_with_the_arguments_that_repeat_it(tmp_path):
    def case(generator: random.Random, place: Path) -> str:
        expect(not place.name.endswith("-4"), "broken")
        return f"drew {generator.randrange(10**9)}"

    together = each_case("kills", case, 7, range(3, 6), tmp_path)
    assert together.outcomes.total() == 2
    (failure,) = together.failures
    assert failure.startswith("--only kills --seed 7 --case 4: BrokenPromiseError at ")
    alone = each_case("kills", case, 7, range(5, 6), tmp_path)
    assert set(alone.outcomes) < set(together.outcomes)  # a case draws the same numbers on its own
    assert list(tmp_path.iterdir()) == []


def test_only_errors_that_the_package_raises_are_clear():
    with pytest.raises(ValueError, match="seed") as ours:
        DDPOConfig(seed=-1)
    with pytest.raises(ValueError, match="invalid literal") as pythons:
        int("x")
    assert is_clear(ours.value, ValueError)
    assert not is_clear(ours.value, TypeError)
    assert not is_clear(pythons.value, ValueError)


@pytest.mark.parametrize("kind", sorted(set(DAMAGES) - {"removed"}))
def test_damage_changes_the_bytes(kind):
    data = bytes(range(256)) * 4
    changed = [DAMAGES[kind](data, random.Random(seed)) != data for seed in range(20)]
    assert sum(changed) >= 15  # two flips may undo each other, zeros may be overwritten with zeros


def test_the_pickle_that_runs_a_program_would_be_noticed():
    spoiled = DAMAGES["a pickle"](b"weights", random.Random(0))
    assert b"system" in spoiled
    seen, watching = set(), True
    sys.addaudithook(lambda event, arguments: seen.add(event) if watching else None)
    pickle.loads(spoiled)  # runs `true`
    watching = False
    for event in seen | {"open"}:
        _audit(event, ())
    assert set(executed) == {"pickle.find_class", "os.system"}
    executed.clear()


def test_the_table_counts_cases_and_outcomes():
    def report(what: str, outcomes: dict[str, int], seconds: float) -> dict[str, Any]:
        cases = sum(outcomes.values())
        return {"what": what, "cases": cases, "outcomes": outcomes, "failures": [], "seconds": seconds}

    experiments = {
        "kills": report("Kill a run.", {"continued, equal": 40, "begun again, equal": 10}, 90.4),
        "damage": report("Damage a file.", {"clear error": 1200}, 209.6),
    }
    result = {"machine": "2 cores", "seed": 0, "experiments": experiments}
    assert torture_table(result).splitlines()[2:] == [
        "| `kills`: Kill a run. | 50 | 40 × continued, equal<br>10 × begun again, equal | 90 |",
        "| `damage`: Damage a file. | 1,200 | 1,200 × clear error | 210 |",
    ]
    assert torture_totals(result) == "1,250 cases in 5 minutes, 0 failures. Measured on: 2 cores."

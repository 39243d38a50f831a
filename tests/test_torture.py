"""The fault experiments run, and a failure is counted with the arguments that repeat it."""

import random
from pathlib import Path

import pytest

from tests.torture.__main__ import EXPERIMENTS
from tests.torture.damage import damage
from tests.torture.generated import generated
from tests.torture.harness import each_case, expect


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


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [damage, generated])
def test_experiments_find_nothing_in_a_few_cases(tmp_path, experiment):
    assert experiment in EXPERIMENTS
    counts = each_case("first", experiment(tmp_path / "made"), 0, range(5), tmp_path)
    assert (counts.failures, counts.outcomes.total()) == ([], 5)

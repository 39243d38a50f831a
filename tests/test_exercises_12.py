"""Answers to the exercises of lesson 12: wrong ones are refused with a hint, right ones of any form pass."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.common import read_rows
from tests.helpers import cells_of, exercise_tests

IMPORTS = "import math, torch\n"
ARGUMENTS = {1: "budget, sampled, trained, frozen, batch", 2: "record, share", 3: "training, n, steps"}
EPOCH_BY_EPOCH = """
def f(budget, sampled, trained, frozen, batch):
    evaluations = 0
    while (evaluations + batch) * (sampled + 3 * trained + frozen * trained) <= budget:
        evaluations += batch
    return evaluations
"""
LOOP = """
def f(record, share):
    best, found = -math.inf, None
    for evaluations, reward, accuracy in record:
        if accuracy >= share * record[0][-1] and reward > best:
            best, found = reward, evaluations
    return found
"""
TENSORS = """
def f(record, share):
    evaluations, reward, accuracy = torch.tensor(record, dtype=torch.float64).T
    reward = torch.where(accuracy >= share * accuracy[0], reward, -math.inf)
    return evaluations[reward.argmax()].item()
"""
SORTED_IN_PLACE = """
def f(record, share):
    least = share * record[0][2]
    record.sort(key=lambda p: -p[1])
    return next(p[0] for p in record if p[2] >= least)
"""
FIRST_PEAK = """
def f(record, share):
    allowed = [p for p in record if p[2] >= share * record[0][2]]
    return next((a[0] for a, b in zip(allowed, allowed[1:]) if b[1] <= a[1]), allowed[-1][0])
"""
TRYING = """
def f(training, n, steps):
    k = 0
    while training + k * steps >= k * n * steps:
        k += 1
    return k
"""
EACH = "(sampled + trained * (3 + frozen))"
ALLOWED = "[p for p in record if p[2] >= share * record[0][2]]"
RIGHT = [
    (1, EPOCH_BY_EPOCH), (1, f"budget // {EACH} // batch * batch"),
    (1, f"float(batch * math.floor(budget / {EACH} / batch))"),
    (1, f"budget // {EACH} - budget // {EACH} % batch"), (2, LOOP), (2, TENSORS),
    (2, f"sorted({ALLOWED}, key=lambda p: (-p[1], p[0]))[0][0]"),
    (2, "max((p[1], -p[0]) for p in record if p[2] / record[0][2] >= share)[1] * -1"), (3, TRYING),
    (3, "math.floor(training / (steps * (n - 1)) + 1)"), (3, "-(-(training + 1) // ((n - 1) * steps))"),
    (3, "float(1 + training // (n * steps - steps))"),
]  # fmt: skip
WRONG = [
    (1, "budget // ((sampled + trained * (2 + frozen)) * batch) * batch", "three in all"),
    (1, "budget // ((sampled + trained * (1 + frozen)) * batch) * batch", "two more"),
    (1, "budget // ((3 * sampled + trained * (3 + frozen)) * batch) * batch", "no gradient"),
    (1, "budget // ((sampled + trained * 3 + frozen) * batch) * batch", "every trained prediction"),
    (1, "budget // ((sampled + 3 * trained * (1 + frozen)) * batch) * batch", "no backward pass"),
    (1, "budget // ((sampled + 3 * trained) * batch) * batch", "frozen policies also cost"),
    (1, "budget // ((trained * (3 + frozen)) * batch) * batch", "sampling also costs"),
    (1, f"budget // {EACH}", "whole epochs"),
    (1, f"budget // ({EACH} * batch)", "not epochs"),
    (1, f"(budget // ({EACH} * batch) + 1) * batch", "not paid for"),
    (2, SORTED_IN_PLACE, "work on copies"),
    (2, "max(record, key=lambda p: p[1])[0]", "hacked"),
    (2, f"{ALLOWED}[-1][0]", "last allowed point"),
    (2, "next((a for a, b in zip(record, record[1:]) if b[2] < share * record[0][2]), record[-1])[0]",
        "satisfy"),
    (2, f"max({ALLOWED}, key=lambda p: p[1])[1]", "not the reward"),
    (2, f"record.index(max({ALLOWED}, key=lambda p: p[1]))", "not the index"),
    (2, "record[0][0]", "training pays"),
    (2, "max([p for p in record if p[2] > share * record[0][2]], key=lambda p: p[1])[0]", "at least"),
    (2, "max([p for p in record if p[2] >= share * max(q[2] for q in record)], key=lambda p: p[1])[0]",
        "not the highest"),
    (2, "max([p for p in record[1:] if p[2] >= share * record[0][2]], key=lambda p: p[1])[0]", "untrained"),
    (2, f"max({ALLOWED}[::-1], key=lambda p: p[1])[0]", "equal"),
    (2, "max([p for p in record if p[2] >= record[0][2] - (1 - share)], key=lambda p: p[1])[0]", "too low"),
    (2, "max([p for p in record if round(p[2], 2) >= round(share * record[0][2], 2)], key=lambda p: p[1])[0]",
        "a share"),
    (2, FIRST_PEAK, "first peak"),
    (3, "training // (n * steps) + 1", "also costs"),
    (3, "training // (n - 1) + 1", "all its steps"),
    (3, "training / ((n - 1) * steps)", "whole number"),
    (3, "training // ((n - 1) * steps)", "strictly"),
    (3, "training // ((n + 1) * steps) + 1", ") is "),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "12_which_algorithm", IMPORTS, ARGUMENTS, RIGHT, WRONG
)


def test_the_records_of_exercise_2_are_the_searchs():
    """What the notebook holds of equal_terms_search.csv, to the digit."""
    source = next(source for _, source in cells_of("12_which_algorithm") if source.startswith("RECORDS"))
    records = ast.literal_eval(source.split("\n\n\n")[0].split(" = ", 1)[1])
    found: dict[str, list[tuple[float, ...]]] = {}
    for row in read_rows(Path(__file__).parents[1] / "benchmarks" / "results" / "equal_terms_search.csv"):
        setting = f"learning rate {row['learning_rate']}, {row['images']} images per epoch"
        own = (row["task"], row["method"], row["steps"], row["seed"]) == ("preference", "DDPO", "1", "110")
        if own and setting in records:
            point = tuple(float(row[name]) for name in ("evaluations", "reward", "judge"))
            found.setdefault(setting, []).append(point)
    assert records == found

"""Answers to the exercises of lesson 13: wrong ones are refused with a hint, right ones of any form pass."""

from __future__ import annotations

from tests.helpers import exercise_tests

IMPORTS = "import math, torch\n"
ARGUMENTS = {
    1: "epochs, seconds, every, validation_seconds, save_freq, checkpoint_seconds",
    2: "before, after",
    3: "evaluations, patience",
}
EPOCH_BY_EPOCH = """
def f(epochs, seconds, every, validation_seconds, save_freq, checkpoint_seconds):
    total = validation_seconds
    for n in range(1, epochs + 1):
        total += seconds
        if n % every == 0 or n == epochs:
            total += validation_seconds
        if n % save_freq == 0 or n == epochs:
            total += checkpoint_seconds
    return total / 3600
"""
TOTAL = (
    "epochs * seconds + (1 + math.ceil(epochs / every)) * validation_seconds"
    " + math.ceil(epochs / save_freq) * checkpoint_seconds"
)
BY_HAND = """
def f(before, after):
    d = (after - before).double()
    n, mean = len(d), d.mean()
    return float(mean), math.sqrt(((d - mean) ** 2).sum() / (n * (n - 1)))
"""
WALK = """
def f(evaluations, patience):
    best, since = 0, 0
    for n in range(1, len(evaluations)):
        since += 1
        if evaluations[n] > evaluations[best]:
            best, since = n, 0
        if since == patience:
            return best, n
    return best, len(evaluations) - 1
"""
OR_EQUAL = WALK.replace("> evaluations[best]", ">= evaluations[best]")
RIGHT = [
    (1, EPOCH_BY_EPOCH), (1, f"({TOTAL}) / 3600"), (2, BY_HAND),
    (2, "((after - before).mean(), (after - before).std() / math.sqrt(len(before)))"), (3, WALK),
    (3, WALK.replace("return best, n\n", "return [best, n]\n")),
]  # fmt: skip
WRONG = [
    (1, TOTAL, "not in seconds"),
    (1, f"({TOTAL.replace('1 + ', '')}) / 3600", "before the first epoch"),
    (1, f"({TOTAL.replace('math.ceil', 'math.floor')}) / 3600", ") is "),
    (2, "((before - after).mean(), (after - before).std() / len(before) ** 0.5)", "after minus before"),
    (2, "((after - before).mean(), (after - before).std())", "root of N"),
    (2, "((after - before).mean(), (after - before).std(correction=0) / len(before) ** 0.5)", "N - 1"),
    (2, "(after - before).mean()[None]", "two numbers"),
    (2, "((after - before).mean(), (after.var() / 4 + before.var() / 4) ** 0.5)", "the error is"),
    (2, "(1.0, 0.0)", "the mean is"),
    (3, "(evaluations.index(max(evaluations)), len(evaluations) - 1)", "had not been made yet"),
    (3, OR_EQUAL, "equal evaluation"),
    (3, WALK.replace("since == patience", "since > patience"), "had not been made yet"),
    (3, WALK.replace("return best, n\n", "return n, best\n"), ") is "),
    (3, WALK.replace("best, since = n, 0", "best = n"), ") is "),
]  # fmt: skip


test_right_answers_of_any_form_pass, test_wrong_answers_are_refused_with_a_hint = exercise_tests(
    "13_full_run", IMPORTS, ARGUMENTS, RIGHT, WRONG
)

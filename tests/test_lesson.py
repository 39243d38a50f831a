"""What an exercise answers with: its check's hint, or that a return is missing or an argument was changed."""

import pytest
import torch

from ddpo_lessons.lessons import check_mine, why_not


def check_half(f):
    """Of 1 nothing is right, of others the half; with a hint."""
    for n, right in ((1, None), (2, 1), (4, 2)):
        if f(n) != right:
            raise AssertionError(f"of {n} it is {right}")  # pytest adds words to an assert


def test_an_answer_is_correct_or_gets_the_hint_of_the_check(capsys):
    check_mine(check_half, lambda n: None if n == 1 else n / 2)
    check_mine(check_half, lambda n: None if n == 1 else n)
    assert capsys.readouterr().out == "correct\nnot yet: of 2 it is 1\n"


def test_a_stub_says_what_it_says():
    def stub(n):
        raise NotImplementedError("your turn")

    assert why_not(check_half, stub) == "your turn"


def test_a_forgotten_return_is_named_and_a_right_none_is_not_blamed():
    assert "is there a `return`?" in why_not(check_half, lambda n: None)
    assert why_not(check_half, lambda n: None if n in (1, 4) else n / 2) == "of 4 it is 2"


def test_a_forgotten_return_is_named_where_it_breaks_the_check():
    assert "is there a `return`?" in why_not(lambda f: f(1).sum(), lambda n: None)
    assert "is there a `return`?" in why_not(lambda f: f(1) + f(2), lambda n: n if n == 1 else None)


def test_errors_of_the_answer_are_its_own():
    with pytest.raises(ZeroDivisionError):
        why_not(check_half, lambda n: None if n == 1 else 1 / 0)


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda x: x.mul_(2), torch.ones(2)),
        (lambda x: x[0].zero_(), torch.ones(2)),
        (lambda x: x.append(1), [3]),
        (lambda x: x.sort(), [2, 1]),
        (lambda x: x["a"][0].add_(1), {"a": [torch.ones(2)]}),
        (lambda x: x.update(a=2), {"a": 1}),
    ],
)
def test_an_answer_that_changes_its_arguments_is_refused(change, given):
    assert "work on copies" in why_not(lambda f: f(given), change)


def test_an_answer_that_reads_its_arguments_is_not():
    given = [torch.ones(2), {"a": [1, 2]}]
    assert why_not(lambda f: f(x=given), lambda x: (x[0] * 2, sorted(x[1]["a"]))) == ""

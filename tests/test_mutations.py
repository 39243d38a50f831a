"""Mutations fit the source, and the command tells a fault that is caught from one that survives."""

import shutil

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, put_in, survives


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {mutation.right}")
def test_a_mutation_changes_one_place(mutation):
    source = (ROOT / "ddpo_lessons" / mutation.file).read_text("utf-8")
    assert source.count(mutation.right) == 1
    compile(source.replace(mutation.right, mutation.wrong), mutation.file, "exec")


@pytest.mark.slow  # processes of pytest
def test_a_fault_is_caught_where_a_test_sees_it_and_taken_out_again(tmp_path):
    package = tmp_path / "ddpo_lessons"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sums.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from ddpo_lessons.sums import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for wrong, survived in (("3 * x", False), ("x * x", True)):
        assert survives(tmp_path, Mutation("sums.py", "2 * x", wrong, "test_sums.py")) is survived
    with put_in(tmp_path, Mutation("sums.py", "2 * x", "3 * x", "")):
        assert "3 * x" in (package / "sums.py").read_text()
    assert "2 * x" in (package / "sums.py").read_text()

"""The table of mutants fits the tree, and a fault is told from its absence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from mutants import (
    CAUGHT,
    MARK,
    SURVIVED,
    Mutant,
    files_of,
    find_source,
    find_tests,
    judge,
    read_mutants,
    run_tests,
)
from source_tree import REPOSITORY

from support import processes


def mutant(old: str = "return 1", new: str = "return 2", test: str = "test_one") -> Mutant:
    return Mutant(breaks="A promise.", old=old, new=new, tests=[test])


def test_each_stands_in_one_place_and_names_tests_that_exist() -> None:
    """After a change of the source or of a test's name the table follows."""
    source, tests = files_of(REPOSITORY / "src"), files_of(REPOSITORY / "tests")
    mutants = read_mutants()
    assert len(mutants) == 34
    for each in mutants:
        find_source(each, source)
        assert find_tests(each, tests)
        assert each.new != each.old


def test_what_is_not_there_once_is_refused() -> None:
    source = {Path("a.py"): "x = 1\ny = 1\n", Path("b.py"): "x = 1\n"}
    assert find_source(mutant("y = 1"), source) == Path("a.py")
    for old, places in (("x = 1", 2), ("= 1", 3), ("z", 0)):
        with pytest.raises(ValueError, match=f"^{places} places, expected 1, of: '{old}'"):
            find_source(mutant(old), source)
    tests = {Path("/r/t/a.py"): "def test_one(x) -> None:", Path("/r/t/b.py"): "# def test_one("}
    assert find_tests(mutant(test="test_one[2]"), tests, Path("/r")) == ["t/a.py::test_one[2]"]
    with pytest.raises(ValueError, match="0 files, expected 1, that define test_two"):
        find_tests(mutant(test="test_two"), tests)


@pytest.mark.parametrize(
    ("code", "verdict"),
    [(0, SURVIVED), (1, CAUGHT), (-9, CAUGHT), (4, "not judged, pytest ended with 4:\nno test")],
)
def test_a_fault_is_put_in_judged_and_taken_out(tmp_path: Path, code: int, verdict: str) -> None:
    file = tmp_path / "src/counted.py"
    file.parent.mkdir()
    file.write_text("def one():\n    return 1\n")

    def run_tests(nodes: Sequence[str], folder: Path) -> tuple[int, str]:
        assert (nodes, folder) == (["a.py::test_one"], tmp_path)
        assert file.read_text() == "def one():\n    return 2\n"
        return code, "no test"

    with mock.patch("mutants.run_tests", run_tests):
        assert judge(mutant(), ["a.py::test_one"], tmp_path) == verdict
    assert file.read_text() == "def one():\n    return 1\n"


def test_tests_import_the_copy_and_leave_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/gradsync.py").write_text("")  # in place of the package that is installed
    (tmp_path / "test_it.py").write_text("""
import subprocess

import gradsync


def test_it():
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert gradsync.__file__ == ""
""")
    code, output = run_tests(["test_it.py"], tmp_path)
    assert code == 1
    assert f"{tmp_path}/src/gradsync.py" in output
    assert processes.wait_until_gone(f"{MARK}={tmp_path}", timeout_s=10) == []

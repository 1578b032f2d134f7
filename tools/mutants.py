"""Faults, put into a copy of the source one at a time: the tests must notice each of them.

    python tools/mutants.py --list            what they are
    python tools/mutants.py [--only N …]      put them in and run the tests; about ten minutes

`mutants.toml` holds them: the promise that breaks, a text of the source and what takes its place,
and the names of the tests that should fail. Files are found by what is in them, so that code and
tests may move; a text that is not there exactly once is an error. Exit code 0 when all are caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from source_tree import REPOSITORY

TABLE = Path(__file__).with_suffix(".toml")
COPIED = ("src", "tests", "tools", "pyproject.toml")
"""Files that the tests need."""
TEST_LIMIT_S = 60
"""How long a test may take: a fault may well make ranks wait for each other for ever."""
RUN_LIMIT_S = 400
MARK = "MUTANTS_RUN"
"""A variable by which processes of a run are known."""
CAUGHT, SURVIVED = "caught", "survived"
_NOT_JUDGED = (2, 3, 4, 5)
"""Exit codes of a pytest that could not run the tests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One fault."""

    breaks: str
    """The promise that does not hold any more."""
    old: str
    """A text that stands in one place of the source."""
    new: str
    """Text in its place."""
    tests: list[str]
    """Names of test functions, with a parameter's id where one is enough: `test_x[2]`."""


def read_mutants(path: Path = TABLE) -> list[Mutant]:
    """All of them, in order; their numbers begin at 1."""
    with path.open("rb") as file:
        return [Mutant(**entry) for entry in tomllib.load(file)["mutant"]]


def files_of(folder: Path) -> dict[Path, str]:
    """The text of each Python file under `folder`."""
    return {path: path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}


def find_source(mutant: Mutant, source: Mapping[Path, str]) -> Path:
    """The file that has the text of `mutant`.

    Raises:
        ValueError: no file has it, or it stands in several places.
    """
    found = [path for path, text in source.items() for _ in range(text.count(mutant.old))]
    if len(found) != 1:
        raise ValueError(f"{len(found)} places, expected 1, of: {mutant.old.strip()!r}")
    return found[0]


def find_tests(mutant: Mutant, tests: Mapping[Path, str], root: Path = REPOSITORY) -> list[str]:
    """Node ids of the tests of `mutant`, for pytest started in `root`.

    Raises:
        ValueError: a name that no file has, or several have.
    """
    nodes = []
    for name in mutant.tests:
        definition = re.compile(rf"^def {name.partition('[')[0]}\(", re.MULTILINE)
        found = [path for path, text in tests.items() if definition.search(text)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} files, expected 1, that define {name}")
        nodes.append(f"{found[0].relative_to(root)}::{name}")
    return nodes


def run_tests(nodes: Sequence[str], folder: Path) -> tuple[int, str]:
    """Pytest's exit code and output; negative when a signal ended it.

    The copy's source comes first on the path. No byte code is written: it would be taken for that
    of another text of equal length, written in the same second.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CI": "1",  # the same examples in each run of a property
        MARK: str(folder),
    }
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*words, f"--timeout={TEST_LIMIT_S}", *nodes],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process, suppress(subprocess.TimeoutExpired):
        try:
            output, _ = process.communicate(timeout=RUN_LIMIT_S)
            return process.returncode, output
        finally:
            _end_all(str(folder))
    return process.returncode, ""


def _end_all(mark: str) -> None:
    """Kill what a fault has left running."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


def judge(mutant: Mutant, nodes: Sequence[str], folder: Path) -> str:
    """Put it in, run its tests, take it out again: `CAUGHT`, `SURVIVED`, or what went wrong."""
    path = find_source(mutant, files_of(folder / "src"))
    text = path.read_text("utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    try:
        code, output = run_tests(nodes, folder)
    finally:
        path.write_text(text, "utf-8")
    if code not in _NOT_JUDGED:
        return CAUGHT if code else SURVIVED
    return f"not judged, pytest ended with {code}:\n{output[-2000:]}"


def put_in(chosen: Mapping[int, Mutant], nodes: Mapping[int, list[str]], folder: Path) -> int:
    """Judge `chosen`, by number, in the copy in `folder`; returns how many were not caught."""
    code, output = run_tests(sorted({node for each in nodes.values() for node in each}), folder)
    if code != 0:
        raise SystemExit(f"the tests do not pass without any fault:\n{output[-4000:]}")
    missed = 0
    for number, mutant in chosen.items():
        began = time.monotonic()
        verdict = judge(mutant, nodes[number], folder)
        missed += verdict != CAUGHT
        took = f"{time.monotonic() - began:4.0f} s"
        print(f"{number:>2}  {verdict:<8} {took}  {mutant.breaks}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return missed


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", type=int, nargs="+", metavar="N")
    options = parser.parse_args()
    mutants = dict(enumerate(read_mutants(), 1))
    chosen = {number: mutants[number] for number in options.only or mutants}
    source, tests = files_of(REPOSITORY / "src"), files_of(REPOSITORY / "tests")
    nodes = {number: find_tests(mutant, tests) for number, mutant in chosen.items()}
    for number, mutant in chosen.items():
        path = find_source(mutant, source).relative_to(REPOSITORY / "src")
        if options.list:
            print(f"{number:>2}  {path}: {mutant.breaks}\n    {' '.join(mutant.tests)}")
    if options.list:
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in COPIED:
            copy = shutil.copytree if (REPOSITORY / each).is_dir() else shutil.copy
            copy(REPOSITORY / each, folder / each)
        return int(put_in(chosen, nodes, folder) > 0)


if __name__ == "__main__":
    raise SystemExit(main())

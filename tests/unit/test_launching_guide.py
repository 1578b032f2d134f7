"""The guide to launching names every variable that is read, and errors as they are said."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradsync.runtime import launchers

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gradsync"
PAGE = (ROOT / "docs" / "guide" / "launching.md").read_text()
TABLES = PAGE.partition("## Every variable that is read")[2].partition("## Common errors")[0]

NAME = re.compile(r"RANK|LOGLEVEL|[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|OMPI_MCA_[a-z_]+")
NOT_READ = {
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"),  # only set, for the agent
    *("ROLE_RANK", "ROLE_WORLD_SIZE"),  # only set, for ranks of a benchmark
    "GRADSYNC_DRILL",  # only set, to find what a drill has started
    *("LOCAL_SIZE", "PCI_BUS_ID", "CUBLAS_STATUS_ALLOC_FAILED", "RAISE_VARARGS"),  # no variables
    "FRAME_COUNTER",  # torch's, in Python
    *("BOOT_FAIL", "NODE_FAIL", "OUT_OF_MEMORY"),  # states of a job
}


def constants() -> Iterator[tuple[str, str]]:
    """Every string in the source that looks like a variable, with its file."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and NAME.fullmatch(text) and text not in NOT_READ:
                yield text, str(path.relative_to(SOURCE))


def composed() -> set[str]:
    """Names that the code puts together."""
    return {
        f"{mark}_COMM_WORLD_{part}" for mark in ("OMPI", "MV2") for part in launchers._COMM_WORLD
    }


def in_tables() -> set[str]:
    return set(re.findall(r"`(\w+)`", TABLES)) - {"train"}


def test_the_tables_name_what_the_code_reads() -> None:
    read = dict(constants()) | dict.fromkeys(composed(), "composed")
    assert {name: where for name, where in read.items() if name not in in_tables()} == {}
    assert in_tables() - set(read) == set()


ERRORS = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## Common errors")[2], re.MULTILINE)


@pytest.mark.parametrize("said", ERRORS)
def test_errors_are_said_so(said: str) -> None:
    """Up to numbers: `waited 300 s` is `waited {…} s` in the code."""
    source = "".join(path.read_text() for path in sorted(SOURCE.rglob("*.py")))
    pattern = r"[\s\"'f]*".join(re.escape(word) for word in re.sub(r"\d+", "#", said).split())
    assert re.search(pattern.replace(r"\#", r"\{[^{}]*\}"), source), said


def test_every_command_of_the_page_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines that the page shows for two nodes are what the command prints."""
    from gradsync.commands.cli.main import main

    shown = PAGE.partition("$ gradsync launch ")[2].partition("```")[0].splitlines()
    assert main(["launch", *shown[0].split()]) == 0
    assert capsys.readouterr().out.splitlines() == shown[1:]

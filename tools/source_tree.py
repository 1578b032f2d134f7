"""Run a check over the Python files of some folders and report what it finds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

Check = Callable[[Path, str], list[str]]
"""(path, text of the file) -> one line for each finding."""


def findings(check: Check, folders: list[Path]) -> list[str]:
    """Findings of `check` in every Python file under `folders`, in order of their names."""
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return [line for path in paths for line in check(path, path.read_text(encoding="utf-8"))]


def run(check: Check, default_folders: list[str]) -> int:
    """The command: folders as arguments; prints the findings; exit code 1 when there are any."""
    folders = [Path(name) for name in sys.argv[1:]]
    found = findings(check, folders or [REPOSITORY / name for name in default_folders])
    for line in found:
        print(line)
    return 1 if found else 0

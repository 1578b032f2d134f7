"""Sizes are numbers, not advice: a file stops at 600 lines, a function at 80, and each package of
src has a budget. (A cap per class made mixins and fragments.)

    python tools/check_sizes.py [FOLDER …]        (default: src and tools)

Prints `path:line name lines > limit` for each offender and exits with 1; without folders also every
package's lines beside its budget. A function is counted from its `def` line to its end, docstring
included.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from source_tree import REPOSITORY, run

FILE_LIMIT = 600
FUNCTION_LIMIT = 80
PACKAGES = REPOSITORY / "src" / "gradsync"
LIBRARY = {
    "checkpoint": 1_260,
    "comm": 2_175,
    "core": 780,
    "data": 1_858,
    "runtime": 4_966,
    "sync": 10_093,
}
COMMANDS = {
    "bench": 2_664,
    "cli": 1_363,
    "compat": 1_191,
    "launch": 1_671,
    "lint": 735,
    "models": 561,
    "parallel": 1_033,
    "plan": 2_760,
    "prepare": 918,
    "report": 999,
    "train": 3_994,
    "verify": 2_357,
}
"""Lines of each package of a floor, docstrings and blanks included."""
FLOORS = (("library", LIBRARY, 21_136), ("commands", COMMANDS, 20_292))
"""Most lines of each floor: a package grows only by what another one of its floor gives. Totals
only fall; the aim is 21,500 and 20,500."""
BUDGETS = LIBRARY | COMMANDS


def check_sizes(path: Path, text: str) -> list[str]:
    """The parts of one file that are too long."""
    sizes = [(1, "file", len(text.splitlines()), FILE_LIMIT)]
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            sizes.append((node.lineno, node.name, length, FUNCTION_LIMIT))
    return [
        f"{path}:{line} {name} {lines} > {limit}"
        for line, name, lines, limit in sorted(sizes)
        if lines > limit
    ]


def package_sizes() -> dict[str, int]:
    """Lines of each package of src."""
    return {
        folder.name: sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))
        for folder in sorted([*PACKAGES.iterdir(), *(PACKAGES / "commands").iterdir()])
        if (folder / "__init__.py").exists() and folder.name != "commands"
    }


def check_budgets(sizes: dict[str, int]) -> list[str]:
    """The packages that are larger than their budget, or have none; floors over their total."""
    return [
        f"the budgets of the {name} are {sum(budgets.values())} lines > {most}"
        for name, budgets, most in FLOORS
        if sum(budgets.values()) > most
    ] + [
        f"{PACKAGES.name}/{name} {lines} lines > {BUDGETS.get(name, 0)}"
        for name, lines in sizes.items()
        if lines > BUDGETS.get(name, 0)
    ]


if __name__ == "__main__":
    too_large = []
    if not sys.argv[1:]:
        sizes = package_sizes()
        too_large = check_budgets(sizes)
        for name, lines in sizes.items():
            print(f"{name:12}{lines:>7,} of {BUDGETS.get(name, 0):,}")
    print(*too_large, sep="\n", end="\n" if too_large else "")
    raise SystemExit(run(check_sizes, ["src", "tools"]) or bool(too_large))

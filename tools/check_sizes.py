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
BUDGETS = {
    **{"core": 991, "runtime": 4_609, "comm": 2_714, "sync": 11_496, "data": 2_854},
    **{"checkpoint": 1_365, "models": 970, "parallel": 1_262, "plan": 4_475, "train": 5_121},
    **{"launch": 1_418, "compat": 1_167, "verify": 3_277, "bench": 4_099},
    **{"cli": 3_930, "lint": 1_014, "report": 1_372},
}
"""Lines of each package, docstrings and blanks included. They only go down: raising one takes a
commit that says why."""


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
        for folder in sorted(PACKAGES.iterdir())
        if (folder / "__init__.py").exists()
    }


def check_budgets(sizes: dict[str, int]) -> list[str]:
    """The packages that are larger than their budget, or have none."""
    return [
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

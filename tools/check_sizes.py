"""Sizes are numbers, not advice: a file stops at 600 lines, a function at 80, a class at 250.

    python tools/check_sizes.py [FOLDER …]        (default: src and tools)

Prints `path:line name lines > limit` for each offender and exits with 1. A function is counted from
its `def` line to its end, docstring included.
"""

from __future__ import annotations

import ast
from pathlib import Path

from source_tree import run

FILE_LIMIT = 600
FUNCTION_LIMIT = 80
CLASS_LIMIT = 250


def check_sizes(path: Path, text: str) -> list[str]:
    """The parts of one file that are too long."""
    sizes = [(1, "file", len(text.splitlines()), FILE_LIMIT)]
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = FUNCTION_LIMIT
        elif isinstance(node, ast.ClassDef):
            limit = CLASS_LIMIT
        else:
            continue
        sizes.append((node.lineno, node.name, (node.end_lineno or 0) - node.lineno + 1, limit))
    return [
        f"{path}:{line} {name} {lines} > {limit}"
        for line, name, lines, limit in sorted(sizes)
        if lines > limit
    ]


if __name__ == "__main__":
    raise SystemExit(run(check_sizes, ["src", "tools"]))

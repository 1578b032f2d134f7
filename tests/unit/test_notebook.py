"""The notebook: its cells run, and what is stored in it is what they print."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "invariance.ipynb"
CELLS = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]


def stored(cell: dict[str, Any]) -> str:
    return "".join(line for output in cell["outputs"] for line in output.get("text", ()))


def test_its_cells_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace; those tagged `slow` are compiled only. Hashes may be another
    processor's, so they are compared with each other; the rest is what is stored."""
    monkeypatch.chdir(EXAMPLES)
    names: dict[str, Any] = {}
    for number, cell in enumerate(CELLS):
        code = compile("".join(cell["source"]), f"cell {number + 1}", "exec")
        if "slow" in cell["metadata"].get("tags", ()):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)  # noqa: S102  our own cells
        lines, expected = printed.getvalue().splitlines(), stored(cell).splitlines()
        assert len(lines) == len(expected)
        if number != 3:
            same = [line for line in lines if not line.startswith("bucketed")]
            assert same == [line for line in expected if not line.startswith("bucketed")]
        else:
            hashes = [line.split()[-1] for line in lines]
            assert len(set(hashes[:5])) == 1 < len(set(hashes[5:]))


def test_it_is_executed_and_small() -> None:
    assert all(cell["execution_count"] for cell in CELLS)
    pictures = [o for cell in CELLS for o in cell["outputs"] if "image/svg+xml" in o.get("data", {})]
    assert len(pictures) == 2
    assert NOTEBOOK.stat().st_size < 200_000

"""The notebook: its cells run, and what it has stored is what they print."""

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
SHORTER = {
    '"num_epochs": 5': '"num_epochs": 1',
    "(1, 2, 3, 4, 8)": "(1, 2, 3)",
    "(2, 3, 4, 8)": "(2,)",
}


def test_its_cells_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, with fewer ranks and layers."""
    monkeypatch.chdir(EXAMPLES)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for cell in CELLS:
            source = "".join(cell["source"])
            for whole, part in SHORTER.items():
                source = source.replace(whole, part)
            exec(compile(source, "cell", "exec"), names)  # noqa: S102  our own cells
    lines = printed.getvalue().splitlines()
    found = [line.split() for line in lines]
    hashes = {(name, words[-1]) for name, *words in found if words[1] == "rank(s)"}
    assert [name for name, _ in sorted(hashes)].count("invariant") == 1 < len(hashes) - 1
    assert "invariant  2 ranks against one: 0.0e+00" in lines
    stored = [
        t for c in CELLS for o in c["outputs"] for t in "".join(o.get("text", ())).splitlines()
    ]
    assert {line for line in lines if "Mbit/s" in line} < set(stored)


def test_it_is_executed_and_small() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    kinds = [kind for cell in CELLS for o in cell["outputs"] for kind in o.get("data", ())]
    assert kinds.count("image/svg+xml") == 1
    assert NOTEBOOK.stat().st_size < 200_000

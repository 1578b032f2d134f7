"""One training step stays a short walk through the package."""

from __future__ import annotations

import pytest
from trace_step import trace


@pytest.mark.parametrize(("transport", "most"), [("shared_memory", 16), ("gloo", 12)])
def test_a_step_executes_few_files(transport: str, most: int) -> None:
    files = trace(transport, "handle")
    assert "sync/step.py" in files
    assert len(files) <= most, sorted(files)

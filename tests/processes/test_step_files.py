"""One training step stays a short walk through the package."""

from __future__ import annotations

import pytest
from trace_step import NUM_RANKS, trace

from support.fork_server import run_forked, torch_ranks


@pytest.mark.parametrize(("transport", "most"), [("shared_memory", 16), ("gloo", 12)])
def test_a_step_executes_few_files(transport: str, most: int) -> None:
    files = trace(transport, "handle", lambda words: run_forked(words, torch_ranks(NUM_RANKS)))
    assert "sync/step.py" in files
    assert len(files) <= most, sorted(files)

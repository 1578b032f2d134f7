from __future__ import annotations

import pytest

from gradsync.sync import late_update
from gradsync.sync.ownership import zero


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled something, after which no update is late."""
    monkeypatch.setattr(late_update, "has_compiled", lambda: False)
    monkeypatch.setattr(zero, "has_compiled", lambda: False)

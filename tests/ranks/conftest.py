from __future__ import annotations

import pytest

from gradsync.sync import late_update, replicas


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled something, after which no update is late."""
    for module in (late_update, replicas):
        monkeypatch.setattr(module, "has_compiled", lambda: False)

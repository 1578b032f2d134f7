"""What becomes of an error that no job raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsync.errors import RendezvousError
from gradsync.verify import worker
from gradsync.verify.plan import Settings


def test_an_error_before_the_first_job_is_not_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_session(settings: Settings) -> None:
        raise RendezvousError("rank 1 did not come")

    monkeypatch.setattr(worker, "open_session", open_session)
    worker.write_work(tmp_path, 0, Settings(), [])
    with pytest.raises(RendezvousError, match="did not come"):
        worker.run_worker(tmp_path)

"""What becomes of an error that no job raised, and what a rank writes down of one that did."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import DistBackendError

from gradsync.errors import LostPeerError, RendezvousError
from gradsync.verify import worker
from gradsync.verify.plan import Cell, Job, Settings
from gradsync.world import World

CELL = Cell(strategy="naive", world_size=1, model="mlp", dtype="fp32")


def test_an_error_before_the_first_job_is_not_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_session(settings: Settings) -> None:
        raise RendezvousError("rank 1 did not come")

    monkeypatch.setattr(worker, "open_session", open_session)
    worker.write_work(tmp_path, 0, Settings(), [])
    with pytest.raises(RendezvousError, match="did not come"):
        worker.run_worker(tmp_path)


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (ValueError("Connection closed by peer"), False),
        (RuntimeError("shapes do not match"), False),
        (RuntimeError("connection reset by storage server"), False),
        (LostPeerError("rank 0: rank 1 has ended"), True),
        (DistBackendError("NCCL error: remote process exited"), True),
    ],
)
def test_a_note_says_whether_it_only_tells_of_a_lost_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, echo: bool
) -> None:
    def run_cell(*args: object) -> None:
        raise error

    monkeypatch.setattr(worker, "run_cell", run_cell)
    paths = {"done": tmp_path / "done-0.jsonl", "noted": tmp_path / "error-0-rank_00000.json"}
    ranks = worker.Worker(Settings(), World(), folder=tmp_path, **paths)
    with pytest.raises(type(error)):
        ranks.run([Job(cell=CELL)])
    (note,) = worker.read_errors(tmp_path, 0)
    assert (note["rank"], note["echo"]) == (0, echo)
    assert note["message"] == f"{type(error).__name__}: {error}"

"""Files with the stacks of ranks: whose they are, and that their loss ends nothing."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from gradsync.runtime import stacks
from gradsync.runtime.activity import Activity
from gradsync.runtime.peers import Peers
from gradsync.runtime.stacks import StackFiles
from gradsync.runtime.store import Presence

STEERING = "\x1b]0;owned\x07"


class Records:
    """Records of a run in which rank 1 was last seen in that place."""

    def get(self, key: str) -> bytes:
        return Activity(beat=1, where=f"data.py:7 {STEERING}").record().encode()


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    monkeypatch.setattr(stacks, "process_state", lambda _: "it is stopped")
    others = {1: Presence(socket.gethostname(), "", 4711), 2: Presence("elsewhere", "", 4712)}
    return Peers(Records(), rank=0, world_size=3, processes=others)  # type: ignore[arg-type]


def test_each_rank_of_this_host_has_a_file(tmp_path: Path, peers: Peers) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name=f"loader{STEERING}")
    thread.start()
    files = StackFiles(str(tmp_path / "run" / "stacks"))
    said = files.keep(peers, [1, 2], ValueError(STEERING))
    end.set()
    thread.join()
    folder = tmp_path / "run" / "stacks"
    assert said == f"; stacks of the ranks are in {folder}"
    texts = {path.name: path.read_text() for path in folder.glob("*.txt")}
    assert sorted(texts) == ["rank-0.txt", "rank-1.txt"]
    assert texts["rank-0.txt"].startswith(f"rank 0, process {os.getpid()} on ")
    assert r"ValueError: \x1b]0;owned\x07" in texts["rank-0.txt"]
    assert r"--- thread loader\x1b]0;owned" in texts["rank-0.txt"]
    assert "threading.py" in texts["rank-0.txt"]
    assert texts["rank-1.txt"].endswith(
        "it is stopped\nlast seen in data.py:7 \\x1b]0;owned\\x07\n"
    )
    (folder / "rank-0.txt").unlink()
    assert files.keep(peers, [1]) == said  # once
    assert not (folder / "rank-0.txt").exists()


def test_a_rank_that_wrote_its_own_keeps_it(tmp_path: Path, peers: Peers) -> None:
    (tmp_path / "rank-1.txt").write_text("its own")
    StackFiles(str(tmp_path)).keep(peers, [1])
    assert (tmp_path / "rank-1.txt").read_text() == "its own"
    os.utime(tmp_path / "rank-1.txt", (0, 0))  # of an earlier run in this folder
    StackFiles(str(tmp_path)).keep(peers, [1])
    assert "it is stopped" in (tmp_path / "rank-1.txt").read_text()


def test_a_private_folder_is_the_users_alone(
    tmp_path: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = StackFiles()
    files.private_name = "0123"
    folder = tmp_path / "gradsync-stacks-0123"
    assert str(folder) in files.keep(peers, [])
    assert folder.stat().st_mode & 0o777 == 0o700
    other = StackFiles()
    other.private_name = "4567"
    (tmp_path / "gradsync-stacks-4567").symlink_to(folder)
    assert other.keep(peers, []) == ""
    other.private_name = "89ab"
    (tmp_path / "gradsync-stacks-89ab").mkdir()
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert other.keep(peers, []) == ""
    assert list((tmp_path / "gradsync-stacks-89ab").iterdir()) == []


def test_a_disk_without_space_ends_nothing(
    tmp_path: Path, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stacks, "replace_text", full)
    assert StackFiles(str(tmp_path)).keep(peers, [1]) == ""

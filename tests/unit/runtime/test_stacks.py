"""Files with the stacks of ranks: whose they are, and that their loss ends nothing."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from gradsync.runtime import stacks
from gradsync.runtime.stacks import StackFiles

STEERING = "\x1b]0;owned\x07"


def test_a_rank_writes_its_own_file_once(tmp_path: Path) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name=f"loader{STEERING}")
    thread.start()
    folder = tmp_path / "run" / "stacks"
    files = StackFiles(str(folder))
    said = files.keep(0, ValueError(STEERING))
    end.set()
    thread.join()
    assert said == f"; stacks of the ranks are in {folder}"
    text = (folder / "rank-0.txt").read_text()
    assert text.startswith(f"rank 0, process {os.getpid()} on ")
    assert r"ValueError: \x1b]0;owned\x07" in text
    assert r"--- thread loader\x1b]0;owned" in text
    assert "threading.py" in text
    (folder / "rank-0.txt").unlink()
    assert files.keep(0) == said
    assert not (folder / "rank-0.txt").exists()


def test_a_private_folder_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = StackFiles()
    files.private_name = "0123"
    folder = tmp_path / "gradsync-stacks-0123"
    assert str(folder) in files.keep(0)
    assert folder.stat().st_mode & 0o777 == 0o700
    other = StackFiles()
    other.private_name = "4567"
    (tmp_path / "gradsync-stacks-4567").symlink_to(folder)
    assert other.keep(0) == ""
    other.private_name = "89ab"
    (tmp_path / "gradsync-stacks-89ab").mkdir()
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert other.keep(0) == ""
    assert list((tmp_path / "gradsync-stacks-89ab").iterdir()) == []


def test_a_disk_without_space_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stacks, "replace_text", full)
    assert StackFiles(str(tmp_path)).keep(0) == ""

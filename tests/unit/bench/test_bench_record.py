"""A record is complete or not there, says where it was made, and refuses a place in time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.bench.experiment import environment, write_record
from gradsync.core.files import check_place, write_result, write_text
from gradsync.errors import ConfigError, RunError


def record(folder: Path, **data: Any) -> Path:
    return write_record(folder, name="x", command="do x", environment={"cpu": "c"}, data=data)


def test_the_head_comes_first(tmp_path: Path) -> None:
    path = record(tmp_path / "new" / "folder", rows=[[1.5, 2e-7], [3]], none=None)
    assert path == tmp_path / "new" / "folder" / "record.json"
    found = json.loads(path.read_text())
    assert list(found) == ["environment", "command", "benchmark", "rows", "none"]
    assert found["rows"] == [[1.5, 2e-7], [3]]
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_older_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path, value=1)
    before = path.read_text()
    with pytest.raises(ValueError, match="Out of range"):
        record(tmp_path, value=float("nan"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"could not write .*record.json: No space left on device"):
        record(tmp_path, value=2)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_plain_file_is_written_into(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_text(link, "one")
    assert link.is_symlink()
    assert target.read_text() == "one"
    reader, writer = os.pipe()
    try:
        write_text(Path(f"/dev/fd/{writer}"), "two")
        assert os.read(reader, 10) == b"two"
    finally:
        os.close(reader)
        os.close(writer)
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    check_place("--out", tmp_path / "to" / "be" / "made", folder=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*file/below: .*file is no folder"):
        check_place("--out", tmp_path / "file" / "below", folder=True)
    with pytest.raises(ConfigError, match=r"--csv .*file/below"):
        check_place("--csv", tmp_path / "file" / "below" / "x.csv")


def test_a_result_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "to" / "be" / "x.csv"
    check_place("--csv", path)
    assert not path.parent.exists()
    write_result(path, "text")
    assert path.read_text() == "text"
    with pytest.raises(RunError, match=str(tmp_path)):
        write_result(path / "below.csv", "text")


def test_the_environment_is_json_and_names_nobody() -> None:
    found = environment(world_size=3, threads=2)
    assert json.loads(json.dumps(found)) == found
    assert found["world_size"] == 3
    assert found["threads_per_rank"] == 2
    assert found["backend"] == "none"
    assert 0 < found["memory_gib"] < 1e6
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    text = json.dumps(found)
    assert os.uname().nodename not in text
    assert str(Path.home()) not in text

"""Files and caches: what is read within bounds, what is written where, what is believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gradsync.core.files import (
    Filesystem,
    StagedDirectory,
    parse_json,
    printable,
    read_bytes,
    replace_text,
)


@pytest.mark.parametrize(
    "value", [None, True, 0, -(2**63), 1.5, "ä", "\U0001f600", [], {"a": [{"b": 1e-300}]}]
)
def test_json_is_read_as_it_is(tmp_path: Path, value: Any) -> None:
    import json

    (tmp_path / "a.json").write_text(json.dumps(value))
    assert parse_json(read_bytes(tmp_path / "a.json")) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"NaN", "NaN where a finite number belongs"),
        (b"[-Infinity]", "-Infinity where a finite number belongs"),
        (b"\xff", "can't decode byte 0xff"),
        (b"", "Expecting value"),
        (b"1 2", "Extra data"),
    ],
)
def test_json_that_is_refused(text: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)


def test_infinity_where_it_may_be() -> None:
    assert parse_json(b"Infinity", finite=False) == float("inf")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("line\n\ta\u00a0b\U0001f600", None),
        ("\x00\x1b[2J\r\x7f\x9b31m\u202e", "\\x00\\x1b[2J\\r\\x7f\\x9b31m\\u202e"),
    ],
)
def test_what_steers_a_terminal_is_spelt_and_words_are_not(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)


def test_only_files_of_a_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert read_bytes(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="has more than 4 bytes"):
        read_bytes(tmp_path / "file", 4)
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="is not a regular file"):
            read_bytes(path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "nothing")


def test_a_file_is_replaced_and_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "file").symlink_to("victim")
    replace_text(tmp_path / "file", "text", mode=0o600)
    assert (tmp_path / "file").read_text() == "text"
    assert stat.S_IMODE((tmp_path / "file").lstat().st_mode) == 0o600
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_directory_that_cannot_be_committed_leaves_the_old_one(tmp_path: Path) -> None:
    class Failing(Filesystem):
        def rename(self, source: Path, target: Path) -> None:
            if source == staged.path:
                raise OSError(5, "Input/output error")
            super().rename(source, target)

    target = tmp_path / "there"
    target.mkdir()
    (target / "old").touch()
    with (
        pytest.raises(OSError, match="Input/output error"),
        StagedDirectory(Failing(), tmp_path, "there") as staged,
    ):
        staged.commit(target, replace=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "old"]
    with StagedDirectory(Filesystem(), tmp_path, "there") as staged:
        staged.commit(target, replace=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]

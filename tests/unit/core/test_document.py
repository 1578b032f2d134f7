"""Files that people write: what is read, and what is refused in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsync.commands.document import LARGEST_BYTES, read_document
from gradsync.commands.plan.hardware_file import load_hardware
from gradsync.commands.train.config_io import parse_config
from gradsync.errors import ConfigError

REFUSED = [
    ("a.yaml", "steps: " + "9" * 5_000, "does not parse: Exceeds the limit"),
    ("a.toml", "out = 2026-13-45", "does not parse: "),
    ("a.yaml", 'lr: !!float "abc"', "does not parse: could not convert string to float: 'abc'"),
    (
        "a.yaml",
        "out: !!python/object/apply:os.system [id]",
        ":1 does not parse: could not determine",
    ),
    ("a.yaml", "a: " + "[" * 5_000, "does not parse: maximum recursion depth"),
    ("a.yaml", "a: 1\nb: 2\na: 3", ":3 does not parse: 'a' is there already, in line 1"),
    ("a.yaml", "{a: 1, a: 2}", "'a' is there already"),
    ("a.toml", "a = 1\na = 2", "does not parse"),
    ("a.json", "{", "does not parse: Expecting property name"),
    ("a.yaml", "a: 1\n---\na: 2", ":2 does not parse: expected a single document"),
    ("a.yaml", "a: 1".encode("utf-16"), "is not UTF-8 text"),
    ("a.yaml", "#" * (LARGEST_BYTES + 1), f"more than {LARGEST_BYTES}"),
]


@pytest.mark.parametrize(("name", "content", "words"), REFUSED)
def test_what_does_not_parse_is_refused_in_one_line(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        read_document(path, "configuration")
    message = str(caught.value)
    assert words in message
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
@pytest.mark.parametrize("read", [lambda path: parse_config([path]), load_hardware])
@pytest.mark.timeout(5)
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, read: Callable[[str], object], make: Callable[[Path], None]
) -> None:
    make(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"cannot read .*a\.yaml: is not a regular file"):
        read(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "\ufeffday: 2026-13-45\nrate: 1e-3\nbase: {x: 1}\nother: {x: 2}\n"),
        ("a.toml", 'day = "2026-13-45"\nrate = "1e-3"\nbase.x = 1\nother.x = 2\n'),
        ("a.json", '{"day": "2026-13-45", "rate": "1e-3", "base": {"x": 1}, "other": {"x": 2}}'),
    ],
)
def test_what_is_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    document = read_document(tmp_path / name, "configuration")
    expected = {"day": "2026-13-45", "rate": "1e-3", "base": {"x": 1}, "other": {"x": 2}}
    assert document.values == expected
    where = f"configuration {tmp_path / name}"
    assert document.at("other.x") == (f"{where}:4" if name == "a.yaml" else where)

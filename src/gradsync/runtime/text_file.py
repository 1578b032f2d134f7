"""Small files: read with bounds, written whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

PRIVATE = 0o600
"""Mode of a file that is its user's alone."""
_LARGEST = 1 << 26
"""Bytes of a JSON document. Reading one takes about ten times as much memory."""
_DEEPEST = 64
_LONGEST_INTEGER = 40
"""Digits: 128 bits."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading; links are followed.

    Raises:
        OSError: as the file system says; or it is a pipe, a device or a directory, from which
            reading may never end.
    """
    # Opening a pipe that has no writer would wait for one.
    return os.fdopen(_regular(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


def _regular(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags, PRIVATE)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    what = "is a directory" if stat.S_ISDIR(mode) else "is a pipe or a device, not a file"
    raise OSError(errno.EINVAL, what, str(path))


def read_bytes(path: Path, largest: int = _LARGEST) -> bytes:
    """The content of the regular file `path`; returns at once, whatever else may lie there.

    Args:
        path: the file, or a link to one.
        largest: bytes that it may have.

    Raises:
        OSError: see `open_regular`; more bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise OSError(errno.EFBIG, f"has {size} bytes, expected at most {largest}", str(path))
        return file.read(size)


def read_json(path: Path, *, finite: bool = True) -> Any:
    """The value in a JSON file; see `parse_json`.

    Raises:
        OSError: see `read_bytes`.
        ValueError: see `parse_json`.
    """
    return parse_json(read_bytes(path), finite=finite)


def parse_json(text: bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text that may come from anywhere.

    Args:
        text: UTF-8.
        finite: refuse numbers that are not, which Python writes as NaN and Infinity.

    Raises:
        ValueError: one line: no JSON, text that UTF-8 does not have, a key twice in one object, an
            integer of more than 40 digits, a number that is not finite, more than 64 levels of
            nesting.
    """
    try:
        value = json.loads(
            text.decode(),
            object_pairs_hook=_each_key_once,
            parse_int=_integer,
            parse_float=_finite if finite else float,
            parse_constant=_finite if finite else float,
        )
        if b"\\u" in text:  # half of a surrogate pair is legal in JSON, and cannot be printed
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"more than {_DEEPEST} levels of nesting") from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise ValueError(f"more than {_DEEPEST} levels of nesting")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return []
    return [inner for inner in value if isinstance(inner, dict | list)]


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice[:80]!r} twice in one object")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} where a finite number belongs")
    return number


def one_line(text: object) -> str:
    """Text that a file brought along, for an error: printable, at most 400 characters."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:401])
    return shown if len(shown) <= 400 else f"{shown[:400]} …"


def json_text(document: Mapping[str, Any]) -> str:
    """Indented JSON with a line's end, in which a list of numbers takes one line."""
    text = json.dumps(document, indent=1, allow_nan=False)
    return re.sub(r"\[[-\d.eE,\s+]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def write_text(path: Path, text: str) -> None:
    """Put `text` into the file `path` in one step: a reader sees the old one or all of this one.

    What cannot be replaced is written into: whatever a link names, a pipe, /dev/stdout, a file in a
    folder that may not be written.

    Raises:
        OSError: as the file system says.
    """
    replaceable = not path.is_symlink() and (path.is_file() or not path.exists())
    if not replaceable or not os.access(path.parent, os.W_OK):
        path.write_text(text, encoding="utf-8")
        return
    replace_text(path, text)


def replace_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Make `text` the file `path` in one step; a link of that name is replaced, not followed.

    Args:
        path: in a folder that may be written.
        text: for a new file, written beside it under a name that cannot be foreseen.
        mode: of the new file; the process's umask takes bits away.

    Raises:
        OSError: as the file system says.
    """
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(8)}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_private(path: Path) -> TextIO:
    """Open a file to append to; a new one is its user's alone, and no link is followed.

    Raises:
        OSError: as the file system says; or `path` is a link or no regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.fdopen(_regular(path, flags), "a", encoding="utf-8")

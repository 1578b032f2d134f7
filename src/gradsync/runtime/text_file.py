"""Files on disk: readable JSON, bounded reading, and files that are there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def json_text(document: Mapping[str, Any]) -> str:
    """Indented JSON with a line's end, in which a list of numbers takes one line."""
    text = json.dumps(document, indent=1, allow_nan=False)
    return re.sub(r"\[[-\d.eE,\s+]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def read_bytes(path: Path, largest: int) -> bytes:
    """The content of the regular file `path`; returns at once, whatever else may lie there.

    Args:
        path: the file, or a link to one.
        largest: bytes that it may have.

    Raises:
        OSError: as the file system says; a pipe or a device, which may never end; more bytes.
    """
    # A pipe without a writer would block.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(path))
        raw = file.read(largest + 1)
    if len(raw) > largest:
        raise OSError(errno.EFBIG, f"has more than {largest} bytes", str(path))
    return raw


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
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

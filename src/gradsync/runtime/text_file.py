"""Documents on disk: readable JSON, and files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

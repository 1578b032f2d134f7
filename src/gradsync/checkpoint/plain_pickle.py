"""Small pickles of other programs, such as nanoGPT's `meta.pkl`: read without running code."""

from __future__ import annotations

import io
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any

from gradsync.core.files import read_bytes

_LARGEST = 1 << 28


def read_plain(path: Path) -> Any:
    """The dicts, lists, texts and numbers in a pickle; no class is instantiated or called. Raises
    UnpicklingError, or another error for a malformed pickle."""
    return _PlainUnpickler(io.BytesIO(read_bytes(path, _LARGEST))).load()


class _PlainUnpickler(Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function."""
        raise UnpicklingError(f"it names {module}.{name}, which no list of characters needs")

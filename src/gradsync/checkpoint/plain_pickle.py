"""Small pickles of other programs, such as nanoGPT's `meta.pkl`: read without building anything."""

from __future__ import annotations

import io
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any

from gradsync.core.files import read_bytes

_LARGEST = 1 << 28


def read_plain(path: Path) -> Any:
    """The dicts, lists, texts and numbers in a pickle, in which nothing is built or called;
    UnpicklingError and whatever else is wrong with it."""
    return _PlainUnpickler(io.BytesIO(read_bytes(path, _LARGEST))).load()


class _PlainUnpickler(Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """No class and no function is needed, so none is looked up."""
        raise UnpicklingError(f"it names {module}.{name}, which no list of characters needs")

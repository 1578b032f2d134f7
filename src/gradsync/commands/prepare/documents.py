"""Sources of text: files, folders and JSON lines, as a stream of documents."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gradsync.errors import DataError

HUGGING_FACE = "hf:"
"""Prefix of the name of a data set that the package `datasets` reads."""
_JSON_LINES = ".jsonl"
_BLOCK_BYTES = 1 << 22
_PROBE_BYTES = 1 << 13


def is_stream(data: str) -> bool:
    """Whether `data` names text to stream: `hf:…`, a `.jsonl` file, a pattern (`*`, `?`, `[`), or a
    folder that holds `.jsonl` files and no `train.bin`."""
    if data.startswith(HUGGING_FACE) or data.endswith(_JSON_LINES):
        return True
    folder = Path(data)
    if not data or (folder / "train.bin").exists():
        return False
    return any(folder.glob(f"*{_JSON_LINES}")) if folder.is_dir() else glob.has_magic(data)


def json_lines(data: str) -> list[Path]:
    """The `.jsonl` files that a file name, a pattern or a folder matches, sorted; DataError if
    there are none, or if other files match."""
    path = Path(data)
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        paths = sorted(path.glob(f"*{_JSON_LINES}"))
    else:
        paths = sorted(map(Path, glob.glob(data, recursive=True)))
    if not paths:
        raise DataError(f"no file is called {data}")
    for path in paths:
        if path.suffix != _JSON_LINES or not path.is_file():
            raise DataError(f"{path} is no {_JSON_LINES} file; `gradsync prepare` takes any text")
    return paths


class Documents:
    """All documents under `paths`, in a fixed order, each as pieces; may be iterated more than
    once. Pieces are a few MiB, so that a large file is never in memory as a whole.

    A `.jsonl` file holds one document per line, under `text_key`; any other file is one document.
    Folders are read recursively except `exclude`, sorted by name; hidden and binary files in them
    are skipped and counted. Empty texts are left out.

    DataError if a path does not exist or cannot be read, or if a file in `paths` is binary; while
    iterating, for an invalid line (it names `file:line`).
    """

    def __init__(
        self, paths: Sequence[Path | str], *, text_key: str = "text", exclude: Path | None = None
    ) -> None:
        self.text_key = text_key
        self.skipped_files = 0
        """Hidden and binary files found in folders; a hidden folder counts as one."""
        self._exclude = exclude.resolve() if exclude else None
        self.files: list[Path] = []
        for path in map(Path, paths):
            if path.is_dir():
                self.files += self._walk(path)
            elif not path.exists():
                raise DataError(f"{path} does not exist")
            elif not path.is_file() or _is_binary(path):
                raise DataError(f"{path} is no text file; gradsync prepare reads text and .jsonl")
            else:
                self.files.append(path)

    def _walk(self, folder: Path) -> Iterator[Path]:
        for parent, folders, names in os.walk(folder, onerror=_unreadable):
            seen = [name for name in sorted(folders) if not name.startswith(".")]
            self.skipped_files += len(folders) - len(seen)
            folders[:] = [n for n in seen if (Path(parent) / n).resolve() != self._exclude]
            for name in sorted(names):
                path = Path(parent) / name
                if name.startswith(".") or not path.is_file() or _is_binary(path):
                    self.skipped_files += 1
                else:
                    yield path

    def __iter__(self) -> Iterator[Iterable[bytes]]:
        for path in self.files:
            if path.suffix == _JSON_LINES:
                yield from self._json_lines(path)
            elif path.stat().st_size:
                yield _pieces(path)

    def _json_lines(self, path: Path) -> Iterator[Iterable[bytes]]:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line, parse_int=float)  # only text is used
                except ValueError as error:
                    raise DataError(f"{path}:{number}: no JSON: {error}") from error
                except RecursionError:
                    raise DataError(f"{path}:{number}: nests too deeply") from None
                text = row.get(self.text_key) if isinstance(row, dict) else None
                if not isinstance(text, str):
                    if not isinstance(row, dict):
                        found = f"it is a {type(row).__name__}"
                    elif self.text_key in row:
                        found = "something else is there"
                    else:
                        found = f"its keys are {', '.join(map(repr, row))[:200] or 'none'}"
                    raise DataError(
                        f"{path}:{number}: needs an object with a string under {self.text_key!r}; "
                        f"{found}; another key is named with --text-key"
                    )
                if text:
                    # A lone surrogate is legal in JSON and nowhere else.
                    yield [text.encode(errors="replace")]


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: {error.strerror}") from error


def _is_binary(path: Path) -> bool:
    """Whether there is a NUL byte near the start, as git checks."""
    try:
        with path.open("rb") as stream:
            return b"\0" in stream.read(_PROBE_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _pieces(path: Path) -> Iterator[bytes]:
    """The content of a file in order; pieces end at a line end if there is one."""
    rest = b""
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            block = rest + block
            cut = _cut_point(block)
            yield block[:cut]
            rest = block[cut:]
    if rest:
        yield rest


def _cut_point(block: bytes) -> int:
    """The place after the last line end, else before the last UTF-8 character, which may be cut."""
    cut = block.rfind(b"\n") + 1
    if cut:
        return cut
    cut = len(block) - 1
    while cut > len(block) - 4 and block[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut if cut > 0 else len(block)

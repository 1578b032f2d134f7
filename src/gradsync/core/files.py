"""Read files with bounds, and write files and directories whole or not at all. No torch here.

A directory that appears complete or not at all:

    make .tmp-NAME-HOST-PID-TIME   and hold a lock on it while this process lives
    write file, fsync file       for each file, hashed on the way
    fsync .tmp-…                 its list of files is on disk
    rename .tmp-… -> NAME        the commit
    fsync parent                 the commit is on disk

[Note: whose temporary directory] A killed writer leaves its `.tmp-…` behind. A process id does not
tell whether it lives: ids are reused, and containers share them. So the writer holds `flock` on the
directory, which the kernel drops when the process ends. A process that gets the lock knows that the
writer is dead. Without working locks (some network file systems) nothing is deleted. A lock may be
invisible from another host, so another host's directory must also be an hour old.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TextIO, TypeVar
from unicodedata import category

from gradsync.errors import ConfigError, RunError

log = logging.getLogger("gradsync")

T = TypeVar("T")

PRIVATE = 0o600
"""Mode of a file that only its user can access."""
TEMPORARY_PREFIX = ".tmp-"
_FOREIGN_AGE_S = 3600.0
_HOST = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())
_LARGEST = 1 << 26
"""Largest JSON document, bytes. Reading one takes about ten times as much memory."""


# -- reading --------------------------------------------------------------------------------------


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading; links are followed. OSError also if it is a pipe, a device or a
    directory: reading those may never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path.open("rb")


def read_bytes(path: Path, largest: int = _LARGEST) -> bytes:
    """The content of the regular file `path`; OSError for anything else, or for more than `largest`
    bytes."""
    with open_regular(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"has more than {largest} bytes", str(path))
    return content


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if it cannot be read."""
    try:
        value = parse_json(read_bytes(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def parse_json(text: bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text in UTF-8; ValueError in one line for anything else, and with
    `finite` for NaN and Infinity, which Python writes."""

    def refuse(word: str) -> float:
        raise ValueError(f"{word} where a finite number belongs")

    try:
        return json.loads(text.decode(), parse_constant=refuse if finite else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def printable(text: str, kept: str = "\n\t") -> str:
    """Untrusted text, for a terminal: control characters not in `kept` are escaped."""
    plain = {*kept, "\u200c", "\u200d", *(c for c in text if category(c) == "Zs")}  # in words
    return "".join(c if c.isprintable() or c in plain else repr(c)[1:-1] for c in text)


def one_line(text: object) -> str:
    """Text from a file, for an error: printable, at most 400 characters."""
    shown = printable(str(text)[:401], kept="")
    return shown if len(shown) <= 400 else f"{shown[:400]} …"


def counted(number: object, noun: str, several: str = "") -> str:
    """A count with its noun: "1 rank", "3 ranks", "2 leaves"; "? ranks" if not a number."""
    is_number = isinstance(number, int | float)
    shown = f"{number:,g}" if isinstance(number, float) else f"{number:,}" if is_number else "?"
    return f"{shown} {noun if number == 1 else several or noun + 's'}"


def perhaps(name: str, known: Collection[str]) -> str:
    """A hint at the nearest of the `known` names, for the middle of an error; "" for none."""
    near = get_close_matches(name, known, n=1)
    return f"; perhaps you meant {near[0]!r}" if near else ""


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not `known`, and suggest the nearest one."""
    if name not in known:
        there = f"(there are: {', '.join(known)})"
        raise ConfigError(f"unknown {what} {name!r}{perhaps(name, known)} {there}")


# -- one file -------------------------------------------------------------------------------------


def check_place(option: str, path: Path, *, folder: bool = False) -> None:
    """Refuse a file, or a `folder`, that cannot be written or created, long before the write."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if there.is_dir() == (there == path and not folder):
        raise ConfigError(f"{option} {path}: {there} is {'a' if there.is_dir() else 'no'} folder")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{option} {path}: {there} may not be written")


def json_text(document: Mapping[str, Any]) -> str:
    """Indented JSON with a final newline; a list of numbers takes one line."""
    text = json.dumps(document, indent=1, allow_nan=False)
    return re.sub(r"\[[-\d.eE,\s+]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write `text` to the file `path` atomically: a reader sees all of the old text or all of the
    new. A missing folder is created.

    Targets that cannot be replaced are written in place: the target of a link, a pipe, /dev/stdout,
    a file in a read-only folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replaceable = not path.is_symlink() and (path.is_file() or not path.exists())
    if not replaceable or not os.access(path.parent, os.W_OK):
        path.write_text(text, encoding="utf-8")
        return
    replace_text(path, text)


def write_result(path: Path, text: str, cure: str = "") -> None:
    """Like `write_text`, for output that a user requested: RunError if it fails."""
    try:
        write_text(path, text)
    except OSError as error:
        raise RunError(f"could not write {path}: {error.strerror}{cure}") from error


def replace_text(path: Path, text: str, *, mode: int = 0o666, durable: bool = True) -> None:
    """Make `text` the file `path` atomically; a link of that name is replaced, not followed.

    Writes a new file in the same folder under an unpredictable name, with `mode` less the process's
    umask. With `durable` it is also on the disk when this returns.
    """
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(8)}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_private(path: Path) -> TextIO:
    """Open a file to append to; a new one is private, and no link is followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, PRIVATE), "a", encoding="utf-8")


def lock(file: IO[Any]) -> bool:
    """Lock a file, shared if it is open for reading only; False if another process holds it. Also
    True on file systems without locks.

    POSIX's lock: children do not inherit it, network file systems share it between hosts. It ends
    with this process, or when it closes the file by any descriptor.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_NB | (fcntl.LOCK_EX if file.writable() else fcntl.LOCK_SH))
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


# -- a directory ----------------------------------------------------------------------------------


class Filesystem:
    """The operations of a save, one by one; tests pass one that records, fails or dies."""

    dir_mode = 0o700
    """Mode of new directories: private to their user. The umask removes bits."""

    def make_dir(self, path: Path) -> None:
        """Make one directory whose parent exists."""
        path.mkdir(mode=self.dir_mode)

    def create(self, path: Path) -> io.FileIO:
        """Open a new private file for writing, unbuffered."""
        return io.FileIO(path, "x", opener=lambda name, flags: os.open(name, flags, PRIVATE))

    def write(self, file: io.FileIO, data: memoryview) -> int:
        """Write some of `data`; returns how many bytes were taken."""
        return file.write(data)

    def sync_file(self, file: io.FileIO) -> None:
        """Wait until the file's bytes are on the device."""
        os.fsync(file.fileno())

    def sync_dir(self, path: Path) -> None:
        """Wait until the directory's list of names is on the device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a directory atomically."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove one file or one empty directory."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


def remove_tree(fs: Filesystem, path: Path) -> None:
    """Remove a directory and its contents, children first."""
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            remove_tree(fs, child)
    fs.remove(path)


def make_dirs(fs: Filesystem, path: Path) -> None:
    """Make `path` and its missing parents, and wait until their names are on the device."""
    if path.is_dir():
        return
    make_dirs(fs, path.parent)
    with suppress(FileExistsError):
        fs.make_dir(path)
    fs.sync_dir(path.parent)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and checksum that a file must have."""

    size: int
    """Bytes."""
    sha256: str
    """SHA-256 of the content, 64 hexadecimal digits."""


class StagedDirectory:
    """A directory under a temporary name until `commit`; removed at exit without a commit.

    Args:
        fs: the operations.
        parent: the directory in which it will appear; must exist.
        name: its intended name, part of the temporary one.
    """

    def __init__(self, fs: Filesystem, parent: Path, name: str) -> None:
        self._fs = fs
        self._parent = parent
        self.path = _temporary(parent / name)
        self._lock: int | None = None

    def __enter__(self) -> StagedDirectory:
        self._fs.make_dir(self.path)
        # [Note: whose temporary directory]
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.path.exists():
                with suppress(OSError):  # the error that led here is the one to report
                    remove_tree(self._fs, self.path)
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def write(self, name: str, pieces: Iterable[memoryview | bytes]) -> FileRecord:
        """Write one file and wait until it is on the device."""
        digest, size = hashlib.sha256(), 0
        with self._fs.create(self.path / name) as file:
            for piece in pieces:
                rest = memoryview(piece)
                digest.update(rest)
                size += len(rest)
                while rest:
                    rest = rest[self._fs.write(file, rest) :]
            self._fs.sync_file(file)
        return FileRecord(size=size, sha256=digest.hexdigest())

    def seal(self) -> None:
        """Wait until the list of files is on the device; afterwards it may be committed."""
        self._fs.sync_dir(self.path)

    def commit(self, target: Path, *, replace: bool = False) -> None:
        """Rename the sealed directory to `target` and wait until that is on the device.

        With `replace` a directory of that name is removed; it is restored if the commit fails.
        """
        old = _temporary(target) if replace and target.exists() else None
        if old is not None:
            self._fs.rename(target, old)
        try:
            self._fs.rename(self.path, target)
        except OSError:
            if old is not None:
                self._fs.rename(old, target)
            raise
        self._fs.sync_dir(self._parent)
        if old is not None:
            with suppress(OSError):
                remove_tree(self._fs, old)


def remove_leftovers(fs: Filesystem, parent: Path) -> None:
    """Remove the temporary directories of dead writers; see [Note: whose temporary directory]."""
    for path in sorted(parent.glob(f"{TEMPORARY_PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # just renamed or removed by its writer
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            age_s = time.time() - os.fstat(descriptor).st_mtime
        except OSError:
            continue
        finally:
            os.close(descriptor)
        if f"-{_HOST}-" in path.name or age_s > _FOREIGN_AGE_S:
            remove_tree(fs, path)


def discard(fs: Filesystem, path: Path) -> None:
    """Remove a directory with a meaningful name: rename it first, then remove it."""
    removed = _temporary(path)
    fs.rename(path, removed)
    remove_tree(fs, removed)


def _temporary(path: Path) -> Path:
    writer = f"{_HOST}-{os.getpid()}-{time.time_ns()}"
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{writer}")

"""A directory that appears complete or not at all. No torch here.

    make .tmp-NAME-HOST-PID-TIME   and hold a lock on it while this process lives
    write file, fsync file       for each file, hashed on the way
    fsync .tmp-…                 its list of files is on disk
    rename .tmp-… -> NAME        the commit
    fsync parent                 the commit is on disk

[Note: whose temporary directory]
A killed writer leaves its `.tmp-…` behind. A process id does not tell whether the writer lives:
ids come back, and containers share them. So the writer holds `flock` on the directory, which the
kernel drops when the process ends, however it ends. Who gets the lock knows that the writer is
dead. Where locks do not work (some network file systems) nobody gets one, and nothing is deleted.
A lock may be invisible from another host, so a directory that another host made must be an hour
old besides.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType

from gradsync.runtime.text_file import PRIVATE

TEMPORARY_PREFIX = ".tmp-"
_FOREIGN_AGE_S = 3600.0


class Filesystem:
    """The operations of a save, one by one; tests hand in one that records, fails or dies."""

    def make_dir(self, path: Path) -> None:
        """Make one directory whose parent exists, for its user alone."""
        path.mkdir(mode=0o700)

    def create(self, path: Path) -> FileIO:
        """Open a new file for writing, for its user alone, without a buffer of ours."""
        return FileIO(path, "x", opener=lambda name, flags: os.open(name, flags, PRIVATE))

    def write(self, file: FileIO, data: memoryview) -> int:
        """Write some of `data`; returns how many bytes were taken."""
        return file.write(data)

    def sync_file(self, file: FileIO) -> None:
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
        """Give a directory another name, in one step."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove one file or one empty directory."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


def remove_tree(fs: Filesystem, path: Path) -> None:
    """Remove a directory with all it holds, children first."""
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
    """What a file must be."""

    size: int
    """Bytes."""
    sha256: str
    """SHA-256 of the content, 64 hexadecimal digits."""


class StagedDirectory:
    """A directory under a temporary name until `commit`; without one, it is removed on leaving.

    Args:
        fs: the operations.
        parent: where it will appear; must exist.
        name: the name it is meant for, part of the temporary one.

    Raises:
        OSError: as the file system says.
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
                with suppress(OSError):  # the error that brought us here is the one to tell
                    remove_tree(self._fs, self.path)
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def write(self, name: str, pieces: Iterable[memoryview | bytes]) -> FileRecord:
        """Write one file and wait until it is on the device.

        Returns:
            size and hash of what was handed to the file system.
        """
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

    def commit(self, target: Path) -> None:
        """Give the sealed directory its name and wait until that is on the device."""
        self._fs.rename(self.path, target)
        self._fs.sync_dir(self._parent)


def remove_leftovers(fs: Filesystem, parent: Path) -> list[Path]:
    """Remove the temporary directories of dead writers; see [Note: whose temporary directory].

    Returns:
        what was removed.
    """
    removed = []
    for path in sorted(parent.glob(f"{TEMPORARY_PREFIX}*")):
        if _writer_is_dead(path):
            remove_tree(fs, path)
            removed.append(path)
    return removed


def _writer_is_dead(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # just renamed or removed by its writer
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        age_s = time.time() - os.fstat(descriptor).st_mtime
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return f"-{_host()}-" in path.name or age_s > _FOREIGN_AGE_S


def discard(fs: Filesystem, path: Path) -> None:
    """Remove a directory whose name means something: the name goes first, then the rest."""
    removed = _temporary(path)
    fs.rename(path, removed)
    remove_tree(fs, removed)


def _temporary(path: Path) -> Path:
    writer = f"{_host()}-{os.getpid()}-{time.time_ns()}"
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{writer}")


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())

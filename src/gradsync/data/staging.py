"""A directory that appears whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradsync.data import meta
from gradsync.errors import DataError


def check_target(out: Path, *, overwrite: bool) -> None:
    """Refuse an `out` that holds something, unless it is a data directory and may be replaced.

    Raises:
        DataError: naming what is in the way.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / meta.FILE_NAME).is_file():
        raise DataError(f"{out} exists and is no data directory; choose another --out")
    if not overwrite:
        raise DataError(f"{out} already holds prepared data; --overwrite replaces it")


@contextmanager
def staged_directory(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a new folder beside `out`; when the block ends well, flush it and rename it to `out`.

    When the block raises, the folder is removed and `out` is as it was.

    Raises:
        DataError: when `out` came into being meanwhile.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.parent / f".{out.name}.{secrets.token_hex(4)}.tmp"
    staging.mkdir()
    try:
        yield staging
        for path in (*staging.iterdir(), staging):
            _flush(path)
        check_target(out, overwrite=overwrite)
        _publish(staging, out)
        _flush(out.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, out: Path) -> None:
    old = staging.with_suffix(".old")
    if (out / meta.FILE_NAME).exists():
        out.rename(old)
    try:
        staging.rename(out)
    except OSError as error:
        if old.exists() and not out.exists():
            old.rename(out)
        raise DataError(f"{out} was created by another process meanwhile") from error
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

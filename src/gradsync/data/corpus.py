"""The embedded corpus: the source code of the running Python's standard library, as bytes.

It is real text, it is on every machine, and reading it needs no download.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from pathlib import Path

from gradsync.data.meta import read_meta
from gradsync.data.prepare import prepare
from gradsync.errors import DataError, RunError
from gradsync.runtime import environ

_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
_LAYOUT = 1
"""Raise when the way of preparing changes, so that an older cache is not taken for a newer one."""


def default_corpus() -> Path:
    """The data directory of the embedded corpus; prepared on the first call, then kept.

    Several processes may call this at once: each prepares into a folder of its own, the first
    one's is kept, and all of them return it.

    Raises:
        DataError: when Python's sources are not on this machine.
        RunError: when the cache cannot be written; `GRADSYNC_CACHE` names another place.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = _sources(folder)
    if not files:
        raise DataError(
            f"{folder} holds no Python sources to learn from; give a data directory with --data"
        )
    version = platform.python_version()
    out = environ.cache_dir() / f"stdlib-{version}-{_fingerprint(folder, files)}"
    if read_meta(out) is None:
        try:
            prepare(files, out, source=f"standard library of Python {version}")
        except DataError:
            if read_meta(out) is None:  # else another process was faster, and its work is ours
                raise
        except RunError as error:
            raise RunError(f"{error}; GRADSYNC_CACHE can name another cache") from error
    return out


def _sources(folder: Path) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        found += [Path(parent) / name for name in sorted(names) if name.endswith(".py")]
    return found


def _fingerprint(folder: Path, files: list[Path]) -> str:
    digest = hashlib.sha256(str(_LAYOUT).encode())
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:10]

"""The only module that reads or writes `os.environ`; everything else receives a mapping or a value.

Variables with the prefix `GRADSYNC_` are ours; all others belong to launchers, torch or the system.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradsync.errors import ConfigError


def snapshot() -> dict[str, str]:
    """A copy of the environment as it is now."""
    return dict(os.environ)


def get(name: str, default: str = "") -> str:
    """One variable, or `default` when it is unset."""
    return os.environ.get(name, default)


def take(name: str) -> str:
    """One variable, "" when it is unset; it is unset from now on."""
    return os.environ.pop(name, "")


@dataclass
class exported:  # noqa: N801  used as a function
    """Set `variables` during a `with` block, then restore the previous values.

    A session exports the torchrun set (`RANK` … `MASTER_PORT`) this way, so that other libraries in
    the process agree with us about the world. Not a generator: the interpreter's exit would close
    an unfinished one after `os` is torn down.
    """

    _variables: Mapping[str, str]
    _before: dict[str, str | None] = field(default_factory=dict)

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cache_dir() -> Path:
    """Folder of the cache: `GRADSYNC_CACHE`, `XDG_CACHE_HOME/gradsync` or `~/.cache/gradsync`."""
    if own := get("GRADSYNC_CACHE"):
        return Path(own)
    if base := get("XDG_CACHE_HOME"):
        return Path(base) / "gradsync"
    try:
        return Path.home() / ".cache" / "gradsync"
    except RuntimeError as error:
        raise ConfigError(
            "there is no home directory to keep a cache in; GRADSYNC_CACHE can name a folder"
        ) from error

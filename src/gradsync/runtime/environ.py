"""The only module that reads or writes `os.environ`; everything else receives a mapping or a value.

Variables with the prefix `GRADSYNC_` are ours; all others belong to launchers, torch or the system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gradsync.errors import ConfigError


def snapshot() -> dict[str, str]:
    """A copy of the environment as it is now."""
    return dict(os.environ)


def get(name: str, default: str = "") -> str:
    """One variable, or `default` when it is unset."""
    return os.environ.get(name, default)


@contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` for the length of a `with` block, then put back what was there.

    A session exports the torchrun set (`RANK` … `MASTER_PORT`) this way, so that other libraries in
    the process agree with us about the world.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cache_dir() -> Path:
    """Where prepared data may be kept: `GRADSYNC_CACHE`, else `XDG_CACHE_HOME/gradsync`.

    Without either it is `~/.cache/gradsync`.

    Raises:
        ConfigError: without either, for a user who has no home.
    """
    own = get("GRADSYNC_CACHE")
    if own:
        return Path(own)
    if base := get("XDG_CACHE_HOME"):
        return Path(base) / "gradsync"
    try:
        return Path.home() / ".cache" / "gradsync"
    except RuntimeError as error:
        raise ConfigError(
            "there is no home directory to keep a cache in; GRADSYNC_CACHE can name a folder"
        ) from error

"""Lower bounds of arguments, checked with one message."""

from __future__ import annotations

from gradsync.errors import ConfigError


def require_at_least(least: int, **values: int | None) -> None:
    """Check that every value that is given (not None) is at least `least`.

    Raises:
        ConfigError: naming the first argument that is not, and what it got.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}; got {value}")

"""A hook on a module that is not part of it: copies and pickles of the module omit it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """Calls `function`; copied or pickled, it becomes a hook that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce__(self) -> tuple[type[NoHook], tuple[()]]:
        return (NoHook, ())


class NoHook:
    """Stand-in for a `ModuleHook` in a copy."""

    def __call__(self, *arguments: Any) -> None:
        """Do nothing."""

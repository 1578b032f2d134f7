"""Code that torch.compile must leave as it is."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=type)


def outside_graphs(cls: T) -> T:
    """The methods of `cls`, and all they call, are never part of a compiled graph.

    What `torch.compiler.disable` does for a function, but without importing the compiler, which
    takes a second, and without its wrapper, which takes most of a microsecond per call.
    """
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not _skip(method):
            setattr(cls, name, torch.compiler.disable(method))
    return cls


def _skip(method: Any) -> bool:
    """Mark it where this torch has marks; whether that is done."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    action = getattr(frames, "_FrameAction", None)
    if action is None:
        return False
    method._torchdynamo_disable = True  # a graph that calls it ends there
    # When it runs, the compiler looks neither at it nor at what it calls.
    both = frames._FrameExecStrategy(action.SKIP, action.SKIP)
    frames.set_code_exec_strategy(method.__code__, both)
    return True

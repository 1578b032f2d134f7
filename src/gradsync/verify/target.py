"""The user's own problem: finding its factory, calling it, and saying what is wrong in a line."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from gradsync.errors import ConfigError

_NOT_THE_USERS = (
    *(str(Path(file).parent) for file in (torch.__file__, importlib.__file__)),
    str(Path(__file__).parents[1]),
    "<frozen",
)
RAISED = (Exception, SystemExit)
"""What code of the user's may end with; a module that exits would end verify without a word."""


def find_factory(target: str) -> Callable[[], Any]:
    """The function that `pkg.module:factory` names; imports its module.

    The working folder can be imported from, as `python -m` has it.

    Raises:
        ConfigError: not of that form, not there, or its module raises.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--target {target!r}: expected pkg.module:factory")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except RAISED as error:
        raise ConfigError(f"--target {target}: importing it raised {in_a_line(error)}") from error
    factory = getattr(module, name, None)
    if factory is None:
        raise ConfigError(f"--target {target}: {module_name} has no {name!r}")
    if not callable(factory):
        raise ConfigError(f"--target {target}: {name} is not callable")
    return factory


def make_parts(target: str, factory: Callable[[], Any]) -> tuple[nn.Module, Any, Any]:
    """What the factory gives: a model, a map-style data set that is not empty, and `loss_sum`.

    Raises:
        ConfigError: it raises, or gives something else.
    """
    try:
        made = factory()
    except RAISED as error:
        text = f"--target {target}: the factory raised {in_a_line(error)}"
        raise ConfigError(text) from error
    wrong = _what_is_wrong(made)
    if wrong:
        raise ConfigError(f"--target {target}: {wrong}")
    return made


def _what_is_wrong(made: Any) -> str:
    if not (isinstance(made, tuple) and len(made) == 3):
        return f"the factory must return (model, data set, loss_sum), got {described(made)}"
    model, dataset, loss_sum = made
    if not isinstance(model, nn.Module):
        return f"the model must be a torch.nn.Module, got {described(model)}"
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not sized:
        needed = "the data set must be map-style, with a length and samples by index"
        return f"{needed}; got {described(dataset)}"
    if not len(dataset):
        return "the data set has no samples"
    if not callable(loss_sum):
        return f"loss_sum must be a function, got {described(loss_sum)}"
    return ""


def described(value: Any) -> str:
    """A wrong value in a few words: its type, and what is in it."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, list(value)[:4]))}"
    return type(value).__name__


def in_a_line(error: BaseException) -> str:
    """`KeyError: 'x' (data.py:12)`: the innermost place that is neither torch's nor ours."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    said, place = str(error), ""
    if isinstance(error, SyntaxError) and error.filename:
        said, place = error.msg, f" ({Path(error.filename).name}:{error.lineno})"
    elif frames:
        place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return f"{type(error).__name__}: {' '.join(said.split())}{place}"

"""Find and call the factory of a problem that the user wrote; `target_check.py` tries it.

A mistake in it gives one line, `--target T: what is wrong`, before any run.
"""

from __future__ import annotations

import importlib
import random
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from gradsync.errors import ConfigError

_NOT_THE_USERS = (
    *(str(Path(file).parent) for file in (torch.__file__, importlib.__file__)),
    str(Path(__file__).parents[2]),
    "<frozen",
)


@contextmanager
def kept_randomness() -> Generator[None]:
    """Restore torch's, numpy's and Python's global generators at the end: a check must not change
    later random numbers."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def refuse(target: str, wrong: str) -> None:
    """Raise `wrong` as a ConfigError, unless it is empty."""
    if wrong:
        raise ConfigError(f"--target {target}: {wrong}")


@contextmanager
def users_code(target: str, failure: str) -> Generator[None]:
    """Report an error in the user's code in one line: `--target T: FAILURE KeyError: …`."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a module that exits would end verify silently
        raise ConfigError(f"--target {target}: {failure} {_in_a_line(error)}") from error


def _in_a_line(error: BaseException) -> str:
    """`KeyError: 'x' (data.py:12)`: the innermost place outside torch and gradsync."""
    places = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    said = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        said, places = error.msg, [(error.filename, error.lineno)]
    place = f" ({Path(places[-1][0]).name}:{places[-1][1]})" if places else ""
    return f"{type(error).__name__}: {' '.join(said.split())}{place}"


def described(value: Any) -> str:
    """A wrong value in a few words: its type and contents."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, list(value)[:4]))}"
    return type(value).__name__


def find_factory(target: str) -> Callable[[], Any]:
    """The function that `pkg.module:factory` names, or a ConfigError. Its module is imported, also
    from the working folder, as `python -m` does."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--target {target!r}: expected pkg.module:factory")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with users_code(target, "importing it raised"):
        module = importlib.import_module(module_name)
    factory = getattr(module, name, None)
    if not callable(factory):
        wrong = f"{module_name} has no {name!r}" if factory is None else f"{name} is not callable"
        raise ConfigError(f"--target {target}: {wrong}")
    return factory


def parts_of(target: str, factory: Callable[[], Any]) -> tuple[nn.Module, Any, Callable[..., Any]]:
    """The (model, data set, loss_sum) that `factory` returns; ConfigError for anything else."""
    with users_code(target, "the factory raised"):
        made = factory()
    refuse(target, _wrong_parts(made))
    return made


def _wrong_parts(made: Any) -> str:
    if not (isinstance(made, tuple) and len(made) == 3):
        return f"the factory must return (model, data set, loss_sum), got {described(made)}"
    model, dataset, loss_sum = made
    if not isinstance(model, nn.Module):
        return f"the model must be a torch.nn.Module, got {described(model)}"
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not sized:
        wanted = "map-style, with a length and samples by index"
        return f"the data set must be {wanted}; got {described(dataset)}"
    if not len(dataset):
        return "the data set has no samples"
    return "" if callable(loss_sum) else f"loss_sum must be a function, got {described(loss_sum)}"

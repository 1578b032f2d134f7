"""Comparison of all ranks' optimizers before any update, in the step's message.

A rank that steps with another learning rate (`ReduceLROnPlateau` on its own loss, a checkpoint that
only rank 0 loaded) trains another model; where ranks divide the update among themselves, all of
them get one mixture of both, which no comparison of replicas can detect afterwards.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from array import array
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json
from gradsync.errors import ConfigError
from gradsync.sync.sharded.bucket import options
from gradsync.sync.structure import group_ranks, name_ranks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

Settings = dict[str, str]
"""Text by name, in the order in which messages look for the first difference."""

_BITS = 20
"""Size of a digest's numbers: W n^2 is exact in float64 for up to 2^13 ranks."""


def settings_of(optimizer: Optimizer, parameters: Sequence[Tensor], *, number: int = 0) -> Settings:
    """Class, hyper-parameters and parameters of each group; equal on ranks that step alike.

    Waits for tensors on a device. Objects count by their class, functions by their name: neither
    has a text that is the same on all ranks.

    Args:
        optimizer: in its current state.
        parameters: of the model, in the order that all ranks have.
        number: its position among the optimizers that step together.
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    which = f" of optimizer {number}" if number else ""
    kind = type(optimizer)
    found = {f"the class{which or ' of the optimizer'}": f"{kind.__module__}.{kind.__qualname__}"}
    for index, group in enumerate(optimizer.param_groups):
        where = f" of group {index}{which}"
        found |= {f"{name}{where}": _text(value) for name, value in options(group).items()}
        members = array("q", [places.get(id(parameter), -1) for parameter in group["params"]])
        held = _hash(array("q", sorted(members)).tobytes())[:8]
        found[f"the list of parameters{where}"] = f"{len(members)} ({held})"
        # A set has another one in each process, and states would be loaded for other parameters.
        found[f"the order of parameters{where}"] = _hash(members.tobytes())[:8]
    return found


def digest(settings: Settings) -> tuple[int, int]:
    """Two numbers of 20 bits, for `agree`; equal for different settings with probability 2**-40."""
    both = int(_hash(json.dumps(settings).encode()), 16)
    return both % 2**_BITS, both // 2**_BITS % 2**_BITS


def refuse_difference(comm: Communicator, settings: Settings, why: str) -> None:
    """Raise, on all ranks, since their digests differ; two all-gathers (`all_gather_json`).

    Args:
        settings: this rank's.
        why: the consequence, and what to do; ends the message.

    Raises:
        ConfigError: names the first setting that differs and each rank's value.
    """
    by_rank: list[Settings] = all_gather_json(comm, settings)
    for name in dict.fromkeys(name for settings in by_rank for name in settings):
        sides = group_ranks([settings.get(name, "nothing") for settings in by_rank])
        if len(sides) > 1:
            values = ", ".join(f"{name_ranks(ranks)} {value}" for value, ranks in sides.items())
            raise ConfigError(f"{name} differs: {values}; {why}")
    raise ConfigError(f"ranks list their optimizers' options in another order; {why}")


def refuse_closure(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer that evaluates the loss itself, such as LBFGS."""
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    if any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments):
        raise ConfigError(
            f"sync.step() cannot run {type(optimizer).__name__}, whose step evaluates the loss "
            "again and again, by a closure; in a loop of your own call optimizer.step(closure), "
            "with loss.backward() in the closure, which must return the same loss on all ranks"
        )


def _text(value: Any) -> str:
    """Text that is the same on all ranks for equal values, whatever objects they are."""
    if isinstance(value, int | None | str | complex | Enum):
        # An enum's repr shows the member's value, which may be any object.
        return str(value) if isinstance(value, Enum) else repr(value)
    if isinstance(value, float):
        whole = abs(value) < 2**53 and value.is_integer()
        return repr(int(value)) if whole else repr(float(value))  # 1 and 1.0 are one learning rate
    if isinstance(value, Mapping):
        pairs = (
            (repr(key) if isinstance(key, str | int) else type(key).__qualname__, _text(entry))
            for key, entry in value.items()
        )
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in pairs) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_text(entry) for entry in value)})"
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        return _text(value.tolist())
    return getattr(value, "__qualname__", type(value).__qualname__)


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()

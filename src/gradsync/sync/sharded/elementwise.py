"""Optimizers that give the same bits for a piece of a parameter as for the whole."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync.errors import ConfigError

_ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)

_WHY_NOT = {
    "LBFGS": "its line search looks at all parameters at once",
    "Adafactor": "it keeps row and column means of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it updates rows of sparse gradients",
    "ShardedOptimizer": "it is sharded already: give it to the optimizer's own loop or to a "
    "strategy that does not shard",
}


def check_elementwise(optimizer_class: Any, promised: bool) -> None:
    """Refuse a class that is no optimizer, or that looks at more than one element at a time.

    Args:
        optimizer_class: to be run on pieces of parameters.
        promised: whether the user says that it is elementwise and keeps only hyper-parameters in
            its parameter groups; ignored for those known not to be.

    Raises:
        ConfigError: with the reason.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigError(
            "optimizer_class must be a class such as torch.optim.AdamW, got "
            f"{_called(optimizer_class)}; its options follow by name: ShardedOptimizer(params, "
            "torch.optim.AdamW, lr=3e-4)"
        )
    name = optimizer_class.__name__
    for known in optimizer_class.__mro__:
        if known.__name__ in _WHY_NOT:
            raise ConfigError(f"{name} cannot be sharded: {_WHY_NOT[known.__name__]}")
    if optimizer_class not in _ELEMENTWISE and not promised:
        raise ConfigError(
            f"{name} is not known to be elementwise (to give for a piece of a parameter what it "
            "gives for the whole); if it is, take ShardedOptimizer(params, "
            f"{name}, elementwise=True, ...)"
        )


def _called(something: Any) -> str:
    if isinstance(something, type):
        return f"the class {something.__name__}"
    if something is None or isinstance(something, str):
        return repr(something)
    return f"an instance of {type(something).__name__}"


def arguments_of(optimizer_class: type[Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The `options` that the constructor takes; `defaults` may hold more (AdamW's do)."""
    known = inspect.signature(optimizer_class.__init__).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return dict(options)
    return {name: value for name, value in options.items() if name in known}

"""Untracked parameters of a replicated model: replaced or unfrozen after `gs.replicate`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from gradsync.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn


class Strangers:
    """Checks the parameters that optimizers update: checking the model in every step costs much.

    Args:
        model: in its present state; it may have changed since `gs.replicate`.
        known: ids of the parameters that are synchronised.
    """

    def __init__(self, model: nn.Module, known: set[int]) -> None:
        self._model = model
        self._known = known
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that `optimizer` is about to update synchronised parameters of the model only.

        Raises:
            ConfigError: names one that is not.
        """
        seen = optimizer in self._seen
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if seen and not any(id(p) in self._known for p in parameters):
            return  # of another model
        self._seen.add(optimizer)
        strangers = {
            id(p)
            for p in parameters
            if id(p) not in self._known and p.requires_grad and (p.grad is not None or not seen)
        }
        for name, parameter in self._model.named_parameters() if strangers else ():
            if id(parameter) in strangers:
                raise ConfigError(
                    f"parameter {name!r} was replaced or became trainable after gs.replicate: it "
                    "is not synchronised. Call close() on the handle and replicate the model again"
                )

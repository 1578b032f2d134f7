"""Ranks that divide the optimizer's work: each keeps the state of some elements and updates them.

                     by messages (zero.py)               in a host's memory (host_step.py)
    a rank owns      a shard of each bucket              whole blocks, one run after another
    the update       of its pieces of parameters, by the optimizer itself (elementwise.py)
    state            its pieces' own (sharded_update.py) once per host (host_memory.py)
    publish          all-gather each bucket              write into the others' replicas

Both cut parameters as layout.py says. Every element goes through the operations of the whole
optimizer, so the bits are those of the whole optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from gradsync.sync.ownership.elementwise import members_of
from gradsync.sync.reducer import Replicas

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class OwnedUpdate(ABC):
    """What a rank does of one optimizer's steps: the pieces that it owns, and their state.

    Does not refer to the optimizer, so that deleting that frees the memory of both.
    """

    @abstractmethod
    def take_in(self, optimizer: Optimizer) -> None:
        """Before a step: take over state that was loaded since the last one."""

    @abstractmethod
    def give_back(self, optimizer: Optimizer) -> None:
        """Leave whole state in `optimizer.state`, this rank's own; all ranks call it."""


Owned = TypeVar("Owned", bound=OwnedUpdate)


class DividedReplicas(Replicas, Generic[Owned]):
    """Whole weights on every rank between steps, of which each rank updates a part."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(model, parameters)
        self._updates: WeakKeyDictionary[Optimizer, tuple[object, Owned]] = WeakKeyDictionary()

    def make_update(self, optimizer: Optimizer) -> Owned:
        """Divide an optimizer that is used for the first time."""
        raise NotImplementedError

    def key_of(self, optimizer: Optimizer) -> Any:
        """What an update is made for: the parameters of each group."""
        return members_of(optimizer)

    def update_of(self, optimizer: Optimizer) -> Owned:
        """This rank's part of `optimizer`'s steps: made at first use, and again when its key is
        another one (`add_param_group`). All ranks call it together."""
        key = self.key_of(optimizer)
        before, known = self._updates.get(optimizer, (None, None))
        if known is None or before != key:
            if known is not None:
                known.give_back(optimizer)
            known = self.make_update(optimizer)
            self._updates[optimizer] = key, known
        return known


def tell(optimizer: Optimizer) -> None:
    """Call the user's `optimizer.step` without gradients, for its schedulers and hooks only."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    optimizer.step()
    for parameter, gradient in zip(parameters, held, strict=True):
        parameter.grad = gradient

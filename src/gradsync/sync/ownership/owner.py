"""Ranks that divide the optimizer's work: each keeps the state of some elements and updates them.

                     by messages (zero.py)           in a host's memory (host_step.py)
    a rank owns      a shard of each bucket          whole blocks, one run after another
    the update       elementwise.py: the optimizer itself, on this rank's pieces of parameters
    state            of its pieces, on each rank     of everything, once per host
                     (sharded_optimizer.py)          (host_memory.py)
    publish          gather each bucket              write into the others' replicas

Every element goes through the operations of the whole optimizer, and parameters are cut where no
vector loop ends (layout.py), so the bits are those of the whole optimizer.
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
    """One optimizer's steps on the pieces that this rank owns, and their state. Does not refer to
    the optimizer, so that deleting that frees the memory of both."""

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
        self._updates: WeakKeyDictionary[Optimizer, tuple[Any, Owned]] = WeakKeyDictionary()
        self.stepped: Sequence[Optimizer] = ()
        """Optimizers whose update is not published yet."""

    def make_update(self, optimizer: Optimizer) -> Owned:
        """Divide an optimizer's work; all ranks call it together."""
        raise NotImplementedError

    def update_pieces(self, pairs: Sequence[tuple[Optimizer, Owned]]) -> None:
        """Update what this rank owns."""
        raise NotImplementedError

    def key_of(self, optimizer: Optimizer) -> Any:
        """What an update is made for; another key needs another one (`add_param_group`)."""
        return members_of(optimizer)

    def update_of(self, optimizer: Optimizer) -> Owned:
        """What this rank does of `optimizer`'s steps; all ranks call it together."""
        key = self.key_of(optimizer)
        before, known = self._updates.get(optimizer, (None, None))
        if known is None or before != key:
            if known is not None:
                known.give_back(optimizer)
            known = self.make_update(optimizer)
            self._updates[optimizer] = key, known
        return known

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        pairs = [(optimizer, self.update_of(optimizer)) for optimizer in optimizers]
        for optimizer, update in pairs:
            update.take_in(optimizer)
        self.update_pieces(pairs)
        self.stepped = optimizers


def tell(optimizer: Optimizer) -> None:
    """Call the user's `optimizer.step` without gradients, for its schedulers and hooks only."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    optimizer.step()
    for parameter, gradient in zip(parameters, held, strict=True):
        parameter.grad = gradient

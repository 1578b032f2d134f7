"""The optimizer's step, divided among the ranks of a host.

    rank 0   update own elements of the weights ─► write them into the others' replicas ─┐
    rank 1   update own elements of the weights ─► write them into the others' replicas ─┴─ meet

Every element goes through the operations of the whole optimizer, so the bits are the same (runs.py
says where parameters may be cut). State lies in memory that all ranks share, once per host:
`optimizer.state` is whole on every rank at any time, as it would be without gradsync.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradsync.sync.host.flat import Flat
from gradsync.sync.host.pieces import pieces_of
from gradsync.sync.host.state import SharedState
from gradsync.sync.host.weights import SharedWeights
from gradsync.sync.sharded.bucket import members_of, options
from gradsync.sync.sharded.elementwise import arguments_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class HostUpdate:
    """One optimizer's steps; made on all ranks together.

    Args:
        optimizer: the user's, elementwise; its options are read at every step.
        flats: flat buffers of the gradients.
        weights: memory of the parameters, for each of `flats`.
    """

    def __init__(
        self, optimizer: Optimizer, flats: Sequence[Flat], weights: Sequence[SharedWeights]
    ) -> None:
        # Not the optimizer itself: deleting it must free its memory.
        self._user = weakref.ref(optimizer)
        groups = optimizer.param_groups
        self.members = members_of(optimizer)
        group_of = {id(p): number for number, g in enumerate(groups) for p in g["params"]}
        self._pieces = pieces_of(flats, weights, group_of)
        self._numbers = sorted({piece.group for piece in self._pieces})
        self._inner = self._make_inner() if self._numbers else None
        parameters = {
            slot.index: parameter
            for flat, home in zip(flats, weights, strict=True)
            for slot, parameter in zip(flat.slots, home.parameters, strict=True)
            if id(parameter) in group_of
        }
        self._place: tuple[int, ...] = ()
        self._parts: list[Tensor] = []
        self._state = SharedState(optimizer, self._inner, self._pieces, flats, parameters)

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._user()
        assert optimizer is not None, "somebody steps it"
        return optimizer

    def _make_inner(self) -> Optimizer:
        """Make the optimizer over this rank's pieces, with their groups."""
        kind, groups = type(self._optimizer), self._optimizer.param_groups
        own = {n: [p.tensor for p in self._pieces if p.group == n] for n in self._numbers}
        return kind(
            [{**options(groups[number]), "params": tensors} for number, tensors in own.items()],
            **arguments_of(kind, self._optimizer.defaults),
        )

    def step(self, gradients: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Update this rank's elements; see `step_together`."""
        self._state.prepare()
        if self._inner is not None:
            parts = self._parts_of(gradients)
            for piece, part in zip(self._pieces, parts, strict=True):
                piece.tensor.grad = part if used[piece.index] else None
            groups = self._optimizer.param_groups
            for group, number in zip(self._inner.param_groups, self._numbers, strict=True):
                group.update(options(groups[number]))
            self._inner.step()
            for piece in self._pieces:
                piece.tensor.grad = None
        self._state.show(used)

    def tell_scheduler(self) -> None:
        """Let a scheduler count the step, where it has wrapped the optimizer's own `step`."""
        if "step" in self._optimizer.__dict__:
            self._optimizer.step()  # without gradients it changes nothing

    def _parts_of(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the pieces: most often the same memory in every step."""
        place = tuple(flat.data_ptr() for flat in gradients)
        if place != self._place:
            self._place = place
            self._parts = [gradients[p.flat][p.start : p.stop] for p in self._pieces]
        return self._parts

    def release(self) -> None:
        """Stop doing this optimizer's steps; the user's loop does them from now on."""
        self._state.release()


@torch.no_grad()
def step_together(
    updates: Sequence[HostUpdate],
    weights: Sequence[SharedWeights],
    gradients: Sequence[Tensor],
    used: Sequence[bool],
) -> None:
    """Do one step of each optimizer; all ranks have updated their elements when it returns.

    Args:
        updates: of optimizers that hold different parameters.
        weights: memory of the parameters, for each flat.
        gradients: mean gradients of each flat, [flat.numel]; only this rank's elements are read.
        used: for each parameter, whether any rank has a gradient for it.
    """
    comm = weights[0].comm
    for home in weights:
        home.check()
        home.bring_home()
    comm.barrier()  # a rank that reads weights until its own update finds the old ones
    for update in updates:
        update.step(gradients, used)
    for home in weights:
        home.hand_out()
    comm.barrier()  # no rank reads weights before all have written theirs
    for home in weights:
        # Autograd must see that a graph from before is stale.
        torch.autograd.graph.increment_version(home.parameters)
        home.remember()
    for update in updates:
        update.tell_scheduler()

"""The optimizer's step on the share of weights that a rank of the host owns.

    rank 0   update own elements of the weights ─► write them into the others' replicas ─┐
    rank 1   update own elements of the weights ─► write them into the others' replicas ─┴─ meet

Every element goes through the operations of the whole optimizer, so the bits are the same
(layout.py says where parameters may be cut). State lies in memory that all ranks share, once per
host: `optimizer.state` is whole on every rank at any time, as it would be without gradsync.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.core.torch_private import version
from gradsync.errors import ConfigError
from gradsync.sync.elementwise import PieceOptimizer, group_numbers, members_of
from gradsync.sync.shared_state import OwnedPiece, SharedState

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gradsync.sync.shared_memory import Flat


class SharedUpdate(PieceOptimizer):
    """One optimizer's steps on this rank's pieces; made on all ranks together.

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
        self.members = members_of(optimizer)
        groups = group_numbers(optimizer.param_groups)
        self._pieces: list[OwnedPiece] = []
        parameters: dict[int, Tensor] = {}
        for number, (flat, home) in enumerate(zip(flats, weights, strict=True)):
            for slot, parameter in zip(flat.slots, home.parameters, strict=True):
                if id(parameter) in groups:
                    parameters[slot.index] = parameter
            for piece in flat.pieces:
                if piece.index in parameters:
                    group = groups[id(parameters[piece.index])]
                    elements = home.memory[piece.offset : piece.offset + piece.numel]
                    self._pieces.append(OwnedPiece(piece, number, group, elements))
        super().__init__(
            *(type(optimizer), optimizer.defaults, optimizer.param_groups),
            [(piece.group, piece.tensor) for piece in self._pieces],
        )
        self._place: tuple[int, ...] = ()
        self._parts: list[Tensor] = []
        self._shared = SharedState(optimizer, self.state, self._pieces, flats, parameters)

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._user()
        assert optimizer is not None, "the caller of the step holds it"
        return optimizer

    def step_pieces(self, gradients: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Update this rank's elements.

        Args:
            gradients: mean gradients of each flat, [flat.numel]; only this rank's part is read.
            used: for each parameter, whether any rank has a gradient for it.
        """
        self._shared.prepare()
        parts = zip(self._pieces, self._parts_of(gradients), strict=True)
        self.step(
            self._optimizer.param_groups,
            ((p.tensor, part if used[p.piece.index] else None) for p, part in parts),
        )
        self._shared.show(used)
        # Let a scheduler count the step, where it has wrapped the optimizer's own `step`.
        if "step" in self._optimizer.__dict__:
            self._optimizer.step()  # without gradients it changes nothing

    def _parts_of(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the pieces: most often the same memory in every step."""
        place = tuple(flat.data_ptr() for flat in gradients)
        if place != self._place:
            self._place = place
            self._parts = [
                gradients[p.flat][p.piece.offset : p.piece.offset + p.piece.numel]
                for p in self._pieces
            ]
        return self._parts

    def release(self) -> None:
        """Stop doing this optimizer's steps; the user's loop does them from now on."""
        self._shared.release()


class SharedWeights:
    """Lays out the parameters of `flat` as their gradients are; all ranks make it together.

    Args:
        flat: the place of each parameter.
        parameters: all parameters by the indices of its slots; equal on all ranks.
        one_copy: whether all ranks of the host share one memory, in place of one replica each.

    Raises:
        SharedMemoryError: on all ranks, when there is too little memory.
    """

    def __init__(self, flat: Flat, parameters: Sequence[nn.Parameter], *, one_copy: bool) -> None:
        comm: SharedMemoryCommunicator = flat.comm
        self._flat, self._one_copy = flat, one_copy
        self.parameters = [parameters[slot.index] for slot in flat.slots]
        if one_copy:
            self.memory = comm.allocate_once(flat.numel, flat.dtype)
            self._others: list[Tensor] = []
        else:
            self.memory = comm.allocate(flat.numel, flat.dtype)
            parts = comm.parts_of(self.memory) or []
            comm.release(self.memory)  # it lives as long as this rank refers to it
            self._others = [part for rank, part in enumerate(parts) if rank != comm.rank]
        start = self.memory.data_ptr()
        self._starts = [start + slot.offset * self.memory.element_size() for slot in flat.slots]
        self._bytes: list[weakref.ref[Any]] = [weakref.ref(self.memory)] * len(flat.slots)
        """Owner of each parameter's memory, while anything refers to it."""
        if comm.rank == 0 or not one_copy:
            for slot, parameter in zip(flat.slots, self.parameters, strict=True):
                part = self.memory[slot.offset : slot.offset + slot.numel]
                part.copy_(parameter.detach().reshape(-1))
        comm.barrier()  # the values are there before any rank uses them
        for number, parameter in enumerate(self.parameters):
            parameter.data = self._home(number).view(parameter.shape)
        self.remember()

    def _home(self, number: int) -> Tensor:
        """A parameter's memory, [numel], as a separate storage: saving, copying or moving it must
        not include the other parameters."""
        slot, itemsize = self._flat.slots[number], self.memory.element_size()
        if not slot.numel:
            return self.memory[:0]
        whole = self.memory.view(torch.uint8).numpy()
        part = whole[slot.offset * itemsize : (slot.offset + slot.numel) * itemsize]
        self._bytes[number] = weakref.ref(part)
        return torch.frombuffer(part, dtype=self.memory.dtype)

    def why_not_now(self) -> str:
        """Reason why parameters cannot move back to shared memory, "" if they can, or are there."""
        for number in self._away():
            if not self.parameters[number].is_contiguous():
                return "a parameter has become discontiguous"
            if self._bytes[number]() is not None:
                return "a parameter's data was exchanged, and something still holds what it was"
        return ""

    def _away(self) -> list[int]:
        """Parameters whose `data` was replaced."""
        places = zip(self.parameters, self._starts, self._flat.slots, strict=True)
        return [
            number
            for number, (parameter, start, slot) in enumerate(places)
            if parameter.data_ptr() != start and slot.numel
        ]

    def hand_out(self) -> None:
        """Copy this rank's updated share into the other ranks' replicas."""
        mine = self._flat.mine
        for other in self._others:
            other[mine].copy_(self.memory[mine])

    def bring_home(self) -> None:
        """Copy values from a replaced `data` into shared memory, and point the parameter there."""
        for number in self._away():
            parameter = self.parameters[number]
            home = self._home(number).view(parameter.shape)
            home.copy_(parameter.detach())
            parameter.data = home

    def remember(self) -> None:
        """All ranks have updated."""
        self._versions = [version(p) for p in self.parameters] if self._one_copy else []

    def check(self) -> None:
        """Check, for one shared copy, that only gradsync has written to it.

        Every rank would have applied to it a change meant for its own copy: `weight.mul_(0.9)` on
        two ranks makes 0.81.

        Raises:
            ConfigError: it was written to.
        """
        if self._versions and self._versions != [version(p) for p in self.parameters]:
            raise ConfigError(
                "weights were changed in place between two steps, and all ranks of the host share "
                "one copy of them: replicate with weights='replicas'"
            )


def can_move(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether parameters may get new memory: dense, contiguous, and shared with no other tensor.

    Args:
        parameters: those that would move.
        others: all other tensors of the model (frozen parameters, buffers).
    """
    if any(
        p.layout != torch.strided or not p.is_contiguous() or type(p.data) is not torch.Tensor
        for p in parameters
    ):
        return False
    storages = [p.untyped_storage().data_ptr() for p in parameters if p.numel()]
    taken = {o.untyped_storage().data_ptr() for o in others if o.layout == torch.strided}
    return len(set(storages)) == len(storages) and not taken & set(storages)

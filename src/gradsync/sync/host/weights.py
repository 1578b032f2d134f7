"""Parameters in memory that the other ranks of the host can write."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.core.torch_private import version
from gradsync.errors import ConfigError
from gradsync.sync.host.flat import Flat

if TYPE_CHECKING:
    from torch import Tensor, nn


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
        self.comm = comm = flat.comm
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
                return "a parameter's data was exchanged, and somebody holds what it was"
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

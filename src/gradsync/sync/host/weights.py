"""Parameters in memory that the other ranks of the host can write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradsync.errors import ConfigError
from gradsync.sync.host.flat import Flat

if TYPE_CHECKING:
    from torch import Tensor, nn


class SharedWeights:
    """Lays the parameters of `flat` out as it lays out their gradients; all ranks make it together.

    Args:
        flat: where each parameter lies.
        parameters: what its slots' indices mean; their values are equal on all ranks.
        one_copy: all ranks of the host look at the same memory, in place of one replica each.

    Raises:
        SharedMemoryError: on all ranks: there is too little memory.
    """

    def __init__(self, flat: Flat, parameters: Sequence[nn.Parameter], *, one_copy: bool) -> None:
        comm = flat.comm
        self._flat, self._one_copy = flat, one_copy
        self.parameters = [parameters[slot.index] for slot in flat.slots]
        if one_copy:
            self.memory = comm.allocate_once(flat.numel, flat.dtype)
            self._others: list[Tensor] = []
        else:
            self.memory = comm.allocate(flat.numel, flat.dtype)
            parts = comm.parts_of(self.memory) or []
            self._others = [part for rank, part in enumerate(parts) if rank != comm.rank]
        self._homes = [
            self.memory[slot.offset : slot.offset + slot.numel].view(parameter.shape)
            for slot, parameter in zip(flat.slots, self.parameters, strict=True)
        ]
        if comm.rank == 0 or not one_copy:
            for parameter, home in zip(self.parameters, self._homes, strict=True):
                home.copy_(parameter.detach())
        comm.barrier()
        for parameter, home in zip(self.parameters, self._homes, strict=True):
            parameter.data = home
        self.remember()

    def hand_out(self) -> None:
        """This rank has updated its share: put it into the other ranks' replicas."""
        mine = self._flat.mine
        for other in self._others:
            other[mine].copy_(self.memory[mine])

    def bring_home(self) -> None:
        """Somebody may have set a parameter's `data`: what is in it moves to where it belongs."""
        for parameter, home in zip(self.parameters, self._homes, strict=True):
            if parameter.data_ptr() != home.data_ptr():
                home.copy_(parameter.detach())
                parameter.data = home

    def remember(self) -> None:
        """All ranks have updated."""
        self._versions = [p._version for p in self.parameters] if self._one_copy else []

    def check(self) -> None:
        """One copy: nobody else may have written.

        Every rank would have done to it what was meant for its own: `weight.mul_(0.9)` on two
        ranks makes 0.81.

        Raises:
            ConfigError: somebody has.
        """
        if self._versions and self._versions != [p._version for p in self.parameters]:
            raise ConfigError(
                "weights were changed in place between two steps, and all ranks of the host share "
                "one copy of them: replicate with weights='replicas'"
            )


def can_move(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether parameters may get new memory: dense, contiguous, and shared with no other tensor.

    Args:
        parameters: that would move.
        others: all other tensors of the model (frozen parameters, buffers).
    """
    import torch

    if any(
        p.layout != torch.strided or not p.is_contiguous() or type(p.data) is not torch.Tensor
        for p in parameters
    ):
        return False
    storages = [p.untyped_storage().data_ptr() for p in parameters if p.numel()]
    taken = {o.untyped_storage().data_ptr() for o in others if o.layout == torch.strided}
    return len(set(storages)) == len(storages) and not taken & set(storages)

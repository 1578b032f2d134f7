"""Memory that the ranks of a host share: gradients, weights, and the state of an optimizer.

    rank 0   update own elements of the weights ─► write them into the others' replicas ─┐
    rank 1   update own elements of the weights ─► write them into the others' replicas ─┴─ meet

For the places where parameters may be cut see layout.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.core.torch_private import storage_address, storage_uses, version
from gradsync.errors import ConfigError
from gradsync.sync.buckets import Bucket
from gradsync.sync.layout import (
    ALIGNMENT,
    Piece,
    blocks_of,
    pieces_of_blocks,
    runs_of,
    share_blocks,
)
from gradsync.sync.ownership.elementwise import PieceOptimizer, state_like
from gradsync.sync.shares import State

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Flat:
    """All `buckets` of one dtype, concatenated; their buffers move into shared memory."""

    def __init__(self, comm: SharedMemoryCommunicator, buckets: Sequence[Bucket]) -> None:
        self.comm = comm
        self.buckets = list(buckets)
        self.dtype = buckets[0].dtype
        *self.starts, self.numel = accumulate((b.plan.numel for b in buckets), initial=0)
        self.slots = [
            replace(slot, offset=slot.offset + start)
            for bucket, start in zip(buckets, self.starts, strict=True)
            for slot in bucket.plan.slots
        ]
        """Places of the parameters, in order."""
        blocks = share_blocks(blocks_of(self.slots), comm.world_size)[comm.rank]
        self.pieces, self.runs = pieces_of_blocks(blocks), list(runs_of(blocks))
        self.mine = slice(blocks[0].start, blocks[-1].stop) if blocks else slice(0, 0)
        """What this rank owns."""
        self.gradients: list[list[Tensor]] = []
        """Buffer number -> rank -> [numel]."""

    def ensure(self, count: int) -> None:
        """Allocate gradient buffers until each rank has `count`; all ranks call it.

        Raises:
            SharedMemoryError: on all ranks, if there is too little memory.
        """
        while len(self.gradients) < count:
            number = len(self.gradients)
            memory = self.comm.allocate(self.numel, self.dtype)
            parts = self.comm.parts_of(memory)
            assert parts is not None, "allocated just now"
            self.comm.release(memory)  # it lives as long as this rank refers to it
            self.gradients.append(parts)
            for bucket, start in zip(self.buckets, self.starts, strict=True):
                bucket.adopt(number, memory[start : start + bucket.plan.numel])


class SharedWeights:
    """Lays out the parameters of `flat` like their gradients; all ranks make it together.

    Args:
        flat: the place of each parameter.
        parameters: all parameters, indexed by its slots; equal on all ranks.
        one_copy: whether all ranks of the host share one memory instead of having replicas.
    """

    def __init__(self, flat: Flat, parameters: Sequence[nn.Parameter], *, one_copy: bool) -> None:
        comm, self._flat, self._one_copy = flat.comm, flat, one_copy
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
        if comm.rank == 0 or not one_copy:
            for slot, parameter in zip(flat.slots, self.parameters, strict=True):
                part = self.memory[slot.offset : slot.offset + slot.numel]
                part.copy_(parameter.detach().reshape(-1))
        comm.barrier()  # before any rank uses the values
        # Each gets a storage of its own, so that saving, copying or moving a parameter does not
        # include the others.
        everything, itemsize = self.memory.view(torch.uint8).numpy(), self.memory.element_size()
        for slot, parameter in zip(flat.slots, self.parameters, strict=True):
            home = self.memory[:0]
            if slot.numel:
                own = everything[slot.offset * itemsize : (slot.offset + slot.numel) * itemsize]
                home = torch.frombuffer(own, dtype=flat.dtype)
            parameter.data = home.view(parameter.shape)
        self.remember()

    def why_not_now(self) -> str:
        """Reason why this rank cannot update its share of the parameters, "" if it can."""
        places = zip(self.parameters, self._starts, strict=True)
        moved = [p for p, start in places if p.data_ptr() != start and p.numel()]
        return "a parameter's data was exchanged for other memory" if moved else ""

    def hand_out(self) -> None:
        """Copy this rank's updated share into the other ranks' replicas."""
        mine = self._flat.mine
        for other in self._others:
            other[mine].copy_(self.memory[mine])

    def remember(self) -> None:
        """Accept the weights, after all ranks have updated."""
        self._versions = [version(p) for p in self.parameters] if self._one_copy else []

    def check(self) -> None:
        """Raise ConfigError if something else has written to the one copy: each rank would have
        applied a change that was meant for its own. `weight.mul_(0.9)` on two ranks makes 0.81."""
        if self._versions and self._versions != [version(p) for p in self.parameters]:
            raise ConfigError(
                "weights were changed in place between two steps, and all ranks of the host share "
                "one copy of them: replicate with weights='replicas'"
            )


def can_move(parameter: nn.Parameter) -> bool:
    """Whether it may get new memory: dense, contiguous, and without other references, which would
    keep the old memory (`self.scale_now = scale.data`, an array, another process)."""
    if type(parameter) is not torch.nn.Parameter or parameter.layout != torch.strided:
        return False
    storage = parameter.untyped_storage()
    is_shared = parameter.is_cpu and storage.is_shared()  # other processes see it
    own_memory = storage.resizable()  # allocated by torch, not by an array
    alone = num_uses(parameter) == 1 and own_memory and not is_shared
    return alone and parameter.is_contiguous()


def num_uses(tensor: Tensor) -> int:
    """Number of tensors and arrays that share its memory, including the tensor itself."""
    return storage_uses(storage_address(tensor.untyped_storage())) - 1


@dataclass(slots=True, eq=False)
class _OwnedPiece:
    """A piece of one of the flats, its elements, [piece.numel], and their state in shared memory:
    [piece.numel], [], or None for a number that another rank writes."""

    piece: Piece
    flat: int
    tensor: Tensor
    homes: dict[str, Tensor | None]
    is_home: bool = False
    """Whether the inner optimizer's state is there already."""


class HostUpdate(PieceOptimizer):
    """One optimizer's steps on this rank's pieces of `flats` and `weights`, with state that the
    host's ranks hold once; they make it together.

    The user's `optimizer.state` holds views of the shared state in the parameters' shapes, whole on
    every rank, as it would be without gradsync. The inner optimizer holds views of this rank's
    pieces. Single numbers (`step`) are there too, written by the rank that has the parameter's
    first element.
    """

    def __init__(
        self, optimizer: Optimizer, flats: Sequence[Flat], weights: Sequence[SharedWeights]
    ) -> None:
        groups = {id(p): n for n, g in enumerate(optimizer.param_groups) for p in g["params"]}
        self._parameters: dict[int, Tensor] = {}
        self._whole: dict[int, State] = {}
        """The optimizer's parameters, and their whole state in shared memory, by index."""
        self._memory: list[Tensor] = []
        self._pieces: list[_OwnedPiece] = []
        for number, (flat, home) in enumerate(zip(flats, weights, strict=True)):
            pairs = zip(flat.slots, home.parameters, strict=True)
            own = {slot.index: p for slot, p in pairs if id(p) in groups}
            self._parameters |= own
            kept = state_like(optimizer, flat.dtype)
            likes = {index: kept[groups[id(p)]] for index, p in own.items()}
            self._make_room(flat.comm, own, likes)
            for piece in flat.pieces:
                if piece.index in own:
                    elements = home.memory[piece.offset : piece.offset + piece.numel]
                    homes: dict[str, Tensor | None] = {}
                    for name, whole in self._whole[piece.index].items():
                        if likes[piece.index][name].dim():
                            homes[name] = whole.view(-1)[piece.start : piece.stop]
                        else:
                            homes[name] = None if piece.start else whole
                    self._pieces.append(_OwnedPiece(piece, number, elements, homes))
        super().__init__(
            *(type(optimizer), optimizer.defaults, optimizer.param_groups),
            [(groups[id(self._parameters[p.piece.index])], p.tensor) for p in self._pieces],
        )
        self._hook = optimizer.register_state_dict_post_hook(_copies)
        self._place: tuple[int, ...] = ()
        self._parts: list[Tensor] = []
        self._shown: set[int] = set()
        # `optimizer.state` after the last step.
        self._seen: object = None
        self._values: list[Any] = []
        self._versions: list[int] = []

    def _make_room(
        self,
        comm: SharedMemoryCommunicator,
        parameters: Mapping[int, Tensor],
        likes: Mapping[int, Mapping[str, Tensor]],
    ) -> None:
        """Allocate the state of these parameters once per host; `likes` are examples of it."""
        lengths = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in parameters.values()]
        *firsts, numel = accumulate(lengths, initial=0)
        memory = {
            name: comm.allocate_once(numel if like.dim() else len(parameters), like.dtype)
            for name, like in {n: v for kept in likes.values() for n, v in kept.items()}.items()
        }
        for place, (index, parameter) in enumerate(parameters.items()):
            here = slice(firsts[place], firsts[place] + parameter.numel())
            self._whole[index] = {
                name: memory[name][here].view(parameter.shape)
                if like.dim()
                else memory[name][place]
                for name, like in likes[index].items()
            }
        self._memory += memory.values()

    def take_in(self, optimizer: Optimizer) -> None:
        """Before a step: take over state that was loaded since the last one. The ranks meet before
        they update.

        Raises:
            ConfigError: the state was changed in place, once per rank.
        """
        state = optimizer.state
        if self._seen is state and self._versions != list(map(version, self._memory)):
            raise ConfigError(
                "optimizer state was changed in place between two steps, and all ranks of the host "
                "share one copy of it: put new tensors in its place, or replicate with "
                "update='whole'"
            )
        values = [value for entry in state.values() for value in entry.values()]
        same = self._seen is state and len(values) == len(self._values)
        if same and all(map(operator.is_, values, self._values)):
            return
        for piece in self._pieces:
            whole = state.get(self._parameters[piece.piece.index], {})
            own: State = {}
            for name, home in piece.homes.items():
                if name in whole:
                    value = torch.as_tensor(whole[name]).detach()
                    if home is not None and home.dim():
                        value = value.reshape(-1)[piece.piece.start : piece.piece.stop]
                    own[name] = value.clone() if home is None else home.copy_(value)
            self.state.pop(piece.tensor, None)
            if own:
                self.state[piece.tensor] = own
            piece.is_home = own.keys() == piece.homes.keys()
        self._shown.clear()
        self._show(
            optimizer,
            [
                index
                for index, parameter in self._parameters.items()
                if state.get(parameter, {}).keys() >= self._whole[index].keys()
            ],
        )

    def step_pieces(
        self, optimizer: Optimizer, gradients: Sequence[Tensor], used: Sequence[bool]
    ) -> None:
        """Update this rank's elements, and put new state into shared memory and `optimizer.state`.

        Args:
            optimizer: the user's; its options are read at every step.
            gradients: mean gradients of each flat, [flat.numel]; only this rank's part is read.
            used: for each parameter, whether any rank has a gradient for it.
        """
        parts = zip(self._pieces, self._parts_of(gradients), strict=True)
        self.step(
            optimizer.param_groups,
            ((p.tensor, part if used[p.piece.index] else None) for p, part in parts),
        )
        for piece in self._pieces:
            if used[piece.piece.index] and not piece.is_home:
                state = self.state[piece.tensor]
                for name, home in piece.homes.items():
                    if home is not None:
                        state[name] = home.copy_(state[name])
                piece.is_home = True
        if len(self._shown) < len(self._parameters):
            self._show(optimizer, [i for i in self._parameters if used[i] and i not in self._shown])
        self._versions = list(map(version, self._memory))

    def _parts_of(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the pieces, usually in the same memory in every step."""
        place = tuple(flat.data_ptr() for flat in gradients)
        if place != self._place:
            self._place = place
            self._parts = [
                gradients[p.flat][p.piece.offset : p.piece.offset + p.piece.numel]
                for p in self._pieces
            ]
        return self._parts

    def _show(self, optimizer: Optimizer, indices: Sequence[int]) -> None:
        """Put the whole state of these parameters into `optimizer.state`, beside what the optimizer
        does not keep itself."""
        for index in indices:
            entry = {**optimizer.state.get(self._parameters[index], {}), **self._whole[index]}
            if entry:
                optimizer.state[self._parameters[index]] = entry
        self._shown.update(indices)
        self._seen = optimizer.state
        self._values = [value for entry in optimizer.state.values() for value in entry.values()]
        self._versions = list(map(version, self._memory))

    def give_back(self, optimizer: Optimizer) -> None:
        """Leave whole state of this rank's own in `optimizer.state`; nothing is sent."""
        self._hook.remove()
        for index in self._shown:
            entry = optimizer.state.get(self._parameters[index], {})
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[name] = value.clone()


def _copies(_: Optimizer, state_dict: State) -> State:
    """Copy the state, since another optimizer's `load_state_dict` would keep the same tensors."""
    state = {
        number: {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in entry.items()}
        for number, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}

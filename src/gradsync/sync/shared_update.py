"""The optimizer's step on the share of weights that one rank of the host owns.

    rank 0   update own elements of the weights ─► write them into the others' replicas ─┐
    rank 1   update own elements of the weights ─► write them into the others' replicas ─┴─ meet

Every element goes through the operations of the whole optimizer, so the bits are the same (for the
places where parameters may be cut see layout.py). State is in memory that all ranks share, once per
host: `optimizer.state` is always whole on every rank, as it would be without gradsync.

The user's `optimizer.state` holds views of the shared state in the parameters' shapes. The
inner optimizer over this rank's pieces holds views of those pieces. Single numbers (`step`) are
there too, written by the rank that has the parameter's first element.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradsync.comm.shared_memory.communicator import SharedMemoryCommunicator
from gradsync.core.torch_private import storage_address, storage_uses, version
from gradsync.errors import ConfigError
from gradsync.sync.buckets import Bucket
from gradsync.sync.elementwise import (
    PieceOptimizer,
    State,
    group_numbers,
    members_of,
    state_like,
)
from gradsync.sync.layout import (
    ALIGNMENT,
    Piece,
    blocks_of,
    pieces_of_blocks,
    runs_of,
    share_blocks,
)
from gradsync.sync.step_metadata import options

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Flat:
    """All buckets of one dtype, concatenated.

    Args:
        comm: the ranks of the host.
        buckets: all have the same dtype; their buffers move into shared memory.
    """

    def __init__(self, comm: SharedMemoryCommunicator, buckets: Sequence[Bucket]) -> None:
        self.comm = comm
        self.buckets = list(buckets)
        self.dtype = buckets[0].dtype
        self.starts, numel = [], 0
        for bucket in buckets:
            self.starts.append(numel)
            numel += bucket.plan.numel
        self.numel = numel
        self.slots = [
            replace(slot, offset=slot.offset + start)
            for bucket, start in zip(buckets, self.starts, strict=True)
            for slot in bucket.plan.slots
        ]
        """Places of the parameters, in order."""
        shares = share_blocks(blocks_of(self.slots), comm.world_size)
        self.blocks = shares[comm.rank]
        self.pieces = pieces_of_blocks(self.blocks)
        """Parts of parameters that this rank owns."""
        self.runs = list(runs_of(self.blocks))
        """Runs of this rank."""
        self.gradients: list[list[Tensor]] = []
        """Buffer number -> rank -> [numel]."""

    @property
    def mine(self) -> slice:
        """The elements that this rank owns."""
        return slice(self.runs[0].start, self.runs[-1].stop) if self.runs else slice(0, 0)

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


def flats_of(comm: SharedMemoryCommunicator, buckets: Sequence[Bucket]) -> list[Flat]:
    """One `Flat` per dtype, in order of first appearance."""
    by_dtype: dict[torch.dtype, list[Bucket]] = {}
    for bucket in buckets:
        by_dtype.setdefault(bucket.dtype, []).append(bucket)
    return [Flat(comm, group) for group in by_dtype.values()]


class SharedWeights:
    """Lays out the parameters of `flat` like their gradients; all ranks make it together.

    Args:
        flat: the place of each parameter.
        parameters: all parameters, indexed by its slots; equal on all ranks.
        one_copy: whether all ranks of the host share one memory instead of having replicas.

    Raises:
        SharedMemoryError: on all ranks, if there is too little memory.
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
        comm.barrier()  # before any rank uses the values
        for number, parameter in enumerate(self.parameters):
            parameter.data = self._home(number).view(parameter.shape)
        self.remember()

    def _home(self, number: int) -> Tensor:
        """A parameter's memory, [numel], as a separate storage, so that saving, copying or moving
        it does not include the other parameters."""
        slot, itemsize = self._flat.slots[number], self.memory.element_size()
        if not slot.numel:
            return self.memory[:0]
        whole = self.memory.view(torch.uint8).numpy()
        part = whole[slot.offset * itemsize : (slot.offset + slot.numel) * itemsize]
        self._bytes[number] = weakref.ref(part)
        return torch.frombuffer(part, dtype=self.memory.dtype)

    def why_not_now(self) -> str:
        """Reason why parameters cannot move back to shared memory, "" if they can or did."""
        for number in self._away():
            if not self.parameters[number].is_contiguous():
                return "a parameter has become discontiguous"
            if self._bytes[number]() is not None:
                return "a parameter's data was exchanged, and something still holds what it was"
            if num_uses(self.parameters[number]) != 1:
                return "a parameter's data was exchanged for memory that something else refers to"
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
        """Copy values from a replaced `data` into shared memory, and point the parameter to it."""
        for number in self._away():
            parameter = self.parameters[number]
            home = self._home(number).view(parameter.shape)
            home.copy_(parameter.detach())
            parameter.data = home

    def remember(self) -> None:
        """Accept the weights, after all ranks have updated."""
        self._versions = [version(p) for p in self.parameters] if self._one_copy else []

    def check(self) -> None:
        """Check, for one shared copy, that only gradsync has written to it.

        Otherwise every rank would have applied a change to it that was meant for a private copy:
        `weight.mul_(0.9)` on two ranks makes 0.81.

        Raises:
            ConfigError: something else has written to it.
        """
        if self._versions and self._versions != [version(p) for p in self.parameters]:
            raise ConfigError(
                "weights were changed in place between two steps, and all ranks of the host share "
                "one copy of them: replicate with weights='replicas'"
            )


def can_move(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether parameters may get new memory: dense, contiguous, and without other references, which
    would keep the old memory (`self.scale_now = scale.data`, an array, another process)."""
    return all(map(_can_move, parameters))


def _can_move(parameter: nn.Parameter) -> bool:
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
class OwnedPiece:
    """A piece: its elements, and its group in the optimizer."""

    piece: Piece
    flat: int
    """Index of its flat."""
    group: int
    """Index of the parameter group in the optimizer."""
    tensor: Tensor
    """The elements, [piece.numel]: a view of the weights."""
    state_is_shared: bool = False
    """Whether its optimizer state is in shared memory already."""


class _Place(NamedTuple):
    """Place of a parameter."""

    flat: int
    """Index of the flat buffer."""
    home: int
    """First element of its state; other optimizers' parameters take no memory there."""


class SharedState:
    """State of one optimizer; made on all ranks together.

    Args:
        optimizer: the user's optimizer.
        piece_state: `PieceOptimizer.state` of the pieces.
        pieces: the pieces of this rank.
        flats: the flat buffers of the parameters.
        parameters: the optimizer's parameters, by index.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        piece_state: dict[Any, State],
        pieces: Sequence[OwnedPiece],
        flats: Sequence[Flat],
        parameters: Mapping[int, Tensor],
    ) -> None:
        # Does not refer to the optimizer itself, so that deleting it frees its memory.
        self._user, self._piece_state = weakref.ref(optimizer), piece_state
        self._hook = optimizer.register_state_dict_post_hook(_copies)
        self._pieces, self._flats, self._parameters = pieces, flats, parameters
        self._comm = flats[0].comm
        self._places: dict[int, _Place] = {}
        self._sizes = [0] * len(flats)
        for number, flat in enumerate(flats):
            for slot in flat.slots:
                if slot.index in parameters:
                    home = self._sizes[number]
                    self._places[slot.index] = _Place(number, home)
                    self._sizes[number] += -(-slot.numel // ALIGNMENT) * ALIGNMENT
        self._memory: dict[tuple[int, str], Tensor] = {}
        """(flat, name) -> state of the parameters there, [see `_Place`]."""
        self._numbers: dict[str, Tensor] = {}
        """name -> numbers, [parameters]."""
        self._kept: dict[tuple[int, int], dict[str, Tensor]] = {}
        """(flat, parameter group) -> see `state_like`."""
        numbers = group_numbers(optimizer.param_groups)
        self._groups = {index: numbers[id(p)] for index, p in parameters.items()}
        self._settings: list[State] = []
        self._shown: set[int] = set()
        # `optimizer.state` at the last check.
        self._seen: object = None
        self._values: list[Any] = []
        self._versions: list[int] = []

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""
        optimizer = self._user()
        assert optimizer is not None, "the caller of the step holds it"
        return optimizer

    def prepare(self) -> None:
        """Take over state that was loaded or cleared, before a step; all ranks call it.

        Raises:
            ConfigError: it was changed in place, once per rank.
        """
        state = self.optimizer.state
        if self._seen is state and self._versions != self._versions_now():
            raise ConfigError(
                "optimizer state was changed in place between two steps, and all ranks of the host "
                "share one copy of it: put new tensors in its place, or replicate with "
                "update='whole'"
            )
        # Which names exist depends on options that are zero (momentum) or false (amsgrad).
        settings = [
            {
                n: bool(value)
                for n, value in options(group).items()
                if isinstance(value, int | float)
            }
            for group in self.optimizer.param_groups
        ]
        if settings != self._settings:
            self._settings = settings
            if self._make_room():
                self._shown.clear()
                for piece in self._pieces:
                    piece.state_is_shared = False
        if self._seen is not state or not same_objects(self._values, values_of(state)):
            self._take()

    def show(self, used: Sequence[bool]) -> None:
        """Put new state into shared memory and `optimizer.state`, after a step, before meeting."""
        for piece in self._pieces:
            if used[piece.piece.index] and not piece.state_is_shared:
                self._share(piece, self._piece_state[piece.tensor])
        if len(self._shown) < len(self._parameters):
            for index in self._parameters:
                if used[index] and index not in self._shown:
                    self._show(index)
            self._remember()
        self._versions = self._versions_now()

    def _remember(self) -> None:
        self._seen = self.optimizer.state
        self._values = values_of(self.optimizer.state)
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [version(home) for home in (*self._memory.values(), *self._numbers.values())]

    def release(self) -> None:
        """Give this rank a private copy of the state, which only this rank writes from then on."""
        self._hook.remove()
        for index in self._shown:
            entry = self.optimizer.state.get(self._parameters[index], {})
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[name] = value.clone()

    def _make_room(self) -> bool:
        """Allocate the state for these options, elements and numbers, once per host; returns
        whether the names of the state have changed."""
        before = {place: kept.keys() for place, kept in self._kept.items()}
        for number, flat in enumerate(self._flats):
            for group, kept in enumerate(state_like(self.optimizer, flat.dtype) or []):
                self._kept[number, group] = kept
                for name, like in kept.items():
                    if like.dim() and (number, name) not in self._memory:
                        memory = self._comm.allocate_once(self._sizes[number], like.dtype)
                        self._memory[number, name] = memory
                    elif not like.dim() and name not in self._numbers:
                        count = max(self._places, default=0) + 1
                        self._numbers[name] = self._comm.allocate_once(count, like.dtype)
        return before != {place: kept.keys() for place, kept in self._kept.items()}

    def _take(self) -> None:
        """Copy this rank's part of `optimizer.state` to its place."""
        state = self.optimizer.state
        for piece in self._pieces:
            whole = state.get(self._parameters[piece.piece.index])
            self._piece_state.pop(piece.tensor, None)
            piece.state_is_shared = False
            if whole:
                here = slice(piece.piece.start, piece.piece.stop)
                self._piece_state[piece.tensor] = {
                    name: value.detach().reshape(-1)[here]
                    if self._is_per_element(piece, name)
                    else value
                    for name, value in whole.items()
                }
                self._share(piece, self._piece_state[piece.tensor])
        self._comm.barrier()  # below it reads numbers that other ranks write
        self._shown.clear()
        for index, parameter in self._parameters.items():
            if state.get(parameter):
                self._show(index)
        self._remember()

    def _share(self, piece: OwnedPiece, state: State) -> None:
        """Move the state of a piece into shared memory."""
        for name, value in state.items():
            if name not in self._kept[piece.flat, piece.group] or not torch.is_tensor(value):
                continue  # not the optimizer's own, so do not change it
            if self._is_per_element(piece, name):
                start = piece.piece.start + self._places[piece.piece.index].home
                home = self._memory[piece.flat, name][start : start + piece.piece.numel]
            elif piece.piece.start == 0:
                home = self._numbers[name][piece.piece.index]
            else:
                state[name] = value.detach().clone()
                continue
            if home.data_ptr() != value.data_ptr():
                home.copy_(value)
            state[name] = home
        piece.state_is_shared = True

    def _is_per_element(self, piece: OwnedPiece, name: str) -> bool:
        """Whether the state has elements; with a parameter [] any state looks like a number."""
        like = self._kept[piece.flat, piece.group].get(name)
        return like is not None and like.dim() > 0

    def _show(self, index: int) -> None:
        """Put the whole state of one parameter into `optimizer.state`."""
        self._shown.add(index)
        parameter = self._parameters[index]
        place = self._places[index]
        kept = self._kept[place.flat, self._groups[index]]
        own = self.optimizer.state.get(parameter, {})
        entry: State = {name: value for name, value in own.items() if name not in kept}
        for name, like in kept.items():
            if like.dim():
                memory = self._memory[place.flat, name]
                part = memory[place.home : place.home + parameter.numel()]
                entry[name] = part.view(parameter.shape)
            else:
                entry[name] = self._numbers[name][index]
        if entry:
            self.optimizer.state[parameter] = entry


def values_of(state: Mapping[Any, State]) -> list[Any]:
    """All values in an `optimizer.state`, in its order."""
    return [value for entry in state.values() for value in entry.values()]


def same_objects(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether both contain identical objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _copies(_: Optimizer, state_dict: State) -> State:
    """Copy the state, since another optimizer's `load_state_dict` would keep the same tensors."""
    state = {
        number: {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in entry.items()}
        for number, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


class SharedUpdate(PieceOptimizer):
    """One optimizer's steps on this rank's pieces; all ranks make it together.

    Args:
        optimizer: the user's optimizer, elementwise; its options are read at every step.
        flats: flat buffers of the gradients.
        weights: memory of the parameters, for each of `flats`.
    """

    def __init__(
        self, optimizer: Optimizer, flats: Sequence[Flat], weights: Sequence[SharedWeights]
    ) -> None:
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

    def step_pieces(self, gradients: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Update this rank's elements.

        Args:
            gradients: mean gradients of each flat, [flat.numel]; only this rank's part is read.
            used: for each parameter, whether any rank has a gradient for it.
        """
        self._shared.prepare()
        parts = zip(self._pieces, self._parts_of(gradients), strict=True)
        self.step(
            self._shared.optimizer.param_groups,
            ((p.tensor, part if used[p.piece.index] else None) for p, part in parts),
        )
        self._shared.show(used)

    def tell_scheduler(self) -> None:
        """Let a scheduler count the step, if it has wrapped the optimizer's `step`."""
        if "step" in self._shared.optimizer.__dict__:
            self._shared.optimizer.step()  # without gradients it changes nothing

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

    def release(self) -> None:
        """Stop doing this optimizer's steps; the user's loop does them from now on."""
        self._shared.release()

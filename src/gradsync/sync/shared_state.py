"""Optimizer state in memory that all ranks of a host share: once per host, readable on all ranks.

`optimizer.state` of the user's optimizer holds views of it in the parameters' shapes; the inner
optimizer that updates this rank's pieces holds views of those pieces. Single numbers (`step`) lie
there too, written by the rank that has the parameter's first element.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradsync.core.torch_private import version
from gradsync.errors import ConfigError
from gradsync.sync.elementwise import State, group_numbers, state_like
from gradsync.sync.layout import ALIGNMENT, Piece
from gradsync.sync.optimizers import options

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from gradsync.sync.shared_memory import Flat


@dataclass(slots=True, eq=False)
class OwnedPiece:
    """A piece with its elements and its optimizer's group."""

    piece: Piece
    flat: int
    """Index of its flat."""
    group: int
    """Index of the optimizer's parameter group."""
    tensor: Tensor
    """The elements, [piece.numel]: a view of the weights."""
    state_is_shared: bool = False
    """Whether its optimizer state lies in shared memory already."""


class _Place(NamedTuple):
    """Place of a parameter."""

    flat: int
    """Index of the flat buffer."""
    home: int
    """First element of its state: parameters of other optimizers take no memory there."""


class SharedState:
    """State of one optimizer; made on all ranks together.

    Args:
        optimizer: the user's.
        piece_state: `PieceOptimizer.state` of the pieces.
        pieces: of this rank.
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
        # `optimizer.state` as it was at the last check.
        self._seen: object = None
        self._values: list[Any] = []
        self._versions: list[int] = []

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._user()
        assert optimizer is not None, "the caller of the step holds it"
        return optimizer

    def prepare(self) -> None:
        """Take over a state that was loaded or cleared, before a step; all ranks call it.

        Raises:
            ConfigError: it was changed in place, once per rank.
        """
        state = self._optimizer.state
        if self._seen is state and self._versions != self._versions_now():
            raise ConfigError(
                "optimizer state was changed in place between two steps, and all ranks of the host "
                "share one copy of it: put new tensors in its place, or replicate with "
                "update='whole'"
            )
        # The state's names depend on which options are zero (momentum) or false (amsgrad).
        settings = [
            {
                n: bool(value)
                for n, value in options(group).items()
                if isinstance(value, int | float)
            }
            for group in self._optimizer.param_groups
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
        """Put new state into shared memory and `optimizer.state`, between a step and meeting."""
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
        self._seen = self._optimizer.state
        self._values = values_of(self._optimizer.state)
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [version(home) for home in (*self._memory.values(), *self._numbers.values())]

    def release(self) -> None:
        """Give this rank a private copy of the state, which only this rank writes from then on."""
        self._hook.remove()
        for index in self._shown:
            entry = self._optimizer.state.get(self._parameters[index], {})
            for name, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[name] = value.clone()

    def _make_room(self) -> bool:
        """Allocate the state of these settings, elements and numbers, once per host; returns
        whether the names of the state have changed."""
        before = {place: kept.keys() for place, kept in self._kept.items()}
        for number, flat in enumerate(self._flats):
            for group, kept in enumerate(state_like(self._optimizer, flat.dtype) or []):
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
        """Copy this rank's part of `optimizer.state` to where it belongs."""
        state = self._optimizer.state
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
        self._comm.barrier()  # numbers that another rank writes are read below
        self._shown.clear()
        for index, parameter in self._parameters.items():
            if state.get(parameter):
                self._show(index)
        self._remember()

    def _share(self, piece: OwnedPiece, state: State) -> None:
        """Move the state of a piece into shared memory."""
        for name, value in state.items():
            if name not in self._kept[piece.flat, piece.group] or not torch.is_tensor(value):
                continue  # not the optimizer's own: left as it is
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
        """Whether the state has elements; for a parameter [] any state looks like a number."""
        like = self._kept[piece.flat, piece.group].get(name)
        return like is not None and like.dim() > 0

    def _show(self, index: int) -> None:
        """Put the whole state of one parameter into `optimizer.state`."""
        self._shown.add(index)
        parameter = self._parameters[index]
        place = self._places[index]
        kept = self._kept[place.flat, self._groups[index]]
        own = self._optimizer.state.get(parameter, {})
        entry: State = {name: value for name, value in own.items() if name not in kept}
        for name, like in kept.items():
            if like.dim():
                memory = self._memory[place.flat, name]
                part = memory[place.home : place.home + parameter.numel()]
                entry[name] = part.view(parameter.shape)
            else:
                entry[name] = self._numbers[name][index]
        if entry:
            self._optimizer.state[parameter] = entry


def values_of(state: Mapping[Any, State]) -> list[Any]:
    """All values in an `optimizer.state`, in its order."""
    return [value for entry in state.values() for value in entry.values()]


def same_objects(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether both hold identical objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _copies(_: Optimizer, state_dict: State) -> State:
    """Copy the state: another optimizer's `load_state_dict` would keep the same tensors."""
    state = {
        number: {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in entry.items()}
        for number, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}

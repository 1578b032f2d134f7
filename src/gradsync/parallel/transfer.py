"""Pieces of a split model between rank 0 and the ranks that hold them.

Rank 0 alone touches the run directory, so what is saved travels to it and what is loaded comes from
it, one rank's part at a time and tensor by tensor: nobody ever holds the whole model for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.pieces import join
from gradsync.checkpoint.reshard import Piece
from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, broadcast_json
from gradsync.parallel.groups import SplitGroups
from gradsync.parallel.partition import Part, cut_tensors

Described = list[tuple[str, list[int], str]]
"""Name, shape and dtype of tensors."""


def describe(tensors: Mapping[str, Tensor]) -> Described:
    """What must be known before they are received."""
    return [
        (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]


def collect(
    comm: Communicator, tensors: Mapping[str, Tensor], note: Any = None
) -> tuple[list[Any], Iterator[dict[str, Tensor]]]:
    """On rank 0 of `comm`: every rank's `note`, then its tensors, rank after rank.

    Rank 0 must take all of them before the ranks communicate otherwise. The other ranks send when
    they call it and get nothing. One `all_gather_json` first, then a message for each tensor.

    Args:
        comm: the ranks.
        tensors: this rank's.
        note: anything JSON can write.
    """
    told = all_gather_json(comm, [describe(tensors), note])
    if comm.rank:
        for tensor in tensors.values():
            if tensor.numel():
                comm.exchange([(tensor.detach().cpu().contiguous(), 0)], []).wait()
        return [], iter(())
    notes = [one for _, one in told]
    return notes, _received(comm, dict(tensors), [described for described, _ in told])


def _received(
    comm: Communicator, own: dict[str, Tensor], described: Sequence[Described]
) -> Iterator[dict[str, Tensor]]:
    yield own
    for rank in range(1, comm.world_size):
        told = described[rank]
        yield {name: _receive(comm, rank, shape, dtype) for name, shape, dtype in told}


def _receive(comm: Communicator, source: int, shape: list[int], dtype: str) -> Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if tensor.numel():
        comm.exchange([], [(tensor, source)]).wait()
    return tensor


def distribute(
    comm: Communicator, parts: Sequence[Part], whole: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """This rank's pieces of whole tensors that rank 0 has.

    Args:
        comm: all ranks.
        parts: each rank's.
        whole: by name, "…/PARAMETER"; on rank 0, the others give {}.

    Returns:
        on the CPU; a tensor that is not the parameter's shape comes whole.
    """
    described: Described = broadcast_json(comm, describe(whole))
    dtypes = {name: dtype for name, _, dtype in described}
    shapes = [(name, tuple(shape)) for name, shape, _ in described]
    if comm.rank:
        wanted = cut_tensors(parts[comm.rank].pieces(), shapes)
        return {
            name: _receive(comm, 0, list(piece.shape), dtypes[name])
            for name, piece in wanted.items()
        }
    for rank in range(1, comm.world_size):
        for name, piece in cut_tensors(parts[rank].pieces(), shapes).items():
            if piece.numel:
                comm.exchange([(whole[name][piece.slices].contiguous(), rank)], []).wait()
    own = cut_tensors(parts[0].pieces(), shapes)
    return {name: whole[name][piece.slices].contiguous() for name, piece in own.items()}


def join_weights(
    part: Part, groups: SplitGroups, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Whole weights in the whole model's order on rank 0, {} elsewhere; all ranks call it."""
    if part.place.data:
        return {}
    owned = part.owned()
    mine = {name: parameters[name].detach() for name in owned}
    notes, parts = collect(groups.model, mine, {name: list(p.start) for name, p in owned.items()})
    shapes = {weight.name: weight.shape for weight in part.weights}
    saved: dict[str, list[tuple[Piece, Tensor]]] = {name: [] for name in shapes}
    for starts, tensors in zip(notes, parts, strict=False):
        for name, tensor in tensors.items():
            start, shape = tuple(starts[name]), tuple(tensor.shape)
            piece = Piece(whole=shapes[name], start=start, shape=shape)
            saved[name].append((piece, tensor))
    if groups.model.rank:
        return {}
    return {name: join(name, pieces) for name, pieces in saved.items()}

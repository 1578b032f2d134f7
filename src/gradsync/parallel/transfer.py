"""Pieces of a split model, or of sharded state, between rank 0 and the ranks that hold them.

Rank 0 alone touches the run directory, so what is saved travels to it and what is loaded comes from
it, tensor by tensor: to save, rank 0 has two of the others' tensors at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.pieces import Piece, join
from gradsync.checkpoint.tensor_file import ArrivingTensors, file_order
from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, broadcast_json
from gradsync.parallel.layout import Part, cut_tensors

Described = list[tuple[str, list[int], str]]
"""Name, shape and dtype of tensors."""


def describe(tensors: Mapping[str, Tensor]) -> Described:
    """Header that must be known before tensors are received."""
    return [
        (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]


def collect(
    comm: Communicator, tensors: Mapping[str, Tensor], note: Any = None
) -> tuple[list[Any], Iterator[Mapping[str, Tensor]]]:
    """On rank 0 of `comm`: every rank's `note`, then its tensors, rank after rank.

    Rank 0 must take all of them, in `file_order`, before the ranks communicate otherwise. The other
    ranks send when they call it and get nothing. One `all_gather_json` first, then a message for
    each tensor, when rank 0 takes it.

    Args:
        comm: the ranks.
        tensors: this rank's.
        note: anything JSON can write.
    """
    told = all_gather_json(comm, [describe(tensors), note])
    if comm.rank:
        for name in file_order(tensors):
            tensor = tensors[name]
            if tensor.numel():
                comm.exchange([(tensor.detach().cpu().contiguous(), 0)], []).wait()
        return [], iter(())
    notes = [one for _, one in told]
    return notes, _received(comm, dict(tensors), [described for described, _ in told])


def _received(
    comm: Communicator, own: dict[str, Tensor], described: Sequence[Described]
) -> Iterator[Mapping[str, Tensor]]:
    yield own
    for rank in range(1, comm.world_size):
        yield ArrivingTensors(layout_of(described[rank]), partial(_receive_like, comm, rank))


def layout_of(described: Described) -> dict[str, Tensor]:
    """Tensors without data."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, shape, dtype in described
    }


def _receive_like(comm: Communicator, source: int, like: Tensor) -> Tensor:
    return _receive(comm, source, list(like.shape), like.dtype)


def _receive(comm: Communicator, source: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
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
    dtypes = {name: getattr(torch, dtype) for name, _, dtype in described}
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


def hand_out(
    comm: Communicator, whole: Mapping[str, Tensor], runs: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """Runs of elements of whole tensors that rank 0 has, to each rank its own; all ranks call it.

    Rank 0 asks `whole` for one tensor after the other.

    Args:
        comm: all ranks.
        whole: by name; on rank 0, of the others only shapes and dtypes count.
        runs: [begin, end) of the flattened tensor, for each that this rank wants.

    Returns:
        flat, on the CPU, sharing memory with nothing.
    """
    wanted: list[dict[str, list[int]]] = all_gather_json(comm, runs)
    found = {}
    for name in whole:
        if comm.rank:
            if name in runs:
                begin, end = runs[name]
                found[name] = _receive(comm, 0, [end - begin], whole[name].dtype)
            continue
        flat = whole[name].reshape(-1)
        for rank in range(1, comm.world_size):
            begin, end = wanted[rank].get(name, (0, 0))
            if begin < end:
                comm.exchange([(flat[begin:end].contiguous(), rank)], []).wait()
        if name in runs:
            begin, end = runs[name]
            found[name] = flat[begin:end].clone()
    return found


def join_weights(
    part: Part, replica: Communicator, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Whole weights in the whole model's order on rank 0, {} elsewhere; all ranks call it, with the
    communicator of their replica."""
    if part.place.data:
        return {}
    owned = part.owned()
    mine = {name: parameters[name].detach() for name in owned}
    notes, parts = collect(replica, mine, {name: list(p.start) for name, p in owned.items()})
    shapes = {weight.name: weight.shape for weight in part.weights}
    saved: dict[str, list[tuple[Piece, Tensor]]] = {name: [] for name in shapes}
    for starts, tensors in zip(notes, parts, strict=False):
        for name, tensor in tensors.items():
            start, shape = tuple(starts[name]), tuple(tensor.shape)
            piece = Piece(whole=shapes[name], start=start, shape=shape)
            saved[name].append((piece, tensor))
    if replica.rank:
        return {}
    return {name: join(name, pieces) for name, pieces in saved.items()}

"""Pieces of a split model, or of sharded state, between rank 0 and the ranks that hold them.

Rank 0 alone accesses the run directory: saved tensors travel to it and loaded ones come from it,
one by one. While saving, rank 0 holds two of the others' tensors at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradsync.checkpoint.tensor_file import ArrivingTensors, file_order
from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json, broadcast_json
from gradsync.commands.parallel.layout import ModelPart, cut_tensors

Described = list[tuple[str, list[int], str]]
"""Name, shape and dtype of tensors."""


def describe(tensors: Mapping[str, Tensor]) -> Described:
    """Headers, which must be known before tensors are received."""
    return [
        (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]


def collect(
    comm: Communicator, tensors: Mapping[str, Tensor], note: Any = None
) -> tuple[list[Any], Iterator[Mapping[str, Tensor]]]:
    """On rank 0 of `comm`: every rank's `note`, then its tensors, rank after rank.

    Rank 0 must take all of them, in `file_order`, before the ranks communicate otherwise. The other
    ranks send during the call and get nothing. One `all_gather_json`, then a message per tensor
    when rank 0 takes it. `note` is any value that JSON can write.
    """
    told = all_gather_json(comm, [describe(tensors), note])
    if comm.rank:
        for name in file_order(tensors):
            tensor = tensors[name]
            if tensor.numel():
                comm.exchange([(tensor.detach().cpu().contiguous(), 0)], []).wait()
        return [], iter(())
    theirs = (
        ArrivingTensors(
            layout_of(told[rank][0]),
            lambda like, rank=rank: _receive(comm, rank, torch.empty_like(like, device="cpu")),
        )
        for rank in range(1, comm.world_size)
    )
    return [one for _, one in told], chain([dict(tensors)], theirs)


def layout_of(described: Described) -> dict[str, Tensor]:
    """Tensors without data."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, shape, dtype in described
    }


def _receive(comm: Communicator, source: int, tensor: Tensor) -> Tensor:
    if tensor.numel():
        comm.exchange([], [(tensor, source)]).wait()
    return tensor


def distribute(
    comm: Communicator, part: ModelPart, whole: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The pieces that `part` needs of rank 0's whole tensors, by name "…/PARAMETER"; the other
    ranks pass {}. A tensor without its parameter's shape comes whole."""
    layout = layout_of(broadcast_json(comm, describe(whole)))
    shapes = ((name, tuple(tensor.shape)) for name, tensor in layout.items())
    wanted = cut_tensors(part.pieces(), shapes)
    spans = {name: [(s.start, s.stop) for s in piece.slices] for name, piece in wanted.items()}
    return hand_out(comm, whole or layout, spans)


def hand_out(
    comm: Communicator, whole: Mapping[str, Tensor], wanted: Mapping[str, Sequence[tuple[int, int]]]
) -> dict[str, Tensor]:
    """Send each rank what it wants of rank 0's tensors, as [begin, end) in each dimension, or as
    one [begin, end) of the flattened tensor; all ranks call it, and of the other ranks' `whole`
    only shapes and dtypes count.

    The returned tensors are on the CPU and share memory with no other tensor.
    """
    told: list[Mapping[str, Any]] = all_gather_json(comm, wanted)
    found = {}
    for name, tensor in whole.items():
        if comm.rank:
            if name in wanted:
                shape = [end - begin for begin, end in wanted[name]]
                found[name] = _receive(comm, 0, torch.empty(shape, dtype=tensor.dtype))
            continue
        for rank, spans in enumerate(told):
            if name in spans:
                run = spans[name]
                source = tensor.reshape(-1) if len(run) == 1 else tensor
                piece = source[tuple(slice(*span) for span in run)]
                if not rank:
                    found[name] = piece.clone()
                elif piece.numel():
                    comm.exchange([(piece.contiguous(), rank)], []).wait()
    return found

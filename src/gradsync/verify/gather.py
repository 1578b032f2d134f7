"""Tensors of all ranks on every rank, for the moment after a difference was found."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_json


def gather_tensors(
    comm: Communicator, tensors: Mapping[str, Tensor | None]
) -> list[dict[str, Tensor]]:
    """Every rank's named CPU tensors, in rank order; all ranks call it with the same names.

    A tensor that is None on a rank is left out of that rank's dict. Shapes first, as JSON, then one
    all-gather per name over the whole group: uint8 [ranks x bytes], overlapping nothing.
    """
    described = all_gather_json(
        comm,
        {
            name: None if t is None else [list(t.shape), str(t.dtype).removeprefix("torch.")]
            for name, t in tensors.items()
        },
    )
    found: list[dict[str, Tensor]] = [{} for _ in described]
    for name in sorted(tensors):
        have = [rank for rank, names in enumerate(described) if names[name] is not None]
        if not have:
            continue
        shape, dtype_name = described[have[0]][name]
        dtype = getattr(torch, dtype_name)
        tensor = tensors[name]
        mine = torch.zeros(shape, dtype=dtype) if tensor is None else tensor.contiguous()
        flat = mine.reshape(-1).view(torch.uint8)
        output = torch.empty(comm.world_size * len(flat), dtype=torch.uint8)
        comm.all_gather(output, flat).wait()
        parts = output.view(comm.world_size, -1)
        for rank in have:
            found[rank][name] = parts[rank].clone().view(dtype).view(shape)
    return found
